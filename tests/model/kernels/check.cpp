// The kernels without torch: products, attention, a whole decoder, noise and log-probabilities against plain loops, and
// every row's bits in any company and at any number of threads. Prints what fails; exit status 1 then. For instruction
// sets that need another compiler or an emulator.

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <random>

#include "decoder.h"
#include "logprobs.h"
#include "sampling.h"

using namespace pilotfish;

namespace {

int failures = 0;

template <typename... X>
void expect(bool holds, const char* format, X... x) {
  if (holds) return;
  ++failures;
  std::printf(format, x...);
  std::printf("\n");
}

std::mt19937 generator(0);

template <typename T>
std::vector<T> random_values(int64_t size, float spread = 1.0f) {
  std::normal_distribution<float> normal(0.0f, spread);
  std::vector<T> values(size);
  for (T& value : values) value = T(normal(generator));
  return values;
}

// weight [outputs, inputs] as `pack_weight` packs it.
template <typename T, typename W>
std::vector<W> pack(const std::vector<W>& weight, int64_t outputs, int64_t inputs) {
  const int64_t panels = (outputs + kPanel - 1) / kPanel, steps = steps_of<T>(inputs), depth = Step<T>::kDepth;
  std::vector<W> packed(panels * steps * kPanel * depth, W(0.0f));
  for (int64_t n = 0; n < outputs; ++n)
    for (int64_t k = 0; k < inputs; ++k)
      packed[((n / kPanel * steps + k / depth) * kPanel + n % kPanel) * depth + k % depth] = weight[n * inputs + k];
  return packed;
}

template <typename T>
constexpr const char* name_of() {
  return std::is_same_v<T, float> ? "float32" : "bfloat16";
}

template <typename T>
constexpr float kTolerance = std::is_same_v<T, float> ? 1e-5f : 1.0f / 128;

template <typename T>
bool near(T value, double exact, double scale) {
  return std::abs(float{value} - exact) <= kTolerance<T> * (std::abs(exact) + scale);
}

template <typename T>
std::vector<T> multiply_rows(int size, const std::vector<T>& x, int64_t rows, const Weight& w) {
  std::vector<T> y(rows * w.outputs);
  Inputs<Rows, T> in(rows, w.inputs);
  Team::mine().run(size, [&](Member& member) {
    in.pack(member, x.data());
    multiply_all<T>(member, in, w, static_cast<const T*>(nullptr), y.data());
  });
  return y;
}

// w [outputs, inputs], of these values.
template <typename T>
void check_product(const char* kind, const Weight& w, const std::vector<double>& values) {
  const int64_t inputs = w.inputs, outputs = w.outputs;
  for (int64_t rows : {1, 2, 3, 5, 8, 13, 16, 17, 33, 40}) {
    const std::vector<T> x = random_values<T>(rows * inputs), y = multiply_rows(3, x, rows, w);
    for (int64_t r = 0; r < rows; ++r) {
      const std::vector<T> alone = multiply_rows<T>(1, {x.begin() + r * inputs, x.begin() + (r + 1) * inputs}, 1, w);
      for (int64_t n = 0; n < outputs; ++n) {
        double exact = 0;
        for (int64_t k = 0; k < inputs; ++k) exact += double{float{x[r * inputs + k]}} * values[n * inputs + k];
        expect(near(y[r * outputs + n], exact, std::sqrt(inputs)), "linear %s %s: row %ld of %ld, output %ld: %g, not %g",
               kind, name_of<T>(), long(r), long(rows), long(n), double{float{y[r * outputs + n]}}, exact);
        expect(std::memcmp(&y[r * outputs + n], &alone[n], sizeof(T)) == 0,
               "linear %s %s [%ld, %ld]: row %ld of %ld has other bits alone", kind, name_of<T>(), long(outputs),
               long(inputs), long(r), long(rows));
      }
    }
  }
}

template <typename T, typename W>
void check_linear(int64_t outputs, int64_t inputs) {
  std::vector<W> weight(outputs * inputs);
  std::vector<float> scales(outputs + kPanel, 0.01f);
  if constexpr (std::is_same_v<W, int8_t>)
    for (W& value : weight) value = static_cast<int8_t>(generator() % 255 - 127);
  else weight = random_values<W>(outputs * inputs);
  const std::vector<W> packed = pack<T>(weight, outputs, inputs);
  const bool quantized = std::is_same_v<W, int8_t>;
  std::vector<double> values(weight.size());
  for (size_t i = 0; i < values.size(); ++i) values[i] = double(float(weight[i])) * (quantized ? 0.01f : 1.0f);
  check_product<T>(quantized ? "int8" : "", {packed.data(), quantized ? scales.data() : nullptr, inputs, outputs}, values);
}

// Random codes in groups, with scales and offsets that float16 has.
template <typename T>
void check_groups(Codes codes, int64_t outputs, int64_t inputs, int64_t size, bool halves, const float* table) {
  const int64_t panels = (outputs + kPanel - 1) / kPanel, groups = inputs / size, depth = Step<T>::kDepth;
  std::vector<uint8_t> packed(panels * kPanel * inputs);
  for (uint8_t& code : packed) {
    code = static_cast<uint8_t>(generator());
    if (codes == Codes::kFloat8 && (code & 0x7f) == 0x7f) code = 0;  // NaN
  }
  std::vector<Half> half(panels * groups * kPanel);
  std::vector<float> whole(half.size());
  for (size_t i = 0; i < half.size(); ++i) {
    half[i].bits = static_cast<uint16_t>(0x2000 + generator() % 0x800) | (generator() % 2 << 15);  // below 2^-5
    whole[i] = std::ldexp(1.0f + (half[i].bits & 0x3ff) / 1024.0f, (half[i].bits >> 10 & 31) - 15) * (half[i].bits >> 15 ? -1 : 1);
  }
  Weight w{packed.data(), nullptr, inputs, outputs};
  std::vector<Half> half_offsets(half.rbegin(), half.rend());
  std::vector<float> offsets(whole.rbegin(), whole.rend());
  const auto of = [&](const auto& h, const auto& f) { return halves ? static_cast<const void*>(h.data()) : f.data(); };
  w.groups = {size, of(half, whole), of(half_offsets, offsets), halves, codes, table ? CodeTable(table) : CodeTable()};
  std::vector<double> values(outputs * inputs);
  for (int64_t n = 0; n < outputs; ++n)
    for (int64_t k = 0; k < inputs; ++k) {
      const int64_t panel = n / kPanel, lane = n % kPanel;
      double code;
      if (codes == Codes::kNibbles) {
        const uint32_t word = reinterpret_cast<const uint32_t*>(packed.data())[(panel * inputs / 8 + k / 8) * kPanel + lane];
        code = table[word >> (4 * (k % 8 / 2) + 16 * (k % 2)) & 15];
      } else {
        const uint8_t bits = packed[((panel * inputs / depth + k / depth) * kPanel + lane) * depth + k % depth];
        const int exponent = bits >> 3 & 15;
        const double size = exponent ? std::ldexp(1 + (bits & 7) / 8.0, exponent - 7) : std::ldexp(bits & 7, -9);
        code = codes == Codes::kInt8 ? static_cast<int8_t>(bits) : bits >> 7 ? -size : size;
      }
      const int64_t place = (panel * groups + k / size) * kPanel + lane;
      values[n * inputs + k] = code * double{whole[place]} + double{offsets[place]};
    }
  check_product<T>("in groups", w, values);
}

// A head's elements as torch would round them, in doubles, and its scale.
template <typename T>
void check_rounding(const std::vector<T>& head, const int8_t* elements, float scale) {
  float most = 0;
  for (T x : head) most = std::max(most, std::abs(float{x}));
  expect(scale == most / 127.0f, "rounding %s: a scale of %g, not %g", name_of<T>(), double{scale}, most / 127.0);
  for (size_t i = 0; i < head.size(); ++i) {
    const float steps = float{head[i]} / scale;
    expect(elements[i] == (scale > 0 ? std::nearbyint(double{steps}) : 0.0), "rounding %s: %g steps became %d",
           name_of<T>(), double{steps}, int{elements[i]});
  }
}

template <typename T>
void check_bad_heads() {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float bad : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<T> head = random_values<T>(64);
    head[40] = T(bad);
    int8_t elements[64];
    expect(std::isnan(round_head(head.data(), elements, 64)), "rounding %s: %g has a scale", name_of<T>(), double{bad});
    for (int8_t element : elements) expect(element == 0, "rounding %s: %g leaves elements", name_of<T>(), double{bad});
  }
}

