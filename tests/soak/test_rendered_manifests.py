"""deploy/: what kubectl makes of the manifests, and what the projects whose extensions they use say of them."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from manifests import KUBERNETES, MANIFESTS, Manifest, of_kind
from pydantic import ValidationError

WAYS = sorted(file.parent for file in KUBERNETES.rglob("kustomization.yaml"))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_kubectl_renders_what_the_files_say(way: Path) -> None:
    kubectl = Path(sys.executable).with_name("kubectl")
    text = subprocess.run([kubectl, "kustomize", way], check=True, capture_output=True, text=True).stdout
    rendered = [Manifest(way, content) for content in yaml.safe_load_all(text)]
    files = [manifest for manifest in MANIFESTS if manifest.file.parent == way]
    assert sorted((one.kind, one.name) for one in rendered) == sorted((one.kind, one.name) for one in files)
    assert {one.content["metadata"]["namespace"] for one in rendered} == {"pilotfish"}
    containers = [container for one in rendered for pod in one.templates for container in pod["spec"]["containers"]]
    assert containers and all(":" in container["image"] for container in containers)


def test_prometheus_operator_takes_the_monitor() -> None:
    from cloudcoil.models.prometheus_operator.v1 import PodMonitor

    (monitor,) = of_kind("PodMonitor")
    PodMonitor.model_validate(monitor.content, extra="forbid")
    (endpoint,) = monitor.spec["podMetricsEndpoints"]
    wrong = {**monitor.content, "spec": {**monitor.spec, "podMetricsEndpoints": [{**endpoint, "every": "10s"}]}}
    with pytest.raises(ValidationError, match="every"):
        PodMonitor.model_validate(wrong, extra="forbid")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own
def test_ray_serve_takes_the_applications() -> None:
    from ray.serve.schema import ServeDeploySchema

    (service,) = of_kind("RayService")
    config = yaml.safe_load(service.spec["serveConfigV2"])
    taken = ServeDeploySchema.model_validate(config)
    assert [one.route_prefix for one in taken.applications] == [None, None, None, "/"]
    for application in taken.applications:
        module, name = str(application.import_path).split(":")
        assert callable(getattr(importlib.import_module(module), name))
    with pytest.raises(ValidationError, match="applications"):
        ServeDeploySchema.model_validate({**config, "applications": [{"name": "nothing to import"}]})
