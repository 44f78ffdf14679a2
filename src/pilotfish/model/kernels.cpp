// CPU kernels whose result for a row is bitwise the same whatever rows share the call.
//
// Every output element is one fixed chain of operations: a linear output sums over its inputs in steps of
// fixed size and order, attention reduces over keys in position order, in blocks of kBlock positions. Rows, tiles and
// threads only decide who computes an element, never how. So a token verified in a tree of 16 rows has
// the logits that it has when decoded alone, in float32 and in bfloat16, at any thread count.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

using at::BFloat16;
using at::Tensor;

constexpr int kLanes = 16;
typedef float Vec __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t)), aligned(4), may_alias));

typedef uint16_t Halves __attribute__((vector_size(kLanes * sizeof(uint16_t))));

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }
inline Vec splat(float x) { return Vec{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

// 32 elements as two vectors: of float32 the first and the last 16, of bfloat16 those of even and those of
// odd index. A bfloat16 is the upper half of a float32, so unpacking takes a shift and a mask.
struct Pair {
  Vec low, high;
};

inline Pair load_pair(const float* p) { return {load(p), load(p + kLanes)}; }
inline Pair load_pair(const BFloat16* p) {
  const Words words = *reinterpret_cast<const Words*>(p);
  return {reinterpret_cast<Vec>(words << 16), reinterpret_cast<Vec>(words & 0xffff0000u)};
}

// 16 int8 as float32, which is exact.
inline Vec widen(const int8_t* p) {
#ifdef __AVX512F__
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return reinterpret_cast<Vec>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = p[i];
  return v;
#endif
}

inline float sum_lanes(Vec v) {
  v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  v += __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  return v[0];
}

// The largest of 64 values.
inline float largest_of(const float* row) {
  Vec most = load(row);
  for (int i = 1; i < 4; ++i) {
    const Vec next = load(row + i * kLanes);
    most = most < next ? next : most;
  }
  float lanes[kLanes];
  store(lanes, most);
  return *std::max_element(lanes, lanes + kLanes);
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

// 1 / (1 + e^-x), by exp(-|x|) for either sign.
inline Vec sigmoid(Vec x) {
  const Vec e = exp_negative(x < 0.0f ? x : -x);
  return (x < 0.0f ? e : splat(1.0f)) / (1.0f + e);
}

// tanh in about 2 ulp: its series near 0, where (1 - e^-2|x|) / (1 + e^-2|x|) would cancel.
inline Vec tanh(Vec x) {
  const Vec square = x * x;
  Vec series = splat(-1382.0f / 155925);
  for (float c : {62.0f / 2835, -17.0f / 315, 2.0f / 15, -1.0f / 3, 1.0f}) series = series * square + c;
  const Vec size = x < 0.0f ? -x : x;
  const Vec e = exp_negative(-2.0f * size);
  const Vec ratio = (1.0f - e) / (1.0f + e);
  return size < 0.25f ? x * series : x < 0.0f ? -ratio : ratio;
}

// ---------------------------------------------------------------------------------------------------
// Linear: y[r, n] = sum over k of x[r, k] * w[n, k], in float32, in steps of ascending k.
//
// Weights are packed in panels of kPanel outputs and read once, in order; inputs in tiles of up to
// kMaxTile rows, so that the broadcasts of one step lie side by side. A step takes one float32 or two
// bfloat16 of k, which the processor's dot product adds in its own order and rounding (`Step`):
//
//     weights [N / kPanel, steps, kPanel, inputs of a step]      inputs [tiles, steps, rows of the tile]
//
// Weights are of the inputs' type, or int8 with a float32 scale for each output. An int8 becomes that type exactly,
// in registers, and the scale multiplies the whole sum: the chain is that of a weight of the inputs' type.
//
// K goes in chunks that keep a panel in the core's cache while all tiles pass over it; the sums wait in
// `acc` meanwhile.

constexpr int kPanel = 2 * kLanes;
constexpr int kMaxTile = 12;
constexpr int64_t kChunkSteps = 512;
constexpr int64_t kBlockPanels = 16;
constexpr int64_t kPrefetch = 4096;  // bytes: about one memory latency ahead of the loads

template <typename T>
struct Step;

template <>
struct Step<float> {
  static constexpr int64_t kDepth = 1;
  using Input = float;
  using Weights = Vec;
  static Input input(const float* x, int64_t /*left*/) { return x[0]; }
  static Weights weights(const float* w) { return load(w); }
  static Weights weights(const int8_t* w) { return widen(w); }
  static Vec add(Vec sum, Weights w, Input x) { return sum + splat(x) * w; }
};

template <>
struct Step<BFloat16> {
  static constexpr int64_t kDepth = 2;
#ifdef __AVX512BF16__
  using Input = uint32_t;
  using Weights = Words;
  static Input input(const BFloat16* x, int64_t left) { return x[0].x | (left > 1 ? uint32_t{x[1].x} << 16 : 0); }
  static Weights weights(const BFloat16* w) { return *reinterpret_cast<const Words*>(w); }
  static Weights weights(const int8_t* w) {
    const Vec first = widen(w), second = widen(w + kLanes);
    return reinterpret_cast<Weights>(
        _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(second), reinterpret_cast<__m512>(first)));
  }
  static Vec add(Vec sum, Weights w, Input x) {
    return reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(w),
                                                  reinterpret_cast<__m512bh>(_mm512_set1_epi32(x))));
  }
#else
  using Input = std::array<float, 2>;
  using Weights = Pair;
  static Input input(const BFloat16* x, int64_t left) { return {float(x[0]), left > 1 ? float(x[1]) : 0.0f}; }
  static Weights weights(const BFloat16* w) { return load_pair(w); }
  static Weights weights(const int8_t* w) {
    const Vec first = widen(w), second = widen(w + kLanes);
    return {__builtin_shufflevector(first, second, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
            __builtin_shufflevector(first, second, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)};
  }
  static Vec add(Vec sum, const Weights& w, const Input& x) {
    sum += splat(x[0]) * w.low;
    return sum + splat(x[1]) * w.high;
  }
#endif
};

template <typename T>
constexpr int64_t steps_of(int64_t depth) {
  return (depth + Step<T>::kDepth - 1) / Step<T>::kDepth;
}

// Elements in one step of a panel.
template <typename T>
constexpr int64_t kStepSize = kPanel * Step<T>::kDepth;

// Adds `steps` steps of one panel of weights, T or int8, to the sums of the rows of one tile, acc [Rows, kPanel].
template <typename T, typename W, int Rows>
void multiply(int64_t steps, const typename Step<T>::Input* x, const W* w, float* acc) {
  Vec sum[Rows][2];
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r)
    for (int h = 0; h < 2; ++h) sum[r][h] = load(acc + r * kPanel + h * kLanes);
  for (int64_t k = 0; k < steps; ++k, w += kStepSize<T>, x += Rows) {
    for (size_t line = 0; line < kStepSize<T> * sizeof(W); line += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(w) + kPrefetch + line);
    const auto low = Step<T>::weights(w), high = Step<T>::weights(w + kStepSize<T> / 2);
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
      sum[r][0] = Step<T>::add(sum[r][0], low, x[r]);
      sum[r][1] = Step<T>::add(sum[r][1], high, x[r]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r)
    for (int h = 0; h < 2; ++h) store(acc + r * kPanel + h * kLanes, sum[r][h]);
}

template <typename T, typename W>
using Kernel = void (*)(int64_t, const typename Step<T>::Input*, const W*, float*);

template <typename T, typename W>
Kernel<T, W> kernel_for(int rows) {
  switch (rows) {
#define CASE(R) case R: return multiply<T, W, R>;
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

// Memory that a thread keeps from call to call (one piece for each Tag): the system would hand out and
// clear fresh pages for every call. Holds garbage.
template <typename Tag, typename T>
T* scratch(int64_t size) {
  thread_local std::vector<T> memory;
  if (static_cast<int64_t>(memory.size()) < size) {
    memory.clear();  // nothing to copy
    memory.resize(size);
  }
  return memory.data();
}

// A packed weight: panels of the inputs' type, or of int8 with `scales` [panels * kPanel].
struct Weight {
  const Tensor& panels;
  const float* scales;  // null unless int8

  Weight(const Tensor& panels, const std::optional<Tensor>& scales)
      : panels(panels), scales(scales ? scales->const_data_ptr<float>() : nullptr) {}
};

// Rows of inputs in tiles, [tiles, steps, rows of the tile], in scratch memory of the calling thread.
template <typename Tag, typename T>
struct Inputs {
  using Input = typename Step<T>::Input;

  std::vector<Tile> tiles;
  int64_t rows, depth, steps;
  Input* packed;

  Inputs(int64_t rows, int64_t depth)
      : tiles(tiles_of(rows)), rows(rows), depth(depth), steps(steps_of<T>(depth)),
        packed(scratch<Tag, Input>(rows * steps)) {}

  // x [rows, depth]. By chunks, so that a tile's lines are written while they are in cache.
  void pack(const T* x) {
    const int64_t grain = 1 + 65536 / (std::max<int64_t>(rows, 1) * kChunkSteps);
    at::parallel_for(0, (steps + kChunkSteps - 1) / kChunkSteps, grain, [&](int64_t begin, int64_t end) {
      for (int64_t first = begin * kChunkSteps; first < std::min(steps, end * kChunkSteps); first += kChunkSteps)
        for (const Tile& tile : tiles)
          for (int64_t r = 0; r < tile.rows; ++r)
            pack_row(tile, r, first, std::min(kChunkSteps, steps - first),
                     x + (tile.first + r) * depth + first * Step<T>::kDepth);
    });
  }

  // Steps [first, first + count) of row r of a tile; x points to the first one's inputs.
  void pack_row(const Tile& tile, int64_t r, int64_t first, int64_t count, const T* x) {
    Input* out = packed + tile.first * steps + first * tile.rows + r;
    int64_t left = depth - first * Step<T>::kDepth;
    for (; count > 0; --count, x += Step<T>::kDepth, left -= Step<T>::kDepth, out += tile.rows)
      *out = Step<T>::input(x, left);
  }

  // Sums of panels [first, first + count) of w into acc [count, rows, kPanel], times their scales.
  void multiply_panels(const Weight& w, int64_t first, int64_t count, float* acc) const {
    std::fill(acc, acc + count * rows * kPanel, 0.0f);
    if (!w.scales) return add_panels(w.panels.const_data_ptr<T>(), first, count, acc);
    add_panels(w.panels.const_data_ptr<int8_t>(), first, count, acc);
    for (int64_t p = 0; p < count; ++p)
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < kPanel; i += kLanes) {
          float* sums = acc + (p * rows + r) * kPanel + i;
          store(sums, load(sums) * load(w.scales + (first + p) * kPanel + i));
        }
  }

  // The panels share each chunk of inputs while that is in cache.
  template <typename W>
  void add_panels(const W* w, int64_t first, int64_t count, float* acc) const {
    for (int64_t k = 0; k < steps; k += kChunkSteps)
      for (int64_t p = 0; p < count; ++p)
        for (const Tile& tile : tiles)
          kernel_for<T, W>(tile.rows)(std::min(kChunkSteps, steps - k), packed + tile.first * steps + k * tile.rows,
                                      w + ((first + p) * steps + k) * kStepSize<T>,
                                      acc + (p * rows + tile.first) * kPanel);
  }
};

// Calls block(first, count) for blocks of at most kBlockPanels of all panels, on the threads of the pool.
template <typename F>
void for_each_block(int64_t panels, int64_t depth, const F& block) {
  const int64_t grain = std::max<int64_t>(1, 65536 / (depth * kPanel));
  at::parallel_for(0, panels, grain, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += kBlockPanels) block(first, std::min(kBlockPanels, end - first));
  });
}

