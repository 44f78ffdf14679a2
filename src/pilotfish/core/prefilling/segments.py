"""Segments: pieces of KV that a prefill worker hands over, and the references that name them.

segments    layers 0-7    [ tokens 0-127 ][ tokens 128-255 ] …        some layers of some tokens each
            layers 8-15   [ tokens 0-127 ][ tokens 128-255 ] …

Workers put segments into memory that they own. Readers check the reference before and after reading, then the content;
a segment that differs from its reference is not used.
"""

import hashlib
import hmac
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from pilotfish.core.peers.fields import Id, Index, Length

#: Bytes that a segment has at least, where a hand-over has that many, and by default at most.
LEAST_SEGMENT, SEGMENT_BYTES = 128 << 10, 1 << 20
#: Bytes of a sequence's digest, of a layout's, and of a reference's MAC.
SEQUENCE_BYTES, LAYOUT_BYTES, MAC_BYTES = 16, 16, 16

SequenceDigest = Annotated[bytes, Meta(min_length=SEQUENCE_BYTES, max_length=SEQUENCE_BYTES)]
LayoutDigest = Annotated[bytes, Meta(min_length=LAYOUT_BYTES, max_length=LAYOUT_BYTES)]
Mac = Annotated[bytes, Meta(min_length=MAC_BYTES, max_length=MAC_BYTES)]
Epoch = Annotated[int, Meta(ge=0, lt=1 << 62)]


def sequence_digest(tokens: Sequence[int]) -> bytes:
    """Names the tokens: an order may arrive damaged."""
    return hashlib.blake2b(np.asarray(tokens, "<u4").tobytes(), digest_size=SEQUENCE_BYTES).digest()


class KVLayout(Struct, frozen=True, omit_defaults=True):
    """How KV of a token lies in a segment, one layer after the other:

    layer      [ plane 0: token 0: head 0, head 1 … | token 1: … ][ plane 1: … ] …
    features   [ token 0 | token 1 … ]                               one more layer, the last, where there are any
    """

    layers: Length  # that of features included
    first_head: Index  # of the model's KV heads; where they are split over ranks a rank has some of them
    heads: Length
    planes: Annotated[list[Length], Meta(min_length=1, max_length=8)]  # bytes of one head of a token in each plane
    features: Index = 0  # bytes of a token's feature; 0: there are none

    @property
    def span(self) -> range:
        return range(self.first_head, self.first_head + self.heads)

    @property
    def token_bytes(self) -> int:
        """Of one token in one layer, keys and values."""
        return self.heads * sum(self.planes)

    @property
    def of_kv(self) -> range:
        return range(self.layers - (self.features > 0))

    def bytes_of(self, layers: range) -> int:
        """Of one token in these layers."""
        of_kv = len(range(layers.start, min(layers.stop, self.of_kv.stop)))
        return of_kv * self.token_bytes + (len(layers) - of_kv) * self.features

    @property
    def described(self) -> str:
        features = f" and features of {self.features} bytes" if self.features else ""
        return f"{len(self.of_kv)} layers of {self.planes} bytes a head{features}"

    def digest(self) -> bytes:
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=LAYOUT_BYTES).digest()


class KVIdentity(Struct, frozen=True):
    """KV of two processes is the same if all `facts` (model, weights, tokenizer, arithmetic) and the layouts are
    equal."""

    facts: Annotated[dict[str, Annotated[str, Meta(max_length=1024)]], Meta(max_length=32)]
    layout: KVLayout

    def difference(self, other: "KVIdentity") -> str | None:
        """The first fact that differs, as `name: ours, not theirs`; None if all are equal."""
        for name in (*self.facts, *other.facts):
            ours, theirs = self.facts.get(name, "none"), other.facts.get(name, "none")
            if ours != theirs:
                return f"{name}: {ours}, not {theirs}"
        ours, theirs = (one.layout.described for one in (self, other))
        return None if ours == theirs else f"layout: {ours}, not {theirs}"


class SegmentReference(Struct, frozen=True):
    """Names a segment: KV of the tokens [first, first + tokens) in the layers [layer, layer + layers)."""

    epoch: Epoch  # of its place: another one is there since the place was given to somebody else
    handover: Id
    sequence: SequenceDigest  # of all tokens that were ordered
    number: Index  # of the hand-over's segments, from 0
    first: Index  # token, counted from the sequence's beginning
    tokens: Length
    layer: Index
    layers: Length
    place: Index  # in the owner's memory
    size: Length  # bytes
    layout: LayoutDigest
    content: Annotated[int, Meta(ge=0, lt=1 << 32)]  # CRC-32 of the bytes
    mac: Mac = bytes(MAC_BYTES)  # of all else; its key is known to the owner and to the target that it is for

    def signed(self, key: bytes) -> "SegmentReference":
        return msgspec.structs.replace(self, mac=self._mac(key))

    def authentic(self, key: bytes) -> bool:
        return hmac.compare_digest(self.mac, self._mac(key))

    def _mac(self, key: bytes) -> bytes:
        plain = msgspec.msgpack.encode(msgspec.structs.replace(self, mac=bytes(MAC_BYTES)))
        return hashlib.blake2b(plain, key=key, person=b"pilotfish kv", digest_size=MAC_BYTES).digest()
