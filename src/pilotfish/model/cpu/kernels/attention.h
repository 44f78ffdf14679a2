// Tree attention over slots.
//
// Row r sits at position row_positions[r] and attends to the positions up to its own along its path:
//
//     position   0 ........ row_prefixes[r] - 1   row_prefixes[r] ...... row_positions[r]
//     slot       prefix_slots from row_starts[r]  path_slots[r]
//
// The prefix holds a sequence's committed tokens, whose start its rows share; the path a tree node's ancestors and the
// node itself. With a window of w the row attends to the last w of these positions alone, its own included. A score is
// q . k * scale, capped at softcap * tanh(score / softcap) (Gemma 2, arXiv 2408.00118). A head's sink is one more score
// without a value: it takes its share of the weights (gpt-oss; Xiao et al. 2023, arXiv 2309.17453). Keys are reduced in
// blocks of kBlock positions with a running maximum (Milakov and Gimelshein 2018, arXiv 1805.02867); block borders
// depend on positions alone. A row at position -1 is padding: zeros.

#pragma once

#include "team.h"
#include "vectors.h"

namespace pilotfish {

constexpr int64_t kBlock = 64;
constexpr int64_t kPartHeads = 8;  // query heads of a KV head that one thread computes together

struct AttentionInputs {
  const int32_t *row_slots, *row_starts, *row_positions, *row_prefixes, *path_slots, *prefix_slots;
  int64_t rows, path_width, query_heads, kv_heads, head_dim, query_stride;
  float scale;
  int64_t window;      // 0: none
  float softcap;       // 0: none
  const float* sinks;  // [query_heads], null: none

  int64_t shared_by() const { return query_heads / kv_heads; }
  // Of the heads that share a KV head.
  int64_t num_parts() const { return (shared_by() + kPartHeads - 1) / kPartHeads; }

  int64_t slot(int64_t row, int64_t position) const {
    const int64_t prefix = row_prefixes[row];
    return position < prefix ? prefix_slots[row_starts[row] + position]
                             : path_slots[row * path_width + position - prefix];
  }
};

// The keys of a block side by side, [head_dim, kBlock], dimensions in the lane order of load_pair: a score is then a
// lane of a sum over dimensions, and no sum over lanes is needed.
struct Columns {};

template <typename T>
struct KeyColumns {
  int64_t dims;
  float* columns;

  KeyColumns(int64_t head_dim) : dims(head_dim), columns(scratch<Columns, float>(head_dim * kBlock)) {}

  // Keys [first, last), and the others of their vectors.
  void fill(const T* const* keys, int64_t first, int64_t last) {
    for (int64_t j = first / kLanes * kLanes; j < last; j += kLanes)
      for (int64_t i = 0; i < dims; i += 2 * kLanes) {
        Vec low[kLanes], high[kLanes];
        for (int k = 0; k < kLanes; ++k) {
          const Pair pair = load_pair(keys[j + k] + i);
          low[k] = pair.low;
          high[k] = pair.high;
        }
        transpose(low);
        transpose(high);
        for (int k = 0; k < kLanes; ++k) {
          store(columns + (i + k) * kBlock + j, low[k]);
          store(columns + (i + kLanes + k) * kBlock + j, high[k]);
        }
      }
  }
};

// Scales of the keys and values of a block, where these are int8.
struct BlockScales {
  float keys[kBlock], values[kBlock];
};

// 2 * kLanes elements of T, in the lane order that load_pair gives those of `Stored`.
template <typename Stored, typename T>
Pair load_as(const T* p) {
  if constexpr (std::is_same_v<Stored, T>) return load_pair(p);
  else return {load_floats(p), load_floats(p + kLanes)};
}

// The inverse, rounded.
template <typename Stored, typename T>
void store_as(T* p, Pair pair) {
  if constexpr (std::is_same_v<Stored, T>) {
    store_pair(p, pair);
  } else {
    store_rounded(p, pair.low);
    store_rounded(p + kLanes, pair.high);
  }
}

// Query heads that share one KV head, for one row: sums in memory that the caller gives. Vectors keep the lane order
// of load_pair of what is stored: T, or int8 and scales.
template <typename T, typename Stored>
struct HeadGroup {
  static constexpr bool kScaled = !std::is_same_v<Stored, T>;
  int64_t heads, dims;
  float softcap;
  float *query, *out, *scores;  // [heads, head_dim], [heads, head_dim], [heads, kBlock]
  float *largest, *total;       // [heads]

