from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pilotfish.cluster.config import ClusterConfig, Role, known_options
from pilotfish.options import Option

#: Files in a process's directory: its allowlist, where the cluster has a key; the pools, for a target.
ALLOW, MEMBERS = "allow", "members.json"


def worker_command(config: ClusterConfig, role: Role, endpoint: str, name: str, directory: Path) -> list[str]:
    model = {"draft": "--draft", "prefill": "--target", "target": "--target"}[role]
    own = [f"{model}={config.model_of(role)}", f"--listen={endpoint}", f"--name={name}", "--json"]
    if config.of(role).revision:
        own += [f"--revision={config.of(role).revision}"]
    if role == "target" and config.pools:
        own += [f"--members={directory / MEMBERS}", *(["--mode=async"] if "draft" in config.pools else [])]
        own += [f"--{pool}-key={config.key}" for pool in config.pools if config.key is not None]
    if config.key is not None:
        own += [f"--key={config.key}", f"--allow={directory / ALLOW}"]
    if config.insecure:
        own += ["--insecure"]
    known = known_options(role)
    given = [flag for name, value in config.of(role).options.items() for flag in flags(known[name], value)]
    return [sys.executable, "-m", "pilotfish", role, *own, *given]


def flags(option: Option, value: Any) -> list[str]:
    if value is None or value == option.default:
        return []
    names = option.extra.get("names") or (f"--{option.name.replace('_', '-')}",)
    if option.kind is bool:
        return [names[0].split("/")[0 if value else 1]]
    return [f"{names[0]}={value}"]
