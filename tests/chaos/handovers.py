"""Targets and prefill workers between which somebody meddles."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from inline_prefills import arena_of, assert_nothing_left, prefill_worker
from support import VOCAB, make_engine
from workers import endpoint_in, eventually

from pilotfish.config.engine import EngineConfig
from pilotfish.core.peers import peer as peers
from pilotfish.core.peers.fields import Peer
from pilotfish.core.prefilling import handover_machine, prefill_pools
from pilotfish.core.prefilling.handover import HandOverReport
from pilotfish.core.prefilling.incoming import Incoming
from pilotfish.core.prefilling.prefill_messages import FromPrefill, OrderDone, SegmentReady
from pilotfish.core.prefilling.prefill_pools import PrefillPool
from pilotfish.core.prefilling.segments import SegmentReference
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.scheduler import Scheduler
from pilotfish.engine.engine import Engine
from pilotfish.engine.prefills.handovers import HandOvers
from pilotfish.engine.sample import Sample
from pilotfish.kv.arena import Arena
from pilotfish.wire.channel import Channel, Received, decode_from_prefill, decode_to_prefill, encode
from pilotfish.workers.prefill import PrefillWorker

Message = TypeVar("Message")
#: How segments' bytes come: read from memory, or sent.
TRANSPORTS: dict[str, tuple[str, ...]] = {"shm": ("shm",), "ipc": ()}
#: A forward of a worker computes so many tokens: a prompt is several segments.
ROWS = 64
#: Lengths of prompts: one that ends with a forward, two that do not, one that is one segment, and one without any.
LENGTHS = (300, 257, 129, 20, 1)
PARAMS = [
    SamplingParams(max_tokens=12, temperature=0.8 * (i % 2), seed=i, ignore_eos=True) for i in range(len(LENGTHS))
]

#: Outcomes of hand-overs that all bring everything; of a prompt of one token there is none.
WHOLE = {"whole": len(LENGTHS) - 1}


def prompts(seed: int = 0) -> list[list[int]]:
    """Of each length; of another seed others, which share nothing."""
    return [np.random.default_rng([seed, n]).integers(1, VOCAB, n).tolist() for n in LENGTHS]


def make_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets notice soon what a pool does not do, and try it again at once, however often it has failed."""
    for name, seconds in (("GREETING", 0.1), ("SILENCE", 0.5)):
        monkeypatch.setattr(peers, name, seconds)
    for name, value in (("MAX_FAILURES", 1000), ("BUSY", 0.0)):
        monkeypatch.setattr(prefill_pools, name, value)
    for name, seconds in (("STALL", 0.3), ("LONGEST_STALL", 0.3)):
        monkeypatch.setattr(handover_machine, name, seconds)


# -- messages


def passed(_: Peer, message: Message) -> Sequence[Message]:
    """Nobody meddles."""
    return [message]


def lost(*_: object) -> Sequence[Any]:
    return []


Changes = Callable[[Peer, Any], Iterable[Any]]


def begins(_: Peer, message: FromPrefill) -> Sequence[FromPrefill]:
    """Of each hand-over two segments come, and no more."""
    ends = message.reference.number > 1 if isinstance(message, SegmentReady) else isinstance(message, OrderDone)
    return [] if ends else [message]


class Meddler:
    """A worker's channel. What passes is what `to_target` and `to_worker` make of each message."""

    def __init__(self, channel: Channel) -> None:
        self.to_target: Changes = passed
        self.to_worker: Changes = passed
        self.peer = b""  # that was heard last
        self.channel = channel

    def send(self, peer: Peer, *frames: bytes) -> bool:
        passing = [encode(m) for frame in frames for m in self.to_target(peer, decode_from_prefill(frame))]
        return self.channel.send(peer, *passing) if passing else True

    def receive(self, timeout: float) -> list[Received]:
        return [passing for received in self.channel.receive(timeout) for passing in self._passing(received)]

    def _passing(self, received: Received) -> Iterator[Received]:
        self.peer = received.peer
        for message in self.to_worker(received.peer, decode_to_prefill(received.frame)):
            yield Received(received.peer, encode(message), received.tenant, received.weight)

    def wake(self) -> None:
        self.channel.wake()

    def close(self) -> None:
        self.channel.close()


# -- a worker and a target


