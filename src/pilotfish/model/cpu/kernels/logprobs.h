// Log-probabilities of single tokens under a row of logits, and of the few likeliest: two passes over the row, and
// nothing is sorted but those few.

#pragma once

#include "vectors.h"

namespace pilotfish {

constexpr int kLogitBlock = 64;  // logits that are looked at together

// e^x for x <= 0 in about 1 ulp, as in vectors.h. Below -708 it is e^-708, which vanishes beside the 1 that the largest
// logit adds to a sum.
inline Doubles exp_negative(Doubles x) {
  x = x < -708.0 ? Doubles{} - 708.0 : x;
  const Doubles shifted = x * 1.4426950408889634 + 6755399441055744.0;
  const Doubles n = shifted - 6755399441055744.0;
  const Doubles r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  Doubles poly = Doubles{} + 1.0 / 479001600;
  for (double c : {1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24,
                   1.0 / 6, 1.0 / 2, 1.0, 1.0})
    poly = poly * r + c;
  const LongWords exponent = (reinterpret_cast<LongWords>(shifted) + 1023u) << 52;
  return poly * reinterpret_cast<Doubles>(exponent);
}

// The highest of the logits seen so far, the k likeliest, and how many are above `chosen`. NaN counts as -infinity.
template <typename T>
class RowRanks {
 public:
  // `values` and `ids` have room for k.
  RowRanks(T chosen, int64_t k, T* values, int64_t* ids) : chosen_(chosen), k_(k), values_(values), ids_(ids) {
    std::fill_n(highest_, kLogitBlock, kLeast);
  }

  // The next kLogitBlock logits, of which the first `count` are of the row: the others are -infinity.
  void add(const T* logits, int64_t first, int count) {
    int32_t above = 0, hopeful = found_ < k_;
    for (int i = 0; i < kLogitBlock; ++i) {
      highest_[i] = logits[i] > highest_[i] ? logits[i] : highest_[i];
      above += logits[i] > chosen_;
      hopeful |= logits[i] > least_;
    }
    above_ += above;
    if (k_ == 0 || !hopeful) return;
    for (int i = 0; i < count; ++i)
      if (found_ < k_ || logits[i] > least_) insert(logits[i], first + i);
  }

  T highest() const { return *std::max_element(highest_, highest_ + kLogitBlock); }
  int64_t above() const { return above_; }

 private:
  static constexpr T kLeast = -std::numeric_limits<T>::infinity();

  // After its equals, whose ids are lower.
  void insert(T value, int64_t id) {
    if (std::isnan(value)) value = kLeast;
    int64_t rank = found_ < k_ ? found_++ : k_ - 1;
    for (; rank > 0 && value > values_[rank - 1]; --rank) {
      values_[rank] = values_[rank - 1];
      ids_[rank] = ids_[rank - 1];
    }
    values_[rank] = value;
    ids_[rank] = id;
    if (found_ == k_) least_ = values_[k_ - 1];
  }

  T highest_[kLogitBlock];
  const T chosen_;
  T least_ = kLeast;  // of the k likeliest, once there are k
  const int64_t k_;
  int64_t found_ = 0, above_ = 0;
  T* const values_;
  int64_t* const ids_;
};

// Calls f(logits, first, count) for kLogitBlock logits at a time; the last ones are filled up with -infinity.
template <typename T, typename F>
inline void for_blocks(const T* logits, int64_t vocab, const F& f) {
  int64_t first = 0;
  for (; first + kLogitBlock <= vocab; first += kLogitBlock) f(logits + first, first, kLogitBlock);
  if (first == vocab) return;
  T last[kLogitBlock];
  std::fill_n(std::copy_n(logits + first, vocab - first, last), kLogitBlock - (vocab - first),
              -std::numeric_limits<T>::infinity());
  f(last, first, static_cast<int>(vocab - first));
}

struct LikelyTokens {};

// The log-probability of a token under logits [vocab], its rank (1: none is likelier), and the k likeliest [k] with
// theirs, equal ones in the order of their ids. In float64, over lanes, then from lane to lane.
template <typename T>
inline void score_token(const T* logits, int64_t vocab, int64_t token, int64_t k, double* logprob, int64_t* rank,
                        double* likely, int64_t* ids) {
  T* const values = scratch<LikelyTokens, T>(k);
  RowRanks<T> ranks(logits[token], k, values, ids);
  for_blocks(logits, vocab, [&](const T* block, int64_t first, int count) { ranks.add(block, first, count); });
  const double highest = ranks.highest();
  Doubles sums{};
  for_blocks(logits, vocab, [&](const T* block, int64_t, int) {
    for (int i = 0; i < kLogitBlock; i += kDoubles) sums += exp_negative(load_doubles(block + i) - highest);
  });
  const double log_sum = std::log(sum_lanes(sums));
  const auto scored = [&](T logit) { return double{logit} - highest - log_sum; };
  *logprob = scored(logits[token]);
  *rank = ranks.above() + 1;
  std::transform(values, values + k, likely, scored);
}

}  // namespace pilotfish
