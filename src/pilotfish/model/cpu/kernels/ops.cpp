// torch.ops.pilotfish and torch.classes.pilotfish: the kernels beside this file, for tensors of torch.
//
// Every output element is one fixed chain of operations: a linear output sums over its inputs in steps of
// fixed size and order, attention reduces over keys in position order, in blocks of kBlock positions. Rows, tiles and
// threads only decide who computes an element, never how. So a token verified in a tree of 16 rows has
// the logits that it has when decoded alone, in float32 and in bfloat16, at any thread count.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "attention.h"
#include "decoder.h"
#include "elements.h"
#include "linear.h"
#include "logprobs.h"
#include "sampling.h"

namespace {

using namespace pilotfish;
using at::Tensor;
using Scales = std::optional<Tensor>;

// -- tensors

// Calls run(T{}) for the element type of x.
template <typename F>
void dispatch(const Tensor& x, const F& run) {
  if (x.scalar_type() == at::kFloat) run(float{});
  else if (x.scalar_type() == at::kBFloat16) run(BFloat16{});
  else TORCH_CHECK(false, "pilotfish kernels take float32 or bfloat16, not ", x.scalar_type());
}

template <typename T>
T* data(const Tensor& x) {
  return static_cast<T*>(x.data_ptr());
}

template <typename T>
T* data(const std::optional<Tensor>& x) {
  return x ? data<T>(*x) : nullptr;
}

// Whether y has the dtype of x, or float32.
bool is_of_or_float(const Tensor& y, const Tensor& x) {
  return y.scalar_type() == x.scalar_type() || y.scalar_type() == at::kFloat;
}

// Runs f(Member&) on as many threads as torch would, or on this one alone where there is too little work for more:
// `work` is about the number of elements that are read.
template <typename F>
void run(int64_t work, const F& f) {
  Team::mine().run(work < 65536 ? 1 : at::get_num_threads(), f);
}

// Calls f(i) for all i, with `work` elements each.
template <typename F>
void run_each(int64_t count, int64_t work, const F& f) {
  run(count * work, [&](Member& member) { member.for_each(count, f); });
}

// -- products

// A weight packed for inputs of one dtype. `panels` are [ceil(N / kPanel), steps, kPanel, inputs of a step] of that
// dtype, or int8 with float32 scales [ceil(N / kPanel) * kPanel]. Or codes in groups, with scales and maybe offsets
// [ceil(N / kPanel), groups, kPanel] of float32 or float16: int8 or float8_e4m3fn as above, or int32 words
// [ceil(N / kPanel), K / 8, kPanel] of 4-bit codes that a float32 `table` [16] explains (groups.h).
class PackedWeight : public torch::CustomClassHolder {
 public:
  PackedWeight(Tensor panels, Tensor like, int64_t inputs, int64_t outputs, Scales scales, Scales offsets, Scales table)
      : panels_(panels), scales_(scales), offsets_(offsets), table_(table), type_(like.scalar_type()), inputs_(inputs),
        outputs_(outputs) {
    TORCH_CHECK(inputs > 0, "weight: no inputs");
    TORCH_CHECK(panels.is_contiguous() && panels.size(0) == (outputs + kPanel - 1) / kPanel,
                "weight: ", outputs, " outputs do not match the panels");
    dispatch(like, [&]<typename T>(T) {
      if (grouped()) check_groups(Step<T>::kDepth);
      else check_whole(steps_of<T>(inputs), Step<T>::kDepth);
    });
    if (table_) decoded_ = CodeTable(data<float>(table_));
  }

  int64_t inputs() const { return inputs_; }
  int64_t outputs() const { return outputs_; }
  int64_t numel() const { return inputs_ * outputs_; }

  void check(const Tensor& x, int64_t inputs) const {
    TORCH_CHECK(x.scalar_type() == type_, "weight: packed for ", type_, ", not ", x.scalar_type());
    TORCH_CHECK(inputs == inputs_, "weight: of ", inputs_, " inputs, not ", inputs);
  }

  Weight weight() const {
    Weight w{panels_.const_data_ptr(), nullptr, inputs_, outputs_};
    if (!grouped()) {
      w.scales = data<float>(scales_);
      return w;
    }
    w.groups.size = inputs_ / scales_->size(1);
    w.groups.scales = scales_->const_data_ptr();
    w.groups.offsets = offsets_ ? offsets_->const_data_ptr() : nullptr;
    w.groups.halves = scales_->scalar_type() == at::kHalf;
    w.groups.codes = table_ ? Codes::kNibbles : panels_.scalar_type() == at::kChar ? Codes::kInt8 : Codes::kFloat8;
    w.groups.table = decoded_;
    return w;
  }

 private:
  bool grouped() const { return scales_ && scales_->dim() == 3; }