// Rounds a panel's sums of one row to T.
inline void round_panel(const float* sums, float* out) { std::copy_n(sums, kPanel, out); }
inline void round_panel(const float* sums, BFloat16* out) {
  for (int i = 0; i < kPanel; i += kLanes) {
    const Vec value = load(sums + i);
    const Words bits = reinterpret_cast<Words>(value);
    const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
    const Words safe = value == value ? rounded : Words{} + 0x7fc0u;
    const auto halves = __builtin_convertvector(safe, Halves);
    std::memcpy(out + i, &halves, sizeof(halves));
  }
}

struct Rows {};
struct Inner {};
struct Sums {};

// y [rows, outputs] = inputs times packed weights.
template <typename Tag, typename T>
void multiply_all(const Inputs<Tag, T>& in, const Weight& w, Tensor& y) {
  const int64_t outputs = y.size(1);
  T* out = y.mutable_data_ptr<T>();
  for_each_block(w.panels.size(0), in.depth, [&](int64_t first, int64_t count) {
    float* acc = scratch<Sums, float>(count * in.rows * kPanel);
    in.multiply_panels(w, first, count, acc);
    for (int64_t p = 0; p < count; ++p)
      for (int64_t r = 0; r < in.rows; ++r) {
        T rounded[kPanel];
        round_panel(acc + (p * in.rows + r) * kPanel, rounded);
        const int64_t column = (first + p) * kPanel;
        std::copy_n(rounded, std::min<int64_t>(kPanel, outputs - column), out + r * outputs + column);
      }
  });
}

