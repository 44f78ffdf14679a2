"""Tiers: what comes back is what was saved, or nothing; nobody waits for ever, no slot is written after its load."""

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_objects import Clock, failing
from numpy.typing import NDArray
from sizes import paired
from support import eventually, settle

from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS, Key, prefix_keys
from pilotfish.core.cache.slots import Slots
from pilotfish.core.cache.tiers import KVLoad
from pilotfish.kv import tiers as module
from pilotfish.kv.disk import DiskStore
from pilotfish.kv.objects import Damage, ObjectFormat
from pilotfish.kv.tiers import DISK, HOST, HostStore, KVTiers

SHAPE = bytes(32)
SLOTS = 40 * OBJECT_TOKENS
LIMIT = 20.0  # seconds


class Pool:
    """Slots of 8 bytes. `before_read` and `before_write` are called on the copying thread."""

    object_bytes = 8 * OBJECT_TOKENS

    def __init__(self) -> None:
        self.content = np.zeros((SLOTS, 8), np.uint8)
        self.before_read: Callable[[], None] = lambda: None
        self.before_write: Callable[[], None] = lambda: None

    def read(self, slots: Slots) -> NDArray[np.uint8]:
        self.before_read()
        return self.content[slots].flatten()

    def write(self, slots: Slots, data: NDArray[np.uint8]) -> None:
        self.before_write()
        self.content[slots] = data.reshape(OBJECT_TOKENS, 8)[-len(slots) :]


@pytest.fixture
def pool() -> Pool:
    pool = Pool()
    pool.content[:] = np.random.default_rng(0).integers(0, 256, pool.content.shape, np.uint8)
    return pool


Make = Callable[..., KVTiers]


@pytest.fixture
def make(pool: Pool, clock: Clock, tmp_path: Path) -> Iterator[Make]:
    """Tiers over `pool` with room for so many objects; what a test leaves open is closed."""
    made: list[KVTiers] = []

    def tiers(host: int = 0, disk: int = 0) -> KVTiers:
        in_memory = HostStore(host * pool.object_bytes, pool.object_bytes)
        form = ObjectFormat(SHAPE, pool.object_bytes)
        on_disk = DiskStore(tmp_path / "kv", disk * form.file_bytes, form, clock) if disk else None
        made.append(KVTiers(pool, SLOTS, SHAPE, in_memory, on_disk, clock))
        return made[-1]

    yield tiers
    for each in made:
        each.close()


def tokens_of(objects: int, first: int = 0) -> NDArray[np.int64]:
    return np.arange(objects * OBJECT_TOKENS) + first


def slots_of(objects: int, at: int = 0) -> Slots:
    """Not in order: a sequence's slots lie anywhere."""
    return np.random.default_rng(1).permutation(objects * OBJECT_TOKENS).astype(np.int32) + at * OBJECT_TOKENS


def save(tiers: KVTiers, objects: int, first: int = 0, at: int = 0) -> None:
    tokens, slots = tokens_of(objects, first), slots_of(objects, at)
    for place, key in reversed(list(enumerate(prefix_keys(tiers.root(None), tokens)))):
        span = slice(place * OBJECT_TOKENS, (place + 1) * OBJECT_TOKENS)
        tiers.save(key, tokens[span], slots[span])


def saved(tiers: KVTiers, objects: int, **where: Any) -> None:
    save(tiers, objects, **where)
    settle(tiers)


def keys_of(tiers: KVTiers, objects: int, first: int = 0) -> list[Key]:
    return prefix_keys(tiers.root(None), tokens_of(objects, first))


def begin(tiers: KVTiers, objects: int, skipped: int = 0, first: int = 0) -> KVLoad:
    """A load into slots that are far from those that are saved."""
    tokens = tokens_of(objects, first)
    slots = slots_of(objects, 20)[skipped:]
    load = KVLoad(prefix_keys(tiers.root(None), tokens), tokens, slots)
    tiers.load(load)
    return load


def finish(tiers: KVTiers, load: KVLoad) -> int:
    def ended() -> bool:
        tiers.wait()
        tiers.poll()
        return load.count is not None

    eventually(ended)
    assert load.count is not None
    return load.count


