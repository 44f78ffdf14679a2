"""A pool reads a long prompt for three seconds, in which it says nothing: then it drafts the sequence."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from played_pools import Attack, Honest, Pool
from sizes import sized
from support import SNIPPETS, make_engine, run
from workers import endpoint_in

from pilotfish.core.drafting.messages import Commit, Load, Open
from pilotfish.core.drafting.pools import MOST_OPENED
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.wire.channel import encode

#: Seconds; in the suite pools are silent after 0.6, not after 1 (conftest.quick).
READING = sized(0.9, 3.0)
STEP_MS = 10
PARAMS = SamplingParams(max_tokens=int(1000 * 3 * READING / STEP_MS), temperature=0.0, ignore_eos=True)


class Reader:
    """Reads the prompt of each Open; then it guesses."""

    def __init__(self, tells: bool) -> None:
        self.guesses, self.tells = Honest(), tells
        self.read = 0

    def __call__(self, message: Open | Commit) -> Iterable[bytes]:
        if isinstance(message, Open):
            self.read += 1
            if self.tells:
                yield encode(Load("a draft", 1, 1, 0, 1, 1.0, 0.0, busy_ms=1000 * READING))
            time.sleep(READING)
        yield from self.guesses(message)


@contextmanager
def drafted(llama: Path, directory: Path, attack: Attack) -> Iterator[Engine]:
    pool = Pool(endpoint_in(directory))
    pool.attack = attack
    try:
        options: dict[str, Any] = {"pace": f"target={STEP_MS}ms", "budget": "fixed", "nodes": 16}
        with make_engine(llama, mode="async", drafter="lm", draft_pool=(pool.endpoint,), **options) as engine:
            yield engine
    finally:
        pool.close()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("tells", [True, False])
def test_it_drafts_afterwards(tells: bool, llama: Path, tmp_path: Path) -> None:
    """One that has said for how long keeps its session. The session of one that has not is opened anew, not often."""
    reader = Reader(tells)
    with make_engine(llama) as plain:
        expected = run(plain, SNIPPETS[:1], [PARAMS])
    with drafted(llama, tmp_path, reader) as engine:
        assert run(engine, SNIPPETS[:1], [PARAMS]) == expected
        counts = engine.remote.drafter.machine.counts
        assert counts.hits > 5
        assert counts.opened == reader.read == 1 if tells else 1 <= counts.opened <= MOST_OPENED
