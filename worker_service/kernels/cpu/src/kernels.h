// The kernels of one instruction set, as the table and the decoder call them; see table.h and abi.h.
#pragma once

#include "simd.h"
#include "table.h"

namespace TWK_NAMESPACE {

#define TWK_DECLARE(kernel, Call) void kernel(TwkContext*, const Call&);
TWK_KERNELS(TWK_DECLARE)
#undef TWK_DECLARE

// The bytes of a packed matrix.
int64_t packed_bytes(const TwkPacked&);

// One row of rms_norm; `x` may be `out`.
void normalize(const float* x, const float* weight, float epsilon, int64_t width, float* out);

}  // namespace TWK_NAMESPACE
