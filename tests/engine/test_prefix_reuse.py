"""KV of earlier requests: the same output with and without it, and none of another tenant's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from inline_drafts import inline_drafts
from sizes import sized
from support import MODES, SNIPPETS, assert_idle, drain, finish, make_engine, params, run

from pilotfish.core.scheduling.request import Request
from pilotfish.engine.engine import Engine


@pytest.fixture(scope="module")
def plain(llama: Path) -> Engine:
    return make_engine(llama, prefix_cache=False)


#: In one mode in the suite, where modes have nothing to do with it.
ONE_MODE = pytest.mark.parametrize("caching", sized(["sync"], list(MODES)), indirect=True)


@pytest.mark.parametrize("eager", [False, True], ids=["kernels", "reference"])
def test_kv_in_8_bits(llama: Path, draft: Path, eager: bool) -> None:
    """Prompts in chunks, of which parts are found again. Equal tokens with drafts are tests/workers'."""
    options: dict[str, Any] = {"kv_dtype": "int8", "eager": eager}
    plain = make_engine(llama, prefix_cache=False, **options)
    whole = [3 + 7 * i % 400 for i in range(60)]
    prompts = [whole, *([*whole[:offset], 7, *whole[offset:]] for offset in range(0, 40, 26 if eager else 3))]
    expected = run(plain, prompts, [params(8)] * len(prompts))
    for max_rows, mode in ((16, "off"), (17, "off"), (40, "sync"))[sized(int(eager), 0) :]:
        with make_engine(llama, draft=draft, max_rows=max_rows, **options, **MODES[mode]) as engine:
            samples = [finish(engine, prompt, params(8))[0] for prompt in prompts]
        assert [sample.token_ids for sample in samples] == expected
        assert samples[-1].request.stats.cached_tokens >= 26


@pytest.fixture(params=MODES)
def caching(
    request: pytest.FixtureRequest, llama: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    """With reuse on both sides, where there is a draft."""
    with inline_drafts(monkeypatch), make_engine(llama, draft=draft, **MODES[request.param]) as engine:
        yield engine


def test_prompts_that_part_at_every_offset(caching: Engine, plain: Engine) -> None:
    whole = plain.check_prompt(SNIPPETS[1])[:40]
    offsets = range(0, len(whole), sized(3, 1))
    prompts = [whole, *([*whole[:offset], 7, *whole[offset:]] for offset in offsets), whole]
    for prompt, shared in zip(prompts, (0, *offsets, len(whole) - 1), strict=True):
        (sample,) = finish(caching, prompt, params(8))
        assert [sample.token_ids] == run(plain, [prompt], [params(8)])
        assert sample.request.stats.cached_tokens >= shared
    assert sample.request.stats.cached_tokens == len(whole) - 1  # all but the one whose row samples


def test_turns_of_a_conversation(caching: Engine, plain: Engine) -> None:
    tokens, known = plain.check_prompt(SNIPPETS[0]), 0
    for turn in range(4):
        (sample,) = finish(caching, tokens, params(12, seed=turn))
        assert [sample.token_ids] == run(plain, [tokens], [params(12, seed=turn)])
        assert sample.request.stats.cached_tokens == known
        known = len(tokens) + len(sample.token_ids) - 1  # the last token's KV was never computed
        tokens = [*tokens, *sample.token_ids, 5 + turn]


@ONE_MODE
def test_a_prompt_is_found_while_its_request_still_runs(caching: Engine, plain: Engine) -> None:
    first = caching.submit(SNIPPETS[2], params(30))[0]
    while not first.token_ids:
        caching.step()
    second = caching.submit(SNIPPETS[2], params(30, seed=9))[0]
    drain(caching)
    assert second.request.stats.cached_tokens == second.request.num_prompt_tokens - 1
    each = [params(30), params(30, seed=9)]
    assert [first.token_ids, second.token_ids] == run(plain, [SNIPPETS[2]] * 2, each)
    assert_idle(caching)


@pytest.mark.parametrize("kv_slots", [512, 16384])
def test_equal_prompts_of_two_tenants_never_share_a_slot(llama: Path, kv_slots: int) -> None:
    engine = make_engine(llama, kv_slots=kv_slots)
    scheduler, draw = engine.worker.scheduler, np.random.default_rng(0)
    assert scheduler.cache is not None

    def step() -> None:
        engine.step()
        held = {salt: {slot for r in running(salt) for slot in r.slots[: r.num_computed].tolist()} for salt in "ab"}
        assert held["a"].isdisjoint(held["b"])

    def running(salt: str) -> list[Request]:
        return [request for request in scheduler.running if request.cache_salt == salt]

    for pair in range(sized(80, 200)):
        prompt = [pair, *draw.integers(0, 512, draw.integers(1, 40)).tolist()]
        samples = engine.submit(prompt, params(3), "a")
        while engine.busy and pair % 2:
            step()
        samples += engine.submit(prompt, params(3), "b")
        while engine.busy:
            step()
        assert samples[0].token_ids == samples[1].token_ids
        assert [sample.request.stats.cached_tokens for sample in samples] == [0, 0]
        known = {salt: scheduler.cache.match(salt, prompt).tolist() for salt in "ab"}
        assert len(known["a"]) == len(known["b"]) == len(prompt) and set(known["a"]).isdisjoint(known["b"])
    assert_idle(engine)
    assert bool(scheduler.cache.evicted) is (kv_slots == 512)


@ONE_MODE
def test_a_prompt_that_is_scored_is_computed(caching: Engine, plain: Engine) -> None:
    finish(caching, SNIPPETS[0], params(4))
    (scored,) = finish(caching, SNIPPETS[0], params(4, prompt_logprobs=1))
    (expected,) = finish(plain, SNIPPETS[0], params(4, prompt_logprobs=1))
    assert scored.prompt_logprobs == expected.prompt_logprobs and scored.request.stats.cached_tokens == 0


def test_requests_that_end_badly_leave_nothing(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(llama)
    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "execute", Mock(side_effect=RuntimeError("broken")))
        engine.submit(SNIPPETS[0], params(4))
        with pytest.raises(Exception, match="broken"):
            engine.step()
    assert finish(engine, SNIPPETS[0], params(4))[0].request.stats.cached_tokens == 0