@dataclass
class Beside:
    """A target, and a prefill worker in a thread beside it."""

    engine: Engine
    worker: PrefillWorker
    link: Meddler
    expected: Sequence[Sequence[int]]  # what the prompts' outputs are without the worker

    @property
    def pool(self) -> PrefillPool:
        assert self.engine.prefills is not None
        return self.engine.prefills.pools[0]

    @property
    def handovers(self) -> HandOvers:
        assert self.engine.prefills is not None
        return self.engine.prefills.handovers

    @property
    def arena(self) -> Arena:
        return arena_of(self.worker)

    @property
    def mac_key(self) -> bytes:
        """Of the target that was heard last."""
        return self.worker.shared.machine._targets[self.link.peer].mac_key

    def signed(self, reference: SegmentReference) -> SegmentReference:
        return reference.signed(self.mac_key)

    def submit(self) -> list[Sample]:
        return [s for tokens, params in zip(prompts(), PARAMS, strict=True) for s in self.engine.submit(tokens, params)]

    def finish(self, samples: Sequence[Sample]) -> None:
        """All outputs are as they should be; the target's slots are all in order after each step."""
        while self.engine.busy:
            self.engine.step()
            self.engine.check()
        assert [sample.token_ids for sample in samples] == self.expected

    def run(self) -> dict[str, int]:
        """The outcomes of the prompts' hand-overs."""
        samples = self.submit()
        self.finish(samples)
        return outcomes(samples)

    def forget(self) -> None:
        """What both sides know of earlier prompts. Both are idle."""
        forget(self.worker.scheduler)
        self.forget_here()

    def forget_here(self) -> None:
        """What the target knows of them."""
        forget(self.engine.worker.scheduler)

    def assert_well(self) -> None:
        """Nothing is held anywhere, and whatever went wrong before, prompts are handed over again."""
        self.link.to_target = self.link.to_worker = passed
        assert_nothing_left([self.worker], self.engine)
        eventually(lambda: self.pool.takes(1, self.handovers._clock()))
        self.forget()
        assert self.run() == WHOLE
        assert_nothing_left([self.worker], self.engine)
        self.forget()


def forget(scheduler: Scheduler) -> None:
    assert scheduler.cache is not None
    scheduler.cache.evict(scheduler.pool.capacity)


def under_way(engine: Engine) -> list[Incoming]:
    """Hand-overs of its first pool."""
    assert engine.prefills is not None
    return engine.prefills.handovers.machine.at(engine.prefills.pools[0])


def taken(engine: Engine) -> int:
    """Segments of theirs that are in their slots."""
    return sum(incoming.segments - len(incoming.awaited) for incoming in under_way(engine))


def step_until(engine: Engine, true: Callable[[], bool]) -> None:
    def stepped() -> bool:
        assert engine.busy
        engine.step()
        return true()

    eventually(stepped)


def reports(samples: Iterable[Sample]) -> list[HandOverReport]:
    return [report for sample in samples for report in sample.request.stats.handovers]


def outcomes(samples: Iterable[Sample]) -> dict[str, int]:
    found: dict[str, int] = {}
    for report in reports(samples):
        found[report.outcome] = found.get(report.outcome, 0) + 1
    return found


@dataclass
class Side:
    """How a worker beside a target is started, and started again."""

    target: Path
    directory: Path
    options: dict[str, Any] = field(default_factory=dict)
    network: Callable[[Any], Any] = lambda channel: channel

    @contextmanager
    def worker(self) -> Iterator[tuple[PrefillWorker, Meddler]]:
        links: list[Meddler] = []

        def wrapped(channel: Channel) -> Channel:
            links.append(Meddler(channel))
            made: Channel = self.network(links[0])
            return made

        model = EngineConfig(target=self.target, dtype="float32", threads=1, kv_slots=4096, max_rows=ROWS)
        given = {"segment_bytes": 1 << 16, **self.options}
        with prefill_worker(model, endpoint_in(self.directory), wrapped, **given) as worker:
            yield worker, links[0]


@contextmanager
def beside(
    target: Path,
    directory: Path,
    expected: Sequence[Sequence[int]],
    worker: dict[str, Any] | None = None,
    **config: Any,
) -> Iterator[Beside]:
    """`worker` are options of `PrefillConfig`, `config` those of the target's engine."""
    with ExitStack() as stack:
        prefill, link = stack.enter_context(Side(target, directory, worker or {}).worker())
        pools = {"prefill_pool": (endpoint_in(directory),), "prefill_threshold": "1"}
        engine = stack.enter_context(make_engine(target, **pools, **config))
        yield Beside(engine, prefill, link, expected)


class Gate:
    """Stands before a function: who calls it waits until it is open."""

    def __init__(self, function: Callable[..., Any], after: int = 0) -> None:
        """The first `after` calls pass."""
        self._function, self._after = function, after
        self.reached, self.open = threading.Event(), threading.Event()
        self.calls = 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls > self._after:
            self.reached.set()
            assert self.open.wait(20)
        return self._function(*arguments)
