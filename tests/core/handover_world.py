"""A target's machine of hand-overs, prefill workers' machines, lines between them that lose, repeat, reorder and damage
frames, memory that is read late, pools that come and go, and a clock.

KV of a token is a pure function of its salt and of all tokens up to it. So what is in a wrong slot, or is of another
prompt, tenant or layer, is not what is expected there.
"""

import zlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from lines import POOLS, Lines, flipped
from msgspec.structs import replace

from pilotfish.core.cache.slots import Slots
from pilotfish.core.peers.fields import Peer, salt_digest
from pilotfish.core.prefilling.handover import WHOLE, HandOver
from pilotfish.core.prefilling.handover_machine import HandOverMachine, PoolMemory, ReadSegment
from pilotfish.core.prefilling.incoming import Incoming
from pilotfish.core.prefilling.prefill_machine import PrefillLimits, PrefillMachine
from pilotfish.core.prefilling.prefill_messages import (
    MAC_KEY_BYTES,
    PREFILL_VERSION,
    PrefillHello,
    PrefillOrder,
    SegmentBytes,
    SegmentReady,
    SharedMemory,
    Welcome,
)
from pilotfish.core.prefilling.prefill_orders import PlacedSegment, TakenOrder
from pilotfish.core.prefilling.prefill_pools import PrefillPool
from pilotfish.core.prefilling.segments import KVIdentity, KVLayout, SegmentReference
from pilotfish.errors import SegmentError, WireError
from pilotfish.wire.channel import decode_from_prefill, decode_to_prefill, encode

LAYERS, CONTEXT, LEASE, PLACES = 3, 400, 2.0, 12
LAYOUT = KVLayout(LAYERS, 0, 1, [1, 1])
IDENTITY = KVIdentity({"weights": "0a1b"}, LAYOUT)
WELCOME = Welcome(PREFILL_VERSION, IDENTITY, "tiny", CONTEXT, bytes(MAC_KEY_BYTES), LEASE, 1 << 10)
KEY = b"of salts"
Work: TypeAlias = PoolMemory | ReadSegment


def kv_of(salt: bytes | None, tokens: list[int], layer: int) -> list[int]:
    """Of the last token. [planes]"""
    return list(zlib.crc32(bytes([layer, *(salt or b"-"), *(token % 256 for token in tokens)])).to_bytes(4)[:2])


class Memory:
    """Places of a worker's life."""

    def __init__(self, life: int) -> None:
        self.offer = SharedMemory(1 + life, 3, life.to_bytes(16), 1)
        self.epochs = [0] * PLACES
        self.data: dict[int, bytes] = {}  # by place, while it is taken
        self.left = [b""] * PLACES  # what was there last

    def take(self, data: bytes) -> int | None:
        free = [place for place in range(PLACES) if place not in self.data]
        if not free:
            return None
        self.data[free[-1]] = self.left[free[-1]] = data
        return free[-1]

    def free(self, place: int) -> None:
        self.epochs[place] += 1
        del self.data[place]

    def view(self, reference: SegmentReference) -> memoryview | None:
        there = self.data.get(reference.place)
        known = there is not None and reference.epoch == self.epochs[reference.place]
        return memoryview(there) if known and there is not None else None

    def read(self, reference: SegmentReference) -> bytes:
        if reference.place >= PLACES:
            raise SegmentError("out_of_range", "no such place")
        if reference.epoch != self.epochs[reference.place]:
            raise SegmentError("stale", "freed")
        return self.left[reference.place]


@dataclass
class Piece:
    """A segment that is to be made."""

    first: int
    tokens: int
    layer: int
    layers: int
    last: bool  # of its tokens


