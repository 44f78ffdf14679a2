"""The heads that ship with the package: what each reads in its own way is worth guesses."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

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


@pytest.fixture(scope="module")
def serving() -> Iterator[Callable[[Path], Engine]]:
    options: dict[str, Any] = {"mode": "sync", "drafter": "lm"}
    with ExitStack() as stack:
        target = resolve_pair("pycode").target
        yield cache(lambda head: stack.enter_context(make_engine(target, draft=head, **options)))


def acceptance(engine: Engine, lag: int = 0, *, second: bool = False) -> float:
    """After each token of the texts. `lag`: each row is given the feature of so many tokens further back. `second`: the
    token was guessed itself, so that its row takes the state that the row before it left."""
    drafter, target = engine.drafter, engine.worker.executor
    assert isinstance(drafter, LMDrafter) and isinstance(drafter.executor, HeadExecutor)
    shares = []
    for text in TEXTS:
        tokens = engine.tokenizer.encode(text)
        slots = np.arange(len(tokens), dtype=np.int32)
        rows = SequenceRows(0, tokens, slots, NO_NODES, range(1, len(tokens)))
        said = target.forward([rows]).softmax(-1)
        features = np.concatenate((np.full(1 + lag, np.nan), slots + 1.0))[: len(tokens), None].astype(np.float32)
        guessed = drafter.executor.forward([structs.replace(rows, features=features)])
        if second:
            said, guessed = said[1:], drafter.executor.forward([below(tokens, at) for at in range(2, len(tokens))])
        shares.append(torch.minimum(said, guessed.values.softmax(-1)).sum(-1))
    return torch.cat(shares).mean().item()


def below(tokens: Sequence[int], place: int) -> SequenceRows:
    """A text's token there as a node below those before it, which are computed."""
    node = NodeRows(np.array([tokens[place]]), np.array([1]), np.array([[len(tokens) + place]], np.int32))
    return SequenceRows(place, [], np.arange(place, dtype=np.int32), node, [])


@pytest.mark.parametrize("kind", FLOORS)
def test_a_bundled_head_is_above_its_floor(kind: str, serving: Callable[[Path], Engine]) -> None:
    engine = serving(resolve_pair("pycode", kind).draft)
    assert acceptance(engine) > FLOORS[kind]
    assert acceptance(engine, lag=1) < FLOORS[kind], "features of the token before are noticed"


def test_a_state_that_is_recycled_in_another_way_is_noticed(serving: Callable[[Path], Engine], tmp_path: Path) -> None:
    bundled = resolve_pair("pycode", "eagle3").draft
    assert acceptance(serving(bundled), second=True) > SECOND_FLOOR
    other = Path(shutil.copytree(bundled, tmp_path / "eagle3"))
    change_config(other, norm_output=not json.loads((other / "config.json").read_text())["norm_output"])
    assert acceptance(serving(other), second=True) < SECOND_FLOOR
