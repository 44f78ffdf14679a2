// Linear: y[r, n] = sum over k of x[r, k] * w[n, k], in float32, in steps of ascending k.
//
// Weights are packed in panels of kPanel outputs and read once, in order; inputs in tiles of up to
// kMaxTile rows, so that the broadcasts of one step lie side by side. A step takes one float32 or two
// bfloat16 of k, added one after the other, or by an instruction in its own order and rounding (`Step`):
//
//     weights [N / kPanel, steps, kPanel, inputs of a step]      inputs [tiles, steps, rows of the tile]
//
// Weights are of the inputs' type, or int8 with a float32 scale for each output. An int8 becomes that type exactly,
// in registers, and the scale multiplies the whole sum: the chain is that of a weight of the inputs' type. Or they are
// codes in groups (groups.h), which never go through AMX.
//
// A processor with AMX multiplies bfloat16 in its own tiles (tiles.h): inputs then lie row by row.
//
// The sums of a tile stay in registers: all outputs of a panel for a few rows, a part of them for more. K goes in
// chunks that keep a panel in the core's cache while all tiles pass over it; the sums wait in memory meanwhile.

#pragma once

#include "elements.h"
#include "groups.h"
#include "team.h"
#include "tiles.h"
#include "vectors.h"

namespace pilotfish {

constexpr int kPanel = 32;
constexpr int kPanelVectors = kPanel / kLanes;
constexpr int kSumRegisters = kRegisters * 3 / 4;  // the others hold weights and an input
constexpr int kMaxTile = kSumRegisters / (kPanelVectors > 2 ? kPanelVectors / 2 : kPanelVectors);
constexpr int64_t kChunkSteps = 512;
constexpr int64_t kChunkCodes = 2048;       // inputs: a panel of codes is small, and stays one stream
constexpr int64_t kPrefetch = 4096;         // bytes: about one memory latency ahead of the loads
constexpr int64_t kTaskBytes = 32 * 1024;  // weights that a thread takes at a time, at least
constexpr int64_t kTaskPanels = 4;         // panels that share inputs in cache, where there are several rows; of codes always

// Vectors of outputs that a tile of so many rows sums at a time.
constexpr int tile_vectors(int rows) {
  int vectors = kPanelVectors;
  while (rows * vectors > kSumRegisters) vectors /= 2;
  return vectors;
}

// How one step adds to a sum. An operand is kLanes outputs' weights in one of the step's parts.
template <typename T>
struct Step;

template <>
struct Step<float> {
  static constexpr int64_t kDepth = 1, kAlign = 1;  // inputs of a step; what numbers of steps are a multiple of
  static constexpr bool kTiled = false;              // by AMX
  static constexpr int kParts = 1;
  using Input = float;
  using Operand = Vec;
  static Input input(const float* x, int64_t /*left*/) { return x[0]; }
  static float sum(Input x) { return x; }
  template <int Part>
  static Operand weights(const float* w) { return load(w); }
  template <int Part, typename Byte>
  static Operand weights(const Byte* w) { return floats_of(w); }
  template <int Part>  // of the step's inputs among 8 that a word has
  static Operand nibbles(Words w, int step, const CodeTable& table) { return table.at(w, 4 * (step / 2) + 16 * (step % 2)); }
  template <int Part>
  static Vec add(Vec sum, Operand w, Input x) { return sum + x * w; }
};

struct PairStep {
  static constexpr int64_t kDepth = 2;
#if defined(PILOTFISH_TILES) || defined(__AVX512BF16__)
  using Input = uint32_t;
  static Input input(const BFloat16* x, int64_t left) { return x[0].bits | (left > 1 ? uint32_t{x[1].bits} << 16 : 0); }
  template <int Part>
  static float part(Input x) { return std::bit_cast<float>(Part == 0 ? x << 16 : x & 0xffff0000u); }
#else
  using Input = std::array<float, 2>;
  static Input input(const BFloat16* x, int64_t left) { return {x[0], left > 1 ? float{x[1]} : 0.0f}; }
  template <int Part>
  static float part(const Input& x) { return x[Part]; }
#endif
  static float sum(const Input& x) { return part<0>(x) + part<1>(x); }
#if defined(__AVX512BF16__)
  static constexpr int kParts = 1;
  using Operand = Words;
  template <int Part>
  static Operand weights(const BFloat16* w) { return *reinterpret_cast<const Words*>(w); }
  template <int Part>
  static Operand nibbles(Words w, int step, const CodeTable& table) {
    return reinterpret_cast<Words>(_mm512_permutexvar_epi16(reinterpret_cast<__m512i>(w >> 4 * step), table.pairs));
  }
  template <int Part, typename Byte>
  static Operand weights(const Byte* w) {
    return reinterpret_cast<Words>(_mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(floats_of(w + kLanes)),
                                                       reinterpret_cast<__m512>(floats_of(w))));
  }
  template <int Part>
  static Vec add(Vec sum, Operand w, Input x) {
    return reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(w),
                                                  reinterpret_cast<__m512bh>(_mm512_set1_epi32(x))));
  }