class Worker:
    """A prefill worker that computes by a script."""

    def __init__(self, life: int) -> None:
        self.memory = Memory(life)
        keys = iter(range(1 + 1000 * life, 1000 * life + 1000))
        welcome = replace(WELCOME, shared_memory=self.memory.offer)
        limits = PrefillLimits(1 << 16, 100, 1000)
        self.machine = PrefillMachine(welcome, limits, self.memory, lambda: next(keys).to_bytes(MAC_KEY_BYTES))
        self.pieces: dict[TakenOrder, deque[Piece]] = {}

    def turn(self, choice: int, now: float) -> None:
        """Begin an order, then make a segment of one."""
        if (order := self.machine.next_order()) is not None:
            self._begin(order, choice, now)
        live = [order for order in self.pieces if order.live]
        self.pieces = {order: self.pieces[order] for order in live}
        if live:
            self._segment(live[choice % len(live)], now)

    def _begin(self, order: TakenOrder, choice: int, now: float) -> None:
        self.machine.started(order, 0, now)
        self.machine.advanced(order, order.first, now)
        chunk, group, end = 5 + choice % 60, 1 + choice % LAYERS, len(order.tokens)
        self.pieces[order] = deque(
            Piece(first, min(chunk, end - first), layer, min(group, LAYERS - layer), layer + group >= LAYERS)
            for first in range(order.first, end, chunk)
            for layer in range(0, LAYERS, group)
        )

    def _segment(self, order: TakenOrder, now: float) -> None:
        if not self.pieces[order]:
            return
        piece, salt = self.pieces[order][0], None if order.salt is None else bytes.fromhex(order.salt.strip())
        kv = np.array(
            [
                [kv_of(salt, list(order.tokens[: piece.first + i + 1]), layer) for i in range(piece.tokens)]
                for layer in range(piece.layer, piece.layer + piece.layers)
            ],
            np.uint8,
        )
        data = kv.transpose(0, 2, 1).tobytes()  # [layers, planes, tokens]
        if (place := self.memory.take(data)) is None:
            return
        self.pieces[order].popleft()
        where = (piece.first, piece.tokens, piece.layer, piece.layers, place, self.memory.epochs[place], len(data))
        if piece.last:
            self.machine.advanced(order, piece.first + piece.tokens, now)
            self.machine.computed(piece.tokens, 0.001 * piece.tokens)
        if not self.machine.segment_ready(order, PlacedSegment(*where, zlib.crc32(data)), now):
            self.memory.free(place)


