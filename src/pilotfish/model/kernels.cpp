// CPU kernels whose result for a row is bitwise the same whatever rows share the call.
//
// Every output element is one fixed chain of operations: a linear output sums over its inputs in index
// order, attention reduces over keys in position order, in blocks of kBlock positions. Rows, tiles and
// threads only decide who computes an element, never how. So a token verified in a tree of 16 rows has
// the logits that it has when decoded alone, in float32 and in bfloat16, at any thread count.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <type_traits>
#include <vector>

namespace {

using at::BFloat16;
using at::Tensor;

constexpr int kLanes = 16;
typedef float Vec __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t)), aligned(4), may_alias));

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }
inline Vec splat(float x) { return Vec{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

// Two vectors that stand side by side: 32 float32 in order, or 32 bfloat16 interleaved, so that each
// 32-bit word holds element i in its lower and element 16 + i in its upper half. A bfloat16 is the upper
// half of a float32, so unpacking takes a shift and a mask.
struct Pair {
  Vec low, high;
};

inline Pair load_pair(const float* p) { return {load(p), load(p + kLanes)}; }
inline Pair load_pair(const BFloat16* p) {
  const Words words = *reinterpret_cast<const Words*>(p);
  return {reinterpret_cast<Vec>(words << 16), reinterpret_cast<Vec>(words & 0xffff0000u)};
}

inline float sum_lanes(Vec v) {
  v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  v += __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  return v[0];
}

// exp(x) for x <= 0, in about 1 ulp: 2^n * e^r with |r| <= ln(2) / 2, e^r by its series. Below -87 it is
// e^-87, which vanishes beside the 1 that the largest score adds to a sum.
inline Vec exp_negative(Vec x) {
  x = x < -87.0f ? splat(-87.0f) : x;
  const Vec shifted = x * 1.44269504f + 12582912.0f;  // rounds to an integer in the low mantissa bits
  const Vec n = shifted - 12582912.0f;
  const Vec r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
  Vec poly = splat(1.0f / 5040);
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 1.0f / 2, 1.0f, 1.0f}) poly = poly * r + c;
  const Words exponent = (reinterpret_cast<Words>(shifted) + 127u) << 23;
  return poly * reinterpret_cast<Vec>(exponent);
}

// ---------------------------------------------------------------------------------------------------
// Linear: y[r, n] = sum over k of x[r, k] * w[n, k], in float32, k ascending.
//
// Weights are packed in panels of kPanel outputs, [N / kPanel, K, kPanel]: the loop over k reads memory
// once, in order. Inputs are packed in tiles of up to kMaxTile rows, [tiles, K, rows of the tile], so
// that the broadcasts of one k lie side by side. K goes in chunks that keep a panel in the core's cache
// while all tiles pass over it; the sums wait in `acc` meanwhile.

constexpr int kPanel = 2 * kLanes;
constexpr int kMaxTile = 12;
constexpr int64_t kChunk = 256;
constexpr int64_t kBlockPanels = 16;
constexpr int64_t kPrefetch = 4096;  // bytes: about one memory latency ahead of the loads

