"""The C++ kernels against torch, and the property that they exist for: a row's bits are its own."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sizes import sized
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from tree_rows import TreeRows, shifted

from pilotfish.model.attention import Scoring, TreeAttention, dense_tree_attention
from pilotfish.model.cpu.native_modules import (
    PackedGatedMLP,
    PackedHeads,
    PackedLinear,
    PackedWeight,
    native_tree_attention,
)
from pilotfish.model.experts import Affine
from pilotfish.model.grouped import GroupedLinear
from pilotfish.model.loading.quantize import quantize, rounded

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = [(1, 1), (31, 7), (32, 256), (33, 257), (100, 300), (200, 64), (513, 600), (40, 5001)]  # outputs, inputs
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
SCALE = HEAD_DIM**-0.5
STORED = (None, torch.int8)  # KV as it is computed, or rounded
PREFIXES: list[list[int]] = sized([[1], [64], [3, 200, 70]], [[1], [5], [63], [64], [65], [3, 200, 70]])
SINKS = torch.tensor([1.5, -2.0, 0.0, 4.0])
PLAIN = Scoring(SCALE)
SCORINGS = {
    "plain": PLAIN,
    "window 1": Scoring(SCALE, window=1),
    "window 16": Scoring(SCALE, window=16),
    "window 64": Scoring(SCALE, window=64),
    "window 100": Scoring(SCALE, window=100),
    "softcap": Scoring(2.0, softcap=3.0),
    "sinks": Scoring(SCALE, sinks=SINKS),
    "all": Scoring(1.0, window=70, softcap=5.0, sinks=SINKS),
}


pytestmark = pytest.mark.usefixtures("kernels")


def linear_of(outputs: int, inputs: int, dtype: torch.dtype, *, int8: bool, bias: bool = False) -> torch.nn.Linear:
    """Random weights, of another magnitude for each output; rounded, or not."""
    torch.manual_seed(outputs + inputs)
    module = torch.nn.Linear(inputs, outputs, bias=bias)
    with torch.no_grad():
        module.weight *= torch.logspace(-2, 2, outputs)[:, None]
    module = module.to(dtype).requires_grad_(False)
    return GroupedLinear(rounded(module.weight, torch.int8), module.bias) if int8 else module


def exact_weight(module: torch.nn.Linear) -> torch.Tensor:
    """float64 [outputs, inputs]."""
    weight: Any = module.weight
    return weight.codes.double() * weight.scales.double() if hasattr(weight, "codes") else weight.double()


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_is_a_linear(dtype: torch.dtype, int8: bool) -> None:
    for (outputs, inputs), rows in itertools.product(SHAPES, (1, 2, 5, 12, 13, 40)):
        biased = outputs == 100 and dtype == torch.float32  # in bfloat16 the product is rounded first
        module = linear_of(outputs, inputs, dtype, int8=int8, bias=biased)
        packed, size = PackedLinear(module), exact_weight(module).abs().amax(dim=1)
        bias = 0.0 if module.bias is None else module.bias.double()
        x = torch.randn(rows, inputs).to(dtype)
        exact = (x.double() @ exact_weight(module).T + bias) / size
        tolerance = 1e-5 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(packed(x).double() / size, exact, rtol=tolerance, atol=tolerance * inputs**0.5 / 4)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(33, 257), (513, 600), (40, 5001)])
def test_linear_gives_a_row_the_same_bits_in_any_company(
    outputs: int, inputs: int, dtype: torch.dtype, int8: bool, threads: int
) -> None:
    packed, row = PackedLinear(linear_of(outputs, inputs, dtype, int8=int8)), torch.randn(inputs).to(dtype)
    torch.set_num_threads(1)
    alone = packed(row[None])[0]
    torch.set_num_threads(threads)
    for rows in range(1, 41, sized(3, 1)):
        x, at = torch.randn(rows, inputs).to(dtype), 7 * rows % 11 % rows
        x[at] = x[-1] = row
        y = packed(x)
        assert torch.equal(y[at], alone) and torch.equal(y[-1], alone), f"{rows} rows, place {at}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 64), (24, 512), (513, 17)])
def test_a_product_for_each_head(outputs: int, inputs: int, dtype: torch.dtype, threads: int) -> None:
    """Of a part of each head of the inputs. Bits are those of a product of the head alone, in any company."""
    torch.manual_seed(outputs + threads)
    weight, x = torch.randn(5, outputs, inputs).to(dtype), torch.randn(40, 5, inputs + 3).to(dtype)[..., :inputs]
    together = PackedHeads(weight)(x)
    for head, each in enumerate(weight):
        assert torch.equal(together[:, head], PackedLinear(Affine(each, None))(x[:, head]))
    torch.set_num_threads(1)
    for rows in (1, 2, 13):
        assert torch.equal(PackedHeads(weight)(x[:rows]), together[:rows]), f"{rows} rows"


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "width"), [(1, 1), (33, 257), (513, 600), (1100, 64)])
def test_gated_mlp_is_a_gated_mlp(inner: int, width: int, dtype: torch.dtype, int8: bool, threads: int) -> None:
    torch.manual_seed(inner + threads)
    layers = [torch.nn.Linear(*sizes, bias=False) for sizes in ((width, inner), (width, inner), (inner, width))]
    mlp = torch.nn.ModuleList(layers).to(dtype).requires_grad_(False)
    if int8:
        quantize(mlp, "int8")
    x, (gate, up, down) = torch.randn(40, width).to(dtype), map(exact_weight, layers)
    between = (F.silu(x.double() @ gate.T) * (x.double() @ up.T)).to(dtype)
    packed = PackedGatedMLP(*layers)
    together = packed(x)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(together.double(), between.double() @ down.T, rtol=tolerance, atol=tolerance)
    torch.set_num_threads(1)
    for rows in (1, 2, 5, 13, 24):
        assert torch.equal(packed(x[:rows]), together[:rows]), f"{rows} rows"


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_give_no_rows(dtype: torch.dtype) -> None:
    packed, none = PackedWeight.of(torch.randn(8, 8).to(dtype)).native, torch.zeros(0, 8, dtype=dtype)
    assert torch.ops.pilotfish.linear(none, packed).shape == (0, 8)
    assert torch.ops.pilotfish.gated_mlp(none, packed, packed, packed).shape == (0, 8)


def test_linear_refuses_what_does_not_fit() -> None:
    packed = PackedWeight.of(torch.randn(32, 8))
    for x in (torch.randn(1, 9), torch.randn(1, 8).double(), torch.randn(8)):
        with pytest.raises(RuntimeError, match=r"weight:|linear:"):
            torch.ops.pilotfish.linear(x, packed.native)
    for inputs, outputs in ((8, 33), (9, 32), (0, 32)):
        with pytest.raises(RuntimeError, match="weight:"):
            replace(packed, inputs=inputs, outputs=outputs).native  # noqa: B018


def test_infinities_and_what_is_no_number_survive_rounding_to_bfloat16() -> None:
    weight = torch.tensor([1.0, 3.3e38, float("inf"), -float("inf"), float("nan"), -float("nan")]).bfloat16()
    y = torch.ops.pilotfish.linear(torch.ones(1, 1).bfloat16(), PackedWeight.of(weight[:, None]).native)[0]
    assert torch.equal(y[:4], weight[:4])
    assert y[4:].isnan().all()


@pytest.mark.parametrize("inputs", [(0.5, 2**-8 + 2**-9), (1.0, 2**-8), (1.0, 3 * 2**-8)])
def test_a_sum_rounds_to_bfloat16_as_torch_does(inputs: tuple[float, float]) -> None:
    weight = torch.ones(1, 2).bfloat16()
    x = torch.tensor([inputs]).bfloat16()
    expected = x.float().sum(dim=1, keepdim=True).bfloat16()
    assert torch.equal(torch.ops.pilotfish.linear(x, PackedWeight.of(weight).native), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("round_once", [False, True])
def test_rms_norm_is_an_rms_norm(dtype: torch.dtype, round_once: bool, threads: int) -> None:
    for size in (1, 31, 32, 64, 257, 2048):
        torch.set_num_threads(threads)
        check_rms_norm(size, dtype, round_once)


def check_rms_norm(size: int, dtype: torch.dtype, round_once: bool) -> None:
    torch.manual_seed(size)
    x, weight = torch.randn(40, size).to(dtype), torch.randn(size).to(torch.float32 if round_once else dtype)
    exact = F.rms_norm(x.double(), (size,), weight.double(), 1e-6)
    together = torch.ops.pilotfish.rms_norm(x, weight, 1e-6)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8 if round_once else 2**-6
    torch.testing.assert_close(together.double(), exact, rtol=tolerance, atol=tolerance)
    torch.set_num_threads(1)
    for rows in (1, 2, 17):
        assert torch.equal(torch.ops.pilotfish.rms_norm(x[:rows], weight, 1e-6), together[:rows]), f"{rows} rows"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 33, 64])
def test_parts_of_a_row_are_normed_by_themselves(size: int, dtype: torch.dtype) -> None:
    rms_norm = torch.ops.pilotfish.rms_norm
    x, weight = torch.randn(9, 3 * size).to(dtype), torch.randn(3 * size).to(dtype)
    parts = zip(x.split(size, dim=1), weight.split(size), strict=True)
    expected = torch.cat([rms_norm(part, by, 1e-6) for part, by in parts], dim=1)
    assert torch.equal(rms_norm(x, weight, 1e-6, 3), expected)
    for count in (0, -1, 3 * size + 1):
        with pytest.raises(RuntimeError, match=f"rms_norm: {count} parts"):
            rms_norm(x, weight, 1e-6, count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 32, 64, 80])
def test_rotate_is_a_rotary_embedding_of_the_heads_it_is_given(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    x, angles = torch.randn(7, 5, size).to(dtype), torch.randn(7, 1, size // 2).double()
    cos, sin = (f(torch.cat([angles, angles], dim=-1))[:, 0].to(dtype) for f in (torch.cos, torch.sin))
    exact, _ = apply_rotary_pos_emb(x.double(), x.double(), cos.double(), sin.double())
    rotated = x.clone()
    torch.ops.pilotfish.rotate(rotated[:, 1:4], cos, sin)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(rotated[:, 1:4].double(), exact[:, 1:4], rtol=tolerance, atol=tolerance)
    assert torch.equal(rotated[:, ::4], x[:, ::4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotate_takes_a_part_of_a_head_and_angles_of_half_a_head(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, angles = torch.randn(7, 5, 64).to(dtype), torch.randn(7, 16)
    cos, sin = angles.cos(), angles.sin()  # float32, as OLMo 2 gives them
    whole, part, untouched = (x.clone() for _ in range(3))
    torch.ops.pilotfish.rotate(whole[..., :32], torch.cat([cos, cos], dim=1), torch.cat([sin, sin], dim=1))
    torch.ops.pilotfish.rotate(part[..., :32], cos, sin)
    exact, _ = apply_rotary_pos_emb(
        x[..., :32].double(), x[..., :32].double(), *(torch.cat([a, a], dim=1).double() for a in (cos, sin))
    )
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(part[..., :32].double(), exact, rtol=tolerance, atol=tolerance)
    assert torch.equal(part, whole)
    assert torch.equal(part[..., 32:], untouched[..., 32:])


def test_rotate_refuses_what_does_not_fit() -> None:
    x, angle = torch.randn(3, 2, 32), torch.randn(3, 32)
    for bad, cos in ((x, angle[:2]), (x, angle.double()), (x[:, :, ::2], angle[:, :16]), (torch.randn(3, 2, 5), angle)):
        with pytest.raises(RuntimeError, match="rotate:"):
            torch.ops.pilotfish.rotate(bad, cos, cos)


# -- elements


def clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp(max=2.0), up.clamp(-2.0, 2.0)
    return gate * torch.sigmoid(1.7 * gate) * (up + 1)


GATES = {
    "silu": (lambda x: torch.ops.pilotfish.gate_silu(x), lambda gate, up: F.silu(gate) * up),
    "gelu": (lambda x: torch.ops.pilotfish.gate_gelu(x), lambda gate, up: F.gelu(gate, approximate="tanh") * up),
    "clamped": (lambda x: torch.ops.pilotfish.gate_clamped(x, 1.7, 2.0), clamped),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "size"), [("silu", 1), ("gelu", 16), ("clamped", 37), ("silu", 3000), ("gelu", 3000)])
def test_a_gate_is_its_formula(name: str, size: int, dtype: torch.dtype, threads: int) -> None:
    op, formula = GATES[name]
    torch.manual_seed(threads)
    x = (4 * torch.randn(24, 2 * size)).to(dtype)
    together = op(x)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(together.double(), formula(*x.double().chunk(2, dim=1)), rtol=tolerance, atol=tolerance)
    torch.set_num_threads(1)
    for rows in (1, 2, 5, 13):
        assert torch.equal(op(x[:rows]), together[:rows]), f"{rows} rows"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 16, 37, 3000])
def test_a_softcap_is_its_formula(size: int, dtype: torch.dtype, threads: int) -> None:
    torch.manual_seed(threads)
    x = (10 ** (6 * torch.rand(24, size) - 4) * torch.randn(24, size).sign()).to(dtype)
    together = torch.ops.pilotfish.softcap(x, 5.0)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(together.double(), 5 * torch.tanh(x.double() / 5), rtol=tolerance, atol=0)
    torch.set_num_threads(1)
    for row in range(24):
        assert torch.equal(torch.ops.pilotfish.softcap(x[row:], 5.0), together[row:])


def test_gates_and_softcap_refuse_what_does_not_fit() -> None:
    with pytest.raises(RuntimeError, match="gate:"):
        torch.ops.pilotfish.gate_silu(torch.randn(2, 3))
    with pytest.raises(RuntimeError, match="softcap:"):
        torch.ops.pilotfish.softcap(torch.randn(2, 3), 0.0)


# -- attention


def tree_rows(
    prefixes: list[int],
    nodes: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    stored: torch.dtype | None = None,
) -> TreeRows:
    return TreeRows(prefixes, nodes, dtype, (HEADS, KV_HEADS, HEAD_DIM), chunk=3, seed=seed, stored=stored)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
def test_attention_is_the_dense_reference(dtype: torch.dtype, scoring: Scoring, threads: int) -> None:
    for stored, prefixes in itertools.product(STORED, PREFIXES):
        rows = tree_rows(prefixes, nodes=12, dtype=dtype, seed=sum(prefixes) + threads, stored=stored)
        got = native_tree_attention(*rows.inputs(rows.everything), scoring)
        expected = dense_tree_attention(*rows.inputs(rows.everything), scoring)
        tolerance = 4e-6 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", STORED)
def test_values_may_be_the_keys(dtype: torch.dtype, stored: torch.dtype | None, threads: int) -> None:
    """Of latents, which many heads share: threads compute parts of them, and each has the bits that it has alone."""
    rows = TreeRows([130, 20], 5, dtype, (19, 1, 96), chunk=3, seed=threads, stored=stored)
    q, k, _, kv, metadata = rows.inputs(rows.everything)
    given = k, k, replace(kv, values=kv.keys, value_scales=kv.key_scales), metadata, Scoring(0.1)
    together, tolerance = native_tree_attention(q, *given), 4e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(together, dense_tree_attention(q, *given), rtol=tolerance, atol=tolerance)
    for head in range(19):
        assert torch.equal(native_tree_attention(q[:, [head]], *given)[:, 0], together[:, head]), f"head {head}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("attention", [native_tree_attention, dense_tree_attention])
@pytest.mark.parametrize("scoring", [each for each in SCORINGS.values() if each.window], ids=str)
def test_what_lies_before_a_window_is_not_read(dtype: torch.dtype, attention: TreeAttention, scoring: Scoring) -> None:
    """It may be NaN, or another sequence's."""
    for stored, prefixes in itertools.product(STORED, sized(([64], [3, 200, 70]), ([63], [64], [65], [140]))):
        rows = tree_rows(prefixes, nodes=12, dtype=dtype, stored=stored)
        before = attention(*rows.inputs(rows.everything), scoring)
        rows.lose_unseen(scoring.window)
        assert torch.equal(attention(*rows.inputs(rows.everything), scoring), before)


