"""deploy/: what KubeRay and the inference gateways would take of the kinds that they add to Kubernetes.

No package has their definitions, so the facts of them are in schemas/: all fields of each level, with types, bounds and
values. What they take from Kubernetes' core (pods, metadata, services) is checked by Kubernetes' own schemas, to which
they refer.
"""

from __future__ import annotations

import copy
import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from jsonschema_rs import Draft202012Validator, Registry, ValidationError
from manifests import MANIFESTS, OLDEST, Manifest, of_kind

SCHEMAS = {"RayService": "ray_service", "InferencePool": "inference_pool"}
REMOVED = object()
CLUSTER = ("spec", "rayClusterConfig")
WORKERS = (*CLUSTER, "workerGroupSpecs", 1)
POD = (*WORKERS, "template", "spec")
PICKER = ("spec", "endpointPickerRef")


@cache
def validator(kind: str) -> Draft202012Validator:
    strict = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{OLDEST}.0-local-strict"
    core = json.loads((strict / "_definitions.json").read_text())
    schema = json.loads((Path(__file__).parent / "schemas" / f"{SCHEMAS[kind]}.json").read_text())
    return Draft202012Validator(schema, registry=Registry([(core["$id"], core)]))


def changed(kind: str, path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """The manifest of this kind with another value there."""
    (manifest,) = of_kind(kind)
    content = place = copy.deepcopy(manifest.content)
    for name in path[:-1]:
        place = place[name]
    if value is REMOVED:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return content


def test_a_kind_that_kubernetes_lacks_has_a_schema() -> None:
    """Prometheus-operator's own model takes the PodMonitor in tests/soak."""
    assert {one.kind for one in MANIFESTS if one.extends} == {"PodMonitor", *SCHEMAS}


@pytest.mark.parametrize("manifest", [one for one in MANIFESTS if one.kind in SCHEMAS], ids=str)
def test_the_extension_takes_it(manifest: Manifest) -> None:
    validator(manifest.kind).validate(manifest.content)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("apiVersion",), "ray.io/v1alpha1", '"ray.io/v1" was expected'),
        (("status",), {}, "'status' was unexpected"),
        (("metadata", "label"), {}, "'label' was unexpected"),
        (("spec", "rayClusterSpec"), {}, "'rayClusterSpec' was unexpected"),
        (("spec", "rayClusterConfig"), REMOVED, '"rayClusterConfig" is a required property'),
        (("spec", "rayClusterDeletionDelaySeconds"), "330", 'not of type "integer"'),
        (("spec", "rayClusterDeletionDelaySeconds"), -1, "less than the minimum of 0"),
        (("spec", "serveConfigV2"), {"applications": []}, 'not of type "string"'),
        (("spec", "upgradeStrategy"), {"type": "Rolling"}, '"Rolling" is not one of'),
        (("spec", "upgradeStrategy"), {"clusterUpgradeOptions": {"stepSizePercent": 5}}, '"gatewayClassName" is a req'),
        ((*CLUSTER, "authOptions", "mode"), "tokens", '"tokens" is not one of'),
        ((*CLUSTER, "autoscalerOptions"), {"env": [{"value": "1"}]}, '"name" is a required property'),
        ((*CLUSTER, "headGroupSpec"), REMOVED, '"headGroupSpec" is a required property'),
        ((*CLUSTER, "headGroupSpec", "rayStartParams", "num-cpus"), 0, 'not of type "string"'),
        ((*WORKERS, "groupname"), "targets", "'groupname' was unexpected"),
        ((*WORKERS, "template"), REMOVED, '"template" is a required property'),
        ((*WORKERS, "replicas"), 2**31, "greater than the maximum"),
        ((*POD, "securityContext", "runAsUsers"), 10001, "'runAsUsers' was unexpected"),
        ((*POD, "containers", 0, "name"), REMOVED, '"name" is a required property'),
    ],
)
def test_kuberay_refuses(path: tuple[str | int, ...], value: Any, reason: str) -> None:
    with pytest.raises(ValidationError) as refused:
        validator("RayService").validate(changed("RayService", path, value))
    assert reason in refused.value.message


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("apiVersion",), "inference.networking.x-k8s.io/v1alpha2", '"inference.networking.k8s.io/v1" was expected'),
        (("spec", "extensionRef"), {}, "'extensionRef' was unexpected"),
        (("spec", "selector"), {"app": "pilotfish"}, "'app' was unexpected"),
        (("spec", "selector", "matchLabels", "app"), "of/two", "does not match"),
        (("spec", "targetPorts"), [], "has less than 1 item"),
        (("spec", "targetPorts"), [{"number": 8000}] * 2, "has non-unique elements"),
        (("spec", "targetPorts"), [{"number": number} for number in range(8000, 8009)], "has more than 8 items"),
        (("spec", "targetPorts", 0, "number"), "http", 'not of type "integer"'),
        (("spec", "targetPorts", 0, "name"), "http", "'name' was unexpected"),
        (("spec", "appProtocol"), "grpc", '"grpc" is not one of'),
        (PICKER, REMOVED, '"endpointPickerRef" is a required property'),
        ((*PICKER, "name"), REMOVED, '"name" is a required property'),
        ((*PICKER, "port"), REMOVED, '"port" is a required property'),
        ((*PICKER, "port", "number"), 65536, "greater than the maximum"),
        ((*PICKER, "portNumber"), 9002, "'portNumber' was unexpected"),
        ((*PICKER, "failureMode"), "FailOpened", '"FailOpened" is not one of'),
    ],
)
def test_inference_gateways_refuse(path: tuple[str | int, ...], value: Any, reason: str) -> None:
    with pytest.raises(ValidationError) as refused:
        validator("InferencePool").validate(changed("InferencePool", path, value))
    assert reason in refused.value.message


def test_a_picker_that_is_no_service_needs_no_port() -> None:
    (pool,) = of_kind("InferencePool")
    reference = {"group": "example.com", "kind": "Picker", "name": "pilotfish-picker"}
    validator("InferencePool").validate({**pool.content, "spec": {**pool.spec, "endpointPickerRef": reference}})
