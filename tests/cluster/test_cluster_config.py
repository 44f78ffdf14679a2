"""The file of a cluster: what is taken, and the one line about what is not. Needs no Ray."""

from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from pilotfish.cluster.config import MAX_FILE, ClusterConfig, cluster_config, read_cluster_config, worker_command
from pilotfish.errors import InputError

WHOLE = """
name: code
key: /etc/pilotfish/cluster.key
roles:
  api: {count: 2, options: {port: 9000, served_model_name: [code]}}
  target: {count: 2, most: 4, model: /models/target, devices: {target_device: 1}, options: {kv_slots: 65536}}
  draft:
    count: 2
    model: /models/draft
    devices: {draft_device: 0.5}
    revision: v1
    environment: {OMP_WAIT_POLICY: passive}
    options: {children: 6, prefix_cache: false}
  prefill: {options: {segment_memory: 0.5}}
"""
LEAST: dict[str, Any] = {"roles": {"target": {"model": "/models/target"}}}
SITE = ("tcp://10.0.0.7:40001", "draft-40001", Path("/run"))


def of(**changes: Any) -> dict[str, Any]:
    """A target and drafts, with these changes to roles."""
    roles = {"target": {"model": "/models/target"}, "draft": {"model": "/models/draft"}}
    return {"roles": {**roles, **{name: {**roles.get(name, {}), **fields} for name, fields in changes.items()}}}


@pytest.fixture
def whole(tmp_path: Path) -> ClusterConfig:
    path = tmp_path / "cluster.yaml"
    path.write_text(WHOLE)
    return read_cluster_config(path)


def test_what_is_said_is_what_processes_are_told(whole: ClusterConfig) -> None:
    assert whole.present == ("api", "target", "draft", "prefill")
    assert whole.engine.mode == "async" and whole.engine.kv_slots == 65536
    assert whole.server.port == 9000 and list(whole.server.served_model_name) == ["code"]
    assert whole.draft_pool.children == 6 and not whole.draft_pool.model.prefix_cache
    assert whole.prefill_pool.segment_memory == 0.5 and whole.prefill_pool.model.target == Path("/models/target")


def test_commands_are_those_of_one_host(whole: ClusterConfig) -> None:
    command = worker_command(whole, "draft", *SITE)[3:]
    keys = ["--key=/etc/pilotfish/cluster.key", "--allow=/run/allow"]
    own = ["--draft=/models/draft", "--listen=tcp://10.0.0.7:40001", "--name=draft-40001", "--json"]
    assert command == ["draft", *own, "--revision=v1", *keys, "--children=6", "--no-prefix-cache"]
    target = worker_command(whole, "target", *SITE)[3:]
    assert {"--members=/run/members.json", "--mode=async", "--kv-slots=65536", *keys} < set(target)


def test_a_cluster_of_targets_alone() -> None:
    config = cluster_config(LEAST)
    assert config.present == ("target",) and config.engine.mode == "off" and config.of("draft").count == 0
    assert not any("members" in flag for flag in worker_command(config, "target", *SITE))


def test_a_setup_changes_with_what_a_process_is_told() -> None:
    before, after = cluster_config(of()), cluster_config(of(draft={"revision": "v2"}))
    assert before.setup_of("draft") != after.setup_of("draft")
    assert before.setup_of("target") == after.setup_of("target") != cluster_config(LEAST).setup_of("target")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "roles.target.count: 0 is not allowed; expected an integer 1 to 1024"),
        ([], "the file: [] is not allowed; expected a mapping of names"),
        ({"roles": {"target": {}}}, "roles.target.model: None is not allowed; expected a model directory"),
        ({"roles": {"worker": {}}}, "roles: 'worker' is not allowed; expected api or target or draft or prefill"),
        ({**LEAST, "name": "A b"}, "name: 'A b' is not allowed; expected up to 40 small letters"),
        ({**LEAST, "nmae": "x"}, "nmae: there is no such option; expected one of"),
        ({**LEAST, "key": "cluster.key"}, "key: 'cluster.key' is not allowed; expected an absolute path"),
        (of(draft={"count": 2.5}), "roles.draft.count: 2.5 is not allowed; expected an integer 0 to 1024"),
        (of(draft={"most": 2}), "roles.draft.most: 2 is not allowed; expected none"),
        (of(target={"count": 3, "most": 2}), "roles.target.most: 2 is not allowed; expected an integer 3 to 1024"),
        (of(target={"revision": "v1"}), "roles.target.revision: 'v1' is not allowed; expected none"),
        (of(target={"devices": {"GPU": 1}}), "roles.target.devices: 'GPU' is not allowed; expected a name of your own"),
        (of(target={"devices": {"npu": 0}}), "devices: 0 is not allowed; expected a number more than 0"),
        (of(target={"environment": {"A": 1}}), "environment: 1 is not allowed; expected strings"),
        (of(target={"options": {"kv_slots": "many"}}), "roles.target.options.kv_slots: 'many' is not allowed"),
        (of(draft={"options": {"listen": "x"}}), "roles.draft.options.listen: there is no such option"),
        (of(target={"environment": {"A=B": "1"}}), "roles.target.environment: 'A=B=1' is not allowed; expected names"),
        (of(target={"environment": {"A": "a\0b"}}), "roles.target.environment: 'A=a\\x00b' is not allowed"),
        (of(target={"options": {"mode": "off"}}), "mode: 'off' is not allowed; expected async with roles.draft"),
        (
            of(target={"options": {"tensor_parallel": 2}}, prefill={}),
            "roles.target.options.tensor_parallel: 2 is not allowed; expected 1 with roles.prefill",
        ),
        (of(draft={"options": {1: 2}}), "roles.draft.options: 1 is not allowed; expected text"),
    ],
)
def test_one_line_about_what_is_not_taken(given: Any, message: str) -> None:
    assert message in refused(InputError, cluster_config, given)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("roles: [", "line 1: "),
        ("roles:\n  api: {}\n  api: {}", "line 3: 'api' is given twice"),
        ("a: !!python/object:os.system {}", "line 1: could not determine a constructor"),
        ("a: 2026-13-45", "it is no YAML"),
        ("a: \x00", "it is no YAML"),
        ("a: &x [1]\nb: *x", "line 2: an alias is not allowed"),
        ("[" * 40 + "]" * 40, "line 1: more than 16 levels are not allowed"),
        ("? [a]\n: 1", "line 1: a key must be a name"),
        ("name: " + "x" * 60_000, "…"),
    ],
)
def test_what_is_no_such_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    said = refused(InputError, read_cluster_config, path)
    assert said.startswith(str(path)) and message in said and len(said) < 2200


def test_files_that_are_not_there_or_too_long(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config: .* a file that can be read \(No such file"):
        read_cluster_config(tmp_path / "none.yaml")
    (tmp_path / "long.yaml").write_bytes(b"#" * (MAX_FILE + 1))
    with pytest.raises(InputError, match="a file of at most 65536 bytes"):
        read_cluster_config(tmp_path / "long.yaml")
