"""The manifests in deploy/kubernetes, for tests of what they say."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
KUBERNETES = ROOT / "deploy" / "kubernetes"
KEYS = Path("/etc/pilotfish/keys")
OLDEST = "1.30"  # of Kubernetes; docs/cluster.md says so
#: API groups of extensions, of which Kubernetes has no schemas.
EXTENSIONS = ("ray.io", "monitoring.coreos.com", "inference.networking.k8s.io", "kustomize.config.k8s.io")
NAME, COMPONENT = "app.kubernetes.io/name", "app.kubernetes.io/component"


@dataclass(frozen=True)
class Manifest:
    """One object of a file."""

    file: Path
    content: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.content["kind"])

    @property
    def name(self) -> str:
        return str(self.content["metadata"]["name"])

    @property
    def spec(self) -> dict[str, Any]:
        return dict(self.content["spec"])

    @property
    def extends(self) -> bool:
        return str(self.content["apiVersion"]).startswith(EXTENSIONS)

    def __str__(self) -> str:
        return f"{self.file.parent.name}/{self.file.stem}/{self.kind}/{self.name}"

    @property
    def templates(self) -> Iterator[dict[str, Any]]:
        """Of pods."""
        if self.kind == "RayService":
            cluster = self.spec["rayClusterConfig"]
            yield from (group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]))
        elif self.kind in ("Deployment", "StatefulSet"):
            yield self.spec["template"]


@dataclass(frozen=True)
class Pod:
    """The pods of a template, which have one container each."""

    manifest: Manifest
    template: dict[str, Any]

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.template["metadata"]["labels"])

    @property
    def spec(self) -> dict[str, Any]:
        return dict(self.template["spec"])

    @property
    def container(self) -> dict[str, Any]:
        (container,) = self.spec["containers"]
        return dict(container)

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", ())}

    @property
    def command(self) -> list[str]:
        """Of pilotfish, with its arguments."""
        shell = self.container.get("command")
        first = [] if shell is None else shell[2].split("exec pilotfish ")[1].split(' "$@"')[0].split()
        return [*first, *self.container["args"]]

    @property
    def key_files(self) -> set[str]:
        """Of the Secret, where commands look for them."""
        secrets = [volume["secret"] for volume in self.spec["volumes"] if "secret" in volume]
        return {item["path"] for secret in secrets for item in secret["items"]}

    def __str__(self) -> str:
        return f"{self.manifest}/{self.container['name']}"


def documents(file: Path) -> list[dict[str, Any]]:
    return [content for content in yaml.load_all(file.read_text(), yaml.CSafeLoader) if content]


MANIFESTS = [
    Manifest(file, content)
    for file in sorted(KUBERNETES.rglob("*.yaml"))
    if file.stem not in ("kustomization", "adapter")
    for content in documents(file)
]
PODS = [Pod(manifest, template) for manifest in MANIFESTS for template in manifest.templates]
#: Whose command is one of pilotfish: Ray starts the others.
WITH_COMMANDS = [pod for pod in PODS if "args" in pod.container]


def of_kind(kind: str) -> list[Manifest]:
    return [manifest for manifest in MANIFESTS if manifest.kind == kind]


def selected(labels: dict[str, str]) -> list[Pod]:
    return [pod for pod in PODS if labels.items() <= pod.labels.items()]
