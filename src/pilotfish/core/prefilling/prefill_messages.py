"""The messages between a target and a prefill worker (docs/prefill.md), as MessagePack maps with a `type`.

target                                        prefill worker
  ├─ PrefillHello ───────────────────────────► │   until it is welcomed
  │ ◄──────────────────────────────── Welcome ─┤   or PrefillRefuse
  ├─ Renewal(hand-overs) ────────────────────► │   a few times a second: the leases live
  │ ◄──────────────────────────── PrefillLoad ─┤   its answer
  ├─ PrefillOrder(tokens, first) ────────────► │
  │ ◄───────────────── SegmentReady(reference) ┤   while it computes on
  ├─ Fetch(reference) ───────────────────────► │   where the target cannot read the worker's memory itself
  │ ◄──────────────── SegmentBytes, or …Gone ──┤
  ├─ Taken(numbers) ─────────────────────────► │   their memory is free for others
  │ ◄──────────────────────────── OrderDone ───┤   after its last SegmentReady; or OrderFailed
  ├─ Release ────────────────────────────────► │   whatever is held for the hand-over goes
"""

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from pilotfish.core.peers.fields import Id, Index, Length, Milliseconds, Readable, SaltDigest, Text, Tokens
from pilotfish.core.prefilling.segments import KVIdentity, SegmentReference

PREFILL_VERSION = 1
MAX_HANDOVERS = 1 << 12  # hand-overs of one target that a worker takes at a time
MAC_KEY_BYTES = 32  # bytes of a key for MACs

Ids: TypeAlias = Annotated[list[Id], Meta(max_length=MAX_HANDOVERS)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0.0, lt=1e9)]
Size: TypeAlias = Annotated[int, Meta(ge=1, lt=1 << 53)]  # bytes of a worker's memory for segments


class PrefillHello(Readable, tag="greeting", frozen=True):
    version: Index
    identity: KVIdentity
    model: Text


class SharedMemory(Struct, frozen=True):
    """Where a process of the same host finds a worker's segments: the file `descriptor` of process `pid`."""

    pid: Id
    descriptor: Index
    nonce: Annotated[bytes, Meta(min_length=16, max_length=16)]  # at the file's beginning: it is that very file
    size: Size


class RemoteMemory(Struct, frozen=True):
    agent: Annotated[bytes, Meta(max_length=1 << 20)]  # metadata of the worker's agent
    address: Annotated[int, Meta(ge=0, lt=1 << 62)]
    size: Size


class Welcome(Readable, tag="welcome", frozen=True):
    version: Index
    identity: KVIdentity
    model: Text
    context: Length  # tokens of the longest sequence that it takes
    mac_key: Annotated[bytes, Meta(min_length=MAC_KEY_BYTES, max_length=MAC_KEY_BYTES)]
    lease: Seconds  # that a hand-over lives after its last renewal
    segment_bytes: Length  # of its largest segment
    shared_memory: SharedMemory | None = None
    remote_memory: RemoteMemory | None = None


class PrefillRefuse(Readable, tag="turned_away", frozen=True):
    reason: Text


class Renewal(Struct, tag="renewal", frozen=True):
    """Other hand-overs of this target lose their lease in time."""

    handovers: Ids


class PrefillLoad(Struct, tag="prefill_load", frozen=True):
    queued_tokens: Index  # of all targets, without KV yet
    free_slots: Index
    token_ms: Milliseconds  # that KV of a token lately took; 0 before any was measured
    leases: Index  # that it holds, of all targets


class PrefillOrder(Struct, tag="order", frozen=True, omit_defaults=True):
    """Compute KV of these tokens, and hand over all but the `first` ones."""

    handover: Id
    tokens: Annotated[Tokens, Meta(min_length=1)]
    first: Index
    salt: SaltDigest | None = None  # sequences of different ones share nothing that is kept of them


class SegmentReady(Struct, tag="segment", frozen=True):
    reference: SegmentReference


class Fetch(Struct, tag="fetch", frozen=True):
    reference: SegmentReference


class SegmentBytes(Struct, tag="bytes", frozen=True):
    handover: Id
    number: Index
    data: memoryview


class SegmentGone(Readable, tag="gone", frozen=True):
    handover: Id
    number: Index
    reason: Text


class Taken(Struct, tag="taken", frozen=True):
    handover: Id
    numbers: Annotated[list[Index], Meta(min_length=1, max_length=1 << 16)]


class OrderDone(Struct, tag="order_done", frozen=True):
    handover: Id
    segments: Index
    cached: Index  # tokens of the sequence whose KV was there already
    queued: Seconds  # from the order's arrival to its first row
    computing: Seconds  # from then on to its last


class OrderFailed(Readable, tag="order_failed", frozen=True):
    handover: Id
    reason: Text
    busy: bool = False  # it has too much to do; another order may be taken later


class Release(Struct, tag="release", frozen=True):
    handover: Id


ToPrefill: TypeAlias = PrefillHello | Renewal | PrefillOrder | Fetch | Taken | Release
FromPrefill: TypeAlias = (
    Welcome | PrefillRefuse | PrefillLoad | SegmentReady | SegmentBytes | SegmentGone | OrderDone | OrderFailed
)
