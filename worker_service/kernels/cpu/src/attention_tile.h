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
constexpr int64_t kTileVectors = kTileKeys / kWidth;
// Vectors that a block of rows accumulates at once: more with few rows, so that there are enough
// independent chains.
constexpr int block_vectors(int rows) { return rows * 2 <= kTileRows ? 4 : 2; }
constexpr float kMasked = -__builtin_inff();

// The running state of some rows: largest score, weights' sum by lane, unnormalised output.
struct Running {
  float* largest;  // [rows]
  float* sums;     // [rows, kWidth]
  float* out;      // [rows, head_dim]
};

// One tile of one sequence and KV head, by vectors of kWidth keys, as float or bf16. Keys before
// `begin` and from `end` on may hold anything. The pointer of a vector without a key in [begin, end)
// is null.
template <typename Stored>
struct KeyTile {
  int64_t start;  // absolute position of key 0
  int64_t begin, end;
  const Stored* keys[kTileVectors];    // kWidth keys at d * key_stride
  const Stored* values[kTileVectors];  // [kWidth, head_dim]
  int64_t key_stride;
};

// Memory that will be needed next, in pieces. It is prefetched line by line during the arithmetic,
// because the pieces lie anywhere: the machine's own prefetcher finds each only after its first
// misses.
class Ahead {
 public:
  void clear(int64_t piece_bytes) {
    count_ = index_ = offset_ = 0;
    piece_bytes_ = piece_bytes;
  }
  void add(const void* piece) { pieces_[count_++] = static_cast<const char*>(piece); }
  bool empty() const { return index_ == count_; }

  // The start of the next `bytes`; any valid address once every piece has been handed out.
  const char* take(int64_t bytes) {
    if (empty()) return pieces_[0];
    const char* const start = pieces_[index_] + offset_;
    offset_ += bytes;
    if (offset_ >= piece_bytes_) {
      offset_ = 0;
      ++index_;
    }
    return start;
  }

 private:
  const char* pieces_[2 * kTileVectors];
  int64_t count_ = 0, index_ = 0, offset_ = 0, piece_bytes_ = 0;
};

// Lines to prefetch per turn of a loop that reads `vectors` vectors per turn: as many as it reads.
template <typename Stored>
constexpr int lines_a_turn(int vectors) {
  const int bytes = vectors * kWidth * static_cast<int>(sizeof(Stored));
  return bytes < 64 ? 1 : bytes / 64;
}

// Where each of a loop's lines is, advancing by one line a turn.
template <int kLines>
struct Lines {
  TWK_INLINE Lines(Ahead* ahead, int64_t turns) {
    TWK_UNROLL for (int i = 0; i < kLines; ++i) at[i] = ahead->take(64 * turns);
  }
  TWK_INLINE void prefetch(int64_t turn) const {
    TWK_UNROLL for (int i = 0; i < kLines; ++i) __builtin_prefetch(at[i] + 64 * turn, 0, 3);
  }
  const char* at[kLines];
};
template <>
struct Lines<0> {
  TWK_INLINE Lines(Ahead*, int64_t) {}
  TWK_INLINE void prefetch(int64_t) const {}
};

template <int kRows, int kVectors, typename Stored, int kLines>
TWK_KERNEL void score_block(const float* queries, const KeyTile<Stored>& tile, int64_t first,
                            int64_t head_dim, float* scores, Ahead* ahead) {
  const Lines<kLines> lines(ahead, head_dim);
  const int64_t stride = tile.key_stride;
  const Stored* keys[kVectors];
  Vec sums[kRows][kVectors];
  TWK_UNROLL for (int v = 0; v < kVectors; ++v) keys[v] = tile.keys[first + v];
  TWK_UNROLL for (int r = 0; r < kRows; ++r) {
    TWK_UNROLL for (int v = 0; v < kVectors; ++v) sums[r][v] = zero();
  }
  for (int64_t d = 0; d < head_dim; ++d) {
    lines.prefetch(d);
    if constexpr (kRows < kVectors) {  // the smaller set of operands stays in registers
      Vec query[kRows];
      TWK_UNROLL for (int r = 0; r < kRows; ++r) query[r] = set(queries[r * head_dim + d]);
      TWK_UNROLL for (int v = 0; v < kVectors; ++v) {
        const Vec key = load(keys[v] + d * stride);
        TWK_UNROLL for (int r = 0; r < kRows; ++r) sums[r][v] = fma(query[r], key, sums[r][v]);
      }
    } else {
      Vec key[kVectors];
      TWK_UNROLL for (int v = 0; v < kVectors; ++v) key[v] = load(keys[v] + d * stride);
      TWK_UNROLL for (int r = 0; r < kRows; ++r) {
        const Vec query = set(queries[r * head_dim + d]);
        TWK_UNROLL for (int v = 0; v < kVectors; ++v) sums[r][v] = fma(query, key[v], sums[r][v]);
      }
    }
  }
  TWK_UNROLL for (int r = 0; r < kRows; ++r) {
    TWK_UNROLL for (int v = 0; v < kVectors; ++v) {
      store(scores + r * kTileKeys + (first + v) * kWidth, sums[r][v]);
    }
  }
}

