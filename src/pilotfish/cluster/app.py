"""One application for each role, for `pilotfish cluster up`, `serve build` and `serve run`: a file of Ray Serve names
`pilotfish.cluster.app:target` and so on, with `args: {config: CLUSTER.yaml}`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application

from pilotfish.cluster.alpha import scaled_by_demand, telling_router
from pilotfish.cluster.api import ServedApi
from pilotfish.cluster.config import DEPLOYMENTS, ROLES, ClusterConfig, Role, read_cluster_config
from pilotfish.cluster.preflight import needs
from pilotfish.cluster.replicas import ServedTarget, ServedWorker
from pilotfish.cluster.worker import GRACE
from pilotfish.errors import ParameterError

#: Seconds between two looks at a replica's health, and that it has to answer.
HEALTH_PERIOD, HEALTH_TIMEOUT = 1.0, 30.0
#: Failures of a role's first processes after which it is given up.
START_FAILURES = 3
#: Of a server at a time; its own admission says no before that.
MOST_REQUESTS = 1 << 14
CLASSES: Mapping[Role, type] = {
    "api": serve.ingress()(ServedApi),
    "target": ServedTarget,
    "draft": ServedWorker,
    "prefill": ServedWorker,
}


def _builder(role: Role) -> Callable[[Mapping[str, str]], Application]:
    """Serve takes functions alone."""

    def built(args: Mapping[str, str]) -> Application:
        if set(args) != {"config"}:
            raise ParameterError("args", dict(args), "config alone: the path of a cluster's file")
        return application(role, read_cluster_config(Path(args["config"])))

    return built


api, target, draft, prefill = map(_builder, ROLES)


def application(role: Role, config: ClusterConfig) -> Application:
    deployment = serve.deployment(CLASSES[role], name=DEPLOYMENTS[role], **_options(role, config))
    return deployment.bind(config, role)


def _options(role: Role, config: ClusterConfig) -> dict[str, Any]:
    return {
        **_count(role, config),
        "ray_actor_options": _placed(role, config),
        "user_config": {"setup": config.setup_of(role)},  # for `cluster up` to find again
        "request_router_config": telling_router(servers=role == "api"),
        **({"max_ongoing_requests": MOST_REQUESTS} if role == "api" else {}),
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": config.drain_timeout + GRACE,
        "health_check_period_s": HEALTH_PERIOD,
        "health_check_timeout_s": HEALTH_TIMEOUT,
        "max_constructor_retry_count": START_FAILURES,
    }


def _count(role: Role, config: ClusterConfig) -> dict[str, Any]:
    least, most = config.of(role).count, config.of(role).most
    if most is None:
        return {"num_replicas": least}
    return {"autoscaling_config": scaled_by_demand(least, most, config.scale_up_after, config.scale_down_after)}


def _placed(role: Role, config: ClusterConfig) -> dict[str, Any]:
    own, resources = config.of(role), needs(config, role)
    options: dict[str, Any] = {
        "num_cpus": resources.pop("CPU", 0.0),
        "num_gpus": resources.pop("GPU", 0.0),
        "resources": resources,
    }
    if own.labels:
        options["label_selector"] = dict(own.labels)
    if role == "api" and own.environment:  # the others' goes to the processes that they start
        options["runtime_env"] = {"env_vars": dict(own.environment)}
    return options