template <typename W, int Rows, int Panels>
void multiply(int64_t depth, const float* x, const W* w, int64_t panel_stride, float* acc, int64_t acc_stride) {
  Vec sum[Rows][Panels * 2];
  for (int r = 0; r < Rows; ++r)
    for (int p = 0; p < Panels; ++p)
      for (int h = 0; h < 2; ++h) sum[r][2 * p + h] = load(acc + p * acc_stride + r * kPanel + h * kLanes);
  for (int64_t k = 0; k < depth; ++k) {
    for (int p = 0; p < Panels; ++p) {
      const W* row = w + p * panel_stride + k * kPanel;
      __builtin_prefetch(reinterpret_cast<const char*>(row) + kPrefetch);
      const Pair pair = load_pair(row);
#pragma GCC unroll 12
      for (int r = 0; r < Rows; ++r) {
        const Vec value = splat(x[k * Rows + r]);
        sum[r][2 * p] += value * pair.low;
        sum[r][2 * p + 1] += value * pair.high;
      }
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int p = 0; p < Panels; ++p)
      for (int h = 0; h < 2; ++h) store(acc + p * acc_stride + r * kPanel + h * kLanes, sum[r][2 * p + h]);
}

// A few rows alone cannot keep the multiply units busy on one panel: they take several side by side.
constexpr int64_t panels_for(int64_t rows) { return rows <= 2 ? 4 : rows <= 4 ? 2 : 1; }

template <typename W>
using Kernel = void (*)(int64_t, const float*, const W*, int64_t, float*, int64_t);

template <typename W, bool Single>
Kernel<W> kernel_for(int rows) {
  switch (rows) {
#define CASE(R) case R: return multiply<W, R, Single ? 1 : panels_for(R)>;
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
  }
  TORCH_CHECK(false, "no kernel for a tile of ", rows, " rows");
}

struct Tile {
  int64_t first, rows;
};

std::vector<Tile> tiles_of(int64_t rows) {
  const int64_t count = (rows + kMaxTile - 1) / kMaxTile;
  std::vector<Tile> tiles;
  for (int64_t i = 0, first = 0; i < count; ++i) {
    const int64_t size = rows / count + (i < rows % count);
    tiles.push_back({first, size});
    first += size;
  }
  return tiles;
}

template <typename T>
std::vector<float> pack_inputs(const T* x, int64_t depth, const std::vector<Tile>& tiles, int64_t rows) {
  std::vector<float> packed(rows * depth);
  at::parallel_for(0, rows, 1 + 65536 / depth, [&](int64_t begin, int64_t end) {
    for (const Tile& tile : tiles)
      for (int64_t r = std::max(begin, tile.first); r < std::min(end, tile.first + tile.rows); ++r) {
        float* out = packed.data() + tile.first * depth + (r - tile.first);
        for (int64_t k = 0; k < depth; ++k) out[k * tile.rows] = static_cast<float>(x[r * depth + k]);
      }
  });
  return packed;
}

// Inputs of one call, packed, and the sums of one thread over a block of panels: [panels, rows, kPanel].
struct Inputs {
  std::vector<Tile> tiles;
  std::vector<float> packed;
  int64_t rows, depth;

  template <typename T>
  Inputs(const T* x, int64_t rows, int64_t depth)
      : tiles(tiles_of(rows)), packed(pack_inputs(x, depth, tiles, rows)), rows(rows), depth(depth) {}
};

// Sums of panels [first, first + count). A block of panels shares each chunk of inputs while that is in cache.
template <typename T>
void sum_panels(const T* w, const Inputs& in, int64_t first, int64_t count, std::vector<float>& acc) {
  const int64_t group = in.tiles.size() == 1 ? panels_for(in.rows) : 1;
  const int64_t panel_stride = in.depth * kPanel, acc_stride = in.rows * kPanel;
  std::fill(acc.begin(), acc.end(), 0.0f);
  for (int64_t k = 0; k < in.depth; k += kChunk) {
    const int64_t size = std::min(kChunk, in.depth - k);
    for (int64_t p = 0; p < count;) {
      const bool single = count - p < group;
      for (const Tile& tile : in.tiles) {
        const auto kernel = single ? kernel_for<T, true>(tile.rows) : kernel_for<T, false>(tile.rows);
        kernel(size, in.packed.data() + tile.first * in.depth + k * tile.rows,
               w + (first + p) * panel_stride + k * kPanel, panel_stride,
               acc.data() + p * acc_stride + tile.first * kPanel, acc_stride);
      }
      p += single ? 1 : group;
    }
  }
}

// Calls block(first, count) for blocks of at most kBlockPanels of all panels, on the threads of the pool.
template <typename F>
void for_each_block(int64_t panels, int64_t depth, const F& block) {
  const int64_t grain = std::max<int64_t>(1, 65536 / (depth * kPanel));
  at::parallel_for(0, panels, grain, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += kBlockPanels) block(first, std::min(kBlockPanels, end - first));
  });
}

// Writes value(index into the sums) of `count` panels to y [rows, outputs] from column `first * kPanel` on.
template <typename T, typename F>
void write_block(T* y, int64_t rows, int64_t outputs, int64_t first, int64_t count, const F& value) {
  for (int64_t p = 0; p < count; ++p) {
    const int64_t column = (first + p) * kPanel, width = std::min<int64_t>(kPanel, outputs - column);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t n = 0; n < width; ++n)
        y[r * outputs + column + n] = static_cast<T>(value((p * rows + r) * kPanel + n));
  }
}

