"""Sampling parameters through the whole engine, with speculation off and on."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support import SNIPPETS, VOCAB, RandomDrafter, assert_idle, finish, make_engine, run

from pilotfish import LLM
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import FinishReason
from pilotfish.core.scheduling.step import RowCosts
from pilotfish.engine.engine import Engine
from pilotfish.engine.sample import Sample
from pilotfish.errors import ModelError


def params(max_tokens: int = 30, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "seed": 7, "temperature": 0.8, **fields})


@pytest.fixture(scope="module")
def off(llama: Path) -> Engine:
    return make_engine(llama)


@pytest.fixture(params=["off", "lm", "random"])
def engine(request: pytest.FixtureRequest, llama: Path, draft: Path, off: Engine) -> Engine:
    if request.param == "off":
        return off
    if request.param == "random":
        return make_engine(llama, RandomDrafter(VOCAB))
    return make_engine(llama, draft=draft, mode="sync", drafter="lm")


def with_eos(llama: Path, directory: Path, **fields: Any) -> Path:
    copy = shutil.copytree(llama, directory / "model")
    (copy / "generation_config.json").write_text(json.dumps(fields))
    return copy


def test_min_tokens_holds_back_every_end(engine: Engine, off: Engine) -> None:
    """Each token but one in twenty would end it: it ends as soon as it may."""
    stops = tuple(range(0, VOCAB, 40))
    text_stop = ("e", " ", "\n")
    for least in (0, 5, 20):
        sample = finish(engine, SNIPPETS[0], params(60, min_tokens=least, stop_token_ids=stops, stop=text_stop))[0]
        assert len(sample.token_ids) > least or sample.finish_reason is FinishReason.LENGTH
        assert not set(sample.token_ids[:least]) & set(stops)
        assert sample.token_ids == finish(off, SNIPPETS[0], sample.request.params)[0].token_ids


def test_a_stop_string_within_min_tokens_stays_in_the_text(off: Engine) -> None:
    plain = [(snippet, finish(off, snippet, params(40))[0]) for snippet in SNIPPETS]
    snippet, sample = next((s, sample) for s, sample in plain if sample.text[:2].isascii())
    stop, least = sample.text[0], 3
    early = off.tokenizer.decode(sample.token_ids[:least])
    stopped = finish(off, snippet, params(40, stop=(stop,), min_tokens=least))[0]
    assert stopped.text.startswith(early)
    assert stopped.text == early + sample.text[len(early) :].split(stop)[0]


def test_ignore_eos_goes_on(llama: Path, off: Engine, tmp_path: Path) -> None:
    (plain,) = run(off, [SNIPPETS[1]], [params()])
    ending = make_engine(with_eos(llama, tmp_path, eos_token_id=plain[6]))
    assert run(ending, [SNIPPETS[1]], [params()]) == [plain[: plain.index(plain[6]) + 1]]
    assert run(ending, [SNIPPETS[1]], [params(ignore_eos=True)]) == [plain]
    own_stop = params(ignore_eos=True, stop_token_ids=(plain[9],))
    assert run(ending, [SNIPPETS[1]], [own_stop]) == [plain[: plain.index(plain[9]) + 1]]


def finish_in_pieces(engine: Engine, prompt: str, p: SamplingParams) -> tuple[Sample, str, list[int]]:
    """A sample, its text as the deltas give it, and the ends that they tell of."""
    (sample,) = engine.submit(prompt, p)
    pieces, ends = [], list[int]()
    while engine.busy:
        for delta in engine.step():
            pieces.append(delta.text)
            ends += delta.ends
    assert_idle(engine)
    return sample, "".join(pieces), ends


def test_the_stop_string_may_show(engine: Engine, off: Engine) -> None:
    plain = finish(off, SNIPPETS[1], params(40))[0]
    stop = plain.text[9:12]
    hidden, told, _ = finish_in_pieces(engine, SNIPPETS[1], params(40, stop=stop))
    assert told == hidden.text == plain.text[: plain.text.index(stop)]
    shown, told, ends = finish_in_pieces(engine, SNIPPETS[1], params(40, stop=stop, include_stop_str_in_output=True))
    assert told == shown.text == hidden.text + stop
    assert shown.token_ids == hidden.token_ids and ends[-1] == len(shown.text)
    assert shown.stop == hidden.stop == stop


def test_the_token_that_ends_it_shows_with_the_stop_string(engine: Engine, off: Engine) -> None:
    plain = finish(off, SNIPPETS[1], params())[0]
    last = plain.token_ids[5]
    cut = plain.token_ids[: plain.token_ids.index(last) + 1]
    for shows, tokens in ((False, cut[:-1]), (True, cut)):
        asked = params(stop_token_ids=[last], include_stop_str_in_output=shows)
        sample, told, ends = finish_in_pieces(engine, SNIPPETS[1], asked)
        assert (sample.token_ids, sample.stop) == (cut, last)
        assert told == sample.text == off.tokenizer.decode(tokens)
        assert len(ends) == len(cut) and ends[-1] == len(told)


def test_a_bad_word_is_never_written(engine: Engine, off: Engine) -> None:
    """A word of several tokens that the plain output holds."""
    plain = finish(off, SNIPPETS[0], params(40))[0]
    word = next(
        text
        for i in range(30)
        for text in [off.tokenizer.decode(plain.token_ids[i : i + 3])]
        if off.tokenizer.encode(text) == plain.token_ids[i : i + 3]
    )
    sample = finish(engine, SNIPPETS[0], params(40, bad_words=(word,)))[0]
    ids = off.tokenizer.encode(word)
    assert len(ids) == 3
    assert all(sample.token_ids[i : i + 3] != ids for i in range(40))
    assert sample.token_ids[:3] == plain.token_ids[:3] or plain.token_ids[:3] == ids


@pytest.mark.parametrize("cost", [1.0, 40.0, 1e9])
def test_logprobs_do_not_depend_on_how_many_rows_a_step_scores(engine: Engine, off: Engine, cost: float) -> None:
    penalty = {"repetition_penalty": 1.2}
    asked = [params(5, logprobs=1, prompt_logprobs=2, **penalty), params(5, logprobs=0, prompt_logprobs=0), params(40)]
    expected = [finish(off, *case)[0] for case in zip(SNIPPETS, asked, strict=False)]
    scheduler, steps = engine.worker.scheduler, list[int]()
    assert scheduler.costs == RowCosts(engine.model.scored_cost)
    scheduler.costs = RowCosts(cost)
    samples = [engine.submit(*case)[0] for case in zip(SNIPPETS, asked, strict=False)]
    while engine.busy:
        steps.append(sum(len(delta.prompt_logprobs) for delta in engine.step()))
    scheduler.costs = RowCosts(engine.model.scored_cost)
    assert [(s.token_ids, s.logprobs, s.prompt_logprobs) for s in samples] == [
        (s.token_ids, s.logprobs, s.prompt_logprobs) for s in expected
    ]
    assert max(steps) <= max(256 / cost, 1) and sum(steps) == sum(len(s.prompt_logprobs) for s in samples) > 20


def test_the_offline_interface_reports_logprobs_where_asked(llama: Path) -> None:
    llm = LLM(llama, dtype="float32", threads=1)
    plain, asked = llm.generate(SNIPPETS[:2], [params(4), params(4, logprobs=1, prompt_logprobs=0, n=2)])
    assert plain.prompt_logprobs is None
    assert plain.outputs[0].logprobs is None
    assert asked.prompt_logprobs is not None
    assert [len(output.logprobs or ()) for output in asked.outputs] == [4, 4]


def test_what_the_model_asks_for_is_the_default(llama: Path, tmp_path: Path) -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.05, "max_new_tokens": 9, "do_sample": True}
    llm = LLM(with_eos(llama, tmp_path, **defaults), dtype="float32", threads=1)
    own = llm.engine.sampling_params(top_p=0.5, seed=1)
    assert (own.temperature, own.top_p, own.repetition_penalty, own.max_tokens) == (0.6, 0.5, 1.05, 9)
    assert len(llm.generate(SNIPPETS[0])[0].outputs[0].token_ids) == 9


@pytest.mark.parametrize("fields", [{"temperature": -1}, {"top_p": "much"}, {"repetition_penalty": 0}])
def test_impossible_defaults_are_refused_at_load(llama: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"generation_config.json: "):
        make_engine(with_eos(llama, tmp_path, **fields))
