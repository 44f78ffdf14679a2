from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from pilotfish.config.hardware.cost import PlacedModel
from pilotfish.config.hardware.tables import LINKS, Interconnect
from pilotfish.plan.planner.acceptance import PairAcceptance

Mode = Literal["off", "sync", "async"]


class DraftPlacement(Struct, frozen=True, kw_only=True):
    """`resident`: on the target's devices, sharing memory and time, and whole on each if it has fewer devices.
    Otherwise `workers` on devices of their own serve all targets."""

    name: str
    placed: PlacedModel
    acceptance: PairAcceptance
    resident: bool
    workers: int = 0


class PrefillPlacement(Struct, frozen=True, kw_only=True):
    placed: PlacedModel  # the target's model
    workers: int


class Deployment(Struct, frozen=True, kw_only=True):
    target: PlacedModel
    replicas: int
    mode: Mode = "off"
    draft: DraftPlacement | None = None  # None: mode off
    prefill: PrefillPlacement | None = None  # None: targets compute their prompts
    link: Interconnect = LINKS["roce-100g"]  # between targets, drafts and prefill workers on devices of their own

    @property
    def devices(self) -> Mapping[str, int]:
        counts: Counter[str] = Counter()
        for device, count in self.target.devices:
            counts[device.full_name] += count * self.replicas
        for other in (self.draft, self.prefill):
            if other is not None:
                workers = 0 if isinstance(other, DraftPlacement) and other.resident else other.workers
                counts[other.placed.device.full_name] += other.placed.count * workers
        return {name: count for name, count in counts.items() if count}

    @property
    def kind(self) -> str:
        where = "" if self.draft is None else ", draft co-resident" if self.draft.resident else ", draft apart"
        return f"{self.mode}{where}{'' if self.prefill is None else ', prefill apart'}"

    @property
    def kv_tokens(self) -> float:
        weights, kv = self._co_resident
        return max(0.0, (self.target.kv_room - weights) / (self.target.kv_bytes + kv))

    @property
    def tokens_taken(self) -> float:
        """Tokens of KV by which a co-resident draft reduces a target's room."""
        return max(0.0, self.target.kv_room / self.target.kv_bytes) - self.kv_tokens

    @property
    def _co_resident(self) -> tuple[float, float]:
        """Bytes of weights, and of a token's KV, of a co-resident draft. Devices share KV evenly, so that the fullest
        bounds it: as if each had the draft."""
        if self.draft is None or not self.draft.resident:
            return 0.0, 0.0
        draft = self.draft.placed
        copies = sum(count for _, count in self.target.devices) / draft.count
        return copies * draft.weight_bytes, copies * draft.kv_bytes