  static int64_t size(const AttentionInputs& in, int64_t heads) { return heads * (2 * in.head_dim + kBlock + 2); }

  HeadGroup(const AttentionInputs& in, int64_t heads, float* memory)
      : heads(heads), dims(in.head_dim), softcap(in.softcap), query(memory),
        out(query + heads * dims), scores(out + heads * dims), largest(scores + heads * kBlock), total(largest + heads) {}

  // q [heads, head_dim]; sinks [heads] or null.
  void begin(const T* q, float scale, const float* sinks) {
    for (int64_t i = 0; i < heads * dims; i += 2 * kLanes) {
      const Pair pair = load_as<Stored>(q + i);
      store(query + i, pair.low * scale);
      store(query + i + kLanes, pair.high * scale);
    }
    std::fill(out, out + heads * dims, 0.0f);
    for (int64_t h = 0; h < heads; ++h) {  // a sink is its head's first score
      largest[h] = sinks ? sinks[h] : -std::numeric_limits<float>::infinity();
      total[h] = sinks ? 1.0f : 0.0f;
    }
  }

  // Keys and values [first, last) of a block.
  void add_block(const float* columns, const Stored* const* values, const BlockScales& scales, int64_t first, int64_t last) {
    for_head_tiles([&](auto tile, int64_t h) { score<tile()>(columns, h); });
    for (int64_t h = 0; h < heads; ++h) rescale(h, scales, first, last);
    for_head_tiles([&](auto tile, int64_t h) { accumulate<tile()>(values, first, last, h); });
  }

  // Heads in tiles of four, then two, then one, so that a value is unpacked once a tile and sums stay in registers.
  template <typename F>
  void for_head_tiles(const F& run) {
    int64_t h = 0;
    for (; h + 4 <= heads; h += 4) run(std::integral_constant<int, 4>{}, h);
    for (; h + 2 <= heads; h += 2) run(std::integral_constant<int, 2>{}, h);
    for (; h < heads; ++h) run(std::integral_constant<int, 1>{}, h);
  }

  // Of all keys of the block; those outside [first, last) are dropped by `rescale`.
  template <int Heads>
  void score(const float* columns, int64_t head) {
    constexpr int kVectors = std::min<int>(kBlock / kLanes, kRegisters / 2 / std::max(Heads, 2));
    for (int64_t j = 0; j < kBlock; j += kVectors * kLanes) {
      Vec sum[Heads][kVectors] = {};
      for (int64_t i = 0; i < dims; ++i) {
        Vec keys[kVectors];
        for (int v = 0; v < kVectors; ++v) keys[v] = load(columns + i * kBlock + j + v * kLanes);
        for (int h = 0; h < Heads; ++h) {
          const Vec element = splat(query[(head + h) * dims + i]);
          for (int v = 0; v < kVectors; ++v) sum[h][v] += element * keys[v];
        }
      }
      for (int h = 0; h < Heads; ++h)
        for (int v = 0; v < kVectors; ++v) store(scores + (head + h) * kBlock + j + v * kLanes, sum[h][v]);
    }
  }

  void rescale(int64_t h, const BlockScales& scales, int64_t first, int64_t last) {
    float* row = scores + h * kBlock;
    if constexpr (kScaled) multiply(row, scales.keys);
    if (softcap > 0)
      for (int64_t j = 0; j < kBlock; j += kLanes) store(row + j, softcap * tanh(load(row + j) / softcap));
    std::fill(row, row + first, -std::numeric_limits<float>::infinity());
    std::fill(row + last, row + kBlock, -std::numeric_limits<float>::infinity());
    const float top = std::max(largest[h], largest_of(row));
    Vec sum{};
    for (int64_t j = 0; j < kBlock; j += kLanes) {
      const Vec weight = exp_negative(load(row + j) - top);
      store(row + j, weight);
      sum += weight;
    }
    if constexpr (kScaled) multiply(row, scales.values);
    const float shrink = exp_negative(splat(largest[h] - top))[0];
    total[h] = total[h] * shrink + sum_lanes(sum);
    for (float* o = out + h * dims; o < out + (h + 1) * dims; o += kLanes) store(o, load(o) * shrink);
    largest[h] = top;
  }

  static void multiply(float* row, const float* by) {
    for (int64_t j = 0; j < kBlock; j += kLanes) store(row + j, load(row + j) * load(by + j));
  }

