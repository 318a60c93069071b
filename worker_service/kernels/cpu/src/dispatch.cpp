// The exported functions: picks the instruction set, then only forwards.
#include <exception>

#include "context.h"

#define TWK_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

#if defined(__x86_64__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

const twk::Kernels* kernels_for(int isa) {
  switch (isa) {
    case TWK_ISA_PORTABLE:
      return twk::portable_kernels();
#if defined(__x86_64__)
    case TWK_ISA_AVX2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
                 ? twk::avx2_kernels()
                 : nullptr;
    case TWK_ISA_AVX512:
      return has_avx512() ? twk::avx512_kernels() : nullptr;
    case TWK_ISA_AVX512_VNNI:
      return has_avx512() && __builtin_cpu_supports("avx512vnni") ? twk::avx512_vnni_kernels()
                                                                  : nullptr;
#endif
    default:
      return nullptr;
  }
}

// The only exception that can arise is a failed allocation.
template <typename Call>
int guarded(const Call& call) {
  try {
    call();
    return 0;
  } catch (const std::exception&) {
    return -1;
  }
}

}  // namespace

TWK_EXPORT int twk_abi_version() { return TWK_ABI_VERSION; }
TWK_EXPORT int twk_supports(int isa) { return kernels_for(isa) != nullptr; }

// A context of `threads` threads, the caller's included; null where the CPU lacks `isa` or the
// system refuses a thread. One call at a time per context.
TWK_EXPORT TwkContext* twk_open(int threads, int isa) {
  const twk::Kernels* kernels = kernels_for(isa);
  if (kernels == nullptr || threads < 1) return nullptr;
  TwkContext* context = nullptr;
  guarded([&] { context = twk::create_context(threads, kernels); });
  return context;
}

TWK_EXPORT void twk_close(TwkContext* context) { twk::destroy_context(context); }

TWK_EXPORT int64_t twk_head_dim_multiple(const TwkContext* context) {
  return twk::kernels_of(context).head_dim_multiple;
}

TWK_EXPORT int64_t twk_scratch_bytes(const TwkContext* context) {
  return twk::scratch_bytes(context);
}

TWK_EXPORT void twk_advise_huge_pages(void* data, int64_t bytes) {
  twk::advise_huge_pages(data, bytes);
}

TWK_EXPORT int64_t twk_packed_bytes(const TwkContext* context, const TwkPacked* packed) {
  return twk::kernels_of(context).packed_bytes(*packed);
}

TWK_EXPORT int twk_pack(TwkContext* context, const TwkPacked* packed, const float* weight,
                        int64_t stride) {
  return guarded([&] { twk::kernels_of(context).pack(context, *packed, weight, stride); });
}

TWK_EXPORT int twk_linear(TwkContext* context, const TwkPacked* packed, const float* bias,
                          const float* x, int64_t x_stride, int64_t rows, float* y,
                          int64_t y_stride) {
  return guarded([&] {
    twk::kernels_of(context).linear(context, *packed, bias, x, x_stride, rows, y, y_stride);
  });
}

TWK_EXPORT int twk_gather(TwkContext* context, const TwkPacked* packed, const int32_t* ids,
                          int64_t count, float* out) {
  return guarded([&] { twk::kernels_of(context).gather(context, *packed, ids, count, out); });
}

TWK_EXPORT int twk_rms_norm(TwkContext* context, float* x, const float* added, const float* weight,
                            float epsilon, int64_t rows, int64_t width, float* out) {
  return guarded([&] {
    twk::kernels_of(context).rms_norm(context, x, added, weight, epsilon, rows, width, out);
  });
}

TWK_EXPORT int twk_silu_multiply(TwkContext* context, const float* gate_up, int64_t rows,
                                 int64_t width, float* out) {
  return guarded([&] {
    twk::kernels_of(context).silu_multiply(context, gate_up, rows, width, out);
  });
}

TWK_EXPORT int twk_row_statistics(TwkContext* context, const float* x, int64_t rows, int64_t width,
                                  float* lse, int32_t* argmax) {
  return guarded([&] {
    twk::kernels_of(context).row_statistics(context, x, rows, width, lse, argmax);
  });
}

TWK_EXPORT int twk_rope_write(TwkContext* context, float* qkv, int64_t stride, int64_t q_heads,
                              int64_t rotary_dim, const float* cosines, const float* sines,
                              const float* q_norm, const float* k_norm, float epsilon,
                              const TwkCache* cache, const TwkBatch* batch) {
  return guarded([&] {
    twk::kernels_of(context).rope_write(
        context, {qkv, stride, q_heads, rotary_dim, cosines, sines, q_norm, k_norm, epsilon},
        *cache, *batch);
  });
}

TWK_EXPORT int twk_attention(TwkContext* context, const float* queries, int64_t query_stride,
                             float* out, int64_t out_stride, float* log_sum_exp, int64_t q_heads,
                             int64_t window, float scale, const TwkCache* cache,
                             const TwkBatch* batch) {
  return guarded([&] {
    twk::kernels_of(context).attention(
        context, {queries, query_stride, out, out_stride, log_sum_exp, q_heads, window, scale},
        *cache, *batch);
  });
}

TWK_EXPORT int twk_decode(TwkContext* context, const TwkModel* model, const TwkBatch* batch,
                          float* hidden, const int32_t* logit_indices, int64_t logit_count,
                          float* logits) {
  return guarded([&] {
    twk::kernels_of(context).decode(context, *model, *batch, hidden, logit_indices, logit_count,
                                    logits);
  });
}
