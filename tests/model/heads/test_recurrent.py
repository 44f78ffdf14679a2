"""Heads that recycle their own states, held to the formulas of their publishers."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from msgspec import structs
from recurrent_formulas import HIDDEN, KINDS, Drafted, Formulas, executor_of, free_slots, logits, random_head
from sizes import paired
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pilotfish.model.batch import CUBLAS
from pilotfish.model.cuda.graphs import GraphCache
from pilotfish.model.heads.executor import HeadExecutor
from pilotfish.model.heads.families.recurrent import RecurrentExecutor
from pilotfish.model.heads.parts import Angles
from pilotfish.model.heads.spec import Decoder

#: Each kind with the kernels or without.
IN_WAYS = pytest.mark.parametrize(("kind", "eager"), paired([*KINDS], [False, True]))
#: Two levels of a tree, and a deeper path.
LEVELS = [[(3,), (9,), (77,)], [(3, 4), (9, 4), (3, 8)], [(3, 4, 5), (9, 4, 1)], [(9, 4, 1, 150)]]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)


@IN_WAYS
def test_logits_are_those_of_the_formulas(kind: str, eager: bool) -> None:
    files = random_head(kind)
    executor, sequence = executor_of(files, eager=eager), Drafted.random(21, free_slots())
    formulas = Formulas(files, first_position=1)  # constant shifts of positions change nothing
    for end in (1, 2, 13):
        logits(executor, sequence.chunk(end))
    for _ in range(2):
        close(logits(executor, sequence.chunk()), formulas.drafted(sequence.known, sequence.tokens, ()))
        for paths in LEVELS:
            expected = [formulas.drafted(sequence.known, sequence.tokens, path)[-1] for path in paths]
            close(logits(executor, sequence.level(paths)), torch.stack(expected))
        sequence.commit([3, 4, 100])


@IN_WAYS
def test_a_row_has_the_same_bits_in_any_company(kind: str, eager: bool) -> None:
    files = random_head(kind)
    together, alone = (run(executor_of(files, eager=eager), size) for size in (8, 1))
    for found, expected in zip(together, alone, strict=True):
        assert torch.equal(found, expected)


def run(executor: HeadExecutor, size: int) -> list[torch.Tensor]:
    """Of eight sequences, `size` at once, the logits of each forward: after prompts, after nodes, after commits."""
    free = free_slots()
    sequences = [Drafted.random(length, free, seed=length) for length in range(2, 26, 3)]
    told = []
    for i in range(0, len(sequences), size):
        part = sequences[i : i + size]
        forwards = [logits(executor, *(sequence.chunk() for sequence in part))]
        forwards += [logits(executor, *(sequence.level(paths) for sequence in part)) for paths in LEVELS]
        for sequence in part:
            sequence.commit([3, 4, 100, 7])
        told.append([*forwards, logits(executor, *(sequence.chunk() for sequence in part))])
    return [torch.cat(parts) for parts in zip(*told, strict=True)]


# -- unknown features


@pytest.mark.parametrize(
    ("lost", "stand_ins"), [([4, 5, 9], [3, 3, 8]), ([0, 1, 2], None), (list(range(11)), None)], ids=str
)
def test_an_unknown_feature_is_the_last_one_known_or_zeros(
    lost: list[int], stand_ins: list[int] | None, eager: bool
) -> None:
    files = random_head("eagle3")
    executor, sequence = executor_of(files, eager=eager), Drafted.random(12, free_slots())
    sequence.features[lost] = np.nan
    found = logits(executor, sequence.chunk())
    sequence.features[lost] = 0.0 if stand_ins is None else sequence.features[stand_ins]
    close(found, Formulas(files).drafted(sequence.known, sequence.tokens, ()))


def test_without_one_in_the_chunk_the_state_before_goes_on(eager: bool) -> None:
    files = random_head("eagle3.1")
    executor, sequence = executor_of(files, eager=eager), Drafted.random(12, free_slots())
    logits(executor, sequence.chunk(8))
    sequence.features[[7, 8]] = np.nan  # of the rows of tokens 8 and 9, which begin the next chunk
    found = logits(executor, sequence.chunk(10))
    states = Formulas(files).step(sequence.known[:7], sequence.tokens[1:8])[0][-1:]
    close(found, Formulas(files).drafted(torch.cat([sequence.known[:7], states, states]), sequence.tokens[:10], ()))


def test_no_features_at_all_are_unknown_ones(eager: bool) -> None:
    executor, sequence = executor_of(random_head("eagle3"), eager=eager), Drafted.random(9, free_slots())
    found = logits(executor, structs.replace(sequence.chunk(), features=None))
    zeros = torch.zeros(8, HIDDEN)
    close(found, Formulas(random_head("eagle3")).drafted(zeros, sequence.tokens, ()))


def test_nodes_are_computed_again_beside_their_parents(eager: bool) -> None:
    executor, sequence = executor_of(random_head("eagle3"), eager=eager), Drafted.random(4, free_slots())
    logits(executor, sequence.chunk())
    apart = torch.cat([logits(executor, sequence.level([path])) for path in ((3,), (3, 4), (3, 4, 5))]).double()
    close(logits(executor, sequence.level([(3,), (3, 4), (3, 4, 5)])), apart)


@pytest.mark.parametrize("kind", KINDS)
def test_levels_may_be_recorded(kind: str) -> None:
    """Once, as they differ by nothing that shapes tell."""
    plain, recorded = (cast(RecurrentExecutor, executor_of(random_head(kind), eager=True)) for _ in range(2))
    calls = list[Callable[[], None]]()

    def record(call: Callable[[], None]) -> Callable[[], None]:
        calls.append(call)
        return call

    recorded.buckets = CUBLAS
    recorded._level = GraphCache(recorded._computed, recorded._draw, record, torch.device("cpu"))
    for found, expected in zip(*(run(executor, 2) for executor in (recorded, plain)), strict=True):
        assert torch.equal(found, expected)
    assert len(calls) == 2  # with features and without


# -- angles

_STRETCHED = {"rope_theta": 1e4, "factor": 4.0}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", **_STRETCHED},
    {"rope_type": "yarn", "original_max_position_embeddings": 512, **_STRETCHED},
    {
        "rope_type": "llama3",
        "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **_STRETCHED,
    },
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_angles_are_those_of_transformers(rope: dict[str, Any]) -> None:
    angles = Angles(Decoder(1, 64, 4, 2, 32, 96, rope=rope, context=2048), torch.float32, torch.device("cpu"))
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=32, max_position_embeddings=2048)
    config.rope_parameters = rope
    positions = torch.tensor([0, 1, 7, 1023, 1024, 2000])
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    angles.reach(2001)
    for found, wanted in zip(angles(positions), expected, strict=True):
        torch.testing.assert_close(found, wanted[0], rtol=0, atol=1e-6)
