// A loop over independent indices on the context's threads, by a lambda (index, thread); and what
// tiles of rows need.
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

template <int kCount>
struct RowCount {
  static constexpr int kRows = kCount;
};

// Calls body(RowCount<rows>{}) for rows in [1, kTileRows]: a tile is compiled for each number.
template <typename Body>
TWK_INLINE void with_rows(int64_t rows, const Body& body) {
  switch (rows) {
    case 1: return body(RowCount<1>{});
    case 2: return body(RowCount<2>{});
    case 3: return body(RowCount<3>{});
    case 4: return body(RowCount<4>{});
    case 5: if constexpr (kTileRows > 4) return body(RowCount<5>{}); break;
    case 6: if constexpr (kTileRows > 5) return body(RowCount<6>{}); break;
    case 7: if constexpr (kTileRows > 6) return body(RowCount<7>{}); break;
    case 8: if constexpr (kTileRows > 7) return body(RowCount<8>{}); break;
  }
  __builtin_unreachable();
}

}  // namespace TWK_NAMESPACE
