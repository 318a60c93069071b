// Integer dot products, int8 weights by int16 activations into int32: for kWidth outputs at a
// time, two columns in one multiply-add.
//
// No sum of a group is ever rounded or saturated, so every instruction set gives the same integers.
#pragma once

#include "panels.h"

namespace TWK_NAMESPACE {

#if TWK_ISA >= 2

using Ints = __m512i;
using Pairs = __m512i;

TWK_INLINE Ints no_sums() { return _mm512_setzero_si512(); }
TWK_INLINE Vec to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }
TWK_INLINE Pairs same_pair(int32_t both) { return _mm512_set1_epi32(both); }
TWK_INLINE Pairs load_pairs(const int8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
#if TWK_ISA == 3
TWK_INLINE Ints dot(Pairs a, Pairs b, Ints sums) { return _mm512_dpwssd_epi32(sums, a, b); }
#else
TWK_INLINE Ints dot(Pairs a, Pairs b, Ints sums) {
  return _mm512_add_epi32(sums, _mm512_madd_epi16(a, b));
}
#endif
// Keeps a sum in its register. Without it GCC orders the loop so that it runs out of registers.
TWK_INLINE void keep(Ints& sums) { asm("" : "+v"(sums)); }

#elif TWK_ISA == 1

using Ints = __m256i;
using Pairs = __m256i;

TWK_INLINE Ints no_sums() { return _mm256_setzero_si256(); }
TWK_INLINE Vec to_floats(Ints v) { return _mm256_cvtepi32_ps(v); }
TWK_INLINE Pairs same_pair(int32_t both) { return _mm256_set1_epi32(both); }
TWK_INLINE Pairs load_pairs(const int8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
TWK_INLINE Ints dot(Pairs a, Pairs b, Ints sums) {
  return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
}
TWK_INLINE void keep(Ints& sums) { asm("" : "+x"(sums)); }

#else

using Ints = IntVec;
typedef int16_t Pairs __attribute__((vector_size(16)));

TWK_INLINE Ints no_sums() { return Ints{0, 0, 0, 0}; }
TWK_INLINE Vec to_floats(Ints v) {
  return Vec{float(v[0]), float(v[1]), float(v[2]), float(v[3])};
}
TWK_INLINE Pairs same_pair(int32_t both) { return (Pairs)Ints{both, both, both, both}; }
#if defined(__SSE2__)
TWK_INLINE Pairs load_pairs(const int8_t* p) {
  const __m128i values = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return (Pairs)_mm_srai_epi16(_mm_unpacklo_epi8(values, values), 8);
}
TWK_INLINE Ints dot(Pairs a, Pairs b, Ints sums) {
  return sums + (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
}
#elif defined(__aarch64__)
TWK_INLINE Pairs load_pairs(const int8_t* p) { return (Pairs)vmovl_s8(vld1_s8(p)); }
TWK_INLINE Ints dot(Pairs a, Pairs b, Ints sums) {
  const int32x4_t low = vmull_s16(vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b));
  const int32x4_t high = vmull_high_s16((int16x8_t)a, (int16x8_t)b);
  return sums + (Ints)vpaddq_s32(low, high);
}
#else
TWK_INLINE Pairs load_pairs(const int8_t* p) {
  return Pairs{p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7]};
}
TWK_INLINE Ints dot(Pairs a, Pairs b, Ints sums) {
  for (int lane = 0; lane < kWidth; ++lane) {
    sums[lane] += int32_t{a[2 * lane]} * b[2 * lane] + int32_t{a[2 * lane + 1]} * b[2 * lane + 1];
  }
  return sums;
}
#endif
TWK_INLINE void keep(Ints&) {}

#endif

// The two activations at p, for every output.
TWK_INLINE Pairs load_pair(const int16_t* p) {
  int32_t both;
  memcpy(&both, p, sizeof both);
  return same_pair(both);
}

}  // namespace TWK_NAMESPACE