  // The largest of a block's scores.
  static float largest_of(const float* row) {
    Vec most = load(row);
    for (int64_t j = kLanes; j < kBlock; j += kLanes) {
      const Vec next = load(row + j);
      most = most < next ? next : most;
    }
    float lanes[kLanes];
    store(lanes, most);
    return *std::max_element(lanes, lanes + kLanes);
  }

  template <int Heads>
  void accumulate(const Stored* const* values, int64_t first, int64_t last, int64_t head) {
    for (int64_t i = 0; i < dims; i += 2 * kLanes) {
      float* o = out + head * dims + i;
      Pair sum[Heads];
      for (int h = 0; h < Heads; ++h) sum[h] = {load(o + h * dims), load(o + h * dims + kLanes)};
      for (int64_t j = first; j < last; ++j) {
        const Pair pair = load_pair(values[j] + i);
        for (int h = 0; h < Heads; ++h) {
          const Vec weight = splat(scores[(head + h) * kBlock + j]);
          sum[h].low += weight * pair.low;
          sum[h].high += weight * pair.high;
        }
      }
      for (int h = 0; h < Heads; ++h) {
        store(o + h * dims, sum[h].low);
        store(o + h * dims + kLanes, sum[h].high);
      }
    }
  }

  // y [heads, head_dim].
  void finish(T* y) const {
    for (int64_t i = 0; i < heads * dims; i += 2 * kLanes) {
      const float sum = total[i / dims];
      store_as<Stored>(y + i, {load(out + i) / sum, load(out + i + kLanes) / sum});
    }
  }
};

// Rows [first, first + count) of one sequence, which share the keys of their prefix.
struct RowGroup {
  int64_t first, count;
};

constexpr int64_t kGroupRows = 16;

inline std::vector<RowGroup> groups_of(const AttentionInputs& in) {
  std::vector<RowGroup> groups;
  for (int64_t r = 0; r < in.rows; ++r) {
    const bool same = !groups.empty() && in.row_starts[groups.back().first] == in.row_starts[r] &&
                      in.row_prefixes[groups.back().first] == in.row_prefixes[r];
    if (same && groups.back().count < kGroupRows) ++groups.back().count;
    else groups.push_back({r, 1});
  }
  return groups;
}

struct States {};
struct Attended {};

// Keys or values of a layer: [slots, kv_heads, head_dim] of T, or of int8 with a scale for each head of a slot.
struct Plane {
  void* elements;
  float* scales;  // [slots, kv_heads], null unless int8
};

// Attention of the rows of a group, and a part of the query heads, with one KV head. A block of the prefix is laid out
// once for all of them, one that reaches into their paths for each: either way a row sees the same keys in the same order.
template <typename T, typename Stored>
struct GroupAttention {
  using State = HeadGroup<T, Stored>;

  const AttentionInputs& in;
  Plane key_plane, value_plane;
  RowGroup group;
  int64_t kv_head, first_head, heads;
  KeyColumns<Stored> columns;
  const Stored *keys[kBlock], *values[kBlock];
  BlockScales scales;

  // `part` counts all parts of the KV heads before it.
  GroupAttention(const AttentionInputs& in, Plane keys, Plane values, RowGroup group, int64_t part)
      : in(in), key_plane(keys), value_plane(values), group(group), kv_head(part / in.num_parts()),
        first_head(kv_head * in.shared_by() + part % in.num_parts() * kPartHeads),
        heads(std::min(kPartHeads, (kv_head + 1) * in.shared_by() - first_head)), columns(in.head_dim) {}

  int64_t length(int64_t row) const { return in.row_positions[row] + 1; }
  int64_t start(int64_t row) const { return in.window > 0 ? std::max<int64_t>(0, length(row) - in.window) : 0; }

  State state(int64_t row) const {
    const int64_t size = State::size(in, heads);
    return {in, heads, scratch<States, float>(kGroupRows * size) + (row - group.first) * size};
  }

  // q points to row 0. Leaves what the rows attended to in their states.
  void run(const T* q) {
    int64_t begin = std::numeric_limits<int64_t>::max(), end = 0;
    for (int64_t row = group.first; row < group.first + group.count; ++row) {
      state(row).begin(q + row * in.query_stride + column(), in.scale, in.sinks ? in.sinks + first_head : nullptr);
      begin = std::min(begin, start(row));
      end = std::max(end, length(row));
    }
    for (int64_t block = begin / kBlock * kBlock; block < end; block += kBlock) add_block(block);
  }

