// Exponentials on vectors: range reduction to [-ln 2 / 2, ln 2 / 2] and a polynomial.
#pragma once

#include "simd.h"

namespace TWK_NAMESPACE {

// 2^f for f in [-0.5, 0.5] by the Taylor series of e^(f ln 2), seven terms after 1: the first one
// left out is below 2^-27. Exactly 1 at 0.
TWK_INLINE Vec power_of_fraction(Vec f) {
  Vec p = set(1.5252733804059840e-5f);
  p = fma(p, f, set(1.5403530393381609e-4f));
  p = fma(p, f, set(1.3333558146428443e-3f));
  p = fma(p, f, set(9.6181291076284772e-3f));
  p = fma(p, f, set(5.5504108664821580e-2f));
  p = fma(p, f, set(2.4022650695910071e-1f));
  p = fma(p, f, set(6.9314718055994531e-1f));
  return fma(p, f, set(1.0f));
}

// 2^x for x <= 127; below -126, minus infinity included, a value of at most 2^-126.
TWK_INLINE Vec exp2_unclamped(Vec x) {
  const Vec n = round(x);
  return scale_by_power(power_of_fraction(x - n), n);
}

// 2^x for x <= 0. Anything below -126 gives exactly 0, NaN gives NaN.
TWK_INLINE Vec exp2_negative(Vec x);

// e^x, clamped to [-87, 88]: finite and above 0 for every x that is not NaN.
TWK_INLINE Vec exp_clamped(Vec x) {
  // min and max give their second operand where one is NaN, so x stands there.
  x = max(set(-87.0f), min(set(88.0f), x));
  const Vec n = round(x * set(1.44269504088896341f));
  // ln 2 in two parts, the first with trailing zeros so that n times it is exact (Cody and Waite).
  Vec r = fma(n, set(-0.693359375f), x);
  r = fma(n, set(2.12194440e-4f), r);
  Vec p = set(1.9841269841e-4f);
  p = fma(p, r, set(1.3888888889e-3f));
  p = fma(p, r, set(8.3333333333e-3f));
  p = fma(p, r, set(4.1666666667e-2f));
  p = fma(p, r, set(1.6666666667e-1f));
  p = fma(p, r, set(0.5f));
  p = fma(p, r, set(1.0f));
  return scale_by_power(fma(p, r, set(1.0f)), n);
}

#if TWK_ISA >= 2
TWK_INLINE Vec exp2_negative(Vec x) {
  const __mmask16 lost = _mm512_cmp_ps_mask(x, set(-126.0f), _CMP_LT_OQ);
  const Vec y = exp2_unclamped(_mm512_mask_blend_ps(lost, x, zero()));
  return _mm512_mask_blend_ps(lost, y, zero());
}
#elif TWK_ISA == 1
TWK_INLINE Vec exp2_negative(Vec x) {
  const Vec lost = _mm256_cmp_ps(x, set(-126.0f), _CMP_LT_OQ);
  return _mm256_andnot_ps(lost, exp2_unclamped(_mm256_andnot_ps(lost, x)));
}
#else
TWK_INLINE Vec exp2_negative(Vec x) {
  const IntVec lost = x < set(-126.0f);
  return select(lost, zero(), exp2_unclamped(select(lost, zero(), x)));
}
#endif

}  // namespace TWK_NAMESPACE
