"""A whole cluster on Ray, its hosts simulated on this machine: what is placed where, and what clients see while
processes and hosts are lost, drafts are replaced, targets come and go. Nobody may see anything: every output is that of
an engine alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import ALIKE, STREAMS, Case, World, answers_alone, disturbed, load_during, serving, world_of

pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

#: What a host of targets and drafts has.
BOTH = {"target_device": 1, "draft_device": 1}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world_of(tmp_path_factory.mktemp("cluster")) as world:
        for name in ("first", "second", "spare"):
            world.hosts[name] = world.ray.add_node(num_cpus=4, resources=BOTH)
        world.hosts["others"] = world.ray.add_node(num_cpus=4, resources={"prefill_device": 1, "api_device": 1})
        world.roles["target"]["count"] = 2
        world.roles["target"]["options"] |= {"max_requests": STREAMS, "prefill_threshold": "64"}
        world.roles["draft"]["revision"] = "v1"
        world.roles["prefill"] = {"devices": {"prefill_device": 1}, "options": ALIKE}
        yield world


@pytest.fixture(scope="module")
def cases(world: World) -> list[Case]:
    return answers_alone(Path(world.roles["target"]["model"]))


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
    assert "key: '/nowhere.key' is not allowed; expected a file that can be read" in refusal(key="/nowhere.key")
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