// silu(gate) * up in place of gate, 16 at a time. silu(z) = z * sigmoid(z), by exp(-|z|) for either sign.
void gate_sums(float* gate, const float* up, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec z = load(gate + i);
    const Vec e = exp_negative(z < 0.0f ? z : -z);
    const Vec sigmoid = (z < 0.0f ? e : splat(1.0f)) / (1.0f + e);
    store(gate + i, z * sigmoid * load(up + i));
  }
}

// The inner activations, rounded to T, packed for the next product as they come.
template <typename T>
void gate_all(const Inputs<Rows, T>& in, const Weight& gate, const Weight& up, Inputs<Inner, T>& inner) {
  constexpr int64_t kSteps = kPanel / Step<T>::kDepth;
  for_each_block(gate.panels.size(0), in.depth, [&](int64_t first, int64_t count) {
    const int64_t size = count * in.rows * kPanel;
    float *gates = scratch<Sums, float>(2 * size), *ups = gates + size;
    in.multiply_panels(gate, first, count, gates);
    in.multiply_panels(up, first, count, ups);
    gate_sums(gates, ups, size);
    for (int64_t p = first; p < first + count; ++p)
      for (const Tile& tile : inner.tiles)
        for (int64_t r = 0; r < tile.rows; ++r) {
          T rounded[kPanel];
          round_panel(gates + ((p - first) * in.rows + tile.first + r) * kPanel, rounded);
          const int64_t left = std::min(kSteps, inner.steps - p * kSteps);
          inner.pack_row(tile, r, p * kSteps, left, rounded);
        }
  });
}

using Scales = std::optional<Tensor>;

void check_linear(const Tensor& x, int64_t inputs, const Tensor& packed, int64_t outputs, const Scales& scales) {
  TORCH_CHECK(x.dim() == 2 && packed.dim() == 4 && packed.size(2) == kPanel,
              "linear: x [rows, K], packed [panels, steps, ", kPanel, ", inputs of a step]");
  TORCH_CHECK(packed.scalar_type() == (scales ? at::kChar : x.scalar_type()) && packed.is_contiguous(),
              "linear: packed of x's type, or of int8 with scales");
  TORCH_CHECK(!scales || (scales->scalar_type() == at::kFloat && scales->is_contiguous() &&
                          scales->numel() == packed.size(0) * kPanel),
              "linear: a float32 scale for each output of packed");
  TORCH_CHECK(inputs > 0, "linear: no inputs");
  const int64_t depth = x.scalar_type() == at::kBFloat16 ? Step<BFloat16>::kDepth : Step<float>::kDepth;
  TORCH_CHECK(packed.size(3) == depth, "linear: a step of ", depth, " inputs");
  TORCH_CHECK((inputs + depth - 1) / depth == packed.size(1), "linear: ", inputs, " inputs do not match packed");
  TORCH_CHECK(outputs <= packed.size(0) * kPanel, "linear: more outputs than packed");
}

// Whether y has the dtype of x, or float32.
bool is_of_or_float(const Tensor& y, const Tensor& x) {
  return y.scalar_type() == x.scalar_type() || y.scalar_type() == at::kFloat;
}

// Calls run(T{}) for the element type of x.
template <typename F>
void dispatch(const Tensor& x, const F& run) {
  if (x.scalar_type() == at::kFloat) run(float{});
  else if (x.scalar_type() == at::kBFloat16) run(BFloat16{});
  else TORCH_CHECK(false, "pilotfish kernels take float32 or bfloat16, not ", x.scalar_type());
}

// x [rows, K], packed [ceil(N / kPanel), steps, kPanel, inputs of a step] of the same dtype, or of int8 with float32
// scales [ceil(N / kPanel) * kPanel] -> [rows, N].
Tensor linear(const Tensor& x, const Tensor& packed, int64_t outputs, const Scales& scales) {
  check_linear(x, x.size(-1), packed, outputs, scales);
  const Tensor rows = x.contiguous();
  Tensor y = at::empty({x.size(0), outputs}, x.options());
  dispatch(x, [&]<typename T>(T) {
    Inputs<Rows, T> in(x.size(0), x.size(1));
    in.pack(rows.const_data_ptr<T>());
    multiply_all(in, {packed, scales}, y);
  });
  return y;
}

// (silu(x @ gate) * (x @ up)) @ down, the outer parentheses rounded once. x [rows, K], gate and up packed
// [K to inner], down [inner to N], each maybe of int8 with scales -> [rows, N].
Tensor gated_mlp(const Tensor& x, const Tensor& gate, const Tensor& up, const Tensor& down, int64_t inner_size,
                 int64_t outputs, const Scales& gate_scales, const Scales& up_scales, const Scales& down_scales) {
  check_linear(x, x.size(-1), gate, inner_size, gate_scales);
  check_linear(x, x.size(-1), up, inner_size, up_scales);
  TORCH_CHECK(gate.sizes() == up.sizes(), "linear: gate and up of one shape");
  check_linear(x, inner_size, down, outputs, down_scales);
  const Tensor rows = x.contiguous();
  Tensor y = at::empty({x.size(0), outputs}, x.options());
  dispatch(x, [&]<typename T>(T) {
    Inputs<Rows, T> in(x.size(0), x.size(1));
    in.pack(rows.const_data_ptr<T>());
    Inputs<Inner, T> inner(x.size(0), inner_size);
    gate_all(in, {gate, gate_scales}, {up, up_scales}, inner);
    multiply_all(inner, {down, down_scales}, y);
  });
  return y;
}

// ---------------------------------------------------------------------------------------------------
// RMS norm: x / sqrt(mean(x^2) + eps) times weight. With a weight of x's type the quotient is rounded to that
// type first, as in Llama; with a float32 weight only the product is, as in Gemma and OLMo.

template <typename T, typename W>
void rms_norm_rows(const T* x, const W* weight, T* y, int64_t rows, int64_t size, float eps) {
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
        y[r * size + i] = static_cast<T>(static_cast<float>(static_cast<W>(static_cast<float>(in[i]) * scale)) *
                                         static_cast<float>(weight[i]));
    }
  });
}

// x [..., size], weight [size] of the same dtype or float32 -> like x.
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  TORCH_CHECK(weight.dim() == 1 && x.size(-1) == weight.size(0) && is_of_or_float(weight, x),
              "rms_norm: weight does not match x");
  const Tensor rows = x.contiguous();
  Tensor y = at::empty(rows.sizes(), rows.options());
  const int64_t size = weight.size(0);
  dispatch(x, [&]<typename T>(T) {
    dispatch(weight, [&]<typename W>(W) {
      rms_norm_rows(rows.const_data_ptr<T>(), weight.const_data_ptr<W>(), y.mutable_data_ptr<T>(), x.numel() / size,
                    size, static_cast<float>(eps));
    });
  });
  return y;
}

