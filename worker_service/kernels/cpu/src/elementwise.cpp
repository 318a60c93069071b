// Norm, activation and row statistics: each row by itself, its reductions in one order that only
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

constexpr float kLowest = -__builtin_inff();

// The lowest index of the largest value, or -1 where any value is NaN: blocks, because most blocks
// do not hold it.
int64_t find_largest(const float* x, int64_t width, float* value) {
  Vec best = set(kLowest), poison = zero();
  int64_t i = 0;
  for (; i + kWidth <= width; i += kWidth) {
    const Vec v = load(x + i);
    best = max(best, v);
    poison = poison + (v - v);  // NaN for NaN and for infinities, told apart below
  }
  float found = largest(best);
  float check = sum(poison);
  for (int64_t rest = i; rest < width; ++rest) {
    found = x[rest] > found ? x[rest] : found;
    check += x[rest] - x[rest];
  }
  if (check != 0.0f) {
    found = kLowest;
    for (int64_t at = 0; at < width; ++at) {
      if (x[at] != x[at]) return -1;
      found = x[at] > found ? x[at] : found;
    }
  }
  *value = found;
  for (int64_t at = 0; at < width; ++at) {
    if (x[at] == found) return at;
  }
  return -1;
}

float sum_of_exponentials(const float* x, int64_t width, float largest_value) {
  constexpr float kLog2E = 1.44269504088896341f;
  const Vec shift = set(largest_value), scale = set(kLog2E);
  Vec chains[kChains];
  TWK_UNROLL for (int c = 0; c < kChains; ++c) chains[c] = zero();
  int64_t i = 0;
  for (; i + kChains * kWidth <= width; i += kChains * kWidth) {
    TWK_UNROLL for (int c = 0; c < kChains; ++c) {
      chains[c] = chains[c] + exp2_negative((load(x + i + c * kWidth) - shift) * scale);
    }
  }
  Vec total = add_all(chains);
  for (; i < width; i += kWidth) {
    const Vec part = load_part(x + i, smaller(kWidth, width - i), kLowest);
    total = total + exp2_negative((part - shift) * scale);
  }
  return sum(total);
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

void rms_norm(TwkContext* context, float* x, const float* added, const float* weight,
              float epsilon, int64_t rows, int64_t width, float* out) {
  parallel_rows(context, rows, width, [&](int64_t row) {
    float* residual = x + row * width;
    if (added != nullptr) {
      const float* delta = added + row * width;
      for (int64_t i = 0; i < width; ++i) residual[i] += delta[i];
    }
    normalize(residual, weight, epsilon, width, out + row * width);
  });
}

void silu_multiply(TwkContext* context, const float* gate_up, int64_t rows, int64_t width,
                   float* out) {
  parallel_rows(context, rows, width * 3, [&](int64_t row) {
    const float* gate = gate_up + row * 2 * width;
    silu_row(gate, gate + width, width, out + row * width);
  });
}

void row_statistics(TwkContext* context, const float* x, int64_t rows, int64_t width, float* lse,
                    int32_t* argmax) {
  parallel(context, rows, [&](int64_t row, int) {
    float value = 0.0f;
    const float* values = x + row * width;
    const int64_t index = find_largest(values, width, &value);
    if (argmax != nullptr) argmax[row] = static_cast<int32_t>(index);
    if (lse == nullptr) return;
    if (index < 0) {
      lse[row] = __builtin_nanf("");
    } else if (value - value != 0.0f) {
      lse[row] = value;  // an infinity: the sum is itself
    } else {
      lse[row] = value + __builtin_logf(sum_of_exponentials(values, width, value));
    }
  });
}

}  // namespace TWK_NAMESPACE
