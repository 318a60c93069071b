// Linear layers with int8 weights: see linear_int8.cpp.
#pragma once

#include "pair_dot.h"

namespace TWK_NAMESPACE {

// Rows of activations: `values` [rows][kept_k], padded as the panels' columns are, and a scale for
// each row and group, [rows][groups]; the activation is value * scale.
struct QuantizedRows {
  const int16_t* values;
  const float* scales;
};

// x [rows, k] for these panels, in the context's scratch memory until the next such call.
QuantizedRows quantize_rows(TwkContext* context, const Panels& panels, const float* x,
                            int64_t x_stride, int64_t rows);

// One panel's outputs for `rows` rows: y[row, lane] for all kPanelWidth lanes.
void int8_block(const Panels& panels, int64_t index, const float* bias, QuantizedRows x,
                int64_t rows, float* y, int64_t y_stride);

}  // namespace TWK_NAMESPACE
