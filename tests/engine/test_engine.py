"""The engine: refusals harm nobody, ends are where they should be, nothing is left behind."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refused
from sizes import sized
from support import CONTEXT, SNIPPETS, VOCAB, RandomDrafter, assert_idle, drain, make_engine, params, run, write_model

from pilotfish.config.engine import EngineConfig
from pilotfish.core.drafting.drafter import DraftLimits, NoDrafter
from pilotfish.core.scheduling.request import FinishReason
from pilotfish.engine import engine as engines
from pilotfish.engine.engine import Engine
from pilotfish.errors import EngineError, InputError, ModelError, ParameterError, PromptError
from pilotfish.model import executor
from pilotfish.workers.records import StepRecord

SYNC = {"mode": "sync", "nodes": 8, "levels": 3, "width": 3}


@pytest.fixture(scope="module")
def off(llama: Path) -> Engine:
    return make_engine(llama)


@pytest.fixture(scope="module")
def sync(llama: Path, draft: Path) -> Engine:
    return make_engine(llama, draft=draft, **SYNC)


@pytest.fixture(params=["off", "sync"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return request.getfixturevalue(request.param)


# -- ends


def test_nobody_sees_tokens_after_a_stop_string(off: Engine, sync: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics, request and drafter agree on what was committed, wherever in an accepted path the output ends."""
    records: list[StepRecord] = []
    monkeypatch.setattr(sync.worker, "observe", records.append)
    accepted = 0
    for snippet in SNIPPETS[:: sized(2, 1)]:
        (plain,) = run(off, [snippet], [params(24)])
        text = off.tokenizer.decode(plain)
        for stop in {text[i : i + 1] for i in range(4, len(text), 5)} - {"\ufffd"}:
            records.clear()
            (sample,) = sync.submit(snippet, params(24, stop=(stop,)))
            deltas = []
            while sync.busy:
                deltas += sync.step()
            assert sample.request.output == sample.token_ids == plain[: len(sample.token_ids)]
            assert sum(len(delta.tokens) for delta in deltas) == len(sample.token_ids)
            assert sum(record.committed for record in records) == len(sample.token_ids)
            counts = {sum(r.accepted for r in records), sum(v.accepted for d in deltas for v in d.verified)}
            assert counts == {sample.stats()["accepted_tokens"]}
            accepted += sample.stats()["accepted_tokens"]
            assert_idle(sync)
    assert accepted


def test_max_model_len_ends_it_as_the_context_does_and_changes_nothing_before(llama: Path, draft: Path) -> None:
    """Also where the draft's own context is less."""
    prompt = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()
    (whole,) = run(make_engine(llama), [prompt], [params(60)])
    for fields in ({}, {**SYNC, "draft": draft}):
        limited = make_engine(llama, max_model_len=64, **fields)
        (sample,) = limited.submit(prompt, params(60))
        drain(limited)
        assert (sample.token_ids, sample.finish_reason) == (whole[:24], FinishReason.LENGTH)
        with pytest.raises(PromptError, match=r"^prompt: 64 tokens; .* allows 63 and one to come"):
            limited.submit(list(range(64)), params())
        assert_idle(limited)


def test_max_model_len_is_at_most_the_models_own_context(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ParameterError, match=rf"^max_model_len: {CONTEXT + 1} .* at most {CONTEXT}, the model's context"
    ):
        make_engine(llama, max_model_len=CONTEXT + 1)
    short = write_model(tmp_path / "short", "llama", max_position_embeddings=64)
    make_engine(llama, draft=short, max_model_len=CONTEXT, **SYNC)  # the draft's own may be less


# -- bad input


BAD_PROMPTS: list[tuple[Any, type[InputError], str]] = [
    ("", PromptError, "prompt: it is empty"),
    ([], PromptError, "prompt: it is empty"),
    ([1] * CONTEXT, PromptError, "prompt: 2048 tokens"),
    ([1, VOCAB], ParameterError, f"prompt: {VOCAB} is not allowed"),
    ([-1], ParameterError, "prompt: -1 is not allowed"),
    ([1.5], ParameterError, "prompt: 1.5 is not allowed"),
    ("a\ud800b", PromptError, "surrogate"),
]


