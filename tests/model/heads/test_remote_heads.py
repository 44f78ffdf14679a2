"""Trained heads that draft elsewhere, over lines that lose, repeat and damage frames: their guesses change nothing, and
without losses they get the very features that the target has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from head_files import write_block, write_eagle3
from sizes import sized
from support import SNIPPETS, assert_idle, make_engine, run

from pilotfish.core.cache.prefix_cache import PrefixCache
from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.drafting.connected_targets import DraftIdentity
from pilotfish.core.drafting.draft_machine import DraftMachine
from pilotfish.core.drafting.drafter import DraftLimits
from pilotfish.core.drafting.level_choice import LevelShape
from pilotfish.core.drafting.messages import PROTOCOL_VERSION, FeatureOffer, FeatureRows, Hello, Peer
from pilotfish.core.drafting.pools import DraftPool
from pilotfish.core.drafting.session_table import SessionTable
from pilotfish.core.drafting.target_machine import RemoteOptions
from pilotfish.core.features.feature_intake import FeatureNeed
from pilotfish.core.features.features import Features
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.tree import Guesses
from pilotfish.engine.drafts.remote_drafts import RemoteDrafter
from pilotfish.engine.engine import Engine
from pilotfish.model.heads.executor import HeadSetup
from pilotfish.model.heads.files import read_head
from pilotfish.model.heads.target import TargetFacts
from pilotfish.wire.channel import Received, decode_to_draft
from pilotfish.workers.draft import DraftWorker, Grower

POOL, TARGET = b"0", b"target"
FEW = (5, 60, 300)
PARAMS = (
    SamplingParams(max_tokens=24, temperature=0.0, allowed_token_ids=FEW),
    SamplingParams(max_tokens=24, temperature=0.9, seed=3, allowed_token_ids=FEW),
    SamplingParams(max_tokens=24, temperature=0.8, seed=5, n=2, allowed_token_ids=FEW),
    SamplingParams(max_tokens=12, temperature=0.0),
)
PROMPTS = (SNIPPETS[0], SNIPPETS[1], SNIPPETS[2] * 3, [7])
#: Turns of the draft's loop for each step of the target.
TURNS = 6


class Line:
    """A channel to a draft worker, and the way back, both stepped by hand; what is lost, comes twice, or is damaged is
    drawn."""

    def __init__(self, faults: float, seed: int = 0) -> None:
        self.faults, self.rng = faults, np.random.default_rng(seed)
        self.to_draft: list[Received] = []
        self.to_target: list[Received] = []
        self.features: list[FeatureRows] = []  # that were sent

    def _kept(self, frames: Sequence[bytes]) -> Iterator[bytes]:
        for frame in frames:
            drawn = self.rng.random()
            if drawn < self.faults:
                continue
            if drawn < 2 * self.faults:
                yield frame
            if drawn < 3 * self.faults:
                place, damaged = int(self.rng.integers(8 * len(frame))), bytearray(frame)
                damaged[place // 8] ^= 1 << place % 8
                frame = bytes(damaged)
            yield frame

    def post(self, peer: Peer, *frames: bytes) -> None:
        assert peer == POOL
        sent = map(decode_to_draft, frames)
        self.features += [message for message in sent if isinstance(message, FeatureRows)]
        self.to_draft += [Received(TARGET, frame) for frame in self._kept(frames)]

    def send(self, peer: Peer, *frames: bytes) -> bool:
        assert peer == TARGET
        self.to_target += [Received(POOL, frame) for frame in self._kept(frames)]
        return True

    def receive(self, timeout: float) -> list[Received]:  # noqa: ARG002
        frames, self.to_draft = self.to_draft, []
        return frames

    def wake(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is held."""


class SteppedDrafter(RemoteDrafter):
    """Before each step of its target the draft has some turns."""

    worker: DraftWorker
    line: Line
    now = 0.0

    def propose(self, requests: Sequence[Request], limits: DraftLimits) -> list[Guesses]:
        for _ in range(TURNS):
            self.now += 0.002
            self.tick()
            self.worker.turn(0.0)
            frames, self.line.to_target = self.line.to_target, []
            for received in frames:
                self.receive(received)
        return super().propose(requests, limits)


@dataclass
class Remote:
    engine: Engine
    drafter: SteppedDrafter

    @property
    def worker(self) -> DraftWorker:
        return self.drafter.worker

    @property
    def pool(self) -> DraftPool:
        return self.drafter.machine.pools[0]

    def settle(self) -> None:
        """Nothing is held anywhere, also where a Close was lost."""
        assert_idle(self.engine)
        assert self.engine.worker.drafter.drafter is self.drafter  # it never failed
        self.drafter.now += 100.0
        self.worker.turn(0.0)
        self.worker.machine.table.check()
        assert len(self.worker.machine.table) == 0


