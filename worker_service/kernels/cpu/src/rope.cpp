// Rotary position embedding (rotate-half pairs i, i + rotary_dim / 2; Su et al., RoFormer) on the
// q and k parts of a projected row, optional RMSNorm per head before it, and the write of k and v
// into the paged cache.
#include "kernels.h"
#include "parallel.h"

namespace TWK_NAMESPACE {
namespace {

void rotate(float* head, const float* cosines, const float* sines, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float low = head[i], high = head[i + half];
    head[i] = low * cosines[i] - high * sines[i];
    head[i + half] = high * cosines[i] + low * sines[i];
  }
}

// To nearest, ties to even; NaN stays NaN.
uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void put(float* out, float x) { *out = x; }
void put(uint16_t* out, float x) { *out = to_bf16(x); }

// One token's keys and values [kv_heads, head_dim] each, to its slot.
template <typename Stored>
void write_slot(const TwkCache& cache, int64_t slot, const float* keys, const float* values) {
  const int64_t size = cache.block_size, dim = cache.head_dim;
  const int64_t block = slot / size, offset = slot % size;
  for (int64_t head = 0; head < cache.kv_heads; ++head) {
    const int64_t start = (block * cache.kv_heads + head) * size * dim;
    Stored* out = static_cast<Stored*>(cache.keys) + start + offset;
    for (int64_t d = 0; d < dim; ++d) put(out + d * size, keys[head * dim + d]);
    out = static_cast<Stored*>(cache.values) + start + offset * dim;
    for (int64_t d = 0; d < dim; ++d) put(out + d, values[head * dim + d]);
  }
}

}  // namespace

void rope_write(TwkContext* context, const TwkRopeWriteCall& call) {
  const TwkCache& cache = *call.cache;
  const TwkBatch& batch = *call.batch;
  const int64_t dim = cache.head_dim, half = call.rotary_dim / 2, width = cache.kv_heads * dim;
  parallel_rows(context, batch.tokens, call.stride, [&](int64_t token) {
    float* row = call.qkv + token * call.stride;
    const float* cosines = call.cosines + batch.positions[token] * half;
    const float* sines = call.sines + batch.positions[token] * half;
    for (int64_t head = 0; head < call.q_heads + cache.kv_heads; ++head) {
      const float* norm = head < call.q_heads ? call.q_norm : call.k_norm;
      if (norm != nullptr) normalize(row + head * dim, norm, call.epsilon, dim, row + head * dim);
      rotate(row + head * dim, cosines, sines, half);
    }
    const int64_t slot = batch.slots[token];
    if (slot < 0) return;
    const float* keys = row + call.q_heads * dim;
    if (cache.kind == TWK_KV_BF16) {
      write_slot<uint16_t>(cache, slot, keys, keys + width);
    } else {
      write_slot<float>(cache, slot, keys, keys + width);
    }
  });
}

}  // namespace TWK_NAMESPACE
