"""The prefill worker: what it hands over is what a direct forward writes, whatever else runs, ends or fails."""

from itertools import product
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from prefill_rig import LEASE, Client, PrefillRig, executor_of, prompt
from sizes import sized

from pilotfish.core.cache.slots import Slots
from pilotfish.core.prefilling.prefill_messages import OrderDone, OrderFailed, PrefillLoad, Release, Renewal, Taken
from pilotfish.core.prefilling.prefill_orders import TakenOrder
from pilotfish.core.prefilling.segments import LEAST_SEGMENT, KVLayout
from pilotfish.core.scheduling.executor import LayerProgress, Outcome
from pilotfish.errors import EngineError
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.feature_tap import FeatureTap
from pilotfish.model.loading.loader import load_model
from pilotfish.wire.channel import Received
from pilotfish.workers import export
from pilotfish.workers import prefill as worker
from pilotfish.workers.export import split
from pilotfish.workers.records import PrefillRecord


@pytest.fixture
def rig(llama: Path) -> PrefillRig:
    return PrefillRig(llama)


@pytest.fixture
def target(rig: PrefillRig) -> Client:
    return Client(rig)


# -- what is handed over


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 300])
def test_what_is_handed_over_is_what_a_forward_writes(rig: PrefillRig, target: Client, length: int) -> None:
    target.order(1, prompt(length))
    rig.rest()
    taken = target.take()
    target.assert_whole(1)
    (done,) = rig.heard(target.peer, OrderDone)
    assert (done.handover, done.segments, done.cached) == (1, taken, 0)
    rig.assert_idle()


def test_kv_of_8_bits_is_handed_over_with_its_scales(llama: Path) -> None:
    rig = PrefillRig(llama, kv_dtype="int8")
    assert len(rig.identity.layout.planes) == 4
    target = Client(rig)
    target.order(1, prompt(150), first=20)
    target.gets(1)


@pytest.mark.parametrize("first", [0, 70])
def test_features_are_handed_over_like_a_layer(llama: Path, first: int) -> None:
    tap = FeatureTap((0, 2), 6, lambda states: states[:, ::24].contiguous(), "every 24th")
    rig = PrefillRig(llama, executor=executor_of(llama, 4000, tap=tap))
    assert (rig.identity.layout.layers, rig.identity.layout.features) == (3, 24)
    target = Client(rig)
    target.order(1, prompt(150), first)
    target.gets(1)
    rig.assert_idle()


def test_tenants_and_salts_share_nothing(llama: Path) -> None:
    rig, tokens = PrefillRig(llama), prompt(100)
    clients = [Client(rig, b"1"), Client(rig, b"2", "a"), Client(rig, b"3", "b"), Client(rig, b"4", "b")]
    for client in clients:
        client.order(1, tokens, salt=b"s" * 16)
        client.order(2, tokens, salt=b"t" * 16)
        client.order(3, tokens)
        rig.rest()
        client.take()
    cached = [[done.cached for done in rig.heard(client.peer, OrderDone)] for client in clients]
    assert cached == [[0, 0, 0], [0, 0, 0], [0, 0, 0], [99, 99, 99]]


# -- layer by layer


