"""What a draft makes of the features that targets send, honest or not."""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from rig import HELLO, IDENTITY, SMALL, make_open, prompt

from pilotfish.core.cache.prefix_cache import PrefixCache
from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.drafting import messages
from pilotfish.core.drafting.draft_machine import DraftMachine
from pilotfish.core.drafting.draft_sessions import DraftSession, SessionKey, SessionTable
from pilotfish.core.features.feature_frames import COUNTING, FEATURE_DROPS, FeatureNeed, FeaturePiece, frames_of
from pilotfish.core.features.features import FEATURE_TYPES, Features, coded
from pilotfish.core.peers.fields import Peer

WIDTH, SLOTS = 4, 40
NEED = FeatureNeed(("projection" * 3, "projection of two"), WIDTH)
OFFER = messages.FeatureOffer(NEED.digests[1], WIDTH, "float32")
TARGET = b"target"


class HeadMachine(DraftMachine):
    """A trained head's, of few slots."""

    def __init__(self, need: FeatureNeed | None = NEED) -> None:
        pool = SlotPool(SLOTS)
        super().__init__(IDENTITY, SessionTable(pool, PrefixCache(pool)), SMALL, 1000, features=need)
        self.receive(TARGET, replace(HELLO, features=OFFER), 0.0)

    def said(self, kind: type[messages.ToTarget], peer: Peer = TARGET) -> list[Any]:
        """Messages of a kind, in order; all are forgotten."""
        said = [o.message for o in self.outbox if o.peer == peer and isinstance(o.message, kind)]
        self.outbox.clear()
        return said

    def session(self, number: int = 1) -> DraftSession:
        session = self.table.get(SessionKey(TARGET, number))
        assert session is not None
        return session

    def drops(self) -> dict[str, int]:
        """As it tells them."""
        self.tick(self._reported + 1.0)
        load = self.said(messages.Load)[-1]
        assert messages.FEATURES in load.capabilities and set(load.own_feature_drops) <= set(FEATURE_DROPS)
        drops: dict[str, int] = load.own_feature_drops
        return drops


def told(first: int, count: int) -> Features:
    return np.arange(first, first + count, dtype=np.float32)[:, None] + np.arange(WIDTH, dtype=np.float32)


def frame(first: int, count: int, session: int = 1, generation: int = 1, kind: Any = "float32") -> messages.FeatureRows:
    piece = FeaturePiece(session, generation, first, np.zeros(count, np.int32), fresh=True)
    (made,) = frames_of([piece], coded(told(first, count), kind), kind)
    return made


def resigned(message: messages.FeatureRows, **changes: Any) -> messages.FeatureRows:
    """With other fields, and the digest of those."""
    changed = replace(message, **changes)
    return replace(changed, digest=changed.digested())


@pytest.fixture
def machine() -> HeadMachine:
    machine = HeadMachine()
    machine.receive(TARGET, make_open(prompt(8), max_length=30), 0.0)
    machine.outbox.clear()
    return machine


@pytest.mark.parametrize(
    ("offer", "told"),
    [
        (None, "offers none"),
        (replace(OFFER, width=8), "offers 8 numbers, projection projection o"),
        (replace(OFFER, digest="another\x1b"), r"offers 4 numbers, projection another\x1b"),
        (replace(OFFER, dtype="float4"), "as one of float32, bfloat16, fp8, int8; the target sends float4"),
    ],
)
def test_targets_without_these_features_are_refused(offer: messages.FeatureOffer | None, told: str) -> None:
    machine = HeadMachine()
    machine.outbox.clear()
    machine.receive(b"other", replace(HELLO, features=offer), 0.0)
    (refusal,) = machine.said(messages.Refuse, b"other")
    assert refusal.session == messages.CONNECTION and refusal.reason.isprintable() and told in refusal.reason
    assert refusal.reason.startswith("this draft needs features of 4 numbers, projection projectionpr or projection o")


def test_a_draft_without_a_need_says_so_and_takes_any_target() -> None:
    machine = HeadMachine(need=None)
    (load,) = machine.said(messages.Load)
    assert messages.FEATURES not in load.capabilities
    machine.receive(TARGET, make_open(prompt(8)), 0.0)
    machine.receive(TARGET, frame(0, 4), 0.0)
    assert machine.session().features is None


