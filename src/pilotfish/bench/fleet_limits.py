"""What one server has to do as its fleet grows, and at how many targets it, or a draft pool, can do no more."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from pilotfish.bench.report import Row
from pilotfish.bench.server_costs import FollowCosts
from pilotfish.plan.fleets.fleet_figures import FleetFigures
from pilotfish.plan.fleets.fleet_plan import FleetPlan

#: Beats of a target, and Attends to it, a second. An Attend costs about as much as what is heard.
BEATS = 4.0


@dataclass(frozen=True)
class ServerLoad:
    """Shares of a server's core."""

    requests: float  # their bodies and tokens
    events: float
    frames: float  # targets' steps
    decisions: float  # of routing
    held: float  # prefixes that targets got or lost: as many messages as reports
    reports: float  # of targets' loads
    beats: float

    @property
    def all(self) -> float:
        return self.requests + self.events + self.frames + self.decisions + self.held + self.reports + self.beats

    @property
    def largest(self) -> str:
        shares = asdict(self)
        return max(shares, key=lambda part: shares[part])


def server_load(plan: FleetPlan, figures: FleetFigures, costs: FollowCosts) -> ServerLoad:
    """Every server follows every target."""
    server, servers = plan.server, plan.servers
    requests = figures.routed * server.request_seconds + figures.prompts * server.token_seconds
    return ServerLoad(
        requests=requests / servers,
        events=figures.events * server.event_seconds / servers,
        frames=figures.frames * server.frame_seconds / servers,
        decisions=figures.routed * costs.decision / servers,
        held=figures.keys_told * costs.key + figures.reports * server.hear_seconds,
        reports=figures.reports * (costs.report + server.hear_seconds),
        beats=plan.targets * BEATS * server.hear_seconds,
    )


def on_paper(load: ServerLoad, times: float) -> ServerLoad:
    """At so many times as many targets and servers: what a server does for its own requests stays, what it hears of all
    targets grows, and so does a decision among them."""
    heard = {"decisions": load.decisions, "held": load.held, "reports": load.reports, "beats": load.beats}
    return replace(load, **{part: share * times for part, share in heard.items()})


def row_of_load(targets: int, servers: int, simulated: bool, load: ServerLoad, held_bytes: float) -> Row:
    """`held_bytes` a second come to each server."""
    shares = asdict(load)
    return {
        "targets": targets,
        "servers": servers,
        "simulated": simulated,
        **shares,
        "all": load.all,
        "largest": load.largest,
        "held_mb_per_s": held_bytes / 1e6,
    }


def limits_of(plan: FleetPlan, figures: FleetFigures, load: ServerLoad) -> list[Row]:
    """Targets at which each part alone would take a server's whole core: where one server serves all of them, and where
    there are as many targets for each server as now; and those that a draft pool can serve."""
    targets, servers = plan.targets, plan.servers
    own = {"requests": load.requests, "events": load.events, "frames": load.frames}
    heard = {"held": load.held, "reports": load.reports, "beats": load.beats}
    rows: list[Row] = [_row(part, targets / servers / share, None) for part, share in own.items() if share]
    rows += [_row(part, targets / share, targets / share) for part, share in heard.items() if share]
    # A decision costs in proportion to the targets, and there are as many as requests.
    rows.append(_row("decisions", targets / math.sqrt(load.decisions * servers), targets / load.decisions))
    return rows + _drafts(plan, figures)


def _drafts(plan: FleetPlan, figures: FleetFigures) -> list[Row]:
    if plan.draft is None:
        return []
    slots = plan.draft.slots * plan.targets / figures.context
    return [
        {"part": "drafts: levels and prompts", "of_one_pool": plan.targets / plan.draft_pools / figures.busy_drafts},
        {"part": "drafts: sessions' KV", "of_one_pool": slots},
    ]


def _row(part: str, alone: float, together: float | None) -> Row:
    return {"part": part, "of_one_server": alone, "of_a_fleet": together}