template <typename T>
void linear_typed(const Tensor& x, const Tensor& packed, Tensor& y) {
  const Inputs in(x.const_data_ptr<T>(), x.size(0), x.size(1));
  for_each_block(packed.size(0), in.depth, [&](int64_t first, int64_t count) {
    std::vector<float> acc(count * in.rows * kPanel);
    sum_panels(packed.const_data_ptr<T>(), in, first, count, acc);
    write_block(y.mutable_data_ptr<T>(), in.rows, y.size(1), first, count, [&](int64_t i) { return acc[i]; });
  });
}

// silu(gate) * up in place of gate, 16 at a time. silu(z) = z * sigmoid(z), by exp(-|z|) for either sign.
void gate_sums(std::vector<float>& gate, const std::vector<float>& up) {
  for (size_t i = 0; i < gate.size(); i += kLanes) {
    const Vec z = load(gate.data() + i);
    const Vec e = exp_negative(z < 0.0f ? z : -z);
    const Vec sigmoid = (z < 0.0f ? e : splat(1.0f)) / (1.0f + e);
    store(gate.data() + i, z * sigmoid * load(up.data() + i));
  }
}

template <typename T>
void gated_linear_typed(const Tensor& x, const Tensor& gate, const Tensor& up, Tensor& y) {
  const Inputs in(x.const_data_ptr<T>(), x.size(0), x.size(1));
  for_each_block(gate.size(0), in.depth, [&](int64_t first, int64_t count) {
    std::vector<float> gates(count * in.rows * kPanel), ups(gates.size());
    sum_panels(gate.const_data_ptr<T>(), in, first, count, gates);
    sum_panels(up.const_data_ptr<T>(), in, first, count, ups);
    gate_sums(gates, ups);
    write_block(y.mutable_data_ptr<T>(), in.rows, y.size(1), first, count, [&](int64_t i) { return gates[i]; });
  });
}

void check_linear(const Tensor& x, const Tensor& packed, int64_t outputs) {
  TORCH_CHECK(x.dim() == 2 && packed.dim() == 3 && packed.size(2) == kPanel, "linear: x [rows, K], packed [panels, K, ",
              kPanel, "]");
  TORCH_CHECK(x.size(1) == packed.size(1) && x.scalar_type() == packed.scalar_type(), "linear: x does not match packed");
  TORCH_CHECK(outputs <= packed.size(0) * kPanel, "linear: more outputs than packed");
}

// Calls run(T{}) for the element type of x.
template <typename F>
void dispatch(const Tensor& x, const F& run) {
  if (x.scalar_type() == at::kFloat) run(float{});
  else if (x.scalar_type() == at::kBFloat16) run(BFloat16{});
  else TORCH_CHECK(false, "pilotfish kernels take float32 or bfloat16, not ", x.scalar_type());
}

// x [rows, K], packed [ceil(N / kPanel), K, kPanel] of the same dtype -> [rows, N].
Tensor linear(const Tensor& x, const Tensor& packed, int64_t outputs) {
  check_linear(x, packed, outputs);
  const Tensor rows = x.contiguous();
  Tensor y = at::empty({x.size(0), outputs}, x.options());
  dispatch(x, [&]<typename T>(T) { linear_typed<T>(rows, packed, y); });
  return y;
}

// silu(x @ gate) * (x @ up), rounded once at the end. Shapes as in `linear`.
Tensor gated_linear(const Tensor& x, const Tensor& gate, const Tensor& up, int64_t outputs) {
  check_linear(x, gate, outputs);
  check_linear(x, up, outputs);
  const Tensor rows = x.contiguous();
  Tensor y = at::empty({x.size(0), outputs}, x.options());
  dispatch(x, [&]<typename T>(T) { gated_linear_typed<T>(rows, gate, up, y); });
  return y;
}

// ---------------------------------------------------------------------------------------------------
// RMS norm: x / sqrt(mean(x^2) + eps), rounded to x's type as transformers does, times weight.