@contextmanager
def remote(
    target: Path, head: Path, faults: float = 0.0, dtype: str = "float32", slots: int = 1000, **config: Any
) -> Iterator[Remote]:
    files = read_head(head, TargetFacts.read(target))
    width, pool, shape = files.spec.projection.width, SlotPool(slots), LevelShape(8, 4)
    with make_engine(target, features=head, **config) as engine:
        vocab, line, offer = engine.model.config.vocab_size, Line(faults), FeatureOffer(files.digest, width, dtype)
        hello = Hello(PROTOCOL_VERSION, "digest", vocab, "target", features=offer)
        options = RemoteOptions(wanted=100, quarantine=0.0)
        drafter = SteppedDrafter(hello, [DraftPool("stepped", POOL)], line.post, options, source=engine.executor)
        drafter.line, drafter._clock = line, lambda: drafter.now
        table = SessionTable(pool, PrefixCache(pool))
        need = FeatureNeed((files.digest,), width)
        machine = DraftMachine(DraftIdentity("head", "digest", {}), table, shape, 1000, features=need)
        vocab_size = engine.model.config.vocab_size
        setup = HeadSetup(torch.device("cpu"), torch.float32, slots, eager=False, vocab_size=vocab_size)
        executor = files.executor(setup)
        grower = Grower(executor, table, shape.children)
        drafter.worker = DraftWorker(machine, grower, line, lambda: drafter.now)
        engine.use(drafter, engine.worker.budget)
        yield Remote(engine, drafter)


@pytest.fixture(scope="module", params=sized(["dspark"], ["eagle3", "dspark"]))
def head(request: pytest.FixtureRequest, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory, target = tmp_path_factory.mktemp("head"), TargetFacts.read(llama)
    if request.param == "eagle3":
        return write_eagle3(directory, target=target, layers=(0, 1, 2))
    return write_block(directory, target=target, layers=(0, 2), draft_vocab=400)


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[list[int]]:
    """Each alone, without a draft."""
    with make_engine(llama, prefix_cache=False) as engine:
        return [tokens for one, params in zip(PROMPTS, PARAMS, strict=True) for tokens in run(engine, [one], [params])]


def test_the_output_is_the_targets(llama: Path, head: Path, expected: list[list[int]]) -> None:
    """Again over what the caches of both sides have: those features are not sent twice."""
    with remote(llama, head) as drafting:
        assert run(drafting.engine, PROMPTS, PARAMS) == expected
        first = len(drafting.drafter.line.features)
        assert run(drafting.engine, PROMPTS, PARAMS) == expected
        drafting.settle()
        counts = drafting.worker.machine.counts
        assert counts.used > 10 and counts.cached > 100 and not counts.resyncs and not counts.malformed
        assert counts.features == len(drafting.drafter.line.features) > first > 20
        assert not drafting.pool.drops.occurred.keys() - {"late_nodes", "repeated_nodes"}


def test_lines_that_lose_and_damage_frames(llama: Path, head: Path, expected: list[list[int]]) -> None:
    with remote(llama, head, faults=0.05) as drafting:
        for _ in range(3):
            assert run(drafting.engine, PROMPTS, PARAMS) == expected
        drafting.settle()
        counts = drafting.worker.machine.counts
        assert counts.used > 10 and counts.malformed
        assert 0 < counts.features < len(drafting.drafter.line.features)


@pytest.mark.parametrize("dtype", sized(["int8"], ["bfloat16", "fp8", "int8"]))
def test_rounded_features(llama: Path, head: Path, expected: list[list[int]], dtype: str) -> None:
    with remote(llama, head, dtype=dtype) as drafting:
        assert run(drafting.engine, PROMPTS, PARAMS) == expected
        drafting.settle()
        assert drafting.worker.machine.counts.used > 10


def test_too_few_slots_on_either_side(llama: Path, head: Path, expected: list[list[int]]) -> None:
    """Requests give way to each other, and so do sessions: what is opened anew gets its features anew."""
    with remote(llama, head, slots=150, kv_slots=300) as drafting:
        drafting.engine.worker.scheduler.headroom = 1
        assert run(drafting.engine, PROMPTS, PARAMS) == expected
        drafting.settle()


def test_rows_get_what_the_target_has(llama: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, whether computed in a prompt, as an accepted guess, or after a bonus token."""
    told: list[tuple[tuple[int, ...], Features]] = []
    with remote(llama, head) as drafting:
        worker = drafting.worker
        grow = worker.grower.grow

        def watched(level: Sequence[Any]) -> Any:
            for part in level:
                if part.pending:
                    start = len(part.session.slots)
                    rows = part.session.features.of_rows(start, part.pending)
                    told.extend(
                        (tuple(part.session.tokens[:place]), row) for place, row in enumerate(rows, start) if place
                    )
            return grow(level)

        monkeypatch.setattr(worker.grower, "grow", watched)
        run(drafting.engine, PROMPTS, PARAMS)
        alone = make_engine(llama, features=head, prefix_cache=False)
        assert len(told) > 200
        for tokens, row in told[:: len(told) // 20]:
            params = SamplingParams(max_tokens=1, temperature=0.0)
            (sample,) = alone.submit(list(tokens), params)
            slots = sample.request.slots
            alone.step()
            assert (alone.executor.features(slots[len(tokens) - 1 : len(tokens)])[0] == row).all()
