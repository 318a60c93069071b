// One vector of floats per instruction set, under one set of names.
//
// Every file of kernels is compiled once per instruction set, into its own namespace
// (TWK_NAMESPACE), with contraction off: a fused multiply-add happens exactly where `fma` is
// written, so a result never depends on how the compiler unrolled the loop around it.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifndef TWK_ISA
#error "TWK_ISA must be 0 (portable), 1 (AVX2 and FMA), 2 (AVX-512) or 3 (AVX-512 with VNNI)"
#endif

#if TWK_ISA == 3
#define TWK_NAMESPACE twk_avx512_vnni
#elif TWK_ISA == 2
#define TWK_NAMESPACE twk_avx512
#elif TWK_ISA == 1
#define TWK_NAMESPACE twk_avx2
#else
#define TWK_NAMESPACE twk_portable
#endif

#if TWK_ISA > 0
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define TWK_INLINE inline __attribute__((always_inline))
// A body of its own: inlined into a larger one, GCC keeps its accumulators in memory.
#define TWK_KERNEL __attribute__((noinline))
#define TWK_UNROLL _Pragma("GCC unroll 16")

namespace TWK_NAMESPACE {

#if TWK_ISA >= 2

constexpr int kWidth = 16;
constexpr int kTileRows = 8;  // rows x panel vectors of accumulators fill the registers
constexpr int kPanelVectors = 3;
using Vec = __m512;
using IntVec = __m512i;

TWK_INLINE Vec zero() { return _mm512_setzero_ps(); }
TWK_INLINE Vec set(float x) { return _mm512_set1_ps(x); }
TWK_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
TWK_INLINE void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
TWK_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
TWK_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
TWK_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
TWK_INLINE Vec load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
// To the nearest integers, ties to even; saturates to int16.
TWK_INLINE void store_i16(int16_t* p, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(v)));
}
TWK_INLINE Vec round(Vec v) {
  return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// v * 2^n for integral n in [-126, 127].
TWK_INLINE Vec scale_by_power(Vec v, Vec n) { return _mm512_scalef_ps(v, n); }

#elif TWK_ISA == 1

constexpr int kWidth = 8;
// Not 4 x 3: GCC then runs out of registers and reads the weights again for every row.
constexpr int kTileRows = 6;
constexpr int kPanelVectors = 2;
using Vec = __m256;

TWK_INLINE Vec zero() { return _mm256_setzero_ps(); }
TWK_INLINE Vec set(float x) { return _mm256_set1_ps(x); }
TWK_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
TWK_INLINE void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
TWK_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
TWK_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
TWK_INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
TWK_INLINE Vec load_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(
      _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
TWK_INLINE void store_i16(int16_t* p, Vec v) {
  const __m256i values = _mm256_cvtps_epi32(v);
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(p),
      _mm_packs_epi32(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1)));
}
TWK_INLINE Vec round(Vec v) {
  return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
TWK_INLINE Vec scale_by_power(Vec v, Vec n) {
  const __m256i exponent =
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(v, _mm256_castsi256_ps(exponent));
}

#else

// Four lanes by the compiler's own vectors: SSE2 on x86-64, NEON on aarch64.
constexpr int kWidth = 4;
#if defined(__aarch64__)
constexpr int kTileRows = 8;
#else
constexpr int kTileRows = 4;
#endif
constexpr int kPanelVectors = 3;
typedef float Vec __attribute__((vector_size(16)));
typedef int32_t IntVec __attribute__((vector_size(16)));

TWK_INLINE Vec zero() { return Vec{0, 0, 0, 0}; }
TWK_INLINE Vec set(float x) { return Vec{x, x, x, x}; }
TWK_INLINE Vec load(const float* p) {
  Vec v;
  memcpy(&v, p, sizeof v);
  return v;
}
TWK_INLINE void store(float* p, Vec v) { memcpy(p, &v, sizeof v); }
#if defined(__aarch64__)
TWK_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
#else
TWK_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
#endif
TWK_INLINE Vec select(IntVec mask, Vec a, Vec b) {
  return (Vec)((mask & (IntVec)a) | (~mask & (IntVec)b));
}
// As x86: the second operand where either is NaN.
TWK_INLINE Vec max(Vec a, Vec b) { return select(a > b, a, b); }
TWK_INLINE Vec min(Vec a, Vec b) { return select(a < b, a, b); }
TWK_INLINE Vec load_bf16(const uint16_t* p) {
  return (Vec)IntVec{int32_t(uint32_t(p[0]) << 16), int32_t(uint32_t(p[1]) << 16),
                     int32_t(uint32_t(p[2]) << 16), int32_t(uint32_t(p[3]) << 16)};
}
// To the nearest integer, ties to even, for |v| < 2^22: adding 1.5 * 2^23 leaves no fraction bits.
TWK_INLINE Vec round(Vec v) { return v + set(12582912.0f) - set(12582912.0f); }
#if defined(__SSE2__)
TWK_INLINE void store_i16(int16_t* p, Vec v) {
  const __m128i values = _mm_cvtps_epi32((__m128)v);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi32(values, values));
}
#else
TWK_INLINE void store_i16(int16_t* p, Vec v) {
  // max and min yield their second operand for a NaN: what is converted is always in range.
  const Vec whole = min(max(round(v), set(-32767.0f)), set(32767.0f));
  for (int lane = 0; lane < kWidth; ++lane) p[lane] = static_cast<int16_t>(whole[lane]);
}
#endif
TWK_INLINE Vec scale_by_power(Vec v, Vec n) {
  const IntVec bits = (IntVec)(n + set(12582912.0f + 127.0f));
  return v * (Vec)(bits << 23);
}

#endif

constexpr int kPanelWidth = kPanelVectors * kWidth;

TWK_INLINE Vec load(const uint16_t* p) { return load_bf16(p); }

// The lanes' sum, always by the same tree of halves.
TWK_INLINE float sum(Vec v) {
  float lanes[kWidth];
  store(lanes, v);
  for (int half = kWidth / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

#if TWK_ISA >= 2
TWK_INLINE float largest(Vec v) { return _mm512_reduce_max_ps(v); }
#else
TWK_INLINE float largest(Vec v) {
  float lanes[kWidth];
  store(lanes, v);
  for (int half = kWidth / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) {
      lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    }
  }
  return lanes[0];
}
#endif

TWK_INLINE float square_root(float x) { return __builtin_sqrtf(x); }

}  // namespace TWK_NAMESPACE