  void check_whole(int64_t steps, int64_t depth) const {
    TORCH_CHECK(panels_.scalar_type() == (scales_ ? at::kChar : type_), "weight: of ", type_, ", or of int8 with scales");
    check_panels(steps, depth);
    TORCH_CHECK(!offsets_ && !table_, "weight: offsets and tables are of groups");
    TORCH_CHECK(!scales_ || (scales_->scalar_type() == at::kFloat && scales_->is_contiguous() &&
                             scales_->numel() == panels_.size(0) * kPanel),
                "weight: a float32 scale for each output");
  }

  void check_panels(int64_t steps, int64_t depth) const {
    TORCH_CHECK(panels_.dim() == 4 && panels_.size(1) == steps && panels_.size(2) == kPanel && panels_.size(3) == depth,
                "weight: panels [panels, ", steps, ", ", kPanel, ", ", depth, "], not ", panels_.sizes());
  }

  void check_groups(int64_t depth) const {
    const int64_t groups = scales_->size(1);
    TORCH_CHECK(groups > 0 && inputs_ % (8 * groups) == 0, "weight: groups of a multiple of 8 inputs");
    for (const Scales& x : {scales_, offsets_})
      TORCH_CHECK(!x || ((x->scalar_type() == at::kFloat || x->scalar_type() == at::kHalf) && x->is_contiguous() &&
                         x->scalar_type() == scales_->scalar_type() && x->sizes() == scales_->sizes() &&
                         x->size(0) == panels_.size(0) && x->size(2) == kPanel),
                  "weight: scales and offsets [panels, groups, ", kPanel, "] of float32 or float16");
    if (!table_) {
      const auto type = panels_.scalar_type();
      TORCH_CHECK(type == at::kChar || type == at::kFloat8_e4m3fn, "weight: codes of int8 or float8_e4m3fn");
      return check_panels(inputs_ / depth, depth);
    }
    TORCH_CHECK(table_->scalar_type() == at::kFloat && table_->is_contiguous() && table_->numel() == 16,
                "weight: a float32 table of 16 codes");
    TORCH_CHECK(panels_.scalar_type() == at::kInt && panels_.dim() == 3 && panels_.size(1) == inputs_ / 8 &&
                    panels_.size(2) == kPanel,
                "weight: int32 words [panels, inputs / 8, ", kPanel, "] of 4-bit codes");
  }

