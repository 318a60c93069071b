// Attention of a few query rows over one tile of keys: scores, online softmax, weighted values.
//
// The online softmax is that of Milakov and Gimelshein (2018) as FlashAttention uses it, in base
// two. Batch invariance: tiles lie at multiples of kTileKeys of the absolute position, a score is
// one chain over the head dimension, an output one chain over the keys in ascending order, the
// weights' sum is kept per lane. Keys a row may not see weigh exactly 0 and change nothing, so a
// row's result does not depend on which rows share its tile.
#pragma once

#include "exp.h"
#include "parallel.h"

namespace TWK_NAMESPACE {

constexpr int64_t kTileKeys = 64;
// Vectors that a block of rows accumulates at once: more for few rows, whose chains are few.
constexpr int block_vectors(int rows) { return rows * 2 <= kTileRows ? 4 : 2; }
constexpr float kMasked = -__builtin_inff();

// The running state of some rows: largest score, weights' sum by lane, unnormalised output.
struct Running {
  float* largest;  // [rows]
  float* sums;     // [rows, kWidth]
  float* out;      // [rows, head_dim]
};

// One tile of one sequence and KV head. Keys before `begin` and from `end` on are not read.
struct KeyTile {
  int64_t start;  // absolute position of key 0
  int64_t begin, end;
  float* transposed;              // [head_dim, kTileKeys]
  const float* values[kTileKeys];  // [head_dim] each
};

template <typename Stored>
void transpose_keys(const Stored* const* keys, const KeyTile& tile, int64_t head_dim) {
  for (int64_t first = tile.begin / kWidth * kWidth; first < tile.end; first += kWidth) {
    for (int64_t d = 0; d < head_dim; d += kWidth) {
      Vec rows[kWidth];
      if (first >= tile.begin && first + kWidth <= tile.end) {
        TWK_UNROLL for (int i = 0; i < kWidth; ++i) rows[i] = load(keys[first + i] + d);
      } else {
        for (int i = 0; i < kWidth; ++i) {
          const int64_t key = first + i;
          rows[i] = key >= tile.begin && key < tile.end ? load(keys[key] + d) : zero();
        }
      }
      transpose(rows, tile.transposed + d * kTileKeys + first, kTileKeys);
    }
  }
}

template <int kRows, int kVectors>
TWK_KERNEL void score_block(const float* queries, const float* keys, int64_t head_dim,
                            float* scores) {
  Vec sums[kRows][kVectors];
  TWK_UNROLL for (int r = 0; r < kRows; ++r) {
    TWK_UNROLL for (int v = 0; v < kVectors; ++v) sums[r][v] = zero();
  }
  for (int64_t d = 0; d < head_dim; ++d) {
    Vec key[kVectors];
    TWK_UNROLL for (int v = 0; v < kVectors; ++v) key[v] = load(keys + d * kTileKeys + v * kWidth);
    TWK_UNROLL for (int r = 0; r < kRows; ++r) {
      const Vec query = set(queries[r * head_dim + d]);
      TWK_UNROLL for (int v = 0; v < kVectors; ++v) sums[r][v] = fma(query, key[v], sums[r][v]);
    }
  }
  TWK_UNROLL for (int r = 0; r < kRows; ++r) {
    TWK_UNROLL for (int v = 0; v < kVectors; ++v) {
      store(scores + r * kTileKeys + v * kWidth, sums[r][v]);
    }
  }
}

// Adds the tile's weighted values to `out`, which is first scaled by each row's factor.
template <int kRows, int kVectors>
TWK_KERNEL void value_block(const float* weights, const KeyTile& tile, int64_t begin, int64_t end,
                            int64_t at, int64_t head_dim, const float* factors, float* out) {
  Vec sums[kRows][kVectors];
  TWK_UNROLL for (int r = 0; r < kRows; ++r) {
    TWK_UNROLL for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = load(out + r * head_dim + at + v * kWidth) * set(factors[r]);
    }
  }
  for (int64_t key = begin; key < end; ++key) {
    const float* value = tile.values[key] + at;
    Vec part[kVectors];
    TWK_UNROLL for (int v = 0; v < kVectors; ++v) part[v] = load(value + v * kWidth);
    TWK_UNROLL for (int r = 0; r < kRows; ++r) {
      const Vec weight = set(weights[r * kTileKeys + key]);
      TWK_UNROLL for (int v = 0; v < kVectors; ++v) sums[r][v] = fma(weight, part[v], sums[r][v]);
    }
  }
  TWK_UNROLL for (int r = 0; r < kRows; ++r) {
    TWK_UNROLL for (int v = 0; v < kVectors; ++v) {
      store(out + r * head_dim + at + v * kWidth, sums[r][v]);
    }
  }
}