// ---------------------------------------------------------------------------------------------------
// Functions of single elements. Every element takes one path, through a vector of kLanes, wherever it lies.

// out[i] = f(a[i], b[i]), rounded to T.
template <typename T, typename F>
void map_row(const T* a, const T* b, T* out, int64_t size, const F& f) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, size - i);
    float x[kLanes] = {}, y[kLanes] = {};
    std::copy_n(a + i, count, x);
    std::copy_n(b + i, count, y);
    store(x, f(load(x), load(y)));
    std::transform(x, x + count, out + i, [](float value) { return static_cast<T>(value); });
  }
}

// x [rows, 2 n], gates then ups -> f(gate, up) [rows, n].
template <typename F>
Tensor map_gates(const Tensor& x, const F& f) {
  TORCH_CHECK(x.dim() == 2 && x.size(1) % 2 == 0, "gate: rows of gates, then as many ups");
  const Tensor rows = x.contiguous();
  const int64_t size = x.size(1) / 2;
  Tensor y = at::empty({x.size(0), size}, x.options());
  dispatch(x, [&]<typename T>(T) {
    const T* in = rows.const_data_ptr<T>();
    T* out = y.mutable_data_ptr<T>();
    at::parallel_for(0, x.size(0), 1 + 8192 / std::max<int64_t>(size, 1), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        map_row(in + 2 * r * size, in + (2 * r + 1) * size, out + r * size, size, f);
    });
  });
  return y;
}

// silu(gate) * up.
Tensor gate_silu(const Tensor& x) {
  return map_gates(x, [](Vec gate, Vec up) { return gate * sigmoid(gate) * up; });
}

// gelu(gate) * up, gelu by tanh (Hendrycks and Gimpel 2016, arXiv 1606.08415): (1 + tanh z) / 2 = sigmoid(2 z).
Tensor gate_gelu(const Tensor& x) {
  return map_gates(x, [](Vec gate, Vec up) {
    return gate * sigmoid(1.59576912f * (gate + 0.044715f * gate * gate * gate)) * up;
  });
}

// The clamped SwiGLU of gpt-oss: gate * sigmoid(alpha * gate) * (up + 1), gate up to limit, up within +-limit.
Tensor gate_clamped(const Tensor& x, double alpha, double limit) {
  const float a = static_cast<float>(alpha), most = static_cast<float>(limit);
  return map_gates(x, [a, most](Vec gate, Vec up) {
    gate = gate > most ? splat(most) : gate;
    up = up > most ? splat(most) : up < -most ? splat(-most) : up;
    return gate * sigmoid(a * gate) * (up + 1.0f);
  });
}

// cap * tanh(x / cap) of x [rows, size].
Tensor softcap(const Tensor& x, double cap) {
  TORCH_CHECK(x.dim() == 2 && cap > 0, "softcap: x [rows, size] and a cap above 0");
  const float most = static_cast<float>(cap);
  const Tensor rows = x.contiguous();
  Tensor y = at::empty_like(rows);
  dispatch(x, [&]<typename T>(T) {
    const T* in = rows.const_data_ptr<T>();
    T* out = y.mutable_data_ptr<T>();
    at::parallel_for(0, x.size(0), 1, [&](int64_t begin, int64_t end) {
      map_row(in + begin * x.size(1), in + begin * x.size(1), out + begin * x.size(1), (end - begin) * x.size(1),
              [most](Vec value, Vec) { return most * tanh(value / most); });
    });
  });
  return y;
}

// residual [rows, size] += x, rounded to their type; then rms_norm of that. One pass instead of two calls a half-layer.
Tensor add_rms_norm(Tensor& residual, const Tensor& x, const Tensor& weight, double eps) {
  TORCH_CHECK(residual.sizes() == x.sizes() && residual.scalar_type() == x.scalar_type() && residual.is_contiguous(),
              "add_rms_norm: residual and x of one shape and type");
  const Tensor addend = x.contiguous();
  dispatch(x, [&]<typename T>(T) {
    T* sum = residual.mutable_data_ptr<T>();
    const T* in = addend.const_data_ptr<T>();
    at::parallel_for(0, x.numel(), 65536, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) sum[i] = static_cast<T>(static_cast<float>(sum[i]) + static_cast<float>(in[i]));
    });
  });
  return rms_norm(residual, weight, eps);
}

// ---------------------------------------------------------------------------------------------------
// Rotary position embedding (Su et al. 2021, arXiv 2104.09864) of the halves (a, b) of a head, in place:
// (a cos - b sin, b cos + a sin), rounded once. Angles of a whole head hold those of a, then those of b; angles
// of half a head hold for both.

template <typename T, typename A>
void rotate_rows(Tensor& x, const A* cos, const A* sin, int64_t angles) {
  const int64_t half = x.size(2) / 2, second = angles - half;
  T* data = x.mutable_data_ptr<T>();
  for (int64_t r = 0; r < x.size(0); ++r, cos += angles, sin += angles)
    for (int64_t h = 0; h < x.size(1); ++h) {
      T *a = data + r * x.stride(0) + h * x.stride(1), *b = a + half;
      for (int64_t i = 0; i < half; ++i) {
        const float low = a[i], high = b[i];
        a[i] = static_cast<T>(low * static_cast<float>(cos[i]) - high * static_cast<float>(sin[i]));
        b[i] = static_cast<T>(high * static_cast<float>(cos[second + i]) + low * static_cast<float>(sin[second + i]));
      }
    }
}

// x [rows, heads, d] of even d, maybe the first part of longer heads; cos and sin [rows, d or d / 2] of x's dtype
// or float32.
void rotate(Tensor& x, const Tensor& cos, const Tensor& sin) {
  TORCH_CHECK(x.dim() == 3 && x.size(2) % 2 == 0 && x.stride(2) == 1, "rotate: x [rows, heads, an even d]");
  for (const Tensor& angle : {cos, sin})
    TORCH_CHECK(angle.dim() == 2 && angle.size(0) == x.size(0) && angle.sizes() == cos.sizes() &&
                    (angle.size(1) == x.size(2) || 2 * angle.size(1) == x.size(2)) && is_of_or_float(angle, x) &&
                    angle.scalar_type() == cos.scalar_type() && angle.is_contiguous(),
                "rotate: cos and sin do not match x");
  dispatch(x, [&]<typename T>(T) {
    dispatch(cos, [&]<typename A>(A) {
      rotate_rows<T>(x, cos.const_data_ptr<A>(), sin.const_data_ptr<A>(), cos.size(1));
    });
  });
}

