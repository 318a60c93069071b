// The packed form of a weight matrix W [n, k]: panels of kPanelWidth outputs.
//
// float32: panel p holds W[p * width + lane, column] at [column][lane], lanes past n are 0.
// int8: for each group of columns, `width` float32 scales, then [column][lane] int8 values; the
// weight is value * scale. A panel is one stream that is read once, in order.
#pragma once

#include "parallel.h"

namespace TWK_NAMESPACE {

struct Panels {
  explicit Panels(const TwkPacked& packed)
      : data(static_cast<const char*>(packed.data)),
        n(packed.n),
        k(packed.k),
        quantized(packed.kind == TWK_I8),
        group(quantized ? packed.group : packed.k),
        groups(ceil_div(packed.k, group > 0 ? group : 1)),
        count(ceil_div(packed.n, kPanelWidth)),
        bytes(quantized ? groups * kPanelWidth * 4 + packed.k * kPanelWidth
                        : packed.k * kPanelWidth * 4) {}

  const char* panel(int64_t index) const { return data + index * bytes; }
  // Where a group's scales start within its int8 panel; its values follow them.
  const char* scales(int64_t index, int64_t which) const {
    return panel(index) + which * (kPanelWidth * 4 + group * kPanelWidth);
  }
  int64_t group_length(int64_t which) const { return smaller(group, k - which * group); }
  int64_t lanes(int64_t index) const { return smaller(kPanelWidth, n - index * kPanelWidth); }

  const char* data;
  int64_t n, k;
  bool quantized;
  int64_t group, groups, count, bytes;
};

}  // namespace TWK_NAMESPACE