  const Tensor panels_;
  const Scales scales_, offsets_, table_;
  CodeTable decoded_;
  const at::ScalarType type_;
  const int64_t inputs_, outputs_;
};

using WeightPtr = c10::intrusive_ptr<PackedWeight>;

// x [rows, K] -> [rows, N].
Tensor linear(const Tensor& x, const WeightPtr& w) {
  TORCH_CHECK(x.dim() == 2, "linear: x [rows, K]");
  w->check(x, x.size(1));
  const Tensor rows = x.contiguous();
  Tensor y = at::empty({x.size(0), w->outputs()}, x.options());
  dispatch(x, [&]<typename T>(T) {
    Inputs<Rows, T> in(x.size(0), x.size(1));
    run(w->numel(), [&](Member& member) {
      in.pack(member, data<T>(rows));
      multiply_all<T>(member, in, w->weight(), nullptr, data<T>(y));
    });
  });
  return y;
}

// A product for each head: x [rows, heads, K], w of K to all heads' outputs, each head's in whole panels
// -> [rows, heads, outputs].
Tensor head_linear(const Tensor& x, const WeightPtr& w, int64_t outputs) {
  TORCH_CHECK(x.dim() == 3 && x.stride(2) == 1, "head_linear: x [rows, heads, K]");
  w->check(x, x.size(2));
  const int64_t rows = x.size(0), heads = x.size(1), panels = (outputs + kPanel - 1) / kPanel;
  TORCH_CHECK(w->outputs() == heads * panels * kPanel, "head_linear: ", outputs, " outputs of ", heads, " heads");
  Tensor y = at::empty({rows, heads, outputs}, x.options());
  dispatch(x, [&]<typename T>(T) {
    const Weight weight = w->weight();
    const auto compute = [&](int64_t head) {
      Inputs<Rows, T> in(rows, x.size(2));
      for (const Tile& tile : in.tiles)
        for (int64_t r = 0; r < tile.rows; ++r)
          in.pack_row(tile, r, 0, in.steps, data<T>(x) + (tile.first + r) * x.stride(0) + head * x.stride(1));
      in.multiply_panels(weight, head * panels, panels, nullptr, scratch<Sums, float>(panels * rows * kPanel));
    };
    const auto publish = [&](int64_t head) {
      const float* acc = scratch<Sums, float>(panels * rows * kPanel);
      for (int64_t column = 0; column < outputs; column += kPanel)
        for (int64_t r = 0; r < rows; ++r, acc += kPanel) {
          T out[kPanel];
          round_panel(acc, out);
          T* to = data<T>(y) + (r * heads + head) * outputs + column;
          std::copy_n(out, std::min<int64_t>(kPanel, outputs - column), to);
        }
    };
    run(w->numel(), [&](Member& member) { member.compute_each(heads, compute, publish); });
  });
  return y;
}

// One size of groups serves both, where offsets multiply sums of them.
void check_gate(const PackedWeight& gate, const PackedWeight& up) {
  const Groups &a = gate.weight().groups, &b = up.weight().groups;
  TORCH_CHECK(gate.outputs() == up.outputs() && (!a.offsets || !b.offsets || a.size == b.size),
              "weight: gate and up of one shape and size of groups");
}

// (silu(x @ gate) * (x @ up)) @ down, the outer parentheses rounded once. x [rows, K], gate and up of K to inner, down
// of inner to N -> [rows, N].
Tensor gated_mlp(const Tensor& x, const WeightPtr& gate, const WeightPtr& up, const WeightPtr& down) {
  TORCH_CHECK(x.dim() == 2, "gated_mlp: x [rows, K]");
  for (const WeightPtr& w : {gate, up}) w->check(x, x.size(1));
  check_gate(*gate, *up);
  down->check(x, gate->outputs());
  const Tensor rows = x.contiguous();
  Tensor y = at::empty({x.size(0), down->outputs()}, x.options());
  dispatch(x, [&]<typename T>(T) {
    Inputs<Rows, T> in(x.size(0), x.size(1));
    Inputs<Inner, T> inner(x.size(0), gate->outputs());
    run(3 * gate->numel(), [&](Member& member) {
      in.pack(member, data<T>(rows));
      gate_all(member, in, gate->weight(), up->weight(), inner);
      multiply_all<T>(member, inner, down->weight(), nullptr, data<T>(y));
    });
  });
  return y;
}

// -- rows and elements

// x [..., size], weight [size] of the same dtype or float32 -> like x. Each of the equal `parts` of a row is normed by
// itself.
Tensor norm_of(const Tensor& x, const Tensor& weight, double eps, int64_t parts) {
  TORCH_CHECK(weight.dim() == 1 && x.size(-1) == weight.size(0) && is_of_or_float(weight, x),
              "rms_norm: weight does not match x");
  TORCH_CHECK(parts > 0 && weight.size(0) % parts == 0, "rms_norm: ", parts, " parts");
  const Tensor rows = x.contiguous();
  Tensor y = at::empty(rows.sizes(), rows.options());
  const int64_t size = weight.size(0) / parts;
  dispatch(x, [&]<typename T>(T) {
    dispatch(weight, [&]<typename W>(W) {
      run_each(x.numel() / size, size, [&](int64_t i) {
        const W* by = data<W>(weight) + i % parts * size;
        rms_norm(data<T>(rows) + i * size, by, data<T>(y) + i * size, size, static_cast<float>(eps));
      });
    });
  });
  return y;
}

// residual [rows, size] += x, rounded to their type; then the norm of that.
Tensor add_norm(Tensor& residual, const Tensor& x, const Tensor& weight, double eps) {
  TORCH_CHECK(residual.sizes() == x.sizes() && residual.scalar_type() == x.scalar_type() && residual.is_contiguous(),
              "add_rms_norm: residual and x of one shape and type");
  const Tensor addend = x.contiguous();
  dispatch(x, [&]<typename T>(T) { add_to(data<T>(residual), data<T>(addend), x.numel()); });
  return norm_of(residual, weight, eps, 1);
}

// x [rows, 2 n], gates then ups -> f(gate, up) [rows, n].
template <typename F>
Tensor map_gates(const Tensor& x, const F& f) {
  TORCH_CHECK(x.dim() == 2 && x.size(1) % 2 == 0, "gate: rows of gates, then as many ups");
  const Tensor rows = x.contiguous();
  const int64_t size = x.size(1) / 2;
  Tensor y = at::empty({x.size(0), size}, x.options());
  dispatch(x, [&]<typename T>(T) {
    const T* in = data<T>(rows);
    run_each(x.size(0), size, [&](int64_t r) {
      map_row(data<T>(y) + r * size, size, f, in + 2 * r * size, in + (2 * r + 1) * size);
    });
  });
  return y;
}

Tensor gate_silu(const Tensor& x) { return map_gates(x, silu_gate); }
Tensor gate_gelu(const Tensor& x) { return map_gates(x, gelu_gate); }
Tensor gate_clamped(const Tensor& x, double alpha, double limit) {
  return map_gates(x, [a = static_cast<float>(alpha), most = static_cast<float>(limit)](Vec gate, Vec up) {
    return clamped_gate(gate, up, a, most);
  });
}

// cap * tanh(x / cap) of x [rows, size].
Tensor softcap(const Tensor& x, double cap) {
  TORCH_CHECK(x.dim() == 2 && cap > 0, "softcap: x [rows, size] and a cap above 0");
  const Tensor rows = x.contiguous();
  Tensor y = at::empty_like(rows);
  const auto capped = [most = static_cast<float>(cap)](Vec value) { return most * tanh(value / most); };
  dispatch(x, [&]<typename T>(T) {
    run_each(x.size(0), x.size(1), [&](int64_t r) {
      map_row(data<T>(y) + r * x.size(1), x.size(1), capped, data<const T>(rows) + r * x.size(1));
    });
  });
  return y;
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
      for (int64_t r = 0; r < x.size(0); ++r)
        for (int64_t h = 0; h < x.size(1); ++h)
          rotate_head(data<T>(x) + r * x.stride(0) + h * x.stride(1), data<A>(cos) + r * cos.size(1),
                      data<A>(sin) + r * cos.size(1), x.size(2), cos.size(1));
    });
  });
}