def test_a_bad_prompt_harms_nobody(engine: Engine) -> None:
    expected = run(engine, SNIPPETS[:2], [params(), params()])
    samples = [engine.submit(snippet, params())[0] for snippet in SNIPPETS[:2]]
    engine.step()
    for prompt, error, words in BAD_PROMPTS:
        with pytest.raises(error, match=words) as caught:
            engine.submit(prompt, params())
        assert isinstance(caught.value, ValueError) and "\n" not in str(caught.value)
    drain(engine)
    assert [s.token_ids for s in samples] == expected
    assert_idle(engine)


def test_a_request_that_the_pool_cannot_hold(llama: Path) -> None:
    engine = make_engine(llama, kv_slots=64)
    with pytest.raises(PromptError, match="need 110 KV slots; the pool has 64"):
        engine.submit([1] * 10, params(100))
    assert len(run(engine, [[1] * 10], [params(20)])[0]) == 20
    assert_idle(engine)


def test_impossible_engine_options_are_named(llama: Path) -> None:
    drafters = ("oracle", "", "lm+lm", "ngram+", "lm + ngram", None)
    others = {"mode": "fast", "max_cached_tokens": 1, "dtype": "double", "nodes": 0, "levels": 0, "width": 1.5}
    others |= {"threads": -1, "kv_slots": 63, "max_rows": 0, "max_requests": True, "memory": -1}
    for field, value in (*(("drafter", drafter) for drafter in drafters), *others.items()):
        with pytest.raises(ParameterError, match=f"^{field}: "):
            EngineConfig(target=llama, **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "meta", "no such"])
def test_a_device_that_is_not_there(llama: Path, device: str) -> None:
    with pytest.raises(ParameterError, match=r"^device: "):
        make_engine(llama, device=device)


def test_speculation_needs_a_draft(llama: Path) -> None:
    with pytest.raises(ParameterError, match=r"^draft: "):
        EngineConfig(target=llama, mode="sync", drafter="lm")
    assert run(make_engine(llama, mode="sync", drafter="ngram"), ["a a a a"], [params()])


def test_any_drafters_combine(llama: Path) -> None:
    for drafter, kinds in (("suffix", ["suffix"]), ("suffix+lm", ["lm", "suffix"]), ("ngram+lm", ["lm", "ngram"])):
        assert list(EngineConfig(target=llama, drafter=drafter).drafters) == kinds


def test_a_stop_string_leaves_its_response_to_the_tenant(llama: Path, off: Engine) -> None:
    engine = make_engine(llama, mode="sync", drafter="suffix")
    (whole,) = off.submit(SNIPPETS[5], params(20))
    drain(off)
    (stopped,) = engine.submit(SNIPPETS[5], params(20, stop=(whole.text[-6:-3],)), "a")
    drain(engine)
    assert (stopped.finish_reason, stopped.request.finish_reason) == (FinishReason.STOP, FinishReason.STOP)
    responses = engine.drafter.responses  # type: ignore[attr-defined]
    held = responses.num_tokens
    assert held >= len(stopped.token_ids)
    (aborted,) = engine.submit(SNIPPETS[5], params(20), "a")
    engine.step()
    engine.abort(aborted)
    assert responses.num_tokens == held


@pytest.mark.parametrize("name", ["nothing", "no/such/model", "/no/such/model"])
def test_a_missing_model(name: str) -> None:
    refused(ModelError, make_engine, Path(name))


# -- a draft can only help


class BrokenDrafter(RandomDrafter):
    """Raises at its n-th call."""

    def __init__(self, calls: int, where: str) -> None:
        super().__init__(VOCAB)
        self.calls, self.where = calls, where

    def _count(self, where: str) -> None:
        self.calls -= where == self.where
        if self.calls <= 0:
            raise RuntimeError("broken")

    def propose(self, requests: Sequence[Any], limits: DraftLimits) -> list[Any]:
        self._count("propose")
        trees = super().propose(requests, limits)
        return trees[1:] if self.where == "count" else trees

    def expect(self, requests: Sequence[Any]) -> None:  # noqa: ARG002
        self._count("expect")

    def commit(self, request: Any, tokens: Sequence[int]) -> None:  # noqa: ARG002
        self._count("commit")

    def close(self, request: Any) -> None:  # noqa: ARG002
        self._count("close")


