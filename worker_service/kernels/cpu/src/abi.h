// The plain C ABI of the CPU kernels: what Python passes, and nothing of C++ or torch.
//
// Every pointer is host memory. Matrices are row-major; a stride counts elements, not bytes.
// Sizes are int64, indices int32. Functions that can refuse return 0 on success, -1 otherwise;
// everything else is checked by the caller in Python.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { TWK_ABI_VERSION = 5 };
enum {
  TWK_ISA_PORTABLE = 0,
  TWK_ISA_AVX2 = 1,
  TWK_ISA_AVX512 = 2,
  TWK_ISA_AVX512_VNNI = 3
};
enum { TWK_F32 = 0, TWK_I8 = 1, TWK_BF16 = 2 };
enum { TWK_KV_F32 = 0, TWK_KV_BF16 = 1 };

typedef struct TwkContext TwkContext;

// A weight matrix [n, k] in panels (panels.h). `group`: columns of k that share an
// int8 scale, 512 at most: a group's products with int16 activations are summed in int32.
typedef struct TwkPacked {
  const void* data;
  int64_t n;
  int64_t k;
  int32_t kind;
  int32_t group;
} TwkPacked;

// A paged KV cache of one layer: V `[blocks, kv_heads, block_size, head_dim]`, K transposed within
// its block, `[blocks, kv_heads, head_dim, block_size]`: scores are computed for a vector of
// positions at a time, and each head's part of a block is one stretch of memory.
typedef struct TwkCache {
  void* keys;
  void* values;
  int32_t kind;
  int32_t block_size;
  int32_t kv_heads;
  int32_t head_dim;
} TwkCache;

// One step of `sequences` rows and `tokens` tokens. Token i of sequence s has the position
// context_lengths[s] - (query_starts[s + 1] - query_starts[s]) + i.
typedef struct TwkBatch {
  int64_t tokens;
  int64_t sequences;
  const int32_t* query_starts;     // [sequences + 1]
  const int32_t* context_lengths;  // [sequences], the scheduled tokens included
  const int32_t* block_tables;     // [sequences, table_stride]
  int64_t table_stride;
  const int32_t* positions;  // [tokens]
  const int32_t* slots;      // [tokens], block * block_size + offset; below 0: not written
} TwkBatch;

typedef struct TwkLayer {
  TwkPacked qkv;      // [(q_heads + 2 kv_heads) * head_dim, hidden]
  TwkPacked output;   // [hidden, q_heads * head_dim]
  TwkPacked gate_up;  // [2 intermediate, hidden]
  TwkPacked down;     // [hidden, intermediate]
  const float* qkv_bias;
  const float* output_bias;
  const float* gate_up_bias;
  const float* down_bias;
  const float* input_norm;
  const float* post_norm;
  const float* q_norm;  // [head_dim] or null
  const float* k_norm;
  void* keys;
  void* values;
  int64_t window;  // positions attended to, 0: all
} TwkLayer;

typedef struct TwkModel {
  const TwkLayer* layers;
  int64_t layer_count;
  int64_t hidden;
  int64_t intermediate;
  int32_t q_heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t rotary_dim;
  int32_t block_size;
  int32_t kv_kind;
  float epsilon;
  float scale;
  const float* cosines;  // [positions, rotary_dim / 2]
  const float* sines;
  const float* final_norm;
  TwkPacked head;  // [vocabulary, hidden]
} TwkModel;

// Which tokens of a step have which adapters: runs of `tokens`, one adapter each. An adapter may
// have several runs.
typedef struct TwkAdapterBatch {
  int64_t segments;
  const int32_t* starts;  // [segments + 1], where each run begins in `tokens`
  const int32_t* slots;   // [segments], from 0
  const int32_t* tokens;  // indices of the step's tokens
  int64_t rank_stride;    // the highest rank of any slot, a multiple of the vector's width
} TwkAdapterBatch;

// Outputs of a stacked projection that an adapter's pair of matrices adds to.
typedef struct TwkAdapterTarget {
  int64_t first;
  int64_t count;
} TwkAdapterTarget;

// What one adapter adds to one target: scale * B (A x), in thin panels (adapters.cpp).
typedef struct TwkAdapterPart {
  const void* a;  // [rank, k]; null: nothing
  const void* b;  // [count, rank]
  int32_t rank;
  int32_t kind;  // TWK_F32 or TWK_BF16, of both
  float scale;
} TwkAdapterPart;

