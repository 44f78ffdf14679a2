"""Quantized weights: how they are rounded, what the kernels compute from them, and what is refused."""

import gc
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from sizes import paired, sized
from support import DENSE, MIXTURES, VOCAB, random_tree, tiny_model
from test_kernels import linear_of
from transformers import AutoModelForCausalLM

from pilotfish.core.scheduling.executor import NodeRows, SequenceRows
from pilotfish.core.trees.tree import EMPTY_TREE, TokenTree
from pilotfish.errors import ParameterError
from pilotfish.model.cpu.native import pack_weight
from pilotfish.model.cpu.native_modules import NativeKernels, PackedLinear, PackedWeight
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.fused import fused
from pilotfish.model.kernels import replace_modules
from pilotfish.model.loading.loader import load_model
from pilotfish.model.loading.quantize import quantize, rounded

DTYPES = (torch.float32, torch.bfloat16)
CPU = torch.device("cpu")
#: Of each architecture one, without kernels or with them.
IN_WAYS = pytest.mark.parametrize(("kind", "eager"), paired(DENSE, [False, True]))

pytestmark = pytest.mark.usefixtures("kernels")


# -- how they are rounded


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "most"), [(torch.int8, 127), (torch.float8_e4m3fn, 448)])
def test_a_rounded_weight_is_near_the_weight(dtype: torch.dtype, kind: torch.dtype, most: int) -> None:
    before = torch.randn(33, 257).to(dtype)
    before[5] = 0
    weight = rounded(before, kind)
    values = weight.codes.double()
    assert weight.codes.dtype == kind and weight.scales.dtype == torch.float32 and weight.scales.shape == (33, 1)
    assert (values.abs().amax(dim=1) == most * (torch.arange(33) != 5)).all()  # all of the range is used
    steps = (before.double() / weight.scales.double() - values).abs()
    assert (steps <= (0.5001 if kind == torch.int8 else (values.abs() / 16).clamp(min=2**-10) * 1.001)).all()


def test_a_tied_head_is_quantized_and_the_embedding_is_not() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    before = model.get_input_embeddings().weight.detach().clone()
    quantize(model, "int8")
    assert torch.equal(model.get_input_embeddings().weight, before)
    assert model.lm_head.weight.codes.shape == before.shape


# -- the kernels


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_int8_is_exact(dtype: torch.dtype) -> None:
    values = torch.arange(-128, 128).to(torch.int8)[:, None]
    scales = torch.full((256,), 0.5)
    weight = PackedWeight(dtype, 1, 256, pack_weight(values, dtype), scales)
    y = torch.ops.pilotfish.linear(torch.ones(1, 1).to(dtype), weight.native)
    assert torch.equal(y[0], values[:, 0].to(dtype) / 2)


def test_linear_refuses_what_does_not_fit() -> None:
    weight = PackedWeight.of(linear_of(32, 8, torch.float32, int8=True).weight)
    plain = pack_weight(torch.randn(32, 8))
    for panels, scales in (
        (weight.panels, None),
        (plain, weight.scales),
        (weight.panels, torch.ones(31)),
        (weight.panels, torch.ones(32).double()),
        (pack_weight(torch.ones(32, 8, dtype=torch.int8), torch.bfloat16), weight.scales),
    ):
        with pytest.raises(RuntimeError, match="weight:"):
            PackedWeight(torch.float32, 8, 32, panels, scales).native  # noqa: B018


# -- whole models


def rows_of(tokens: list[int], tree: TokenTree, slots: np.ndarray) -> SequenceRows:
    slots = slots.astype(np.int32)
    nodes = NodeRows.of(tree, slots[len(tokens) : len(tokens) + len(tree)])
    return SequenceRows(0, tokens, slots[: len(tokens)], nodes, kept=[len(tokens) - 1])


@IN_WAYS
def test_logits_are_those_of_dequantized_weights(tiny_models: dict[str, Path], kind: str, eager: bool) -> None:
    reference = AutoModelForCausalLM.from_pretrained(tiny_models[kind], dtype=torch.float32).eval()
    for module in reference.modules():
        if isinstance(module, torch.nn.Linear):
            weight = rounded(module.weight.detach(), torch.int8).dequantized()
            module.weight = torch.nn.Parameter(weight, requires_grad=False)
    model = load_model(tiny_models[kind], torch.float32, CPU, eager=eager, quantization="int8")
    tokens = np.random.default_rng(0).integers(0, VOCAB, 70).tolist()
    got = TorchExecutor(model, 100).forward([rows_of(tokens, EMPTY_TREE, np.arange(70))])[0]
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0, -1]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    plain = AutoModelForCausalLM.from_pretrained(tiny_models[kind], dtype=torch.float32).eval()
    with torch.inference_mode():
        assert (plain(torch.tensor([tokens])).logits[0, -1] - expected).abs().max() > 1e-2


@IN_WAYS
def test_a_node_has_the_bits_that_it_has_alone(tiny_models: dict[str, Path], kind: str, eager: bool) -> None:
    executor = TorchExecutor(load_model(tiny_models[kind], torch.float32, CPU, eager=eager, quantization="int8"), 400)
    rng = np.random.default_rng(1)
    tokens, tree = rng.integers(0, VOCAB, 30).tolist(), random_tree(rng, VOCAB, sized(6, 20))
    together = executor.forward([rows_of(tokens, tree, rng.permutation(400))])
    for node in range(len(tree)):
        whole = tokens + tree.path_tokens(node)
        alone = executor.forward([rows_of(whole, EMPTY_TREE, rng.permutation(400))])
        assert torch.equal(alone[0], together[1 + node]), f"node {node}"


def test_bytes_are_halved(llama: Path) -> None:
    sizes = []
    for quantization in ("none", "int8"):
        module = load_model(llama, torch.bfloat16, CPU, eager=False, quantization=quantization).module
        weights = [m.weight for m in module.modules() if isinstance(m, PackedLinear)]
        sizes.append(sum(w.panels.nbytes for w in weights))
        assert [name for name, _ in module.named_parameters()] == ["embed_tokens.weight"], "no other copy is kept"
    assert sizes[0] == 2 * sizes[1] > 0


def test_a_replaced_layer_frees_its_weight_at_once() -> None:
    """Without the garbage collector: at load there is never much more than one copy."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40))
    quantize(model, "int8")
    layers = [weakref.ref(layer) for layer in model]
    gc.disable()
    try:
        replace_modules(model, partial(fused, NativeKernels(CPU)))
        assert [layer() for layer in layers] == [None, None]
    finally:
        gc.enable()


# -- what is refused


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_are_refused(tiny_models: dict[str, Path], kind: str) -> None:
    with pytest.raises(ParameterError, match=r"^quantization: 'int8' is not allowed; expected none for a mixture"):
        load_model(tiny_models[kind], torch.float32, CPU, eager=False, quantization="int8")


def test_fp8_needs_a_device_that_has_it(llama: Path) -> None:
    with pytest.raises(ParameterError, match=r"^quantization: 'fp8' is not allowed; expected none or int8.*8\.9$"):
        load_model(llama, torch.bfloat16, CPU, eager=False, quantization="fp8")


@pytest.mark.parametrize(("capability", "dtype"), [((8, 6), torch.bfloat16), ((9, 0), torch.float32)])
def test_fp8_needs_its_units_and_bfloat16(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with pytest.raises(ParameterError, match=r"^quantization: 'fp8' is not allowed"):
        load_model(llama, dtype, torch.device("cuda"), eager=False, quantization="fp8")