#else
  // Widened to float32 in registers, one of the two inputs after the other.
  static constexpr int kParts = 2;
  using Operand = Vec;
  template <int Part>
  static Operand nibbles(Words w, int step, const CodeTable& table) { return table.at(w, 4 * step + 16 * Part); }
  template <int Part>
  static Operand weights(const BFloat16* w) {
    const Words words = *reinterpret_cast<const Words*>(w);
    return reinterpret_cast<Vec>(Part == 0 ? words << 16 : words & 0xffff0000u);
  }
  template <int Part, typename Byte>
  static Operand weights(const Byte* w) {
    const Vec first = floats_of(w), second = floats_of(w + kLanes);
    return every_second<Part>(first, second, std::make_integer_sequence<int, kLanes>{});
  }
  template <int Part, int... Lane>
  static Operand every_second(Vec first, Vec second, std::integer_sequence<int, Lane...>) {
    return __builtin_shufflevector(first, second, (2 * Lane + Part)...);
  }
  template <int Part>
  static Vec add(Vec sum, Operand w, const Input& x) { return sum + part<Part>(x) * w; }
#endif
};

template <>
struct Step<BFloat16> : PairStep {
#ifdef PILOTFISH_TILES
  static constexpr int64_t kAlign = kTileSteps;
  static constexpr bool kTiled = true;
#else
  static constexpr int64_t kAlign = 1;
  static constexpr bool kTiled = false;
#endif
};

template <typename T>
constexpr int64_t steps_of(int64_t depth) {
  constexpr int64_t kWhole = Step<T>::kDepth * Step<T>::kAlign;
  return (depth + kWhole - 1) / kWhole * Step<T>::kAlign;
}

// Elements in one step of a panel.
template <typename T>
constexpr int64_t kStepSize = kPanel * Step<T>::kDepth;

template <typename T, int Part, int Rows, int Vectors, typename W>
inline void add_part(Vec (&sum)[Rows][Vectors], const W* w, const typename Step<T>::Input* x) {
  typename Step<T>::Operand operands[Vectors];
  for (int v = 0; v < Vectors; ++v) operands[v] = Step<T>::template weights<Part>(w + v * kLanes * Step<T>::kDepth);
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v) sum[r][v] = Step<T>::template add<Part>(sum[r][v], operands[v], x[r]);
  if constexpr (Part + 1 < Step<T>::kParts) add_part<T, Part + 1>(sum, w, x);
}

// Adds `steps` steps of Vectors * kLanes outputs of one panel of weights, T or int8, to the sums of the rows of one
// tile, acc [Rows, kPanel].
template <typename T, typename W, int Rows, int Vectors>
void multiply_part(int64_t steps, const typename Step<T>::Input* x, const W* w, float* acc) {
  Vec sum[Rows][Vectors];
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v) sum[r][v] = load(acc + r * kPanel + v * kLanes);
  for (int64_t k = 0; k < steps; ++k, w += kStepSize<T>, x += Rows) {
    for (size_t line = 0; line < kStepSize<T> * sizeof(W) * Vectors / kPanelVectors; line += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(w) + kPrefetch + line);
    add_part<T, 0>(sum, w, x);
  }
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v) store(acc + r * kPanel + v * kLanes, sum[r][v]);
}

