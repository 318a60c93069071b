// y = x W^T (+ bias) for packed W: in float32 here, in int8 by linear_int8.cpp.
//
// Batch invariance: y[row, column] is one chain of fused multiply-adds over k, ascending, from 0.
// How rows are tiled, how k is cut and how threads share the panels decides when an element is
// computed, but never changes its chain: an interrupted chain is stored to y and continued from
// there.
//
// Few rows: one pass over the panel serves all of them. Reading the weights from memory is the cost.
// Many rows: k is cut into pieces whose part of the panel stays in the first-level cache while every
// tile of rows passes over it. Meanwhile the next piece is prefetched.
#include "linear.h"

#include "kernels.h"

namespace TWK_NAMESPACE {
namespace {

// Bytes of weights in a piece. It shares the first-level cache with a tile of x: 48 kB where there is
// AVX-512, otherwise 32 kB. With two tiles of rows the next piece arrives almost as fast as this one
// is used, so both must fit.
constexpr int64_t kPieceBytes = TWK_ISA >= 2 ? 36 * 1024 : 20 * 1024;
constexpr int64_t kPieceBytesOfTwo = TWK_ISA >= 2 ? 36 * 1024 : 12 * 1024;
// Prefetches go to the second-level cache, or to the first where pieces are small.
constexpr int kFetchLocality = TWK_ISA >= 2 ? 2 : 3;
constexpr int64_t kFetchAhead = 4096;
// Lines of weights between two prefetches: what one or a few steps of k read.
constexpr int kStreamLines = TWK_ISA >= 2 ? 3 : 4;
constexpr int64_t kRowsPerTask = 64;         // a multiple of kTileRows
constexpr int64_t kGroupBytes = 768 * 1024;  // of x, read once per panel: fits the second-level cache

// What one pass of a tile reads and writes.
struct Pass {
  const float* weights;  // [length][kPanelWidth]
  const float* x;
  int64_t x_stride;
  int64_t length;
  float* y;
  int64_t y_stride;
  bool first;         // start at 0 instead of at y
  const float* bias;  // added at the end, or null
  const char* fetch;  // memory that will be needed next
  const char* const* other = nullptr;  // other memory: kOtherBytes for each kOtherSteps of k
};

template <int kFetch>
TWK_INLINE void fetch_lines(const char* at) {
  TWK_UNROLL for (int line = 0; line < kFetch; ++line) {
    __builtin_prefetch(at + line * 64, 0, kFetchLocality);
  }
}

// kFetch: lines fetched ahead for each kStreamLines of weights read. kOther: `pass.other`, too.
template <int kRows, int kFetch, bool kOther>
TWK_KERNEL void tile(const Pass& pass) {
  constexpr int kStepBytes = kPanelWidth * 4;
  constexpr int kWholeSteps = kStreamLines * 64 / kStepBytes;
  constexpr int kUnroll = kWholeSteps < 2 ? 1 : 2;
  constexpr int kSteps = kWholeSteps < 2 ? 1 : kWholeSteps / 2 * 2;
  Vec sums[kRows][kPanelVectors];
  TWK_UNROLL for (int r = 0; r < kRows; ++r) {
    TWK_UNROLL for (int v = 0; v < kPanelVectors; ++v) {
      sums[r][v] = pass.first ? zero() : load(pass.y + r * pass.y_stride + v * kWidth);
    }
  }
  const float* weights = pass.weights;
  const float* x = pass.x;
  const int64_t stride = pass.x_stride;
  const char* fetch = pass.fetch;
  const auto step = [&](const float* at, int64_t column) __attribute__((always_inline)) {
    Vec w[kPanelVectors];
    TWK_UNROLL for (int v = 0; v < kPanelVectors; ++v) w[v] = load(at + v * kWidth);
    TWK_UNROLL for (int r = 0; r < kRows; ++r) {
      const Vec value = set(x[r * stride + column]);
      TWK_UNROLL for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = fma(value, w[v], sums[r][v]);
    }
  };
  int64_t column = 0;
  while (column + kSteps <= pass.length) {
    fetch_lines<kFetch>(fetch);
    fetch += kFetch * 64;
    if constexpr (kOther) {
      const int64_t turn = column % kOtherSteps;
      const char* const at = pass.other[column / kOtherSteps] + turn * (kOtherBytes / kOtherSteps);
      TWK_UNROLL for (int line = 0; line < kOtherBytes / kOtherSteps * kSteps; line += 64) {
        __builtin_prefetch(at + line, 0, 2);
      }
    }
    _Pragma("GCC unroll 1") for (int turn = 0; turn < kSteps; turn += kUnroll) {
      TWK_UNROLL for (int u = 0; u < kUnroll; ++u) step(weights + u * kPanelWidth, column + u);
      weights += kUnroll * kPanelWidth;
      column += kUnroll;
    }
  }
  for (; column < pass.length; ++column) {
    step(weights, column);
    weights += kPanelWidth;
  }
  TWK_UNROLL for (int r = 0; r < kRows; ++r) {
    float* y = pass.y + r * pass.y_stride;
    TWK_UNROLL for (int v = 0; v < kPanelVectors; ++v) {
      Vec sum = sums[r][v];
      if (pass.bias != nullptr) sum = sum + load(pass.bias + v * kWidth);
      store(y + v * kWidth, sum);
    }
  }
}

template <int kFetch>
void tile_of(int64_t rows, const Pass& pass) {
  with_rows(rows, [&](auto count) {
    constexpr int kRows = decltype(count)::kRows;
    pass.other == nullptr ? tile<kRows, kFetch, false>(pass) : tile<kRows, kFetch, true>(pass);
  });
}

// One panel's outputs for some rows, and where they go: y itself, or a buffer (run_buffered).
struct Block {
  const Panels* panels;
  int64_t index;
  const float* bias;  // of this panel, kPanelWidth long, or null
  const float* x;
  int64_t x_stride;
  int64_t rows;
  float* y;
  int64_t y_stride;
  QuantizedRows quantized;  // x as int8 panels want it
  const Ahead* ahead;       // other memory to fetch meanwhile, or null
};

void float_block(const Block& block) {
  const int64_t k = block.panels->k;
  const float* panel = reinterpret_cast<const float*>(block.panels->panel(block.index));
  const int64_t tiles = ceil_div(block.rows, kTileRows);
  const int64_t piece_bytes = tiles == 2 ? kPieceBytesOfTwo : kPieceBytes;
  const int64_t piece = tiles == 1 ? k : piece_bytes / (kPanelWidth * 4);
  int64_t fetched = 0;  // of what is `ahead`
  for (int64_t column = 0; column < k; column += piece) {
    const int64_t length = smaller(piece, k - column);
    const float* weights = panel + column * kPanelWidth;
    const int64_t bytes = length * kPanelWidth * 4;
    for (int64_t which = 0; which < tiles; ++which) {
      const int64_t begin = tile_begin(block.rows, tiles, which);
      const int64_t rows = tile_begin(block.rows, tiles, which + 1) - begin;
      Pass pass{weights, block.x + begin * block.x_stride + column, block.x_stride, length,
                block.y + begin * block.y_stride, block.y_stride, column == 0,
                column + length == k ? block.bias : nullptr,
                reinterpret_cast<const char*>(weights) + bytes};
      if (tiles > 1 && block.ahead != nullptr && fetched < block.ahead->count) {
        pass.other = block.ahead->chunks + fetched;
        fetched += ceil_div(length, kOtherSteps);
      }
      // The tiles share the fetching of the next piece, as evenly as they can.
      const int64_t lines = ceil_div(kStreamLines, smaller(tiles, kStreamLines));
      pass.fetch += which * lines * bytes / kStreamLines;
      if (tiles == 1) {
        pass.fetch = reinterpret_cast<const char*>(weights) + kFetchAhead;
        tile_of<kStreamLines>(rows, pass);
      } else if (which * lines >= kStreamLines) {
        tile_of<0>(rows, pass);
      } else if (lines > 1) {
        tile_of<2>(rows, pass);
      } else {
        tile_of<1>(rows, pass);
      }
    }
  }
}

void run_block(const Block& block) {
  if (block.panels->quantized) {
    int8_block(*block.panels, block.index, block.bias, block.quantized, block.rows, block.y,
               block.y_stride);
  } else {
    float_block(block);
  }
}

// Goes through a buffer in two cases. Where several passes update the outputs, rows of y can lie so
// that their lines evict each other from the first-level cache. And a last panel has fewer `lanes`.
void run_buffered(Block block, int64_t lanes) {
  if (lanes == kPanelWidth && block.rows <= kTileRows) return run_block(block);
  float buffer[kRowsPerTask * kPanelWidth], padded[kPanelWidth];
  if (block.bias != nullptr && lanes < kPanelWidth) {
    for (int64_t lane = 0; lane < kPanelWidth; ++lane) {
      padded[lane] = lane < lanes ? block.bias[lane] : 0;
    }
    block.bias = padded;
  }
  float* const y = block.y;
  const int64_t y_stride = block.y_stride;
  block.y = buffer;
  block.y_stride = kPanelWidth;
  run_block(block);
  for (int64_t row = 0; row < block.rows; ++row) {
    memcpy(y + row * y_stride, buffer + row * kPanelWidth,
           static_cast<size_t>(lanes) * sizeof(float));
  }
}

}  // namespace

LinearJob::LinearJob(TwkContext* context, const TwkLinearCall& linear)
    : call(linear), panels(*linear.packed) {
  if (call.rows <= 0 || call.packed->n <= 0) return;
  if (panels.quantized) {
    quantized = quantize_rows(context, panels, call.x, call.x_stride, call.rows);
  }
  chunks = ceil_div(call.rows, kRowsPerTask);
  // Panel after panel over a group of chunks; then the next group.
  group = larger(1, kGroupBytes / (panels.k * 4 * kRowsPerTask));
  count = panels.count * chunks;
}

void LinearJob::run(int64_t task, const Ahead* ahead) const {
  const int64_t first = task / (panels.count * group) * group;
  const int64_t within = task - first * panels.count, size = smaller(group, chunks - first);
  const int64_t index = within / size, begin = (first + within % size) * kRowsPerTask;
  Block block{};
  block.panels = &panels;
  block.index = index;
  block.bias = call.bias == nullptr ? nullptr : call.bias + index * kPanelWidth;
  block.x = call.x + begin * call.x_stride;
  block.x_stride = call.x_stride;
  block.rows = smaller(kRowsPerTask, call.rows - begin);
  block.y = call.y + begin * call.y_stride + index * kPanelWidth;
  block.y_stride = call.y_stride;
  block.ahead = ahead;
  if (panels.quantized) {
    block.quantized = {quantized.values + begin * panels.kept_k,
                       quantized.scales + begin * panels.groups};
  }
  run_buffered(block, panels.lanes(index));
}

void linear(TwkContext* context, const TwkLinearCall& call) {
  const LinearJob job(context, call);
  parallel(context, job.count, [&](int64_t task, int) { job.run(task); });
}

}  // namespace TWK_NAMESPACE