// The adapters of a step, for a whole decoder. Each layer has the same targets: those of qkv, then
// of output, gate_up and down, each from its entry of `first_targets` on.
typedef struct TwkAdapters {
  TwkAdapterBatch batch;
  const TwkAdapterTarget* targets;
  int64_t first_targets[5];
  const TwkAdapterPart* parts;  // [slots][layers][targets]
  int64_t part_stride;          // from slot to slot
} TwkAdapters;

// The arguments of each kernel, one structure per function of the same name (kernels.h). Every
// function takes the context and a pointer to its structure, and returns 0, or -1 where it cannot
// have the memory that it needs.

// Packs `weight` [n, k] into the memory of `packed`.
typedef struct TwkPackCall {
  const TwkPacked* packed;
  const float* weight;
  int64_t weight_stride;
} TwkPackCall;

// y [rows, n] = x [rows, k] times the packed weight's transpose, plus `bias` [n].
typedef struct TwkLinearCall {
  const TwkPacked* packed;
  const float* bias;  // or null
  const float* x;
  int64_t x_stride;
  int64_t rows;
  float* y;
  int64_t y_stride;
} TwkLinearCall;

// out [count, k] = the packed weight's rows `ids`, each in [0, n).
typedef struct TwkGatherCall {
  const TwkPacked* packed;
  const int32_t* ids;
  int64_t count;
  float* out;
} TwkGatherCall;

// x [rows, width] += added; out = x / rms(x) * weight.
typedef struct TwkRmsNormCall {
  float* x;
  const float* added;  // or null
  const float* weight;
  float epsilon;
  int64_t rows;
  int64_t width;
  float* out;
} TwkRmsNormCall;

// out [rows, width] = silu(gate) * up of gate_up [rows, 2 width], the gates first.
typedef struct TwkSiluMultiplyCall {
  const float* gate_up;
  int64_t rows;
  int64_t width;
  float* out;
} TwkSiluMultiplyCall;

// Rotates q and k in place by position and writes k and v to the batch's slots.
typedef struct TwkRopeWriteCall {
  float* qkv;  // token t at t * stride: q heads, then k heads, then v heads
  int64_t stride;
  int64_t q_heads;
  int64_t rotary_dim;
  const float* cosines;  // [positions, rotary_dim / 2]
  const float* sines;
  const float* q_norm;  // [head_dim] or null: RMSNorm of each head before the rotation
  const float* k_norm;
  float epsilon;
  const TwkCache* cache;
  const TwkBatch* batch;
} TwkRopeWriteCall;

// Causal attention of the batch's tokens over their context.
typedef struct TwkAttentionCall {
  const float* queries;  // token t, head h at t * query_stride + h * head_dim
  int64_t query_stride;
  float* out;  // the same, with out_stride
  int64_t out_stride;
  int64_t q_heads;
  int64_t window;  // positions attended to, 0: all
  float scale;
  const TwkCache* cache;
  const TwkBatch* batch;
} TwkAttentionCall;

// y [tokens, …] += what adapters make of x [tokens, k], both of the whole step. With `own` that
// projection of the same x comes first, and the two are computed side by side.
typedef struct TwkAdaptCall {
  const TwkLinearCall* own;  // or null
  const TwkAdapterBatch* batch;
  const TwkAdapterTarget* targets;
  int64_t target_count;
  const TwkAdapterPart* parts;  // of slot 0; a later one's are `part_stride` further on
  int64_t part_stride;
  const float* x;
  int64_t x_stride;
  int64_t k;
  float* y;
  int64_t y_stride;
} TwkAdaptCall;

// A whole step: `hidden` [tokens, hidden] is consumed; logits [logit_count, vocabulary] of the
// tokens `logit_indices`.
typedef struct TwkDecodeCall {
  const TwkModel* model;
  const TwkBatch* batch;
  float* hidden;
  const int32_t* logit_indices;
  int64_t logit_count;
  float* logits;  // or null where logit_count is 0
  const TwkAdapters* adapters;  // or null: no token has one
} TwkDecodeCall;

#ifdef __cplusplus
}
#endif