  // Calls put(row, first column, values, count) with what each row attended to, on the thread that ran it.
  template <typename F>
  void publish(const F& put) const {
    T* y = scratch<Attended, T>(heads * in.head_dim);
    for (int64_t row = group.first; row < group.first + group.count; ++row) {
      if (length(row) > 0) state(row).finish(y);
      else std::fill(y, y + heads * in.head_dim, T(0.0f));
      put(row, column(), y, heads * in.head_dim);
    }
  }

  int64_t column() const { return first_head * in.head_dim; }

  void add_block(int64_t block) {
    const bool shared = block + kBlock <= in.row_prefixes[group.first];
    if (shared) lay_out(group.first, block, 0, kBlock);
    for (int64_t row = group.first; row < group.first + group.count; ++row) {
      const int64_t first = std::max<int64_t>(0, start(row) - block), last = std::min(kBlock, length(row) - block);
      if (first >= last) continue;
      if (!shared) lay_out(row, block, first, last);
      state(row).add_block(columns.columns, values, scales, first, last);
    }
  }

  // Positions block + [first, last) as `row` sees them.
  void lay_out(int64_t row, int64_t block, int64_t first, int64_t last) {
    for (int64_t j = 0; j < kBlock; ++j) {
      const int64_t position = block + std::clamp(j, first, last - 1);  // others are dropped, but must be readable
      const int64_t head = in.slot(row, position) * in.kv_heads + kv_head;
      keys[j] = static_cast<const Stored*>(key_plane.elements) + head * in.head_dim;
      values[j] = static_cast<const Stored*>(value_plane.elements) + head * in.head_dim;
      if constexpr (State::kScaled) {
        scales.keys[j] = key_plane.scales[head];
        scales.values[j] = value_plane.scales[head];
      }
    }
    columns.fill(keys, first, last);
  }
};

// Attention of all rows; `put` as in GroupAttention::publish.
template <typename T, typename F>
void attend(Member& member, const AttentionInputs& in, const std::vector<RowGroup>& groups, const T* q, Plane keys,
            Plane values, const F& put) {
  const auto over = [&]<typename Stored>(Stored) {
    const int64_t parts = in.kv_heads * in.num_parts();
    const auto with = [&](int64_t item) {
      return GroupAttention<T, Stored>(in, keys, values, groups[item / parts], item % parts);
    };
    member.compute_each(
        groups.size() * parts, [&](int64_t item) { with(item).run(q); },
        [&](int64_t item) { with(item).publish(put); });
  };
  if (keys.scales) over(int8_t{});
  else over(T{});
}

// Rounds a head [size] to int8 and returns its scale: to nearest, ties to even, the largest magnitude to 127. A head
// with an element that is not finite becomes zeros, and its scale NaN. See `rounded` in ../kv_planes.py.
template <typename T>
float round_head(const T* from, int8_t* to, int64_t size) {
  uint32_t largest = 0;  // as bits: NaN is larger than infinity, and that than any number
  for (int64_t i = 0; i < size; ++i) largest = std::max(largest, std::bit_cast<uint32_t>(float{from[i]}) & 0x7fffffffu);
  const float most = std::bit_cast<float>(largest);
  const float scale =
      most <= std::numeric_limits<float>::max() ? most / 127.0f : std::numeric_limits<float>::quiet_NaN();
  for (int64_t i = 0; i < size; ++i) {
    const float steps = float{from[i]} / scale;  // NaN where the scale is 0 or NaN
    to[i] = steps == steps ? static_cast<int8_t>(std::nearbyint(std::clamp(steps, -127.0f, 127.0f))) : 0;
  }
  return scale;
}

// Writes a row's keys or values [kv_heads, head_dim] to its slot.
template <typename T>
void write_slot(const T* from, Plane plane, const AttentionInputs& in, int64_t row) {
  const int64_t head = in.row_slots[row] * in.kv_heads;
  if (!plane.scales) {
    std::copy_n(from, in.kv_heads * in.head_dim, static_cast<T*>(plane.elements) + head * in.head_dim);
    return;
  }
  int8_t* to = static_cast<int8_t*>(plane.elements) + head * in.head_dim;
  for (int64_t h = 0; h < in.kv_heads; ++h)
    plane.scales[head + h] = round_head(from + h * in.head_dim, to + h * in.head_dim, in.head_dim);
}

}  // namespace pilotfish