template <typename T>
void rms_norm_rows(const T* x, const T* weight, T* y, int64_t rows, int64_t size, float eps) {
  at::parallel_for(0, rows, 1 + 32768 / size, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* in = x + r * size;
      Vec squares{};
      int64_t i = 0;
      for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
        const Pair pair = load_pair(in + i);
        squares += pair.low * pair.low;
        squares += pair.high * pair.high;
      }
      float total = sum_lanes(squares);
      for (; i < size; ++i) total += static_cast<float>(in[i]) * static_cast<float>(in[i]);
      const float scale = 1.0f / std::sqrt(total / size + eps);
      for (i = 0; i < size; ++i)
        y[r * size + i] = static_cast<T>(static_cast<float>(static_cast<T>(static_cast<float>(in[i]) * scale)) *
                                         static_cast<float>(weight[i]));
    }
  });
}

// x [..., size], weight [size] of the same dtype -> like x.
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  TORCH_CHECK(weight.dim() == 1 && x.size(-1) == weight.size(0) && x.scalar_type() == weight.scalar_type(),
              "rms_norm: weight does not match x");
  const Tensor rows = x.contiguous();
  Tensor y = at::empty(rows.sizes(), rows.options());
  const int64_t size = weight.size(0);
  dispatch(x, [&]<typename T>(T) {
    rms_norm_rows<T>(rows.const_data_ptr<T>(), weight.const_data_ptr<T>(), y.mutable_data_ptr<T>(), x.numel() / size,
                     size, static_cast<float>(eps));
  });
  return y;
}

// ---------------------------------------------------------------------------------------------------
// Tree attention over slots.
//
// Row r sits at position row_positions[r] and attends to the positions up to its own along its path:
//
//     position   0 ........ row_trunks[r] - 1   row_trunks[r] ...... row_positions[r]
//     slot       trunk_slots[row_sequences[r]]  path_slots[r]
//
// The trunk holds a sequence's committed tokens, the path a tree node's ancestors and the node itself.
// Keys are reduced in blocks of kBlock positions with a running maximum (Milakov and Gimelshein 2018,
// arXiv 1805.02867); block borders depend on positions alone. A row at position -1 is padding: zeros.

constexpr int64_t kBlock = 64;

struct AttentionInputs {
  const int32_t *row_sequences, *row_positions, *row_trunks, *trunk_slots, *path_slots;
  int64_t trunk_width, path_width, query_heads, kv_heads, head_dim;
  float scale;

  int64_t slot(int64_t row, int64_t position) const {
    const int64_t trunk = row_trunks[row];
    return position < trunk ? trunk_slots[row_sequences[row] * trunk_width + position]
                            : path_slots[row * path_width + position - trunk];
  }
};

// The query heads that share one KV head, for one row. Vectors keep the lane order of load_pair.
template <typename T>
struct HeadGroup {
  int64_t heads, pairs;
  std::vector<float> query, out, scores;  // [heads, head_dim], [heads, head_dim], [heads, kBlock]
  std::vector<float> largest, total;      // [heads]

  HeadGroup(const AttentionInputs& in)
      : heads(in.query_heads / in.kv_heads), pairs(in.head_dim / (2 * kLanes)), query(heads * in.head_dim),
        out(heads * in.head_dim), scores(heads * kBlock), largest(heads), total(heads) {}

  void begin(const T* q, float scale) {
    for (int64_t i = 0; i < heads * pairs; ++i) {
      const Pair pair = load_pair(q + i * 2 * kLanes);
      store(query.data() + i * 2 * kLanes, pair.low * scale);
      store(query.data() + i * 2 * kLanes + kLanes, pair.high * scale);
    }
    std::fill(out.begin(), out.end(), 0.0f);
    std::fill(total.begin(), total.end(), 0.0f);
    std::fill(largest.begin(), largest.end(), -std::numeric_limits<float>::infinity());
  }

  void add_block(const T* const* keys, const T* const* values, int64_t count) {
    for_head_tiles([&](auto tile, int64_t h) { score<tile()>(keys, count, h); });
    for (int64_t h = 0; h < heads; ++h) rescale(h, count);
    for_head_tiles([&](auto tile, int64_t h) { accumulate<tile()>(values, count, h); });
  }

