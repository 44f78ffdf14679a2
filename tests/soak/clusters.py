"""A cluster on Ray whose hosts are simulated on this machine, and clients that compare what it answers with an engine
alone."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
from support import SNIPPETS, drain, make_engine, write_model

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.wire.curve_keys import new_key_pair, write_key_pair

#: Streams at a time, and tokens of an output.
STREAMS, TOKENS = 32, 160
#: Seconds that a command, and what is waited for, may take.
COMMAND, LIMIT = 300.0, 180.0
#: Options of each role that has a model.
ALIKE = {"dtype": "float32", "threads": 1, "kv_slots": 16384}
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
        assert ran.returncode == 0 and "Traceback" not in ran.stderr, ran.stderr
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


@contextmanager
def world_of(directory: Path) -> Iterator[World]:
    """Of no hosts yet; with a target, a draft and a key on disk."""
    from ray.cluster_utils import Cluster

    target = write_model(directory / "target", "llama")
    draft = write_model(directory / "draft", "llama", perturbed=0.05)
    write_key_pair(new_key_pair(), directory / "cluster.key")
    ray = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    port, others = free_port(), {"key": str(directory / "cluster.key"), "proxies": "head", "drain_timeout": 20}
    roles: dict[str, dict[str, Any]] = {
        "api": {"devices": {"api_device": 1}, "options": {"port": port}},
        "target": {"model": str(target), "devices": {"target_device": 1}, "options": {**ALIKE, "pace": "target=20ms"}},
        "draft": {
            "model": str(draft),
            "count": 2,
            "devices": {"draft_device": 1},
            "options": {**ALIKE, "pace": "draft=5ms"},
        },
    }
    try:
        yield World(ray, directory, {}, roles, f"http://127.0.0.1:{port}", others)
    finally:
        ray.shutdown()


def serving(rows: Sequence[dict[str, Any]], role: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["role"] == role and row["state"] == "serves"]


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


def answers_alone(target: Path, **options: Any) -> list[Case]:
    """As an engine alone answers."""
    bodies = [
        {"prompt": prompt, "max_tokens": TOKENS, "seed": seed, "temperature": 0.8 * (seed % 2), "stream": True}
        for seed, prompt in enumerate(PROMPTS)
    ]
    params = [SamplingParams(max_tokens=TOKENS, seed=b["seed"], temperature=b["temperature"]) for b in bodies]
    with make_engine(target, kv_slots=16384, **options) as engine:
        samples = [
            sample for body, one in zip(bodies, params, strict=True) for sample in engine.submit(body["prompt"], one)
        ]
        drain(engine)
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
