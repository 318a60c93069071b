// Paged attention for any mix of prefill chunks and decodes: every sequence's scheduled tokens
// attend to its context so far through its block table.
//
// Work is divided into units of (sequence, KV heads, a few query positions). The query heads of a
// KV head and the positions share each tile of keys, and a decoding sequence takes all KV heads of
// a tile in turn. Keys are stored by vectors of positions, so a tile is used where it lies. Two
// kinds are copied out first: blocks that are not a whole number of vectors, and bf16 tiles that
// many rows share.
//
// A context is always cut at multiples of kSplitKeys of the absolute position. Each part has its
// own softmax, and the parts are merged in ascending order. With few units the parts of one unit
// run on several threads: the same parts and the same merges, so the same bits.
#include "attention_tile.h"
#include "kernels.h"
#include "key_tiles.h"

namespace TWK_NAMESPACE {
namespace {

constexpr int64_t kSplitKeys = 256;  // a multiple of kTileKeys
constexpr int64_t kRowsPerUnit = 48;
constexpr float kLog2E = 1.44269504088896341f;

struct Unit {
  int64_t sequence;
  int64_t head, heads;          // KV heads [head, head + heads)
  int64_t query, count;        // scheduled tokens [query, query + count) of the sequence
  int64_t first_split, splits;  // parts of the context that any of its rows sees
  int64_t partial;              // index of its first stored part's rows
};

struct Shape {
  const TwkAttentionCall& call;
  const TwkCache& cache;
  const TwkBatch& batch;
  int64_t dim, group;
  int64_t row_limit;   // most rows a unit can have
  int64_t head_limit;  // most KV heads a unit can have
};

// A unit's rows: KV head by KV head, in each the positions, at each the query heads of the group.
int64_t row_count(const Shape& shape, const Unit& unit) {
  return unit.heads * unit.count * shape.group;
}

// A finished part or the whole: `sums` holds one number per row.
struct Part {
  float* largest;
  float* sums;
  float* out;
};

int64_t part_floats(const Shape& shape, int64_t rows) { return rows * (2 + shape.dim); }

Part part_at(float* memory, int64_t rows) { return {memory, memory + rows, memory + 2 * rows}; }

// A thread's working memory for one unit.
struct Workspace {
  explicit Workspace(const Shape& shape, float* memory) {
    const int64_t rows = shape.row_limit, dim = shape.dim;
    const auto take = [&](int64_t floats) {
      float* const start = memory;
      memory += (floats + 15) / 16 * 16;
      return start;
    };
    queries = take(rows * dim);
    scores = take(rows * kTileKeys);
    tile = {take(dim * kTileKeys), take(dim * kTileKeys)};
    running = {take(rows), take(rows * kWidth), take(rows * dim)};
    whole = take(part_floats(shape, rows));
    next = take(part_floats(shape, rows));
  }
  static int64_t bytes(const Shape& shape) {
    const int64_t rows = shape.row_limit, dim = shape.dim;
    return 4 * (rows * (2 * dim + kTileKeys + kWidth + 1) + 2 * dim * kTileKeys +
                2 * part_floats(shape, rows) + 9 * 16);
  }