  // Heads in tiles of four, then singly, so that a key is unpacked once a tile and sums stay in registers.
  template <typename F>
  void for_head_tiles(const F& run) {
    int64_t h = 0;
    for (; h + 4 <= heads; h += 4) run(std::integral_constant<int, 4>{}, h);
    for (; h + 2 <= heads; h += 2) run(std::integral_constant<int, 2>{}, h);
    for (; h < heads; ++h) run(std::integral_constant<int, 1>{}, h);
  }

  template <int Heads>
  void score(const T* const* keys, int64_t count, int64_t first) {
    const int64_t size = pairs * 2 * kLanes;
    const float* q = query.data() + first * size;
    for (int64_t j = 0; j < count; ++j) {
      Vec sum[Heads] = {};
      for (int64_t i = 0; i < size; i += 2 * kLanes) {
        const Pair pair = load_pair(keys[j] + i);
        for (int h = 0; h < Heads; ++h) {
          sum[h] += load(q + h * size + i) * pair.low;
          sum[h] += load(q + h * size + i + kLanes) * pair.high;
        }
      }
      for (int h = 0; h < Heads; ++h) scores[(first + h) * kBlock + j] = sum_lanes(sum[h]);
    }
  }

  void rescale(int64_t h, int64_t count) {
    float* row = scores.data() + h * kBlock;
    std::fill(row + count, row + kBlock, -std::numeric_limits<float>::infinity());
    const float top = std::max(largest[h], *std::max_element(row, row + count));
    Vec sum{};
    for (int64_t j = 0; j < kBlock; j += kLanes) {
      const Vec weight = exp_negative(load(row + j) - top);
      store(row + j, weight);
      sum += weight;
    }
    const float shrink = exp_negative(splat(largest[h] - top))[0];
    total[h] = total[h] * shrink + sum_lanes(sum);
    for (int64_t i = 0; i < pairs * 2; ++i) {
      float* o = out.data() + (h * pairs * 2 + i) * kLanes;
      store(o, load(o) * shrink);
    }
    largest[h] = top;
  }

  template <int Heads>
  void accumulate(const T* const* values, int64_t count, int64_t first) {
    const int64_t size = pairs * 2 * kLanes;
    for (int64_t i = 0; i < size; i += 2 * kLanes) {
      float* o = out.data() + first * size + i;
      Pair sum[Heads];
      for (int h = 0; h < Heads; ++h) sum[h] = {load(o + h * size), load(o + h * size + kLanes)};
      for (int64_t j = 0; j < count; ++j) {
        const Pair pair = load_pair(values[j] + i);
        for (int h = 0; h < Heads; ++h) {
          const Vec weight = splat(scores[(first + h) * kBlock + j]);
          sum[h].low += weight * pair.low;
          sum[h].high += weight * pair.high;
        }
      }
      for (int h = 0; h < Heads; ++h) {
        store(o + h * size, sum[h].low);
        store(o + h * size + kLanes, sum[h].high);
      }
    }
  }

  void finish(T* y) {
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < pairs; ++i)
        for (int64_t lane = 0; lane < 2 * kLanes; ++lane) {
          const int64_t first = (h * pairs + i) * 2 * kLanes;
          const float value = out[first + lane] / total[h];
          // the inverse of load_pair: element 2 i and 2 i + 1 of bfloat16 came from lanes i and 16 + i
          const int64_t place = std::is_same_v<T, float> ? lane : lane < kLanes ? 2 * lane : 2 * (lane - kLanes) + 1;
          y[first + place] = static_cast<T>(value);
        }
  }
};

