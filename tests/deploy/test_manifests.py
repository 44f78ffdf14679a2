"""deploy/: manifests that Kubernetes' own schemas allow, and whose parts fit each other and the server."""

import json
import re
import subprocess
import tomllib
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import kubernetes_validate
import msgspec
import pytest
import yaml
from jsonschema_rs import Draft202012Validator, Registry
from manifests import (
    COMPONENT,
    KEYS,
    KUBERNETES,
    MANIFESTS,
    NAME,
    OLDEST,
    PODS,
    ROOT,
    WITH_COMMANDS,
    Manifest,
    Pod,
    documents,
    of_kind,
    selected,
)

from pilotfish.cluster.config import ClusterConfig, cluster_config
from pilotfish.cluster.document import document
from pilotfish.cluster.preflight import Host, check_devices, possible_roles
from pilotfish.config.server import ServerConfig
from pilotfish.engine.targets.members import Members
from pilotfish.server.application import make_app
from pilotfish.server.observe.metrics import DECLARATIONS
from pilotfish.wire.curve_keys import load_allowlist, new_key_pair, write_key_pair

SCHEMAS = {"RayService": "ray_service", "InferencePool": "inference_pool"}
SECRET = "pilotfish-keys"
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
KUSTOMIZATIONS = sorted(KUBERNETES.rglob("kustomization.yaml"))
POLICIES = of_kind("NetworkPolicy")
PODS_OF_RAY = [pod for pod in PODS if pod.manifest.kind == "RayService"]
every_pod = pytest.mark.parametrize("pod", PODS, ids=str)


def option(pod: Pod, name: str) -> str:
    """Of the container's command."""
    (value,) = [text.split("=", 1)[1] for text in pod.command if text.startswith(f"--{name}=")]
    return value


# -- schemas


@pytest.mark.parametrize("manifest", [one for one in MANIFESTS if not one.extends], ids=str)
def test_kubernetes_takes_it(manifest: Manifest) -> None:
    kubernetes_validate.validate(manifest.content, OLDEST, strict=True)


@pytest.mark.parametrize("manifest", [one for one in MANIFESTS if one.kind in SCHEMAS], ids=str)
def test_an_extension_takes_it(manifest: Manifest) -> None:
    """No package has the schemas of KubeRay and of inference gateways, so the facts of theirs are in schemas/: of each
    level the fields that our manifests have, with types, bounds and values. To pods Kubernetes' own apply."""
    strict = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{OLDEST}.0-local-strict"
    core = json.loads((strict / "_definitions.json").read_text())
    schema = json.loads((Path(__file__).parent / "schemas" / f"{SCHEMAS[manifest.kind]}.json").read_text())
    Draft202012Validator(schema, registry=Registry([(core["$id"], core)])).validate(manifest.content)


def test_each_kind_that_kubernetes_lacks_has_a_schema() -> None:
    """Prometheus-operator's own model takes the PodMonitor in tests/soak."""
    assert {one.kind for one in MANIFESTS if one.extends} == {"PodMonitor", *SCHEMAS}


# -- files


@pytest.mark.parametrize("file", KUSTOMIZATIONS, ids=lambda file: file.parent.name)
def test_a_kustomization_has_all_files_and_images_beside_it(file: Path) -> None:
    (content,) = documents(file)
    assert sorted(content["resources"]) == sorted({path.name for path in file.parent.glob("*.yaml")} - {file.name})
    images = {pod.container["image"] for pod in PODS if pod.manifest.file.parent == file.parent}
    assert images == {image["name"] for image in content["images"]}
    assert {image["newTag"] for image in content["images"]} == {version()}


def version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def test_the_image_is_of_this_version_and_has_what_is_copied() -> None:
    assert set(re.findall(r"pilotfish(?:-ray)?:([\d.]+\d)", DOCKERFILE)) == {version()}
    (torch,) = re.findall(r"^TORCH := (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"ARG TORCH={torch}\n" in DOCKERFILE and f"torch=={torch}\n" in (ROOT / "constraints.txt").read_text()
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()]
    assert all((ROOT / name).exists() for name in copied)
    sent = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().split()
    assert sent[0] == "*" and [name[1:] for name in sent if name[0] == "!"] == copied


# -- pods


