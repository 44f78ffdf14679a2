"""deploy/: the pods' own commands, with their keys and members, as processes of this host: a cluster that answers as
one target does, and goes on when one of two ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from manifests import KEYS, ROOT, WITH_COMMANDS
from programs import Program
from support import SNIPPETS, eventually

from pilotfish import LLM, SamplingParams
from pilotfish.engine.pairs import resolve_pair
from pilotfish.engine.processes.process import WorkerSpec
from pilotfish.server.auth import file_entry, new_secret

PAIR = resolve_pair("pycode")
TARGETS = 2
STREAMS = 4
#: Tokens of an answer: a target ends in its midst.
TOKENS = 256
#: Of a target's step: so long that an answer takes seconds.
PACE = "25ms"
#: Seconds until all is connected.
CONNECTED = 30.0


@dataclass(frozen=True)
class Cluster:
    url: str
    secret: str
    targets: list[Program]

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"content-type": "application/json", "authorization": f"Bearer {self.secret}"}
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=120) as response:
            text = response.read().decode()
        return text if path == "/metrics" else json.loads(text)

    def tokens(self, prompt: str, seed: int) -> list[int]:
        body = {"model": "my-model", "prompt": prompt, "max_tokens": TOKENS, "seed": seed, "temperature": 0.8}
        answer = self.ask("/v1/completions", {**body, "ignore_eos": True, "return_token_ids": True})
        return list(answer["choices"][0]["token_ids"])

    def metric(self, name: str) -> float:
        lines = [line for line in self.ask("/metrics").splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


def addresses(secrets: Path) -> dict[str, list[str]]:
    """Of all members, each with a port of its own."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(TARGETS + 2)]
        free = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    found = {"draft": free[:1], "prefill": free[1:2], "target": free[2:]}
    members = json.loads((secrets / "members.json").read_text())
    for role, name in (("target", "targets"), ("draft", "draft_pools"), ("prefill", "prefill_pools")):
        for member, address in zip(members[name], found[role], strict=True):
            member["endpoint"] = f"tcp://{address}"
    (secrets / "members.json").write_text(json.dumps(members))
    return found


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """The Secret and the ConfigMap, but for the clients' keys."""
    command = tmp_path / "bin" / "pilotfish"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pilotfish "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}"}
    arguments = [ROOT / "deploy" / "keys.sh", tmp_path / "keys", str(TARGETS), "1", "1"]
    subprocess.run(arguments, check=True, env=environment)
    return tmp_path / "keys"


def pod(role: str, secrets: Path, address: str) -> Program:
    """The command of a role's pod, here."""
    (found,) = [one for one in WITH_COMMANDS if one.manifest.name == f"pilotfish-{role}"]
    (port,) = found.ports.values()
    here = {"/models/target": PAIR.target, "/models/draft": PAIR.draft, KEYS: secrets, "$(CORES)": 1}
    here |= {"/etc/pilotfish/members": secrets, f"0.0.0.0:{port}": address, f"=0.0.0.0#{port}": ""}
    own = {"api": ["--json", "--host=127.0.0.1", "--port=0"], "target": ["--dtype=float32", f"--pace=target={PACE}"]}
    words = [*found.command, *own.get(role, ["--dtype=float32"])]
    for inside, outside in here.items():
        words = [word.replace(str(inside), str(outside)) for word in words]
    return Program(WorkerSpec(role, [sys.executable, "-m", "pilotfish", *words]), signal.SIGTERM)


@pytest.fixture
def cluster(secrets: Path) -> Iterator[Cluster]:
    found, secret = addresses(secrets), new_secret()
    (secrets / "clients.toml").write_text(file_entry("me", secret))
    (secrets / "clients.toml").chmod(0o600)
    with ExitStack() as stack:
        programs = {
            role: [stack.enter_context(pod(role, secrets, address)) for address in found.get(role, [""])]
            for role in ("draft", "prefill", "target", "api")
        }
        told = [program.told for role in programs.values() for program in role]
        yield Cluster(told[-1]["url"], secret, programs["target"])


def expected(prompts: list[str]) -> list[list[int]]:
    """Of a target that is alone, without a draft."""
    params = [
        SamplingParams(max_tokens=TOKENS, seed=seed, temperature=0.8, ignore_eos=True) for seed, _ in enumerate(prompts)
    ]
    outputs = LLM(PAIR.target, mode="off", dtype="float32").generate(prompts, params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def wait_for(cluster: Cluster, name: str, value: float) -> None:
    def told() -> str:
        return f"{name} is {cluster.metric(name)}; expected {value}"

    eventually(lambda: cluster.metric(name) >= value, CONNECTED, pause=0.2, told=told)


def test_pods_are_a_cluster_that_goes_on_without_one_of_its_targets(cluster: Cluster) -> None:
    prompts = [SNIPPETS[i % len(SNIPPETS)] * 8 for i in range(STREAMS)]
    wait_for(cluster, "pilotfish_replica_ready", TARGETS)
    wait_for(cluster, "pilotfish_pool_ready", 1)
    with ThreadPoolExecutor(STREAMS) as threads:
        answers = list(threads.map(cluster.tokens, prompts, range(STREAMS)))
        assert answers == expected(prompts)
        assert cluster.metric("pilotfish_accepted_tokens_total") > 0
        threading.Timer(0.7, cluster.targets[0].kill).start()
        assert list(threads.map(cluster.tokens, prompts, range(STREAMS))) == answers
    assert cluster.metric("pilotfish_resumed_requests_total") > 0 == cluster.metric("pilotfish_requests_in_flight")