// -- attention

// The rows of a forward: int32 row_* [rows], path_slots [rows, longest path], prefix_slots [tokens of all prefixes].
AttentionInputs rows_of(const Tensor& row_slots, const Tensor& row_starts, const Tensor& row_positions,
                        const Tensor& row_prefixes, const Tensor& path_slots, const Tensor& prefix_slots) {
  for (const Tensor& index : {row_slots, row_starts, row_positions, row_prefixes, path_slots, prefix_slots})
    TORCH_CHECK(index.scalar_type() == at::kInt && index.is_contiguous(), "tree_attention: indices are int32");
  AttentionInputs in{};
  in.row_slots = data<int32_t>(row_slots);
  in.row_starts = data<int32_t>(row_starts);
  in.row_positions = data<int32_t>(row_positions);
  in.row_prefixes = data<int32_t>(row_prefixes);
  in.path_slots = data<int32_t>(path_slots);
  in.prefix_slots = data<int32_t>(prefix_slots);
  in.rows = row_slots.numel();
  in.path_width = path_slots.size(1);
  return in;
}

// Whether each row's heads lie side by side; rows may lie apart.
bool has_whole_rows(const Tensor& x) { return x.stride(2) == 1 && x.stride(1) == x.size(2); }

// Elements [slots, kv_heads, head_dim] of `type`, or of int8 with float32 scales [slots, kv_heads].
Plane plane_of(const Tensor& elements, const Scales& scales, int64_t kv_heads, int64_t head_dim, at::ScalarType type) {
  TORCH_CHECK(elements.dim() == 3 && elements.size(1) == kv_heads && elements.size(2) == head_dim &&
                  elements.is_contiguous() && elements.scalar_type() == (scales ? at::kChar : type),
              "tree_attention: planes do not match k");
  TORCH_CHECK(!scales || (scales->dim() == 2 && scales->size(0) == elements.size(0) && scales->size(1) == kv_heads &&
                          scales->is_contiguous() && scales->scalar_type() == at::kFloat),
              "tree_attention: a float32 scale for each head of int8");
  return {elements.data_ptr(), data<float>(scales)};
}

// q [rows, heads, d], k and v [rows, kv_heads, d] (d a multiple of kPanel), keys, values and their scales as in
// `plane_of`, rows as in `rows_of`; longest: tokens of the longest prefix, which say how much work there is. window and softcap: 0 for none; sinks [heads] of any float dtype. Writes k and v to
// row_slots, then attends. -> [rows, heads, d].
Tensor tree_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keys, const Tensor& values,
                      const Scales& key_scales, const Scales& value_scales, const Tensor& row_slots,
                      const Tensor& row_starts, const Tensor& row_positions, const Tensor& row_prefixes,
                      const Tensor& path_slots, const Tensor& prefix_slots, int64_t longest, double scale, int64_t window,
                      double softcap, const std::optional<Tensor>& sinks) {
  TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && q.size(1) % k.size(1) == 0, "tree_attention: q, k of [rows, heads, d]");
  TORCH_CHECK(q.size(2) % kPanel == 0, "tree_attention: head size must be a multiple of ", kPanel);
  for (const Tensor& x : {q, k, v})
    TORCH_CHECK(x.dim() == 3 && x.size(0) == row_slots.numel() && x.size(2) == q.size(2) && has_whole_rows(x),
                "tree_attention: q, k, v of equal rows and head sizes, a row's heads side by side");
  TORCH_CHECK(v.size(1) == k.size(1), "tree_attention: as many heads in v as in k");
  TORCH_CHECK(key_scales.has_value() == value_scales.has_value(), "tree_attention: scales of keys and values, or none");
  const Plane key_plane = plane_of(keys, key_scales, k.size(1), k.size(2), q.scalar_type());
  const Plane value_plane = plane_of(values, value_scales, k.size(1), k.size(2), q.scalar_type());
  TORCH_CHECK(window >= 0 && softcap >= 0, "tree_attention: window and softcap of at least 0");
  TORCH_CHECK(!sinks || (sinks->dim() == 1 && sinks->size(0) == q.size(1)), "tree_attention: a sink for each head");
  const Tensor sink_scores = sinks ? sinks->to(at::kFloat).contiguous() : Tensor();
  AttentionInputs in = rows_of(row_slots, row_starts, row_positions, row_prefixes, path_slots, prefix_slots);
  in.query_heads = q.size(1);
  in.kv_heads = k.size(1);
  in.head_dim = q.size(2);
  in.query_stride = q.stride(0);
  in.scale = static_cast<float>(scale);
  in.window = window;
  in.softcap = static_cast<float>(softcap);
  in.sinks = sinks ? data<float>(sink_scores) : nullptr;
  Tensor y = at::empty(q.sizes(), q.options());
  const std::vector<RowGroup> groups = groups_of(in);
  dispatch(q, [&]<typename T>(T) {
    for (int64_t r = 0; r < in.rows; ++r) {
      write_slot(data<T>(k) + r * k.stride(0), key_plane, in, r);
      write_slot(data<T>(v) + r * v.stride(0), value_plane, in, r);
    }
    run(q.numel() * longest, [&](Member& member) {
      attend(member, in, groups, data<const T>(q), key_plane, value_plane,
             [&](int64_t row, int64_t column, const T* attended, int64_t count) {
               std::copy_n(attended, count, data<T>(y) + row * in.query_heads * in.head_dim + column);
             });
    });
  });
  return y;
}

