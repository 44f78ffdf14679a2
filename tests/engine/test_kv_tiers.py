"""KV that comes back from host memory, and from disk after a restart: the same output, always."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from support import SNIPPETS, assert_idle, make_engine, run

from pilotfish.core.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.engine.sample import Sample
from pilotfish.kv import tiers as tiers_module
from pilotfish.kv.tiers import KVTiers

MODES: dict[str, dict[str, Any]] = {
    "off": {},
    "ngram": {"mode": "sync", "drafter": "ngram"},
    "sync": {"mode": "sync", "drafter": "lm+ngram"},
}
#: Room for one long sequence.
SLOTS = 512
LIMIT = 20.0  # seconds


def params(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "seed": 7, "temperature": 0.8, **fields})


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is there is loaded, however long it takes: what depends on time is tested in tests/kv."""
    monkeypatch.setattr(KVTiers, "computed", lambda *_: None)
    for name in ("STUCK", "LEAST"):
        monkeypatch.setattr(tiers_module, name, 1000.0)


@pytest.fixture(scope="module")
def plain(llama: Path) -> Engine:
    return make_engine(llama, prefix_cache=False)


def prompts(plain: Engine, count: int = 6, length: int = 300) -> list[list[int]]:
    """Long ones that have nothing in common."""
    text = plain.check_prompt("\n".join(SNIPPETS))
    return [[place + 3, *(text * 9)[place * 7 :][: length - 1]] for place in range(count)]


def finish(engine: Engine, prompt: Any, asked: SamplingParams, salt: str | None = None) -> Sample:
    (sample,) = engine.submit(prompt, asked, salt)
    while engine.busy:
        engine.step()
    assert_idle(engine)
    settle(engine)
    return sample


def settle(engine: Engine) -> None:
    """Until all copies are made and files written."""
    tiers, end = engine.tiers, time.monotonic() + LIMIT
    assert tiers is not None
    while (tiers._saving or tiers._unwritten) and time.monotonic() < end:
        time.sleep(0.001)
    assert not tiers._saving and not tiers._unwritten


def from_where(sample: Sample) -> set[str]:
    return set(sample.request.stats.cached_by_tier)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_the_pool_evicted_comes_back(
    tier: str, mode: str, llama: Path, draft: Path, plain: Engine, tmp_path: Path
) -> None:
    where = {"kv_host_memory": 0.01} if tier == "host" else {"kv_disk": tmp_path / "kv", "kv_disk_size": 0.01}
    asked = params(8)
    with make_engine(llama, draft=draft, kv_slots=SLOTS, **MODES[mode], **where) as engine:
        for round_ in range(2):
            for prompt in prompts(plain):
                sample = finish(engine, prompt, asked)
                assert [sample.token_ids] == run(plain, [prompt], [asked])
                assert round_ == 0 or (from_where(sample) == {tier} and sample.request.stats.cached_tokens == 256)
        assert engine.tiers is not None and engine.tiers.counts.loaded_tokens[tier] == 6 * 256


@pytest.mark.parametrize("mode", MODES)
def test_what_is_on_disk_survives_a_restart(mode: str, llama: Path, draft: Path, plain: Engine, tmp_path: Path) -> None:
    where = {"kv_host_memory": 0.005, "kv_disk": tmp_path / "kv", "kv_disk_size": 0.01}
    for run_ in range(2):
        with make_engine(llama, draft=draft, kv_slots=SLOTS, **MODES[mode], **where) as engine:
            for prompt in prompts(plain):
                sample = finish(engine, prompt, params(8))
                assert [sample.token_ids] == run(plain, [prompt], [params(8)])
                assert from_where(sample) == ({"disk"} if run_ else set())
