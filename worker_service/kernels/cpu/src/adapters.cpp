// y += scale * B (A x) for tokens grouped by their adapters (LoRA), after the projection itself.
//
// Batch invariance: an element of A x is four interleaved chains of fused multiply-adds over k,
// added up in one order; an element of B times that is one chain over the rank. How tokens are
// tiled, how outputs are cut and how threads share them never changes a chain. A token without an
// adapter is in no segment, and nothing here reads or writes it.
//
// With an adapter for each row, reading the adapters from memory is the cost: both matrices are
// thin panels, [ceil(n / kWidth)][k][kWidth], read once, in order.
#include "kernels.h"
#include "parallel.h"

namespace TWK_NAMESPACE {
namespace {

constexpr int kChains = 4;
constexpr int kTokens = TWK_ISA >= 2 ? 4 : 2;  // tokens x chains of accumulators fit the registers
constexpr int kVectors = TWK_ISA >= 2 ? 4 : 2;
constexpr int64_t kTaskVectors = 24;  // outputs of an expansion task, in vectors
constexpr int64_t kFetchAhead = 2048;

template <typename Number>
TWK_INLINE void fetch(const Number* at) {
  __builtin_prefetch(reinterpret_cast<const char*>(at) + kFetchAhead);
}

// sums[t] [kWidth] = scale * panel [k][kWidth] times x[t] [k], for kCount tokens.
template <int kCount, typename Number>
TWK_KERNEL void shrink_tile(const Number* panel, int64_t k, const float* const* x, float scale,
                            float* const* sums) {
  Vec chains[kCount][kChains];
  TWK_UNROLL for (int t = 0; t < kCount; ++t) {
    TWK_UNROLL for (int c = 0; c < kChains; ++c) chains[t][c] = zero();
  }
  int64_t column = 0;
  for (; column + kChains <= k; column += kChains) {
    fetch(panel);
    if (kChains * kWidth * sizeof(Number) > 128) fetch(panel + 2 * kWidth);
    TWK_UNROLL for (int c = 0; c < kChains; ++c) {
      const Vec weight = load(panel + c * kWidth);
      TWK_UNROLL for (int t = 0; t < kCount; ++t) {
        chains[t][c] = fma(set(x[t][column + c]), weight, chains[t][c]);
      }
    }
    panel += kChains * kWidth;
  }
  for (; column < k; ++column, panel += kWidth) {
    const Vec weight = load(panel);
    TWK_UNROLL for (int t = 0; t < kCount; ++t) {
      chains[t][0] = fma(set(x[t][column]), weight, chains[t][0]);
    }
  }
  TWK_UNROLL for (int t = 0; t < kCount; ++t) {
    const Vec total = (chains[t][0] + chains[t][1]) + (chains[t][2] + chains[t][3]);
    store(sums[t], total * set(scale));
  }
}

// y[t] [kCols * kWidth] += kCols panels [rank][kWidth] times sums[t] [rank], for kCount tokens.
// The last vector has only `lanes` outputs.
template <int kCount, int kCols, typename Number>
TWK_KERNEL void expand_tile(const Number* panels, int64_t rank, const float* const* sums,
                            float* const* y, int64_t lanes) {
  Vec added[kCount][kCols];
  TWK_UNROLL for (int t = 0; t < kCount; ++t) {
    TWK_UNROLL for (int v = 0; v < kCols; ++v) added[t][v] = zero();
  }
  for (int64_t r = 0; r < rank; ++r) {
    Vec weights[kCols];
    TWK_UNROLL for (int v = 0; v < kCols; ++v) {
      const Number* at = panels + (v * rank + r) * kWidth;
      fetch(at);
      weights[v] = load(at);
    }
    TWK_UNROLL for (int t = 0; t < kCount; ++t) {
      const Vec value = set(sums[t][r]);
      TWK_UNROLL for (int v = 0; v < kCols; ++v) added[t][v] = fma(value, weights[v], added[t][v]);
    }
  }
  TWK_UNROLL for (int t = 0; t < kCount; ++t) {
    TWK_UNROLL for (int v = 0; v < kCols; ++v) {
      float* out = y[t] + v * kWidth;
      if (v + 1 < kCols || lanes == kWidth) {
        store(out, load(out) + added[t][v]);
      } else {
        float part[kWidth];
        store(part, added[t][v]);
        for (int64_t lane = 0; lane < lanes; ++lane) out[lane] += part[lane];
      }
    }
  }
}

// Calls body(RowCount<n>{}) for n in [1, 4].
template <typename Body>
TWK_INLINE void with_count(int64_t count, const Body& body) {
  switch (count) {
    case 1: return body(RowCount<1>{});
    case 2: return body(RowCount<2>{});
    case 3: if constexpr (kTokens > 2) return body(RowCount<3>{}); break;
    case 4: if constexpr (kTokens > 2) return body(RowCount<4>{}); break;
  }
  __builtin_unreachable();
}

// One adapter's tokens, of one projection.
struct Segment {
  const TwkAdaptCall& call;
  const int32_t* tokens;
  int64_t count;
  float* sums;  // [count][targets][rank_stride]

