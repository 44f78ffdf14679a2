// Vectors of float32 as wide as the instruction set's registers, and the functions of single elements on them.
//
// GCC's and clang's vector types become the registers of whatever the file is compiled for. Only what they cannot say
// is written in intrinsics.

#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace pilotfish {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;  // SSE2, NEON
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t)), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(kLanes * sizeof(int32_t)), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(kLanes * sizeof(uint16_t))));
typedef int8_t Bytes __attribute__((vector_size(kLanes)));
constexpr int kDoubles = kLanes / 2;  // float64 in as many bytes
typedef double Doubles __attribute__((vector_size(kDoubles * sizeof(double)), aligned(8), may_alias));
typedef uint64_t LongWords __attribute__((vector_size(kDoubles * sizeof(uint64_t)), aligned(8), may_alias));
typedef float HalfVec __attribute__((vector_size(kDoubles * sizeof(float)), aligned(4), may_alias));

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }
inline Vec splat(float x) { return Vec{} + x; }

// The bits of torch's bfloat16: the upper half of a float32.
struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;
  explicit BFloat16(float value) {  // to nearest, ties to even
    const uint32_t whole = std::bit_cast<uint32_t>(value);
    bits = std::isnan(value) ? 0x7fc0 : static_cast<uint16_t>((whole + 0x7fffu + ((whole >> 16) & 1u)) >> 16);
  }
  operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }
};

// 2 * kLanes elements as two vectors: of float32 and int8 the first and the last half, of bfloat16 those of even and those
// of odd index, for unpacking then takes a shift and a mask.
struct Pair {
  Vec low, high;
};

inline Pair load_pair(const float* p) { return {load(p), load(p + kLanes)}; }
inline Pair load_pair(const BFloat16* p) {
  const Words words = *reinterpret_cast<const Words*>(p);
  return {reinterpret_cast<Vec>(words << 16), reinterpret_cast<Vec>(words & 0xffff0000u)};
}

// Integers of kLanes int8.
inline Integers widen(const int8_t* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<Integers>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return reinterpret_cast<Integers>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  Bytes bytes;
  std::memcpy(&bytes, p, sizeof(bytes));
  return __builtin_convertvector(bytes, Integers);
#endif
}

// kLanes int8 as float32, which is exact.
inline Vec floats_of(const int8_t* p) { return __builtin_convertvector(widen(p), Vec); }

inline Pair load_pair(const int8_t* p) { return {floats_of(p), floats_of(p + kLanes)}; }

// kDoubles elements, side by side.
inline Doubles load_doubles(const double* p) { return *reinterpret_cast<const Doubles*>(p); }
inline Doubles load_doubles(const float* p) {
  return __builtin_convertvector(*reinterpret_cast<const HalfVec*>(p), Doubles);
}

// Of a Vec or of Doubles.
template <typename V>
inline auto sum_lanes(V v) {
  constexpr int kCount = sizeof(V) / sizeof(v[0]);
  std::remove_cvref_t<decltype(v[0])> lanes[kCount];
  std::memcpy(lanes, &v, sizeof(v));
  for (int half = kCount / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

// Rounds to bfloat16, to nearest, ties to even: in the upper half of each lane.
inline Words rounded_bits(Vec value) {
  const Words bits = reinterpret_cast<Words>(value);
  return value == value ? (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u : Words{} + 0x7fc00000u;
}

// A vector rounded to T, as float32.
template <typename T>
inline Vec rounded(Vec value) {
  if constexpr (std::is_same_v<T, float>) return value;
  else return reinterpret_cast<Vec>(rounded_bits(value));
}

// kLanes elements, side by side.
inline Vec load_floats(const float* p) { return load(p); }
inline Vec load_floats(const BFloat16* p) {
  Halves halves;
  std::memcpy(&halves, p, sizeof(halves));
  return reinterpret_cast<Vec>(__builtin_convertvector(halves, Words) << 16);
}

// Rounds kLanes elements to T.
inline void store_rounded(float* p, Vec value) { store(p, value); }
inline void store_rounded(BFloat16* p, Vec value) {
  const auto halves = __builtin_convertvector(rounded_bits(value) >> 16, Halves);
  std::memcpy(p, &halves, sizeof(halves));
}

// The inverse of load_pair, rounded.
inline void store_pair(float* p, Pair pair) {
  store(p, pair.low);
  store(p + kLanes, pair.high);
}
inline void store_pair(BFloat16* p, Pair pair) {
  *reinterpret_cast<Words*>(p) = rounded_bits(pair.low) >> 16 | rounded_bits(pair.high);
}

// out[i] = f(x[i]...) for i in [0, size), rounded to T. Every element goes through a vector.
template <typename T, typename F, typename... X>
inline void map_row(T* out, int64_t size, const F& f, const X*... x) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store_rounded(out + i, f(load_floats(x + i)...));
  if (i == size) return;
  const auto padded = [&]<typename E>(const E* from) {
    std::array<E, kLanes> rest{};
    std::copy(from + i, from + size, rest.begin());
    return load_floats(rest.data());
  };
  T last[kLanes];
  store_rounded(last, f(padded(x)...));
  std::copy_n(last, size - i, out + i);
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

// Lane I of row `upper ? i : i + Size` after 2 by 2 blocks of Size lanes changed places.
template <int Size>
constexpr int swapped_lane(int lane, bool upper) {
  return upper ? (lane & Size ? kLanes + lane - Size : lane) : (lane & Size ? kLanes + lane : lane + Size);
}

template <int Size, int... Lane>
inline void swap_blocks(Vec* rows, std::integer_sequence<int, Lane...>) {
  for (int i = 0; i < kLanes; ++i) {
    if (i & Size) continue;
    const Vec a = rows[i], b = rows[i + Size];
    rows[i] = __builtin_shufflevector(a, b, swapped_lane<Size>(Lane, true)...);
    rows[i + Size] = __builtin_shufflevector(a, b, swapped_lane<Size>(Lane, false)...);
  }
}

// Transposes kLanes by kLanes in place: at every size of block the off-diagonal blocks change places.
template <int Size = kLanes / 2>
inline void transpose(Vec* rows) {
  swap_blocks<Size>(rows, std::make_integer_sequence<int, kLanes>{});
  if constexpr (Size > 1) transpose<Size / 2>(rows);
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

}  // namespace pilotfish
