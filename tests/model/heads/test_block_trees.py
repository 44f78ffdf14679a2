"""Trees of heads through the one grower: a node's children are those of the formulas, under the target's noise."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch
from block_heads import (
    HIDDEN,
    VOCAB,
    BlockFormulas,
    block_head,
    by_target,
    executor_of,
    parallel_head,
    parallel_log_chances,
)
from recurrent_formulas import VOCAB as RECURRENT_VOCAB
from recurrent_formulas import Formulas, random_head
from sizes import paired, sized
from support import RowSampling, limits, paths_of, proposed, sampling_of
from torch import Tensor

from pilotfish.core.drafting.drafter import DraftLimits
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.child_calibration import ChildCalibration
from pilotfish.core.trees.lookahead import Lookahead
from pilotfish.model.heads.executor import HeadExecutor
from pilotfish.model.heads.spec import HeadFiles
from pilotfish.model.sampling import likely_tokens
from pilotfish.workers.lm import LMDrafter

CHILDREN = 4
PLENTY = limits(nodes=400, levels=16)
#: path below the root -> logits [vocab], log-confidence; None: nothing is below.
Told = Callable[[list[int]], tuple[Tensor, Tensor] | None]


@dataclass
class Source:
    """A target whose slots keep random features, and requests that it has run up to the last token."""

    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))
    feature_width: int = HIDDEN

    def __post_init__(self) -> None:
        self.table = torch.from_numpy(self.rng.normal(size=(1000, self.feature_width)).astype(np.float32))

    def drafter(self, executor: HeadExecutor) -> LMDrafter:
        executor.read_from(self.table)
        return LMDrafter(executor, width=6, children=CHILDREN, reads_target=True)

    def request(self, number: int, length: int, temperature: float) -> Request:
        tokens = self.rng.integers(0, VOCAB, length).tolist()
        params = SamplingParams(max_tokens=100, temperature=temperature, top_k=20)
        request = Request(number, tokens, params, 100 + number, frozenset(), 400)
        self.run(request)
        return request

    def run(self, request: Request) -> None:
        request.num_computed = len(request.tokens) - 1
        request.slots = np.arange(request.num_computed, dtype=np.int32) + 200 * request.id

    def before(self, request: Request) -> Tensor:
        return self.table[request.slots]


def check(told: Told, request: Request, paths: dict[tuple[int, ...], float]) -> int:
    """Each node's children against the formulas; how deep they reach."""
    below: dict[tuple[int, ...], dict[int, float]] = {}
    for path, score in paths.items():
        below.setdefault(path[:-1], {})[path[-1]] = score - paths.get(path[:-1], 0.0)
    for path, children in below.items():
        logits, confidence = told(list(path)) or (None, None)
        assert logits is not None and confidence is not None, "children beyond the end of a block"
        row = RowSampling(request.params, request.seed, len(request.tokens) + len(path))
        tokens, chances = likely_tokens(logits[None].float(), sampling_of([row], CHILDREN))
        expected = dict(zip(tokens[0].tolist(), (chances[0] + float(confidence)).tolist(), strict=True))
        assert children == pytest.approx({token: expected[token] for token in children}, abs=1e-3)
    return max(map(len, paths))


def grow(
    files: HeadFiles,
    formulas: Callable[[Tensor, list[int]], Told],
    deepest: int,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
    most: DraftLimits = PLENTY,
) -> None:
    """Trees of two requests together: as deep as the head reaches, from the prompt and from roots further on.
    `formulas` get features of all tokens before the last, and the tokens."""
    monkeypatch.setattr(Lookahead, "FLOOR", -100.0)
    monkeypatch.setattr(ChildCalibration, "observe", lambda *_: None)
    source = Source(feature_width=files.spec.projection.width)
    vocab = len(files.tensors.get("embed_tokens.weight", range(VOCAB)))
    drafter = source.drafter(executor_of(files, vocab=vocab))
    requests = [source.request(number, length, temperature) for number, length in enumerate((11, 4))]
    for tokens in ([3, 1], [7], [2, 2, 2]):
        trees = proposed(drafter, requests, most)
        for request, tree in zip(requests, trees, strict=True):
            told = formulas(source.before(request), request.tokens)
            assert check(told, request, paths_of(tree)) == deepest
            session = next(session for session in drafter.table if session.key.number == request.id)
            assert max(map(session.tree.depth, session.tree.expanded)) == deepest - 1  # what is below is not asked for
            alone = source.drafter(executor_of(files, vocab=vocab))
            assert paths_of(tree) == paths_of(proposed(alone, [request], most)[0])
        for request in requests:
            request.extend(tokens)
            drafter.commit(request, tokens)
            source.run(request)
            drafter.table.check()


def test_features_in_slots_are_finite_or_zeros() -> None:
    executor, plane = executor_of(block_head("dflash")), torch.arange(8.0).view(4, 2)
    plane[2, 1] = torch.inf
    executor.read_from(plane)
    assert executor.feature_values(torch.tensor([[0.0], [1.0], [3.0], [4.0]])).tolist() == [
        [0, 0],
        [0, 1],
        [0, 0],
        [6, 7],
    ]


# -- of heads


def block_told(files: HeadFiles, features: Tensor, tokens: list[int]) -> Told:
    formulas = BlockFormulas(files)
    root = tokens[-1]
    states = formulas.states(features, root)

    def told(path: list[int]) -> tuple[Tensor, Tensor] | None:
        known = formulas.logits(states, root, path)
        return None if known is None else (by_target(files, known[0]), known[1])

    return told


def parallel_told(files: HeadFiles, features: Tensor, _tokens: list[int]) -> Told:
    def told(path: list[int]) -> tuple[Tensor, Tensor] | None:
        known = parallel_log_chances(files, features[-1], len(path) + 1)
        return (known, torch.zeros(())) if known.isfinite().any() else None

    return told


def recurrent_told(files: HeadFiles, features: Tensor, tokens: list[int]) -> Told:
    def told(path: list[int]) -> tuple[Tensor, Tensor]:
        logits = Formulas(files).drafted(features, tokens, path)[-1]
        return by_target(files, logits, RECURRENT_VOCAB), torch.zeros(())

    return told


HEADS = {
    "dflash": (block_head("dflash"), block_told),
    "dspark": (block_head("dspark"), block_told),
    "gated": (block_head("dspark_gated"), block_told),
    "reduced": (block_head("dspark_window"), block_told),
    "medusa": (parallel_head(), parallel_told),
}


@pytest.mark.parametrize("temperature", sized([0.8], [0.0, 0.8]))
@pytest.mark.parametrize("kind", sized(("dspark", "reduced", "medusa"), tuple(HEADS)))
def test_trees(kind: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    files, formulas = HEADS[kind]
    head = files.spec.head
    deepest = head.heads if kind == "medusa" else head.block - head.first
    grow(files, partial(formulas, files), deepest, temperature, monkeypatch)


@pytest.mark.parametrize(("kind", "draft_vocab"), paired(["eagle3", "eagle3.1", "mtp deepseek"], [RECURRENT_VOCAB, 40]))
def test_trees_of_states(kind: str, draft_vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    files = random_head(kind, draft_vocab=draft_vocab)
    grow(files, partial(recurrent_told, files), 3, 0.8, monkeypatch, limits(nodes=24, levels=3))
