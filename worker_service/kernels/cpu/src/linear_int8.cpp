// y = x W^T (+ bias) for W in int8, summed in integers.
//
// A row of x is quantized symmetrically to int16, with a scale per group of columns as the weights
// have. Its error is a 2^-16th of the group's largest magnitude, two hundred times less than that
// of the weights. Two products and their sum are then one instruction, for twice as many columns as
// float32 has in a vector, and one instruction widens the weights instead of two.
//
// Batch invariance: a row is quantized by itself. A group's products are summed in integers, which
// no order can change; then the groups are added up in order, each by one fused multiply-add of its
// sum and the product of its two scales.
#include "linear_int8.h"

#include "kernels.h"

namespace TWK_NAMESPACE {
namespace {

constexpr float kLargest = 32767.0f;
// Below this magnitude the inverse of the scale would overflow: such a group counts as zeros.
constexpr float kSmallest = 1e-30f;
constexpr int64_t kFetchAhead = 4096;

void quantize_group(const float* x, int64_t length, int16_t* out, float* scale) {
  Vec magnitudes = zero(), poison = zero();
  const int64_t whole = length / kWidth * kWidth;
  for (int64_t i = 0; i < whole; i += kWidth) {
    const Vec v = load(x + i);
    magnitudes = max(max(v, zero() - v), magnitudes);
    poison = fma(v, zero(), poison);
  }
  float magnitude = largest(magnitudes), poisoned = sum(poison);
  for (int64_t i = whole; i < length; ++i) {
    const float size = __builtin_fabsf(x[i]);
    magnitude = size > magnitude ? size : magnitude;
    poisoned += x[i] * 0.0f;
  }
  // An infinity or NaN makes the group's scale NaN, so that it is seen in the outputs.
  *scale = magnitude / kLargest + poisoned;
  const Vec factor = set(magnitude >= kSmallest ? kLargest / magnitude : 0.0f);
  for (int64_t i = 0; i < whole; i += kWidth) store_i16(out + i, load(x + i) * factor);
  if (whole == length) return;
  float rest[kWidth] = {};
  int16_t stored[kWidth];
  memcpy(rest, x + whole, static_cast<size_t>(length - whole) * sizeof(float));
  store_i16(stored, load(rest) * factor);
  memcpy(out + whole, stored, static_cast<size_t>(Panels::kept(length) - whole) * sizeof(int16_t));
}

// What one pass of a tile reads and writes: one group of columns.
struct Pass {
  const int8_t* weights;  // [steps][2][kPanelWidth][2]
  const float* scales;    // [kPanelWidth]
  const int16_t* x;
  int64_t x_stride;
  const float* x_scales;
  int64_t x_scales_stride;
  int64_t steps;  // of kStepColumns
  float* y;
  int64_t y_stride;
  bool first;         // start at 0 instead of at y
  const float* bias;  // added at the end, or null
  int64_t fetch;      // how many bytes ahead lie the weights that are needed next
};

template <int kRows, bool kFetch>
TWK_KERNEL void tile(const Pass& pass) {
  constexpr int kStepBytes = kPanelWidth * kStepColumns;
  Ints sums[kRows][kPanelVectors];
  TWK_UNROLL for (int r = 0; r < kRows; ++r) {
    TWK_UNROLL for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = no_sums();
  }
  const int8_t* weights = pass.weights;
  const int16_t* x = pass.x;
  const int64_t stride = pass.x_stride, ahead = pass.fetch;
  for (int64_t steps = pass.steps; steps > 0; --steps) {
    if (kFetch) {
      TWK_UNROLL for (int line = 0; line < kStepBytes; line += 64) {
        __builtin_prefetch(weights + ahead + line);
      }
    }
    TWK_UNROLL for (int column = 0; column < kStepColumns; column += 2) {
      Pairs w[kPanelVectors];
      TWK_UNROLL for (int v = 0; v < kPanelVectors; ++v) {
        w[v] = load_pairs(weights + column * kPanelWidth + v * kWidth * 2);
      }
      TWK_UNROLL for (int r = 0; r < kRows; ++r) {
        const Pairs value = load_pair(x + r * stride + column);
        TWK_UNROLL for (int v = 0; v < kPanelVectors; ++v) {
          sums[r][v] = dot(value, w[v], sums[r][v]);
          keep(sums[r][v]);
        }
      }
    }
    weights += kStepBytes;
    x += kStepColumns;
  }
  TWK_UNROLL for (int r = 0; r < kRows; ++r) {
    float* y = pass.y + r * pass.y_stride;
    const Vec x_scale = set(pass.x_scales[r * pass.x_scales_stride]);
    TWK_UNROLL for (int v = 0; v < kPanelVectors; ++v) {
      Vec sum = fma(to_floats(sums[r][v]), x_scale * load(pass.scales + v * kWidth),
                    pass.first ? zero() : load(y + v * kWidth));
      if (pass.bias != nullptr) sum = sum + load(pass.bias + v * kWidth);
      store(y + v * kWidth, sum);
    }
  }
}

template <bool kFetch>
void tile_of(int64_t rows, const Pass& pass) {
  with_rows(rows, [&](auto count) { tile<decltype(count)::kRows, kFetch>(pass); });
}

}  // namespace

QuantizedRows quantize_rows(TwkContext* context, const Panels& panels, const float* x,
                            int64_t x_stride, int64_t rows) {
  int16_t* values = static_cast<int16_t*>(
      twk::scratch(context, twk::Use::kQuantized, rows * panels.kept_k * 2));
  float* scales = static_cast<float*>(
      twk::scratch(context, twk::Use::kScales, rows * panels.groups * 4));
  parallel_rows(context, rows, panels.k, [&](int64_t row) {
    for (int64_t which = 0; which < panels.groups; ++which) {
      quantize_group(x + row * x_stride + which * panels.group, panels.group_length(which),
                     values + row * panels.kept_k + which * Panels::kept(panels.group),
                     scales + row * panels.groups + which);
    }
  });
  return {values, scales};
}

void int8_block(const Panels& panels, int64_t index, const float* bias, QuantizedRows x,
                int64_t rows, float* y, int64_t y_stride) {
  const int64_t tiles = ceil_div(rows, kTileRows);
  for (int64_t group = 0; group < panels.groups; ++group) {
    const float* scales = reinterpret_cast<const float*>(panels.scales(index, group));
    const int64_t length = Panels::kept(panels.group_length(group));
    for (int64_t which = 0; which < tiles; ++which) {
      const int64_t begin = tile_begin(rows, tiles, which);
      const Pass pass{reinterpret_cast<const int8_t*>(scales + kPanelWidth),
                      scales,
                      x.values + begin * panels.kept_k + group * Panels::kept(panels.group),
                      panels.kept_k,
                      x.scales + begin * panels.groups + group,
                      panels.groups,
                      length / kStepColumns,
                      y + begin * y_stride,
                      y_stride,
                      group == 0,
                      group + 1 == panels.groups ? bias : nullptr,
                      tiles == 1 ? kFetchAhead : length * kPanelWidth};
      const int64_t count = tile_begin(rows, tiles, which + 1) - begin;
      if (which == 0) {
        tile_of<true>(count, pass);
      } else {
        tile_of<false>(count, pass);
      }
    }
  }
}

}  // namespace TWK_NAMESPACE