constexpr int64_t kHidden = 96, kQueryHeads = 6, kKvHeads = 2, kHeadDim = 32, kInner = 200, kVocab = 130, kSlots = 400;

// Random keys or values of all slots: of T, or rounded to int8.
template <typename T>
struct Stored {
  std::vector<T> heads;
  std::vector<int8_t> elements;
  std::vector<float> scales;

  explicit Stored(bool rounded) : heads(random_values<T>(kSlots * kKvHeads * kHeadDim)) {
    if (!rounded) return;
    elements.resize(heads.size());
    scales.resize(kSlots * kKvHeads);
    for (size_t i = 0; i < scales.size(); ++i)
      scales[i] = round_head(heads.data() + i * kHeadDim, elements.data() + i * kHeadDim, kHeadDim);
  }

  Plane plane() {
    if (scales.empty()) return {heads.data(), nullptr};
    return {elements.data(), scales.data()};
  }

  double read(int64_t place) const {
    if (scales.empty()) return float{heads[place]};
    return double{scales[place / kHeadDim]} * elements[place];
  }
};

// A random decoder of two layers, and its KV.
template <typename T>
struct Model {
  std::vector<Stored<T>> kv;
  std::vector<std::vector<T>> tensors;
  DecoderShape<T> shape;
  int64_t width = (kQueryHeads + 2 * kKvHeads) * kHeadDim;

