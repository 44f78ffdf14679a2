"""Cores of target, drafts and prefill workers: as given, or by the rule; never both on one core without a warning."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from pilotfish.config.engine import EngineConfig
from pilotfish.config.text import config_of
from pilotfish.config.workers import PrefillConfig
from pilotfish.engine.pools.remote_pools import worker_command
from pilotfish.engine.processes import host_memory
from pilotfish.engine.processes.placement import split_cores, split_for_prefill
from pilotfish.engine.processes.process import on_cores
from pilotfish.engine.targets.own_targets import OwnTarget, own_targets
from pilotfish.errors import ParameterError


def cores(*ranges: range) -> frozenset[int]:
    return frozenset().union(*ranges)


@pytest.mark.parametrize(
    ("available", "workers", "target", "drafts"),
    [
        (2, 1, range(1), [range(1, 2)]),
        (2, 3, range(1), [range(1, 2)] * 3),
        (4, 1, range(3), [range(3, 4)]),
        (4, 3, range(2), [range(2, 3), range(2, 3), range(3, 4)]),
        (16, 1, range(14), [range(14, 16)]),
        (32, 3, range(20), [range(20, 24), range(24, 28), range(28, 32)]),
        (0, 2, range(0), [range(0), range(0)]),  # a system without affinities
    ],
)
def test_cores_by_the_rule(available: int, workers: int, target: range, drafts: list[range]) -> None:
    placement = split_cores(cores(range(available)), "", "", workers)
    assert placement.target == cores(target)
    assert placement.workers == tuple(cores(draft) for draft in drafts)


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> frozenset[int]:
    eight = cores(range(8))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(eight))
    return eight


@pytest.mark.parametrize(
    ("target", "draft", "workers", "expected"),
    [
        ("0-1", "2-4", 2, (range(2), [range(2, 3), range(3, 5)])),
        ("4-7", "", 2, (range(4, 8), [range(2, 3), range(3, 4)])),
        ("", "0-1", 1, (range(2, 8), [range(2)])),
    ],
)
def test_cores_as_given(
    eight_cores: frozenset[int], target: str, draft: str, workers: int, expected: tuple[range, list[range]]
) -> None:
    placement = split_cores(eight_cores, target, draft, workers)
    assert (placement.target, placement.workers) == (cores(expected[0]), tuple(cores(each) for each in expected[1]))


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        ("0-3", "3-4", "^draft_cores: '3-4' is not allowed; expected other cores than the target's, 0-3$"),
        ("9", "", "^cores: "),
        ("", "9", "^draft_cores: "),
        ("", "x", "^draft_cores: "),
    ],
)
def test_cores_that_cannot_be_had_are_refused(
    eight_cores: frozenset[int], target: str, draft: str, message: str
) -> None:
    with pytest.raises(ParameterError, match=message):
        split_cores(eight_cores, target, draft, 1)


@pytest.mark.parametrize(("target", "draft", "shared"), [("0-7", "", range(8)), ("", "0-7", range(8))])
def test_where_nothing_is_left_cores_are_shared(
    eight_cores: frozenset[int], caplog: pytest.LogCaptureFixture, target: str, draft: str, shared: range
) -> None:
    placement = split_cores(eight_cores, target, draft, 1)
    assert placement.target == placement.workers[0] == cores(shared) and "share cores" in caplog.text


@pytest.mark.parametrize(
    ("taken", "target", "prefill", "workers", "expected"),
    [
        (range(0), "", "", 1, (range(4), [range(4, 8)])),
        (range(6, 8), "", "", 2, (range(3), [range(3, 4), range(4, 6)])),  # the drafts have the last two
        (range(0), "0-1", "", 2, (range(2), [range(2, 5), range(5, 8)])),
        (range(0), "", "7", 1, (range(7), [range(7, 8)])),
        (range(1, 8), "", "", 1, (range(1), [range(1)])),  # one is left, for both
    ],
)
def test_prefill_workers_have_half_of_what_drafts_leave(
    eight_cores: frozenset[int],
    taken: range,
    target: str,
    prefill: str,
    workers: int,
    expected: tuple[range, list[range]],
) -> None:
    placement = split_for_prefill(eight_cores - set(taken), target, prefill, workers)
    assert (placement.target, placement.workers) == (cores(expected[0]), tuple(cores(each) for each in expected[1]))
    assert placement.taken == frozenset().union(*placement.workers) - placement.target


def test_one_core_is_shared_by_all(caplog: pytest.LogCaptureFixture) -> None:
    placement = split_cores(frozenset({3}), "", "", 2)
    assert (placement.target, placement.workers) == ({3}, ({3}, {3})) and "share cores [3]" in caplog.text


@pytest.mark.parametrize(
    ("available", "drafts", "workers", "target", "prefill"),
    [
        (2, 0, 1, range(1), [range(1, 2)]),
        (2, 1, 2, range(1), [range(1, 2)] * 2),  # where the draft is: the target keeps its core
        (4, 1, 1, range(2), [range(2, 3)]),
        (8, 0, 2, range(4), [range(4, 6), range(6, 8)]),
        (64, 1, 1, range(28), [range(28, 56)]),
        (1, 1, 1, range(1), [range(1)]),
    ],
)
def test_cores_of_prefill_workers_by_the_rule(
    available: int, drafts: int, workers: int, target: range, prefill: list[range]
) -> None:
    own = cores(range(available))
    taken = split_cores(own, "", "", drafts).taken if drafts else cores()
    placement = split_for_prefill(own - taken, "", "", workers, taken)
    assert (placement.target, placement.workers) == (cores(target), tuple(cores(each) for each in prefill))


def test_cores_of_prefill_workers_as_given(eight_cores: frozenset[int], caplog: pytest.LogCaptureFixture) -> None:
    placement = split_for_prefill(eight_cores, "0-1", "", 1)
    assert (placement.target, placement.workers) == ({0, 1}, (cores(range(2, 8)),))
    placement = split_for_prefill(eight_cores, "", "0-2", 1)
    assert (placement.target, placement.workers) == (cores(range(3, 8)), ({0, 1, 2},))
    assert not caplog.text
    assert split_for_prefill(eight_cores, "0-7", "", 1).workers == (eight_cores,) and "share cores" in caplog.text
    with pytest.raises(ParameterError, match=r"^prefill_cores: '3-4' is not allowed; expected other cores than"):
        split_for_prefill(eight_cores, "0-3", "3-4", 1)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_worker_does_not_check_the_cores_of_its_target(tmp_path: Path) -> None:
    """It may use others than they."""
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