// Adds the tile's weighted values to `out`, which is first scaled by each row's factor.
template <int kRows, int kVectors, typename Stored, int kLines>
TWK_KERNEL void value_block(const float* weights, const KeyTile<Stored>& tile, int64_t begin,
                            int64_t end, int64_t at, int64_t head_dim, const float* factors,
                            float* out, Ahead* ahead) {
  const Lines<kLines> lines(ahead, end - begin);
  Vec sums[kRows][kVectors];
  TWK_UNROLL for (int r = 0; r < kRows; ++r) {
    TWK_UNROLL for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = load(out + r * head_dim + at + v * kWidth) * set(factors[r]);
    }
  }
  for (int64_t key = begin; key < end;) {
    const int64_t vector = key / kWidth, last = smaller(end, (vector + 1) * kWidth);
    const Stored* value = tile.values[vector] + (key - vector * kWidth) * head_dim + at;
    for (; key < last; ++key, value += head_dim) {
      lines.prefetch(key - begin);
      if constexpr (kRows < kVectors) {
        Vec weight[kRows];
        TWK_UNROLL for (int r = 0; r < kRows; ++r) weight[r] = set(weights[r * kTileKeys + key]);
        TWK_UNROLL for (int v = 0; v < kVectors; ++v) {
          const Vec part = load(value + v * kWidth);
          TWK_UNROLL for (int r = 0; r < kRows; ++r) sums[r][v] = fma(weight[r], part, sums[r][v]);
        }
      } else {
        Vec part[kVectors];
        TWK_UNROLL for (int v = 0; v < kVectors; ++v) part[v] = load(value + v * kWidth);
        TWK_UNROLL for (int r = 0; r < kRows; ++r) {
          const Vec weight = set(weights[r * kTileKeys + key]);
          TWK_UNROLL for (int v = 0; v < kVectors; ++v) {
            sums[r][v] = fma(weight, part[v], sums[r][v]);
          }
        }
      }
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
TWK_INLINE float softmax_tile(float* scores, Span seen, int64_t first, int64_t last,
                              float* largest_score, float* sums) {
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
  if (after == before) {  // the factor would be exactly 1
    store(sums, load(sums) + total);
    return 1.0f;
  }
  const Vec factor = exp2_negative(set(before) - bases);
  store(sums, load(sums) * factor + total);
  *largest_score = after;
  float lanes[kWidth];
  store(lanes, factor);
  return lanes[0];
}

template <int kRows, typename Stored, bool kAhead>
void attend_group(const float* queries, const KeyTile<Stored>& tile, const Span* spans,
                  int64_t head_dim, float* scores, const Running& state, Ahead* ahead) {
  Span any = spans[0];
  for (int r = 1; r < kRows; ++r) {
    any.begin = smaller(any.begin, spans[r].begin);
    any.end = larger(any.end, spans[r].end);
  }
  any.begin = larger(any.begin, tile.begin);
  any.end = smaller(any.end, tile.end);
  if (any.begin >= any.end) return;
  constexpr int kVectors = block_vectors(kRows);
  constexpr int kLines = kAhead ? lines_a_turn<Stored>(kVectors) : 0;
  const int64_t first = any.begin / kWidth, last = ceil_div(any.end, kWidth);
  int64_t at = first;
  for (; at + kVectors <= last; at += kVectors) {
    score_block<kRows, kVectors, Stored, kLines>(queries, tile, at, head_dim, scores, ahead);
  }
  for (; at < last; ++at) {
    score_block<kRows, 1, Stored, 0>(queries, tile, at, head_dim, scores, ahead);
  }
  float factors[kRows];
  for (int r = 0; r < kRows; ++r) {
    factors[r] = softmax_tile(scores + r * kTileKeys, spans[r], first * kWidth, last * kWidth,
                              state.largest + r, state.sums + r * kWidth);
  }
  int64_t d = 0;
  for (; d + kVectors * kWidth <= head_dim; d += kVectors * kWidth) {
    value_block<kRows, kVectors, Stored, kLines>(scores, tile, any.begin, any.end, d, head_dim,
                                                 factors, state.out, ahead);
  }
  for (; d < head_dim; d += kWidth) {
    value_block<kRows, 1, Stored, 0>(scores, tile, any.begin, any.end, d, head_dim, factors,
                                     state.out, ahead);
  }
}

// Up to kTileRows rows over one tile.
template <typename Stored, bool kAhead>
void attend_rows(int64_t rows, const float* queries, const KeyTile<Stored>& tile,
                 const Span* spans, int64_t head_dim, float* scores, const Running& state,
                 Ahead* ahead) {
  with_rows(rows, [&](auto count) {
    attend_group<decltype(count)::kRows, Stored, kAhead>(queries, tile, spans, head_dim, scores,
                                                         state, ahead);
  });
}

}  // namespace TWK_NAMESPACE
