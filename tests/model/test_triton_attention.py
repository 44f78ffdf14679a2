"""The Triton kernels against plain attention in float64, on the device or in Triton's interpreter; and their bits."""

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from sizes import paired, sized
from support import PER_HEAD, VOCAB, random_tree, tiny_model
from transformers import AutoModelForCausalLM
from tree_rows import TreeRows, shifted, unread_kv

pytest.importorskip("triton")

from triton_launches import LAUNCHED

from pilotfish.core.scheduling.executor import NO_NODES, NodeRows, SequenceRows
from pilotfish.model.attention import Scoring, dense_tree_attention
from pilotfish.model.cpu import native
from pilotfish.model.cuda import triton_attention
from pilotfish.model.cuda.graphs import recordable
from pilotfish.model.cuda.kernels import CUDAKernels
from pilotfish.model.cuda.triton_attention import triton_tree_attention
from pilotfish.model.devices import kernels_of
from pilotfish.model.draws import Draws
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.kv_planes import FP8_CAPABILITY
from pilotfish.model.loading.loader import LoadedModel, load_model
from pilotfish.model.loading.metadata import GenerationConfig
from pilotfish.model.rules import Rules
from pilotfish.model.sampling import COLUMNS, Filters

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16)
HAS_FP8 = DEVICE.type == "cpu" or torch.cuda.get_device_capability() >= FP8_CAPABILITY  # the interpreter has it
#: KV as it is computed, or rounded.
STORED = (None, torch.int8, *((torch.float8_e4m3fn,) if HAS_FP8 else ()))
#: What is computed in, and how KV is stored: every one of both.
Kept: TypeAlias = tuple[torch.dtype, torch.dtype | None]
KEPT: list[Kept] = [*((dtype, None) for dtype in DTYPES), *zip(DTYPES, STORED[1:], strict=False)]
SCALE = 0.25
OTHER_HEADS = [(1, 1, 16), (6, 2, 24), (20, 1, 8), (3, 3, 80)]
FEATURES: list[dict[str, Any]] = [
    {"window": 1},
    {"window": 60},
    {"window": 290},
    {"softcap": 2.0},
    {"sinks": True},
    {"window": 20, "softcap": 2.0, "sinks": True},
]


def tree_rows(*args: Any, heads: tuple[int, int, int] = sized((2, 1, 32), (4, 2, 32)), **options: Any) -> TreeRows:
    return TreeRows(*args, heads=heads, device=DEVICE, **options)


def attend(rows: TreeRows, chosen: list[int], extra_width: int = 0, **features: Any) -> torch.Tensor:
    return triton_tree_attention(*rows.inputs(chosen, extra_width), Scoring(SCALE, **features)).cpu()