// ---------------------------------------------------------------------------------------------------
// Tree attention over slots.
//
// Row r sits at position row_positions[r] and attends to the positions up to its own along its path:
//
//     position   0 ........ row_prefixes[r] - 1   row_prefixes[r] ...... row_positions[r]
//     slot       prefix_slots[row_sequences[r]]   path_slots[r]
//
// The prefix holds a sequence's committed tokens, the path a tree node's ancestors and the node itself. With a
// window of w the row attends to the last w of these positions alone, its own included. A score is q . k * scale,
// capped at softcap * tanh(score / softcap) (Gemma 2, arXiv 2408.00118). A head's sink is one more score without
// a value: it takes its share of the weights (gpt-oss; Xiao et al. 2023, arXiv 2309.17453). Keys are reduced in
// blocks of kBlock positions with a running maximum (Milakov and Gimelshein 2018, arXiv 1805.02867); block borders
// depend on positions alone. A row at position -1 is padding: zeros.

constexpr int64_t kBlock = 64;

struct AttentionInputs {
  const int32_t *row_sequences, *row_positions, *row_prefixes, *prefix_slots, *path_slots;
  int64_t prefix_width, path_width, query_heads, kv_heads, head_dim, query_stride;
  float scale;
  int64_t window;      // 0: none
  float softcap;       // 0: none
  const float* sinks;  // [query_heads], null: none

  int64_t slot(int64_t row, int64_t position) const {
    const int64_t prefix = row_prefixes[row];
    return position < prefix ? prefix_slots[row_sequences[row] * prefix_width + position]
                             : path_slots[row * path_width + position - prefix];
  }
};

// Transposes 16 by 16 in place: at every size of block the off-diagonal blocks change places.
template <int Size>
inline void swap_blocks(Vec* rows) {
  constexpr auto from = [](int lane, bool upper) {
    return upper ? (lane & Size ? kLanes + lane - Size : lane) : (lane & Size ? kLanes + lane : lane + Size);
  };
  for (int i = 0; i < kLanes; ++i) {
    if (i & Size) continue;
    const Vec a = rows[i], b = rows[i + Size];
#define LANES(U) from(0, U), from(1, U), from(2, U), from(3, U), from(4, U), from(5, U), from(6, U), from(7, U), \
                 from(8, U), from(9, U), from(10, U), from(11, U), from(12, U), from(13, U), from(14, U), from(15, U)
    rows[i] = __builtin_shufflevector(a, b, LANES(true));
    rows[i + Size] = __builtin_shufflevector(a, b, LANES(false));
#undef LANES
  }
}

inline void transpose(Vec* rows) {
  swap_blocks<8>(rows);
  swap_blocks<4>(rows);
  swap_blocks<2>(rows);
  swap_blocks<1>(rows);
}

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

// The query heads that share one KV head, for one row. Vectors keep the lane order of load_pair.
template <typename T>
struct HeadGroup {
  int64_t heads, pairs;
  float softcap;
  std::vector<float> query, out, scores;  // [heads, head_dim], [heads, head_dim], [heads, kBlock]
  std::vector<float> largest, total;      // [heads]

  HeadGroup(const AttentionInputs& in)
      : heads(in.query_heads / in.kv_heads), pairs(in.head_dim / (2 * kLanes)), softcap(in.softcap), query(heads * in.head_dim),
        out(heads * in.head_dim), scores(heads * kBlock), largest(heads), total(heads) {}

  // q [heads, head_dim]; sinks [heads] or null.
  void begin(const T* q, float scale, const float* sinks) {
    for (int64_t i = 0; i < heads * pairs; ++i) {
      const Pair pair = load_pair(q + i * 2 * kLanes);
      store(query.data() + i * 2 * kLanes, pair.low * scale);
      store(query.data() + i * 2 * kLanes + kLanes, pair.high * scale);
    }
    std::fill(out.begin(), out.end(), 0.0f);
    for (int64_t h = 0; h < heads; ++h) {  // a sink is its head's first score
      largest[h] = sinks ? sinks[h] : -std::numeric_limits<float>::infinity();
      total[h] = sinks ? 1.0f : 0.0f;
    }
  }

  // Keys and values [first, last) of a block.
  void add_block(const float* columns, const T* const* values, int64_t first, int64_t last) {
    for_head_tiles([&](auto tile, int64_t h) { score<tile()>(columns, h); });
    for (int64_t h = 0; h < heads; ++h) rescale(h, first, last);
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
    constexpr int kVectors = kBlock / kLanes;
    const int64_t size = pairs * 2 * kLanes;
    const float* q = query.data() + head * size;
    Vec sum[Heads][kVectors] = {};
    for (int64_t i = 0; i < size; ++i, columns += kBlock) {
      Vec keys[kVectors];
      for (int v = 0; v < kVectors; ++v) keys[v] = load(columns + v * kLanes);
      for (int h = 0; h < Heads; ++h) {
        const Vec element = splat(q[h * size + i]);
        for (int v = 0; v < kVectors; ++v) sum[h][v] += element * keys[v];
      }
    }
    for (int h = 0; h < Heads; ++h)
      for (int v = 0; v < kVectors; ++v) store(scores.data() + (head + h) * kBlock + v * kLanes, sum[h][v]);
  }

  void rescale(int64_t h, int64_t first, int64_t last) {
    float* row = scores.data() + h * kBlock;
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
    const float shrink = exp_negative(splat(largest[h] - top))[0];
    total[h] = total[h] * shrink + sum_lanes(sum);
    for (int64_t i = 0; i < pairs * 2; ++i) {
      float* o = out.data() + (h * pairs * 2 + i) * kLanes;
      store(o, load(o) * shrink);
    }
    largest[h] = top;
  }

