// A linear layer as tasks that do not depend on each other: see linear.cpp.
#pragma once

#include "linear_int8.h"

namespace TWK_NAMESPACE {

// y = x W^T (+ bias). Each task in [0, count) writes its own part of y, on any thread.
struct LinearJob {
  LinearJob(TwkContext* context, const TwkLinearCall& linear);
  void run(int64_t task) const;

  const TwkLinearCall& call;
  const Panels panels;
  QuantizedRows quantized{};  // x as int8 panels want it
  int64_t chunks = 0, group = 1, count = 0;
};

}  // namespace TWK_NAMESPACE