template <typename T, typename W, int Rows>
void multiply_tile(int64_t steps, const typename Step<T>::Input* x, const W* w, float* acc) {
  constexpr int kVectors = tile_vectors(Rows);
  for (int part = 0; part < kPanel; part += kVectors * kLanes)
    multiply_part<T, W, Rows, kVectors>(steps, x, w + part * Step<T>::kDepth, acc + part);
}

// Of a tile of `rows` rows.
template <typename T, typename W, int Rows = kMaxTile>
void multiply(int64_t rows, int64_t steps, const typename Step<T>::Input* x, const W* w, float* acc) {
  if (rows == Rows) return multiply_tile<T, W, Rows>(steps, x, w, acc);
  if constexpr (Rows > 1) multiply<T, W, Rows - 1>(rows, steps, x, w, acc);
}

// Inputs of so many rows: a tile's, [steps, Rows], or of rows that lie `steps` apart, for AMX.
template <typename T, int Rows>
struct InputRows {
  const typename Step<T>::Input* x;
  int64_t steps;

  const typename Step<T>::Input& at(int64_t row, int64_t step) const {
    if constexpr (Step<T>::kTiled) return x[row * steps + step];
    else return x[step * Rows + row];
  }
};

// Adds a group of codes of Vectors * kLanes outputs to the sums of so many rows: 8 inputs at a time.
template <typename T, int Part, int Rows, int Vectors>
inline void add_nibbles(Vec (&sum)[Rows][Vectors], const Words (&words)[Vectors], int step, const CodeTable& table,
                        const InputRows<T, Rows>& in, int64_t k) {
  typename Step<T>::Operand operands[Vectors];
  for (int v = 0; v < Vectors; ++v) operands[v] = Step<T>::template nibbles<Part>(words[v], step, table);
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v)
      sum[r][v] = Step<T>::template add<Part>(sum[r][v], operands[v], in.at(r, k));
  if constexpr (Part + 1 < Step<T>::kParts) add_nibbles<T, Part + 1>(sum, words, step, table, in, k);
}

template <typename T, int Part, int Rows, int Vectors, typename Byte>
inline void add_bytes(Vec (&sum)[Rows][Vectors], const Byte* w, const InputRows<T, Rows>& in, int64_t k) {
  typename Step<T>::Operand operands[Vectors];
  for (int v = 0; v < Vectors; ++v) operands[v] = Step<T>::template weights<Part>(w + v * kLanes * Step<T>::kDepth);
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v)
      sum[r][v] = Step<T>::template add<Part>(sum[r][v], operands[v], in.at(r, k));
  if constexpr (Part + 1 < Step<T>::kParts) add_bytes<T, Part + 1>(sum, w, in, k);
}

// A packed weight, [panels, steps, kPanel, inputs of a step] of the inputs' type, or of int8 with `scales`
// [panels * kPanel], or of codes in groups.
struct Weight {
  const void* panels;
  const float* scales;  // null unless int8
  int64_t inputs, outputs;
  Groups groups = {};

  int64_t num_panels() const { return (outputs + kPanel - 1) / kPanel; }
  int64_t num_groups() const { return inputs / groups.size; }
};

