"""What is looked at before a cluster starts. Needs no Ray."""

from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from pilotfish.cluster.config import ClusterConfig, cluster_config
from pilotfish.cluster.preflight import (
    Host,
    HostReport,
    check_devices,
    check_private,
    check_reports,
    host_report,
    possible_roles,
)
from pilotfish.errors import InputError
from pilotfish.wire.curve_keys import new_key_pair, write_key_pair

TARGETS = Host("1", "a", {"CPU": 4.0, "target_device": 2.0}, {"rack": "r1"})
DRAFTS = Host("2", "b", {"CPU": 4.0, "draft_device": 1.0})
THREE = {"count": 3, "devices": {"target_device": 1}}
OTHER = "is not that of roles.target on a"


def config(target: dict[str, Any] | None = None, draft: dict[str, Any] | None = None, **others: Any) -> ClusterConfig:
    roles = {"target": {"model": "/m/t", **(target or {})}}
    if draft is not None:
        roles["draft"] = {"model": "/m/d", **draft}
    return cluster_config({"roles": roles, **others})


def test_all_find_a_place() -> None:
    both = config({"count": 2, "devices": {"target_device": 1}}, {"devices": {"draft_device": 1}})
    check_devices(both, [TARGETS, DRAFTS])
    check_devices(config({"count": 8}), [TARGETS, DRAFTS])
    check_devices(config({"labels": {"rack": "r1"}, "count": 4}), [DRAFTS, TARGETS])
    check_devices(config({"cpus": 4}, {"labels": {"rack": "r1"}}), [TARGETS, Host("4", "d", {"CPU": 4.0})])
    check_devices(config({"count": 2, "cpus": 4}), [TARGETS, Host("4", "a", {"CPU": 4.0})])  # of one name
    check_devices(config({"count": 10, "cpus": 0.1}), [Host("3", "c", {"CPU": 1.0})])  # fractions


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        (THREE, None, "roles: target ask for 3 target_device; there are 2: 2 on a"),
        ({}, {"devices": {"npu": 1}}, "roles: draft ask for 1 npu; there are none on any of a, b"),
        ({"count": 7}, {"count": 2}, "roles: target and draft ask for 9 CPU; there are 8: 4 on a, 4 on b"),
        ({"cpus": 5}, None, "roles.target: no host has 5 CPU for number 1 of it"),
        ({"labels": {"rack": "r2"}}, None, "roles.target.labels: rack=r2 on none of a, b"),
        ({"labels": {"rack": "r1"}, "count": 5}, None, "roles.target: no host has 1 CPU, rack=r1 for number 5 of it"),
        ({"count": 2, "cpus": 3}, {"cpus": 2}, "roles.draft: no host has 2 CPU for number 1 of it"),
    ],
)
def test_which_and_where(target: dict[str, Any], draft: dict[str, Any] | None, message: str) -> None:
    assert refused(InputError, check_devices, config(target, draft), [TARGETS, DRAFTS]) == message


def test_each_rank_has_its_devices() -> None:
    fields = {"devices": {"target_device": 1}}
    check_devices(config({**fields, "options": {"tensor_parallel": 2}}), [TARGETS])
    three = config({**fields, "options": {"tensor_parallel": 3}})
    assert "target ask for 3 target_device" in refused(InputError, check_devices, three, [TARGETS])


def test_hosts_on_a_network_need_a_key() -> None:
    there = Host("3", "10.0.0.7", {"CPU": 4.0}, address="10.0.0.7")
    with pytest.raises(InputError, match=r"key: None is not allowed; expected a key file .*\(10\.0\.0\.7\)"):
        check_private(config(), [TARGETS, there])
    for fine in (config(key="/k"), config(insecure=True)):
        check_private(fine, [TARGETS, there])
    check_private(config(), [TARGETS])


def test_hosts_look_at_what_may_run_there() -> None:
    asked = config({"devices": {"target_device": 1}}, {"devices": {"draft_device": 1}})
    assert possible_roles(asked, TARGETS) == ["target"] and possible_roles(asked, DRAFTS) == ["draft"]
    assert possible_roles(asked, Host("3", "head", {})) == []


# -- on hosts


def model(directory: Path, weights: bytes = b"123") -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(weights)
    return directory


def test_a_host_tells_what_it_has(tmp_path: Path) -> None:
    pair = new_key_pair()
    write_key_pair(pair, tmp_path / "cluster.key")
    asked = config({"model": str(model(tmp_path / "m"))}, key=str(tmp_path / "cluster.key"))
    report = host_report(asked, ["target", "api"])
    assert report.key == pair.public and report.problem == ""
    other = config({"model": str(model(tmp_path / "o", weights=b"124"))})
    assert report.models["target"]["weights"] != host_report(other, ["target"]).models["target"]["weights"]
    assert "weights" not in report.models["api"]


def test_a_host_without_the_key_or_the_model_says_so(tmp_path: Path) -> None:
    asked = config({"model": str(model(tmp_path / "m"))}, key=str(tmp_path / "cluster.key"))
    unread = f"key: '{asked.key}' is not allowed; expected a file that can be read (No such file or directory)"
    assert host_report(asked, ["target"]).problem == unread
    missing = config({"model": str(tmp_path / "none")})
    assert "roles.target.model: " in host_report(missing, ["target"]).problem
    (tmp_path / "m" / "model.safetensors").unlink()
    weightless = config({"model": str(tmp_path / "m")})
    assert host_report(weightless, ["target"]).problem.endswith("has no weights in safetensors")


def report(**changes: Any) -> HostReport:
    fields = {"version": "1", "models": {"target": {"config.json": "x", "weights": "w 1"}}, "key": "k", "problem": ""}
    return HostReport(**{**fields, **changes})


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (report(version="2"), "version: b has Pilotfish 2; expected 1, as here"),
        (report(problem="key: gone"), "b: key: gone"),
        (report(key="other"), "key: a and b have different ones; expected the same on every host"),
        (report(models={"prefill": {"config.json": "y"}}), f"model: config.json of roles.prefill on b {OTHER}"),
        (report(models={"target": {"weights": "w 2"}}), f"model: weights of roles.target on b {OTHER}"),
    ],
)
def test_what_is_not_the_same_everywhere(second: HostReport, message: str) -> None:
    assert refused(InputError, check_reports, {"a": report(), "b": second}, "1") == message


def test_drafts_may_be_another_model() -> None:
    check_reports({"a": report(), "b": report(models={"draft": {"config.json": "y"}})}, "1")
