"""Targets and prefill workers between which somebody meddles."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from inline_prefills import prefill_worker
from support import VOCAB, eventually, make_engine
from workers import endpoint_in

from pilotfish.config.engine import EngineConfig
from pilotfish.core.peers import peer as peers
from pilotfish.core.peers.fields import Peer
from pilotfish.core.prefilling import handover_machine, prefill_pools
from pilotfish.core.prefilling.handover import HandOverReport
from pilotfish.core.prefilling.incoming import Incoming
from pilotfish.core.prefilling.prefill_messages import FromPrefill, OrderDone, SegmentReady
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.scheduler import Scheduler
from pilotfish.engine.engine import Engine
from pilotfish.engine.sample import Sample
from pilotfish.wire.channel import Channel, Received, decode_from_prefill, encode
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


# -- a worker


def passed(_: Peer, message: Message) -> Sequence[Message]:
    """Nobody meddles."""
    return [message]


def begins(_: Peer, message: FromPrefill) -> Sequence[FromPrefill]:
    """Of each hand-over two segments come, and no more."""
    ends = message.reference.number > 1 if isinstance(message, SegmentReady) else isinstance(message, OrderDone)
    return [] if ends else [message]


class Meddler:
    """A worker's channel. What passes to a target is what `change` makes of each message."""

    def __init__(self, channel: Channel) -> None:
        self.change: Callable[[Peer, Any], Iterable[Any]] = passed
        self.peer = b""  # that was heard last
        self._channel = channel

    def send(self, peer: Peer, *frames: bytes) -> bool:
        passing = [encode(m) for frame in frames for m in self.change(peer, decode_from_prefill(frame))]
        return self._channel.send(peer, *passing) if passing else True

    def receive(self, timeout: float) -> list[Received]:
        heard = self._channel.receive(timeout)
        self.peer = heard[-1].peer if heard else self.peer
        return heard

    def wake(self) -> None:
        self._channel.wake()

    def close(self) -> None:
        self._channel.close()


@contextmanager
def meddled_worker(target: Path, directory: Path, **options: Any) -> Iterator[tuple[PrefillWorker, Meddler]]:
    """In a thread, at `endpoint_in(directory)`. `options` are of `PrefillConfig`."""
    links: list[Meddler] = []

    def wrapped(channel: Channel) -> Channel:
        links.append(Meddler(channel))
        return links[0]

    model = EngineConfig(target=target, dtype="float32", threads=1, kv_slots=4096, max_rows=ROWS)
    given = {"segment_bytes": 1 << 16, **options}
    with prefill_worker(model, endpoint_in(directory), wrapped, **given) as worker:
        yield worker, links[0]


# -- a target


def handed(target: Path, directory: Path, **config: Any) -> Engine:
    """Its prompts are computed by the worker there."""
    return make_engine(target, prefill_pool=(endpoint_in(directory),), prefill_threshold="1", **config)


def submit(engine: Engine, seed: int = 0) -> list[Sample]:
    given = zip(prompts(seed), PARAMS, strict=True)
    return [sample for tokens, params in given for sample in engine.submit(tokens, params)]


def finish(engine: Engine, samples: Sequence[Sample]) -> list[list[int]]:
    """The target's slots are all in order after each step."""
    while engine.busy:
        engine.step()
        engine.check()
    return [sample.token_ids for sample in samples]


def forget(scheduler: Scheduler) -> None:
    """What it knows of earlier prompts."""
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

    eventually(stepped, pause=0.01)


def reports(samples: Iterable[Sample]) -> list[HandOverReport]:
    return [report for sample in samples for report in sample.request.stats.handovers]


def outcomes(samples: Iterable[Sample]) -> dict[str, int]:
    return Counter(report.outcome for report in reports(samples))
