// The exported functions. Opening a context picks the instruction set; the others only forward.
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

// What head dimensions must be a multiple of; 0 where the library or the CPU lacks `isa`.
TWK_EXPORT int64_t twk_head_dim_multiple(int isa) {
  const twk::Kernels* kernels = kernels_for(isa);
  return kernels == nullptr ? 0 : kernels->head_dim_multiple;
}

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

TWK_EXPORT int64_t twk_scratch_bytes(const TwkContext* context) {
  return twk::scratch_bytes(context);
}

TWK_EXPORT void twk_advise_huge_pages(void* data, int64_t bytes) {
  twk::advise_huge_pages(data, bytes);
}

TWK_EXPORT int64_t twk_packed_bytes(const TwkContext* context, const TwkPacked* packed) {
  return twk::kernels_of(context).packed_bytes(*packed);
}

#define TWK_FORWARD(kernel, Call)                                               \
  TWK_EXPORT int twk_##kernel(TwkContext* context, const Call* call) {          \
    return guarded([&] { twk::kernels_of(context).kernel(context, *call); });   \
  }
TWK_KERNELS(TWK_FORWARD)
#undef TWK_FORWARD