@every_pod
def test_a_pod_runs_as_nobody_in_particular(pod: Pod) -> None:
    context, container = pod.spec["securityContext"], pod.container["securityContext"]
    assert context["runAsNonRoot"] and f"USER {context['runAsUser']}:{context['runAsGroup']}\n" in DOCKERFILE
    assert context["fsGroup"] == context["runAsGroup"]  # which may read the keys
    assert container["readOnlyRootFilesystem"] and not container["allowPrivilegeEscalation"]
    assert container["capabilities"] == {"drop": ["ALL"]} and context["seccompProfile"] == {"type": "RuntimeDefault"}
    writable = {mount["name"] for mount in pod.container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"scratch"} and {"name": "scratch", "emptyDir": {}} in pod.spec["volumes"]


@every_pod
def test_a_pod_asks_for_what_it_takes_and_mounts_what_there_is(pod: Pod) -> None:
    requests, limits = pod.container["resources"]["requests"], pod.container["resources"]["limits"]
    assert {"cpu", "memory"} <= requests.keys() and "memory" in limits
    assert limits.get("cpu") in (None, requests["cpu"])
    mounted = [mount["name"] for mount in pod.container["volumeMounts"]]
    assert sorted(mounted) == sorted(volume["name"] for volume in pod.spec["volumes"])