  T* tensor(int64_t size, float spread = 1.0f) {
    tensors.push_back(random_values<T>(size, spread));
    return tensors.back().data();
  }

  Weight weight(int64_t inputs, int64_t outputs) {
    tensors.push_back(pack<T>(random_values<T>(outputs * inputs, 0.1f), outputs, inputs));
    return {tensors.back().data(), nullptr, inputs, outputs};
  }

  Plane plane(bool rounded) {
    kv.emplace_back(rounded);
    return kv.back().plane();
  }

  explicit Model(bool rounded) {
    tensors.reserve(100);
    kv.reserve(4);
    shape = {kHidden, kQueryHeads, kKvHeads, kHeadDim, kHeadDim, 1e-5f, tensor(kVocab * kHidden),
             tensor(kSlots * kHeadDim), tensor(kSlots * kHeadDim), tensor(kHidden), {weight(kHidden, kVocab), nullptr}, {}};
    for (int64_t window : {0, 70})
      shape.layers.push_back({tensor(kHidden), {weight(kHidden, width), tensor(width)},
                              {weight(kQueryHeads * kHeadDim, kHidden), nullptr}, tensor(kHeadDim), nullptr, kHeadDim, 0,
                              0.2f, window, tensor(kHidden), weight(kHidden, kInner), weight(kHidden, kInner),
                              weight(kInner, kHidden), plane(rounded), plane(rounded)});
  }

  // Logits of tokens [first, last) of one sequence, whose slots run backwards.
  std::vector<float> run(int size, const std::vector<int64_t>& tokens, int64_t first, int64_t last) {
    const int64_t rows = last - first;
    std::vector<int32_t> slots, starts(rows, 0), positions, prefixes(rows, last), prefix, path(rows, 0);
    for (int32_t i = 0; i < last; ++i) prefix.push_back(kSlots - 1 - i);
    for (int32_t i = first; i < last; ++i) positions.push_back(i), slots.push_back(prefix[i]);
    std::vector<int64_t> keep;
    for (int64_t r = 0; r < rows; ++r) keep.push_back(r);
    AttentionInputs in{};
    in.row_slots = slots.data();
    in.row_starts = starts.data();
    in.row_positions = positions.data();
    in.row_prefixes = prefixes.data();
    in.prefix_slots = prefix.data();
    in.path_slots = path.data();
    in.rows = rows;
    in.path_width = 1;
    in.query_heads = kQueryHeads;
    in.kv_heads = kKvHeads;
    in.head_dim = kHeadDim;
    in.query_stride = width;
    std::vector<float> logits(rows * kVocab);
    Forward<T> forward(shape, in, tokens.data() + first, keep.data(), rows);
    Team::mine().run(size, [&](Member& member) { forward.run(member, logits.data()); });
    return logits;
  }
};

