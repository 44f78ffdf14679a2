"""A prefill worker that is stepped by hand, and targets that check what they are given against the model itself."""

import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from support import CONTEXT

from pilotfish.config.fields import KVDType
from pilotfish.core.cache.prefix_cache import PrefixCache
from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.peers.fields import Peer
from pilotfish.core.prefilling.prefill_machine import PrefillLimits, PrefillMachine
from pilotfish.core.prefilling.prefill_messages import (
    MAC_KEY_BYTES,
    PREFILL_VERSION,
    PrefillHello,
    PrefillOrder,
    SegmentReady,
    Taken,
    ToPrefill,
    Welcome,
)
from pilotfish.core.prefilling.segments import KVIdentity, KVLayout, SegmentReference
from pilotfish.core.scheduling.executor import NO_NODES, SequenceRows
from pilotfish.core.scheduling.scheduler import Scheduler
from pilotfish.kv.arena import Arena
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.feature_tap import FeatureTap
from pilotfish.model.kv_copy import copier_of, layout_of
from pilotfish.model.loading.loader import load_model
from pilotfish.wire.channel import Received, decode_from_prefill, encode
from pilotfish.workers.export import Exporter, SharedMachine
from pilotfish.workers.prefill import PrefillWorker

LEASE = 10.0
FACTS = {"model": "llama", "weights": "0a1b"}
Bytes = NDArray[np.uint8]
Answer = TypeVar("Answer", bound=Struct)


def executor_of(
    directory: Path, slots: int, kv_dtype: KVDType = "auto", tap: FeatureTap | None = None
) -> TorchExecutor:
    model = load_model(directory, torch.float32, torch.device("cpu"), eager=False, kv_dtype=kv_dtype)
    return TorchExecutor(model, slots, tap=tap)


#: For all that need no slots of their own.
loaded = cache(executor_of)


@cache
def computed(directory: Path, tokens: tuple[int, ...], kv_dtype: KVDType, tap: FeatureTap | None) -> list[Bytes]:
    """KV of tokens in one forward, from nothing. Of each layer, all tokens'."""
    executor, slots = loaded(directory, CONTEXT, kv_dtype, tap), np.arange(len(tokens), dtype=np.int32)
    executor.forward([SequenceRows(0, tokens, slots, NO_NODES, kept=())])
    return layers_in(executor, slots)


def layers_in(executor: TorchExecutor, slots: NDArray[np.int32]) -> list[Bytes]:
    layout, layers = layout_of(executor.kv), list[Bytes]()
    for layer in range(layout.layers):
        layers.append(np.zeros(len(slots) * layout.bytes_of(range(layer, layer + 1)), np.uint8))
        copier_of(executor.kv).read_layers(slots, range(layer, layer + 1), layers[-1])
    return layers


def prompt(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 500, length).tolist()
    return tokens


