// A plain pre-norm decoder (Llama and its kin) in one region:
//
//     x = embedding[ids]
//     for each layer:  x += attention(norm(x));  x += mlp(norm(x))
//     logits = head(norm(x)[kept rows])
//
// Every value is rounded where the separate kernels round it, so the logits have the bits that the layers give when
// they are called one by one.

#pragma once

#include "attention.h"
#include "elements.h"
#include "linear.h"

namespace pilotfish {

template <typename T>
struct Product {
  Weight weight;
  const T* bias;  // null: none
};

template <typename T>
struct DecoderLayer {
  const T* attention_norm;
  Product<T> qkv, out;
  const T *q_norm, *k_norm;  // [q_norm_size], [k_norm_size], null: none
  int64_t q_norm_size, k_norm_size;  // of a head, or of all heads together
  float scale;
  int64_t window;
  const T* mlp_norm;
  Weight gate, up, down;
  Plane keys, values;
};

template <typename T>
struct DecoderShape {
  int64_t hidden, query_heads, kv_heads, head_dim, angles;
  float eps;
  const T *embedding, *cos, *sin;  // [vocab, hidden], [positions, angles]
  const T* final_norm;
  Product<T> head;
  std::vector<DecoderLayer<T>> layers;
};

// Hidden states that somebody wants of all rows, beside the logits: the residual stream before a layer's first norm,
// before the last norm (the number of layers), or after that (kFinal).
constexpr int64_t kFinal = -1;
constexpr int64_t kNoState = -2;

template <typename T>
struct Captured {
  std::vector<int64_t> layers;
  T* states;  // [rows, layers.size() * hidden]
};

// Tags of scratch memory.
struct Residual {};
struct Update {};
struct Heads {};
struct RowBefore {};
struct RowNormed {};
struct Joined {};
struct Kept {};

// One forward. Buffers are the calling thread's; `run` is called by every member.
template <typename T>
class Forward {
 public:
  // ids [rows]; keep [num_kept], rows whose logits are wanted; `rows` without scoring, which the layers have. Counts
  // in `written`, unless it is null, the layers whose keys and values are in their slots, for other threads to read.
  // Writes the states of `captured`.
  Forward(const DecoderShape<T>& shape, const AttentionInputs& rows, const int64_t* ids, const int64_t* keep,
          int64_t num_kept, int32_t* written = nullptr, Captured<T> captured = {})
      : shape_(shape), written_(written), captured_(std::move(captured)), rows_(rows), groups_(groups_of(rows)), ids_(ids), keep_(keep),
        width_((shape.query_heads + 2 * shape.kv_heads) * shape.head_dim),
        residual_(scratch<Residual, T>(rows.rows * shape.hidden)), update_(scratch<Update, T>(rows.rows * shape.hidden)),
        heads_(scratch<Heads, T>(rows.rows * width_)), normed_(rows.rows, shape.hidden),
        attended_(rows.rows, shape.query_heads * shape.head_dim),
        inner_(rows.rows, shape.layers.empty() ? 0 : shape.layers[0].gate.outputs), kept_(num_kept, shape.hidden) {}

  // logits [num_kept, vocab], rounded to T.
  void run(Member& member, float* logits) {
    embed(member);
    int32_t layers = 0;
    for (const DecoderLayer<T>& layer : shape_.layers) {
      norm(member, layer.attention_norm, layers);
      multiply_all<T>(member, normed_, layer.qkv.weight, layer.qkv.bias, heads_);
      rotate(member, layer);
      ++layers;
      if (written_ && member.leads()) __atomic_store_n(written_, layers, __ATOMIC_RELEASE);
      attention(member, layer);
      multiply_all<T>(member, attended_, layer.out.weight, layer.out.bias, update_);
      norm(member, layer.mlp_norm, kNoState);
      gate_all(member, normed_, layer.gate, layer.up, inner_);
      multiply_all<T>(member, inner_, layer.down, nullptr, update_);
    }
    keep(member);
    if (captures(layers) || captures(kFinal)) capture_last(member);
    multiply_all<T>(member, kept_, shape_.head.weight, shape_.head.bias, logits);
  }

 private:
  void embed(Member& member) {
    member.for_each(rows_.rows, [&](int64_t r) {
      std::copy_n(shape_.embedding + ids_[r] * shape_.hidden, shape_.hidden, residual_ + r * shape_.hidden);
      std::fill_n(update_ + r * shape_.hidden, shape_.hidden, T(0.0f));
    });
  }

