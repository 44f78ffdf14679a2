"""A whole cluster on Ray, its hosts simulated on this machine: what is placed where, and what clients see while
processes and hosts are lost, drafts are replaced, targets come and go. Nobody may see anything: every output is that of
an engine alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from support import SNIPPETS, make_engine, write_model

from pilotfish.core.sampling_params import SamplingParams
from pilotfish.wire.curve_keys import new_key_pair, write_key_pair

pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

#: Streams at a time, and tokens of an output.
STREAMS, TOKENS = 32, 160
#: Seconds that a command, and what is waited for, may take.
COMMAND, LIMIT = 300.0, 180.0
#: What a host of targets and drafts has.
BOTH = {"target_device": 1, "draft_device": 1}
PROMPTS = [text * repeats for text in SNIPPETS[:7] for repeats in (1, 12)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class World:
    """A cluster's hosts, and its file."""

    ray: Any  # cluster_utils.Cluster
    directory: Path
    hosts: dict[str, Any]  # by the roles that they are for
    roles: dict[str, dict[str, Any]]
    url: str
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        path = self.directory / "cluster.yaml"
        path.write_text(json.dumps({"address": self.ray.address, "roles": self.roles, **self.others}))  # YAML too
        return path

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pilotfish", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND, check=False)

    def cluster(self, verb: str, *options: str) -> str:
        ran = self.command("cluster", verb, str(self.file), *options)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def status(self, role: str = "") -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(self.cluster("status", "--json"))["processes"]
        return [row for row in rows if role in ("", row["role"])]

    def until(self, true: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        """The status once it is so."""
        deadline = time.monotonic() + LIMIT
        while not true(rows := self.status()):
            assert time.monotonic() < deadline, rows
            time.sleep(1)
        return rows


def serving(rows: Sequence[dict[str, Any]], role: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["role"] == role and row["state"] == "serves"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    from ray.cluster_utils import Cluster

    directory = tmp_path_factory.mktemp("cluster")
    target = write_model(directory / "target", "llama")
    draft = write_model(directory / "draft", "llama", perturbed=0.05)
    write_key_pair(new_key_pair(), directory / "cluster.key")
    ray = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        hosts = {name: ray.add_node(num_cpus=4, resources=BOTH) for name in ("first", "second", "spare")}
        hosts["others"] = ray.add_node(num_cpus=4, resources={"prefill_device": 1, "api_device": 1})
        port, alike = free_port(), {"dtype": "float32", "threads": 1, "kv_slots": 16384}
        at_pace = {"pace": "target=20ms", "max_requests": STREAMS, "prefill_threshold": "64"}
        roles: dict[str, dict[str, Any]] = {
            "api": {"devices": {"api_device": 1}, "options": {"port": port}},
            "target": {
                "model": str(target),
                "count": 2,
                "devices": {"target_device": 1},
                "options": {**alike, **at_pace},
            },
            "draft": {
                "model": str(draft),
                "count": 2,
                "devices": {"draft_device": 1},
                "revision": "v1",
                "options": {**alike, "pace": "draft=5ms"},
            },
            "prefill": {"devices": {"prefill_device": 1}, "options": alike},
        }
        others = {"key": str(directory / "cluster.key"), "proxies": "head", "drain_timeout": 20}
        yield World(ray, directory, hosts, roles, f"http://127.0.0.1:{port}", others)
    finally:
        ray.shutdown()


# -- load


@dataclass(frozen=True)
class Case:
    """A request, and the only right answer."""

    body: dict[str, Any]
    text: str


@dataclass
class Tally:
    equal: int = 0
    unequal: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def cases(world: World) -> list[Case]:
    """As an engine alone answers."""
    engine = make_engine(Path(world.roles["target"]["model"]), kv_slots=16384)
    bodies = [
        {"prompt": prompt, "max_tokens": TOKENS, "seed": seed, "temperature": 0.8 * (seed % 2), "stream": True}
        for seed, prompt in enumerate(PROMPTS)
    ]
    params = [SamplingParams(max_tokens=TOKENS, seed=b["seed"], temperature=b["temperature"]) for b in bodies]
    samples = [
        sample for body, one in zip(bodies, params, strict=True) for sample in engine.submit(body["prompt"], one)
    ]
    while engine.busy:
        engine.step()
    return [Case(body, sample.text) for body, sample in zip(bodies, samples, strict=True)]


async def stream(client: httpx.AsyncClient, url: str, case: Case, tally: Tally) -> None:
    text, reason = "", None
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=case.body) as response:
            if response.status_code != 200:
                tally.failed.append(f"{response.status_code} {(await response.aread()).decode()}")
                return
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        tally.failed.append(line)
                        return
                    for choice in chunk["choices"]:
                        text, reason = text + choice["text"], choice["finish_reason"] or reason
    except httpx.HTTPError as error:
        tally.failed.append(repr(error))
        return
    if text == case.text and reason == "length":
        tally.equal += 1
    else:
        tally.unequal.append(f"{case.body['prompt'][:20]!r} {reason}: {text!r} is not {case.text!r}")


async def load_during(url: str, cases: Sequence[Case], event: Callable[[], object], least: int = 2 * STREAMS) -> Tally:
    """`STREAMS` clients, one request after another, from before the event until after it, `least` requests at least."""
    tally, over, sent = Tally(), asyncio.Event(), 0

    async def client(number: int, http: httpx.AsyncClient) -> None:
        nonlocal sent
        while not over.is_set() or sent < least:
            sent += 1
            await stream(http, url, cases[(number + sent) % len(cases)], tally)

    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(timeout=LIMIT, limits=limits) as http:
        clients = [asyncio.create_task(client(number, http)) for number in range(STREAMS)]
        await asyncio.sleep(3)
        try:
            await asyncio.to_thread(event)
            await asyncio.sleep(3)
        finally:
            over.set()
            await asyncio.gather(*clients)
    return tally


def disturbed(world: World, cases: Sequence[Case], event: Callable[[], object]) -> int:
    """How many streams came through an event, all of which must."""
    tally = asyncio.run(load_during(world.url, cases, event))
    assert not tally.failed and not tally.unequal, (len(tally.failed), tally.failed[:3], tally.unequal[:3])
    return tally.equal


# -- in this order, on one cluster


def test_what_cannot_be_is_told_before_anything_starts(world: World) -> None:
    def refusal(**changes: Any) -> str:
        roles = {name: {**fields, **changes.get(name, {})} for name, fields in world.roles.items()}
        others = {**world.others, **{name: value for name, value in changes.items() if name not in roles}}
        ran = World(world.ray, world.directory, {}, roles, "", others)
        done = ran.command("cluster", "up", str(ran.file))
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    assert "roles: draft ask for 4 draft_device; there are 3: 1 on " in refusal(draft={"count": 4})
    assert "roles: target ask for 2 npu; there are none on any of " in refusal(target={"devices": {"npu": 1}})
    assert "key: /nowhere.key cannot be read" in refusal(key="/nowhere.key")
    assert "key: None is not allowed; expected a key file for hosts on a network (" in refusal(key=None)
    assert "roles.draft.model: /none/config.json cannot be read" in refusal(draft={"model": "/none"})
    unequal = refusal(prefill={"model": world.roles["draft"]["model"]})
    assert "model: config.json of roles.prefill on" in unequal or "model: weights of roles.prefill on" in unequal
    assert world.status() == []
    assert "address: '127.0.0.1:1' is not allowed; expected a Ray cluster that runs" in refusal(address="127.0.0.1:1")


def test_what_does_not_start_is_taken_down(world: World) -> None:
    roles = {**world.roles, "draft": {**world.roles["draft"], "options": {"device": "none"}}}
    broken = World(world.ray, world.directory, {}, roles, "", world.others)
    done = broken.command("cluster", "up", str(broken.file))
    assert done.returncode == 1 and "draft: " in done.stderr.splitlines()[-1], done.stderr
    assert world.status() == []


def test_each_role_is_where_its_devices_are(world: World, cases: list[Case]) -> None:
    assert json.loads(world.cluster("up", "--json")) == {"url": world.url}
    rows = world.status()
    assert all(row["state"] == "serves" for row in rows), rows
    ids = {name: host.node_id[:8] for name, host in world.hosts.items()}
    where = {role: sorted(row["host"].split("/")[-1] for row in serving(rows, role)) for role in world.roles}
    both = {ids["first"], ids["second"], ids["spare"]}
    assert where["api"] == where["prefill"] == [ids["others"]]
    assert set(where["target"]) <= both and len(set(where["target"])) == 2  # one has one device
    assert set(where["draft"]) <= both and len(set(where["draft"])) == 2
    assert {row["revision"] for row in serving(rows, "draft")} == {"v1"}
    assert disturbed(world, cases, lambda: None) >= 2 * STREAMS


def test_a_draft_is_killed(world: World, cases: list[Case]) -> None:
    assert disturbed(world, cases, lambda: os.kill(serving(world.status(), "draft")[0]["pid"], signal.SIGKILL))


def test_a_target_is_killed(world: World, cases: list[Case]) -> None:
    assert disturbed(world, cases, lambda: os.kill(serving(world.status(), "target")[0]["pid"], signal.SIGKILL))
    world.until(lambda rows: len(serving(rows, "target")) == 2)


def test_a_host_is_lost(world: World, cases: list[Case]) -> None:
    lost = serving(world.status(), "target")[0]["host"].split("/")[-1]
    name = next(name for name, host in world.hosts.items() if host.node_id.startswith(lost))

    def lose() -> None:
        world.ray.remove_node(world.hosts.pop(name), allow_graceful=False)
        world.until(lambda rows: not any(row["host"].endswith(lost) for row in rows))

    assert disturbed(world, cases, lose)
    rows = world.until(lambda rows: len(serving(rows, "target")) == 2 and len(serving(rows, "draft")) == 2)
    assert not any(row["host"].endswith(lost) for row in rows)


def test_drafts_are_replaced_one_after_another(world: World, cases: list[Case]) -> None:
    before = {row["endpoint"] for row in world.status() if row["role"] != "draft"}
    world.roles["draft"]["revision"] = "v2"
    assert disturbed(world, cases, lambda: world.cluster("up"))
    rows = world.status()
    assert {row["revision"] for row in serving(rows, "draft")} == {"v2"}
    assert before == {row["endpoint"] for row in rows if row["role"] != "draft"}  # nothing else was touched


def test_a_server_elsewhere(world: World, cases: list[Case]) -> None:
    command = [sys.executable, "-m", "pilotfish", "serve", "--cluster", str(world.file), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            tally = asyncio.run(load_during(url, cases, lambda: None, least=STREAMS))
            assert not tally.failed and not tally.unequal and tally.equal
        finally:
            server.terminate()


def test_targets_come_and_go_with_the_load(world: World, cases: list[Case]) -> None:
    world.hosts["new"] = world.ray.add_node(num_cpus=4, resources=BOTH)
    world.roles["target"].update(count=1, most=2)
    world.roles["target"]["options"]["max_requests"] = STREAMS // 2
    world.others.update(scale_up_after=1, scale_down_after=5)
    world.cluster("up")
    world.until(lambda rows: len(serving(rows, "target")) == 1)
    assert disturbed(world, cases, lambda: world.until(lambda rows: len(serving(rows, "target")) == 2))
    world.until(lambda rows: len([row for row in rows if row["role"] == "target"]) == 1)


def test_nothing_is_left(world: World) -> None:
    pids = [row["pid"] for row in world.status() if row["pid"] is not None]
    assert len(pids) >= 4
    world.cluster("down")
    assert world.status() == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
