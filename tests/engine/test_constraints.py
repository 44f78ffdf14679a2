"""Outputs that follow a grammar: the same with and without speculation, and as a plain loop over the model has them."""

import random
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inline_drafts import inline_drafts
from json_schemas import object_of
from sizes import paired, sized
from support import SNIPPETS, VOCAB, RandomDrafter, assert_idle, drain, edit_config, make_engine, run, write_model
from transformers import AutoModelForCausalLM

from pilotfish.core.sampling.constraint import Constraint, words
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import FinishReason
from pilotfish.core.trees.tree import GRAMMAR
from pilotfish.engine.engine import Engine
from pilotfish.engine.sample import Sample
from pilotfish.errors import ParameterError
from pilotfish.grammar.state import MatcherState

MODES: dict[str, dict[str, Any]] = {
    "ngram": {"mode": "sync", "drafter": "ngram"},
    "sync": {"mode": "sync", "drafter": "lm+ngram", "nodes": 8, "levels": 3, "width": 3},
    "async": {"mode": "async", "drafter": "lm", "nodes": 8},
    "small pool": {"mode": "sync", "drafter": "lm+ngram", "nodes": 8, "levels": 3, "width": 3, "kv_slots": 200},
}
COUNTS = {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 700}, "maxItems": 3}
KIND = {"enum": ["red", "green", "größer"]}
SCHEMA = object_of("name", "kind", "counts", name={"type": "string", "maxLength": 8}, kind=KIND, counts=COUNTS)
CONSTRAINTS = [
    Constraint.json(SCHEMA, compact=True),
    Constraint.regex(r"[a-f]{2,9}-\d{3}"),
    Constraint.grammar('start: sum\nsum: NUM ("+" NUM){0,5}\nNUM: /[1-9][0-9]{0,3}/'),
    Constraint.choice(["def main():", "def mist():", "return"]),
]


#: More of them, some of which end at once or never.
MANY = (
    *CONSTRAINTS,
    Constraint.json({"type": "array", "items": {"enum": ["a", "ab", 12, None]}, "maxItems": 3}),
    *(Constraint.regex("a*"), Constraint.regex("()"), Constraint.regex("[ -~]{0,12}")),
    Constraint.grammar('start: "(" start ")" | "x" | "xyzzy" start'),
    Constraint.grammar('start: start start | "a"'),
)


def params(constraint: Constraint | None, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, "seed": 7, "structured_outputs": constraint, **fields})


@pytest.fixture(scope="module")
def models(llama: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A target and its draft with an end of sequence."""
    directory = tmp_path_factory.mktemp("ending")
    copies = [Path(shutil.copytree(model, directory / model.name)) for model in (llama, draft)]
    for copy in copies:
        edit_config(copy, eos_token_id=0)
        (copy / "generation_config.json").unlink(missing_ok=True)
    return copies


@pytest.fixture(scope="module")
def plain(models: list[Path]) -> Iterator[Engine]:
    with make_engine(models[0]) as engine:
        yield engine


@pytest.fixture(params=sized(["async", "small pool"], list(MODES)))
def guessing(request: pytest.FixtureRequest, models: list[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    target, draft = models
    with inline_drafts(monkeypatch), make_engine(target, draft=draft, **MODES[request.param]) as engine:
        yield engine


def samples_of(engine: Engine, prompts: Sequence[Any], asked: Sequence[SamplingParams]) -> list[Sample]:
    samples = [s for prompt, one in zip(prompts, asked, strict=True) for s in engine.submit(prompt, one)]
    drain(engine)
    assert_idle(engine)
    assert engine.worker.drafter.drafter is engine.drafter  # it did not fail
    return samples


def anything(rng: random.Random) -> SamplingParams:
    """Parameters of all kinds beside a constraint, or without one."""

    def sometimes(value: Any, otherwise: Any, chance: float = 0.2) -> Any:
        return value if rng.random() < chance else otherwise

    mark = [rng.randrange(1, VOCAB) for _ in range(sometimes(rng.randrange(1, 4), 0, 0.4))]
    asked = rng.choice(MANY)
    constraint = Constraint(asked.kind, asked.text, asked.compact, mark)
    most = rng.randrange(1, 40)
    return SamplingParams(
        max_tokens=most,
        min_tokens=sometimes(rng.randrange(most), 0),
        temperature=rng.choice([0.0, 0.7, 1.0, 1.3]),
        top_p=sometimes(0.9, 1.0),
        top_k=sometimes(40, 0),
        min_p=sometimes(0.01, 0.0),
        repetition_penalty=sometimes(1.3, 1.0),
        frequency_penalty=sometimes(0.7, 0.0),
        logit_bias=dict.fromkeys(mark, 12.0) | sometimes({0: 5.0, 41: -5.0}, {}, 0.5),
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
    assert engine.worker.drafter.drafter is engine.drafter  # it did not fail
    return samples


def test_whatever_is_asked_for_no_guess_changes_an_output(guessing: Engine, plain: Engine) -> None:
    """Alone or not, constrained or free, with whatever else a request may ask for; some are given up."""
    rng = random.Random(0)
    asked = [(rng.choice(SNIPPETS), anything(rng)) for _ in range(sized(36, 96))]
    want = finished(plain, asked, rng, 0.0)
    got = finished(guessing, asked, rng, 0.01)
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


@pytest.mark.parametrize(("size", "mode"), paired([VOCAB - 1, VOCAB + 640], ["sync", "async"]))
def test_models_may_pad_their_vocabularies_differently(
    models: list[Path], plain: Engine, size: int, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = write_model(tmp_path, "llama", vocab_size=size)
    asked = [params(constraint, temperature=0.0) for constraint in [*CONSTRAINTS, None]]
    with inline_drafts(monkeypatch), make_engine(models[0], draft=draft, **MODES[mode]) as engine:
        outputs = [sample.token_ids for sample in samples_of(engine, SNIPPETS[:5], asked)]
    assert outputs == run(plain, SNIPPETS[:5], asked)


def test_it_is_what_a_plain_loop_over_the_model_gives(models: list[Path], plain: Engine) -> None:
    """transformers' logits and a state that replays the whole output at each token."""
    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32)
    assert plain.grammars is not None
    for constraint in CONSTRAINTS:
        prompt, output = plain.check_prompt(SNIPPETS[1]), list[int]()
        while len(output) < 40:
            fresh = MatcherState(plain.grammars.grammars.compile(constraint).deep_copy())
            for token in output:
                fresh.extend(token)
            if fresh.ended:
                break
            bits = np.zeros(words(VOCAB), np.int32)
            fresh.mask([], bits)
            allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *output]])).logits[0, -1].numpy()
            output.append(int(np.where(allowed, logits, -np.inf).argmax()))
        assert run(plain, [SNIPPETS[1]], [params(constraint, temperature=0.0, max_tokens=40)]) == [output]


