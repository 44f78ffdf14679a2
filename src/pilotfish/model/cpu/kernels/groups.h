// Weights in codes of 4 or 8 bits with a scale, and maybe an offset, for each group of inputs of an output:
//
//     w[n, k] = code[n, k] * scale[n, k / size] + offset[n, k / size]
//     y[n] = sum over groups of (sum of code * x) * scale + (sum of x) * offset
//
// in float32, groups in order, inputs of a group in order. Codes become the inputs' type exactly, in registers.
//
// Codes of 8 bits lie as weights of int8 do: [steps, kPanel, inputs of a step]. Codes of 4 bits lie 8 inputs of an output
// to a word, [inputs / 8, kPanel], so that a shift brings the codes of two bfloat16 to where a table finds both:
//
//     bits    0   4   8  12  16  20  24  28
//     input   0   2   4   6   1   3   5   7

#pragma once

#include "vectors.h"

namespace pilotfish {

// An 8-bit float of 4 bits of exponent and 3 of mantissa (OCP's E4M3, without NaN).
struct Float8 {
  uint8_t bits;
};

// The bits of a float16 that is finite.
struct Half {
  uint16_t bits;
};

inline Vec load_floats(const Half* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__F16C__)
  return reinterpret_cast<Vec>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  Halves halves;
  std::memcpy(&halves, p, sizeof(halves));
  const Words bits = __builtin_convertvector(halves, Words);
  const Vec size = reinterpret_cast<Vec>((bits & 0x7fffu) << 13) * 0x1p112f;
  return reinterpret_cast<Vec>(reinterpret_cast<Words>(size) | (bits & 0x8000u) << 16);
#endif
}

inline Vec floats_of(const Float8* p) {
  const Words bits = reinterpret_cast<Words>(widen(reinterpret_cast<const int8_t*>(p)));
  const Vec size = reinterpret_cast<Vec>((bits & 0x7fu) << 20) * 0x1p120f;
  return reinterpret_cast<Vec>(reinterpret_cast<Words>(size) | (bits & 0x80u) << 24);
}

// What the 16 codes of 4 bits stand for.
struct CodeTable {
  std::array<float, 16> values{};
  bool counts = true;  // whether each is one more than the one before
#if defined(__AVX512F__)
  __m512 floats;
#endif
#if defined(__AVX512BF16__)
  __m512i pairs;  // as bfloat16, twice: a code's higher bits do not matter
#endif

  CodeTable() = default;
  explicit CodeTable(const float* given) {
    std::copy_n(given, 16, values.begin());
    for (int i = 1; i < 16; ++i) counts &= values[i] == values[0] + i;
#if defined(__AVX512F__)
    floats = _mm512_loadu_ps(values.data());
#endif
#if defined(__AVX512BF16__)
    BFloat16 twice[32];
    for (int i = 0; i < 32; ++i) twice[i] = BFloat16(values[i % 16]);
    pairs = _mm512_loadu_si512(twice);
#endif
  }

  // Of the codes at bit `shift` of each lane.
  Vec at(Words words, int shift) const {
#if defined(__AVX512F__)
    return reinterpret_cast<Vec>(_mm512_permutexvar_ps(reinterpret_cast<__m512i>(words >> shift), floats));
#else
    const Integers codes = reinterpret_cast<Integers>(words >> shift & 15u);
    if (counts) return __builtin_convertvector(codes, Vec) + values[0];
    Vec found;
    for (int lane = 0; lane < kLanes; ++lane) found[lane] = values[codes[lane]];
    return found;
#endif
  }
};

enum class Codes { kInt8, kFloat8, kNibbles };

struct Groups {
  int64_t size = 0;             // inputs of a group, a multiple of 8; 0: there are none
  const void* scales = nullptr; // [panels, groups, kPanel], float32 or float16
  const void* offsets = nullptr;  // as the scales; null: none
  bool halves = false;            // whether they are float16
  Codes codes = Codes::kInt8;
  CodeTable table = {};  // of codes of 4 bits

  Vec of(const void* factors, int64_t index) const {
    return halves ? load_floats(static_cast<const Half*>(factors) + index) : load(static_cast<const float*>(factors) + index);
  }
};

}  // namespace pilotfish
