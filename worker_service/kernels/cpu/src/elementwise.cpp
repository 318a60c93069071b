// Norm and activation: each row by itself, its reductions in one order that only
// the row's width decides.
#include "exp.h"
#include "kernels.h"
#include "parallel.h"

namespace TWK_NAMESPACE {
namespace {

constexpr int kChains = 4;

TWK_INLINE Vec add_all(const Vec (&chains)[kChains]) {
  return (chains[0] + chains[1]) + (chains[2] + chains[3]);
}

float sum_of_squares(const float* x, int64_t width) {
  Vec chains[kChains];
  TWK_UNROLL for (int c = 0; c < kChains; ++c) chains[c] = zero();
  int64_t i = 0;
  for (; i + kChains * kWidth <= width; i += kChains * kWidth) {
    TWK_UNROLL for (int c = 0; c < kChains; ++c) {
      const Vec v = load(x + i + c * kWidth);
      chains[c] = fma(v, v, chains[c]);
    }
  }
  float total = sum(add_all(chains));
  for (; i < width; ++i) total += x[i] * x[i];
  return total;
}

TWK_INLINE Vec silu(Vec gate) {
  return gate / (set(1.0f) + exp_clamped(zero() - gate));
}

// A vector of the row's last `count` < kWidth floats; the other lanes are `fill`.
TWK_INLINE Vec load_part(const float* x, int64_t count, float fill) {
  float lanes[kWidth];
  for (int i = 0; i < kWidth; ++i) lanes[i] = i < count ? x[i] : fill;
  return load(lanes);
}

TWK_INLINE void store_part(float* out, int64_t count, Vec v) {
  float lanes[kWidth];
  store(lanes, v);
  for (int64_t i = 0; i < count; ++i) out[i] = lanes[i];
}

void silu_row(const float* gate, const float* up, int64_t width, float* out) {
  int64_t i = 0;
  for (; i + kWidth <= width; i += kWidth) store(out + i, silu(load(gate + i)) * load(up + i));
  if (i < width) {
    const int64_t rest = width - i;
    store_part(out + i, rest, silu(load_part(gate + i, rest, 0)) * load_part(up + i, rest, 0));
  }
}

}  // namespace

void normalize(const float* x, const float* weight, float epsilon, int64_t width, float* out) {
  const float scale =
      1.0f / square_root(sum_of_squares(x, width) / static_cast<float>(width) + epsilon);
  const Vec scales = set(scale);
  int64_t i = 0;
  for (; i + kWidth <= width; i += kWidth) {
    store(out + i, (load(x + i) * scales) * load(weight + i));
  }
  for (; i < width; ++i) out[i] = (x[i] * scale) * weight[i];
}

void rms_norm(TwkContext* context, const TwkRmsNormCall& call) {
  const int64_t width = call.width;
  parallel_rows(context, call.rows, width, [&](int64_t row) {
    float* residual = call.x + row * width;
    if (call.added != nullptr) {
      const float* delta = call.added + row * width;
      for (int64_t i = 0; i < width; ++i) residual[i] += delta[i];
    }
    normalize(residual, call.weight, call.epsilon, width, call.out + row * width);
  });
}

void silu_multiply(TwkContext* context, const TwkSiluMultiplyCall& call) {
  const int64_t width = call.width;
  parallel_rows(context, call.rows, width * 3, [&](int64_t row) {
    const float* gate = call.gate_up + row * 2 * width;
    silu_row(gate, gate + width, width, call.out + row * width);
  });
}

}  // namespace TWK_NAMESPACE