def test_what_is_forced_enters_the_tree(models: list[Path], plain: Engine) -> None:
    """A drafter that never guesses: every node is the grammar's."""
    silent, asked = RandomDrafter(VOCAB, nodes=0), params(CONSTRAINTS[0])
    engine = make_engine(models[0], silent, mode="sync", drafter="ngram")
    (sample,) = samples_of(engine, [SNIPPETS[0]], [asked])
    assert [sample.token_ids] == run(plain, [SNIPPETS[0]], [asked])
    stats = sample.request.stats
    assert set(stats.accepted_by_origin) == {GRAMMAR}
    assert stats.verify_steps < len(sample.token_ids)


def test_what_is_forbidden_costs_no_row(llama: Path) -> None:
    engine = make_engine(llama, RandomDrafter(VOCAB), mode="sync", drafter="ngram", nodes=12)
    offered = list[bool]()
    schedule = engine.worker.scheduler.schedule

    def watched(chunks: Any, forest: Any, nodes: int) -> Any:
        step = schedule(chunks, forest, nodes)
        for tree, request in enumerate(step.requests):
            assert request.grammar is not None
            for node in range(int(step.forest.starts[tree]), int(step.forest.starts[tree + 1])):
                offered.append(request.grammar.allows(step.forest.nodes.path_tokens(node)))
        return step

    engine.worker.scheduler.schedule = watched  # type: ignore[method-assign]
    samples_of(engine, SNIPPETS[:2], [params(CONSTRAINTS[1]), params(CONSTRAINTS[0])])
    assert offered and all(offered)


def test_no_token_to_give_ends_the_request_alone(guessing: Engine, plain: Engine) -> None:
    wanted = plain.tokenizer.encode("a", add_special_tokens=False)
    bad = params(Constraint.regex("a{3}"), bad_token_ids=tuple(range(VOCAB)[1:]))
    assert wanted
    free = params(None)
    samples = samples_of(guessing, SNIPPETS[:2], [bad, free])
    assert samples[0].finish_reason is FinishReason.ERROR
    assert "grammar and parameters together leave no token" in str(samples[0].error)
    assert [samples[1].token_ids] == run(plain, [SNIPPETS[1]], [free])


def test_it_begins_after_the_reasoning(guessing: Engine, plain: Engine) -> None:
    mark = plain.tokenizer.encode(")", add_special_tokens=False)
    constraint = Constraint("regex", "[a-f]{2,9}-", after=mark)
    asked = [params(constraint, temperature=1.0, seed=seed, logit_bias={mark[0]: 4.0}) for seed in range(6)]
    samples = samples_of(guessing, [SNIPPETS[0]] * 6, asked)
    assert [sample.token_ids for sample in samples] == run(plain, [SNIPPETS[0]] * 6, asked)
    begun = [sample for sample in samples if mark[0] in sample.token_ids]
    assert len(begun) > 3
    for sample in begun:
        rest = sample.token_ids[sample.token_ids.index(mark[0]) + 1 :]
        whole = sample.finish_reason is FinishReason.STOP
        text = plain.tokenizer.decode(rest)
        assert re.fullmatch("[a-f]{2,9}-" if whole else "[a-f]{0,9}", text), text


def test_what_cannot_be_compiled_is_refused_and_leaves_nothing(plain: Engine) -> None:
    with pytest.raises(ParameterError, match="structured_outputs: ") as caught:
        plain.submit(SNIPPETS[0], params(Constraint.regex("a{3")))
    assert caught.value.field == "structured_outputs"
    assert_idle(plain)
