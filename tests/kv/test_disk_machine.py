"""A store against a model of it: any order of puts, gets, damage, losses, refusals of the disk and restarts."""

import errno
import os
import tempfile
from pathlib import Path
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_objects import FILE_BYTES, Clock, bytes_on_disk, equal, files_of, flip, some_kv, store_in
from sizes import sized

from pilotfish.kv import disk
from pilotfish.kv.directory import object_path

OBJECTS = [some_kv(seed) for seed in range(8)]
CAPACITY = 3
WHICH = st.integers(0, len(OBJECTS) - 1)


class StoreMachine(RuleBasedStateMachine):
    """`order` is what the store should hold, used longest ago first; `lost` is what of that has no good file."""

    @initialize()
    def begin(self) -> None:
        self.temporary = tempfile.TemporaryDirectory()
        self.directory, self.clock = Path(self.temporary.name), Clock()
        self.order: list[int] = []
        self.lost: set[int] = set()
        self.resting = False
        self.open()

    def open(self) -> None:
        self.store = store_in(self.directory, CAPACITY + 0.5, self.clock)

    @rule(which=WHICH)
    def put(self, which: int) -> None:
        kv = OBJECTS[which]
        there = which in self.order and object_path(self.directory, kv.key).exists()
        assert self.store.put(kv) == (there or not self.resting)
        if which in self.order:
            self.order.remove(which)
        if there:
            self.order.append(which)
        else:
            self.lost.discard(which)
            self.order = self.order if self.resting else [*self.order, which][-CAPACITY:]

    @rule(which=WHICH)
    def get(self, which: int) -> None:
        found = self.store.get(OBJECTS[which].key, OBJECTS[which].tokens)
        there = which in self.order
        if there:
            self.order.remove(which)
        if there and which not in self.lost:
            assert equal(found, OBJECTS[which])
            self.order.append(which)
        else:
            assert found is None
            self.lost.discard(which)

    @precondition(lambda self: self.order)
    @rule(data=st.data(), bit=st.integers(0, 8 * FILE_BYTES - 1))
    def damage(self, data: st.DataObject, bit: int) -> None:
        which = data.draw(st.sampled_from(self.order))
        if which not in self.lost:
            flip(object_path(self.directory, OBJECTS[which].key), bit)
            self.lost.add(which)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        which = data.draw(st.sampled_from(self.order))
        object_path(self.directory, OBJECTS[which].key).unlink(missing_ok=True)
        self.lost.add(which)

    @precondition(lambda self: not self.resting)
    @rule(which=WHICH)
    def disk_fails(self, which: int) -> None:
        if which not in self.order:
            with mock.patch.object(os, "write", side_effect=OSError(errno.EIO, "input/output error")):
                assert not self.store.put(OBJECTS[which])
            self.order = self.order[-(CAPACITY - 1) :]
            self.resting = True

    @precondition(lambda self: self.resting)
    @rule()
    def rest(self) -> None:
        self.clock.now += disk.REST
        self.resting = False

    @rule()
    def reopen(self) -> None:
        self.store.close()
        gone = {which for which in self.order if not object_path(self.directory, OBJECTS[which].key).exists()}
        self.order = [which for which in self.order if which not in gone]
        self.lost -= gone
        self.spread_uses()
        self.open()
        self.resting = False

    def spread_uses(self) -> None:
        """The clock of files is too coarse for this machine."""
        for second, which in enumerate(self.order, 1_000_000):
            os.utime(object_path(self.directory, OBJECTS[which].key), (second, second))

    @invariant()
    def agrees(self) -> None:
        held = [which for which, kv in enumerate(OBJECTS) if self.store.contains(kv.key)]
        assert held == sorted(self.order)
        assert self.store.bytes_used == len(held) * FILE_BYTES
        assert bytes_on_disk(self.directory) <= self.store.bytes_used <= CAPACITY * FILE_BYTES
        assert not [path for path in files_of(self.directory) if path.suffix != ".kv"]

    def teardown(self) -> None:
        self.store.close()
        self.temporary.cleanup()


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=sized(20, 100), stateful_step_count=40)