// -- sampling

// logits float32 or float64 [rows, vocab]; per row float64 temperatures, floors (log of min-p), top_p and
// int64 top_k -> scores float64 [rows, vocab].
Tensor filter_logits(const Tensor& logits, const Tensor& temperatures, const Tensor& floors, const Tensor& top_k,
                     const Tensor& top_p) {
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0 && logits.stride(1) == 1, "filter_logits: [rows, vocab]");
  const int64_t rows = logits.size(0), vocab = logits.size(1), stride = logits.stride(0);
  for (const Tensor& column : {temperatures, floors, top_k, top_p})
    TORCH_CHECK(column.numel() == rows && column.is_contiguous(), "filter_logits: one of each per row");
  Tensor scores = at::empty({rows, vocab}, temperatures.options());
  const auto filter = [&]<typename T>(T) {
    run_each(rows, vocab, [&](int64_t r) {
      const Filter filter{data<double>(temperatures)[r], data<double>(floors)[r], data<int64_t>(top_k)[r],
                          data<double>(top_p)[r]};
      filter_row(data<T>(logits) + r * stride, vocab, filter, data<double>(scores) + r * vocab);
    });
  };
  if (logits.scalar_type() == at::kDouble) filter(double{});
  else if (logits.scalar_type() == at::kFloat) filter(float{});
  else TORCH_CHECK(false, "filter_logits: float32 or float64, not ", logits.scalar_type());
  return scores;
}

// Whether a row holds neither NaN nor infinity: logits float32 [rows, vocab] -> bool [rows].
Tensor finite_rows(const Tensor& logits) {
  TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kFloat && logits.stride(1) == 1,
              "finite_rows: float32 [rows, vocab]");
  Tensor finite = at::empty({logits.size(0)}, logits.options().dtype(at::kBool));
  run_each(logits.size(0), logits.size(1), [&](int64_t r) {
    data<bool>(finite)[r] = is_finite(data<float>(logits) + r * logits.stride(0), logits.size(1));
  });
  return finite;
}

// Write -inf over what masks forbid: logits float32 [rows, vocab], which of its rows int64 [m], their masks int32
// [m, words], whose bit t % 32 of word t / 32 allows token t. Tokens beyond a mask are forbidden.
void mask_logits(Tensor logits, const Tensor& rows, const Tensor& bits) {
  TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kFloat && logits.stride(1) == 1,
              "mask_logits: float32 [rows, vocab]");
  TORCH_CHECK(rows.scalar_type() == at::kLong && rows.is_contiguous(), "mask_logits: int64 rows");
  TORCH_CHECK(bits.dim() == 2 && bits.scalar_type() == at::kInt && bits.is_contiguous() && bits.size(0) == rows.numel(),
              "mask_logits: int32 [rows, words]");
  run_each(rows.numel(), logits.size(1), [&](int64_t m) {
    const auto* masks = reinterpret_cast<const uint32_t*>(data<int32_t>(bits)) + m * bits.size(1);
    mask_row(data<float>(logits) + data<int64_t>(rows)[m] * logits.stride(0), logits.size(1), masks, bits.size(1));
  });
}

// logits float64 [rows, vocab] (-inf where a token is excluded), seeds and positions int64 [rows] (bit
// patterns), the tokens of the columns int64 [vocab], ascending, or none where they are their numbers -> scores float64
// [rows, k] descending, columns int64 [rows, k].
std::tuple<Tensor, Tensor> perturbed_topk(const Tensor& logits, const Tensor& seeds, const Tensor& positions, int64_t k,
                                          const std::optional<Tensor>& ids) {
  TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kDouble, "perturbed_topk: float64 [rows, vocab]");
  TORCH_CHECK(seeds.scalar_type() == at::kLong && positions.scalar_type() == at::kLong, "perturbed_topk: int64 seeds");
  TORCH_CHECK(seeds.numel() == logits.size(0) && positions.numel() == logits.size(0), "perturbed_topk: one per row");
  TORCH_CHECK(!ids || (ids->scalar_type() == at::kLong && ids->numel() == logits.size(1) && ids->is_contiguous()),
              "perturbed_topk: int64 ids, one per column");
  const Tensor table = logits.contiguous(), keys = seeds.contiguous(), places = positions.contiguous();
  const int64_t rows = table.size(0), vocab = table.size(1);
  Tensor scores = at::empty({rows, k}, table.options()), columns = at::empty({rows, k}, keys.options());
  run_each(rows, vocab, [&](int64_t r) {
    best_of_row(data<double>(table) + r * vocab, vocab, data<int64_t>(ids), data<int64_t>(keys)[r],
                data<int64_t>(places)[r], k, data<double>(scores) + r * k, data<int64_t>(columns) + r * k);
  });
  return {scores, columns};
}