@pytest.mark.parametrize("where", ["propose", "expect", "commit", "close", "count"])
def test_a_broken_drafter_changes_nothing(llama: Path, off: Engine, where: str) -> None:
    """The rows of a step are so few that the second prompt waits for them."""
    each = [params(), params(seed=8)]
    engine = make_engine(llama, BrokenDrafter(1 if where == "expect" else 2, where), max_rows=16)
    assert run(engine, SNIPPETS[:2], each) == run(off, SNIPPETS[:2], each)
    assert type(engine.worker.drafter.drafter) is NoDrafter
    assert_idle(engine)


class UncertainDrafter(RandomDrafter):
    """Knows no chances: its scores are no numbers."""

    def propose(self, requests: Sequence[Any], limits: DraftLimits) -> list[Any]:
        trees = super().propose(requests, limits)
        for tree in trees:
            tree.scores = [math.nan] * len(tree)
        return trees


@pytest.mark.parametrize("budget", ["auto", "fixed"])
@pytest.mark.parametrize("drafter", [UncertainDrafter(VOCAB), RandomDrafter(10 * VOCAB)], ids=["scores", "tokens"])
def test_guesses_that_are_none_change_nothing(llama: Path, off: Engine, budget: str, drafter: RandomDrafter) -> None:
    engine = make_engine(llama, drafter, budget=budget)
    assert run(engine, SNIPPETS[:2], [params()] * 2) == run(off, SNIPPETS[:2], [params()] * 2)
    assert_idle(engine)


@pytest.mark.parametrize("broken", ["forward", "log-probabilities"])
def test_a_failed_step_frees_its_slots(llama: Path, draft: Path, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests in it end, one that waits runs on."""
    engine = make_engine(llama, draft=draft, max_requests=2, **SYNC)
    samples = [engine.submit(snippet, params(logprobs=1))[0] for snippet in SNIPPETS[:3]]
    engine.step()
    with monkeypatch.context() as patch:
        where, name = (engine.executor, "run") if broken == "forward" else (executor, "token_logprobs")
        patch.setattr(where, name, lambda *_: 1 / 0)
        with pytest.raises(EngineError, match="step failed: ZeroDivisionError"):
            engine.step()
    assert [s.finish_reason for s in samples] == [FinishReason.ABORT, FinishReason.ABORT, None]
    drain(engine)
    assert samples[2].token_ids == run(make_engine(llama), [SNIPPETS[2]], [params()])[0]
    assert_idle(engine)


def test_a_draft_rests_where_its_context_ends(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    short = write_model(tmp_path / "short", "llama", max_position_embeddings=64)
    with caplog.at_level("INFO", "pilotfish.engine.heads"):
        engine = make_engine(llama, draft=short, **SYNC)
    assert f"draft: {short} guesses up to position 64 of the target's {CONTEXT};" in caplog.text
    long, brief = (engine.submit(SNIPPETS[i], params(length))[0] for i, length in ((0, 90), (1, 10)))
    drain(engine)
    assert engine.worker.drafter.drafter is engine.drafter
    assert long.token_ids == run(make_engine(llama), [SNIPPETS[0]], [params(90)])[0]
    assert brief.request.stats.draft_tokens > 0
    again = engine.submit(SNIPPETS[2], params(10))[0]
    drain(engine)
    assert again.request.stats.draft_tokens > 0
    assert_idle(engine)


def test_a_given_drafter_needs_no_workers(llama: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(make_engine(llama), SNIPPETS[:1], [params()])
    started: list[EngineConfig] = []
    monkeypatch.setattr(engines, "RemoteDrafts", started.append)
    with make_engine(llama, RandomDrafter(VOCAB), mode="async", draft=draft) as engine:
        assert run(engine, SNIPPETS[:1], [params()]) == expected
    assert started == []


def test_costs_of_a_short_context_are_measured(tmp_path: Path) -> None:
    short = write_model(tmp_path / "short", "llama", max_position_embeddings=64)
    engine = make_engine(short, draft=short, mode="sync", budget="auto")
    assert engine.memory.slots >= 64
    assert len(run(engine, [SNIPPETS[0]], [params(12)])[0]) == 12