  float *queries, *scores, *whole, *next;
  TileMemory tile;
  Running running;
  Ahead ahead;
};

int64_t query_length(const TwkBatch& batch, int64_t sequence) {
  return batch.query_starts[sequence + 1] - batch.query_starts[sequence];
}

int64_t first_position(const TwkBatch& batch, const Unit& unit) {
  return batch.context_lengths[unit.sequence] - query_length(batch, unit.sequence) + unit.query;
}

int64_t window_start(int64_t position, int64_t window) {
  return window > 0 ? larger(0, position - window + 1) : 0;
}

void load_queries(const Shape& shape, const Unit& unit, float* out) {
  const TwkAttentionCall& call = shape.call;
  const Vec scale = set(call.scale * kLog2E);
  const int64_t first = shape.batch.query_starts[unit.sequence] + unit.query;
  const int64_t width = shape.group * shape.dim;
  for (int64_t head = unit.head; head < unit.head + unit.heads; ++head) {
    for (int64_t token = first; token < first + unit.count; ++token) {
      const float* in = call.queries + token * call.query_stride + head * width;
      for (int64_t d = 0; d < width; d += kWidth) store(out + d, load(in + d) * scale);
      out += width;
    }
  }
}

// The rows of the unit's KV head `which` over one tile of that head's keys.
template <typename Stored>
void attend_tile(const Shape& shape, const Unit& unit, int64_t which, const KeyTile<Stored>& tile,
                 Workspace& space) {
  const int64_t rows = unit.count * shape.group, position = first_position(shape.batch, unit);
  const int64_t first = which * rows;
  for (int64_t row = first; row < first + rows; row += kTileRows) {
    const int64_t count = smaller(kTileRows, first + rows - row);
    Span spans[kTileRows];
    for (int64_t r = 0; r < count; ++r) {
      const int64_t own = position + (row - first + r) / shape.group;
      spans[r].begin = window_start(own, shape.call.window) - tile.start;
      spans[r].end = own + 1 - tile.start;
    }
    const Running state{space.running.largest + row, space.running.sums + row * kWidth,
                        space.running.out + row * shape.dim};
    const float* queries = space.queries + row * shape.dim;
    float* scores = space.scores + row * kTileKeys;
    if (space.ahead.empty()) {
      attend_rows<Stored, false>(count, queries, tile, spans, shape.dim, scores, state, nullptr);
    } else {
      attend_rows<Stored, true>(count, queries, tile, spans, shape.dim, scores, state,
                                &space.ahead);
    }
  }
}

template <typename Stored>
void attend_head(const Shape& shape, const Unit& unit, int64_t which, const Place& place,
                 Workspace& space) {
  const int64_t head = unit.head + which;
  if (!whole_vectors(shape.cache)) {
    const KeyTile<float> tile = gather_tile<Stored>(shape.cache, shape.batch, unit.sequence, head,
                                                    place, space.tile);
    attend_tile(shape, unit, which, tile, space);
  } else if (sizeof(Stored) < sizeof(float) && unit.count * shape.group > kTileRows) {
    attend_tile(shape, unit, which, expand_tile<Stored>(shape.cache, head, place, space.tile),
                space);
  } else {
    attend_tile(shape, unit, which, stored_tile<Stored>(shape.cache, head, place), space);
  }
}

// The positions of part `split` of the context that any of the unit's rows sees.
Span split_span(const Shape& shape, const Unit& unit, int64_t split) {
  const int64_t position = first_position(shape.batch, unit);
  return {larger(split * kSplitKeys, window_start(position, shape.call.window)),
          smaller((split + 1) * kSplitKeys, position + unit.count)};
}

// Attention over one part of the context, into `out` unnormalised; sums 0 for rows that see none.
// `following` is the unit that the thread is likely to take next, or null.
void attend_split(const Shape& shape, const Unit& unit, int64_t split, const Unit* following,
                  Workspace& space, Part out) {
  const int64_t rows = row_count(shape, unit);
  const Running& running = space.running;
  for (int64_t row = 0; row < rows; ++row) running.largest[row] = kMasked;
  memset(running.sums, 0, static_cast<size_t>(rows * kWidth) * sizeof(float));
  memset(running.out, 0, static_cast<size_t>(rows * shape.dim) * sizeof(float));
  const auto tile_of = [&](int64_t part, int64_t position) {
    const Span span = split_span(shape, unit, part);
    return place_tile(shape.cache, shape.batch, unit.sequence, tile_start(position), span.begin,
                      span.end);
  };
  const Span own = split_span(shape, unit, split);
  Place place = tile_of(split, own.begin);
  for (int64_t start = place.start; start < own.end; start += kTileKeys) {
    const int64_t next_start = start + kTileKeys;
    Place next = place;
    int64_t next_head = unit.head;
    if (next_start < own.end) {
      next = tile_of(split, next_start);
    } else if (split + 1 < unit.first_split + unit.splits) {
      next = tile_of(split + 1, next_start);
    } else if (following != nullptr) {
      const Span first = split_span(shape, *following, following->first_split);
      next = place_tile(shape.cache, shape.batch, following->sequence, tile_start(first.begin),
                        first.begin, first.end);
      next_head = following->head;
    }
    for (int64_t which = 0; which < unit.heads; ++which) {
      const bool last = which + 1 == unit.heads;
      look_ahead(shape.cache, last ? next_head : unit.head + which + 1, last ? next : place,
                 space.ahead);
      if (shape.cache.kind == TWK_KV_BF16) {
        attend_head<uint16_t>(shape, unit, which, place, space);
      } else {
        attend_head<float>(shape, unit, which, place, space);
      }
    }
    place = next;
  }
  for (int64_t row = 0; row < rows; ++row) {
    out.largest[row] = running.largest[row];
    out.sums[row] = sum(load(running.sums + row * kWidth));
  }
  memcpy(out.out, running.out, static_cast<size_t>(rows * shape.dim) * sizeof(float));
}

// Merges the next part into the whole. The first part that a row sees becomes its whole.
void merge(Part whole, Part next, int64_t rows, int64_t dim) {
  for (int64_t row = 0; row < rows; ++row) {
    if (next.sums[row] == 0.0f) continue;
    float* out = whole.out + row * dim;
    const float* added = next.out + row * dim;
    if (whole.sums[row] == 0.0f) {
      whole.largest[row] = next.largest[row];
      whole.sums[row] = next.sums[row];
      memcpy(out, added, static_cast<size_t>(dim) * sizeof(float));
      continue;
    }
    const float before = whole.largest[row], found = next.largest[row];
    const float largest_score = found > before ? found : before;
    const Vec keep = exp2_negative(set(before - largest_score));
    const Vec take = exp2_negative(set(found - largest_score));
    for (int64_t d = 0; d < dim; d += kWidth) {
      store(out + d, fma(load(added + d), take, load(out + d) * keep));
    }
    float lanes[kWidth];
    store(lanes, fma(set(next.sums[row]), take, set(whole.sums[row]) * keep));
    whole.sums[row] = lanes[0];
    whole.largest[row] = largest_score;
  }
}

void finish(const Shape& shape, const Unit& unit, Part whole) {
  const TwkAttentionCall& call = shape.call;
  for (int64_t row = 0; row < row_count(shape, unit); ++row) {
    const int64_t place = row / shape.group;
    const int64_t token =
        shape.batch.query_starts[unit.sequence] + unit.query + place % unit.count;
    const int64_t head = (unit.head + place / unit.count) * shape.group + row % shape.group;
    const float total = whole.sums[row];
    const Vec inverse = set(total == 0.0f ? 0.0f : 1.0f / total);
    float* out = call.out + token * call.out_stride + head * shape.dim;
    for (int64_t d = 0; d < shape.dim; d += kWidth) {
      store(out + d, load(whole.out + row * shape.dim + d) * inverse);
    }
  }
}

void clear(Part part, int64_t rows, int64_t dim) {
  memset(part.sums, 0, static_cast<size_t>(rows) * sizeof(float));
  memset(part.out, 0, static_cast<size_t>(rows * dim) * sizeof(float));
  for (int64_t row = 0; row < rows; ++row) part.largest[row] = kMasked;
}

// Writes the units of the batch to `units` if not null; returns how many there are.
int64_t list_units(const Shape& shape, Unit* units) {
  const int64_t positions = larger(1, kRowsPerUnit / shape.group), kv_heads = shape.cache.kv_heads;
  int64_t count = 0, partial = 0;
  for (int64_t sequence = 0; sequence < shape.batch.sequences; ++sequence) {
    const int64_t length = query_length(shape.batch, sequence);
    if (length == 0) continue;
    const int64_t fitting = kRowsPerUnit / (smaller(length, positions) * shape.group);
    const int64_t heads = larger(1, smaller(fitting, shape.head_limit));
    for (int64_t head = 0; head < kv_heads; head += heads) {
      for (int64_t query = 0; query < length; query += positions) {
        Unit unit{sequence, head,    smaller(heads, kv_heads - head),
                  query,    smaller(positions, length - query),
                  0,        0,       partial};
        const int64_t position = first_position(shape.batch, unit);
        unit.first_split = window_start(position, shape.call.window) / kSplitKeys;
        unit.splits = (position + unit.count - 1) / kSplitKeys + 1 - unit.first_split;
        partial += unit.splits;
        if (units != nullptr) units[count] = unit;
        ++count;
      }
    }
  }
  return count;
}

void run_units(TwkContext* context, const Shape& shape, const Unit* units, int64_t count) {
  parallel(context, count, [&](int64_t index, int thread) {
    const Unit& unit = units[index];
    const Unit* const following = index + 1 < count ? units + index + 1 : nullptr;
    const int64_t rows = row_count(shape, unit);
    Workspace space(shape, static_cast<float*>(twk::thread_scratch(context, thread,
                                                                   Workspace::bytes(shape))));
    load_queries(shape, unit, space.queries);
    const Part whole = part_at(space.whole, rows), next = part_at(space.next, rows);
    clear(whole, rows, shape.dim);
    for (int64_t split = 0; split < unit.splits; ++split) {
      attend_split(shape, unit, unit.first_split + split, following, space, next);
      merge(whole, next, rows, shape.dim);
    }
    finish(shape, unit, whole);
  });
}

// Parts of all units in parallel, then their merges.
void run_splits(TwkContext* context, const Shape& shape, const Unit* units, int64_t count) {
  const int64_t parts = units[count - 1].partial + units[count - 1].splits;
  const int64_t floats = part_floats(shape, shape.row_limit);
  float* memory = static_cast<float*>(
      twk::scratch(context, twk::Use::kPartials, (parts + count) * floats * 4));
  parallel(context, parts, [&](int64_t part, int thread) {
    int64_t index = 0;
    while (index + 1 < count && units[index + 1].partial <= part) ++index;
    const Unit& unit = units[index];
    Workspace space(shape, static_cast<float*>(twk::thread_scratch(context, thread,
                                                                   Workspace::bytes(shape))));
    load_queries(shape, unit, space.queries);
    attend_split(shape, unit, unit.first_split + part - unit.partial, nullptr, space,
                 part_at(memory + part * floats, row_count(shape, unit)));
  });
  parallel(context, count, [&](int64_t index, int) {
    const Unit& unit = units[index];
    const int64_t rows = row_count(shape, unit);
    const Part whole = part_at(memory + (parts + index) * floats, rows);
    clear(whole, rows, shape.dim);
    for (int64_t split = 0; split < unit.splits; ++split) {
      merge(whole, part_at(memory + (unit.partial + split) * floats, rows), rows, shape.dim);
    }
    finish(shape, unit, whole);
  });
}

}  // namespace

void attention(TwkContext* context, const TwkAttentionCall& call) {
  const TwkCache& cache = *call.cache;
  const int64_t group = call.q_heads / cache.kv_heads;
  const int threads = twk::thread_count(context);
  const int64_t row_limit = larger(kRowsPerUnit, group);
  Shape shape{call, cache, *call.batch, cache.head_dim, group, row_limit, cache.kv_heads};
  int64_t count = list_units(shape, nullptr);
  if (count == 0) return;
  if (threads > 1 && count < 4 * threads) {
    shape.head_limit = 1;
    count = list_units(shape, nullptr);
  }
  Unit* units = static_cast<Unit*>(twk::scratch(context, twk::Use::kTasks,
                                                count * static_cast<int64_t>(sizeof(Unit))));
  list_units(shape, units);
  const int64_t parts = units[count - 1].partial + units[count - 1].splits;
  if (threads > 1 && count < 4 * threads && parts > count) {
    run_splits(context, shape, units, count);
  } else {
    run_units(context, shape, units, count);
  }
}

}  // namespace TWK_NAMESPACE
