import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import asdict, replace

from pilotfish.config.hardware.cost import KV_MEMORY, PlacedModel, parse_devices, peak_of
from pilotfish.config.hardware.shapes import MODELS
from pilotfish.config.hardware.tables import LINKS, Device, look_up
from pilotfish.errors import ParameterError
from pilotfish.plan.placements import TIERS, MemoryTier, SplitModel, TieredModel
from pilotfish.plan.planner.deployment import Deployment, DraftPlacement, PrefillPlacement
from pilotfish.plan.planner.situation import OfferedDraft, OfferedPlacement, PlannedTier, Situation

#: Numbers of replicas that are tried; of workers; of devices that share a target, and a draft.
REPLICAS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
WORKERS = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256, 512, 1024)
TARGET_DEGREES = (1, 2, 4, 8, 16, 32)
DRAFT_DEGREES = (1, 2)

Left = Mapping[str, int]


def deployments(situation: Situation) -> Iterator[Deployment]:
    """Without prefill workers. ParameterError naming `target`, with the lacking memory, where it fits nowhere."""
    targets = list(_targets(situation))
    if not targets:
        raise ParameterError("target", situation.target, _by_how_much(situation))
    for target in targets:
        for replicas in REPLICAS:
            plain = Deployment(target=target, replicas=replicas, link=situation.network)
            if (left := _left(situation, plain)) is None:
                break
            yield plain
            yield from _drafted(situation, plain, left)


def with_prefill(situation: Situation, deployment: Deployment) -> Iterator[Deployment]:
    left = _left(situation, deployment) or {}
    for device, count, workers in _apart(situation, left, max(WORKERS), TARGET_DEGREES):
        placed = _on(situation, device, count)
        fewest = placed.kv_room > 0 and (count == 1 or _on(situation, device, count // 2).kv_room <= 0)
        if fewest and peak_of(device, placed.weights):
            yield replace(deployment, prefill=PrefillPlacement(placed=placed, workers=workers))


def _targets(situation: Situation) -> Iterator[PlacedModel]:
    if situation.placements:
        for offer in situation.placements:
            yield _placed(situation, offer)
        return
    for offered in situation.devices:
        for count in TARGET_DEGREES:
            placed = _on(situation, offered.device(), count)
            if count <= offered.count and peak_of(placed.device, placed.weights) and placed.kv_room > 0:
                yield placed


def _on(situation: Situation, device: Device, count: int, draft: OfferedDraft | None = None) -> PlacedModel:
    return PlacedModel(
        model=situation.model if draft is None else look_up(MODELS, "draft", "models", draft.model),
        device=device,
        count=count,
        engine=situation.constants,
        weights=(draft and draft.weights) or situation.weights,
        kv=situation.kv,
    )


def _placed(situation: Situation, offer: OfferedPlacement) -> PlacedModel:
    placed = _named(situation, offer.on)
    if offer.ffn_on is not None:
        if offer.tier is not None:
            raise ParameterError("placements", offer.on, "either a tier or ffn_on, not both")
        link = look_up(LINKS, "ffn_link", "links", offer.ffn_link)
        ffn = _named(situation, offer.ffn_on)
        placed = SplitModel(**asdict(placed), ffn=ffn, link=link, batches=offer.batches)
    elif offer.tier is not None:
        tier = _tier(offer.tier)
        placed = TieredModel(**asdict(placed), tier=tier, weights_share=offer.tier.weights, kv_share=offer.tier.kv)
    if placed.kv_room <= 0:
        missing = f"{-placed.kv_room / 1e9:.1f} GB more memory, or smaller weights: no KV fits beside them"
        raise ParameterError("placements", offer.on, missing)
    return placed


def _named(situation: Situation, text: str) -> PlacedModel:
    name, count = parse_devices(text)
    for offered in situation.devices:
        if offered.name.lower() == name.lower() and count <= offered.count:
            placed = _on(situation, offered.device(), count)
            if peak_of(placed.device, placed.weights) is None:
                raise ParameterError("placements", text, f"a device whose peak for {placed.weights} is known")
            return placed
    raise ParameterError("placements", text, "devices that the plan has, and no more of them")


def _tier(use: PlannedTier) -> MemoryTier:
    name, memory, bandwidth = use.name, use.memory, use.bandwidth
    if memory is None and bandwidth is None:
        return look_up(TIERS, "tier", "tiers", name)
    if not (memory and bandwidth and memory > 0 and bandwidth > 0):
        raise ParameterError("tier", name, "memory and bandwidth, both above 0, or the name of a known tier alone")
    return MemoryTier(full_name=name, memory=memory, bandwidth=bandwidth, writable=use.writable, sources=("given",))


def _left(situation: Situation, deployment: Deployment) -> Left | None:
    left = Counter(situation.counts)
    left.subtract(deployment.devices)
    return None if min(left.values()) < 0 else left


def _drafted(situation: Situation, plain: Deployment, left: Left) -> Iterator[Deployment]:
    for offer in situation.drafts:
        yield from _resident(situation, plain, offer)
        for device, count, workers in _apart(situation, left, plain.replicas, DRAFT_DEGREES):
            draft = _draft(situation, offer, device, count, workers)
            if draft.placed.kv_room > 0 and peak_of(device, draft.placed.weights):
                yield replace(plain, mode="sync", draft=draft)
                yield replace(plain, mode="async", draft=draft)


def _resident(situation: Situation, plain: Deployment, offer: OfferedDraft) -> Iterator[Deployment]:
    """In turn alone: two models at once on one device slow each other down in ways not modelled."""
    (device, count), *others = plain.target.devices
    for degree in () if others else {1, count}:
        drafted = replace(plain, mode="sync", draft=_draft(situation, offer, device, degree, 0))
        if drafted.kv_tokens > 0:
            yield drafted


def _draft(situation: Situation, offer: OfferedDraft, device: Device, count: int, workers: int) -> DraftPlacement:
    placed, acceptance = _on(situation, device, count, offer), offer.acceptance(situation.target)
    return DraftPlacement(name=offer.model, placed=placed, acceptance=acceptance, resident=not workers, workers=workers)


def _apart(situation: Situation, left: Left, most: int, degrees: Sequence[int]) -> Iterator[tuple[Device, int, int]]:
    """For remaining devices of a kind: the device, devices that share a model, and workers, at most `most`."""
    for offered in situation.devices:
        device = offered.device()
        for count in degrees:
            for workers in WORKERS:
                if workers > most or count * workers > left.get(device.full_name, 0):
                    break
                yield device, count, workers


def _by_how_much(situation: Situation) -> str:
    most = ((max(degree for degree in TARGET_DEGREES if degree <= offer.count), offer) for offer in situation.devices)
    rooms = [(_on(situation, offer.device(), degree), offer) for degree, offer in most]
    usable = [(placed, offer) for placed, offer in rooms if peak_of(placed.device, placed.weights)]
    if not usable:
        return f"a device whose peak for {situation.weights} is known"
    placed, offer = max(usable, key=lambda one: one[0].kv_room)
    needed = math.ceil(placed.weight_bytes / (KV_MEMORY * placed.device.memory))
    missing = f"{-placed.kv_room / 1e9:.1f} GB of the weights in {situation.weights} do not fit in {KV_MEMORY:.0%}"
    return f"more memory than {placed.count} {offer.name}: {missing} of it; {needed} or more would do"
