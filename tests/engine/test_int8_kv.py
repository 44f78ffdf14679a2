"""KV in int8 changes what the target is, and nothing else: a prompt in chunks, found again, or computed again after a
request gave way has the same output. Equal tokens with drafts are tests/target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import SNIPPETS, assert_idle, make_engine, params, run
from test_kv_tiers import SLOTS, _patient, finish, from_where, prompts  # noqa: F401  # a fixture that all tests use

from pilotfish.engine.engine import Engine
from pilotfish.errors import ParameterError

INT8 = {"kv_dtype": "int8"}


@pytest.fixture(scope="module", params=[False, True], ids=["kernels", "reference"])
def eager(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def plain(llama: Path, eager: bool) -> Engine:
    return make_engine(llama, prefix_cache=False, eager=eager, **INT8)


@pytest.mark.parametrize("max_rows", [16, 17, 40])
def test_a_prompt_in_chunks(llama: Path, plain: Engine, eager: bool, max_rows: int) -> None:
    prompt = [3 + 7 * i % 400 for i in range(150)]
    engine = make_engine(llama, max_rows=max_rows, eager=eager, **INT8)
    assert run(engine, [prompt], [params(12)]) == run(plain, [prompt], [params(12)])


@pytest.mark.parametrize("mode", [{}, {"mode": "sync", "drafter": "lm+ngram"}], ids=["off", "sync"])
def test_a_prefix_that_is_found(llama: Path, draft: Path, plain: Engine, eager: bool, mode: dict[str, Any]) -> None:
    engine = make_engine(llama, draft=draft, eager=eager, **INT8, **mode)
    whole = plain.check_prompt(SNIPPETS[1])[:40]
    for offset in range(0, 40, 13 if eager else 1):
        prompt = [*whole[:offset], 7, *whole[offset:]]
        (sample,) = engine.submit(prompt, params(8))
        while engine.busy:
            engine.step()
        assert [sample.token_ids] == run(plain, [prompt], [params(8)])
    assert sample.request.stats.cached_tokens >= 26
    assert_idle(engine)


def test_what_comes_back_from_host_memory_and_disk(llama: Path, plain: Engine, eager: bool, tmp_path: Path) -> None:
    where = {"kv_host_memory": 0.005, "kv_disk": tmp_path, "kv_disk_size": 0.01, "kv_slots": SLOTS, "eager": eager}
    for tier in ("host", "disk"):
        with make_engine(llama, **where, **INT8) as engine:
            for prompt in prompts(plain, 3) * (2 if tier == "host" else 1):
                sample = finish(engine, prompt, params(8))
                assert [sample.token_ids] == run(plain, [prompt], [params(8)])
            assert from_where(sample) == {tier}
    with pytest.raises(ParameterError, match=r"^kv_disk: .* with these settings"):
        make_engine(llama, **where)  # KV as it is computed is another


def test_requests_that_give_way(llama: Path, plain: Engine, eager: bool) -> None:
    engine = make_engine(llama, kv_slots=300, max_rows=64, eager=eager, **INT8)
    prompts, each = [SNIPPETS[i] for i in range(3)], [params(120, seed=i) for i in range(3)]
    samples = [engine.submit(prompt, own)[0] for prompt, own in zip(prompts, each, strict=True)]
    while engine.busy:
        engine.step()
        engine.check()
    assert [sample.token_ids for sample in samples] == run(plain, prompts, each)
    assert any(sample.request.stats.preemptions for sample in samples)
    assert_idle(engine)
