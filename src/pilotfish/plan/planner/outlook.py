from msgspec import Struct

from pilotfish.config.fields import Mode
from pilotfish.plan.planner.demand import Demand
from pilotfish.plan.planner.deployment import Deployment
from pilotfish.plan.planner.load import LoadedDeployment, LoadPoint
from pilotfish.plan.planner.situation import Situation
from pilotfish.plan.published import ErrorBand, error_band
from pilotfish.plan.published import Mode as PublishedMode

MILLION = 1e6
#: Rows whose errors apply to a mode. Plain decoding has but three; single forwards of speculating engines are added.
ROWS: dict[Mode, tuple[PublishedMode, ...]] = {"off": ("plain", "forward"), "sync": ("sync",), "async": ("async",)}


class Money(Struct, frozen=True, kw_only=True):
    """USD, at the lowest and the highest price of each device."""

    low: float
    high: float

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2


class Outlook(Struct, frozen=True, kw_only=True):
    """At the demand or, if that is too much, at the most that it serves within the limits."""

    deployment: Deployment
    serves: bool  # the demand, within the limits
    point: LoadPoint
    capacity: LoadPoint  # the most within memory and limits
    stops: str  # what keeps a target from more
    band: ErrorBand  # on rates, by published rows of the mode
    hourly: Money | None  # None: a device has no price
    joules: float | None  # per million output tokens, at designed power; None: a device's power is not known

    @property
    def token_cost(self) -> Money | None:
        """USD per million output tokens at `point`, by the range of prices alone."""
        if self.hourly is None:
            return None
        million = self.point.tokens * 3600 / MILLION
        return Money(low=self.hourly.low / million, high=self.hourly.high / million)

    @property
    def device_count(self) -> int:
        return sum(self.deployment.devices.values())

    def headroom(self, demand: Demand) -> float | None:
        """The rate at the low end of the band over the one asked for. None: the demand is in users."""
        return None if demand.rate is None else self.capacity.requests * self.band.low / demand.rate


def outlook(situation: Situation, deployment: Deployment) -> Outlook | None:
    """None where it serves nobody within memory and limits, or costs more than is allowed."""
    hourly, limit = hourly_cost(situation, deployment), situation.limits.dollars_per_hour
    if limit is not None and (hourly is None or hourly.mean > limit):
        return None
    loaded = LoadedDeployment(deployment, situation.workload, situation.limits)
    if not loaded.most:
        return None
    served, capacity = loaded.served(), loaded.at(loaded.most)
    point = served or capacity
    return Outlook(
        deployment=deployment,
        serves=served is not None,
        point=point,
        capacity=capacity,
        stops=loaded.stops,
        band=error_band(*ROWS["off" if point.step.tree is None else deployment.mode]),
        hourly=hourly,
        joules=_joules(deployment, point),
    )


def hourly_cost(situation: Situation, deployment: Deployment) -> Money | None:
    prices = {device.full_name: device.price for device in (offer.device() for offer in situation.devices)}
    low = high = 0.0
    for name, count in deployment.devices.items():
        if (price := prices[name]) is None:
            return None
        low, high = low + count * price[0], high + count * price[1]
    return Money(low=low, high=high)


def _joules(deployment: Deployment, point: LoadPoint) -> float | None:
    """Of devices alone, at designed power while busy and at none while idle."""
    watts = 0.0
    for device, count, role in deployment.groups:
        if device.power is None:
            return None
        watts += device.power * count * point.utilisation[role]
    return watts / point.tokens * MILLION
