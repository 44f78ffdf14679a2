// What a layer does to single rows and elements: RMS norm, gates, soft cap, rotary embedding. Every element takes
// one path, through a vector of kLanes, wherever it lies.

#pragma once

#include "vectors.h"

namespace pilotfish {

// RMS norm: x / sqrt(mean(x^2) + eps) times weight, all [size]. With a weight of x's type the quotient is rounded to
// that type first, as in Llama; with a float32 weight only the product is, as in Gemma and OLMo.
template <typename T, typename W>
void rms_norm(const T* x, const W* weight, T* y, int64_t size, float eps) {
  Vec squares{};
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    const Pair pair = load_pair(x + i);
    squares += pair.low * pair.low;
    squares += pair.high * pair.high;
  }
  float total = sum_lanes(squares);
  for (; i < size; ++i) total += float{x[i]} * float{x[i]};
  const float scale = 1.0f / std::sqrt(total / size + eps);
  map_row(y, size, [=](Vec value, Vec by) { return rounded<W>(value * scale) * by; }, x, weight);
}

// Whether x [size] holds neither NaN nor infinity: their exponents are all ones.
inline bool is_finite(const float* x, int64_t size) {
  constexpr uint32_t kExponent = 0x7f800000;
  Integers bad{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) bad |= (*reinterpret_cast<const Words*>(x + i) & kExponent) == kExponent;
  bool finite = true;
  for (int lane = 0; lane < kLanes; ++lane) finite &= bad[lane] == 0;
  for (; i < size; ++i) finite &= (std::bit_cast<uint32_t>(x[i]) & kExponent) != kExponent;
  return finite;
}

// sum [size] += x, rounded to their type.
template <typename T>
void add_to(T* sum, const T* x, int64_t size) {
  map_row(sum, size, [](Vec a, Vec b) { return a + b; }, sum, x);
}

inline Vec silu_gate(Vec gate, Vec up) { return gate * sigmoid(gate) * up; }

// gelu by tanh (Hendrycks and Gimpel 2016, arXiv 1606.08415): (1 + tanh z) / 2 = sigmoid(2 z).
inline Vec gelu_gate(Vec gate, Vec up) {
  return gate * sigmoid(1.59576912f * (gate + 0.044715f * gate * gate * gate)) * up;
}

// The clamped SwiGLU of gpt-oss: gate * sigmoid(alpha * gate) * (up + 1), gate up to limit, up within +-limit.
inline Vec clamped_gate(Vec gate, Vec up, float alpha, float limit) {
  gate = gate > limit ? splat(limit) : gate;
  up = up > limit ? splat(limit) : up < -limit ? splat(-limit) : up;
  return gate * sigmoid(alpha * gate) * (up + 1.0f);
}

// Rotary position embedding (Su et al. 2021, arXiv 2104.09864) of the halves (a, b) of a head [size], in place:
// (a cos - b sin, b cos + a sin), rounded once. Angles of a whole head hold those of a, then those of b; angles
// of half a head hold for both.
template <typename T, typename A>
void rotate_head(T* head, const A* cos, const A* sin, int64_t size, int64_t angles) {
  const int64_t half = size / 2, second = angles - half;
  T *a = head, *b = head + half;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Vec low = load_floats(a + i), high = load_floats(b + i);
    store_rounded(a + i, low * load_floats(cos + i) - high * load_floats(sin + i));
    store_rounded(b + i, high * load_floats(cos + second + i) + low * load_floats(sin + second + i));
  }
  for (; i < half; ++i) {
    const float low = a[i], high = b[i];
    a[i] = T(low * float{cos[i]} - high * float{sin[i]});
    b[i] = T(high * float{cos[second + i]} + low * float{sin[second + i]});
  }
}

}  // namespace pilotfish
