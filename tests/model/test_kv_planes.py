"""KV in 8 bits: what rounding keeps, that the C++ kernels round as torch does, what planes and slots are."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sizes import sized
from support import KINDS
from test_kernels import PLAIN
from tree_rows import TreeRows

from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS
from pilotfish.errors import ParameterError
from pilotfish.model.attention import dense_tree_attention
from pilotfish.model.cpu.native_modules import native_tree_attention
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.kv_copy import copier_of, layout_of
from pilotfish.model.kv_planes import LARGEST, element_type, empty_kv, rounded
from pilotfish.model.loading.footprint import slot_bytes
from pilotfish.model.loading.loader import load_model

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
TYPES = tuple(LARGEST)
#: Heads whose rounding is worth a look: ties, zeros, numbers that have no inverse, and others.
HEADS = {
    "normal": torch.randn(50, 64, generator=torch.Generator().manual_seed(0)),
    "spread": torch.randn(50, 64, generator=torch.Generator().manual_seed(1))
    * 10 ** torch.linspace(-30, 30, 50)[:, None],
    "ties": torch.cat([torch.arange(-62.5, 0), torch.tensor([127.0])])[None],
    "zeros": torch.zeros(1, 64),
    "tiny": torch.full((1, 64), 1e-44),
    "huge": (3.4e38 * torch.linspace(-1, 1, 64))[None],
    "infinite": torch.tensor([1.0] * 63 + [-math.inf])[None],
    "no number": torch.tensor([math.nan] + [1.0] * 63)[None],
}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", ["normal", "spread", "ties", "zeros", "huge"])
def test_rounding_loses_half_a_step_at_most(name: str, dtype: torch.dtype) -> None:
    x = HEADS[name]
    elements, scales = rounded(x, dtype)
    assert elements.dtype == dtype and scales.dtype == torch.float32
    error = (elements.double() * scales.double()[:, None] - x).abs()
    step = 0.5 if dtype == torch.int8 else (elements.double().abs() / 16).clamp(min=2**-10)  # 3 bits, and subnormals
    assert (error <= scales.double()[:, None] * step * 1.00001).all()
    largest = elements.double().abs().amax(dim=1)
    assert ((largest == LARGEST[dtype]) | (x.abs().amax(dim=1) == 0)).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", ["infinite", "no number"])
def test_what_is_no_number_stays_none(name: str, dtype: torch.dtype) -> None:
    elements, scales = rounded(HEADS[name], dtype)
    assert scales.isnan().all() and not elements.float().any()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_the_kernels_round_as_torch_does(name: str, dtype: torch.dtype) -> None:
    heads = HEADS[name].to(dtype)
    rows = TreeRows([len(heads)], 0, dtype, (1, 1, 64), chunk=len(heads), stored=torch.int8)
    rows.k, rows.v = heads[:, None], heads.flip(0)[:, None]
    native_tree_attention(*rows.inputs(rows.everything), PLAIN)
    written = [plane.clone() for plane in rows.kv]
    dense_tree_attention(*rows.inputs(rows.everything), PLAIN)
    for native, expected in zip(written, rows.kv, strict=True):
        assert torch.equal(native.view(torch.uint8)[: len(heads)], expected.view(torch.uint8)[: len(heads)])


@pytest.mark.parametrize("dtype", [*TYPES, torch.float32, torch.bfloat16], ids=str)
def test_what_was_written_is_read(dtype: torch.dtype) -> None:
    (layer, *_) = empty_kv(Shape, dtype, 9, CPU)
    slots = torch.tensor([4, 0, 7])
    k, v = (torch.randn(3, 2, 32).to(torch.bfloat16 if dtype in TYPES else dtype) for _ in range(2))
    layer.write(slots, k, v)
    for read, given in zip(layer.read(slots), (k, v), strict=True):
        torch.testing.assert_close(read, given.double(), rtol=0, atol={torch.int8: 0.02, FP8: 0.2}.get(dtype, 0.0))
    assert not any(plane[[1, 2, 3, 5, 6, 8, 9]].view(torch.uint8).any() for plane in layer)


class Shape:
    num_hidden_layers, num_key_value_heads, head_dim = 3, 2, 32


@pytest.mark.parametrize(("dtype", "planes", "size"), [(torch.bfloat16, 2, 2 * 32), (torch.int8, 4, 32 + 4)])
def test_planes_are_of_slots(dtype: torch.dtype, planes: int, size: int) -> None:
    pool = empty_kv(Shape, dtype, 9, CPU)
    assert len(pool) == 3 and all(len([*layer]) == planes for layer in pool)
    assert all(len(plane) == 10 and plane.is_contiguous() for layer in pool for plane in layer)
    assert slot_bytes(Shape, dtype.itemsize) == 3 * 2 * 2 * size == sum(p[0].nbytes for layer in pool for p in layer)


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2 * 576), (torch.int8, 576 + 4)])
def test_of_latents_there_is_one_plane(dtype: torch.dtype, size: int) -> None:
    """What DeepSeek-V3 keeps of a token in a layer, and what copies, objects and segments hold."""
    shape = SimpleNamespace(num_hidden_layers=3, kv_lora_rank=512, qk_rope_head_dim=64)
    pool = empty_kv(shape, dtype, 9, CPU)
    assert slot_bytes(shape, dtype.itemsize) == 3 * size == sum(plane[0].nbytes for layer in pool for plane in layer)
    assert copier_of(pool).object_bytes == OBJECT_TOKENS * 3 * size and layout_of(pool).token_bytes == size
    keys, slots = torch.randn(2, 1, 576).to(torch.bfloat16), torch.tensor([4, 7])
    pool[0].write(slots, keys, keys)
    for read in pool[0].read(slots):
        torch.testing.assert_close(read, keys.double(), rtol=0, atol=0.02 if dtype == torch.int8 else 0.0)


def test_a_device_without_fp8_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, capability in ((CPU, (9, 0)), (torch.device("cuda"), (8, 6))):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, own=capability: own)
        with pytest.raises(ParameterError, match=r"^kv_dtype: 'fp8' is not allowed; expected auto or int8.*8\.9$"):
            element_type("fp8", torch.bfloat16, device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    assert element_type("fp8", torch.bfloat16, torch.device("cuda")) == FP8


# -- in models


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", sized(("llama", "gemma2", "qwen3_moe", "gpt_oss", "deepseek_v3"), KINDS))
def test_every_architecture_attends_to_rounded_kv(tiny_models: dict[str, Path], kind: str) -> None:
    """The kernels and the reference both do, windows, soft caps and sinks included: they differ by what they compute in
    another order, which now and then rounds a key to the next step."""
    plain = logits(tiny_models[kind], eager=False)
    kernels, reference = (logits(tiny_models[kind], eager=eager, kv_dtype="int8") for eager in (False, True))
    rounding, others = (kernels - plain).abs().mean(), (kernels - reference).abs().mean()
    assert others < 0.1 * rounding and rounding < 0.05 * plain.std()


def logits(directory: Path, **options: Any) -> torch.Tensor:
    from pilotfish.core.scheduling.executor import NO_NODES, SequenceRows

    executor = TorchExecutor(load_model(directory, torch.float32, CPU, **options), 100)
    tokens = [1 + 7 * i % 500 for i in range(70)]
    slots = torch.arange(70, dtype=torch.int32).numpy()[::-1].copy()
    return executor.forward([SequenceRows(0, tokens, slots, NO_NODES, kept=range(70))])