template <typename T>
void check_decoder(bool rounded) {
  Model<T> model(rounded);
  std::vector<int64_t> tokens(150);
  for (int64_t& token : tokens) token = generator() % kVocab;
  const std::vector<float> together = model.run(3, tokens, 0, 150);
  std::vector<float> apart;
  for (int64_t first = 0; first < 150;) {
    const int64_t last = std::min<int64_t>(150, first + 1 + generator() % 20);
    const std::vector<float> some = model.run(1 + generator() % 3, tokens, first, last);
    apart.insert(apart.end(), some.begin(), some.end());
    first = last;
  }
  for (float logit : together) expect(std::isfinite(logit), "decoder %s: a logit is not finite", name_of<T>());
  expect(together == apart, "decoder %s: rows have other bits in other company", name_of<T>());
}

template <typename T>
void check_attention(bool rounded) {
  constexpr int64_t kRows = 5, kLength = 131;
  const std::vector<T> q = random_values<T>(kRows * kQueryHeads * kHeadDim);
  Stored<T> k(rounded), v(rounded);
  std::vector<int32_t> starts(kRows, 0), positions, prefixes(kRows, kLength), prefix, path(kRows, 0);
  for (int32_t i = 0; i < kLength; ++i) prefix.push_back((7 * i) % kSlots);
  for (int32_t r = 0; r < kRows; ++r) positions.push_back(r * 32);
  const std::vector<float> sinks = random_values<float>(kQueryHeads);
  AttentionInputs in{};
  in.row_starts = starts.data();
  in.row_positions = positions.data();
  in.row_prefixes = prefixes.data();
  in.prefix_slots = prefix.data();
  in.path_slots = path.data();
  in.rows = kRows;
  in.path_width = 1;
  in.query_heads = kQueryHeads;
  in.kv_heads = kKvHeads;
  in.head_dim = kHeadDim;
  in.query_stride = kQueryHeads * kHeadDim;
  in.scale = 0.2f;
  in.window = 50;
  in.softcap = 3.0f;
  in.sinks = sinks.data();
  std::vector<T> y(q.size());
  const auto groups = groups_of(in);
  Team::mine().run(2, [&](Member& member) {
    attend(member, in, groups, q.data(), k.plane(), v.plane(),
           [&](int64_t row, int64_t column, const T* values, int64_t n) {
             std::copy_n(values, n, y.data() + row * in.query_stride + column);
           });
  });
  for (int64_t r = 0; r < kRows; ++r)
    for (int64_t h = 0; h < kQueryHeads; ++h) {
      const T* query = q.data() + (r * kQueryHeads + h) * kHeadDim;
      std::vector<double> out(kHeadDim, 0.0);
      double total = std::exp(double{sinks[h]});
      for (int64_t p = std::max<int64_t>(0, positions[r] - 49); p <= positions[r]; ++p) {
        const int64_t place = (prefix[p] * kKvHeads + h / (kQueryHeads / kKvHeads)) * kHeadDim;
        double score = 0;
        for (int64_t i = 0; i < kHeadDim; ++i) score += double{float{query[i]}} * k.read(place + i);
        const double weight = std::exp(3.0 * std::tanh(score * 0.2 / 3.0));
        total += weight;
        for (int64_t i = 0; i < kHeadDim; ++i) out[i] += weight * v.read(place + i);
      }
      for (int64_t i = 0; i < kHeadDim; ++i)
        expect(near(y[(r * kQueryHeads + h) * kHeadDim + i], out[i] / total, 1.0), "attention %s%s: row %ld, head %ld",
               name_of<T>(), rounded ? " over int8" : "", long(r), long(h));
    }
}

// Philox4x32-10 in scalars, for one token.
uint32_t plain_word(uint64_t seed, uint64_t position, int64_t token) {
  uint32_t c[4] = {uint32_t(position), uint32_t(position >> 32), uint32_t(token >> 2), 0};
  uint32_t key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * c[0], b = uint64_t{0xCD9E8D57} * c[2];
    const uint32_t next[4] = {uint32_t(b >> 32) ^ c[1] ^ key[0], uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ key[1], uint32_t(a)};
    std::copy_n(next, 4, c);
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return c[token & 3];
}