// Adds groups [first, end) of Vectors * kLanes outputs of a panel, from output `part` on, to acc [Rows, kPanel]. `sums` of
// a row's inputs in each group lie num_groups() apart.
template <typename T, int Rows, int Vectors>
void multiply_groups(const Weight& w, int64_t panel, int part, int64_t first, int64_t end,
                     const InputRows<T, Rows>& in, const float* sums, float* acc) {
  constexpr int64_t kDepth = Step<T>::kDepth, kStep = kPanel * kDepth;
  const Groups& groups = w.groups;
  const int64_t steps = groups.size / kDepth, count = w.num_groups();
  for (int64_t g = first; g < end; ++g) {
    Vec sum[Rows][Vectors] = {};
    const int64_t k = g * steps;
    if (groups.codes == Codes::kNibbles) {
      const uint32_t* words = static_cast<const uint32_t*>(w.panels) + (panel * w.inputs + g * groups.size) / 8 * kPanel + part;
      for (int64_t i = 0; i < steps; i += 8 / kDepth, words += kPanel) {
        for (size_t line = 0; line < kPanel * sizeof(uint32_t) * Vectors / kPanelVectors; line += 64)
          __builtin_prefetch(reinterpret_cast<const char*>(words) + kPrefetch + line);
        Words loaded[Vectors];
        for (int v = 0; v < Vectors; ++v) loaded[v] = *reinterpret_cast<const Words*>(words + v * kLanes);
#pragma GCC unroll 8
        for (int step = 0; step < 8 / kDepth; ++step) add_nibbles<T, 0>(sum, loaded, step, groups.table, in, k + i + step);
      }
    } else {
      const int8_t* bytes = static_cast<const int8_t*>(w.panels) + (panel * w.inputs / kDepth + k) * kStep + part * kDepth;
      for (int64_t i = 0; i < steps; ++i, bytes += kStep) {
        __builtin_prefetch(reinterpret_cast<const char*>(bytes) + kPrefetch);
        if (groups.codes == Codes::kInt8) add_bytes<T, 0>(sum, bytes, in, k + i);
        else add_bytes<T, 0>(sum, reinterpret_cast<const Float8*>(bytes), in, k + i);
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) {
      const int64_t place = (panel * count + g) * kPanel + part + v * kLanes;
      const Vec scale = groups.of(groups.scales, place), offset = groups.offsets ? groups.of(groups.offsets, place) : Vec{};
#pragma GCC unroll 12
      for (int r = 0; r < Rows; ++r) {
        float* total = acc + r * kPanel + part + v * kLanes;
        Vec added = load(total) + sum[r][v] * scale;
        if (groups.offsets) added += sums[r * count + g] * offset;
        store(total, added);
      }
    }
  }
}

template <typename T, int Rows = kMaxTile>
void multiply_grouped(int64_t rows, const Weight& w, int64_t panel, int64_t first, int64_t end,
                      const typename Step<T>::Input* x, int64_t steps, const float* sums, float* acc) {
  constexpr int kVectors = tile_vectors(Rows);
  if (rows == Rows) {
    for (int part = 0; part < kPanel; part += kVectors * kLanes)
      multiply_groups<T, Rows, kVectors>(w, panel, part, first, end, {x, steps}, sums, acc);
    return;
  }
  if constexpr (Rows > 1) multiply_grouped<T, Rows - 1>(rows, w, panel, first, end, x, steps, sums, acc);
}

struct Tile {
  int64_t first, rows;
};

inline std::vector<Tile> tiles_of(int64_t rows, int64_t most) {
  const int64_t count = (rows + most - 1) / most;
  std::vector<Tile> tiles;
  for (int64_t i = 0, first = 0; i < count; ++i) {
    const int64_t size = rows / count + (i < rows % count);
    tiles.push_back({first, size});
    first += size;
  }
  return tiles;
}

struct GroupSums {};

// Rows of inputs in tiles, [tiles, steps, rows of the tile], in scratch memory of the thread that makes it.
template <typename Tag, typename T>
struct Inputs {
  using Input = typename Step<T>::Input;
  std::vector<Tile> tiles;
  int64_t rows, depth, steps;
  Input* packed;

  Inputs(int64_t rows, int64_t depth)
      : tiles(tiles_of(rows, Step<T>::kTiled ? 1 : kMaxTile)), rows(rows), depth(depth), steps(steps_of<T>(depth)),
        packed(scratch<Tag, Input>(rows * steps)) {}

  // x [rows, depth].
  void pack(Member& member, const T* x) {
    member.for_each(tiles.size(), [&](int64_t i) {
      for (int64_t r = 0; r < tiles[i].rows; ++r) pack_row(tiles[i], r, 0, steps, x + (tiles[i].first + r) * depth);
    });
  }

  // Steps [first, first + count) of row r of a tile; x points to the first one's inputs.
  void pack_row(const Tile& tile, int64_t r, int64_t first, int64_t count, const T* x) {
    Input* out = packed + tile.first * steps + first * tile.rows + r;
    int64_t left = depth - first * Step<T>::kDepth;
    for (; count > 0; --count, x += Step<T>::kDepth, left -= Step<T>::kDepth, out += tile.rows)
      *out = left > 0 ? Step<T>::input(x, left) : Input{};
  }

  // Columns [first, first + count) of a row, from and to whole steps.
  void pack_columns(int64_t row, int64_t first, int64_t count, const T* x) {
    const auto tile = std::find_if(tiles.begin(), tiles.end(), [=](const Tile& t) { return row < t.first + t.rows; });
    pack_row(*tile, row - tile->first, first / Step<T>::kDepth, count / Step<T>::kDepth, x);
  }

  // Sums of the rows' inputs in each group [rows, groups], where offsets multiply them. Each thread has its own: to wait
  // for another's takes longer. Until it sums for another weight.
  const float* group_sums(const Weight& w) const {
    if (!w.groups.offsets) return nullptr;
    const int64_t groups = w.num_groups(), group_steps = w.groups.size / Step<T>::kDepth;
    float* sums = scratch<GroupSums, float>(rows * groups);
    for (const Tile& tile : tiles)
      for (int64_t r = 0; r < tile.rows; ++r)
        for (int64_t g = 0; g < groups; ++g) {
          const Input* x = packed + tile.first * steps + g * group_steps * tile.rows + r;
          std::array<float, 4> parts{};
          for (int64_t k = 0; k < group_steps; ++k) parts[k % 4] += Step<T>::sum(x[k * tile.rows]);
          sums[(tile.first + r) * groups + g] = (parts[0] + parts[1]) + (parts[2] + parts[3]);
        }
    return sums;
  }

  // Sums of panels [first, first + count) of w into acc [count, rows, kPanel], times their scales.
  void multiply_panels(const Weight& w, int64_t first, int64_t count, const float* sums, float* acc) const {
    std::fill(acc, acc + count * rows * kPanel, 0.0f);
    if (w.groups.size) return add_groups(w, first, count, sums, acc);
    if (!w.scales) return add_panels(static_cast<const T*>(w.panels), first, count, acc);
    add_panels(static_cast<const int8_t*>(w.panels), first, count, acc);
    for (int64_t p = 0; p < count; ++p)
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < kPanel; i += kLanes) {
          float* sums = acc + (p * rows + r) * kPanel + i;
          store(sums, load(sums) * load(w.scales + (first + p) * kPanel + i));
        }
  }

  void add_groups(const Weight& w, int64_t first, int64_t count, const float* sums, float* acc) const {
    const int64_t groups = w.num_groups(), chunk = std::max<int64_t>(kChunkCodes / w.groups.size, 1);
    const std::vector<Tile> blocks = Step<T>::kTiled ? tiles_of(rows, kMaxTile) : tiles;
    for (int64_t g = 0; g < groups; g += chunk)
      for (int64_t p = 0; p < count; ++p)
        for (const Tile& block : blocks)
          multiply_grouped<T>(block.rows, w, first + p, g, std::min(g + chunk, groups), packed + block.first * steps, steps,
                              sums ? sums + block.first * groups : nullptr, acc + (p * rows + block.first) * kPanel);
  }

  // The panels share each chunk of inputs while that is in cache.
  template <typename W>
  void add_panels(const W* w, int64_t first, int64_t count, float* acc) const {
    if constexpr (Step<T>::kTiled) {
      for (int64_t p = 0; p < count; ++p)
        multiply_tiles(rows, steps, packed, w + (first + p) * steps * kStepSize<T>, acc + p * rows * kPanel);
    } else {
      for (int64_t k = 0; k < steps; k += kChunkSteps)
        for (int64_t p = 0; p < count; ++p)
          for (const Tile& tile : tiles)
            multiply<T, W>(tile.rows, std::min(kChunkSteps, steps - k), packed + tile.first * steps + k * tile.rows,
                           w + ((first + p) * steps + k) * kStepSize<T>, acc + (p * rows + tile.first) * kPanel);
    }
  }
};