def assert_loaded(pool: Pool, load: KVLoad, objects: int, at: int = 0) -> None:
    """What arrived is what was in the slots that were saved."""
    saved = pool.content[slots_of(objects, at)][-len(load.slots) :]
    assert load.count is not None
    assert np.array_equal(pool.content[load.slots[: load.count]], saved[: load.count])


@pytest.mark.parametrize(("skipped", "sizes"), paired([0, 1, 40, 63], [(8, 0, HOST), (0, 8, DISK), (8, 8, HOST)]))
def test_what_was_saved_comes_back(make: Make, pool: Pool, sizes: tuple[int, int, str], skipped: int) -> None:
    host, disk, tier = sizes
    tiers = make(host, disk)
    saved(tiers, 5)
    keys = keys_of(tiers, 6)
    assert tiers.worth_loading(keys, skipped) == 5
    load = begin(tiers, 5, skipped)
    assert finish(tiers, load) == 5 * OBJECT_TOKENS - skipped
    assert_loaded(pool, load, 5)
    assert load.count_by_tier() == {tier: 5 * OBJECT_TOKENS - skipped}
    assert tiers.counts.loaded_tokens[tier] == load.count and tiers.counts.saved == 5


def test_host_memory_spills_to_disk_and_both_are_bounded(make: Make, pool: Pool, tmp_path: Path) -> None:
    tiers = make(2, 4)
    for turn in range(10):
        saved(tiers, 2, first=1000 * turn)
        assert len(tiers._host) <= 2
        assert len(list((tmp_path / "kv").rglob("*.kv"))) <= 4
    found = [tiers.worth_loading(keys_of(tiers, 2, 1000 * t), 0) for t in range(10)]
    assert found == [0] * 7 + [2] * 3  # the last two on disk, and the last one here
    load = begin(tiers, 2, first=7000)
    assert finish(tiers, load) == 2 * OBJECT_TOKENS and set(load.tiers) == {DISK}
    assert_loaded(pool, load, 2)


def test_what_is_in_memory_at_the_end_is_on_disk_at_the_next_start(make: Make, pool: Pool) -> None:
    tiers = make(8, 8)
    tiers.closing()
    save(tiers, 5)
    assert tiers.close()
    tiers = make(8, 8)
    load = begin(tiers, 5)
    assert finish(tiers, load) == 5 * OBJECT_TOKENS and load.tiers == [DISK] * 5
    assert_loaded(pool, load, 5)


# -- faults


@pytest.mark.parametrize("place", [0, 3])
def test_a_flipped_bit_in_memory_ends_what_comes(make: Make, pool: Pool, place: int) -> None:
    tiers = make(8)
    saved(tiers, 5)
    kv = tiers._host.get(keys_of(tiers, 5)[place])
    assert kv is not None
    kv.data[17] ^= 1
    load = begin(tiers, 5)
    assert finish(tiers, load) == place * OBJECT_TOKENS
    assert_loaded(pool, load, 5)
    assert tiers.counts.damaged == 1
    assert tiers.worth_loading(load.keys, 0) == place  # and it is gone


@pytest.mark.parametrize(("place", "harm"), paired([0, 1, 2], ["flipped byte", "short", "gone"]))
def test_a_bad_file_ends_what_comes(make: Make, pool: Pool, tmp_path: Path, place: int, harm: str) -> None:
    tiers = make(0, 8)
    saved(tiers, 3)
    (path,) = (tmp_path / "kv").rglob(f"{keys_of(tiers, 3)[place].hex()}.kv")
    content = path.read_bytes()
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if harm == "short" else content[:-9] + bytes([content[-9] ^ 4]) + content[-8:])
    load = begin(tiers, 3)
    assert finish(tiers, load) == place * OBJECT_TOKENS
    assert_loaded(pool, load, 3)
    assert tiers.worth_loading(load.keys, 0) == place and not path.exists()
    assert tiers.disk is not None
    damaged = {reason: count for reason, count in tiers.disk.counts.damaged.items() if count}
    assert damaged == {"gone": {}, "short": {Damage.SIZE: 1}, "flipped byte": {Damage.CHECKSUM: 1}}[harm]


