"""The file of variants is in docs/rollout.md. A request is a point of [0, 1), the hash of its client or of itself. Each
variant has an interval as long as its greatest share, in the file's order, and occupies its beginning:

    0 ── holdout ── 0.05 ── next, 0.2 of 0.5 ──▶·············0.55 ──────────── 1     unoccupied: `present`'s

So a ramp moves requests from the variant that takes the rest to the ramped one, and no other."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Literal

from msgspec import Struct

from pilotfish.validation import parsed_toml

#: Variants are labels of metrics, so their number is bounded.
MAX_VARIANTS = 16
#: Tolerance for sums of shares: decimal fractions are not exact.
ROUNDING = 1e-9
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")
#: The variants of a server without a file.
DEFAULT = "default"


class RampKnot(Struct, frozen=True, forbid_unknown_fields=True):
    """From `at` on, with an offset of UTC, the share is at least this one; between two knots it rises evenly."""

    at: datetime
    share: float


class Variant(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    mode: Literal["on", "off"] = "on"  # off: plain decoding; on: as the server is configured
    draft: str = ""  # the revision of the drafts in pools that may guess; "": any
    nodes: int | None = None  # of a tree, at most; None: as the server is configured
    share: float | None = None  # of the requests
    ramp: list[RampKnot] = []  # in place of a share
    tags: list[str] = []  # of requests that always get it
    holdout: bool = False

    @property
    def max_nodes(self) -> int | None:
        return 0 if self.mode == "off" else self.nodes

    @property
    def rest(self) -> bool:
        return self.share is None and not self.ramp

    @property
    def greatest_share(self) -> float:
        return self.ramp[-1].share if self.ramp else self.share or 0.0

    def share_at(self, now: float) -> float:
        """`now` in seconds since the epoch."""
        if not self.ramp or now >= self.ramp[-1].at.timestamp():
            return self.greatest_share
        for before, after in pairwise(self.ramp):
            began, ends = before.at.timestamp(), after.at.timestamp()
            if began <= now < ends:
                return before.share + (after.share - before.share) * (now - began) / (ends - began)
        return 0.0


class Assigned(Struct, frozen=True):
    variant: Variant
    pinned: bool = False  # by its tag: it counts in no comparison


class Variants(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    variant: list[Variant]
    sticky: Literal["client", "request"] = "request"
    canary: float = 0.0  # share of the requests that are generated again without speculation while targets are idle

    @property
    def names(self) -> list[str]:
        return [variant.name for variant in self.variant]

    @property
    def holdout(self) -> str:
        return next((variant.name for variant in self.variant if variant.holdout), "")

    @property
    def drafts(self) -> set[str]:
        return {variant.draft for variant in self.variant if variant.draft}

    def assign(self, client: str, request: str, tag: str | None, now: float) -> Assigned:
        """`now` in seconds since the epoch."""
        for variant in self.variant:
            if tag is not None and tag in variant.tags:
                return Assigned(variant, pinned=True)
        point, begin, rest = unit(client if self.sticky == "client" else request), 0.0, self.variant[0]
        for variant in self.variant:
            if variant.rest:
                rest = variant
            elif begin <= point < begin + variant.share_at(now):
                return Assigned(variant)
            begin += variant.greatest_share
        return Assigned(rest)


#: Of a server without a file.
ONE_VARIANT = Variants(variant=[Variant(name=DEFAULT)])


def unit(text: str, use: str = "variant") -> float:
    """A hash of the text in [0, 1), another one for each use."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=use.encode()[:16]).digest()
    return int.from_bytes(digest) / 2**64


def read_variants(text: str) -> Variants:
    """ParameterError names the bad field of the TOML file."""
    return parsed_toml("rollout", text, Variants, _faults)


def _faults(variants: Variants) -> Iterator[tuple[str, object, str]]:
    found = variants.variant
    if not 0 <= variants.canary <= 1:
        yield "canary", variants.canary, "0 to 1"
    if not 1 <= len(found) <= MAX_VARIANTS:
        yield "variant", len(found), f"1 to {MAX_VARIANTS} variants"
    for place, variant in enumerate(found):
        yield from _own_faults(f"variant[{place}]", variant)
        if variant.name in variants.names[:place]:
            yield f"variant[{place}].name", variant.name, "a name for each variant of its own"
    tags = [tag for variant in found for tag in variant.tags]
    for place, tag in enumerate(tags):
        if tag in tags[:place]:
            yield "variant.tags", tag, "a tag once: it belongs to one variant"
    if sum(variant.holdout for variant in found) > 1:
        yield "variant.holdout", True, "one holdout at most"
    yield from _faults_of_shares(found)


def _own_faults(name: str, variant: Variant) -> Iterator[tuple[str, object, str]]:
    if not _NAME.fullmatch(variant.name):
        yield f"{name}.name", variant.name, "1 to 32 letters, digits and _ . -, a letter or digit first"
    if variant.holdout and (variant.mode != "off" or variant.ramp or variant.tags):
        yield f"{name}.holdout", True, 'mode = "off", no ramp and no tags: it is what the others are compared with'
    if variant.mode == "off" and (variant.draft or variant.nodes is not None):
        yield f"{name}.mode", "off", "neither draft nor nodes with it"
    if variant.nodes is not None and variant.nodes < 1:
        yield f"{name}.nodes", variant.nodes, "1 or more"
    if variant.share is not None and variant.ramp:
        yield f"{name}.ramp", len(variant.ramp), "share or ramp, not both"
    for share in (variant.share, *(knot.share for knot in variant.ramp)):
        if share is not None and not 0 <= share <= 1:
            yield f"{name}.share", share, "0 to 1"
    yield from _faults_of_ramp(name, variant.ramp)


def _faults_of_ramp(name: str, ramp: Sequence[RampKnot]) -> Iterator[tuple[str, object, str]]:
    for knot in ramp:
        if knot.at.tzinfo is None:
            yield f"{name}.ramp", knot.at.isoformat(), "a time with its offset of UTC, as 2026-12-01T08:00:00Z"
            return
    for before, after in pairwise(ramp):
        if after.at <= before.at:
            yield f"{name}.ramp", after.at.isoformat(), f"later than {before.at.isoformat()}, the time before it"
        if after.share < before.share:
            yield f"{name}.ramp", after.share, f"{before.share:g} or more: a ramp does not go backwards"


def _faults_of_shares(found: Sequence[Variant]) -> Iterator[tuple[str, object, str]]:
    rest = [variant.name for variant in found if variant.rest]
    total = sum(variant.greatest_share for variant in found)
    if len(rest) > 1:
        yield "variant.share", None, f"a share for all but one of {', '.join(rest)}"
    if total > 1 + ROUNDING:
        yield "variant.share", round(total, 6), "shares, each ramp's last, of 1 together at most"
    if not rest and (total < 1 - ROUNDING or any(variant.ramp for variant in found)):
        yield "variant.share", round(total, 6), "1 together without ramps, or a variant without a share, for the rest"