// logits float32 or float64 [all rows, vocab], raw; which rows and a token of each, int64 [rows]; k of at most vocab ->
// log-probabilities of the tokens float64 [rows], their ranks int64 [rows], the k likeliest tokens int64 [rows, k] and
// their log-probabilities float64 [rows, k] (logprobs.h).
std::tuple<Tensor, Tensor, Tensor, Tensor> token_logprobs(const Tensor& logits, const Tensor& rows, const Tensor& tokens,
                                                          int64_t k) {
  TORCH_CHECK(logits.dim() == 2 && logits.stride(1) == 1, "token_logprobs: logits [rows, vocab]");
  const int64_t count = rows.numel(), vocab = logits.size(1);
  TORCH_CHECK(0 <= k && k <= vocab, "token_logprobs: ", k, " likeliest of ", vocab);
  for (const Tensor& index : {rows, tokens})
    TORCH_CHECK(index.scalar_type() == at::kLong && index.is_contiguous() && index.numel() == count,
                "token_logprobs: an int64 row and an int64 token for each");
  for (int64_t i = 0; i < count; ++i)
    TORCH_CHECK(0 <= data<int64_t>(rows)[i] && data<int64_t>(rows)[i] < logits.size(0) &&
                    0 <= data<int64_t>(tokens)[i] && data<int64_t>(tokens)[i] < vocab,
                "token_logprobs: row ", data<int64_t>(rows)[i], " or token ", data<int64_t>(tokens)[i]);
  const auto floats = logits.options().dtype(at::kDouble);
  Tensor logprobs = at::empty({count}, floats), ranks = at::empty({count}, rows.options());
  Tensor likely = at::empty({count, k}, rows.options()), likely_logprobs = at::empty({count, k}, floats);
  const auto score = [&]<typename T>(T) {
    run_each(count, vocab, [&](int64_t i) {
      score_token(data<T>(logits) + data<int64_t>(rows)[i] * logits.stride(0), vocab, data<int64_t>(tokens)[i], k,
                  data<double>(logprobs) + i, data<int64_t>(ranks) + i, data<double>(likely_logprobs) + i * k,
                  data<int64_t>(likely) + i * k);
    });
  };
  if (logits.scalar_type() == at::kDouble) score(double{});
  else if (logits.scalar_type() == at::kFloat) score(float{});
  else TORCH_CHECK(false, "token_logprobs: float32 or float64, not ", logits.scalar_type());
  return {logprobs, ranks, likely, likely_logprobs};
}

// -- the decoder

struct Affine {
  WeightPtr weight;
  std::optional<Tensor> bias;

  template <typename T>
  Product<T> product() const { return {weight->weight(), data<T>(bias)}; }
};

// Keeps the tensors of a plain decoder, and runs it (decoder.h). All of the embedding's dtype, weights packed for it.
class Decoder : public torch::CustomClassHolder {
 public:
  // embedding [vocab, hidden], cos and sin [positions, rotated part of a head], norm [hidden].
  Decoder(Tensor embedding, Tensor cos, Tensor sin, Tensor norm, double eps, int64_t query_heads, int64_t kv_heads,
          int64_t head_dim)
      : embedding_(embedding), cos_(cos), sin_(sin), norm_(norm), eps_(eps), query_heads_(query_heads),
        kv_heads_(kv_heads), head_dim_(head_dim) {
    TORCH_CHECK(head_dim % kPanel == 0 && query_heads % kv_heads == 0, "decoder: heads do not fit the kernels");
    for (const Tensor& x : {embedding, cos, sin, norm}) check_plain(x);
    TORCH_CHECK(cos.dim() == 2 && cos.sizes() == sin.sizes() && cos.size(1) % 2 == 0 && cos.size(1) <= head_dim,
                "decoder: cos and sin do not match the heads");
    check_vector(norm, hidden());
  }