class Midway(LayerProgress):
    """Exports as far as it goes whenever a layer is counted."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.rig: PrefillRig | None = None
        self.segments: list[int] = []  # after each layer
        self.fails_after = layers

    def wrote(self, layer: int) -> None:
        super().wrote(layer)
        assert self.rig is not None
        self.rig.export()
        self.segments.append(sum(order.segments for order in self.rig.machine.orders))
        if layer == self.fails_after:
            raise RuntimeError("a device was lost")


@pytest.fixture
def midway(llama: Path) -> PrefillRig:
    """A worker whose exporter runs within its forwards, after each layer; a layer is a segment."""
    executor = TorchExecutor(load_model(llama, torch.float32, torch.device("cpu"), eager=True), 1000)
    progress = executor.progress = Midway(executor.progress.layers)
    progress.rig = PrefillRig(llama, slots=1000, executor=executor, segment_bytes=512 * 64)
    return progress.rig


def progress_of(rig: PrefillRig) -> Midway:
    assert isinstance(rig.progress, Midway)
    return rig.progress


def test_layers_are_sent_while_those_above_are_computed(midway: PrefillRig) -> None:
    target = Client(midway)
    target.order(1, prompt(192))
    midway.rest()
    assert progress_of(midway).segments == [1, 2, 3, 4, 5, 6]  # three chunks of two layers
    target.take()
    assert midway.heard(target.peer, OrderDone) and not midway.exporter.turn()
    midway.turns()
    midway.assert_idle()


def test_a_layer_is_not_sent_before_the_emulated_device_would_have_it(midway: PrefillRig) -> None:
    target, progress = Client(midway), progress_of(midway)
    target.order(1, prompt(64))
    progress.hold(midway.now, 2.0)
    progress.reset, kept = lambda: None, progress.reset  # type: ignore[method-assign]
    midway.worker.turn(0.0)
    assert progress.segments == [0, 0] and len(target.references()) == 0
    kept()
    midway.export()  # its forward has ended
    assert len(target.references()) == 2


def test_a_forward_that_fails_midway_fails_its_orders_alone(midway: PrefillRig) -> None:
    target, progress = Client(midway), progress_of(midway)
    target.order(1, prompt(100))
    midway.turns()
    progress.fails_after = 0
    midway.rest()
    (failed,) = midway.heard(target.peer, OrderFailed)
    assert (failed.handover, failed.busy) == (1, False)
    assert failed.reason == "a forward failed: RuntimeError: a device was lost"
    progress.fails_after = progress.layers
    target.order(2, prompt(64, seed=1))
    midway.rest()
    target.say(Taken(2, [0, 1]))
    assert [done.handover for done in midway.heard(target.peer, OrderDone)] == [2]
    midway.assert_idle()


# -- ends


def test_an_order_that_was_released_is_computed_no_more(rig: PrefillRig, target: Client) -> None:
    rows = list[int]()
    rig.worker.observe = lambda record: rows.append(record.rows)
    target.order(1, prompt(500))
    target.order(2, prompt(70, seed=1))
    rig.turns(2)
    target.take()
    target.say(Release(1))
    target.gets(2)
    assert sum(rows) == 2 * 64 + 70
    rig.assert_idle()
    target.order(3, prompt(500))  # what was computed of it is kept
    rig.turns()
    assert rig.machine.orders[0].cached == 2 * 64


def test_a_commit_that_fails_ends_its_orders(rig: PrefillRig, target: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    target.order(1, prompt(30))
    monkeypatch.setattr(rig.executor, "execute", lambda *_: Outcome(np.zeros(0, np.int64)))  # no token
    rig.rest()
    assert rig.heard(target.peer, OrderFailed)
    rig.assert_idle()


def test_kv_that_is_not_finite_is_handed_over_as_it_is(rig: PrefillRig, target: Client) -> None:
    """The target would compute the same."""
    for layer in rig.executor.kv:
        layer.keys.fill_(torch.nan)  # of slots that nobody has written
    target.order(1, prompt(70))
    target.gets(1)


def test_what_is_held_is_told_of_when_it_ends(rig: PrefillRig, target: Client) -> None:
    leases, forwards = list[TakenOrder](), list[PrefillRecord]()
    rig.shared.observe_lease, rig.worker.observe = leases.append, forwards.append
    target.order(1, prompt(100))
    rig.now += 1.0
    rig.turns()
    rig.now += 2.0
    rig.rest()
    rig.now += 4.0
    target.take()
    target.say(Release(1))
    size = 100 * rig.identity.layout.token_bytes * rig.identity.layout.layers
    (told,) = leases
    assert (told.ordered, told.started, told.computed, told.ended) == (100.0, 101.0, 103.0, 107.0)
    assert (len(told.tokens), told.cached, told.size, told.outcome) == (100, 0, size, "released")
    assert [(f.rows, f.handovers, f.completed) for f in forwards] == [(64, 1, 0), (36, 1, 1)]


# -- memory


def test_slots_that_are_still_to_be_exported_are_nobody_elses(llama: Path) -> None:
    """Nor is their KV overwritten when the cache evicts it."""
    rig = PrefillRig(llama, slots=400, places=4, segment_bytes=1 << 14)
    lazy, busy = Client(rig, b"lazy"), Client(rig, b"busy")
    lazy.order(1, prompt(190))
    rig.rest()
    for handover in range(1, 6):
        busy.order(handover, prompt(180, seed=handover))
        busy.turns(60)
        busy.assert_whole(handover)
    while lazy.take():
        rig.turns()
    lazy.assert_whole(1)
    assert rig.worker.scheduler.preemptions == 0
    rig.assert_idle()


@pytest.mark.parametrize("cached", [True, False])
def test_an_order_whose_request_is_preempted_comes_once(llama: Path, cached: bool) -> None:
    """What was exported is not exported again, and it is not computed by fewer tokens than none."""
    rig = PrefillRig(llama, rows=64, cached=cached)
    target = Client(rig)
    target.order(1, prompt(300))
    rig.turns(2)
    target.take()
    rig.worker.scheduler._preempt()
    rig.worker._max_rows = 100  # its next chunks end elsewhere
    for pending in (172, 100, 0) if not cached else (72, 0):
        rig.turns()
        assert [order.pending for order in rig.machine.orders] == ([pending] if pending else [0])
    target.take()
    target.assert_whole(1)
    assert len(rig.heard(target.peer, OrderDone)) == 1
    rig.assert_idle()


def test_requests_are_preempted_where_a_prompt_is_held_twice(llama: Path) -> None:
    """Two targets order the same at a time, and one takes nothing: its copy is held, and so are the cache's slots that
    its request has ended with. A third order, for which these were free, waits until its lease ends."""
    rig = PrefillRig(llama, slots=600, rows=64, places=8, segment_bytes=1 << 14)
    quick, lazy, third = (Client(rig, peer) for peer in (b"quick", b"lazy", b"third"))
    quick.order(1, prompt(200))
    lazy.order(1, prompt(200))
    while quick.numbers.get(1) is None or not len(rig.worker.scheduler.cache.slots):
        rig.turns()
        quick.take()
    third.order(1, prompt(380, seed=1))
    third.turns(40)
    assert rig.worker.scheduler.preemptions == 1
    assert all(order.pending >= 0 for order in rig.machine.orders)
    rig.now += LEASE + 0.1
    for peer in (b"quick", b"third"):
        rig.say(peer, Renewal([1]))
    rig.shared.tick()
    third.turns(40)
    third.assert_whole(1)
    quick.assert_whole(1)
    rig.rest()
    rig.assert_idle()


def test_every_running_order_has_a_row(rig: PrefillRig, target: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a token has come to take so long that a forward should have fewer."""
    monkeypatch.setattr(worker, "LEAST_ROWS", 4)
    for handover in range(1, 11):
        target.order(handover, prompt(3, seed=handover))
    rig.worker._take_orders()
    rig.machine.token_seconds = 1.0
    target.gets(*range(1, 11))
    rig.assert_idle()