class World(Lines):
    """`fetches`: whether segments come over the lines."""

    def __init__(self, fetches: bool = False) -> None:
        super().__init__()
        self.fetches, self.now, self.lives = fetches, 50.0, POOLS
        self.outcomes = Counter[str]()
        self.brought = 0  # tokens
        self.workers = [Worker(life) for life in range(POOLS)]
        pools = [PrefillPool(f"pool {i}", str(i).encode()) for i in range(POOLS)]
        self.target = HandOverMachine(PrefillHello(PREFILL_VERSION, IDENTITY, "tiny"), pools, 1, KEY)
        self.peer: Peer = b"target"
        self.kv = np.zeros((LAYERS, 4000, 2), np.uint8)
        self.free: list[int] = list(range(4000))
        self.wanted: list[HandOver] = []
        self.lanes: dict[Peer, deque[Work]] = {pool.peer: deque() for pool in pools}
        self.open: dict[Peer, Memory | None] = {}

    # -- events

    def begin(self, choice: int) -> None:
        tokens = [choice // 64 + i % 50 for i in range(1 + choice % 97)]  # some begin alike
        first = choice % len(tokens) // 2
        salt = (None, "a", "b")[choice % 3]
        if len(self.wanted) >= 5 or (option := self.target.option(tokens, first, salt, 0, 0, self.now)) is None:
            return
        handover = HandOver(tokens, self._slots(len(tokens) - first), salt)
        self.target.begin(handover, option, self.now)
        if handover.count is None:
            self.wanted.append(handover)
        else:
            self._ended(handover)

    def _slots(self, count: int) -> Slots:
        taken, self.free = self.free[:count], self.free[count:]
        self.kv[:, taken] = 0
        return np.array(taken, np.int32)

    def settle(self, choice: int = 0) -> None:  # noqa: ARG002
        for incoming in self.target.settle(self.now):
            self._left(incoming)

    def cancel(self, choice: int) -> None:
        if self.wanted:
            self._left(self.target.cancel(self.wanted[choice % len(self.wanted)], self.now))

    def _left(self, incoming: Incoming) -> None:
        assert incoming.ended
        self.wanted.remove(incoming.handover)
        self._ended(incoming.handover)

    def _ended(self, handover: HandOver) -> None:
        """What it brought is what is expected, in every layer."""
        assert handover.count is not None
        assert handover.count == len(handover.slots) or handover.report.outcome != WHOLE
        digest, first = salt_digest(handover.salt, KEY), handover.first
        for place, slot in enumerate(handover.slots.tolist()[: handover.count]):
            expected = [kv_of(digest, handover.tokens[: first + place + 1], layer) for layer in range(LAYERS)]
            assert self.kv[:, slot].tolist() == expected
        self.outcomes[handover.report.outcome] += 1
        self.brought += handover.count
        self.kv[:, handover.slots] = 255  # another's, from now on
        self.free += handover.slots.tolist()

    def work(self, choice: int) -> None:
        """What a pool's thread does next."""
        if (pool := self.pool_of(choice)) is not None:
            self._work(pool.peer, 1 + choice // 32)

    def _work(self, pool: Peer, most: int) -> None:
        lane = self.lanes[pool]
        for _ in range(min(most, len(lane))):
            self._do(pool, lane.popleft())

    def _do(self, pool: Peer, work: Work) -> None:
        if isinstance(work, ReadSegment):
            if not (work.incoming.ended or work.incoming.outcome):
                self._read(pool, work)
        elif work.welcome is None:
            self.open[pool] = None
        else:
            lives = [worker.memory for worker in self.workers if worker.memory.offer == work.welcome.shared_memory]
            self.open[pool] = lives[0] if lives else None
            fetches = self.fetches or not lives
            self.target.opened(work, "tcp" if fetches else "shm", self.now, fetches=fetches)

    def _read(self, pool: Peer, work: ReadSegment) -> None:
        reference, memory = work.reference, self.open.get(pool)
        try:
            if work.data is None and memory is None:
                raise SegmentError("gone", "its memory is closed")
            data = bytes(work.data) if work.data is not None or memory is None else memory.read(reference)
            if len(data) != reference.size or zlib.crc32(data) != reference.content:
                raise SegmentError("content", "damaged")
        except SegmentError as error:
            self.target.refuse(work.incoming, error.reason, self.now)
            return
        layers = slice(reference.layer, reference.layer + reference.layers)
        first = reference.first - work.incoming.handover.first
        slots = work.incoming.handover.slots[first : first + reference.tokens]
        kv = np.frombuffer(data, np.uint8).reshape(reference.layers, 2, reference.tokens)
        self.kv[layers, slots] = kv.transpose(0, 2, 1)
        self.target.landed(work, 0.0, self.now)

    def compute(self, choice: int) -> None:
        for _ in range(1 + choice // 64):
            self.workers[choice % POOLS].turn(choice, self.now)

    def wait(self, choice: int) -> None:
        self.now += (1.2, 2.5)[choice // 128] if choice % 32 == 0 else (0.001, 0.005, 0.03, 0.15)[choice % 4]

    def tick(self, choice: int = 0) -> None:  # noqa: ARG002
        self.target.tick(self.now)
        for worker in self.workers:
            worker.machine.tick(self.now)

    def disconnect(self, choice: int) -> None:
        if (pool := self.pool_of(choice)) is not None:
            self.target.lost(pool, "it hung up")
            self.lines[choice % POOLS].clear()
            self.lines[POOLS + choice % POOLS].clear()

    def join(self, choice: int) -> None:
        if self.pool_of(choice) is None:
            peer = next(self.peers)
            self.dialled[peer], self.lanes[peer] = choice % POOLS, deque()
            self.target.join(PrefillPool(f"pool {choice % POOLS}", peer))

    def leave(self, choice: int) -> None:
        """What was sent before may still arrive; nothing is heard any more."""
        if (pool := self.pool_of(choice)) is not None:
            self.target.leave(pool)
            self.post()
            self._work(pool.peer, len(self.lanes[pool.peer]))
            self.post()
            assert self.open.pop(pool.peer, None) is None
            del self.dialled[pool.peer], self.lanes[pool.peer]
            self.lines[POOLS + choice % POOLS].clear()

    def restart(self, choice: int) -> None:
        """A worker at the same address, which knows nobody."""
        self.workers[choice % POOLS] = Worker(self.lives)
        self.lives += 1
        self.lines[POOLS + choice % POOLS].clear()

    # -- lines

    def flip(self, choice: int) -> None:
        if self.line(choice):
            sent, number = self.line(choice).popleft(), choice % len(self.lines)
            frame = flipped(sent, choice)
            self.arrive(number, _with_salt_of(sent, frame) if number < POOLS else frame)

    def lie(self, choice: int) -> None:
        """A worker that signs what is not so."""
        line, pool = self.lines[POOLS + choice % POOLS], self.pool_of(choice)
        for place, frame in enumerate(line):
            message, welcome = decode_from_prefill(frame), None if pool is None else pool.welcome
            if isinstance(message, SegmentReady) and welcome is not None:
                lied = LIES[choice // 2 % len(LIES)](message.reference)
                signed = lied.signed(welcome.mac_key) if choice % 5 else lied
                line[place] = encode(SegmentReady(signed))
                return

    def damage(self, choice: int) -> None:
        """A bit of a segment, in memory or on its way."""
        memory = self.workers[choice % POOLS].memory
        place = choice // 2 % PLACES
        if not self.fetches and place in memory.data:
            memory.left[place] = bytes([memory.left[place][0] ^ 1]) + memory.left[place][1:]
        line = self.lines[POOLS + choice % POOLS]
        for at, frame in enumerate(line):
            message = decode_from_prefill(frame)
            if isinstance(message, SegmentBytes):
                data = bytes(message.data)
                line[at] = encode(replace(message, data=memoryview(data[:-1] + bytes([data[-1] ^ 1]))))
                return

    def post(self) -> None:
        """What the machines have to say goes onto the lines, what is to be done onto the lanes."""
        for outgoing in self.target.outbox:
            if outgoing.peer in self.dialled:
                pool = self.target.pool_at(outgoing.peer)
                assert not isinstance(outgoing.message, PrefillOrder) or (pool is not None and not pool.draining)
                self.lines[self.dialled[outgoing.peer]].append(encode(outgoing.message))
        self.target.outbox.clear()
        for work in self.target.work:
            pool = work.incoming.pool if isinstance(work, ReadSegment) else work.pool
            self.lanes[pool.peer].append(work)
        self.target.work.clear()
        for number, worker in enumerate(self.workers):
            self.lines[POOLS + number] += [encode(outgoing.message) for outgoing in worker.machine.outbox]
            worker.machine.outbox.clear()

    def arrive(self, line: int, frame: bytes) -> None:
        if line < POOLS:
            try:
                self.workers[line].machine.receive(self.peer, decode_to_prefill(frame), self.now)
            except WireError as error:
                self.workers[line].machine.malformed(self.peer, str(error))
            return
        pool = self.pool_of(line - POOLS)
        if pool is None:
            return
        try:
            message = decode_from_prefill(frame)
        except WireError as error:
            self.target.malformed(pool, str(error), self.now)
        else:
            self.target.receive(pool, message, self.now)

    # -- what holds

    def check(self) -> None:
        under_way = self.target._incoming.values()
        assert all(incoming.outcome or incoming.pool in self.target.pools for incoming in under_way)
        assert {id(incoming.handover) for incoming in under_way} == {id(handover) for handover in self.wanted}
        for worker in self.workers:
            held = [r.place for order in worker.machine.orders for r in order.held.values()]
            assert sorted(held) == sorted(worker.memory.data)

    def rounds(self, count: int, seconds: float = 0.05) -> None:
        """Time passes, and nothing goes wrong."""
        for _ in range(count):
            self.now += seconds
            self.tick()
            for _ in range(8):
                self.post()
                self.deliver_all()
                for peer in self.lanes:
                    self._work(peer, len(self.lanes[peer]))
                for pool in range(POOLS):
                    self.compute(pool + 64 * 3)
            self.settle()
            self.check()

    def heal(self) -> None:
        """The lines are good again, a pool is there to stay: once pools that failed are tried again, hand-overs come
        whole."""
        self.keep_one()
        self.rounds(250, 0.3)
        before = Counter(self.outcomes)
        for choice in range(12):
            self.begin(choice * 17)
            self.rounds(4)
        self.rounds(60)
        assert not self.wanted and self.outcomes - before == {WHOLE: 12}

    def end(self) -> None:
        """Nothing is held anywhere, once leases have ended."""
        while self.wanted:
            self.cancel(0)
        self.rounds(20, LEASE / 4)
        assert not self.target._incoming and len(self.free) == 4000
        for worker in self.workers:
            assert not worker.machine.orders and not worker.memory.data


def _with_salt_of(sent: bytes, frame: bytes) -> bytes:
    """An order's salt stays as it was: which one KV was kept under changes nothing of real KV."""
    order = decode_to_prefill(sent)
    try:
        damaged = decode_to_prefill(frame)
    except WireError:
        return frame
    both = isinstance(order, PrefillOrder) and isinstance(damaged, PrefillOrder)
    return encode(replace(damaged, salt=order.salt)) if both else frame


#: What can be told of a segment that is not so, and shows.
LIES: tuple[Callable[[SegmentReference], SegmentReference], ...] = (
    *(lambda r: replace(r, number=r.number + 1), lambda r: replace(r, first=r.first + 1)),
    *(lambda r: replace(r, tokens=r.tokens + 1), lambda r: replace(r, layer=LAYERS)),
    *(lambda r: replace(r, size=r.size + 2), lambda r: replace(r, place=PLACES)),
    *(lambda r: replace(r, place=(r.place + 1) % PLACES), lambda r: replace(r, epoch=r.epoch + 1)),
    *(lambda r: replace(r, content=r.content ^ 1), lambda r: replace(r, layout=bytes(16))),
    lambda r: replace(r, sequence=bytes(16)),
)