template <typename T>
void attend(const AttentionInputs& in, const T* q, const T* k_pool, const T* v_pool, T* y, int64_t rows) {
  const int64_t slot_stride = in.kv_heads * in.head_dim;
  at::parallel_for(0, rows * in.kv_heads, 1, [&](int64_t begin, int64_t end) {
    HeadGroup<T> group(in);
    const T *keys[kBlock], *values[kBlock];
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / in.kv_heads, kv_head = item % in.kv_heads;
      const int64_t offset = (row * in.query_heads + kv_head * group.heads) * in.head_dim;
      const int64_t length = in.row_positions[row] + 1;
      if (length == 0) {
        std::fill(y + offset, y + offset + group.heads * in.head_dim, static_cast<T>(0.0f));
        continue;
      }
      group.begin(q + offset, in.scale);
      for (int64_t first = 0; first < length; first += kBlock) {
        const int64_t count = std::min(kBlock, length - first);
        for (int64_t j = 0; j < count; ++j) {
          const int64_t place = in.slot(row, first + j) * slot_stride + kv_head * in.head_dim;
          keys[j] = k_pool + place;
          values[j] = v_pool + place;
        }
        group.add_block(keys, values, count);
      }
      group.finish(y + offset);
    }
  });
}

template <typename T>
void write_rows(const Tensor& rows, Tensor& pool, const int32_t* slots) {
  const int64_t width = rows.size(1) * rows.size(2);
  const T* from = rows.const_data_ptr<T>();
  T* to = pool.mutable_data_ptr<T>();
  for (int64_t r = 0; r < rows.size(0); ++r) std::copy_n(from + r * width, width, to + slots[r] * width);
}

// q [rows, heads, d], k and v [rows, kv_heads, d] (d a multiple of 32), pools [slots, kv_heads, d], the
// rest int32: row_* [rows], trunk_slots [sequences, longest trunk], path_slots [rows, longest path].
// Writes k and v to the pools at row_slots, then attends. -> [rows, heads, d].
Tensor tree_attention(const Tensor& q, const Tensor& k, const Tensor& v, Tensor& k_pool, Tensor& v_pool,
                      const Tensor& row_slots, const Tensor& row_sequences, const Tensor& row_positions,
                      const Tensor& row_trunks, const Tensor& trunk_slots, const Tensor& path_slots, double scale) {
  TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && q.size(1) % k.size(1) == 0, "tree_attention: q, k of [rows, heads, d]");
  TORCH_CHECK(q.size(2) % (2 * kLanes) == 0, "tree_attention: head size must be a multiple of ", 2 * kLanes);
  for (const Tensor& index : {row_slots, row_sequences, row_positions, row_trunks, trunk_slots, path_slots})
    TORCH_CHECK(index.scalar_type() == at::kInt && index.is_contiguous(), "tree_attention: indices are int32");
  const Tensor queries = q.contiguous(), keys = k.contiguous(), values = v.contiguous();
  Tensor y = at::empty(q.sizes(), queries.options());
  const AttentionInputs in{row_sequences.const_data_ptr<int32_t>(), row_positions.const_data_ptr<int32_t>(),
                           row_trunks.const_data_ptr<int32_t>(), trunk_slots.const_data_ptr<int32_t>(),
                           path_slots.const_data_ptr<int32_t>(), trunk_slots.size(1), path_slots.size(1),
                           q.size(1), k.size(1), q.size(2), static_cast<float>(scale)};
  dispatch(q, [&]<typename T>(T) {
    write_rows<T>(keys, k_pool, row_slots.const_data_ptr<int32_t>());
    write_rows<T>(values, v_pool, row_slots.const_data_ptr<int32_t>());
    attend<T>(in, queries.const_data_ptr<T>(), k_pool.const_data_ptr<T>(), v_pool.const_data_ptr<T>(),
              y.mutable_data_ptr<T>(), q.size(0));
  });
  return y;
}

// ---------------------------------------------------------------------------------------------------
// The k best tokens by logit + shared noise. See core/noise.py for the noise itself.

struct Words4 {
  uint32_t word[4];
};

Words4 philox(uint64_t seed, uint64_t position, uint32_t block) {
  uint32_t c0 = position, c1 = position >> 32, c2 = block, c3 = 0;
  uint32_t key0 = seed, key1 = seed >> 32;
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * c0, product1 = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c1 = static_cast<uint32_t>(product1);
    c3 = static_cast<uint32_t>(product0);
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return {{c0, c1, c2, c3}};
}

constexpr double kMaxNoise = 22.9, kMinNoise = -3.2;

double gumbel_of(uint32_t word) { return -std::log(-std::log((word + 0.5) / 4294967296.0)); }

