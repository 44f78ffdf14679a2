"""All of Ray that is alpha, or that another minor version may change."""

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

#: Seconds between two times that a replica is asked what it has to tell.
STATS_PERIOD = 0.5
#: Seconds between two times that a demand is recorded, and over which it is averaged.
METRICS_PERIOD, LOOK_BACK = 1.0, 5.0


class _Telling(RequestRouter):
    """Tells its process of replicas that come, change and go. Pickled with this module, so it tells another module."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        from pilotfish.cluster.heard import LISTENERS, Listed

        if (listener := LISTENERS.get(self.app_name)) is None:
            super().update_replicas(replicas)  # asks each replica for its queue, which is cut off when a command ends
            return
        ready = [one for one in replicas if one.replica_metadata]
        listener([Listed(r.replica_id.unique_id, r.node_id, r.replica_metadata, r.routing_stats) for r in ready])


class TellingRouter(_Telling):
    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [candidate_replicas]


class TellingServersRouter(_Telling, PowerOfTwoChoicesRequestRouter):
    """Of servers, among which Ray's proxies choose as ever."""


def telling_router(servers: bool) -> RequestRouterConfig:
    kind = TellingServersRouter if servers else TellingRouter
    return RequestRouterConfig(request_router_class=kind, request_routing_stats_period_s=STATS_PERIOD)


def wanted(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    from pilotfish.core.routing.autoscaling import targets_wanted

    told = (context.aggregated_metrics or {}).get("demand", {})
    return targets_wanted(list(told.values()), context.target_num_replicas), {}


def scaled_by_demand(least: int, most: int, up_after: float, down_after: float) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=least,
        max_replicas=most,
        initial_replicas=least,
        metrics_interval_s=METRICS_PERIOD,
        look_back_period_s=LOOK_BACK,
        upscale_delay_s=up_after,
        downscale_delay_s=down_after,
        policy=AutoscalingPolicy(policy_function=wanted),
    )


def follow(application: str, deployment: str) -> DeploymentHandle:
    """Has this process told of a deployment's replicas, even before it exists, as long as the handle lives."""
    handle = DeploymentHandle(deployment, application)
    handle.options(stream=False)  # the first use makes the router
    return handle


def deployment_details(application: str, deployment: str) -> Mapping[str, Any] | None:
    """As in Serve's REST API: `deployment_config`, `replicas` with `replica_id`, `node_id` and `state`, and more."""
    client = serve.context._get_global_client(raise_if_no_controller_running=False)
    applications = {} if client is None else client.get_serve_details()["applications"]
    found: Mapping[str, Any] | None = applications.get(application, {}).get("deployments", {}).get(deployment)
    return found


def run_applications(applications: Mapping[str, Application]) -> None:
    targets = [
        serve.RunTarget(application, name, "/" if name.endswith("-api") else None)
        for name, application in applications.items()
    ]
    serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