@pytest.mark.parametrize("kind", FEATURE_TYPES)
def test_rows_get_the_features_that_came(machine: HeadMachine, kind: str) -> None:
    machine.receive(TARGET, frame(0, 7, kind=kind), 1.5)
    log = machine.session().features
    assert log is not None and np.allclose(log.of_rows(1, 7), told(0, 7), rtol=0.07)
    assert machine.session().touched == 1.5 and machine.session().num_pending == 8 and not machine.drops()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        *((replace(frame(0, 4), rows=bytes(64)), "damaged"), (replace(frame(0, 4), first=1), "damaged")),
        *((replace(frame(0, 4), digest=bytes(8)), "damaged"), (frame(0, 4, session=2), "stale")),
        *((frame(0, 4, generation=2), "stale"), (frame(27, 4), "beyond"), (frame(2**31 - 1, 1), "beyond")),
        (resigned(frame(0, 4), rows=bytes(63)), "misshapen"),
        (resigned(frame(0, 4), scales=bytes(16)), "misshapen"),
        (resigned(frame(0, 4), dtype="int8"), "misshapen"),
    ],
)
def test_frames_of_no_use_are_counted(machine: HeadMachine, message: messages.FeatureRows, reason: str) -> None:
    machine.receive(TARGET, message, 0.0)
    log = machine.session().features
    assert log is not None and not len(log) and machine.drops() == {reason: 1}


def test_numbers_that_are_not_finite_are_no_features(machine: HeadMachine) -> None:
    rows = told(0, 3)
    rows[1, 2] = np.inf
    machine.receive(TARGET, resigned(frame(0, 3), rows=rows.tobytes()), 0.0)
    log = machine.session().features
    assert log is not None and np.isnan(log.of_rows(2, 1)).all() and (log.of_rows(3, 1) == told(2, 1)).all()


def test_tenants_together_keep_about_as_many_as_there_are_slots(machine: HeadMachine) -> None:
    """One that comes has its share of them, however many another has; who ends sessions has room again."""
    machine.receive(TARGET, make_open(prompt(8), session=2, max_length=30), 0.0)
    for number in (1, 2):
        machine.receive(TARGET, frame(0, 20, session=number), 0.0)
    machine.receive(TARGET, frame(20, 1), 1.0)
    assert machine.drops() == {"full": 1}
    machine.receive(b"other", replace(HELLO, features=OFFER), 1.0)
    machine.receive(b"other", make_open(prompt(8), max_length=30), 1.0)
    machine.receive(b"other", frame(0, SLOTS // 2), 1.0)
    machine.receive(b"other", frame(SLOTS // 2, 1), 1.0 + COUNTING)
    assert machine._targets[b"other"].feature_drops == {"full": 1}
    machine.receive(TARGET, messages.Close(2, 1), 1.0)
    machine.receive(b"other", messages.Close(1, 1), 1.0)
    machine.receive(TARGET, frame(20, 5), 1.0 + 2 * COUNTING)
    assert machine.drops() == {"full": 1}


def test_tenants_without_sessions_are_forgotten(machine: HeadMachine) -> None:
    """Without keys each target that connects is one."""
    for number in range(20):
        target = b"target %d" % number
        machine.receive(target, replace(HELLO, features=OFFER), number)
        machine.receive(target, make_open(prompt(8), max_length=30), number)
        machine.receive(target, frame(0, 2), number)
        machine.receive(target, messages.Close(1, 1), number)
    assert not any(target.feature_drops for target in machine._targets.values())
    assert len(machine._intake._counted) == len(machine._intake._left) == 1


def compute(machine: HeadMachine) -> None:
    """All that can be computed."""
    while level := machine.next_level(0.0):
        machine.table.allocate(level)
        machine.table.computed(level)


def test_features_of_tokens_whose_kv_is_there_are_not_needed(machine: HeadMachine) -> None:
    machine.receive(TARGET, frame(0, 7), 0.0)
    compute(machine)
    assert len(machine.session().slots) == 8
    machine.receive(TARGET, messages.Close(1, 1), 0.0)
    machine.receive(TARGET, make_open([*prompt(8), 5, 6], session=2), 0.0)
    assert machine.said(messages.Skip) == [messages.Skip(2, 1, 7)]
    machine.receive(TARGET, frame(7, 2, session=2), 0.0)
    assert len(machine.session(2).slots) == 8 and machine.session(2).num_pending == 2


def test_a_session_that_lost_its_kv_is_opened_anew(machine: HeadMachine) -> None:
    """Features that it has forgotten do not come again by themselves."""
    machine.receive(TARGET, frame(0, 7), 0.0)
    compute(machine)
    machine.table.evict(machine.session())
    machine.receive(TARGET, frame(7, 1), 0.0)
    assert machine.drops() == {"stale": 1}
    machine.receive(TARGET, messages.Commit(1, 1, 8, [5], 60), 0.0)
    (resync,) = machine.said(messages.Resync)
    assert resync.session == 1 and len(machine.table) == 0
    machine.receive(TARGET, make_open([*prompt(8), 5], generation=2), 0.0)
    assert machine.said(messages.Skip) == [messages.Skip(1, 2, 7)]


def test_the_last_frame_that_came_is_told(machine: HeadMachine) -> None:
    for number in (4, 6):
        machine.receive(TARGET, replace(frame(0, 1), number=number), 0.0)
    machine.tick(1.0)
    assert machine.said(messages.Load)[-1].own_features == 6
