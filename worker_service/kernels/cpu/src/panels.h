// The packed form of a weight matrix W [n, k]: panels of kPanelWidth outputs.
//
// float32: panel p holds W[p * width + lane, column] at [column][lane], lanes past n are 0.
// int8: for each group of columns, `width` float32 scales, then the int8 values by pairs of
// columns, [column / 2][lane][column % 2], a group's columns padded with zeros to whole steps; the
// weight is value * scale. A panel is one stream that is read once, in order.
#pragma once

#include "parallel.h"

namespace TWK_NAMESPACE {

constexpr int64_t kStepColumns = 4;  // of int8, two pairs: what one turn of the tile's loop takes

struct Panels {
  explicit Panels(const TwkPacked& packed)
      : data(static_cast<const char*>(packed.data)),
        n(packed.n),
        k(packed.k),
        quantized(packed.kind == TWK_I8),
        group(quantized ? packed.group : packed.k),
        groups(ceil_div(packed.k, group > 0 ? group : 1)),
        count(ceil_div(packed.n, kPanelWidth)),
        kept_k((groups - 1) * kept(group) + kept(group_length(groups - 1))),
        bytes(quantized ? groups * kPanelWidth * 4 + kept_k * kPanelWidth
                        : packed.k * kPanelWidth * 4) {}

  const char* panel(int64_t index) const { return data + index * bytes; }
  // Where a group's scales start within its int8 panel; its values follow them.
  const char* scales(int64_t index, int64_t which) const {
    return panel(index) + which * (kPanelWidth * 4 + kept(group) * kPanelWidth);
  }
  // Where an int8 value lies among its group's.
  static int64_t value_at(int64_t column, int64_t lane) {
    return (column / 2 * kPanelWidth + lane) * 2 + column % 2;
  }
  int64_t group_length(int64_t which) const { return smaller(group, k - which * group); }
  int64_t lanes(int64_t index) const { return smaller(kPanelWidth, n - index * kPanelWidth); }
  // How many columns are stored for `columns` of int8.
  static int64_t kept(int64_t columns) { return ceil_div(columns, kStepColumns) * kStepColumns; }

  const char* data;
  int64_t n, k;
  bool quantized;
  int64_t group, groups, count;
  int64_t kept_k;  // of int8, over all groups
  int64_t bytes;   // of one panel
};

}  // namespace TWK_NAMESPACE
