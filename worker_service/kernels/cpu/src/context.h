// How the dispatcher makes a context; kernels see only runtime.h.
#pragma once

#include "runtime.h"
#include "table.h"

namespace twk {

TwkContext* create_context(int threads, const Kernels* kernels);
void destroy_context(TwkContext* context);
const Kernels& kernels_of(const TwkContext* context);
int64_t scratch_bytes(const TwkContext* context);
void advise_huge_pages(void* data, int64_t bytes);

}  // namespace twk
