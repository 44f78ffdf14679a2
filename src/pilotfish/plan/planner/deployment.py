from collections import Counter
from collections.abc import Iterator, Mapping

from msgspec import Struct

from pilotfish.config.fields import Mode
from pilotfish.config.hardware.cost import PlacedModel
from pilotfish.config.hardware.tables import LINKS, Device, Interconnect
from pilotfish.plan.planner.acceptance import PairAcceptance


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
    def groups(self) -> Iterator[tuple[Device, int, str]]:
        """Devices, how many of them, and by what name `LoadPoint.utilisation` has the share of the time they work."""
        for device, count in self.target.devices:
            yield device, count * self.replicas, "target"
        if self.draft is not None and not self.draft.resident:
            yield self.draft.placed.device, self.draft.placed.count * self.draft.workers, "draft at work"
        if self.prefill is not None:
            yield self.prefill.placed.device, self.prefill.placed.count * self.prefill.workers, "prefill"

    @property
    def devices(self) -> Mapping[str, int]:
        counts: Counter[str] = Counter()
        for device, count, _ in self.groups:
            counts[device.full_name] += count
        return counts

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
