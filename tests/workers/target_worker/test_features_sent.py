"""What a target sends of features: to whom, in which order, how much at a time."""

import numpy as np
import pytest
from msgspec.structs import replace
from side import LIMITS, Side, load, make_request

from pilotfish.core.cache.slots import GONE, Slots
from pilotfish.core.drafting.messages import FEATURES, Commit, FeatureOffer, FeatureRows, Hello, Open, Skip
from pilotfish.core.features import feature_frames
from pilotfish.core.features.feature_frames import FRESH, LOST_AFTER, SESSION_BYTES, STEP_BYTES
from pilotfish.core.features.features import Features, decoded_rows
from pilotfish.core.scheduling.request import Request

WIDTH = 1024
ROW = 4 * WIDTH
WANTS = load(capabilities=[FEATURES])


class Computed:
    """A target in whose slots the feature is the slot's number."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def features(self, slots: Slots) -> Features:
        self.asked.append(slots.tolist())
        return np.repeat(slots.astype(np.float32)[:, None], WIDTH, axis=1)


class FeatureSide(Side):
    """Its requests' tokens have the slots 1000 * id and on."""

    def __init__(self, pools: int = 1, dtype: str = "float32") -> None:
        self.computed = Computed()
        super().__init__(pools, FeatureOffer("projection", WIDTH, dtype), self.computed.features)
        for pool in self.pools:
            self.hear(WANTS, pool.peer)

    def begin(self, request: Request, computed: int = 0) -> Open:
        request.slots[:] = 1000 * request.id + np.arange(len(request.slots))
        request.num_computed = computed
        self.propose(request)
        (opened,) = self.said(Open)
        return opened

    def step(self, *requests: Request) -> None:
        """Each commits a token; all but the last have features then."""
        for request in requests:
            request.extend([7])
            request.num_computed = len(request.tokens) - 1
            self.drafter.commit(request, [7])
        self.flush()

    def frames(self, peer: bytes = b"0") -> list[FeatureRows]:
        return self.said(FeatureRows, peer)


def positions(frame: FeatureRows) -> list[int]:
    """Of a frame whose bytes are what its digest says: the slots of its rows, without their thousands."""
    assert frame.digest == frame.digested()
    rows = decoded_rows(frame.rows, frame.scales, frame.dtype, WIDTH)
    assert (rows == rows[:, :1]).all()
    found = [int(value) % 1000 for value in rows[:, 0].tolist()]
    assert found == list(range(frame.first, frame.first + len(found)))
    return found


@pytest.fixture
def side() -> FeatureSide:
    return FeatureSide()


def test_features_come_right_before_their_commit(side: FeatureSide) -> None:
    first, second = make_request(1), make_request(2)
    for request in (first, second):
        side.begin(request)
    side.step(first, second)
    kinds = [(type(message), message.session) for _, message in side.posted if not isinstance(message, Hello)]
    assert kinds == [(FeatureRows, 1), (Commit, 1), (FeatureRows, 2), (Commit, 2)]
    assert [positions(frame) for frame in side.frames()] == [[0, 1, 2, 3, 4]] * 2
    assert len(side.computed.asked) == 1  # once a step
    side.step(first)
    assert [positions(frame) for frame in side.frames()] == [[5]]


def test_features_come_after_the_open_of_their_session(side: FeatureSide) -> None:
    """Which is in the same message, where its tree was asked for in the step before."""
    request = make_request(1)
    request.slots[:] = 1000 + np.arange(len(request.slots))
    side.drafter.propose([request], LIMITS)
    side.step(request)
    kinds = [type(message) for _, message in side.posted if not isinstance(message, Hello)]
    assert kinds == [Open, FeatureRows, Commit]


def test_a_target_that_offers_none_sends_none() -> None:
    side = Side()
    side.hear(WANTS)
    side.propose(request := make_request(1))
    side.commit(request, 7)
    assert side.said(Commit) and not side.said(FeatureRows)


