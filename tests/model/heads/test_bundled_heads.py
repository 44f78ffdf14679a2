"""The heads that ship with the package: what each reads in its own way is worth guesses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from head_files import change_config
from msgspec import structs
from support import make_engine

from pilotfish.core.scheduling.executor import NO_NODES, NodeRows, SequenceRows
from pilotfish.engine.engine import Engine
from pilotfish.engine.pairs import resolve_pair
from pilotfish.model.heads.executor import HeadExecutor
from pilotfish.workers.lm import LMDrafter

TEXTS = (
    'def mean(values):\n    """Return their mean."""\n    return sum(values) / len(values)',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        self.",
    "import json\nimport os\n\n\ndef read_config(path):\n    with open(path) as file:\n        return json.load(file)",
    "def parse_header(line):\n    name, value = line.split(':', 1)\n    if not name:\n        raise ValueError(line)",
    "    def __repr__(self):\n        return '%s(%r)' % (type(self).__name__, self.value)\n\n    def __len__(self):",
    "for index, item in enumerate(items):\n    if item is None:\n        continue\n    result[index] = item.strip()",
)
#: The chance that a guess after a token of the texts is accepted, both sampled at temperature 1; of eagle3 also after
#: a token that was a guess itself.
FLOORS = {"eagle3": 0.70, "dspark": 0.715}
SECOND_FLOOR = 0.715


@contextmanager
def serving(head: Path) -> Iterator[Engine]:
    with make_engine(resolve_pair("pycode").target, draft=head, mode="sync", drafter="lm") as engine:
        yield engine


def acceptance(head: Path, lag: int = 0, *, second: bool = False) -> float:
    """After each token of the texts. `lag`: each row is given the feature of so many tokens further back. `second`: the
    token was guessed itself, so that its row takes the state that the row before it left."""
    with serving(head) as engine:
        drafter, target = engine.drafter, engine.worker.executor
        assert isinstance(drafter, LMDrafter) and isinstance(drafter.executor, HeadExecutor)
        shares = []
        for text in TEXTS:
            tokens = engine.tokenizer.encode(text)
            slots = np.arange(len(tokens), dtype=np.int32)
            rows = SequenceRows(0, tokens, slots, NO_NODES, range(1, len(tokens)))
            said = target.forward([rows]).softmax(-1)
            unknown = np.full((1 + lag, target.feature_width), np.nan, np.float32)
            features = np.concatenate((unknown, target.features(slots)))[: len(tokens)]
            guessed = drafter.executor.forward([structs.replace(rows, features=features)])
            if second:
                said, guessed = said[1:], drafter.executor.forward([below(tokens, at) for at in range(2, len(tokens))])
            shares.append(torch.minimum(said, guessed.values.softmax(-1)).sum(-1))
    return torch.cat(shares).mean().item()


def below(tokens: Sequence[int], place: int) -> SequenceRows:
    """A text's token there as a node below those before it, which are computed."""
    node = NodeRows(np.array([tokens[place]]), np.array([1]), np.array([[len(tokens) + place]], np.int32))
    return SequenceRows(place, [], np.arange(place, dtype=np.int32), node, [])


def flip(name: str) -> Callable[[Path], None]:
    return lambda head: change_config(head, **{name: not json.loads((head / "config.json").read_text())[name]})


@pytest.fixture
def mutated(tmp_path: Path) -> Callable[[str, Callable[[Path], None]], Path]:
    def copy(kind: str, mutate: Callable[[Path], None]) -> Path:
        shutil.copytree(resolve_pair("pycode", kind).draft, tmp_path / kind)
        mutate(tmp_path / kind)
        return tmp_path / kind

    return copy


@pytest.mark.parametrize("kind", FLOORS)
def test_a_bundled_head_is_above_its_floor(kind: str) -> None:
    head = resolve_pair("pycode", kind).draft
    assert acceptance(head) > FLOORS[kind]
    assert acceptance(head, lag=1) < FLOORS[kind], "features of the token before are noticed"


def test_a_state_that_is_recycled_in_another_way_is_noticed(
    mutated: Callable[[str, Callable[[Path], None]], Path],
) -> None:
    assert acceptance(resolve_pair("pycode", "eagle3").draft, second=True) > SECOND_FLOOR
    assert acceptance(mutated("eagle3", flip("norm_output")), second=True) < SECOND_FLOOR
