"""A cluster on Ray with two servers, a target of two ranks and drafts bound to labels: what clients see of the two
servers, also when the host of one is lost, and the same cluster brought up by Ray's own `serve run`."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml
from clusters import LIMIT, STREAMS, Case, World, answers_alone, disturbed, load_during, serving, world_of
from support import eventually

pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

RANKS = 2
GUIDE = Path(__file__).parents[2] / "docs" / "ray.md"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world_of(tmp_path_factory.mktemp("cluster")) as world:
        for name in ("one", "other"):
            world.hosts[name] = world.ray.add_node(num_cpus=2, resources={"api_device": 1})
        for name in ("far", "near"):
            world.hosts[name] = world.ray.add_node(num_cpus=4, resources={"draft_device": 2}, labels={"rack": name})
        world.hosts["ranks"] = world.ray.add_node(num_cpus=4, resources={"target_device": RANKS})
        world.roles["api"]["count"] = 2
        world.roles["target"]["options"] |= {"max_requests": STREAMS, "tensor_parallel": RANKS}
        world.roles["draft"]["labels"] = {"rack": "near"}
        yield world


@pytest.fixture(scope="module")
def cases(world: World) -> list[Case]:
    return answers_alone(Path(world.roles["target"]["model"]), tensor_parallel=RANKS)


def nothing_runs(rows: list[dict[str, Any]]) -> bool:
    """No server has a request, no target runs one or holds KV for one."""
    idle = [row["load"].startswith("requests=0 ") for row in serving(rows, "api")]
    free = [row["load"] == "running=0 waiting=0 kv=0.0" for row in serving(rows, "target")]
    return all([*idle, *free]) and bool(idle) and bool(free)


def hosts_of(world: World, role: str) -> list[str]:
    """Their names here."""
    names = {host.node_id[:8]: name for name, host in world.hosts.items()}
    return sorted(names[row["host"].split("/")[-1]] for row in serving(world.status(), role))


# -- in this order, on one cluster


def test_labels_that_no_host_has_are_refused(world: World) -> None:
    roles = {**world.roles, "draft": {**world.roles["draft"], "labels": {"rack": "none"}}}
    ran = World(world.ray, world.directory, {}, roles, "", world.others)
    done = ran.command("cluster", "up", str(ran.file))
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "roles.draft.labels: rack=none on none of " in done.stderr
    assert world.status() == []


def test_each_role_is_where_its_labels_and_devices_are(world: World) -> None:
    world.cluster("up")
    assert hosts_of(world, "api") == ["one", "other"]
    assert hosts_of(world, "draft") == ["near", "near"]
    assert hosts_of(world, "target") == ["ranks"]
    assert {row["version"] for row in world.status()} == {world.status("target")[0]["version"]}


def test_streams_reach_both_servers(world: World, cases: list[Case]) -> None:
    seen: set[str] = set()

    def both(rows: list[dict[str, Any]]) -> bool:
        for row in serving(rows, "api"):
            requests = re.fullmatch(r"requests=(\d+) targets=1", row["load"])
            assert requests, row
            seen.update([row["name"]] if int(requests[1]) else [])
        return len(seen) == 2

    assert disturbed(world, cases, lambda: world.until(both)) >= 2 * STREAMS
    world.until(nothing_runs)


def test_the_host_of_a_server_is_lost(world: World, cases: list[Case]) -> None:
    """What it had open breaks, and nothing else: streams of the other one go on, and the next ones are served."""

    def lose() -> None:
        world.ray.remove_node(world.hosts.pop("other"), allow_graceful=False)
        world.until(lambda rows: len(serving(rows, "api")) == 1)

    tally = asyncio.run(load_during(world.url, cases, lose))
    assert not tally.unequal, tally.unequal[:3]
    assert 0 < len(tally.failed) < STREAMS, tally.failed[:3]
    assert disturbed(world, cases, lambda: None) >= 2 * STREAMS
    world.until(nothing_runs)
    world.hosts["third"] = world.ray.add_node(num_cpus=2, resources={"api_device": 1})
    world.until(lambda rows: len(serving(rows, "api")) == 2)
    assert hosts_of(world, "api") == ["one", "third"]
    assert disturbed(world, cases, lambda: None) >= 2 * STREAMS
    world.cluster("down")


def serve_file(world: World) -> Path:
    """As the guide shows it, for this cluster."""
    (text,) = re.findall(r"```yaml\n(# serve\.yaml\n.*?)```", GUIDE.read_text(), re.DOTALL)
    content = yaml.safe_load(text.replace("/etc/pilotfish/cluster.yaml", str(world.file)))
    content["applications"] = [one for one in content["applications"] if one["name"] != "code-prefill"]
    for one in content["applications"]:
        one["name"] = one["name"].replace("code-", "pilotfish-")
    content["proxy_location"] = "HeadOnly"
    content["http_options"].update(host="127.0.0.1", port=world.roles["api"]["options"]["port"])
    path = world.directory / "serve.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_serve_run_brings_up_the_same(world: World, cases: list[Case]) -> None:
    serve = Path(sys.executable).with_name("serve")
    command = [serve, "run", "--address", world.ray.address, serve_file(world)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        try:
            eventually(lambda: answer(world) == 200 or running.poll() is not None, LIMIT, pause=1.0)
            assert running.poll() is None
            rows = world.until(lambda rows: len(serving(rows, "api")) == 2 and len(serving(rows, "draft")) == 2)
            assert all(row["state"] == "serves" for row in rows), rows
            assert disturbed(world, cases, lambda: None) >= 2 * STREAMS
        finally:
            running.terminate()
    world.cluster("down")
    assert world.status() == []


def answer(world: World) -> int:
    body = json.dumps({"prompt": "def f", "max_tokens": 2})
    try:
        return httpx.post(f"{world.url}/v1/completions", content=body, timeout=30).status_code
    except httpx.HTTPError:
        return 0
