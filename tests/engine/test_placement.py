"""Cores of target, drafts and prefill workers: as given, or by the rule; never both on one core without a warning."""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from pilotfish.config.engine import EngineConfig
from pilotfish.config.text import config_of
from pilotfish.config.workers import PrefillConfig
from pilotfish.engine.pools.remote_pools import worker_command
from pilotfish.engine.processes import host_memory
from pilotfish.engine.processes.placement import Placement, split_cores, split_for_prefill
from pilotfish.engine.processes.process import on_cores
from pilotfish.engine.targets.replica import OwnTarget, own_targets
from pilotfish.errors import ParameterError


def cores(*ranges: Iterable[int]) -> frozenset[int]:
    return frozenset().union(*ranges)


EIGHT = cores(range(8))


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(EIGHT))


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("split", "available", "target", "workers", "expected"),
    [
        (split_cores, range(2), "", "", [range(1), *[range(1, 2)] * 3]),
        (split_cores, range(4), "", "", [range(2), range(2, 3), range(2, 3), range(3, 4)]),
        (split_cores, range(32), "", "", [range(20), range(20, 24), range(24, 28), range(28, 32)]),
        (split_cores, range(0), "", "", [range(0), range(0), range(0)]),  # a system without affinities
        (split_cores, range(8), "0-1", "2-4", [range(2), range(2, 3), range(3, 5)]),
        (split_cores, range(8), "4-7", "", [range(4, 8), range(2, 3), range(3, 4)]),
        (split_cores, range(8), "", "0-1", [range(2, 8), range(2)]),
        (split_for_prefill, range(8), "", "", [range(4), range(4, 8)]),
        (split_for_prefill, range(6), "", "", [range(3), range(3, 4), range(4, 6)]),  # the drafts have the last two
        (split_for_prefill, range(8), "0-1", "", [range(2), range(2, 5), range(5, 8)]),
        (split_for_prefill, range(8), "", "0-2", [range(3, 8), range(3)]),
    ],
)
def test_cores_of_drafts_and_of_prefill_workers(
    split: Callable[..., Placement],
    available: range,
    target: str,
    workers: str,
    expected: list[range],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Prefill workers have by default half of what drafts leave."""
    placement = split(cores(available), target, workers, len(expected) - 1)
    assert [placement.target, *placement.workers] == [cores(each) for each in expected] and not caplog.text
    assert placement.taken == frozenset().union(*placement.workers) - placement.target


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("available", "target", "draft", "workers"), [(range(8), "0-7", "", 1), (range(8), "", "0-7", 1), ([3], "", "", 2)]
)
def test_where_nothing_is_left_cores_are_shared(
    available: range, target: str, draft: str, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    placement = split_cores(cores(available), target, draft, workers)
    assert [placement.target, *placement.workers] == [cores(available)] * (workers + 1)
    assert f"share cores {list(available)}" in caplog.text


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        ("0-3", "3-4", "^draft_cores: '3-4' is not allowed; expected other cores than the target's, 0-3$"),
        ("9", "", "^cores: "),
        ("", "x", "^draft_cores: "),
    ],
)
def test_cores_that_cannot_be_had_are_refused(target: str, draft: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        split_cores(EIGHT, target, draft, 1)


@pytest.mark.parametrize(
    ("available", "drafts", "expected"),
    [
        (2, 1, [range(1), *[range(1, 2)] * 2]),  # where the draft is: the target keeps its core
        (4, 1, [range(2), range(2, 3)]),
        (1, 1, [range(1), range(1)]),
    ],
)
def test_cores_of_prefill_workers_beside_drafts(available: int, drafts: int, expected: list[range]) -> None:
    own = cores(range(available))
    taken = split_cores(own, "", "", drafts).taken if drafts else cores()
    placement = split_for_prefill(own - taken, "", "", len(expected) - 1, taken)
    assert [placement.target, *placement.workers] == [cores(each) for each in expected]


@pytest.mark.usefixtures("eight_cores")
def test_cores_of_prefill_workers_that_are_shared_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    assert split_for_prefill(EIGHT, "0-7", "", 1).workers == (EIGHT,) and "share cores" in caplog.text
    one = split_for_prefill(frozenset({0}), "", "", 1)  # one is left, for both
    assert one.target == one.workers[0] == {0} and not one.taken
    with pytest.raises(ParameterError, match=r"^prefill_cores: '3-4' is not allowed; expected other cores than"):
        split_for_prefill(EIGHT, "0-3", "3-4", 1)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_worker_does_not_check_the_cores_of_its_target(tmp_path: Path) -> None:
    own, other, *_ = sorted(os.sched_getaffinity(0))
    config = EngineConfig(target=tmp_path, draft=tmp_path, mode="async", cores=str(own))
    text = next(word for word in worker_command("draft", config, "ipc://x", "draft 0") if word.startswith("--config="))
    with on_cores(frozenset({other})):
        assert config_of(text.removeprefix("--config="), EngineConfig).of_draft.target == tmp_path


def test_targets_of_one_server_divide_what_one_would_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "free_memory", lambda: 30 << 30)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 5})
    config = EngineConfig(target=tmp_path, prefill_workers=1, kv_host_memory=1.0)
    assert own_targets(config, 0) == [] and own_targets(config, 1) == [OwnTarget("target", config)]
    targets = own_targets(config, 2)
    assert [(one.name, one.cores) for one in targets] == [("target 0", {0, 1}), ("target 1", {2, 3, 5})]
    beyond = 1.0 + PrefillConfig.segment_memory
    assert {one.config.allotted for one in targets} == {int((0.9 * 30 - 2 * beyond) * (1 << 30) / 4)}
    assert [one.cores for one in own_targets(replace(config, cores="1,3"), 2)] == [{1}, {3}]
    assert all(one.config.core_set == frozenset() for one in own_targets(replace(config, cores="1,3"), 2))
    for field, value in {"trace": tmp_path / "t", "kv_disk": tmp_path, "draft_cores": "1", "device": "cuda"}.items():
        with pytest.raises(ParameterError, match=rf"^{field}: .* with replicas"):
            own_targets(replace(config, **{field: value}), 2)