class Hang:
    """Stands in a thread's way until it is told."""

    def __init__(self) -> None:
        self.reached, self.over = threading.Event(), threading.Event()

    def __call__(self, *_: object) -> None:
        self.reached.set()
        self.over.wait(LIMIT)


def test_a_hung_read_is_a_miss_and_the_disk_is_left_alone(
    make: Make, pool: Pool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = make(0, 8)
    saved(tiers, 3)
    assert tiers.disk is not None
    hang, get, before = Hang(), tiers.disk.get, pool.content.copy()

    def hung(*arguments: Any) -> object:
        hang()
        return get(*arguments)

    monkeypatch.setattr(tiers.disk, "get", hung)
    load = begin(tiers, 3)
    assert hang.reached.wait(LIMIT)
    tiers.poll()
    assert load.count is None
    clock.now += module.STUCK + 0.1
    tiers.poll()
    assert load.count == 0 and tiers.counts.late == 1
    assert tiers.worth_loading(load.keys, 0) == 0  # nobody else waits for it
    save(tiers, 1, first=5000)
    hang.over.set()
    settle(tiers)
    eventually(lambda: tiers._io._began is None)
    assert np.array_equal(pool.content, before)  # what came in the end went nowhere
    assert tiers.worth_loading(load.keys, 0) == 3


def test_slots_of_an_aborted_load_are_not_written_any_more(make: Make, pool: Pool) -> None:
    tiers, hang = make(8), Hang()
    saved(tiers, 5)
    pool.before_write = hang
    load = begin(tiers, 5)
    assert hang.reached.wait(LIMIT)
    threading.Timer(0.05, hang.over.set).start()
    tiers.cancel(load)
    assert load.count == OBJECT_TOKENS
    assert_loaded(pool, load, 5)
    pool.content[load.slots] = 7
    other = begin(tiers, 1, first=0)
    finish(tiers, other)
    rest = load.slots[~np.isin(load.slots, other.slots)]
    assert (pool.content[rest] == 7).all()


def test_an_object_whose_slots_change_while_it_is_copied_is_not_kept(make: Make, pool: Pool) -> None:
    tiers, hang = make(8), Hang()
    pool.before_read = hang
    save(tiers, 1)
    assert hang.reached.wait(LIMIT)
    tiers.dropped(slots_of(1)[5:6])
    hang.over.set()
    saved(tiers, 1, first=5000, at=3)
    assert tiers.worth_loading(keys_of(tiers, 1), 0) == 0
    assert tiers.worth_loading(keys_of(tiers, 1, 5000), 0) == 1
    assert (tiers.counts.saved, tiers.counts.lost) == (1, 1)
    assert not tiers._saved_slots.any()


def test_what_is_evicted_while_it_is_loaded_still_comes(make: Make, pool: Pool) -> None:
    tiers, hang = make(2), Hang()
    saved(tiers, 2)
    pool.before_write = hang
    load = begin(tiers, 2)
    assert hang.reached.wait(LIMIT)
    save(tiers, 2, first=5000)  # after the loads: these are urgent
    hang.over.set()
    assert finish(tiers, load) == 2 * OBJECT_TOKENS
    settle(tiers)
    assert_loaded(pool, load, 2)
    assert tiers.worth_loading(load.keys, 0) == 0


def test_a_full_disk_loses_kv_and_nothing_else(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = make(1, 8)
    assert tiers.disk is not None
    monkeypatch.setattr(ObjectFormat, "write", failing(errno.ENOSPC))
    saved(tiers, 4)
    assert not list((tmp_path / "kv").rglob("*.kv*")) and tiers.disk.counts.failed > 0
    load = begin(tiers, 4)
    assert finish(tiers, load) == OBJECT_TOKENS  # what is in memory


def test_what_cannot_be_written_in_time_is_given_up(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers, hang = make(0, 30), Hang()
    tiers._most_unwritten = 2
    assert tiers.disk is not None
    monkeypatch.setattr(tiers.disk, "put", hang)
    for sequence in range(6):
        save(tiers, 1, first=1000 * sequence)
    eventually(lambda: not tiers._saving)
    assert len(tiers._unwritten) == 2 and tiers.counts.given_up == 4
    assert finish(tiers, begin(tiers, 1, first=1000)) == OBJECT_TOKENS  # what waits for the disk is found
    hang.over.set()
    settle(tiers)


def test_short_memory_loses_what_was_to_be_saved(make: Make, pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    tiers, fails = make(8), [False, True]

    def short() -> None:
        if fails.pop():
            raise MemoryError

    pool.before_read = short
    saved(tiers, 1)
    assert tiers.counts.saved == 0 and not tiers._saved_slots.any()
    eventually(lambda: "a job failed" in caplog.text)
    saved(tiers, 1)
    assert tiers.worth_loading(keys_of(tiers, 1), 0) == 1


# -- load or recompute


def speeds(tiers: KVTiers, token: float, copy: float, read: float) -> None:
    for speed, seconds in ((tiers._token, token), (tiers._copy, copy), (tiers._read, read)):
        speed.value, speed._empty = seconds, False
    tiers._read_at = tiers._clock()


def test_what_is_slower_to_load_than_to_compute_is_not_loaded(make: Make) -> None:
    tiers = make(2, 8)
    saved(tiers, 5)  # the last three are on disk only
    keys = keys_of(tiers, 5)
    a_token = 1 / OBJECT_TOKENS  # an object is computed in a second
    speeds(tiers, a_token, 0.5, 0.4)
    assert tiers.worth_loading(keys, 0) == 5
    assert tiers.worth_loading(keys, 63) == 5  # of the first only a token is needed: the others pay for it
    for _ in range(50):
        tiers._read.add(2.0)
    before = tiers.counts.recomputed
    assert tiers.worth_loading(keys, 0) == 2  # 0.5 s each for two, then 2.5 s each for three
    assert tiers.worth_loading(keys[2:], 0) == 0
    assert tiers.counts.recomputed - before == 6


def test_a_disk_that_was_slow_is_measured_again_while_nobody_waits(make: Make, clock: Clock) -> None:
    tiers = make(0, 8)
    saved(tiers, 2)
    keys = keys_of(tiers, 2)
    speeds(tiers, 1 / OBJECT_TOKENS, 0.1, 3.0)
    assert tiers.worth_loading(keys, 0) == 0 and tiers._io._jobs.empty()
    for _ in range(20):
        clock.now += module.STALE + 1
        assert tiers.worth_loading(keys, 0) in (0, 2)  # as measured last
        eventually(lambda: tiers._io._jobs.empty() and tiers._io._began is None)
    assert tiers.worth_loading(keys, 0) == 2


def test_a_slow_disk_pays_where_it_saves_more_in_memory(make: Make) -> None:
    tiers = make(2, 8)
    tokens, slots, keys = tokens_of(3), slots_of(3), keys_of(tiers, 3)
    for place in range(3):  # then the first is on disk only
        span = slice(place * OBJECT_TOKENS, (place + 1) * OBJECT_TOKENS)
        tiers.save(keys[place], tokens[span], slots[span])
        settle(tiers)
    speeds(tiers, 1 / OBJECT_TOKENS, 0.1, 2.0)
    assert tiers.worth_loading(keys, 0) == 3  # loses 1.1 s, wins twice 0.9
    assert tiers.worth_loading(keys[:2], 0) == 0


def test_a_load_that_takes_too_long_ends_with_what_is_there(make: Make, pool: Pool, clock: Clock) -> None:
    tiers, hang = make(8), Hang()
    saved(tiers, 3)
    speeds(tiers, 0.001, 0.0, 0.0)
    written = iter(range(3))
    pool.before_write = lambda: hang() if next(written) == 1 else None
    load = begin(tiers, 3)
    assert hang.reached.wait(LIMIT)
    clock.now += max(module.LEAST, module.PATIENCE * 0.001 * 3 * OBJECT_TOKENS) + 0.01
    threading.Timer(0.05, hang.over.set).start()
    tiers.poll()
    assert load.count == 2 * OBJECT_TOKENS and tiers.counts.late == 1
    assert_loaded(pool, load, 3)