def plain_attention(rows: TreeRows, window: int = 0, softcap: float = 0.0, sinks: torch.Tensor | None = None) -> Any:
    """Head by head in float64, over the keys that a row sees and no others. After the rows' KV is in the pools."""
    everywhere = torch.arange(len(rows.kv.keys), device=rows.kv.keys.device)
    keys, values = (each.cpu() for each in rows.kv.read(everywhere))
    group = rows.q.shape[1] // keys.shape[1]
    out = torch.empty_like(rows.q, dtype=torch.float64)
    for row, head in np.ndindex(*rows.q.shape[:2]):
        slots = rows.path_of(row)[-window:]
        scores = keys[slots, head // group] @ rows.q[row, head].double() * SCALE
        scores = softcap * (scores / softcap).tanh() if softcap else scores
        sink = [] if sinks is None else [sinks[head].double()]
        weights = torch.cat([scores, torch.tensor(sink, dtype=torch.float64)]).softmax(dim=0)[: len(slots)]
        out[row, head] = weights @ values[slots, head // group]
    return out


def check(rows: TreeRows, features: dict[str, Any]) -> None:
    features = {**features, "sinks": rows.sinks.to(DEVICE) if features.get("sinks") else None}
    got = attend(rows, rows.everything, **features).double()
    tolerance = 1e-5 if rows.q.dtype == torch.float32 else 2**-6
    features["sinks"] = None if features["sinks"] is None else rows.sinks
    torch.testing.assert_close(got, plain_attention(rows, **features), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("prefixes", "kept"), paired([[1], [64], [256], [3, 70, sized(280, 540)]], KEPT), ids=str)
def test_it_is_softmax_attention(prefixes: list[int], kept: Kept) -> None:
    dtype, stored = kept
    check(tree_rows(prefixes, nodes=2, dtype=dtype, stored=stored), {})


@pytest.mark.parametrize("heads", OTHER_HEADS, ids=str)
def test_any_heads(heads: tuple[int, int, int]) -> None:
    check(tree_rows([5, 70], nodes=sized(1, 2), heads=heads), {"softcap": 3.0, "sinks": True})


@pytest.mark.parametrize(
    ("features", "stored"),
    [*((features, None) for features in FEATURES), *((FEATURES[-1], s) for s in STORED[1:])],
    ids=str,
)
def test_features(features: dict[str, Any], stored: torch.dtype | None) -> None:
    check(tree_rows([5, sized(270, 300)], nodes=1, stored=stored), features)


@pytest.mark.parametrize(
    ("features", "kept"), paired([features for features in FEATURES if "window" in features], KEPT), ids=str
)
def test_what_lies_before_a_window_is_not_read(features: dict[str, Any], kept: Kept) -> None:
    """It may be NaN, or another sequence's."""
    dtype, stored = kept
    rows = tree_rows([5, 300], nodes=1, dtype=dtype, stored=stored)
    features = {**features, "sinks": rows.sinks.to(DEVICE) if features.get("sinks") else None}
    before = attend(rows, rows.everything, **features)
    rows.lose_unseen(features["window"])
    assert torch.equal(attend(rows, rows.everything, **features), before)


@pytest.mark.parametrize(("kept", "features"), paired(KEPT, [{}, {"window": 40}]), ids=str)
def test_a_row_has_the_same_bits_in_any_company(kept: Kept, features: dict[str, Any]) -> None:
    dtype, stored = kept
    rows = tree_rows([5, 260], nodes=sized(2, 3), dtype=dtype, stored=stored)
    together = attend(rows, rows.everything, **features)
    rng = np.random.default_rng(0)
    for count in sized((3,), (1, 1, 3, 5)):
        chosen = rng.permutation(len(rows.rows))[:count].tolist()
        some = attend(rows, chosen, extra_width=300 * (count % 2), **features)
        assert torch.equal(some, together[chosen]), f"rows {chosen}"


@pytest.mark.parametrize(("dtype", "stored"), sized(KEPT[1:3], KEPT), ids=str)
def test_where_the_keys_lie_does_not_matter(dtype: torch.dtype, stored: torch.dtype | None) -> None:
    one, other = (tree_rows([70, 9], nodes=sized(1, 2), dtype=dtype, stored=stored) for _ in range(2))
    other = shifted(other)
    assert torch.equal(attend(one, one.everything), attend(other, other.everything))


@pytest.mark.parametrize("dtype", sized(DTYPES[1:], DTYPES), ids=str)
def test_a_path_that_has_become_prefix_gives_the_same_bits(dtype: torch.dtype) -> None:
    rows = tree_rows([255], nodes=6, dtype=dtype)
    as_tree = attend(rows, rows.everything)
    deepest = max(rows.everything, key=lambda i: len(rows.rows[i][3]))
    slot, sequence, position, path = rows.rows[deepest]
    assert position >= 256, "the path crosses a split"
    rows.prefixes[0] += path
    rows.rows[deepest] = slot, sequence, position, []
    assert torch.equal(attend(rows, [deepest])[0], as_tree[deepest])


@pytest.mark.parametrize("dtype", sized(DTYPES[1:], DTYPES), ids=str)
def test_sequences_that_share_a_prefix_have_the_bits_of_each_alone(dtype: torch.dtype) -> None:
    rows, shared = tree_rows([300, 280], nodes=sized(2, 5), dtype=dtype), 140  # slots that both begin with
    apart = attend(rows, rows.everything)
    assert rows.prefixes[0][:shared] == rows.prefixes[1][:shared]
    rests = [prefix[shared:] for prefix in rows.prefixes]
    rows.rows = [(slot, 0, position, rests[i] + path) for slot, i, position, path in rows.rows]
    rows.prefixes = [rows.prefixes[0][:shared]]
    assert torch.equal(attend(rows, rows.everything), apart)


def test_rows_in_turn_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tree_rows([5, 260], nodes=2)
    together = attend(rows, rows.everything)
    monkeypatch.setattr(triton_attention, "PARTIAL_BYTES", 3 * 4 * rows.q[0].numel() * 2)
    assert torch.equal(attend(rows, rows.everything), together)


def test_a_program_takes_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, outputs = tree_rows([5, 2310], nodes=2, heads=(2, 1, 16), chunk=2), []  # splits of two groups
    for positions in (10_000, 700, 1):
        monkeypatch.setattr(triton_attention, "ROW_POSITIONS", positions)
        outputs.append(triton_tree_attention(*rows.padded_inputs(9), Scoring(SCALE, 2000)))
    assert torch.equal(outputs[1], outputs[0]) and torch.equal(outputs[2], outputs[0])
    check(rows, {"window": 2000})


@pytest.mark.parametrize("features", [{}, {"window": 2, "sinks": True}], ids=str)
def test_padding_rows_are_zero_and_harm_nobody(features: dict[str, Any]) -> None:
    rows = tree_rows([5], nodes=3)
    features = {**features, "sinks": rows.sinks.to(DEVICE) if features else None}
    expected = attend(rows, rows.everything, **features)
    out = triton_tree_attention(*rows.padded_inputs(), Scoring(SCALE, **features)).cpu()
    assert torch.equal(out[:-2], expected) and not out[-2:].any()


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_keys_and_values_are_written(stored: torch.dtype | None) -> None:
    rows = tree_rows([5, 9], nodes=3, stored=stored)
    attend(rows, rows.everything)
    slots = torch.tensor([slot for slot, *_ in rows.rows], device=DEVICE)
    expected = unread_kv(len(slots), *rows.k.shape[1:], stored or torch.float32)
    expected.write(torch.arange(len(slots)), rows.k, rows.v)
    for plane, own in zip(rows.kv, expected, strict=True):
        assert torch.equal(plane.view(torch.uint8)[slots].cpu(), own.view(torch.uint8))


# -- in a model


def test_cuda_takes_the_kernel_and_others_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert kernels_of(cuda, 32, eager=False).attend is triton_tree_attention
    assert kernels_of(cuda, 32, eager=True).attend is dense_tree_attention
    assert kernels_of(torch.device("cpu"), 32, eager=True).attend is dense_tree_attention


@pytest.mark.parametrize("kind", sized(["gemma2"], ["olmo2", "gemma2", "gpt_oss", "mixtral", "qwen3_moe"]))
def test_a_model_runs_on_it(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load_kernels", lambda: False)
    on_cpu = torch.device("cpu")
    tiny_model(kind, num_attention_heads=2, num_key_value_heads=1).save_pretrained(tmp_path)
    tree = random_tree(np.random.default_rng(0), VOCAB, sized(2, 4))
    slots = np.arange(20, 20 + len(tree), dtype=np.int32)
    rows = SequenceRows(0, list(range(1, 21)), np.arange(20, dtype=np.int32), NodeRows.of(tree, slots), [19])
    expected = TorchExecutor(load_model(tmp_path, torch.float32, on_cpu, eager=True), 30).forward([rows])
    kernels = CUDAKernels(DEVICE)
    kernels.attend = Mock(side_effect=triton_tree_attention)
    module = kernels.replace(load_model(tmp_path, torch.float32, DEVICE, eager=True).module, 0, alone=True)
    model = replace(load_model(tmp_path, torch.float32, DEVICE, eager=True), module=module, kernels=kernels)
    got = TorchExecutor(replace(model, recordable=False), 30).forward([rows]).cpu()
    assert kernels.attend.call_count == model.config.num_hidden_layers
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


class NoLaunch:
    def __getitem__(self, grid: object) -> Any:
        return lambda *_, **__: None


def launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, names in LAUNCHED.items():
        for kernel in names:
            monkeypatch.setattr(module, kernel, NoLaunch())


def forward_without_values(
    config: Any, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype = torch.float32
) -> torch.Tensor:
    """A forward of tensors without values: reading a value fails, as it would in a CUDA graph."""
    launch_nothing(monkeypatch)
    config._attn_implementation = config._experts_implementation = "pilotfish"
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config).eval()
    config.num_key_value_heads, config.head_dim, config.context = 2, 32, 64
    config.architectures = [type(module).__name__]
    meta = torch.device("meta")
    generation, kernels = GenerationConfig(frozenset(), {}), CUDAKernels(meta)
    module = kernels.replace(module, config.context, alone=True)
    model = LoadedModel(module, config, config, generation, torch.float32, stored, meta, kernels)
    rows = SequenceRows(0, [1, 2, 3], np.arange(3, dtype=np.int32), NO_NODES, kept=[2])
    return TorchExecutor(model, 10).forward([rows])


@pytest.mark.parametrize("kind", [*PER_HEAD, "dynamic"])
def test_what_waits_for_nothing_is_recorded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = (tiny_model("llama", rope_parameters=rope) if kind == "dynamic" else tiny_model(kind)).config
    if recordable(config):
        assert forward_without_values(config, monkeypatch).shape == (1, VOCAB)
    else:
        with pytest.raises((RuntimeError, NotImplementedError), match=r"(?i)meta"):
            forward_without_values(config, monkeypatch)


@pytest.mark.parametrize("children", [0, 3])
@pytest.mark.parametrize("rules", [False, True])
def test_drawing_waits_for_nothing(children: int, rules: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_nothing(monkeypatch)
    table, filters = torch.zeros(COLUMNS, 4, dtype=torch.int64), Filters(min_p=True, top_k=3, top_p=True)
    places, bits = torch.zeros(2, 16, dtype=torch.int64), torch.zeros(4, 3, dtype=torch.int32)
    tables = (table[0], Rules(bits, places, places, table[:2], table.T, places, 16)) if rules else ()
    draws = Draws(table, filters, children, False, *tables).map(lambda x: x.to("meta"))
    drawn = CUDAKernels(torch.device("meta")).draw(torch.zeros(4, 70, device="meta"), draws)
    assert drawn.shape == (4, 2 * max(children, 1) + 1)


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_rounding_waits_for_nothing(stored: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    assert forward_without_values(tiny_model("llama").config, monkeypatch, stored).shape == (1, VOCAB)
