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

enum { TWK_ABI_VERSION = 3 };
enum {
  TWK_ISA_PORTABLE = 0,
  TWK_ISA_AVX2 = 1,
  TWK_ISA_AVX512 = 2,
  TWK_ISA_AVX512_VNNI = 3
};
enum { TWK_F32 = 0, TWK_I8 = 1 };
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
  TwkPacked head;      // [vocabulary, hidden]; data null: no logits
} TwkModel;

#ifdef __cplusplus
}
#endif