// Calls compute(first, count), then publish(first, count), for groups of panels of a weight of `depth` inputs.
template <typename T, typename F, typename G>
void for_each_group(Member& member, const Weight& w, int64_t depth, int64_t rows, const F& compute, const G& publish) {
  const int64_t panels = w.num_panels(), bytes = depth * kPanel * sizeof(T);
  const int64_t least = rows > 1 || w.groups.size ? kTaskPanels : 1;
  const int64_t group = std::max<int64_t>(least, kTaskBytes / bytes);
  const auto with = [=](const auto& f) {
    return [=, &f](int64_t task) { f(task * group, std::min(group, panels - task * group)); };
  };
  member.compute_each((panels + group - 1) / group, with(compute), with(publish));
}

// Rounds a panel's sums of one row to T.
template <typename T>
void round_panel(const float* sums, T* out) {
  for (int i = 0; i < kPanel; i += kLanes) store_rounded(out + i, load(sums + i));
}

struct Rows {};
struct Inner {};
struct Sums {};

// y [rows, outputs] = inputs times packed weights, rounded to T; plus bias [outputs], rounded again, where there is
// one. Y is T, or float for rounded values as float32.
template <typename T, typename Tag, typename Y>
void multiply_all(Member& member, const Inputs<Tag, T>& in, const Weight& w, const T* bias, Y* y) {
  const float* sums = in.group_sums(w);
  const auto compute = [&](int64_t first, int64_t count) {
    in.multiply_panels(w, first, count, sums, scratch<Sums, float>(count * in.rows * kPanel));
  };
  const auto publish = [&](int64_t first, int64_t count) {
    const float* acc = scratch<Sums, float>(count * in.rows * kPanel);
    for (int64_t p = first; p < first + count; ++p)
      for (int64_t r = 0; r < in.rows; ++r, acc += kPanel) {
        const int64_t column = p * kPanel, width = std::min<int64_t>(kPanel, w.outputs - column);
        T out[kPanel];
        round_panel(acc, out);
        if (bias) add_to(out, bias + column, width);
        std::copy_n(out, width, y + r * w.outputs + column);
      }
  };
  for_each_group<T>(member, w, in.depth, in.rows, compute, publish);
}

