// One table of functions per instruction set; the dispatcher picks one when a context is made.
#pragma once

#include "abi.h"

namespace twk {

struct AttentionCall {
  const float* queries;  // token t, head h at t * query_stride + h * head_dim
  int64_t query_stride;
  float* out;  // the same, with out_stride
  int64_t out_stride;
  float* log_sum_exp;  // [tokens, q_heads], or null
  int64_t q_heads;
  int64_t window;
  float scale;
};

struct RopeCall {
  float* qkv;  // token t at t * stride: q heads, then k heads, then v heads
  int64_t stride;
  int64_t q_heads;
  int64_t rotary_dim;
  const float* cosines;
  const float* sines;
  const float* q_norm;
  const float* k_norm;
  float epsilon;
};

struct Kernels {
  const char* name;
  int64_t head_dim_multiple;
  int64_t (*packed_bytes)(const TwkPacked&);
  void (*pack)(TwkContext*, const TwkPacked&, const float* weight, int64_t stride);
  void (*linear)(TwkContext*, const TwkPacked&, const float* bias, const float* x,
                 int64_t x_stride, int64_t rows, float* y, int64_t y_stride);
  void (*gather)(TwkContext*, const TwkPacked&, const int32_t* ids, int64_t count, float* out);
  void (*rms_norm)(TwkContext*, float* x, const float* added, const float* weight, float epsilon,
                   int64_t rows, int64_t width, float* out);
  void (*silu_multiply)(TwkContext*, const float* gate_up, int64_t rows, int64_t width, float* out);
  void (*row_statistics)(TwkContext*, const float* x, int64_t rows, int64_t width, float* lse,
                         int32_t* argmax);
  void (*rope_write)(TwkContext*, const RopeCall&, const TwkCache&, const TwkBatch&);
  void (*attention)(TwkContext*, const AttentionCall&, const TwkCache&, const TwkBatch&);
  void (*decode)(TwkContext*, const TwkModel&, const TwkBatch&, float* hidden,
                 const int32_t* logit_indices, int64_t logit_count, float* logits);
};

// Null where the library was built without it or the CPU lacks it: asked by the dispatcher only.
const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_vnni_kernels();

}  // namespace twk