@pytest.mark.parametrize(
    ("window", "softcap", "sinks"), [(0, 0.0, None), (2, 0.0, None), (0, 1.5, None), (2, 1.5, SINKS)]
)
def test_the_dense_reference_scores_as_transformers_does(
    window: int, softcap: float, sinks: torch.Tensor | None
) -> None:
    """Computed with a mask, as sliding_window_overlay makes it, and a column of scores for the sinks."""
    rows = tree_rows([3], nodes=0)
    got = dense_tree_attention(*rows.inputs(rows.everything), Scoring(2.0, window, softcap, sinks))
    q, k, v = (x.transpose(0, 1) for x in (rows.q, rows.k, rows.v))
    scores = 2.0 * q @ k.repeat_interleave(2, dim=0).mT  # [heads, 3, 3]
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    seen = [[j <= i and (not window or j > i - window) for j in range(3)] for i in range(3)]
    scores = scores.masked_fill(~torch.tensor(seen), -torch.inf)
    column = torch.full((HEADS,), -torch.inf) if sinks is None else sinks
    weights = torch.cat([scores, column[:, None, None].expand(-1, 3, 1)], dim=-1).softmax(dim=-1)[..., :-1]
    expected = weights @ v.repeat_interleave(2, dim=0)
    torch.testing.assert_close(got, expected.transpose(0, 1), rtol=1e-6, atol=1e-6)


