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
    ("kind", "path", "value", "reason"),
    [
        ("RayService", ("apiVersion",), "ray.io/v1alpha1", '"ray.io/v1" was expected'),
        ("RayService", ("spec", "rayClusterSpec"), {}, "'rayClusterSpec' was unexpected"),
        ("RayService", ("spec", "rayClusterDeletionDelaySeconds"), -1, "less than the minimum of 0"),
        ("RayService", ("spec", "upgradeStrategy"), {"type": "Rolling"}, '"Rolling" is not one of'),
        ("RayService", (*CLUSTER, "headGroupSpec", "rayStartParams", "num-cpus"), 0, 'not of type "string"'),
        ("RayService", (*WORKERS, "template"), REMOVED, '"template" is a required property'),
        ("RayService", (*POD, "securityContext", "runAsUsers"), 10001, "'runAsUsers' was unexpected"),
        ("InferencePool", ("spec", "extensionRef"), {}, "'extensionRef' was unexpected"),
        ("InferencePool", ("spec", "selector", "matchLabels", "app"), "of/two", "does not match"),
        ("InferencePool", ("spec", "targetPorts"), [{"number": 8000}] * 2, "has non-unique elements"),
        ("InferencePool", (*PICKER, "port"), REMOVED, '"port" is a required property'),
        ("InferencePool", (*PICKER, "port", "number"), 65536, "greater than the maximum"),
    ],
)
def test_the_extensions_schemas_are_strict(kind: str, path: tuple[str | int, ...], value: Any, reason: str) -> None:
    with pytest.raises(ValidationError) as refused:
        validator(kind).validate(changed(kind, path, value))
    assert reason in refused.value.message


def test_a_picker_that_is_no_service_needs_no_port() -> None:
    (pool,) = of_kind("InferencePool")
    reference = {"group": "example.com", "kind": "Picker", "name": "pilotfish-picker"}
    validator("InferencePool").validate({**pool.content, "spec": {**pool.spec, "endpointPickerRef": reference}})