  // The residual of a row, after the last update, which is the state of `layer`; and its norm.
  const T* normed_row(int64_t r, const T* weight, int64_t layer) {
    T* row = residual_ + r * shape_.hidden;
    add_to(row, update_ + r * shape_.hidden, shape_.hidden);
    capture(r, layer, row);
    T* normed = scratch<RowNormed, T>(shape_.hidden);
    rms_norm(row, weight, normed, shape_.hidden, shape_.eps);
    return normed;
  }

  void norm(Member& member, const T* weight, int64_t layer) {
    member.for_each(normed_.tiles.size(), [&](int64_t i) {
      const Tile& tile = normed_.tiles[i];
      for (int64_t r = 0; r < tile.rows; ++r)
        normed_.pack_row(tile, r, 0, normed_.steps, normed_row(tile.first + r, weight, layer));
    });
  }

  // The last norm, of kept rows alone. A row may be kept twice, so it stays as it is.
  void keep(Member& member) {
    member.for_each(kept_.tiles.size(), [&](int64_t i) {
      const Tile& tile = kept_.tiles[i];
      for (int64_t r = 0; r < tile.rows; ++r)
        kept_.pack_row(tile, r, 0, kept_.steps, last_norm(last_state(keep_[tile.first + r])));
    });
  }

  // The residual of a row after all layers.
  const T* last_state(int64_t r) {
    T* row = scratch<RowBefore, T>(shape_.hidden);
    std::copy_n(residual_ + r * shape_.hidden, shape_.hidden, row);
    add_to(row, update_ + r * shape_.hidden, shape_.hidden);
    return row;
  }

  const T* last_norm(const T* row) {
    T* normed = scratch<RowNormed, T>(shape_.hidden);
    rms_norm(row, shape_.final_norm, normed, shape_.hidden, shape_.eps);
    return normed;
  }

  bool captures(int64_t layer) const {
    return std::find(captured_.layers.begin(), captured_.layers.end(), layer) != captured_.layers.end();
  }

  void capture(int64_t r, int64_t layer, const T* state) {
    const int64_t parts = captured_.layers.size();
    for (int64_t part = 0; part < parts; ++part)
      if (captured_.layers[part] == layer)
        std::copy_n(state, shape_.hidden, captured_.states + (r * parts + part) * shape_.hidden);
  }

  // The states around the last norm, of all rows.
  void capture_last(Member& member) {
    member.for_each(rows_.rows, [&](int64_t r) {
      const T* row = last_state(r);
      capture(r, shape_.layers.size(), row);
      if (captures(kFinal)) capture(r, kFinal, last_norm(row));
    });
  }

  // Norms and rotates queries and keys, and writes keys and values to their slots.
  void rotate(Member& member, const DecoderLayer<T>& layer) {
    member.for_each(rows_.rows, [&](int64_t r) {
      const int64_t d = shape_.head_dim;
      T *q = heads_ + r * width_, *k = q + shape_.query_heads * d, *v = k + shape_.kv_heads * d;
      if (layer.q_norm) norm_heads(q, layer.q_norm, layer.q_norm_size, shape_.query_heads);
      if (layer.k_norm) norm_heads(k, layer.k_norm, layer.k_norm_size, shape_.kv_heads);
      const int64_t angles = shape_.angles * std::max(rows_.row_positions[r], 0);
      for (T* head = q; head < v; head += d)
        rotate_head(head, shape_.cos + angles, shape_.sin + angles, shape_.angles, shape_.angles);
      write_slot(k, layer.keys, rows_, r);
      write_slot(v, layer.values, rows_, r);
    });
  }

  void norm_heads(T* heads, const T* weight, int64_t size, int64_t count) {
    for (T* head = heads; head < heads + count * shape_.head_dim; head += size)
      rms_norm(head, weight, head, size, shape_.eps);
  }

  void attention(Member& member, const DecoderLayer<T>& layer) {
    AttentionInputs in = rows_;
    in.scale = layer.scale;
    in.window = layer.window;
    attend(member, in, groups_, static_cast<const T*>(heads_), layer.keys, layer.values,
           [&](int64_t row, int64_t column, const T* values, int64_t count) {
             attended_.pack_columns(row, column, count, values);
           });
  }

  const DecoderShape<T>& shape_;
  int32_t* const written_;
  const Captured<T> captured_;
  const AttentionInputs rows_;
  const std::vector<RowGroup> groups_;
  const int64_t *ids_, *keep_;
  const int64_t width_;  // of a row's queries, keys and values
  T *residual_, *update_, *heads_;  // [rows, hidden], [rows, hidden], [rows, width]
  Inputs<Rows, T> normed_;
  Inputs<Joined, T> attended_;
  Inputs<Inner, T> inner_;
  Inputs<Kept, T> kept_;
};

}  // namespace pilotfish
