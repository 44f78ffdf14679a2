"""A prefill worker that lies, and messages that are lost, repeated or out of turn: outputs stay what they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from handovers import (
    LENGTHS,
    TRANSPORTS,
    WHOLE,
    Beside,
    Changes,
    beside,
    make_quick,
    outcomes,
    reports,
)
from msgspec.structs import replace
from sizes import paired
from support import make_engine
from workers import eventually

from pilotfish.core.peers.fields import Peer
from pilotfish.core.prefilling.prefill_messages import (
    FromPrefill,
    OrderDone,
    OrderFailed,
    PrefillLoad,
    PrefillOrder,
    SegmentBytes,
    SegmentGone,
    SegmentReady,
    ToPrefill,
    Welcome,
)
from pilotfish.core.prefilling.segments import KVIdentity, SegmentReference
from pilotfish.errors import ModelError
from pilotfish.kv.readers import SharedMemoryReader


@pytest.fixture(scope="module", params=TRANSPORTS)
def shared(request: pytest.FixtureRequest, llama: Path, expected_outputs: list[list[int]]) -> Iterator[Beside]:
    transports = TRANSPORTS[request.param]
    with TemporaryDirectory(prefix="chaos-") as made, pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        with beside(llama, Path(made), expected_outputs, prefill_transports=transports) as found:
            yield found


OVER_SHM, OVER_IPC = (pytest.mark.parametrize("shared", [name], indirect=True) for name in ("shm", "ipc"))


@pytest.fixture
def both(shared: Beside) -> Iterator[Beside]:
    """Over each transport; nobody has heard of the prompts yet."""
    yield shared
    shared.assert_well()


def refused(found: Beside, before: dict[str, int]) -> dict[str, int]:
    """Since then."""
    return {reason: count - before[reason] for reason, count in found.pool.refused.items() if count > before[reason]}


#: Of the three prompts that have a second segment, and of the one that has none.
PARTLY = {"refused": 3, "whole": 1}


# -- references

Told = Callable[[Beside, SegmentReference], SegmentReference]


@dataclass(frozen=True)
class Lie:
    """What is said of a segment in place of the truth, and why it is not used: read from memory, or sent."""

    told: Told
    in_memory: set[str]
    sent: set[str]


def signed(reasons: str, sent: str = "", **changes: Any) -> Lie:
    """By a worker that means it."""
    return _lie(lambda found, r: found.signed(replace(r, **changes)), reasons, sent)


def _lie(told: Told, reasons: str, sent: str = "") -> Lie:
    return Lie(told, set(reasons.split()), set((sent or reasons).split()))


LIES = {
    "without a MAC": _lie(lambda _, r: replace(r, mac=bytes(16)), "forged"),
    "altered": _lie(lambda _, r: replace(r, place=r.place ^ 1), "forged"),
    "signed for somebody else": _lie(lambda _, r: r.signed(bytes(32)), "forged"),
    "of a place that is not there": signed("out_of_range", "gone", place=1 << 30),
    "of the place beside it": _lie(lambda f, r: f.signed(replace(r, place=r.place ^ 1)), "stale content", "gone"),
    "of a later epoch": _lie(lambda f, r: f.signed(replace(r, epoch=r.epoch + 1)), "stale", "gone"),
    "of another layout": signed("layout", layout=bytes(16)),
    "of other tokens": signed("tokens", sequence=bytes(16)),
    "of tokens beyond the last": signed("out_of_range", first=1 << 20),
    "of more tokens": signed("out_of_range", tokens=1 << 20),
    "of layers beyond the last": signed("out_of_range", layer=7),
    "of more bytes": _lie(lambda f, r: f.signed(replace(r, size=r.size + 1)), "out_of_range"),
    "of tokens that came": signed("unexpected", first=0),
    "of a segment that came": signed("unexpected", number=0),
    "of a segment to come": signed("unexpected", number=2),
    "of another content": _lie(lambda f, r: f.signed(replace(r, content=r.content ^ 1)), "content", "gone"),
}


def of_second(found: Beside, told: Told) -> Changes:
    """Changes the reference to the second segment of each hand-over."""

    def change(_: Peer, message: FromPrefill) -> Sequence[FromPrefill]:
        if isinstance(message, SegmentReady) and message.reference.number == 1:
            return [SegmentReady(told(found, message.reference))]
        return [message]

    return change


@pytest.mark.parametrize(("name", "shared"), paired(list(LIES), list(TRANSPORTS)), indirect=["shared"])
def test_references_that_are_not_what_they_should_be(name: str, both: Beside) -> None:
    lie = LIES[name]
    both.link.to_target = of_second(both, lie.told)
    before, samples = dict(both.pool.refused), both.submit()
    both.finish(samples)
    assert outcomes(samples) == PARTLY
    assert all(report.tokens < length - 1 for report, length in zip(reports(samples), LENGTHS[:3], strict=False))
    found, reasons = refused(both, before), lie.sent if both.pool.fetches else lie.in_memory
    assert sum(found.values()) == 3 and found.keys() <= reasons


def test_a_bit_that_flips_in_the_workers_memory(both: Beside) -> None:
    def flip(found: Beside, reference: SegmentReference) -> SegmentReference:
        at = found.arena.plan.place_at(reference.place) + reference.size // 3
        found.arena.memory[at] ^= 4
        return reference

    both.link.to_target = of_second(both, flip)
    before, samples = dict(both.pool.refused), both.submit()
    both.finish(samples)
    assert outcomes(samples) == PARTLY and refused(both, before) == {"content": 3}


@OVER_SHM
@pytest.mark.parametrize(("epochs", "reason"), [(1, "stale"), (0, "content")], ids=["told", "not told"])
def test_memory_that_is_written_while_it_is_read(
    epochs: int, reason: str, both: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the reader has looked at its epoch. Of a worker that does not raise that the content speaks."""
    check, looked = SharedMemoryReader._check_epoch, list[SegmentReference]()

    def checked(reader: SharedMemoryReader, reference: SegmentReference) -> None:
        check(reader, reference)
        if reference.number == 1 and reference not in looked:
            looked.append(reference)
            first = both.arena.plan.place_at(reference.place)
            both.arena.memory[first + reference.size // 2 : first + reference.size] ^= 255
            both.arena._epochs[reference.place] += epochs

    monkeypatch.setattr(SharedMemoryReader, "_check_epoch", checked)
    before, samples = dict(both.pool.refused), both.submit()
    both.finish(samples)
    assert len(looked) == 3
    assert outcomes(samples) == PARTLY and refused(both, before) == {reason: 3}


# -- messages


def _after(kind: type[Any], then: Callable[[Any], Iterable[FromPrefill]]) -> Changes:
    """Puts other messages in the place of the second of its kind, or of one that is about all segments."""

    def change(_: Peer, message: FromPrefill) -> Iterable[FromPrefill]:
        number = getattr(getattr(message, "reference", message), "number", 1)
        return then(message) if isinstance(message, kind) and number == 1 else [message]

    return change


def _nothing(_: Any) -> Sequence[FromPrefill]:
    return []


def _of(message: SegmentReady) -> int:
    return message.reference.handover


MESSAGES: dict[str, tuple[Changes, dict[str, int], dict[str, int]]] = {
    "a segment is lost": (_after(SegmentReady, _nothing), PARTLY, {"unexpected": 3}),
    "a segment is told of twice": (_after(SegmentReady, lambda m: [m, m]), PARTLY, {"unexpected": 3}),
    "the end comes too early": (
        _after(SegmentReady, lambda m: [OrderDone(_of(m), 1, 0, 0.0, 0.0), m]),
        PARTLY,
        {"unexpected": 3},
    ),
    "the end is lost": (_after(OrderDone, _nothing), WHOLE, {}),
    "the end speaks of more": (
        _after(OrderDone, lambda m: [replace(m, segments=m.segments + 1)]),
        {"refused": 4},
        {"unexpected": 4},
    ),
    "the worker cannot go on": (
        _after(SegmentReady, lambda m: [OrderFailed(_of(m), "it hurts"), m]),
        {"failed": 3, "whole": 1},
        {"orders": 3},
    ),
    "the worker has too much to do": (
        _after(SegmentReady, lambda m: [OrderFailed(_of(m), "it hurts", busy=True), m]),
        {"busy": 3, "whole": 1},
        {},
    ),
    "bytes come that nobody asked for": (
        _after(SegmentReady, lambda m: [SegmentBytes(_of(m), 1, memoryview(bytes(8))), m]),
        PARTLY,
        {"unexpected": 3},
    ),
    "a segment is gone": (_after(SegmentReady, lambda m: [SegmentGone(_of(m), 0, "gone"), m]), PARTLY, {"gone": 3}),
    "another hand-over is spoken of": (
        _after(SegmentReady, lambda m: [SegmentReady(replace(m.reference, handover=99)), OrderFailed(99, "?"), m]),
        WHOLE,
        {},
    ),
}


@pytest.mark.parametrize(("name", "shared"), paired(list(MESSAGES), list(TRANSPORTS)), indirect=["shared"])
def test_messages_out_of_turn(name: str, both: Beside) -> None:
    both.link.to_target, ended, reasons = MESSAGES[name]
    before, samples = dict(both.pool.refused), both.submit()
    both.finish(samples)
    assert outcomes(samples) == ended and refused(both, before) == reasons


BYTES: dict[str, tuple[Changes, str]] = {
    "twice": (_after(SegmentBytes, lambda m: [m, m]), "unexpected"),
    "fewer": (_after(SegmentBytes, lambda m: [replace(m, data=m.data[:-1])]), "content"),
    "none": (_after(SegmentBytes, lambda m: [replace(m, data=m.data[:0])]), "content"),
    "others": (_after(SegmentBytes, lambda m: [replace(m, data=memoryview(bytes(len(m.data))))]), "content"),
}


@OVER_IPC
@pytest.mark.parametrize(("change", "reason"), BYTES.values(), ids=list(BYTES))
def test_bytes_that_are_not_those_of_their_segment(change: Changes, reason: str, both: Beside) -> None:
    both.link.to_target = change
    before, samples = dict(both.pool.refused), both.submit()
    both.finish(samples)
    assert outcomes(samples) == PARTLY and refused(both, before) == {reason: 3}


def test_a_frame_that_is_no_message(both: Beside) -> None:
    told = list[FromPrefill]()

    def change(peer: Peer, message: FromPrefill) -> Sequence[FromPrefill]:
        if isinstance(message, SegmentReady) and not told:
            told.append(message)
            both.link.channel.send(peer, b"\xc1")
        return [message]

    both.link.to_target = change
    before, samples = dict(both.pool.refused), both.submit()
    both.finish(samples)
    assert refused(both, before) == {"malformed": 1} and outcomes(samples)["refused"] >= 1


@OVER_SHM
@pytest.mark.parametrize(
    "damage",
    [
        lambda order: replace(order, tokens=[*order.tokens[:5], order.tokens[5] ^ 1, *order.tokens[6:]]),
        lambda order: replace(order, tokens=order.tokens[:-1]),
        lambda order: replace(order, first=order.first + 1),
        lambda order: replace(order, tokens=[1 << 20]),
    ],
    ids=["a token", "its length", "its first token", "all of it"],
)
def test_orders_that_come_damaged(damage: Callable[[PrefillOrder], PrefillOrder], both: Beside) -> None:
    """KV of other tokens has a good checksum, and its references are signed."""

    def change(_: Peer, message: ToPrefill) -> Sequence[ToPrefill]:
        return [damage(message) if isinstance(message, PrefillOrder) and len(message.tokens) > 20 else message]

    both.link.to_worker = change
    before, samples = dict(both.pool.refused), both.submit()
    both.finish(samples)
    assert outcomes(samples)["whole"] == 1
    assert sum(refused(both, before).values()) == 3 and refused(both, before).keys() <= {
        "tokens",
        "orders",
        "unexpected",
    }


# -- whose KV it is


def _welcomed(change: Callable[[KVIdentity], KVIdentity]) -> Changes:
    def changed(_: Peer, message: FromPrefill) -> Sequence[FromPrefill]:
        return [replace(message, identity=change(message.identity)) if isinstance(message, Welcome) else message]

    return changed


def _layout(**changes: Any) -> Callable[[KVIdentity], KVIdentity]:
    return lambda identity: replace(identity, layout=replace(identity.layout, **changes))


IDENTITIES = {
    "other heads": (_layout(first_head=1), "layout: heads 1 to 2, not 0 to 1"),
    "fewer heads": (_layout(heads=1), "layout: heads 0 to 0, not 0 to 1"),
    "more layers": (_layout(layers=3), "layout: 3 layers"),
    "wider planes": (_layout(planes=[256, 256]), "bytes a head"),
    "other facts": (lambda i: replace(i, facts={**i.facts, "weights": "others"}), "weights: others, not"),
}


@OVER_SHM
@pytest.mark.parametrize(("change", "reason"), IDENTITIES.values(), ids=list(IDENTITIES))
def test_a_pool_whose_kv_is_another_ones(
    change: Callable[[KVIdentity], KVIdentity], reason: str, both: Beside, llama: Path
) -> None:
    """A target that starts says so and ends; one that runs goes on without it."""
    both.link.to_target = _welcomed(change)
    assert both.engine.prefills is not None
    with pytest.raises(ModelError, match="prefill_pool: ") as error:
        make_engine(llama, prefill_pool=both.engine.prefills.endpoints, prefill_threshold="1").close()
    assert reason in str(error.value) and "\n" not in str(error.value)
    pool, change = both.pool, both.link.to_target
    both.link.to_target = lambda peer, message: [] if isinstance(message, PrefillLoad) else change(peer, message)
    eventually(lambda: pool.refusal is not None)
    assert pool.refusal is not None and reason in pool.refusal and both.run() == {}
