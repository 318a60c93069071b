// This instruction set's table, under the name that the dispatcher asks for.
#include "table.h"

#include "kernels.h"

namespace TWK_NAMESPACE {
namespace {

#if TWK_ISA == 3
constexpr const char* kName = "avx512_vnni";
#elif TWK_ISA == 2
constexpr const char* kName = "avx512";
#elif TWK_ISA == 1
constexpr const char* kName = "avx2";
#else
constexpr const char* kName = "portable";
#endif

#define TWK_NAME(kernel, Call) kernel,
constexpr twk::Kernels kTable = {kName, kWidth, packed_bytes, TWK_KERNELS(TWK_NAME)};
#undef TWK_NAME

}  // namespace
}  // namespace TWK_NAMESPACE

namespace twk {

#if TWK_ISA == 3
const Kernels* avx512_vnni_kernels() { return &TWK_NAMESPACE::kTable; }
#elif TWK_ISA == 2
const Kernels* avx512_kernels() { return &TWK_NAMESPACE::kTable; }
#elif TWK_ISA == 1
const Kernels* avx2_kernels() { return &TWK_NAMESPACE::kTable; }
#else
const Kernels* portable_kernels() { return &TWK_NAMESPACE::kTable; }
#endif

}  // namespace twk