  template <int Heads>
  void accumulate(const T* const* values, int64_t first, int64_t last, int64_t head) {
    const int64_t size = pairs * 2 * kLanes;
    for (int64_t i = 0; i < size; i += 2 * kLanes) {
      float* o = out.data() + head * size + i;
      Pair sum[Heads];
      for (int h = 0; h < Heads; ++h) sum[h] = {load(o + h * size), load(o + h * size + kLanes)};
      for (int64_t j = first; j < last; ++j) {
        const Pair pair = load_pair(values[j] + i);
        for (int h = 0; h < Heads; ++h) {
          const Vec weight = splat(scores[(head + h) * kBlock + j]);
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

// Rows [first, first + count) of one sequence, which share the keys of their prefix.
struct RowGroup {
  int64_t first, count;
};

constexpr int64_t kGroupRows = 16;

std::vector<RowGroup> groups_of(const AttentionInputs& in, int64_t rows) {
  std::vector<RowGroup> groups;
  for (int64_t r = 0; r < rows; ++r) {
    const bool same = !groups.empty() && in.row_sequences[groups.back().first] == in.row_sequences[r] &&
                      in.row_prefixes[groups.back().first] == in.row_prefixes[r];
    if (same && groups.back().count < kGroupRows) ++groups.back().count;
    else groups.push_back({r, 1});
  }
  return groups;
}

// Attention of the rows of a group with one KV head. A block of the prefix is laid out once for all of them, one that
// reaches into their paths for each: either way a row sees the same keys in the same order.
template <typename T>
struct GroupAttention {
  const AttentionInputs& in;
  const T *k_pool, *v_pool;
  std::vector<HeadGroup<T>> states;
  KeyColumns<T> columns;
  const T *keys[kBlock], *values[kBlock];

  GroupAttention(const AttentionInputs& in, const T* k_pool, const T* v_pool, int64_t rows)
      : in(in), k_pool(k_pool), v_pool(v_pool), states(rows, HeadGroup<T>(in)), columns(in.head_dim) {}

  int64_t length(int64_t row) const { return in.row_positions[row] + 1; }
  int64_t start(int64_t row) const { return in.window > 0 ? std::max<int64_t>(0, length(row) - in.window) : 0; }

  void run(const RowGroup& group, int64_t kv_head, const T* q, T* y) {
    const int64_t heads = states[0].heads, head = kv_head * heads * in.head_dim;
    int64_t begin = std::numeric_limits<int64_t>::max(), end = 0;
    for (int64_t r = 0; r < group.count; ++r) {
      const int64_t row = group.first + r;
      states[r].begin(q + row * in.query_stride + head, in.scale, in.sinks ? in.sinks + kv_head * heads : nullptr);
      begin = std::min(begin, start(row));
      end = std::max(end, length(row));
    }
    for (int64_t block = begin / kBlock * kBlock; block < end; block += kBlock) add_block(group, kv_head, block);
    for (int64_t r = 0; r < group.count; ++r) {
      T* out = y + (group.first + r) * in.query_heads * in.head_dim + head;
      if (length(group.first + r) > 0) states[r].finish(out);
      else std::fill(out, out + heads * in.head_dim, static_cast<T>(0.0f));
    }
  }

  void add_block(const RowGroup& group, int64_t kv_head, int64_t block) {
    const bool shared = block + kBlock <= in.row_prefixes[group.first];
    if (shared) lay_out(group.first, kv_head, block, 0, kBlock);
    for (int64_t r = 0; r < group.count; ++r) {
      const int64_t row = group.first + r;
      const int64_t first = std::max<int64_t>(0, start(row) - block), last = std::min(kBlock, length(row) - block);
      if (first >= last) continue;
      if (!shared) lay_out(row, kv_head, block, first, last);
      states[r].add_block(columns.columns, values, first, last);
    }
  }

  // Positions block + [first, last) as `row` sees them.
  void lay_out(int64_t row, int64_t kv_head, int64_t block, int64_t first, int64_t last) {
    for (int64_t j = 0; j < kBlock; ++j) {
      const int64_t position = block + std::clamp(j, first, last - 1);  // others are dropped, but must be readable
      const int64_t place = (in.slot(row, position) * in.kv_heads + kv_head) * in.head_dim;
      keys[j] = k_pool + place;
      values[j] = v_pool + place;
    }
    columns.fill(keys, first, last);
  }
};

template <typename T>
void attend(const AttentionInputs& in, const T* q, const T* k_pool, const T* v_pool, T* y, int64_t rows) {
  const std::vector<RowGroup> groups = groups_of(in, rows);
  at::parallel_for(0, groups.size() * in.kv_heads, 1, [&](int64_t begin, int64_t end) {
    GroupAttention<T> attention(in, k_pool, v_pool, std::min(rows, kGroupRows));
    for (int64_t item = begin; item < end; ++item)
      attention.run(groups[item / in.kv_heads], item % in.kv_heads, q, y);
  });
}

// Whether each row's heads lie side by side; rows may lie apart.
bool has_whole_rows(const Tensor& x) { return x.stride(2) == 1 && x.stride(1) == x.size(2); }

template <typename T>
void write_rows(const Tensor& rows, Tensor& pool, const int32_t* slots) {
  const int64_t width = rows.size(1) * rows.size(2);
  const T* from = rows.const_data_ptr<T>();
  T* to = pool.mutable_data_ptr<T>();
  for (int64_t r = 0; r < rows.size(0); ++r) std::copy_n(from + r * rows.stride(0), width, to + slots[r] * width);
}

// q [rows, heads, d], k and v [rows, kv_heads, d] (d a multiple of 32), pools [slots, kv_heads, d], the
// rest int32: row_* [rows], prefix_slots [sequences, longest prefix], path_slots [rows, longest path]. window and
// softcap: 0 for none; sinks [heads] of any float dtype. Writes k and v to the pools at row_slots, then attends.
// -> [rows, heads, d].
Tensor tree_attention(const Tensor& q, const Tensor& k, const Tensor& v, Tensor& k_pool, Tensor& v_pool,
                      const Tensor& row_slots, const Tensor& row_sequences, const Tensor& row_positions,
                      const Tensor& row_prefixes, const Tensor& prefix_slots, const Tensor& path_slots, double scale,
                      int64_t window, double softcap, const std::optional<Tensor>& sinks) {
  TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && q.size(1) % k.size(1) == 0, "tree_attention: q, k of [rows, heads, d]");
  TORCH_CHECK(q.size(2) % (2 * kLanes) == 0, "tree_attention: head size must be a multiple of ", 2 * kLanes);
  for (const Tensor& index : {row_slots, row_sequences, row_positions, row_prefixes, prefix_slots, path_slots})
    TORCH_CHECK(index.scalar_type() == at::kInt && index.is_contiguous(), "tree_attention: indices are int32");
  for (const Tensor& x : {q, k, v})
    TORCH_CHECK(x.dim() == 3 && x.size(0) == row_slots.numel() && x.size(2) == q.size(2) && has_whole_rows(x),
                "tree_attention: q, k, v of equal rows and head sizes, a row's heads side by side");
  for (const Tensor& pool : {k_pool, v_pool})
    TORCH_CHECK(pool.dim() == 3 && pool.size(1) == k.size(1) && pool.size(2) == k.size(2) && pool.is_contiguous() &&
                    pool.scalar_type() == q.scalar_type(),
                "tree_attention: pools do not match k");
  TORCH_CHECK(v.size(1) == k.size(1), "tree_attention: as many heads in v as in k");
  TORCH_CHECK(window >= 0 && softcap >= 0, "tree_attention: window and softcap of at least 0");
  TORCH_CHECK(!sinks || (sinks->dim() == 1 && sinks->size(0) == q.size(1)), "tree_attention: a sink for each head");
  const Tensor sink_scores = sinks ? sinks->to(at::kFloat).contiguous() : Tensor();
  Tensor y = at::empty(q.sizes(), q.options());
  const AttentionInputs in{row_sequences.const_data_ptr<int32_t>(), row_positions.const_data_ptr<int32_t>(),
                           row_prefixes.const_data_ptr<int32_t>(), prefix_slots.const_data_ptr<int32_t>(),
                           path_slots.const_data_ptr<int32_t>(), prefix_slots.size(1), path_slots.size(1),
                           q.size(1), k.size(1), q.size(2), q.stride(0), static_cast<float>(scale),
                           window, static_cast<float>(softcap), sinks ? sink_scores.const_data_ptr<float>() : nullptr};
  dispatch(q, [&]<typename T>(T) {
    write_rows<T>(k, k_pool, row_slots.const_data_ptr<int32_t>());
    write_rows<T>(v, v_pool, row_slots.const_data_ptr<int32_t>());
    attend<T>(in, q.const_data_ptr<T>(), k_pool.const_data_ptr<T>(), v_pool.const_data_ptr<T>(),
              y.mutable_data_ptr<T>(), q.size(0));
  });
  return y;
}

// ---------------------------------------------------------------------------------------------------
// Filters of sampling, one row after another: logits / temperature, then min-p, top-k, top-p. A dropped
// logit becomes -infinity.

constexpr double kDropped = -std::numeric_limits<double>::infinity();

struct Filter {
  double temperature, floor;  // floor: log of min-p
  int64_t top_k;              // 0: all
  double top_p;
};

struct Ranked {};

void drop_below(double* scores, int64_t vocab, double least) {
  for (int64_t i = 0; i < vocab; ++i)
    if (scores[i] < least) scores[i] = kDropped;
}

// Equals of the k-th stay.
void keep_top_k(double* scores, int64_t vocab, int64_t k) {
  double* ranked = scratch<Ranked, double>(vocab);
  std::copy_n(scores, vocab, ranked);
  std::nth_element(ranked, ranked + k - 1, ranked + vocab, std::greater<>());
  drop_below(scores, vocab, ranked[k - 1]);
}

// Keeps the likeliest tokens until their mass reaches top_p. Equal tokens rank by id.
void keep_top_p(double* scores, int64_t vocab, double top_p) {
  int32_t* heap = scratch<Ranked, int32_t>(vocab);
  const double top = *std::max_element(scores, scores + vocab);
  double total = 0;
  int64_t size = 0;
  for (int64_t i = 0; i < vocab; ++i)
    if (scores[i] > kDropped) {
      total += std::exp(scores[i] - top);
      heap[size++] = static_cast<int32_t>(i);
    }
  const auto worse = [&](int32_t a, int32_t b) { return scores[a] != scores[b] ? scores[a] < scores[b] : a > b; };
  std::make_heap(heap, heap + size, worse);
  for (double mass = 0; size > 0 && !(mass >= top_p); --size) {
    mass += std::exp(scores[heap[0]] - top) / total;
    std::pop_heap(heap, heap + size, worse);
  }
  for (int64_t i = 0; i < size; ++i) scores[heap[i]] = kDropped;
}

template <typename T>
void filter_row(const T* logits, int64_t vocab, const Filter& filter, double* scores) {
  for (int64_t i = 0; i < vocab; ++i) {
    scores[i] = static_cast<double>(logits[i]) / filter.temperature;
    if (std::isnan(scores[i])) scores[i] = kDropped;
  }
  if (filter.floor > kDropped) drop_below(scores, vocab, *std::max_element(scores, scores + vocab) + filter.floor);
  if (filter.top_k > 0 && filter.top_k < vocab) keep_top_k(scores, vocab, filter.top_k);
  if (filter.top_p < 1) keep_top_p(scores, vocab, filter.top_p);
}

// logits float32 or float64 [rows, vocab]; per row float64 temperatures, floors (log of min-p), top_p and
// int64 top_k -> scores float64 [rows, vocab].
Tensor filter_logits(const Tensor& logits, const Tensor& temperatures, const Tensor& floors, const Tensor& top_k,
                     const Tensor& top_p) {
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0 && logits.stride(1) == 1, "filter_logits: [rows, vocab]");
  const int64_t rows = logits.size(0), vocab = logits.size(1), stride = logits.stride(0);
  for (const Tensor& column : {temperatures, floors, top_k, top_p})
    TORCH_CHECK(column.numel() == rows && column.is_contiguous(), "filter_logits: one of each per row");
  Tensor scores = at::empty({rows, vocab}, temperatures.options());
  const auto run = [&]<typename T>(T) {
    at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const Filter filter{temperatures.const_data_ptr<double>()[r], floors.const_data_ptr<double>()[r],
                            top_k.const_data_ptr<int64_t>()[r], top_p.const_data_ptr<double>()[r]};
        filter_row(logits.const_data_ptr<T>() + r * stride, vocab, filter, scores.mutable_data_ptr<double>() + r * vocab);
      }
    });
  };
  if (logits.scalar_type() == at::kDouble) run(double{});
  else if (logits.scalar_type() == at::kFloat) run(float{});
  else TORCH_CHECK(false, "filter_logits: float32 or float64, not ", logits.scalar_type());
  return scores;
}

