"""Heads in training: what they guess is what their executors guess, and what the formulas say."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pilotfish.core.scheduling.executor import NO_NODES, NodeRows, SequenceRows
from pilotfish.model.heads.executor import HeadSetup
from pilotfish.model.heads.families.block import BlockHead
from pilotfish.model.heads.families.medusa import MedusaHead
from pilotfish.model.heads.families.recurrent import RecurrentHead as Recurrent
from pilotfish.model.heads.spec import FINAL, Decoder, Head, HeadFiles, HeadSpec, Projection
from pilotfish.train.head import trainee_of
from pilotfish.train.heads.trainee import Lesson, Shared, Trainee
from pilotfish.train.recipes import head_recipe

HIDDEN, VOCAB, LENGTH, DEPTH = 64, 96, 14, 3
DECODER = Decoder(layers=1, hidden=HIDDEN, heads=4, kv_heads=2, head_dim=32, ffn=96)
THREE = Projection((1, 2, 3), HIDDEN)
LAST = Projection((FINAL,), HIDDEN, fc=False)
TWO = Projection((1, 2), HIDDEN, joined_norm=True)
NORMED, DEEP = replace(THREE, feature_norm=True), replace(DECODER, layers=2, qk_norm=True)
HEADS: dict[str, Head] = {
    "eagle3": Recurrent(THREE, DECODER, "wide"),
    "eagle3.1": Recurrent(TWO, DECODER, "wide", residual_normed=True, recycles_normed=True),
    "mtp": Recurrent(LAST, DECODER, "joined", recycles_normed=True),
    "dspark": BlockHead(NORMED, DEEP, DEPTH, mask_token=0, anchored=True, markov_rank=16, confidence="markov"),
    "medusa": MedusaHead(LAST, HIDDEN, heads=DEPTH, blocks=1),
}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fresh(name: str) -> Trainee:
    kind = name.partition(".")[0]
    recipe = head_recipe(kind, target="none", depth=DEPTH, layers=2 if kind == "dspark" else 1)
    shared = Shared(random(VOCAB, HIDDEN, seed=1), random(VOCAB, HIDDEN, seed=2) * 0.2, torch.ones(HIDDEN), [])
    return trainee_of(HEADS[name], shared, recipe)


def trainee(name: str) -> Trainee:
    made = fresh(name).eval()
    for seed, parameter in enumerate(made.parameters()):
        flat = parameter.ndim == 1
        parameter.data = random(*parameter.shape, seed=seed) * (0.2 if flat else 0.15) + (1.0 if flat else 0.0)
    return made


def lesson(name: str, *, rows: int = 1) -> Lesson:
    parts = len(HEADS[name].projection.layers)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB, (rows, LENGTH)))
    places = torch.arange(1, LENGTH - DEPTH + 1).expand(rows, -1)
    positions = torch.arange(LENGTH).expand(rows, -1)
    return Lesson(tokens, positions, places, random(rows, LENGTH, parts * HIDDEN, seed=9))


def files(name: str, made: Trainee) -> HeadFiles:
    tensors = {**made.state_dict(), "embed_tokens.weight": made.shared.embedding, "lm_head.weight": made.shared.output}
    spec = HeadSpec(HEADS[name], name, "test", HIDDEN, 4, VOCAB)
    return HeadFiles(spec, tensors, None, "")


def drafted(name: str, made: Trainee, given: Lesson, place: int) -> Tensor:
    """[depth, vocabulary]: what the executor guesses below token `place` and the two after it."""
    executor: Any = files(name, made).executor(HeadSetup(torch.device("cpu"), torch.float32, 64, eager=True))
    tokens = given.tokens[0].tolist()
    features = made.features(given.states)[0].detach().numpy()
    before = np.concatenate([np.full((1, features.shape[1]), np.nan, np.float32), features])[: place + 1]
    slots = np.arange(place + 1, dtype=np.int32)
    rows = [SequenceRows(0, tokens[: place + 1], slots, NO_NODES, [place], before)]
    for depth in range(1, DEPTH):
        path = np.arange(40, 40 + depth, dtype=np.int32)[None]
        node = NodeRows(np.array([tokens[place + depth]]), np.array([depth]), path)
        rows.append(SequenceRows(place + 1, [], slots, node, ()))
    return torch.cat([executor.forward([row]).values for row in rows])


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_guesses_are_those_of_the_executor(name: str) -> None:
    made, given = trainee(name), lesson(name)
    chains = made(given)
    for place in (1, 6, LENGTH - DEPTH):
        guessed = torch.stack([logits[0, place - 1] for logits in chains.logits])
        torch.testing.assert_close(guessed, drafted(name, made, given, place), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_blocks_of_a_row_know_nothing_of_each_other() -> None:
    made, given = trainee("dspark"), lesson("dspark")
    together = made(given)
    for place in (1, 4, LENGTH - DEPTH):
        alone = made(Lesson(given.tokens, given.positions, torch.tensor([[place]]), given.states))
        for depth in range(DEPTH):
            torch.testing.assert_close(alone.logits[depth][0, 0], together.logits[depth][0, place - 1])
            torch.testing.assert_close(alone.confidence[depth][0, 0], together.confidence[depth][0, place - 1])