class PrefillRig:
    """A worker, its memory, and a clock that stands still."""

    def __init__(
        self,
        directory: Path,
        *,
        slots: int = 4000,
        rows: int = 64,
        places: int = 64,
        segment_bytes: int = 1 << 16,
        cached: bool = True,
        queued: int = 1 << 17,
        kv_dtype: KVDType = "auto",
        executor: TorchExecutor | None = None,
    ) -> None:
        self.now = 100.0
        self.directory, self.kv_dtype = directory, kv_dtype
        self.sent: dict[Peer, list[bytes]] = defaultdict(list)
        self.executor = executor or executor_of(directory, slots, kv_dtype)
        self.arena = Arena(places * segment_bytes, segment_bytes)
        self.identity = KVIdentity(FACTS, layout_of(self.executor.kv))
        context = min(self.executor.context, slots - 1)
        offer = self.arena.offer()
        welcome = Welcome(
            PREFILL_VERSION, self.identity, "tiny", context, bytes(MAC_KEY_BYTES), LEASE, segment_bytes, offer
        )
        limits = PrefillLimits(self.executor.vocab_size, queued, slots // 2)
        keys = iter(range(1, 1000))
        self.machine = PrefillMachine(welcome, limits, self.arena, lambda: next(keys).to_bytes(MAC_KEY_BYTES))
        self.shared = SharedMachine(self.machine, self._post, lambda: self.now)
        self.progress = self.executor.progress
        read_layers = copier_of(self.executor.kv).read_layers
        self.exporter = Exporter(self.shared, self.arena, read_layers, self.progress, lambda: self.now)
        pool = SlotPool(slots)
        scheduler = Scheduler(pool, rows, 32, PrefixCache(pool) if cached else None)
        self.worker = PrefillWorker(
            self.shared, scheduler, self.executor, self.exporter, self.progress, lambda: self.now
        )

    def _post(self, peer: Peer, *frames: bytes) -> None:
        self.sent[peer].extend(frames)

    def say(self, peer: Peer, *messages: ToPrefill, tenant: str = "", weight: float = 1.0) -> None:
        for message in messages:
            self.shared.receive(Received(peer, encode(message), tenant, weight))

    def heard(self, peer: Peer, kind: type[Answer]) -> list[Answer]:
        """Messages of a kind to a target, in order; they are taken away."""
        messages = [decode_from_prefill(frame) for frame in self.sent[peer]]
        self.sent[peer] = [encode(m) for m in messages if not isinstance(m, kind)]
        return [m for m in messages if isinstance(m, kind)]

    def turns(self, count: int = 1) -> None:
        """Forwards, and all segments that come of them. Every slot has one owner after each."""
        for _ in range(count):
            self.worker.turn(0.0)
            self.export()
            self.worker.check()

    def export(self) -> None:
        while self.exporter.turn():
            pass

    def rest(self, most: int = 500) -> None:
        """Until there is nothing to do."""
        for _ in range(most):
            busy = self.worker.turn(0.0)
            self.export()
            self.worker.check()
            if not busy and not self.worker.turn(0.0):
                return
        raise AssertionError("it computes on and on")

    def assert_idle(self) -> None:
        """Nothing is held: no slot, no place, no order."""
        self.worker.turn(0.0)
        self.worker.check()
        pool = self.worker.scheduler.pool
        assert not self.machine.orders and not self.worker.scheduler.busy
        assert pool.num_available == pool.capacity
        assert len(self.arena._free) == self.arena.plan.places


@dataclass
class Client:
    """A target that takes each segment as it is told of it, and puts it together."""

    rig: PrefillRig
    peer: Peer = b"target"
    tenant: str = ""
    welcome: Welcome | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)  # by hand-over
    firsts: dict[int, int] = field(default_factory=dict)
    kv: dict[int, dict[tuple[int, int], bytes]] = field(default_factory=dict)  # by hand-over: layer, token
    next: dict[tuple[int, int], int] = field(default_factory=dict)  # by hand-over and layer: the next token
    numbers: dict[int, int] = field(default_factory=dict)  # of segments so far

    def __post_init__(self) -> None:
        self.say(PrefillHello(PREFILL_VERSION, self.rig.identity, "tiny"))
        (self.welcome,) = self.rig.heard(self.peer, Welcome)

    def say(self, *messages: ToPrefill) -> None:
        self.rig.say(self.peer, *messages, tenant=self.tenant)

    def order(self, handover: int, tokens: Sequence[int], first: int = 0, salt: bytes | None = None) -> None:
        self.tokens[handover], self.firsts[handover], self.kv[handover] = list(tokens), first, {}
        self.say(PrefillOrder(handover, list(tokens), first, salt))

    def references(self) -> list[SegmentReference]:
        return [message.reference for message in self.rig.heard(self.peer, SegmentReady)]

    def take(self) -> int:
        """Check and take all segments that are ready, but for those of ended hand-overs; how many there were."""
        live = {order.handover for order in self.rig.machine.orders if order.peer == self.peer}
        references = self.references()
        for reference in references:
            data = self.rig.arena.view(reference)
            assert (data is not None) == (reference.handover in live)
            if data is not None:
                self.put(reference, data)
                self.say(Taken(reference.handover, [reference.number]))
        return len(references)

    def put(self, reference: SegmentReference, data: memoryview) -> None:
        assert self.welcome is not None
        assert reference.authentic(self.welcome.mac_key)
        layout, handover = self.rig.identity.layout, reference.handover
        assert reference.layout == layout.digest() and reference.content == zlib.crc32(data)
        assert reference.number == self.numbers.setdefault(handover, 0)
        self.numbers[handover] += 1
        layers, at = range(reference.layer, reference.layer + reference.layers), 0
        assert len(data) == reference.size == reference.tokens * layout.bytes_of(layers)
        for layer in layers:
            assert reference.first == self.next.setdefault((handover, layer), self.firsts[handover])
            self.next[handover, layer] += reference.tokens
            end = at + reference.tokens * layout.bytes_of(range(layer, layer + 1))
            self._split(handover, layer, reference, bytes(data[at:end]))
            at = end

    def _split(self, handover: int, layer: int, reference: SegmentReference, data: bytes) -> None:
        """By token: the parts of all planes, one after the other."""
        at = 0
        for width in _widths(self.rig.identity.layout, layer):
            for token in range(reference.first, reference.first + reference.tokens):
                key = (layer, token)
                self.kv[handover][key] = self.kv[handover].get(key, b"") + data[at : at + width]
                at += width

    def turns(self, count: int) -> None:
        """Of the worker; after each it takes what is ready."""
        for _ in range(count):
            self.rig.turns()
            self.take()

    def gets(self, *handovers: int) -> None:
        """Once the worker has done what it can; whole."""
        self.rig.rest()
        self.take()
        for handover in handovers:
            self.assert_whole(handover)

    def assert_whole(self, handover: int) -> None:
        """All of it came, and it is what a direct forward writes."""
        layout, tokens, first = self.rig.identity.layout, self.tokens[handover], self.firsts[handover]
        direct = computed(self.rig.directory, tuple(tokens), self.rig.kv_dtype, self.rig.executor.tap)
        assert set(self.kv[handover]) == {(la, t) for la in range(layout.layers) for t in range(first, len(tokens))}
        for (layer, token), data in self.kv[handover].items():
            assert data == _of_token(direct[layer], token, len(tokens), _widths(layout, layer))


def _widths(layout: KVLayout, layer: int) -> list[int]:
    """Bytes of a token in each plane."""
    return [layout.heads * plane for plane in layout.planes] if layer in layout.of_kv else [layout.features]


def _of_token(layer: Bytes, token: int, tokens: int, widths: Sequence[int]) -> bytes:
    """layer [bytes of all tokens]"""
    at, parts = 0, []
    for width in widths:
        parts.append(layer[at + token * width : at + (token + 1) * width].tobytes())
        at += tokens * width
    return b"".join(parts)
