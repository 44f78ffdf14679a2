// Sampling: filters of logits, and the k best tokens by logit + shared noise.

#pragma once

#include <functional>

#include "vectors.h"

namespace pilotfish {

// -infinity over what a mask [words] forbids, 32 tokens a word, and over all beyond it.
inline void mask_row(float* logits, int64_t vocab, const uint32_t* mask, int64_t words) {
  constexpr float kForbidden = -std::numeric_limits<float>::infinity();
  for (int64_t first = 0; first < vocab; first += 32) {
    const uint32_t allowed = first / 32 < words ? mask[first / 32] : 0;
    const int64_t count = std::min<int64_t>(32, vocab - first);
    if (allowed == 0) {
      std::fill_n(logits + first, count, kForbidden);
    } else if (allowed != ~uint32_t{0}) {
      for (int64_t i = 0; i < count; ++i)
        if (!(allowed >> i & 1)) logits[first + i] = kForbidden;
    }
  }
}

// Filters of sampling, one row after another: logits / temperature, then min-p, top-k, top-p. A dropped
// logit becomes -infinity.

constexpr double kDropped = -std::numeric_limits<double>::infinity();

struct Filter {
  double temperature, floor;  // floor: log of min-p
  int64_t top_k;              // 0: all
  double top_p;
};

struct Ranked {};

inline void drop_below(double* scores, int64_t vocab, double least) {
  for (int64_t i = 0; i < vocab; ++i)
    if (scores[i] < least) scores[i] = kDropped;
}

// Equals of the k-th stay.
inline void keep_top_k(double* scores, int64_t vocab, int64_t k) {
  double* ranked = scratch<Ranked, double>(vocab);
  std::copy_n(scores, vocab, ranked);
  std::nth_element(ranked, ranked + k - 1, ranked + vocab, std::greater<>());
  drop_below(scores, vocab, ranked[k - 1]);
}

// Keeps the likeliest tokens until their mass reaches top_p. Equal tokens rank by id.
inline void keep_top_p(double* scores, int64_t vocab, double top_p) {
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
inline void filter_row(const T* logits, int64_t vocab, const Filter& filter, double* scores) {
  for (int64_t i = 0; i < vocab; ++i) {
    scores[i] = static_cast<double>(logits[i]) / filter.temperature;
    if (std::isnan(scores[i])) scores[i] = kDropped;
  }
  if (filter.floor > kDropped) drop_below(scores, vocab, *std::max_element(scores, scores + vocab) + filter.floor);
  if (filter.top_k > 0 && filter.top_k < vocab) keep_top_k(scores, vocab, filter.top_k);
  if (filter.top_p < 1) keep_top_p(scores, vocab, filter.top_p);
}

// ---------------------------------------------------------------------------------------------------
// The k best tokens by logit + shared noise. See core/sampling/noise.py for the noise itself.

constexpr int kStretch = 4 * kLanes;
typedef uint64_t Products __attribute__((vector_size(kLanes * sizeof(uint32_t)), aligned(4), may_alias));

// High and low halves of constant * each lane.
inline void multiply(uint64_t constant, Words lanes, Words& high, Words& low) {
  constexpr uint64_t kLow = 0xFFFFFFFF;
  const Products even = (reinterpret_cast<Products&>(lanes) & kLow) * constant;
  const Products odd = (reinterpret_cast<Products&>(lanes) >> 32) * constant;
  reinterpret_cast<Products&>(high) = (even >> 32) | (odd & ~kLow);
  reinterpret_cast<Products&>(low) = (even & kLow) | (odd << 32);
}

// Takes Size lanes of x, then Size of y, and so on, from the lower or the upper halves of both.
template <int Size, bool Upper, int... Lane>
inline Words interleave_lanes(Words x, Words y, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(
      x, y, (Lane / Size % 2 * kLanes + Lane / Size / 2 * Size + Lane % Size + Upper * kLanes / 2)...);
}

template <int Size, bool Upper>
inline Words interleave(Words x, Words y) {
  return interleave_lanes<Size, Upper>(x, y, std::make_integer_sequence<int, kLanes>{});
}

// Words of the tokens [4 * block, 4 * block + kStretch), in their order.
inline void philox(uint64_t seed, uint64_t position, uint32_t block, uint32_t* words) {
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
  const Words low01 = interleave<1, false>(c0, c1), high01 = interleave<1, true>(c0, c1);
  const Words low23 = interleave<1, false>(c2, c3), high23 = interleave<1, true>(c2, c3);
  Words* const out = reinterpret_cast<Words*>(words);
  out[0] = interleave<2, false>(low01, low23);
  out[1] = interleave<2, true>(low01, low23);
  out[2] = interleave<2, false>(high01, high23);
  out[3] = interleave<2, true>(high01, high23);
}

inline double highest_of(const double* logits, int count) {
  double highest = logits[0];
  int i = 0;
  if (count >= kDoubles) {
    Doubles best = load_doubles(logits);
    for (i = kDoubles; i + kDoubles <= count; i += kDoubles) {
      const Doubles next = load_doubles(logits + i);
      best = next > best ? next : best;
    }
    for (int lane = 0; lane < kDoubles; ++lane) highest = std::max(highest, best[lane]);
  }
  for (; i < count; ++i) highest = std::max(highest, logits[i]);
  return highest;
}

constexpr double kMaxNoise = 22.9, kMinNoise = -3.2;

inline double gumbel_of(uint32_t word) { return -std::log(-std::log((word + 0.5) / 4294967296.0)); }

// -log u >= 1 - u, hence g <= -log(1 - u) <= 32 log 2 - floor(log2(words above this one)) log 2. The floor is the
// exponent of the upper 24 bits as a float, which holds them exactly; without any of them nothing is known.
inline double gumbel_bound(uint32_t word) {
  const int32_t above = static_cast<int32_t>(~word >> 8);
  const int32_t exponent = (std::bit_cast<int32_t>(static_cast<float>(above)) >> 23) - 127;
  return (above == 0 ? 33 : 24 - exponent) * 0.6931471805599454;
}

struct Candidate {
  double score;
  int64_t place;
};

// The places, from `begin` on, whose tokens are of one stretch: the first token of it, and where it ends. `ids` are
// those of the places, ascending; null: they are the places themselves.
inline int64_t end_of_stretch(const int64_t* ids, int64_t begin, int64_t vocab, int64_t* first) {
  if (!ids) {
    *first = begin;
    return std::min(begin + kStretch, vocab);
  }
  *first = ids[begin] / kStretch * kStretch;
  return std::lower_bound(ids + begin, std::min(ids + begin + kStretch, ids + vocab), *first + kStretch) - ids;
}

// Exact, though it hashes and takes logarithms only for tokens that could still enter the best k. Gives places in
// `logits` [vocab], whose tokens are `ids` [vocab], ascending; null: the places themselves.
inline void best_of_row(const double* logits, int64_t vocab, const int64_t* ids, uint64_t seed, uint64_t position,
                        int64_t k, double* scores, int64_t* places) {
  std::vector<Candidate> best;
  double threshold = -std::numeric_limits<double>::infinity();
  // just below what the best logit reaches with the least noise, also where the noise is lost in rounding
  if (k == 1) threshold = std::nextafter(*std::max_element(logits, logits + vocab) + kMinNoise, threshold);
  for (int64_t begin = 0, end, first; begin < vocab; begin = end) {
    end = end_of_stretch(ids, begin, vocab, &first);
    const int count = static_cast<int>(end - begin);
    if (highest_of(logits + begin, count) + kMaxNoise <= threshold) continue;
    uint32_t words[kStretch];
    philox(seed, position, static_cast<uint32_t>(first >> 2), words);
    if (ids)
      for (int i = 0; i < count; ++i) words[i] = words[ids[begin + i] - first];  // ascending: of none written yet
    uint8_t hopeful[kStretch] = {};
    for (int i = 0; i < count; ++i) hopeful[i] = logits[begin + i] + gumbel_bound(words[i]) > threshold;
    for (int eighth = 0; eighth < kStretch; eighth += 8) {
      uint64_t any;
      std::memcpy(&any, hopeful + eighth, 8);
      if (any == 0) continue;
      for (int i = eighth; i < eighth + 8; ++i) {
        if (!hopeful[i]) continue;
        const double score = logits[begin + i] + gumbel_of(words[i]);
        if (score <= threshold) continue;  // on ties the lower id, which came first, stays
        auto rank = std::upper_bound(best.begin(), best.end(), score,
                                     [](double value, const Candidate& c) { return value > c.score; });
        best.insert(rank, {score, begin + i});
        if (static_cast<int64_t>(best.size()) > k) best.pop_back();
        if (static_cast<int64_t>(best.size()) == k) threshold = best.back().score;
      }
    }
  }
  for (int64_t i = 0; i < k; ++i) {
    const bool found = i < static_cast<int64_t>(best.size());
    scores[i] = found ? best[i].score : -std::numeric_limits<double>::infinity();
    places[i] = found ? best[i].place : 0;
  }
}

}  // namespace pilotfish
