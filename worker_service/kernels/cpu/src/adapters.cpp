// y += scale * B (A x) for tokens grouped by their adapters (LoRA), beside the projection itself.
//
// Batch invariance: an element of A x is four interleaved chains of fused multiply-adds over k,
// added up in one order; an element of B times that is one chain over the rank. How tokens are
// tiled, how outputs are cut and how threads share them never changes a chain. A token without an
// adapter is in no segment, and nothing here reads or writes it.
//
// With an adapter for each row, reading the adapters from memory is the cost: both matrices are
// thin panels, [ceil(n / kWidth)][k][kWidth], read once, in order. The projection of many rows is
// bound by arithmetic meanwhile. So each task computes a part of the projection, fetches what some
// adapters need next, and then applies those.
#include "kernels.h"
#include "linear.h"

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

// out[t] [kCols * kWidth] = kCols panels [rank][kWidth] times sums[t] [rank], for kCount tokens.
template <int kCount, int kCols, typename Number>
TWK_KERNEL void expand_tile(const Number* panels, int64_t rank, const float* const* sums,
                            float* const* out) {
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
      store(out[t] + v * kWidth, added[t][v]);
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

// The tasks of one call. What is added is made in memory of its own, [token][target][padded
// outputs], because the projection's outputs may not be there yet.
class AdaptJob {
 public:
  AdaptJob(TwkContext* context, const TwkAdaptCall& adapt)
      : call_(adapt), batch_(*adapt.batch), targets_(adapt.target_count) {
    if (batch_.segments <= 0) return;
    for (int64_t target = 0; target < targets_; ++target) {
      width_ += vectors(target) * kWidth;
      tasks_ += tasks_of(target);
    }
    const int64_t tokens = batch_.starts[batch_.segments];
    sums_ = floats(context, twk::Use::kSums, tokens * targets_ * batch_.rank_stride);
    added_ = floats(context, twk::Use::kAdded, tokens * width_);
  }

  int64_t shrinks() const { return batch_.segments * targets_; }
  int64_t expansions() const { return batch_.segments * tasks_; }
  int64_t additions() const { return batch_.segments; }

  // What memory the tasks from `first` to `last` will read, of shrink or expand.
  void look_ahead(bool expands, int64_t first, int64_t last, Ahead* ahead) const {
    int64_t count = 0;
    for (int64_t task = first; task < last; ++task) {
      const char* at;
      int64_t bytes;
      place(expands, task, &at, &bytes);
      for (int64_t offset = 0; offset < bytes && count < Ahead::kMost; offset += kOtherBytes) {
        ahead->chunks[count++] = at + offset;
      }
    }
    ahead->count = count;
    const char* const spare = reinterpret_cast<const char*>(ahead);
    const int64_t end = smaller(count + 256, Ahead::kMost + 256);
    for (int64_t index = count; index < end; ++index) ahead->chunks[index] = spare;
  }

  // A x, of one segment and target.
  void shrink(int64_t task) const {
    const int64_t segment = task / targets_, target = task % targets_;
    const TwkAdapterPart& part = part_of(segment, target);
    if (part.a == nullptr) return;
    if (part.kind == TWK_BF16) {
      shrink_as<uint16_t>(segment, part, target);
    } else {
      shrink_as<float>(segment, part, target);
    }
  }

  // B times that, of some outputs.
  void expand(int64_t task) const {
    const Outputs outputs = outputs_of(task);
    const TwkAdapterPart& part = part_of(outputs.segment, outputs.target);
    if (part.a == nullptr) return;
    if (part.kind == TWK_BF16) {
      expand_as<uint16_t>(part, outputs);
    } else {
      expand_as<float>(part, outputs);
    }
  }

  // Adds what was made to the outputs of one segment's tokens.
  void add(int64_t segment) const {
    for (int64_t at = batch_.starts[segment]; at < batch_.starts[segment + 1]; ++at) {
      float* const y = call_.y + batch_.tokens[at] * call_.y_stride;
      const float* from = added_ + at * width_;
      for (int64_t target = 0; target < targets_; ++target) {
        const TwkAdapterTarget& outputs = call_.targets[target];
        if (part_of(segment, target).a != nullptr) {
          float* const to = y + outputs.first;
          for (int64_t i = 0; i < outputs.count; ++i) to[i] += from[i];
        }
        from += vectors(target) * kWidth;
      }
    }
  }

 private:
  // What one task of expand makes: vectors of one segment's outputs.
  struct Outputs {
    int64_t segment, target, begin, end;
  };

  static float* floats(TwkContext* context, twk::Use use, int64_t count) {
    return static_cast<float*>(twk::scratch(context, use, count * 4));
  }
  int64_t vectors(int64_t target) const { return ceil_div(call_.targets[target].count, kWidth); }
  int64_t tasks_of(int64_t target) const { return ceil_div(vectors(target), kTaskVectors); }
  const TwkAdapterPart& part_of(int64_t segment, int64_t target) const {
    return call_.parts[batch_.slots[segment] * call_.part_stride + target];
  }
  float* sums_of(int64_t at, int64_t target) const {
    return sums_ + (at * targets_ + target) * batch_.rank_stride;
  }

  Outputs outputs_of(int64_t task) const {
    int64_t within = task % tasks_, target = 0;
    while (within >= tasks_of(target)) within -= tasks_of(target++);
    const int64_t begin = within * kTaskVectors;
    return {task / tasks_, target, begin, smaller(begin + kTaskVectors, vectors(target))};
  }
  void place(bool expands, int64_t task, const char** at, int64_t* bytes) const {
    const Outputs outputs = expands ? outputs_of(task) : Outputs{task / targets_, task % targets_};
    const TwkAdapterPart& part = part_of(outputs.segment, outputs.target);
    const int64_t number = part.kind == TWK_BF16 ? 2 : 4;
    if (part.a == nullptr) {
      *bytes = 0;
    } else if (expands) {
      *at = static_cast<const char*>(part.b) + outputs.begin * part.rank * kWidth * number;
      *bytes = (outputs.end - outputs.begin) * part.rank * kWidth * number;
    } else {
      *at = static_cast<const char*>(part.a);
      *bytes = ceil_div(part.rank, kWidth) * kWidth * call_.k * number;
    }
  }

  template <typename Number>
  void shrink_as(int64_t segment, const TwkAdapterPart& part, int64_t target) const {
    const Number* panel = static_cast<const Number*>(part.a);
    const int64_t end = batch_.starts[segment + 1];
    for (int64_t first = 0; first < part.rank; first += kWidth, panel += call_.k * kWidth) {
      for (int64_t at = batch_.starts[segment]; at < end; at += kTokens) {
        const int64_t count = smaller(kTokens, end - at);
        const float* x[kTokens];
        float* sums[kTokens];
        for (int64_t t = 0; t < count; ++t) {
          x[t] = call_.x + batch_.tokens[at + t] * call_.x_stride;
          sums[t] = sums_of(at + t, target) + first;
        }
        with_count(count, [&](auto tile) {
          shrink_tile<decltype(tile)::kRows>(panel, call_.k, x, part.scale, sums);
        });
      }
    }
  }

  template <typename Number>
  void expand_as(const TwkAdapterPart& part, const Outputs& outputs) const {
    int64_t offset = 0;
    for (int64_t at = 0; at < outputs.target; ++at) offset += vectors(at) * kWidth;
    const int64_t last = batch_.starts[outputs.segment + 1];
    for (int64_t at = batch_.starts[outputs.segment]; at < last; at += kTokens) {
      const int64_t count = smaller(kTokens, last - at);
      for (int64_t vector = outputs.begin; vector < outputs.end; vector += kVectors) {
        const float* sums[kTokens];
        float* out[kTokens];
        for (int64_t t = 0; t < count; ++t) {
          sums[t] = sums_of(at + t, outputs.target);
          out[t] = added_ + (at + t) * width_ + offset + vector * kWidth;
        }
        const Number* panels = static_cast<const Number*>(part.b) + vector * part.rank * kWidth;
        with_count(count, [&](auto tile) {
          constexpr int kCount = decltype(tile)::kRows;
          switch (smaller(kVectors, outputs.end - vector)) {
            case 1: return expand_tile<kCount, 1>(panels, part.rank, sums, out);
            case 2: return expand_tile<kCount, 2>(panels, part.rank, sums, out);
            case 3: if constexpr (kVectors > 2) expand_tile<kCount, 3>(panels, part.rank, sums, out);
              return;
            case 4: if constexpr (kVectors > 2) expand_tile<kCount, 4>(panels, part.rank, sums, out);
              return;
          }
        });
      }
    }
  }

  const TwkAdaptCall& call_;
  const TwkAdapterBatch& batch_;
  const int64_t targets_;
  int64_t width_ = 0, tasks_ = 0;
  float* sums_ = nullptr;
  float* added_ = nullptr;
};

// The projection and what is added to it, side by side; see the top.
void run_beside(TwkContext* context, const LinearJob& own, const TwkAdaptCall& call,
                const AdaptJob& job) {
  int64_t outputs = 0;
  for (int64_t target = 0; target < call.target_count; ++target) {
    outputs += call.targets[target].count;
  }
  // The projection's tasks are dealt out as the two halves of the adapters' memory are.
  const int64_t inputs = call.target_count * call.k;
  const int64_t first = own.count * inputs / (inputs + outputs);
  const auto loop = [&](bool expands, int64_t begin, int64_t end) {
    const int64_t all = expands ? job.expansions() : job.shrinks();
    const auto apply = [&](int64_t task) { expands ? job.expand(task) : job.shrink(task); };
    const int64_t count = end - begin;
    if (count < 4 * twk::thread_count(context)) {  // too few to share the adapters by them
      return parallel(context, all + count, [&](int64_t task, int) {
        task < all ? apply(task) : own.run(begin + task - all);
      });
    }
    parallel(context, count, [&](int64_t index, int) {
      const int64_t from = all * index / count, to = all * (index + 1) / count;
      Ahead ahead;
      job.look_ahead(expands, from, to, &ahead);
      own.run(begin + index, &ahead);
      for (int64_t task = from; task < to; ++task) apply(task);
    });
  };
  loop(false, 0, first);
  loop(true, first, own.count);
}

}  // namespace

void adapt(TwkContext* context, const TwkAdaptCall& call) {
  const AdaptJob job(context, call);
  if (call.own != nullptr) {
    run_beside(context, LinearJob(context, *call.own), call, job);
  } else {
    parallel(context, job.shrinks(), [&](int64_t task, int) { job.shrink(task); });
    parallel(context, job.expansions(), [&](int64_t task, int) { job.expand(task); });
  }
  parallel(context, job.additions(), [&](int64_t task, int) { job.add(task); });
}

}  // namespace TWK_NAMESPACE