  // `weights` are in order: qkv, out, gate, up, down; biases of qkv and out alone. Norms of queries and keys are of a
  // head, or of all heads together.
  void add_layer(const Tensor& attention_norm, const Tensor& mlp_norm, const std::optional<Tensor>& q_norm,
                 const std::optional<Tensor>& k_norm, std::vector<WeightPtr> weights,
                 const std::optional<Tensor>& qkv_bias, const std::optional<Tensor>& out_bias, double scale,
                 int64_t window) {
    TORCH_CHECK(weights.size() == 5, "decoder: five weights a layer");
    const int64_t heads = query_heads_ * head_dim_, joined = heads + 2 * kv_heads_ * head_dim_;
    const int64_t inner = weights[2]->outputs();
    check_vector(attention_norm, hidden());
    check_vector(mlp_norm, hidden());
    check_gate(*weights[2], *weights[3]);
    layers_.push_back({attention_norm, mlp_norm, q_norm, k_norm, affine(weights[0], qkv_bias, hidden(), joined),
                       affine(weights[1], out_bias, heads, hidden()), affine(weights[2], {}, hidden(), inner),
                       affine(weights[3], {}, hidden(), inner), affine(weights[4], {}, inner, hidden()), scale, window});
  }

  void set_head(const WeightPtr& weight, const std::optional<Tensor>& bias) {
    head_ = affine(weight, bias, hidden(), weight->outputs());
  }

  // input_ids int64 [rows], keep int64 [kept rows]; rows as in `rows_of`; of each layer in order the keys, the
  // values and, of int8, their scales -> logits float32 [kept rows, vocab], rounded to the embedding's dtype. Counts
  // layers in `written`, int32 [1]. Writes the hidden states of `layers` (decoder.h) to `states`, [rows, layers.size() * hidden] of the embedding's
  // dtype.
  Tensor forward(const Tensor& input_ids, const Tensor& keep, const Tensor& row_slots, const Tensor& row_starts,
                 const Tensor& row_positions, const Tensor& row_prefixes, const Tensor& path_slots,
                 const Tensor& prefix_slots, std::vector<Tensor> planes, const std::optional<Tensor>& written,
                 std::vector<int64_t> layers, const std::optional<Tensor>& states) {
    AttentionInputs in = rows_of(row_slots, row_starts, row_positions, row_prefixes, path_slots, prefix_slots);
    TORCH_CHECK(input_ids.scalar_type() == at::kLong && keep.scalar_type() == at::kLong && input_ids.numel() == in.rows &&
                    input_ids.is_contiguous() && keep.is_contiguous(),
                "decoder: int64 ids, one a row, and kept rows");
    TORCH_CHECK(planes.size() == 2 * layers_.size() || planes.size() == 4 * layers_.size(),
                "decoder: two planes a layer, or four");
    TORCH_CHECK(!written || (written->scalar_type() == at::kInt && written->numel() == 1), "decoder: one int32 written");
    check_states(layers, states, in.rows);
    in.query_heads = query_heads_;
    in.kv_heads = kv_heads_;
    in.head_dim = head_dim_;
    in.query_stride = (query_heads_ + 2 * kv_heads_) * head_dim_;
    Tensor logits = at::empty({keep.numel(), head_.weight->outputs()}, embedding_.options().dtype(at::kFloat));
    dispatch(embedding_, [&]<typename T>(T) {
      const DecoderShape<T> shape = shape_with<T>(planes);
      Forward<T> forward(shape, in, data<int64_t>(input_ids), data<int64_t>(keep), keep.numel(),
                         data<int32_t>(written), {layers, data<T>(states)});
      run(std::numeric_limits<int64_t>::max(), [&](Member& member) { forward.run(member, data<float>(logits)); });
    });
    return logits;
  }

 private:
  struct Layer {
    Tensor attention_norm, mlp_norm;
    std::optional<Tensor> q_norm, k_norm;
    Affine qkv, out, gate, up, down;
    double scale;
    int64_t window;
  };

  int64_t hidden() const { return embedding_.size(1); }

  void check_plain(const Tensor& x) const {
    TORCH_CHECK(x.scalar_type() == embedding_.scalar_type() && x.is_contiguous(), "decoder: tensors of one dtype");
  }

  void check_states(const std::vector<int64_t>& layers, const std::optional<Tensor>& states, int64_t rows) const {
    for (const int64_t layer : layers)
      TORCH_CHECK(layer >= kFinal && layer <= static_cast<int64_t>(layers_.size()), "decoder: no state ", layer);
    TORCH_CHECK(layers.empty() != states.has_value(), "decoder: states of layers");
    if (!states) return;
    check_plain(*states);
    TORCH_CHECK(states->dim() == 2 && states->size(0) == rows &&
                    states->size(1) == static_cast<int64_t>(layers.size()) * hidden(),
                "decoder: states [rows, layers * hidden], not ", states->sizes());
  }

  void check_vector(const Tensor& x, int64_t size) const {
    check_plain(x);
    TORCH_CHECK(x.dim() == 1 && x.numel() == size, "decoder: ", size, " elements, not ", x.sizes());
  }

  Affine affine(const WeightPtr& weight, const std::optional<Tensor>& bias, int64_t inputs, int64_t outputs) const {
    weight->check(embedding_, inputs);
    TORCH_CHECK(weight->outputs() == outputs, "decoder: a weight of ", outputs, " outputs, not ", weight->outputs());
    if (bias) check_vector(*bias, outputs);
    return {weight, bias};
  }