// The span of keys, within the tile, that one row sees.
struct Span {
  int64_t begin, end;
};

// Turns one row's scores into weights and updates its largest score and sum; returns what its
// earlier output must be scaled by. Vectors [first, last) hold the keys any row of the group sees.
TWK_INLINE float soften(float* scores, Span seen, int64_t first, int64_t last, float* largest_score,
                        float* sums) {
  for (int64_t key = first; key < smaller(seen.begin, last); ++key) scores[key] = kMasked;
  for (int64_t key = larger(seen.end, first); key < last; ++key) scores[key] = kMasked;
  Vec best = set(kMasked);
  for (int64_t key = first; key < last; key += kWidth) best = max(best, load(scores + key));
  const float before = *largest_score, found = largest(best);
  const float after = found > before ? found : before;
  const float base = after == kMasked ? 0.0f : after;
  const Vec bases = set(base);
  Vec total = zero();
  for (int64_t key = first; key < last; key += kWidth) {
    const Vec weight = exp2_negative(load(scores + key) - bases);
    store(scores + key, weight);
    total = total + weight;
  }
  const Vec factor = exp2_negative(set(before) - bases);
  store(sums, load(sums) * factor + total);
  *largest_score = after;
  float lanes[kWidth];
  store(lanes, factor);
  return lanes[0];
}

template <int kRows>
void attend_group(const float* queries, const KeyTile& tile, const Span* spans, int64_t head_dim,
                  float* scores, const Running& state) {
  Span any = spans[0];
  for (int r = 1; r < kRows; ++r) {
    any.begin = smaller(any.begin, spans[r].begin);
    any.end = larger(any.end, spans[r].end);
  }
  any.begin = larger(any.begin, tile.begin);
  any.end = smaller(any.end, tile.end);
  if (any.begin >= any.end) return;
  const int64_t first = any.begin / kWidth * kWidth, last = ceil_div(any.end, kWidth) * kWidth;
  constexpr int kVectors = block_vectors(kRows);
  int64_t at = first;
  for (; at + kVectors * kWidth <= last; at += kVectors * kWidth) {
    score_block<kRows, kVectors>(queries, tile.transposed + at, head_dim, scores + at);
  }
  for (; at < last; at += kWidth) {
    score_block<kRows, 1>(queries, tile.transposed + at, head_dim, scores + at);
  }
  float factors[kRows];
  for (int r = 0; r < kRows; ++r) {
    factors[r] = soften(scores + r * kTileKeys, spans[r], first, last, state.largest + r,
                        state.sums + r * kWidth);
  }
  int64_t d = 0;
  for (; d + kVectors * kWidth <= head_dim; d += kVectors * kWidth) {
    value_block<kRows, kVectors>(scores, tile, any.begin, any.end, d, head_dim, factors,
                                    state.out);
  }
  for (; d < head_dim; d += kWidth) {
    value_block<kRows, 1>(scores, tile, any.begin, any.end, d, head_dim, factors, state.out);
  }
}

TWK_INLINE void attend_rows(int64_t rows, const float* queries, const KeyTile& tile,
                            const Span* spans, int64_t head_dim, float* scores,
                            const Running& state) {
  switch (rows) {
    case 1: return attend_group<1>(queries, tile, spans, head_dim, scores, state);
    case 2: return attend_group<2>(queries, tile, spans, head_dim, scores, state);
    case 3: return attend_group<3>(queries, tile, spans, head_dim, scores, state);
    case 4: return attend_group<4>(queries, tile, spans, head_dim, scores, state);
#if TWK_ISA == 2 || defined(__aarch64__)
    case 5: return attend_group<5>(queries, tile, spans, head_dim, scores, state);
    case 6: return attend_group<6>(queries, tile, spans, head_dim, scores, state);
    case 7: return attend_group<7>(queries, tile, spans, head_dim, scores, state);
    case 8: return attend_group<8>(queries, tile, spans, head_dim, scores, state);
#endif
    default: __builtin_unreachable();
  }
}

}  // namespace TWK_NAMESPACE