def test_only_pools_that_want_features_get_them() -> None:
    side = FeatureSide(pools=2)
    side.hear(load(), b"1")
    requests = [make_request(number) for number in (1, 2)]
    side.propose(*requests)
    for request in requests:
        request.slots[:] = 1000 * request.id + np.arange(len(request.slots))
    side.step(*requests)
    wanting = [request.id for request in requests if side.drafter.pool_of(request) is side.pools[0]]
    (asked,) = side.computed.asked
    assert {slot // 1000 for slot in asked} == set(wanting)
    assert len(side.frames()) == len(wanting) and not side.frames(b"1")


def test_a_prompt_comes_in_pieces_after_the_commits_of_others(side: FeatureSide) -> None:
    long, short = make_request(1, prompt=900), make_request(2)
    side.begin(short)
    side.begin(long, computed=FRESH + 200)
    side.step(short)
    kinds = [(type(message), message.session) for _, message in side.posted if not isinstance(message, Hello)]
    assert kinds == [(FeatureRows, 1), (Commit, 1), (FeatureRows, 2)]
    most = SESSION_BYTES // ROW
    assert [positions(frame) for frame in side.frames()] == [list(range(5)), list(range(most))]
    sent = most
    while (frames := (side.flush(), side.frames())[1]) != []:
        (piece,) = map(positions, frames)
        assert piece[0] == sent and len(piece) <= most
        sent = piece[-1] + 1
    assert sent == FRESH + 200


def test_all_prompts_together_send_so_much_a_step(side: FeatureSide) -> None:
    for number in (1, 2, 3, 4):
        side.begin(make_request(number, prompt=900), computed=899)
    side.flush()
    frames = side.frames()
    assert sum(len(frame.rows) for frame in frames) == STEP_BYTES
    assert [frame.session for frame in frames] == [1, 2]  # older ones first


def test_a_slow_line_gets_no_more_of_prompts_than_fits(side: FeatureSide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_frames, "WINDOW", SESSION_BYTES + 1)
    side.begin(make_request(1, prompt=900), computed=899)
    side.begin(short := make_request(2, prompt=3))
    for _ in range(3):
        side.flush()
    assert [frame.number for frame in side.frames()] == [1, 2]
    side.step(short)
    (frame,) = side.frames()  # commits' features wait for nobody, and nobody waits for them
    assert (frame.number, frame.session) == (3, 2) and side.pools[0].features.under_way == 2 * SESSION_BYTES
    side.hear(replace(WANTS, own_features=2))
    for _ in range(3):
        side.flush()
    assert [frame.number for frame in side.frames()] == [4, 5]
    for passed, sent in ((LOST_AFTER - 0.1, False), (0.2, True)):  # what is never answered counts no longer
        side.now += passed
        side.hear(WANTS)
        side.flush()
        assert bool(side.frames()) == sent


def test_what_the_draft_has_is_skipped(side: FeatureSide) -> None:
    opened = side.begin(make_request(1, prompt=300), computed=250)
    side.hear(Skip(opened.session, opened.generation, 240))
    side.hear(Skip(opened.session, opened.generation, 100))  # late: it changes nothing
    side.hear(Skip(opened.session, opened.generation + 1, 250))
    side.flush()
    assert [positions(frame) for frame in side.frames()] == [list(range(240, 250))]
    assert side.drops() == {"stale_frames": 1}


def test_slots_that_were_given_back_have_none(side: FeatureSide) -> None:
    side.begin(request := make_request(1, prompt=40), computed=30)
    request.slots[:10] = GONE
    request.num_gone = 10
    side.flush()
    assert [positions(frame) for frame in side.frames()] == [list(range(10, 30))]


@pytest.mark.parametrize("kind", ["bfloat16", "fp8", "int8"])
def test_they_are_sent_as_the_offer_says(kind: str) -> None:
    side = FeatureSide(dtype=kind)
    side.begin(request := make_request())
    side.step(request)
    (frame,) = side.frames()
    assert frame.dtype == kind and positions(frame) == [0, 1, 2, 3, 4]
    assert side.pools[0].features.size == len(frame.rows) + len(frame.scales)
