// A loop over independent indices on the context's threads, by a lambda (index, thread).
#pragma once

#include "runtime.h"
#include "simd.h"

namespace TWK_NAMESPACE {

template <typename Body>
void parallel(TwkContext* context, int64_t count, const Body& body) {
  twk::run_tasks(
      context, count,
      [](void* argument, int64_t index, int thread) {
        (*static_cast<const Body*>(argument))(index, thread);
      },
      const_cast<Body*>(&body));
}

// Rows of `width` floats in tasks of about 16 kB: less is not worth waking a thread for.
template <typename Body>
void parallel_rows(TwkContext* context, int64_t rows, int64_t width, const Body& body) {
  const int64_t per_task = width >= 4096 ? 1 : 4096 / (width > 0 ? width : 1);
  parallel(context, (rows + per_task - 1) / per_task, [&](int64_t task, int) {
    const int64_t last = (task + 1) * per_task < rows ? (task + 1) * per_task : rows;
    for (int64_t row = task * per_task; row < last; ++row) body(row);
  });
}

TWK_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
TWK_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
TWK_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
// Where tile `which` of `count` nearly equal ones begins among `rows`.
TWK_INLINE int64_t tile_begin(int64_t rows, int64_t count, int64_t which) {
  return rows * which / count;
}

}  // namespace TWK_NAMESPACE
