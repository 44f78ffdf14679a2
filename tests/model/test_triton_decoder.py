"""Plain decoders on the Triton kernels against the reference, on the device or in Triton's interpreter."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sizes import sized
from support import VOCAB, random_tree, tiny_model

pytest.importorskip("triton")

from pilotfish.core.features.features import FINAL
from pilotfish.core.scheduling.executor import NO_NODES, NodeRows, SequenceRows
from pilotfish.model.batch import EXACT
from pilotfish.model.cuda.decoder import TritonDecoder
from pilotfish.model.cuda.kernels import CUDAKernels
from pilotfish.model.cuda.products import InvariantLinear
from pilotfish.model.executor import DeviceProgress, TorchExecutor
from pilotfish.model.experts import Affine
from pilotfish.model.feature_tap import FeatureTap
from pilotfish.model.kernels import JoinedLinear
from pilotfish.model.loading.loader import LoadedModel, load_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLAIN = ["llama", "mistral", "qwen2", "qwen3"]
SLOTS, HIDDEN, ALL = 200, 64, (2, 0, FINAL, 1)


def models(
    directory: Path, kind: str, dtype: torch.dtype = torch.float32, stored: torch.dtype | None = None
) -> tuple[LoadedModel, LoadedModel]:
    """On the kernels, and the reference."""
    model = tiny_model(kind, num_attention_heads=2, num_key_value_heads=1)
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):  # or they would be 0 and 1
            weight.data += torch.randn_like(weight) * 0.2
    model.save_pretrained(directory)
    own, reference = (load_model(directory, dtype, DEVICE, eager=True) for _ in range(2))
    kernels = CUDAKernels(DEVICE)
    module = kernels.replace(own.module, own.config.context, alone=True)
    assert isinstance(module, TritonDecoder)
    both = replace(own, module=module, kernels=kernels, recordable=False), replace(reference, recordable=False)
    return tuple(replace(one, kv_dtype=stored or dtype) for one in both)  # type: ignore[return-value]


def executor_of(model: LoadedModel, tap: FeatureTap | None = None) -> TorchExecutor:
    executor = TorchExecutor(model, SLOTS, tap=tap)
    executor.buckets = EXACT  # padding takes the interpreter long
    return executor


def step(tokens: int, nodes: int) -> SequenceRows:
    rng = np.random.default_rng(0)
    order, tree = rng.permutation(SLOTS).astype(np.int32), random_tree(rng, VOCAB, nodes)
    ids, prefix = rng.integers(0, VOCAB, tokens).tolist(), order[:tokens]
    rows = NodeRows.of(tree, order[tokens : tokens + len(tree)])
    return SequenceRows(0, ids, prefix, rows, kept=[tokens - 1])


@pytest.mark.parametrize("kind", sized(PLAIN[2:], PLAIN))
def test_logits_are_those_of_the_reference(kind: str, tmp_path: Path) -> None:
    rows = [step(20, sized(4, 9))]
    got, expected = (executor_of(model).forward(rows) for model in models(tmp_path, kind))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stored", sized([torch.int8], [torch.int8, torch.float8_e4m3fn]), ids=str)
def test_keys_and_values_may_be_rounded(stored: torch.dtype, tmp_path: Path) -> None:
    rows = [step(20, 4)]
    executors = [executor_of(model) for model in models(tmp_path, "qwen3", stored=stored)]
    got, expected = (executor.forward(rows) for executor in executors)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    scales = [executor._layers[0].key_scales for executor in executors]
    torch.testing.assert_close(scales[0], scales[1], rtol=1e-4, atol=1e-6)


def test_many_rows_in_bfloat16_give_what_few_do(tmp_path: Path) -> None:
    """A prompt at once, by other kernels than a row at its end."""
    model, reference = models(tmp_path, "llama", torch.bfloat16)
    whole, alone = step(66, 0), step(66, 0)
    executor = executor_of(model)
    prompt = executor.forward([whole])
    last = SequenceRows(65, alone.tokens[65:], alone.prefix_slots, NO_NODES, kept=[0])
    torch.testing.assert_close(executor.forward([last]), prompt, rtol=2e-2, atol=2e-2)
    expected = executor_of(reference).forward([whole])  # the interpreter cuts bits off where it rounds to bfloat16
    assert torch.nn.functional.cosine_similarity(prompt, expected).item() > 0.99


def test_states_are_those_of_the_reference(tmp_path: Path) -> None:
    rows, tap = step(12, 3), FeatureTap(ALL, len(ALL) * HIDDEN, lambda states: states, "raw")
    slots = np.concatenate((rows.prefix_slots, rows.nodes.slots))
    executors = [executor_of(model, tap) for model in models(tmp_path, "llama")]
    for executor in executors:
        executor.forward([rows])
    got, expected = (executor.features(slots) for executor in executors)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_layers_are_counted_by_the_device(tmp_path: Path) -> None:
    """When their keys are there."""
    executor, rows, seen = executor_of(models(tmp_path, "llama")[0]), step(5, 0), list[tuple[int, int]]()
    executor.count_layers()
    progress = executor.progress = DeviceProgress(2, DEVICE)
    wrote, slots = progress.wrote, rows.prefix_slots.tolist()

    def watch(layer: int) -> None:
        wrote(layer)
        written = sum(bool(kv.keys[slots].any()) for kv in executor._layers)
        seen.append((written, progress.at(0.0)))

    progress.wrote = watch  # type: ignore[method-assign]
    executor.forward([rows])
    assert seen == [(1, 1), (2, 2)]
    progress.reset()
    assert progress.at(0.0) == 0


def test_other_decoders_keep_their_own_layers() -> None:
    gate = SimpleNamespace(kind="gelu_pytorch_tanh")
    for mlp, rope in ((SimpleNamespace(gated=gate), {}), (SimpleNamespace(), {})):
        attention = SimpleNamespace(joined=InvariantLinear(Affine(torch.zeros(8, 8), None)))
        inner = SimpleNamespace(layers=[SimpleNamespace(mlp=mlp, self_attn=attention)])
        assert not TritonDecoder.fits(SimpleNamespace(model=inner, config=SimpleNamespace(rope_parameters=rope)))


def test_products_of_a_library_keep_transformers_layers(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    kernels = CUDAKernels(DEVICE)
    kernels.linear = JoinedLinear  # type: ignore[method-assign, assignment]
    module = load_model(tmp_path, torch.float32, DEVICE, eager=True).module
    assert kernels.replace(module, 64, alone=True) is module
