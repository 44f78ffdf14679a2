"""The offline interface."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import SNIPPETS, VOCAB, assert_idle

from pilotfish import LLM, Completion, RequestOutput, SamplingParams
from pilotfish.errors import EngineError, ParameterError

P = SamplingParams(max_tokens=8, seed=3)


@pytest.fixture(scope="module")
def llm(llama: Path, draft: Path) -> LLM:
    return LLM(llama, draft=draft, dtype="float32", threads=1, kv_slots=1024, nodes=8, levels=2, budget="fixed")


def test_one_prompt_many_prompts_and_token_ids(llm: LLM) -> None:
    (one,) = llm.generate(SNIPPETS[0], P)
    (same,) = llm.generate(llm.engine.tokenizer.encode(SNIPPETS[0]), P)
    several = llm.generate([SNIPPETS[0], [1, 2, 3]], P)
    assert isinstance(one, RequestOutput)
    assert isinstance(one.outputs[0], Completion)
    assert one.outputs[0].token_ids == same.outputs[0].token_ids == several[0].outputs[0].token_ids
    assert several[1].prompt_token_ids == [1, 2, 3]
    assert_idle(llm.engine)


def test_a_completion_tells_all(llm: LLM) -> None:
    (output,) = llm.generate(SNIPPETS[0], P)
    (completion,) = output.outputs
    assert (completion.index, completion.finish_reason, completion.seed) == (0, "length", 3)
    assert completion.text == llm.engine.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    assert len(completion.token_ids) == 8
    assert completion.stats.keys() == {
        *("seconds", "tokens_per_second", "verify_steps", "draft_tokens", "accepted_tokens"),
        *("accepted_by_origin", "hits", "cached_by_tier", "handovers", "tokens_per_verify_step"),
    }
    assert completion.stats["draft_tokens"] > 0


def test_with_a_draft_it_speculates_and_output_is_that_without(llm: LLM, llama: Path) -> None:
    off = LLM(str(llama), dtype="float32", threads=1, kv_slots=2048)
    assert (llm.engine.config.mode, off.engine.config.mode) == ("sync", "off")
    prompts = list(SNIPPETS)
    results = [[o.outputs[0].token_ids for o in x.generate(prompts, P)] for x in (llm, off)]
    assert results[0] == results[1]


def test_parameters_for_each_prompt(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=n, seed=n) for n in (1, 2, 5)]
    outputs = llm.generate(SNIPPETS[:3], each)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 2, 5]
    assert [o.outputs[0].seed for o in outputs] == [1, 2, 5]
    with pytest.raises(ValueError, match=r"params: 3 .* 2 prompts"):
        llm.generate(SNIPPETS[:2], each)


def test_numpys_ids_are_ids(llm: LLM) -> None:
    expected = [o.outputs[0].token_ids for o in llm.generate([[1, 2, 3], [4, 5, 6]], P)]

    def given(prompts: Any) -> list[list[int]]:
        return [o.outputs[0].token_ids for o in llm.generate(prompts, P)]

    assert given(np.array([1, 2, 3])) == expected[:1]
    assert given([np.int64(1), np.uint8(2), 3]) == expected[:1]
    assert given([np.array([1, 2, 3], np.int32), np.array([4, 5, 6])]) == expected
    assert given(np.array([[1, 2, 3], [4, 5, 6]])) == expected
    assert given([[np.int64(1), 2, 3], (4, 5, 6)]) == expected
    (output,) = llm.generate(np.array([1, 2, 3], np.uint16), P)
    assert output.prompt_token_ids == [1, 2, 3] and {type(token) for token in output.prompt_token_ids} == {int}


@pytest.mark.parametrize(
    "bad",
    [[True, 2], [1, np.True_], [[1, True]], np.array([True, False]), np.array([1.0, 2.0]), [[1.0]], np.array([-1])],
)
def test_what_is_no_id_is_refused(llm: LLM, bad: Any) -> None:
    with pytest.raises(ParameterError, match=r"^prompt: (True|1\.0|-1) is not allowed; expected token ids 0 to"):
        llm.generate(bad, P)
    assert_idle(llm.engine)


@pytest.mark.parametrize("bad", ["", [VOCAB], [1] * 5000])
def test_a_bad_prompt_stops_the_batch_before_it_runs(llm: LLM, bad: Any) -> None:
    with pytest.raises(ValueError, match="prompt"):
        llm.generate([SNIPPETS[0], bad], P)
    assert_idle(llm.engine)


def test_unknown_options_are_refused(llama: Path) -> None:
    with pytest.raises(ValueError, match="colour: there is no such option"):
        LLM(llama, colour="blue")


@pytest.mark.parametrize(
    ("drafting", "error"),
    [(False, RuntimeError("no memory")), (False, KeyboardInterrupt()), (True, KeyboardInterrupt())],
)
def test_a_step_that_fails_leaves_nothing_behind(
    llm: LLM, drafting: bool, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither requests that were running nor those that waited for their turn."""
    executor, left = llm.engine.drafters.draft_executor if drafting else llm.engine.executor, iter(range(3))
    run = executor.run

    def fail(batch: Any) -> Any:
        if next(left, None) is None:
            raise error
        return run(batch)

    with monkeypatch.context() as patch:
        patch.setattr(executor, "run", fail)
        patch.setattr(llm.engine.worker.scheduler, "max_requests", 2)
        with pytest.raises(EngineError if isinstance(error, RuntimeError) else KeyboardInterrupt):
            llm.generate(list(SNIPPETS[:4]), P)
    assert_idle(llm.engine)
    assert len(llm.generate(SNIPPETS[0], P)[0].outputs[0].token_ids) == 8