void check_noise() {
  constexpr int64_t kTokens = 1000, kBest = 5;
  const std::vector<float> values = random_values<float>(kTokens, 3.0f);
  const std::vector<double> logits(values.begin(), values.end());
  for (uint64_t seed : {uint64_t{0}, uint64_t{0x123456789abcdef}}) {
    std::vector<std::pair<double, int64_t>> ranked;
    for (int64_t token = 0; token < kTokens; ++token)
      ranked.emplace_back(-(logits[token] + gumbel_of(plain_word(seed, 77, token))), token);
    std::sort(ranked.begin(), ranked.end());
    double scores[kBest];
    int64_t tokens[kBest];
    best_of_row(logits.data(), kTokens, nullptr, seed, 77, kBest, scores, tokens);
    for (int64_t i = 0; i < kBest; ++i)
      expect(tokens[i] == ranked[i].second && scores[i] == -ranked[i].first, "noise: rank %ld", long(i));
  }
}

template <typename T>
void check_logprobs(int64_t vocab) {
  const int64_t best = std::min<int64_t>(vocab, 9), chosen = vocab / 2;
  std::vector<float> values = random_values<float>(vocab, 9.0f);
  for (float& value : values) value = std::round(4.0f * value) / 4.0f;  // ties
  const std::vector<T> logits(values.begin(), values.end());
  std::vector<std::pair<T, int64_t>> ranked;
  double total = 0;
  int64_t above = 0;
  for (int64_t token = 0; token < vocab; ++token) {
    ranked.emplace_back(-logits[token], token);
    total += std::exp(double{logits[token]});
    above += logits[token] > logits[chosen];
  }
  std::sort(ranked.begin(), ranked.end());
  const auto right = [&](double given, T logit) { return std::abs(given - (logit - std::log(total))) < 1e-12; };
  double logprob, likely[9];
  int64_t rank, ids[9];
  score_token(logits.data(), vocab, chosen, best, &logprob, &rank, likely, ids);
  expect(rank == above + 1 && right(logprob, logits[chosen]), "log-probabilities: a token of %ld", long(vocab));
  for (int64_t i = 0; i < best; ++i)
    expect(ids[i] == ranked[i].second && right(likely[i], -ranked[i].first), "log-probabilities: rank %ld of %ld",
           long(i), long(vocab));
}

template <typename T>
void check_all() {
  for (const auto& [outputs, inputs] : {std::pair<int64_t, int64_t>{1, 1}, {31, 7}, {33, 257}, {70, 1100}}) {
    check_linear<T, T>(outputs, inputs);
    check_linear<T, int8_t>(outputs, inputs);
  }
  float counted[16], others[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, 0, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  for (int i = 0; i < 16; ++i) counted[i] = i - 8;
  for (const bool halves : {false, true}) {
    check_groups<T>(Codes::kNibbles, 33, 96, 32, halves, counted);
    check_groups<T>(Codes::kNibbles, 40, 1104, 16, halves, others);
    check_groups<T>(Codes::kInt8, 33, 80, 16, halves, nullptr);
    check_groups<T>(Codes::kFloat8, 33, 1280, 128, halves, nullptr);
  }
  for (const bool rounded : {false, true}) {
    check_decoder<T>(rounded);
    check_attention<T>(rounded);
  }
  const Stored<T> stored(true);
  for (size_t i = 0; i < stored.scales.size(); ++i) {
    const auto head = stored.heads.begin() + i * kHeadDim;
    check_rounding<T>({head, head + kHeadDim}, stored.elements.data() + i * kHeadDim, stored.scales[i]);
  }
  check_bad_heads<T>();
}

}  // namespace

int main() {
#ifdef __AMX_TILE__
  syscall(SYS_arch_prctl, 0x1023, 18);  // a process asks Linux for tiles once, as native.py does
#endif
  check_all<float>();
  check_all<BFloat16>();
  check_noise();
  for (const int64_t vocab : {1, 7, 64, 100, 5000}) {
    check_logprobs<float>(vocab);
    check_logprobs<double>(vocab);
  }
  std::printf("%d lanes, %d failures\n", kLanes, failures);
  return failures > 0;
}
