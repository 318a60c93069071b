// The kernels of one instruction set, as the table and the decoder call them; see table.h.
#pragma once

#include "simd.h"
#include "table.h"

namespace TWK_NAMESPACE {

int64_t packed_bytes(const TwkPacked&);
void pack(TwkContext*, const TwkPacked&, const float* weight, int64_t stride);
void linear(TwkContext*, const TwkPacked&, const float* bias, const float* x, int64_t x_stride,
            int64_t rows, float* y, int64_t y_stride);
void gather(TwkContext*, const TwkPacked&, const int32_t* ids, int64_t count, float* out);
void rms_norm(TwkContext*, float* x, const float* added, const float* weight, float epsilon,
              int64_t rows, int64_t width, float* out);
void silu_multiply(TwkContext*, const float* gate_up, int64_t rows, int64_t width, float* out);
void row_statistics(TwkContext*, const float* x, int64_t rows, int64_t width, float* lse,
                    int32_t* argmax);
void rope_write(TwkContext*, const twk::RopeCall&, const TwkCache&, const TwkBatch&);
void attention(TwkContext*, const twk::AttentionCall&, const TwkCache&, const TwkBatch&);
void decode(TwkContext*, const TwkModel&, const TwkBatch&, float* hidden,
            const int32_t* logit_indices, int64_t logit_count, float* logits);

// One row of rms_norm; `x` may be `out`.
void normalize(const float* x, const float* weight, float epsilon, int64_t width, float* out);

}  // namespace TWK_NAMESPACE
