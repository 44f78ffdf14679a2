"""A plain decoder in one call of the kernels has the bits of its parts called one by one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sizes import paired
from support import VOCAB, native_model, random_tree, tiny_model

from pilotfish.config.fields import KVDType
from pilotfish.core.scheduling.executor import NodeRows, SequenceRows
from pilotfish.model.cpu import native_modules
from pilotfish.model.cpu.native_modules import PlainDecoder
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.kv_planes import LayerKV
from pilotfish.model.loading.loader import load_model

pytestmark = pytest.mark.usefixtures("kernels")

SLOTS = 600
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen3", {}),
]


@pytest.fixture(params=KINDS, ids=str)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    kind, options = request.param
    tiny_model(kind, **options).save_pretrained(tmp_path)
    return tmp_path


def steps(seed: int = 0) -> list[list[SequenceRows]]:
    """Prompts of three sequences, then trees below two of them beside a prompt's next chunk."""
    rng, slots = np.random.default_rng(seed), iter(np.random.default_rng(1).permutation(SLOTS).tolist())
    lengths = (150, 3, 64)
    tokens = [rng.integers(0, VOCAB, length + 1).tolist() for length in lengths]
    own = [np.array([next(slots) for _ in text], np.int32) for text in tokens]
    none = NodeRows.of(random_tree(rng, VOCAB, 0), np.zeros(0, np.int32))
    prompts = [
        SequenceRows(0, text[:-1], mine[:-1], none, [0, len(text) - 2]) for text, mine in zip(tokens, own, strict=True)
    ]
    trees = [random_tree(rng, VOCAB, size) for size in (13, 0, 5)]
    nodes = [NodeRows.of(tree, np.array([next(slots) for _ in range(len(tree))], np.int32)) for tree in trees]
    grown = [
        SequenceRows(len(text) - 1, text[-1:], mine, tree, [0])
        for text, mine, tree in zip(tokens, own, nodes, strict=True)
    ]
    return [prompts, grown, grown[:1]]


def logits_of(directory: Path, dtype: torch.dtype, kv_dtype: KVDType, *, whole: bool) -> list[torch.Tensor]:
    model = load_model(directory, dtype, torch.device("cpu"), eager=False, kv_dtype=kv_dtype)
    assert isinstance(model.module, PlainDecoder) is whole
    executor = TorchExecutor(model, SLOTS)
    return [executor.forward(step) for step in steps()]


@pytest.mark.parametrize(("dtype", "kv_dtype"), paired([torch.float32, torch.bfloat16], ["auto", "int8"]))
def test_a_decoder_in_one_call_has_the_bits_of_its_parts(
    directory: Path, dtype: torch.dtype, kv_dtype: KVDType, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = logits_of(directory, dtype, kv_dtype, whole=True)
    torch.set_num_threads(3 - threads)
    about = {name: {**each, "plain": False} for name, each in native_modules.ARCHITECTURES.items()}
    monkeypatch.setattr(native_modules, "ARCHITECTURES", about)
    apart = logits_of(directory, dtype, kv_dtype, whole=False)
    assert all(map(torch.equal, together, apart))


def test_a_decoder_refuses_what_does_not_fit(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    model = native_model(tmp_path)
    executor = TorchExecutor(model, SLOTS)
    (batch,) = executor.prepare(steps()[0])
    arguments = {"input_ids": batch.input_ids[None], "logits_to_keep": batch.keep, "metadata": batch.metadata}
    ids, keep = batch.input_ids[None, 1:], batch.keep.int()
    for change in ({"kv": executor.kv[:1]}, {"input_ids": ids}, {"logits_to_keep": keep}):
        with pytest.raises(RuntimeError, match="decoder:"):
            model.module(**{**arguments, "kv": executor.kv, **change})
    narrow = [LayerKV(*(plane[:, :1].contiguous() for plane in layer)) for layer in executor.kv]
    with pytest.raises(RuntimeError, match="planes do not match"):
        model.module(**{**arguments, "kv": narrow})