// ---------------------------------------------------------------------------------------------------
// The k best tokens by logit + shared noise. See core/noise.py for the noise itself.

constexpr int kStretch = 4 * kLanes;
typedef uint64_t Products __attribute__((vector_size(kLanes * sizeof(uint32_t)), may_alias));
typedef double Scores __attribute__((vector_size(8 * sizeof(double)), aligned(8), may_alias));

// High and low halves of constant * each lane.
void multiply(uint64_t constant, Words lanes, Words& high, Words& low) {
  constexpr uint64_t kLow = 0xFFFFFFFF;
  const Products even = (reinterpret_cast<Products&>(lanes) & kLow) * constant;
  const Products odd = (reinterpret_cast<Products&>(lanes) >> 32) * constant;
  reinterpret_cast<Products&>(high) = (even >> 32) | (odd & ~kLow);
  reinterpret_cast<Products&>(low) = (even & kLow) | (odd << 32);
}

// Words of the tokens [4 * block, 4 * block + kStretch), in their order.
void philox(uint64_t seed, uint64_t position, uint32_t block, uint32_t* words) {
  Words c0 = Words{} + static_cast<uint32_t>(position), c1 = Words{} + static_cast<uint32_t>(position >> 32);
  Words c2 = Words{} + block, c3 = Words{};
  for (int lane = 0; lane < kLanes; ++lane) c2[lane] += lane;
  uint32_t key0 = seed, key1 = seed >> 32;
  for (int round = 0; round < 10; ++round) {
    Words high0, low0, high1, low1;
    multiply(0xD2511F53, c0, high0, low0);
    multiply(0xCD9E8D57, c2, high1, low1);
    c0 = high1 ^ c1 ^ key0;
    c1 = low1;
    c2 = high0 ^ c3 ^ key1;
    c3 = low0;
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  // to the order of tokens: pairs of words first, then pairs of pairs
  const Words low01 = __builtin_shufflevector(c0, c1, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const Words high01 = __builtin_shufflevector(c0, c1, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  const Words low23 = __builtin_shufflevector(c2, c3, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const Words high23 = __builtin_shufflevector(c2, c3, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  const auto first = [](Words x, Words y) {
    return __builtin_shufflevector(x, y, 0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23);
  };
  const auto second = [](Words x, Words y) {
    return __builtin_shufflevector(x, y, 8, 9, 24, 25, 10, 11, 26, 27, 12, 13, 28, 29, 14, 15, 30, 31);
  };
  Words* const out = reinterpret_cast<Words*>(words);
  out[0] = first(low01, low23);
  out[1] = second(low01, low23);
  out[2] = first(high01, high23);
  out[3] = second(high01, high23);
}

double highest_of(const double* logits, int count) {
  double highest = logits[0];
  int i = 0;
  if (count >= 8) {
    Scores best = *reinterpret_cast<const Scores*>(logits);
    for (i = 8; i + 8 <= count; i += 8) {
      const Scores next = *reinterpret_cast<const Scores*>(logits + i);
      best = next > best ? next : best;
    }
    for (int lane = 0; lane < 8; ++lane) highest = std::max(highest, best[lane]);
  }
  for (; i < count; ++i) highest = std::max(highest, logits[i]);
  return highest;
}

constexpr double kMaxNoise = 22.9, kMinNoise = -3.2;

double gumbel_of(uint32_t word) { return -std::log(-std::log((word + 0.5) / 4294967296.0)); }

// -log u >= 1 - u, hence g <= -log(1 - u) <= 32 log 2 - floor(log2(words above this one)) log 2. The floor is the
// exponent of the upper 24 bits as a float, which holds them exactly; without any of them nothing is known.
double gumbel_bound(uint32_t word) {
  const int32_t above = static_cast<int32_t>(~word >> 8);
  const int32_t exponent = (std::bit_cast<int32_t>(static_cast<float>(above)) >> 23) - 127;
  return (above == 0 ? 33 : 24 - exponent) * 0.6931471805599454;
}

struct Candidate {
  double score;
  int64_t token;
};

// Exact, though it hashes and takes logarithms only for tokens that could still enter the best k.
void best_of_row(const double* logits, int64_t vocab, uint64_t seed, uint64_t position, int64_t k, double* scores,
                 int64_t* tokens) {
  std::vector<Candidate> best;
  double threshold = -std::numeric_limits<double>::infinity();
  // just below what the best logit reaches with the least noise, also where the noise is lost in rounding
  if (k == 1) threshold = std::nextafter(*std::max_element(logits, logits + vocab) + kMinNoise, threshold);
  for (int64_t first = 0; first < vocab; first += kStretch) {
    const int count = static_cast<int>(std::min<int64_t>(kStretch, vocab - first));
    if (highest_of(logits + first, count) + kMaxNoise <= threshold) continue;
    uint32_t words[kStretch];
    philox(seed, position, static_cast<uint32_t>(first >> 2), words);
    uint8_t hopeful[kStretch] = {};
    for (int i = 0; i < count; ++i) hopeful[i] = logits[first + i] + gumbel_bound(words[i]) > threshold;
    for (int eighth = 0; eighth < kStretch; eighth += 8) {
      uint64_t any;
      std::memcpy(&any, hopeful + eighth, 8);
      if (any == 0) continue;
      for (int i = eighth; i < eighth + 8; ++i) {
        if (!hopeful[i]) continue;
        const double score = logits[first + i] + gumbel_of(words[i]);
        if (score <= threshold) continue;  // on ties the lower id, which came first, stays
        auto place = std::upper_bound(best.begin(), best.end(), score,
                                      [](double value, const Candidate& c) { return value > c.score; });
        best.insert(place, {score, first + i});
        if (static_cast<int64_t>(best.size()) > k) best.pop_back();
        if (static_cast<int64_t>(best.size()) == k) threshold = best.back().score;
      }
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
  m.def("linear(Tensor x, Tensor packed, int outputs, Tensor? scales=None) -> Tensor");
  m.def(
      "gated_mlp(Tensor x, Tensor gate, Tensor up, Tensor down, int inner, int outputs, Tensor? gate_scales=None, "
      "Tensor? up_scales=None, Tensor? down_scales=None) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("add_rms_norm(Tensor(a!) residual, Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("rotate(Tensor(a!) x, Tensor cos, Tensor sin) -> ()");
  m.def("gate_silu(Tensor x) -> Tensor");
  m.def("gate_gelu(Tensor x) -> Tensor");
  m.def("gate_clamped(Tensor x, float alpha, float limit) -> Tensor");
  m.def("softcap(Tensor x, float cap) -> Tensor");
  m.def(
      "tree_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor row_slots, "
      "Tensor row_sequences, Tensor row_positions, Tensor row_prefixes, Tensor prefix_slots, Tensor path_slots, "
      "float scale, int window, float softcap, Tensor? sinks) -> Tensor");
  m.def("filter_logits(Tensor logits, Tensor temperatures, Tensor floors, Tensor top_k, Tensor top_p) -> Tensor");
  m.def("perturbed_topk(Tensor logits, Tensor seeds, Tensor positions, int k) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(pilotfish, CPU, m) {
  m.impl("linear", linear);
  m.impl("gated_mlp", gated_mlp);
  m.impl("rms_norm", rms_norm);
  m.impl("add_rms_norm", add_rms_norm);
  m.impl("rotate", rotate);
  m.impl("gate_silu", gate_silu);
  m.impl("gate_gelu", gate_gelu);
  m.impl("gate_clamped", gate_clamped);
  m.impl("softcap", softcap);
  m.impl("tree_attention", tree_attention);
  m.impl("filter_logits", filter_logits);
  m.impl("perturbed_topk", perturbed_topk);
}