// -log u >= 1 - u, hence g <= -log(1 - u) <= 32 log 2 - floor(log2(words above this one)) log 2.
double gumbel_bound(uint32_t word) {
  const uint32_t above = ~word;
  const int leading = above == 0 ? 33 : __builtin_clz(above) + 1;
  return leading * 0.6931471805599454;
}

struct Candidate {
  double score;
  int64_t token;
};

// Exact, yet it hashes and takes logarithms only where a token could still enter the best k.
void best_of_row(const double* logits, int64_t vocab, uint64_t seed, uint64_t position, int64_t k, double* scores,
                 int64_t* tokens) {
  std::vector<Candidate> best;
  double threshold = -std::numeric_limits<double>::infinity();
  if (k == 1) threshold = *std::max_element(logits, logits + vocab) + kMinNoise;
  for (int64_t first = 0; first < vocab; first += 4) {
    const int64_t count = std::min<int64_t>(4, vocab - first);
    if (*std::max_element(logits + first, logits + first + count) + kMaxNoise <= threshold) continue;
    const Words4 words = philox(seed, position, first >> 2);
    for (int64_t i = 0; i < count; ++i) {
      if (logits[first + i] + gumbel_bound(words.word[i]) <= threshold) continue;
      const double score = logits[first + i] + gumbel_of(words.word[i]);
      if (score <= threshold) continue;  // on ties the lower id, which came first, stays
      auto place = std::upper_bound(best.begin(), best.end(), score,
                                    [](double value, const Candidate& c) { return value > c.score; });
      best.insert(place, {score, first + i});
      if (static_cast<int64_t>(best.size()) > k) best.pop_back();
      if (static_cast<int64_t>(best.size()) == k) threshold = best.back().score;
    }
  }
  for (int64_t i = 0; i < k; ++i) {
    const bool found = i < static_cast<int64_t>(best.size());
    scores[i] = found ? best[i].score : -std::numeric_limits<double>::infinity();
    tokens[i] = found ? best[i].token : 0;
  }
}

// logits float64 [rows, vocab] (-inf where a token is excluded), seeds and positions int64 [rows] (bit
// patterns) -> scores float64 [rows, k] descending, tokens int64 [rows, k].
std::tuple<Tensor, Tensor> perturbed_topk(const Tensor& logits, const Tensor& seeds, const Tensor& positions, int64_t k) {
  TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kDouble, "perturbed_topk: float64 [rows, vocab]");
  TORCH_CHECK(seeds.scalar_type() == at::kLong && positions.scalar_type() == at::kLong, "perturbed_topk: int64 seeds");
  TORCH_CHECK(seeds.numel() == logits.size(0) && positions.numel() == logits.size(0), "perturbed_topk: one per row");
  const Tensor table = logits.contiguous(), keys = seeds.contiguous(), places = positions.contiguous();
  const int64_t rows = table.size(0), vocab = table.size(1);
  Tensor scores = at::empty({rows, k}, table.options()), tokens = at::empty({rows, k}, keys.options());
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      best_of_row(table.const_data_ptr<double>() + r * vocab, vocab, keys.const_data_ptr<int64_t>()[r],
                  places.const_data_ptr<int64_t>()[r], k, scores.mutable_data_ptr<double>() + r * k,
                  tokens.mutable_data_ptr<int64_t>() + r * k);
  });
  return {scores, tokens};
}

}  // namespace

TORCH_LIBRARY(pilotfish, m) {
  m.def("linear(Tensor x, Tensor packed, int outputs) -> Tensor");
  m.def("gated_linear(Tensor x, Tensor gate, Tensor up, int outputs) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def(
      "tree_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor row_slots, "
      "Tensor row_sequences, Tensor row_positions, Tensor row_trunks, Tensor trunk_slots, Tensor path_slots, "
      "float scale) -> Tensor");
  m.def("perturbed_topk(Tensor logits, Tensor seeds, Tensor positions, int k) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(pilotfish, CPU, m) {
  m.impl("linear", linear);
  m.impl("gated_linear", gated_linear);
  m.impl("rms_norm", rms_norm);
  m.impl("tree_attention", tree_attention);
  m.impl("perturbed_topk", perturbed_topk);
}
