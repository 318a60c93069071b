// A linear layer as tasks that do not depend on each other: see linear.cpp.
#pragma once

#include "linear_int8.h"

namespace TWK_NAMESPACE {

// Memory that a task fetches into the second-level cache while it computes, in float32 and with
// more than one tile of rows: kOtherBytes from each address, one address for kOtherSteps of k.
constexpr int kOtherBytes = 512, kOtherSteps = 4;
struct Ahead {
  static constexpr int64_t kMost = 1024;
  const char* chunks[kMost + 256];  // those past `count` are read, and must be addresses
  int64_t count;
};

// y = x W^T (+ bias). Each task in [0, count) writes its own part of y, on any thread.
struct LinearJob {
  LinearJob(TwkContext* context, const TwkLinearCall& linear);
  void run(int64_t task, const Ahead* ahead = nullptr) const;

  const TwkLinearCall& call;
  const Panels panels;
  QuantizedRows quantized{};  // x as int8 panels want it
  int64_t chunks = 0, group = 1, count = 0;
};

}  // namespace TWK_NAMESPACE
