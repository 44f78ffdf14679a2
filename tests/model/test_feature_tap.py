"""Features: what a tap makes of the hidden states of transformers, in the slots of the rows that gave them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from sizes import paired
from support import KINDS, VOCAB, native_model, random_tree, tiny_model
from torch import Tensor

from pilotfish.core.features.features import FINAL
from pilotfish.core.scheduling.executor import NO_NODES, NodeRows, SequenceRows
from pilotfish.errors import ModelError
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.feature_tap import FeatureTap
from pilotfish.model.loading.loader import load_model

pytestmark = pytest.mark.usefixtures("kernels")

CPU = torch.device("cpu")
SLOTS, HIDDEN, LAYERS = 400, 64, 2
ALL = (LAYERS, 0, FINAL, 1)  # in no order


def raw_tap(*layers: int) -> FeatureTap:
    """Features are the states themselves."""
    return FeatureTap(layers, len(layers) * HIDDEN, lambda states: states, "raw")


def tree_below(tokens: Sequence[int], nodes: int, seed: int = 0) -> tuple[SequenceRows, list[list[int]]]:
    """Tokens and a tree below them at slots in disorder; and the text that each row ends, in the order of slots."""
    rng = np.random.default_rng(seed)
    tree, order = random_tree(rng, VOCAB, nodes), rng.permutation(SLOTS).astype(np.int32)
    prefix, own = order[: len(tokens)], order[len(tokens) : len(tokens) + len(tree)]
    texts = [list(tokens[: i + 1]) for i in range(len(tokens))]
    texts += [[*tokens, *tree.path_tokens(node)] for node in range(len(tree))]
    return SequenceRows(0, tokens, prefix, NodeRows.of(tree, own), [len(tokens) - 1]), texts


def states_of(model: torch.nn.Module, text: Sequence[int]) -> dict[int, Tensor]:
    """transformers' own, of the last token: by our ids. The state before the final norm is what goes into that."""
    before = list[Tensor]()
    with model.model.norm.register_forward_pre_hook(lambda _, args: before.append(args[0])), torch.inference_mode():
        states = model(torch.tensor([list(text)]), output_hidden_states=True).hidden_states
    ids = {layer: states[layer][0, -1] for layer in range(LAYERS)}
    return {**ids, LAYERS: before[0][0, -1], FINAL: states[LAYERS][0, -1]}


@pytest.mark.parametrize(("kind", "eager"), paired(KINDS, [True, False]))
def test_each_row_has_the_hidden_states_of_transformers(kind: str, eager: bool, tmp_path: Path) -> None:
    reference = tiny_model(kind).eval()
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32, CPU, eager=eager)
    executor = TorchExecutor(model, SLOTS, tap=raw_tap(*ALL))
    rows, texts = tree_below(np.random.default_rng(3).integers(0, VOCAB, 20).tolist(), nodes=7)
    assert torch.equal(executor.forward([rows]), TorchExecutor(model, SLOTS).forward([rows]))
    features = executor.features(np.concatenate((rows.prefix_slots, rows.nodes.slots)))
    assert features.dtype == np.float32 and features.shape == (len(texts), executor.feature_width)
    for feature, text in zip(features, texts, strict=True):
        expected = states_of(reference, text)
        wanted = torch.cat([expected[layer] for layer in ALL])
        error = (torch.from_numpy(feature) - wanted).abs().max() / wanted.abs().max()
        assert error < 1e-5


@pytest.mark.parametrize("layer", [LAYERS + 1, -2, 99])
def test_a_layer_that_the_target_lacks_is_refused(llama: Path, layer: int) -> None:
    with pytest.raises(ModelError, match=rf"^features: layer {layer} is none of the target's; expected 0 to 2, or -1"):
        TorchExecutor(load_model(llama, torch.float32, CPU, eager=True), SLOTS, tap=raw_tap(0, layer))


@pytest.mark.parametrize(
    ("layers", "shape", "reason"),
    [
        ([3], (1, HIDDEN), "no state 3"),
        ([0], (1, HIDDEN + 1), "states \\[rows, layers"),
        ([0], (2, HIDDEN), "states \\[rows, layers"),
    ],
)
def test_states_that_do_not_fit_a_plain_decoder_are_refused(
    layers: list[int], shape: tuple[int, int], reason: str, llama: Path
) -> None:
    model = native_model(llama)
    rows = SequenceRows(0, [7], np.zeros(1, np.int32), NO_NODES, [0])
    with model.module.capturing(layers, torch.empty(shape)), pytest.raises(RuntimeError, match=f"decoder: {reason}"):
        TorchExecutor(model, SLOTS).forward([rows])