@pytest.mark.parametrize("pod", WITH_COMMANDS, ids=str)
def test_a_pod_is_ready_when_it_serves(pod: Pod) -> None:
    ready = pod.container["readinessProbe"]
    if pod.command[0] == "serve":
        assert ready["httpGet"] == {"path": "/ready", "port": "http"}
        assert {pod.container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness")} == {"/health"}
        assert pod.ports == {"http": int(option(pod, "port"))}
    else:
        _, written = pod.container["command"][2].split(" > ")
        assert "--json" in pod.command and ready["exec"]["command"] == ["test", "-s", written]
        assert [f"tcp://0.0.0.0:{port}" for port in pod.ports.values()] == [option(pod, "listen")]


def test_what_is_asked_over_http_is_there() -> None:
    app = make_app(cast(Any, None), ServerConfig(), cast(Any, SimpleNamespace(metrics=None)), None)
    routes = {getattr(route, "path", "") for route in app.routes}
    probes = [probe for pod in PODS for name, probe in pod.container.items() if name.endswith("Probe")]
    paths = [probe["httpGet"]["path"] for probe in probes if "httpGet" in probe]
    paths += [asked["path"] for monitor in of_kind("PodMonitor") for asked in monitor.spec["podMetricsEndpoints"]]
    assert len(set(paths)) == 3 and set(paths) <= routes


@pytest.mark.parametrize("pod", [pod for pod in WITH_COMMANDS if pod.command[0] == "serve"], ids=str)
def test_a_server_has_time_to_drain(pod: Pod) -> None:
    before = pod.container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod.spec["terminationGracePeriodSeconds"] > before + float(option(pod, "drain-timeout"))


# -- keys


@pytest.mark.parametrize("pod", WITH_COMMANDS, ids=str)
def test_a_pod_has_the_keys_that_it_reads_and_no_others(pod: Pod) -> None:
    values = [Path(text.split("=", 1)[1]) for text in pod.command if "=" in text]
    assert {path.name for path in values if path.parent == KEYS} == pod.key_files
    assert all(mount["mountPath"] == str(KEYS) for mount in pod.container["volumeMounts"] if mount["name"] == "keys")


def test_there_is_one_secret_and_nothing_of_it_in_a_manifest() -> None:
    volumes = [volume for pod in PODS for volume in pod.spec["volumes"] if "secret" in volume]
    assert {volume["secret"]["secretName"] for volume in volumes} == {SECRET}
    assert {volume["secret"]["defaultMode"] for volume in volumes} == {0o440}
    assert not of_kind("Secret")
    variables = [one for pod in PODS for one in pod.container.get("env", ())]
    assert not any(re.search("KEY|SECRET|TOKEN|PASSWORD", one["name"]) for one in variables)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """What keys.sh makes of four keys that are there."""
    for role in ("api", "target", "draft", "prefill"):
        write_key_pair(new_key_pair(), tmp_path / f"{role}.key")
    subprocess.run([ROOT / "deploy" / "keys.sh", tmp_path, "4", "2", "1"], check=True)
    return tmp_path


def test_keys_make_all_that_pods_read(made: Path) -> None:
    """But for the clients' keys, which are somebody's."""
    asked = {name for pod in WITH_COMMANDS for name in pod.key_files}
    assert asked - {"clients.toml"} == {path.name for path in made.iterdir()} - {"members.json"}
    assert [client.tenant for client in load_allowlist(made / "servers.allow").values()] == ["api"]
    assert [client.tenant for client in load_allowlist(made / "targets.allow").values()] == ["target"]


@pytest.mark.parametrize("count", ["x", "-1", ""])
def test_keys_of_no_number_of_processes_are_none(tmp_path: Path, count: str) -> None:
    command = [ROOT / "deploy" / "keys.sh", tmp_path / "keys", count, "2", "1"]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 2 and f"'{count}' is not allowed; expected" in made.stderr and not any(tmp_path.iterdir())


def test_members_are_the_pods_that_can_be(made: Path) -> None:
    """Each by the name that its Service gives it."""
    members = msgspec.json.decode((made / "members.json").read_bytes(), type=Members)
    most = {one.spec["scaleTargetRef"]["name"]: one.spec["maxReplicas"] for one in of_kind("HorizontalPodAutoscaler")}
    sets = {one.name: one.spec.get("replicas", most.get(one.name)) for one in of_kind("StatefulSet")}
    roles = {"target": members.targets, "draft": members.draft_pools, "prefill": members.prefill_pools}
    for role, found in roles.items():
        name, (service,) = f"pilotfish-{role}", [one for one in of_kind("Service") if one.name == f"pilotfish-{role}"]
        assert service.spec["clusterIP"] == "None" and service.spec["publishNotReadyAddresses"]
        (port,) = service.spec["ports"]
        expected = [f"tcp://{name}-{i}.{name}:{port['port']}" for i in range(sets[name])]
        assert [member.endpoint for member in found] == expected
        (public,) = {member.key for member in found}
        assert f"public {public}\n" in (made / f"{role}.key").read_text()


# -- who finds and reaches whom


def test_selectors_find_pods_with_the_ports_that_are_asked() -> None:
    for service in of_kind("Service"):
        pods = selected(service.spec["selector"])
        for port in service.spec["ports"]:
            target = port.get("targetPort", port["port"])
            assert pods and all(target in pod.ports or target in pod.ports.values() for pod in pods), service
    for manifest in (*of_kind("PodDisruptionBudget"), *of_kind("Deployment"), *of_kind("StatefulSet")):
        assert len(selected(manifest.spec["selector"]["matchLabels"])) == 1, manifest
    for monitor in of_kind("PodMonitor"):
        pods = selected(monitor.spec["selector"]["matchLabels"])
        assert pods and all(one["port"] in pod.ports for one in monitor.spec["podMetricsEndpoints"] for pod in pods)
    (pool,) = of_kind("InferencePool")
    (pod,) = selected(pool.spec["selector"]["matchLabels"])
    assert [port["number"] for port in pool.spec["targetPorts"]] == list(pod.ports.values())


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_policy_is_of_ports_that_pods_have(policy: Manifest) -> None:
    pods = selected(policy.spec["podSelector"]["matchLabels"])
    ports = {port for pod in pods for port in pod.ports.values()}
    assert pods and {port["port"] for rule in policy.spec.get("ingress", ()) for port in rule.get("ports", ())} <= ports
    for rule in policy.spec.get("egress", ()):
        for to in (to for to in rule["to"] if "podSelector" in to):
            (reached,) = selected(to["podSelector"]["matchLabels"])
            assert {port["port"] for port in rule["ports"]} == set(reached.ports.values())


def test_every_way_that_members_and_clients_take_is_open_and_no_other() -> None:
    """Of the pods without Ray: from whom each lets connections in."""
    let_in = {
        policy.spec["podSelector"]["matchLabels"].get(COMPONENT): [
            source["podSelector"]["matchLabels"][COMPONENT]
            for rule in policy.spec["ingress"]
            for source in rule.get("from", ())
        ]
        for policy in POLICIES
        if policy.file.parent.name == "plain" and "ingress" in policy.spec
    }
    assert let_in == {"api": [], "target": ["api"], "draft": ["target"], "prefill": ["target"]}
    (all_pods,) = [one for one in POLICIES if one.spec["podSelector"]["matchLabels"] == {NAME: "pilotfish"}]
    assert all_pods.spec["policyTypes"] == ["Ingress", "Egress"] and "ingress" not in all_pods.spec


# -- scaling


def test_what_scales_exists_and_leaves_its_count_to_the_autoscaler() -> None:
    scaled = {one.spec["scaleTargetRef"]["name"]: one for one in of_kind("HorizontalPodAutoscaler")}
    found = [one for one in MANIFESTS if one.kind in ("Deployment", "StatefulSet") and one.name in scaled]
    assert len(found) == len(scaled) == 2 and not any("replicas" in one.spec for one in found)
    assert all(one.kind == scaled[one.name].spec["scaleTargetRef"]["kind"] for one in found)


def test_targets_scale_on_metrics_that_servers_have() -> None:
    (adapter,) = documents(KUBERNETES / "monitoring" / "adapter.yaml")
    rules = {rule["name"]["as"]: rule for rule in adapter["rules"]["external"]}
    metrics = [metric for one in of_kind("HorizontalPodAutoscaler") for metric in one.spec["metrics"]]
    assert {metric["external"]["metric"]["name"] for metric in metrics if "external" in metric} == rules.keys()
    declared = tomllib.loads(DECLARATIONS.read_text())
    for rule in rules.values():
        (name,) = re.findall(r'__name__="([\w:]+)"', rule["seriesQuery"])
        assert "gauge" in declared[name] and f"({name}{{<<.LabelMatchers>>}})" in rule["metricsQuery"]
        assert re.findall(r"by \((\w+)\)", rule["metricsQuery"]) == ["replica"]
        assert "replica" in declared[name]["labels"]


# -- on Ray


@pytest.fixture
def cluster() -> ClusterConfig:
    (content,) = [one.content["data"]["cluster.yaml"] for one in of_kind("ConfigMap")]
    return cluster_config(document(content.encode()))


def groups() -> list[tuple[dict[str, Any], Pod]]:
    """Of Ray's hosts but the head, with the pods of each."""
    (service,) = of_kind("RayService")
    return [(group, Pod(service, group["template"])) for group in service.spec["rayClusterConfig"]["workerGroupSpecs"]]


def hosts(count: str) -> list[Host]:
    """`count` is the field that says how many of each group there are."""
    found = []
    for group, pod in groups():
        resources = json.loads(json.loads(group["rayStartParams"]["resources"]))
        has = {"CPU": float(pod.container["resources"]["limits"]["cpu"]), **resources}
        names = [f"{group['groupName']}-{i}" for i in range(group[count])]
        found += [Host(name, name, has) for name in names]
    return found


def test_hosts_have_what_the_cluster_asks_for(cluster: ClusterConfig) -> None:
    check_devices(cluster, hosts("replicas"))
    most = replace(cluster.of("target"), count=cluster.of("target").most)
    check_devices(replace(cluster, roles={**cluster.roles, "target": most}), hosts("maxReplicas"))
    roles = [possible_roles(cluster, host) for host in hosts("minReplicas")[::2]]
    assert roles == [["api"], ["target"], ["draft"], ["prefill"]]


def test_hosts_have_the_files_of_the_cluster(cluster: ClusterConfig) -> None:
    for group, pod in groups():
        clients = {"clients.toml"} if group["groupName"] == "servers" else set()
        assert pod.key_files == {"cluster.key"} | clients
    assert cluster.key == KEYS / "cluster.key" and cluster.api_keys == KEYS / "clients.toml"
    models = {cluster.model_of(role) for role in cluster.present}
    for pod in PODS_OF_RAY:
        mounts = {mount["name"]: Path(mount["mountPath"]) for mount in pod.container["volumeMounts"]}
        assert {model.parent for model in models} == {mounts["models"]}


def test_applications_are_those_of_the_cluster(cluster: ClusterConfig) -> None:
    (service,) = of_kind("RayService")
    (config,) = [one for one in of_kind("ConfigMap") if "cluster.yaml" in one.content["data"]]
    applications = {one["name"]: one for one in yaml.safe_load(service.spec["serveConfigV2"])["applications"]}
    assert applications.keys() == {cluster.application(role) for role in cluster.present}
    for role in cluster.present:
        application = applications[cluster.application(role)]
        assert application["import_path"] == f"pilotfish.cluster.app:{role}"
        assert application["route_prefix"] == ("/" if role == "api" else None)
        for pod in PODS_OF_RAY:
            (where,) = [mount["mountPath"] for mount in pod.container["volumeMounts"] if mount["name"] == "cluster"]
            assert {"name": "cluster", "configMap": {"name": config.name}} in pod.spec["volumes"]
            assert application["args"] == {"config": f"{where}/cluster.yaml"}


def test_ray_is_the_one_that_the_extra_installs() -> None:
    (service,) = of_kind("RayService")
    (installed,) = re.findall(r"^ray==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert service.spec["rayClusterConfig"]["rayVersion"] == installed
    assert service.spec["rayClusterConfig"]["authOptions"] == {"mode": "token"}


def test_a_cluster_that_is_replaced_has_time_to_drain(cluster: ClusterConfig) -> None:
    (service,) = of_kind("RayService")
    assert service.spec["rayClusterDeletionDelaySeconds"] > cluster.drain_timeout
