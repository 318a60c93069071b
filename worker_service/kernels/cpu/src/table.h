// One table of functions per instruction set; the dispatcher picks one when a context is made.
#pragma once

#include "abi.h"

// Every kernel that Python can call: its name, and the structure that holds its arguments. The
// declarations, the table and the exported functions are made from this list.
#define TWK_KERNELS(X)                  \
  X(pack, TwkPackCall)                  \
  X(linear, TwkLinearCall)              \
  X(gather, TwkGatherCall)              \
  X(rms_norm, TwkRmsNormCall)           \
  X(silu_multiply, TwkSiluMultiplyCall) \
  X(rope_write, TwkRopeWriteCall)       \
  X(attention, TwkAttentionCall)        \
  X(adapt, TwkAdaptCall)                \
  X(decode, TwkDecodeCall)

namespace twk {

struct Kernels {
  const char* name;
  int64_t head_dim_multiple;
  int64_t (*packed_bytes)(const TwkPacked&);
#define TWK_FIELD(kernel, Call) void (*kernel)(TwkContext*, const Call&);
  TWK_KERNELS(TWK_FIELD)
#undef TWK_FIELD
};

// Null where the library was built without the instruction set or the CPU lacks it. Only the
// dispatcher calls these.
const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_vnni_kernels();

}  // namespace twk
