"""Configurations: cores that a process may have or not; what a worker takes over from its engine."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import make_engine

from pilotfish.config.engine import PREFILL_ROWS, EngineConfig
from pilotfish.config.fields import parse_cores
from pilotfish.errors import ParameterError

MAY_USE = sorted(os.sched_getaffinity(0))


def test_lists_and_ranges() -> None:
    assert parse_cores("") == frozenset()
    assert parse_cores(str(MAY_USE[0])) == {MAY_USE[0]}
    assert parse_cores(",".join(map(str, MAY_USE))) == set(MAY_USE)
    if list(range(MAY_USE[0], MAY_USE[-1] + 1)) == MAY_USE:
        assert parse_cores(f"{MAY_USE[0]}-{MAY_USE[-1]}") == set(MAY_USE)


@pytest.mark.parametrize("text", ["a", "1-", "-1", "0,,1", "3-1", "99999", "0-99999", " 0", "0.5"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ParameterError, match=r"^cores: "):
        EngineConfig(target=Path(), cores=text)


def test_an_engine_runs_on_its_cores(llama: Path) -> None:
    before = os.sched_getaffinity(0)
    try:
        make_engine(llama, cores=str(MAY_USE[-1]), threads=0)
        assert os.sched_getaffinity(0) == {MAY_USE[-1]}
        assert torch.get_num_threads() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_a_prefill_worker_computes_more_rows_at_a_time_than_a_target(llama: Path) -> None:
    of_few, of_many = (EngineConfig(target=llama, max_rows=rows).of_prefill for rows in (256, 4096))
    assert of_few.max_rows == PREFILL_ROWS and of_many.max_rows == 4096


@pytest.mark.parametrize(("own", "device"), [("", "cuda:0"), ("cpu", "cpu"), ("cuda:1", "cuda:1")])
def test_a_draft_runs_on_its_own_device_or_the_targets(llama: Path, own: str, device: str) -> None:
    target = EngineConfig(target=llama, draft=llama, mode="async", device="cuda:0", draft_device=own)
    assert target.of_draft.device == device and not target.of_draft.draft_device
    assert target.of_prefill.device == target.device == "cuda:0"


@pytest.mark.parametrize("name", ["draft_pool", "prefill_pool"])
def test_a_pool_is_named_once(llama: Path, name: str) -> None:
    pools: dict[str, Any] = {name: ("ipc:///a", "ipc:///b", "ipc:///a")}
    with pytest.raises(ParameterError, match=f"^{name}: 'ipc:///a,ipc:///b,ipc:///a' is not allowed; .* once"):
        EngineConfig(target=llama, draft=llama, mode="async", **pools)


@pytest.mark.parametrize(
    "name", ["draft_pool", "draft_pool_key", "prefill_workers", "prefill_pool", "prefill_pool_key"]
)
def test_members_are_all_pools(llama: Path, name: str) -> None:
    given: dict[str, Any] = {name: 1 if name == "prefill_workers" else ("ipc:///a",)}
    with pytest.raises(ParameterError, match=f"^{name}: .* nothing with members"):
        EngineConfig(target=llama, mode="async", members=Path("members.json"), **given)


def test_a_target_with_members_needs_no_draft_and_starts_none(llama: Path) -> None:
    config = EngineConfig(target=llama, mode="async", members=Path("members.json"))
    assert not config.starts_drafts and config.prefills_elsewhere
    assert not replace(config, tensor_parallel=2).prefills_elsewhere  # of ranks' KV there is none elsewhere
    assert EngineConfig(target=llama, draft=llama, mode="async").starts_drafts
    assert replace(config, draft_pools_each=2).of_prefill.members is None  # nor more pools than it has
