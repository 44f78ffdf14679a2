"""Models whose layers all have a window: sequences longer than the pool, with the same output as without any limit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inline_drafts import inline_drafts
from sizes import sized
from support import MODES, SNIPPETS, VOCAB, WINDOW, assert_idle, make_engine, params, run, sure_tokens
from transformers import AutoModelForCausalLM

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.engine.sample import Sample
from pilotfish.errors import ParameterError, PromptError

#: The smallest pool, and few rows a step: it has room for two sequences.
SMALL = {"kv_slots": 64, "max_rows": 16}
#: Above it rounding cannot change the best token.
SURE = 1e-3


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


@pytest.fixture(scope="module")
def target(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["mistral"]


@pytest.fixture(scope="module")
def plain(target: Path) -> Engine:
    """It gives no slot back, and finds none."""
    engine = make_engine(target, prefix_cache=False, kv_slots=8192)
    engine.worker.scheduler.pool.window = 0
    return engine


#: In one mode in the suite, where modes have nothing to do with it.
ONE_MODE = pytest.mark.parametrize("small", sized(["sync"], list(MODES)), indirect=True)


@pytest.fixture(params=MODES)
def small(
    request: pytest.FixtureRequest, target: Path, tiny_drafts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    slots = {"kv_slots": 2048} if request.param == "async" else {}  # a draft sees all of a sequence
    with (
        inline_drafts(monkeypatch),
        make_engine(target, draft=tiny_drafts["mistral"], **{**SMALL, **MODES[request.param], **slots}) as engine,
    ):
        assert engine.worker.scheduler.pool.window == WINDOW
        yield engine


def finish(engine: Engine, prompt: Any, asked: SamplingParams) -> list[Sample]:
    samples = engine.submit(prompt, asked)
    while engine.busy:
        engine.step()
        engine.check()
        held = [request.num_held for request in engine.worker.scheduler.running]
        assert max(held, default=0) <= WINDOW - 1 + SMALL["max_rows"] or engine.memory.slots > SMALL["kv_slots"]
    assert_idle(engine)
    return samples


@ONE_MODE
def test_greedy_tokens_far_beyond_the_window_are_those_of_generate(small: Engine, target: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager").eval()
    for length in (WINDOW - 1, WINDOW, 3 * WINDOW, 300):
        prompt = prompt_of(length)
        sure = sure_tokens(reference, prompt, sized(40, 80), SURE)
        (sample,) = finish(small, prompt, params(sized(40, 80), temperature=0.0))
        assert sample.token_ids[: len(sure)] == sure and len(sure) > WINDOW


def test_many_sequences_longer_than_the_pool(small: Engine, plain: Engine) -> None:
    prompts = [prompt_of(length, seed=length) for length in (1, 15, 40, 90, 200, 500)]
    each = [params(sized(60, 100), seed=i) for i in range(len(prompts))]
    assert run(small, prompts, each) == run(plain, prompts, each)
    assert_idle(small)


def test_a_preempted_sequence_gives_the_same(target: Path, plain: Engine) -> None:
    engine = make_engine(target, **SMALL)
    engine.worker.scheduler.headroom = 1
    prompts = [prompt_of(length, seed=length) for length in (5, 6, 7, 8, 9, 10, 200)]
    each = [params(120, seed=i) for i in range(len(prompts))]
    assert run(engine, prompts, each) == run(plain, prompts, each)
    assert engine.worker.scheduler.preemptions > 0
    assert_idle(engine)


@pytest.mark.parametrize("kv_slots", [64, 4096])
def test_prompts_that_part_at_every_offset_around_the_window(target: Path, plain: Engine, kv_slots: int) -> None:
    """Of a prompt that came in one chunk or in several, where all stays and where most is evicted."""
    for max_rows in (16, 49):
        engine = make_engine(target, kv_slots=kv_slots, max_rows=max_rows)
        whole = prompt_of(3 * WINDOW + 1, seed=1)
        offsets = range(0, len(whole) + 1, sized(3, 1))
        prompts = [whole, *([*whole[:offset], 7, *whole[offset:]] for offset in offsets), whole]
        found = []
        for prompt in prompts:
            (sample,) = engine.submit(prompt, params(6))
            while engine.busy:
                engine.step()
                engine.check()
            assert [sample.token_ids] == run(plain, [prompt], [params(6)])
            found.append(sample.request.stats.cached_tokens)
        assert kv_slots == 64 or found[1:] == [*offsets, len(whole) - 1]


@ONE_MODE
def test_turns_of_a_conversation(small: Engine, plain: Engine) -> None:
    tokens, known = prompt_of(100, seed=2), 0
    for turn in range(4):
        (sample,) = finish(small, tokens, params(40, seed=turn))
        assert [sample.token_ids] == run(plain, [tokens], [params(40, seed=turn)])
        assert sample.request.stats.cached_tokens == known
        known = len(tokens) + len(sample.token_ids) - 1
        tokens = [*tokens, *sample.token_ids, 5 + turn]


@ONE_MODE
def test_a_prompt_that_is_scored(small: Engine, plain: Engine) -> None:
    asked = params(30, prompt_logprobs=1, logprobs=2)
    scored, expected = (finish(engine, prompt_of(100), asked)[0] for engine in (small, plain))
    assert scored.token_ids == expected.token_ids and scored.prompt_logprobs == expected.prompt_logprobs
    assert scored.request.stats.cached_tokens == 0


def test_a_pool_that_cannot_hold_what_a_step_sees_refuses_longer_sequences(target: Path) -> None:
    engine = make_engine(target, kv_slots=64, max_rows=50)
    with pytest.raises(PromptError, match="need 65 KV slots; the pool has 64"):
        engine.submit(prompt_of(60), params(20))
    engine.submit(prompt_of(60), params(4))
    engine.abort_all()
    assert engine.worker.scheduler.longest(2048) == 64
    assert make_engine(target, **SMALL).worker.scheduler.longest(2048) == 2048


@pytest.mark.parametrize("tier", ["kv_host_memory", "kv_disk"])
def test_tiers_are_refused(target: Path, tmp_path: Path, tier: str) -> None:
    given: dict[str, Any] = {tier: tmp_path / "kv" if tier == "kv_disk" else 1.0}
    with pytest.raises(ParameterError, match=f"^{tier}: .*expected none for a model whose layers all have sliding"):
        make_engine(target, **given)
    assert not (tmp_path / "kv").exists()


def test_a_model_with_a_layer_that_sees_all_gives_nothing_back(tiny_models: dict[str, Path]) -> None:
    engine = make_engine(tiny_models["qwen3"], **SMALL)
    assert engine.worker.scheduler.pool.window == 0 and engine.worker.scheduler.longest(2048) == 64
    with pytest.raises(PromptError, match="KV slots"):
        engine.submit(SNIPPETS[0], params(64))