def test_the_beginning_of_what_is_to_be_exported_is_held_too(llama: Path) -> None:
    """The cache cannot evict it while what follows is held: it must not count as slots that can be had."""
    rig = PrefillRig(llama, slots=400, places=2, segment_bytes=1 << 13)
    lazy, busy = Client(rig, b"lazy"), Client(rig, b"busy")
    lazy.order(1, prompt(190), first=150)
    rig.rest()
    assert rig.worker._held.slots
    busy.order(1, prompt(250, seed=1))
    rig.turns(5)
    assert not busy.take()
    while lazy.take():
        rig.turns()
    lazy.assert_whole(1)
    busy.turns(200)
    busy.assert_whole(1)
    rig.assert_idle()


def test_an_order_that_ends_while_it_is_copied_leaves_its_place(
    rig: PrefillRig, target: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = rig.exporter.read_layers

    def released(slots: Slots, layers: range, out: NDArray[np.uint8]) -> None:
        target.say(Release(1))
        read(slots, layers, out)

    monkeypatch.setattr(rig.exporter, "read_layers", released)
    target.order(1, prompt(100))
    rig.rest()
    assert not target.references()
    rig.assert_idle()


def test_kv_that_cannot_be_copied_fails_its_order(rig: PrefillRig, target: Client) -> None:
    read_layers = rig.exporter.read_layers
    rig.exporter.read_layers = Mock(side_effect=OSError("a bus error"))
    target.order(1, prompt(100))
    rig.rest()
    assert "a bus error" in rig.heard(target.peer, OrderFailed)[0].reason
    rig.exporter.read_layers = read_layers
    target.order(2, prompt(100))
    target.gets(2)
    rig.assert_idle()


def test_a_failing_exporter_ends_the_worker(rig: PrefillRig, target: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.exporter, "_advance", lambda _: 1 / 0)
    rig.exporter.start()
    target.order(1, prompt(10))
    with pytest.raises(EngineError, match="exporting thread failed: division by zero"):
        rig.worker.run()
    rig.exporter.close()


# -- what comes from elsewhere


def test_frames_that_are_none_cost_nothing(rig: PrefillRig, target: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    target.order(1, prompt(100))
    monkeypatch.setattr(export, "FRAME_BASE", 0)
    for frame in (b"", b"\x00", b"\xff" * 100, b"\x81\xa4type\xa5order", bytes(1 << 25)):
        rig.shared.receive(Received(target.peer, frame))
        rig.shared.receive(Received(b"a stranger", frame))
    target.gets(1)
    assert rig.machine._targets[target.peer].malformed == 5
    assert not rig.sent[b"a stranger"]


def test_a_forward_takes_no_longer_than_half_a_second_as_far_as_is_known(llama: Path) -> None:
    rig = PrefillRig(llama, rows=2048)
    rows = list[int]()
    rig.worker.observe = lambda record: rows.append(record.rows)
    target = Client(rig)
    target.order(1, prompt(1500))
    rig.turns()
    rig.machine.token_seconds = 1e-3
    rig.turns()
    rig.machine.token_seconds = 1.0
    rig.turns()
    assert rows == [256, 500, 128]
    target.say(Renewal([1]))
    assert rig.heard(target.peer, PrefillLoad)[0].queued_tokens == 1500 - sum(rows)


# -- parts


def test_segments_are_neither_small_nor_large() -> None:
    for layers, tokens, segment_bytes in product((1, 2, 7, 32), (1, 7, 64, 100, 1000), (1 << 14, 1 << 18, 1 << 20)):
        layout = KVLayout(layers, 0, 4, [256, 256])
        parts, size = list(split(layout, tokens, segment_bytes)), layout.token_bytes
        starts = [(part.layers.start, part.tokens.start) for part in parts]
        assert starts == sorted(starts)
        sizes = [len(part.layers) * len(part.tokens) * size for part in parts]
        if segment_bytes >= 2 * LEAST_SEGMENT and layers * tokens * size >= LEAST_SEGMENT:
            assert min(sizes) >= LEAST_SEGMENT
        elif segment_bytes >= 2 * LEAST_SEGMENT:
            assert len(parts) == 1


@given(
    st.builds(
        KVLayout,
        layers=st.integers(2, 40),
        first_head=st.just(0),
        heads=st.integers(1, 16),
        planes=st.lists(st.integers(4, 256), min_size=2, max_size=4),
        features=st.sampled_from([0, 8, 16384]),
    ),
    st.integers(1, 3000),
    st.integers(15, 20).map(lambda bits: 1 << bits),
)
@example(KVLayout(1, 0, 5, [256, 256]), 819, 1 << 20)  # 409.6 tokens fit
@example(KVLayout(3, 0, 1, [4, 157]), 272, 1 << 17)  # two of three layers fit
def test_parts_cover_a_chunk_once_and_fit_into_places(layout: KVLayout, tokens: int, segment_bytes: int) -> None:
    parts = list(split(layout, tokens, segment_bytes))
    covered = [(layer, token) for part in parts for layer in part.layers for token in part.tokens]
    assert covered == sorted(covered, key=lambda one: one[0]) and len(set(covered)) == len(covered)
    assert len(covered) == layout.layers * tokens
    assert max(len(part.tokens) * layout.bytes_of(part.layers) for part in parts) <= segment_bytes
    of_kv = [part for part in parts if part.layers.stop <= layout.of_kv.stop]
    sizes = [len(part.layers) * len(part.tokens) * layout.token_bytes for part in of_kv]
    assert len(of_kv) == 1 or min(sizes) >= min(LEAST_SEGMENT, segment_bytes) / 3
    features = [part.layers for part in parts if part.layers.stop > layout.of_kv.stop]
    assert all(layers == range(layout.layers - 1, layout.layers) for layers in features)


# -- all of it together


@pytest.mark.parametrize("seed", sized([1, 3], range(8)))
def test_whatever_targets_do_nothing_leaks_and_all_that_comes_is_right(llama: Path, seed: int) -> None:
    """Little memory, few slots, prompts that begin alike; targets that order, take, dawdle, release and fall silent."""
    rng = np.random.default_rng(seed)
    rig = PrefillRig(llama, slots=500, rows=48, places=6, segment_bytes=1 << 14, cached=seed != 3)
    clients = [Client(rig, bytes([65 + n])) for n in range(3)]
    numbers = iter(range(1, 10_000))
    silent, whole = rng.integers(3), 0
    for turn in range(300):
        rig.now += 0.1
        client = clients[rng.integers(3)]
        live = {order.handover for order in rig.machine.orders if order.peer == client.peer}
        match rng.integers(8):
            case 0 | 1:
                tokens = [*prompt(int(rng.integers(0, 200)), seed=7), *prompt(int(rng.integers(1, 90)), seed=turn)]
                client.order(next(numbers), tokens, first=int(rng.integers(0, len(tokens))))
            case 2 if live:
                client.say(Release(int(rng.choice(sorted(live)))))
            case 3 | 4 | 5:
                client.take()
        for index, other in enumerate(clients):
            if index != silent or turn < 100:
                other.say(Renewal([order.handover for order in rig.machine.orders if order.peer == other.peer]))
        rig.shared.tick()
        rig.worker.turn(0.0)
        for _ in range(rng.integers(4)):
            rig.exporter.turn()
        rig.worker.check()
        for other in clients:
            for done in rig.heard(other.peer, OrderDone):
                other.take()
                other.assert_whole(done.handover)
                whole += 1
    assert whole > 10 and rig.worker.scheduler.preemptions == 0
    rig.now += 3 * LEASE
    rig.shared.tick()
    rig.rest()
    rig.assert_idle()