  // The keys (0) or values (1) of a layer.
  Plane plane(const std::vector<Tensor>& planes, size_t layer, size_t which) const {
    const size_t of_layer = planes.size() / layers_.size(), first = layer * of_layer;
    const Scales scales = of_layer == 4 ? Scales(planes[first + 2 + which]) : std::nullopt;
    return plane_of(planes[first + which], scales, kv_heads_, head_dim_, embedding_.scalar_type());
  }

  template <typename T>
  DecoderShape<T> shape_with(const std::vector<Tensor>& planes) const {
    DecoderShape<T> shape{hidden(), query_heads_, kv_heads_, head_dim_, cos_.size(1), static_cast<float>(eps_),
                          data<T>(embedding_), data<T>(cos_), data<T>(sin_), data<T>(norm_), head_.product<T>(), {}};
    for (size_t i = 0; i < layers_.size(); ++i) {
      const Layer& layer = layers_[i];
      shape.layers.push_back({data<T>(layer.attention_norm), layer.qkv.product<T>(), layer.out.product<T>(),
                              data<T>(layer.q_norm), data<T>(layer.k_norm), layer.q_norm ? layer.q_norm->numel() : 0,
                              layer.k_norm ? layer.k_norm->numel() : 0, static_cast<float>(layer.scale), layer.window,
                              data<T>(layer.mlp_norm), layer.gate.weight->weight(), layer.up.weight->weight(),
                              layer.down.weight->weight(),
                              plane(planes, i, 0), plane(planes, i, 1)});
    }
    return shape;
  }

  Tensor embedding_, cos_, sin_, norm_;
  double eps_;
  int64_t query_heads_, kv_heads_, head_dim_;
  std::vector<Layer> layers_;
  Affine head_;
};

}  // namespace

TORCH_LIBRARY(pilotfish, m) {
  m.class_<PackedWeight>("PackedWeight")
      .def(torch::init<Tensor, Tensor, int64_t, int64_t, Scales, Scales, Scales>());
  m.def("linear(Tensor x, __torch__.torch.classes.pilotfish.PackedWeight w) -> Tensor");
  m.def("head_linear(Tensor x, __torch__.torch.classes.pilotfish.PackedWeight w, int outputs) -> Tensor");
  m.def(
      "gated_mlp(Tensor x, __torch__.torch.classes.pilotfish.PackedWeight gate, "
      "__torch__.torch.classes.pilotfish.PackedWeight up, __torch__.torch.classes.pilotfish.PackedWeight down) "
      "-> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps, int parts=1) -> Tensor");
  m.def("add_rms_norm(Tensor(a!) residual, Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("rotate(Tensor(a!) x, Tensor cos, Tensor sin) -> ()");
  m.def("gate_silu(Tensor x) -> Tensor");
  m.def("gate_gelu(Tensor x) -> Tensor");
  m.def("gate_clamped(Tensor x, float alpha, float limit) -> Tensor");
  m.def("softcap(Tensor x, float cap) -> Tensor");
  m.def(
      "tree_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor(c!)? key_scales, "
      "Tensor(d!)? value_scales, Tensor row_slots, Tensor row_starts, Tensor row_positions, Tensor row_prefixes, "
      "Tensor path_slots, Tensor prefix_slots, int longest, float scale, int window, float softcap, Tensor? sinks) "
      "-> Tensor");
  m.def("filter_logits(Tensor logits, Tensor temperatures, Tensor floors, Tensor top_k, Tensor top_p) -> Tensor");
  m.def("finite_rows(Tensor logits) -> Tensor");
  m.def("mask_logits(Tensor(a!) logits, Tensor rows, Tensor bits) -> ()");
  m.def("perturbed_topk(Tensor logits, Tensor seeds, Tensor positions, int k, Tensor? ids=None) -> (Tensor, Tensor)");
  m.def("token_logprobs(Tensor logits, Tensor rows, Tensor tokens, int k) -> (Tensor, Tensor, Tensor, Tensor)");
  m.class_<Decoder>("Decoder")
      .def(torch::init<Tensor, Tensor, Tensor, Tensor, double, int64_t, int64_t, int64_t>())
      .def("add_layer", &Decoder::add_layer)
      .def("set_head", &Decoder::set_head)
      .def("forward", &Decoder::forward);
}

TORCH_LIBRARY_IMPL(pilotfish, CPU, m) {
  m.impl("linear", linear);
  m.impl("head_linear", head_linear);
  m.impl("gated_mlp", gated_mlp);
  m.impl("rms_norm", norm_of);
  m.impl("add_rms_norm", add_norm);
  m.impl("rotate", ::rotate);
  m.impl("gate_silu", gate_silu);
  m.impl("gate_gelu", gate_gelu);
  m.impl("gate_clamped", gate_clamped);
  m.impl("softcap", softcap);
  m.impl("tree_attention", tree_attention);
  m.impl("filter_logits", filter_logits);
  m.impl("finite_rows", finite_rows);
  m.impl("mask_logits", mask_logits);
  m.impl("perturbed_topk", perturbed_topk);
  m.impl("token_logprobs", token_logprobs);
}