def test_attention_refuses_what_does_not_fit() -> None:
    rows = tree_rows([3], nodes=0)
    for wrong in (Scoring(SCALE, window=-1), Scoring(SCALE, softcap=-1.0), Scoring(SCALE, sinks=SINKS[:2])):
        with pytest.raises(RuntimeError, match="tree_attention:"):
            native_tree_attention(*rows.inputs(rows.everything), wrong)
    kv = tree_rows([3], nodes=0, stored=torch.int8).kv
    *qkv, _, metadata = rows.inputs(rows.everything)
    for bad in ({"key_scales": None}, {"values": kv.values.float()}, {"value_scales": kv.value_scales[:-1]}):  # type: ignore[index]
        with pytest.raises(RuntimeError, match="tree_attention:"):
            native_tree_attention(*qkv, replace(kv, **bad), metadata, PLAIN)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("attend", [native_tree_attention, dense_tree_attention], ids=["native", "dense"])
@pytest.mark.parametrize("scoring", sized(["all"], ["plain", "window 64", "all"]))
def test_attention_gives_a_row_the_same_bits_in_any_company(
    attend: TreeAttention, dtype: torch.dtype, stored: torch.dtype | None, scoring: str, threads: int
) -> None:
    rows = tree_rows([5, 130, 64], nodes=10, dtype=dtype, seed=threads, stored=stored)
    every = rows.everything
    together = attend(*rows.inputs(every), SCORINGS[scoring])  # fills the pools for what follows
    rng = np.random.default_rng(0)
    for count in itertools.chain(range(1, len(every), sized(7, 1)), [len(every)] * sized(1, 3)):
        chosen = sorted(rng.choice(every, count, replace=False).tolist())
        some = attend(*rows.inputs(chosen, extra_width=count % 3), SCORINGS[scoring])
        assert torch.equal(some, together[chosen]), f"{count} rows"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", STORED)
def test_where_the_keys_lie_does_not_matter(dtype: torch.dtype, stored: torch.dtype | None) -> None:
    one, other = (tree_rows([70, 9], nodes=8, dtype=dtype, stored=stored) for _ in range(2))
    other = shifted(other)
    results = [native_tree_attention(*r.inputs(r.everything), SCORINGS["all"]) for r in (one, other)]
    assert torch.equal(*results)


@pytest.mark.parametrize("stored", STORED)
def test_padding_rows_are_zero_and_harm_nobody(stored: torch.dtype | None) -> None:
    rows = tree_rows([5], nodes=3, stored=stored)
    expected = native_tree_attention(*rows.inputs(rows.everything), SCORINGS["all"])
    for attend in (native_tree_attention, dense_tree_attention):
        out = attend(*rows.padded_inputs(), SCORINGS["all"])
        torch.testing.assert_close(out[:-2], expected, rtol=2e-6, atol=2e-6)
        assert not out[-2:].any()
