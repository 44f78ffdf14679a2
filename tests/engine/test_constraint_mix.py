"""Many requests with grammars and whatever else a request may ask for, some of which are given up: each output is what
it is without speculation, alone or not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inline_drafts import inline_drafts
from sizes import sized
from support import SNIPPETS, VOCAB, assert_idle, edit_config, make_engine, write_model

from pilotfish.core.sampling.constraint import Constraint
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import FinishReason
from pilotfish.engine.engine import Engine
from pilotfish.engine.sample import Sample

LM: dict[str, Any] = {"drafter": "lm+ngram", "nodes": 8}
MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync", "levels": 3, "width": 3, **LM},
    "sync, few slots": {"mode": "sync", "levels": 3, "width": 3, "kv_slots": 160, **LM},
    "async": {"mode": "async", **LM},
    "async, few slots": {"mode": "async", "kv_slots": 160, **LM},
}
CONSTRAINTS = (
    Constraint.json({"type": "array", "items": {"enum": ["a", "ab", 12, None]}, "maxItems": 3}),
    Constraint.json({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, compact=True),
    Constraint.regex("a*"),
    Constraint.regex("()"),
    Constraint.regex("[ -~]{0,12}"),
    Constraint.regex("(return|raise) [a-z]{1,8}!"),
    Constraint.grammar('start: "(" start ")" | "x" | "xyzzy" start'),
    Constraint.grammar('start: start start | "a"'),
    Constraint.choice(["def main():", "def mist():", "return"]),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A target and its draft with an end of sequence."""
    target = write_model(tmp_path_factory.mktemp("target"), "llama")
    draft = write_model(tmp_path_factory.mktemp("draft"), "llama", perturbed=0.05)
    for model in (target, draft):
        edit_config(model, eos_token_id=0)
        (model / "generation_config.json").unlink(missing_ok=True)
    return [target, draft]


@pytest.fixture(scope="module")
def plain(models: list[Path]) -> Iterator[Engine]:
    with make_engine(models[0]) as engine:
        yield engine


@pytest.fixture(params=sized(["sync, few slots", "async"], list(MODES)))
def guessing(request: pytest.FixtureRequest, models: list[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    target, draft = models
    with inline_drafts(monkeypatch), make_engine(target, draft=draft, **MODES[request.param]) as engine:
        yield engine


def anything(rng: random.Random) -> SamplingParams:
    """Parameters of all kinds beside a constraint, or without one."""

    def sometimes(value: Any, otherwise: Any, chance: float = 0.2) -> Any:
        return value if rng.random() < chance else otherwise

    mark = [rng.randrange(1, VOCAB) for _ in range(sometimes(rng.randrange(1, 4), 0, 0.4))]
    asked = rng.choice(CONSTRAINTS)
    constraint = Constraint(asked.kind, asked.text, asked.compact, mark)
    most = rng.randrange(1, 40)
    return SamplingParams(
        max_tokens=most,
        min_tokens=sometimes(rng.randrange(most), 0),
        temperature=rng.choice([0.0, 0.7, 1.0]),
        top_p=sometimes(0.9, 1.0),
        frequency_penalty=sometimes(0.7, 0.0),
        logit_bias=dict.fromkeys(mark, 12.0) | sometimes({0: 5.0}, {}, 0.5),
        allowed_token_ids=sometimes(tuple(range(0, VOCAB, 2)), None, 0.1),
        bad_token_ids=sometimes((5, 66, 70), ()),
        bad_words=sometimes(("a", "return r"), ()),
        stop=sometimes(("a", "1,"), ()),
        stop_token_ids=sometimes((65, 66, 67), ()),
        ignore_eos=sometimes(True, False),
        include_stop_str_in_output=sometimes(True, False),
        seed=rng.randrange(1 << 20),
        n=sometimes(3, 1),
        logprobs=sometimes(2, None),
        prompt_logprobs=sometimes(1, None),
        structured_outputs=sometimes(None, constraint),
    )


def finished(
    engine: Engine, asked: list[tuple[str, SamplingParams]], rng: random.Random, chance: float
) -> list[Sample]:
    """Requests come a few at a time; each is given up with that chance at every step."""
    samples, waiting = list[Sample](), asked[::-1]
    while waiting or engine.busy:
        for _ in range(rng.randrange(4)):
            samples += engine.submit(*waiting.pop()) if waiting else []
        for sample in samples:
            if sample.finish_reason is None and rng.random() < chance:
                engine.abort(sample)
        engine.step()
    assert_idle(engine)
    return samples


def test_whatever_is_asked_for_no_guess_changes_it(guessing: Engine, plain: Engine) -> None:
    rng = random.Random(0)
    asked = [(rng.choice(SNIPPETS), anything(rng)) for _ in range(sized(24, 48))]
    want = finished(plain, asked, rng, 0.0)
    got = finished(guessing, asked, rng, 0.01)
    assert guessing.worker.drafter.drafter is guessing.drafter  # it did not fail
    whole = 0
    for one, other in zip(got, want, strict=True):
        if one.finish_reason is FinishReason.ABORT:
            assert one.token_ids == other.token_ids[: len(one.token_ids)]
            continue
        whole += one.request.grammar is not None and one.finish_reason is FinishReason.STOP
        assert (one.token_ids, one.text, one.stop) == (other.token_ids, other.text, other.stop)
        assert (one.finish_reason, str(one.error)) == (other.finish_reason, str(other.error))
        assert [each.token for each in one.logprobs] == [each.token for each in other.logprobs]
        assert len(one.prompt_logprobs) == len(other.prompt_logprobs)
    assert whole > len(asked) / 5
    assert sum(sample.request.stats.accepted_tokens for sample in got) > len(asked)