  const TwkAdapterPart& part(int64_t slot, int64_t target) const {
    return call.parts[slot * call.part_stride + target];
  }
  float* sums_of(int64_t token, int64_t target) const {
    return sums + (token * call.target_count + target) * call.batch->rank_stride;
  }
};

template <typename Number>
void shrink(const Segment& segment, const TwkAdapterPart& part, int64_t target) {
  const Number* panel = static_cast<const Number*>(part.a);
  const int64_t k = segment.call.k;
  for (int64_t first = 0; first < part.rank; first += kWidth, panel += k * kWidth) {
    for (int64_t token = 0; token < segment.count; token += kTokens) {
      const int64_t count = smaller(kTokens, segment.count - token);
      const float* x[kTokens];
      float* sums[kTokens];
      for (int64_t t = 0; t < count; ++t) {
        x[t] = segment.call.x + segment.tokens[token + t] * segment.call.x_stride;
        sums[t] = segment.sums_of(token + t, target) + first;
      }
      with_count(count, [&](auto tile) {
        shrink_tile<decltype(tile)::kRows>(panel, k, x, part.scale, sums);
      });
    }
  }
}

template <typename Number>
void expand(const Segment& segment, const TwkAdapterPart& part, int64_t target, int64_t begin,
            int64_t end) {
  const TwkAdapterTarget& outputs = segment.call.targets[target];
  const Number* panels = static_cast<const Number*>(part.b);
  for (int64_t token = 0; token < segment.count; token += kTokens) {
    const int64_t count = smaller(kTokens, segment.count - token);
    for (int64_t vector = begin; vector < end; vector += kVectors) {
      const int64_t columns = smaller(kVectors, end - vector);
      const float* sums[kTokens];
      float* y[kTokens];
      for (int64_t t = 0; t < count; ++t) {
        sums[t] = segment.sums_of(token + t, target);
        y[t] = segment.call.y + segment.tokens[token + t] * segment.call.y_stride +
               outputs.first + vector * kWidth;
      }
      const int64_t lanes = smaller(kWidth, outputs.count - (vector + columns - 1) * kWidth);
      const Number* at = panels + vector * part.rank * kWidth;
      with_count(count, [&](auto tile) {
        constexpr int kCount = decltype(tile)::kRows;
        switch (columns) {
          case 1: return expand_tile<kCount, 1>(at, part.rank, sums, y, lanes);
          case 2: return expand_tile<kCount, 2>(at, part.rank, sums, y, lanes);
          case 3: if constexpr (kVectors > 2) expand_tile<kCount, 3>(at, part.rank, sums, y, lanes);
            return;
          case 4: if constexpr (kVectors > 2) expand_tile<kCount, 4>(at, part.rank, sums, y, lanes);
            return;
        }
      });
    }
  }
}

}  // namespace

void adapt(TwkContext* context, const TwkAdaptCall& call) {
  const TwkAdapterBatch& batch = *call.batch;
  if (batch.segments <= 0 || call.target_count <= 0) return;
  const int64_t tokens = batch.starts[batch.segments];
  float* const all = static_cast<float*>(twk::scratch(
      context, twk::Use::kAdapters, tokens * call.target_count * batch.rank_stride * 4));
  const auto segment_of = [&](int64_t index) {
    const int64_t start = batch.starts[index];
    return Segment{call, batch.tokens + start, batch.starts[index + 1] - start,
                   all + start * call.target_count * batch.rank_stride};
  };
  parallel(context, batch.segments * call.target_count, [&](int64_t task, int) {
    const int64_t index = task / call.target_count, target = task % call.target_count;
    const Segment segment = segment_of(index);
    const TwkAdapterPart& part = segment.part(batch.slots[index], target);
    if (part.a == nullptr) return;
    if (part.kind == TWK_BF16) {
      shrink<uint16_t>(segment, part, target);
    } else {
      shrink<float>(segment, part, target);
    }
  });
  const auto tasks_of = [&](int64_t target) {
    return ceil_div(ceil_div(call.targets[target].count, kWidth), kTaskVectors);
  };
  int64_t per_segment = 0;
  for (int64_t target = 0; target < call.target_count; ++target) per_segment += tasks_of(target);
  parallel(context, batch.segments * per_segment, [&](int64_t task, int) {
    const int64_t index = task / per_segment;
    int64_t within = task % per_segment, target = 0;
    while (within >= tasks_of(target)) within -= tasks_of(target++);
    const Segment segment = segment_of(index);
    const TwkAdapterPart& part = segment.part(batch.slots[index], target);
    if (part.a == nullptr) return;
    const int64_t vectors = ceil_div(call.targets[target].count, kWidth);
    const int64_t begin = within * kTaskVectors, end = smaller(begin + kTaskVectors, vectors);
    if (part.kind == TWK_BF16) {
      expand<uint16_t>(segment, part, target, begin, end);
    } else {
      expand<float>(segment, part, target, begin, end);
    }
  });
}

}  // namespace TWK_NAMESPACE