// The inner activations silu(gate) * up, rounded to T, packed for the next product as they come.
template <typename T>
void gate_all(Member& member, const Inputs<Rows, T>& in, const Weight& gate, const Weight& up, Inputs<Inner, T>& inner) {
  constexpr int64_t kSteps = kPanel / Step<T>::kDepth;
  const float* sums = in.group_sums(gate.groups.offsets ? gate : up);  // one size of groups for both
  const auto compute = [&](int64_t first, int64_t count) {
    const int64_t size = count * in.rows * kPanel;
    float *gates = scratch<Sums, float>(2 * size), *ups = gates + size;
    in.multiply_panels(gate, first, count, sums, gates);
    in.multiply_panels(up, first, count, sums, ups);
    for (int64_t i = 0; i < size; i += kLanes) {
      const Vec z = load(gates + i);
      store(gates + i, z * sigmoid(z) * load(ups + i));
    }
  };
  const auto publish = [&](int64_t first, int64_t count) {
    const float* gates = scratch<Sums, float>(2 * count * in.rows * kPanel);
    for (int64_t p = first; p < first + count; ++p)
      for (const Tile& tile : inner.tiles)
        for (int64_t r = 0; r < tile.rows; ++r, gates += kPanel) {
          T out[kPanel];
          round_panel(gates, out);
          inner.pack_row(tile, r, p * kSteps, std::min(kSteps, inner.steps - p * kSteps), out);
        }
  };
  for_each_group<T>(member, gate, 2 * in.depth, in.rows, compute, publish);
}

}  // namespace pilotfish
