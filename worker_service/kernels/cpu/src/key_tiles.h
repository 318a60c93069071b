// Finding a sequence's tiles of keys and values in the paged cache, and prefetching them.
#pragma once

#include "abi.h"
#include "attention_tile.h"

namespace TWK_NAMESPACE {

// Where the vectors of a tile lie: elements before their block, and positions into it.
struct Place {
  int64_t start, begin, end;  // as KeyTile
  int64_t block[kTileVectors], offset[kTileVectors];
};

inline int64_t tile_start(int64_t position) { return position / kTileKeys * kTileKeys; }

// The tile at `start`, its keys at positions [begin, end) only.
inline Place place_tile(const TwkCache& cache, const TwkBatch& batch, int64_t sequence,
                        int64_t start, int64_t begin, int64_t end) {
  Place place;
  place.start = start;
  place.begin = larger(begin - start, 0);
  place.end = smaller(end - start, kTileKeys);
  const int32_t* table = batch.block_tables + sequence * batch.table_stride;
  const int64_t size = cache.block_size;
  const int64_t block_elements = cache.kv_heads * size * cache.head_dim;
  for (int64_t at = place.begin / kWidth; at * kWidth < place.end; ++at) {
    const int64_t position = start + at * kWidth;
    place.block[at] = table[position / size] * block_elements;
    place.offset[at] = position % size;
  }
  return place;
}

// A tile in the cache itself: vectors of whole blocks.
template <typename Stored>
KeyTile<Stored> stored_tile(const TwkCache& cache, int64_t head, const Place& place) {
  const int64_t head_elements = head * cache.block_size * cache.head_dim;
  const Stored* keys = static_cast<const Stored*>(cache.keys) + head_elements;
  const Stored* values = static_cast<const Stored*>(cache.values) + head_elements;
  KeyTile<Stored> tile{place.start, place.begin, place.end, {}, {}, cache.block_size};
  for (int64_t at = place.begin / kWidth; at * kWidth < place.end; ++at) {
    tile.keys[at] = keys + place.block[at] + place.offset[at];
    tile.values[at] = values + place.block[at] + place.offset[at] * cache.head_dim;
  }
  return tile;
}

// Room for one head's tile: keys [head_dim, kTileKeys], values [kTileKeys, head_dim].
struct TileMemory {
  float* keys;
  float* values;
};

inline KeyTile<float> copied_tile(const TwkCache& cache, const Place& place,
                                  const TileMemory& memory) {
  KeyTile<float> tile{place.start, place.begin, place.end, {}, {}, kTileKeys};
  for (int64_t at = 0; at < kTileVectors; ++at) {
    tile.keys[at] = memory.keys + at * kWidth;
    tile.values[at] = memory.values + at * kWidth * cache.head_dim;
  }
  return tile;
}

// The same in float32, copied out vector by vector.
template <typename Stored>
KeyTile<float> expand_tile(const TwkCache& cache, int64_t head, const Place& place,
                           const TileMemory& memory) {
  const KeyTile<Stored> stored = stored_tile<Stored>(cache, head, place);
  for (int64_t at = place.begin / kWidth; at * kWidth < place.end; ++at) {
    float* keys = memory.keys + at * kWidth;
    float* values = memory.values + at * kWidth * cache.head_dim;
    for (int64_t d = 0; d < cache.head_dim; ++d) {
      store(keys + d * kTileKeys, load(stored.keys[at] + d * stored.key_stride));
      store(values + d * kWidth, load(stored.values[at] + d * kWidth));
    }
  }
  return copied_tile(cache, place, memory);
}

inline float to_float(float x) { return x; }
inline float to_float(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// The same from blocks of any size, copied out key by key.
template <typename Stored>
KeyTile<float> gather_tile(const TwkCache& cache, const TwkBatch& batch, int64_t sequence,
                           int64_t head, const Place& place, const TileMemory& memory) {
  const int32_t* table = batch.block_tables + sequence * batch.table_stride;
  const int64_t size = cache.block_size, dim = cache.head_dim;
  for (int64_t key = place.begin; key < place.end; ++key) {
    const int64_t position = place.start + key, offset = position % size;
    const int64_t block = (table[position / size] * cache.kv_heads + head) * size * dim;
    const Stored* keys = static_cast<const Stored*>(cache.keys) + block + offset;
    const Stored* values = static_cast<const Stored*>(cache.values) + block + offset * dim;
    for (int64_t d = 0; d < dim; ++d) {
      memory.keys[d * kTileKeys + key] = to_float(keys[d * size]);
      memory.values[key * dim + d] = to_float(values[d]);
    }
  }
  return copied_tile(cache, place, memory);
}

inline bool whole_vectors(const TwkCache& cache) { return cache.block_size % kWidth == 0; }

// Sets `ahead` to the keys and values of one head's tile.
inline void look_ahead(const TwkCache& cache, int64_t head, const Place& place, Ahead& ahead) {
  const int64_t size = cache.block_size, item = cache.kind == TWK_KV_BF16 ? 2 : 4;
  const int64_t head_bytes = head * size * cache.head_dim * item;
  ahead.clear(size * cache.head_dim * item);
  if (!whole_vectors(cache) || size > kTileKeys) return;
  const void* const parts[] = {cache.keys, cache.values};
  for (const void* part : parts) {
    const char* const heads = static_cast<const char*>(part) + head_bytes;
    for (int64_t at = place.begin / kWidth; at * kWidth < place.end; ++at) {
      const bool starts = place.offset[at] == 0 || at == place.begin / kWidth;
      if (starts) ahead.add(heads + place.block[at] * item);
    }
  }
}

}  // namespace TWK_NAMESPACE
