"""Logits that are no numbers end their own request with an error; nobody else notices, and no draft matters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sizes import paired, sized
from support import KINDS, SNIPPETS, VOCAB, RandomDrafter, assert_idle, make_engine, run

from pilotfish.core.drafting.drafter import Drafter, DraftLimits
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import FinishReason, Request
from pilotfish.core.trees.tree import ROOT, Guesses
from pilotfish.engine.engine import Engine
from pilotfish.engine.llm import LLM
from pilotfish.engine.sample import Sample
from pilotfish.errors import EngineError
from pilotfish.model.cpu.native_modules import PlainDecoder
from pilotfish.model.sampling import non_finite_rows

#: No prompt and no output here has it.
POISON = 499


class Oracle(Drafter):
    """Guesses one path that it was told, and a child of the root that is never right."""

    def __init__(self, path: Sequence[int], wrong: int) -> None:
        self.path, self.wrong = list(path), wrong

    def propose(self, requests: Sequence[Request], limits: DraftLimits) -> list[Guesses]:  # noqa: ARG002
        return [self._tree(len(request.output)) for request in requests]

    def _tree(self, done: int) -> Guesses:
        tree = Guesses()
        node = ROOT
        for depth, token in enumerate(self.path[done : done + 6], 1):
            node = tree.add(node, token, -0.1 * depth)
        tree.add(ROOT, self.wrong, -0.5)
        return tree


def params(max_tokens: int = 24, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "seed": 3, "temperature": 0.9, **fields})


def poison(module: torch.nn.Module, token: int, value: float = float("nan")) -> None:
    """From now on the model's states after this token, and all logits there, are not finite."""
    embedding: Any = next(part for name, part in module.named_modules() if name.endswith("embed_tokens"))
    weight = embedding.weight.detach().clone()  # a head that is tied to it stays as it is
    weight[token] = value
    if isinstance(module, PlainDecoder):
        embedding.weight.data = weight  # the kernels keep this very parameter
    else:
        embedding.weight = torch.nn.Parameter(weight, requires_grad=False)


def finish(engine: Engine, samples: Sequence[Sample]) -> None:
    while engine.busy:
        engine.step()
        engine.worker.scheduler.check()
    assert all(sample.finish_reason is not None for sample in samples)


WAYS: dict[str, dict[str, Any]] = {
    "kernels": {},
    "reference": {"eager": True},
    "int8 KV": {"kv_dtype": "int8"},
    "int8 KV, reference": {"kv_dtype": "int8", "eager": True},
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    return WAYS[request.param]


OWN: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "allowed_token_ids": (40, 41)},
    {"temperature": 1.0, "allowed_token_ids": (40, 41), "logprobs": 2},
    {"prompt_logprobs": 1},
]


@pytest.mark.parametrize(("own", "way"), paired(OWN, list(WAYS)), indirect=["way"])
def test_the_request_ends_and_no_other(llama: Path, way: dict[str, Any], own: dict[str, Any]) -> None:
    engine = make_engine(llama, RandomDrafter(VOCAB), mode="sync", drafter="ngram", **way)
    others = run(make_engine(llama, **way), SNIPPETS[:3], [params(12)] * 3)
    poison(engine.model.module, POISON)
    bad = engine.submit([9, POISON, 11, 12], params(**own))[0]
    good = [engine.submit(snippet, params(12))[0] for snippet in SNIPPETS[:3]]
    finish(engine, [bad, *good])
    assert [sample.token_ids for sample in good] == others
    assert not any(POISON in sample.request.tokens for sample in good)
    assert bad.finish_reason is FinishReason.ERROR and bad.token_ids == [] and bad.logprobs == []
    assert str(bad.error) == "logits: those after token 4 are not finite (NaN or infinity); none can be sampled"
    assert all(sample.error is None for sample in good)
    assert_idle(engine)


@pytest.mark.parametrize(("kind", "way"), paired(list(KINDS), list(WAYS)), indirect=["way"])
def test_no_architecture_lets_it_spread(kind: str, tiny_models: dict[str, Path], way: dict[str, Any]) -> None:
    """Not through padding, masked keys, windows, sinks or experts."""
    prompts = [SNIPPETS[0], list(range(30, 60)), list(range(60, 63))]
    engine = make_engine(tiny_models[kind], **way)
    expected = run(engine, prompts, [params(12)] * 3)
    token = next(token for token in range(100, VOCAB) if all(token not in tokens for tokens in expected))
    poison(engine.model.module, token)
    for _ in range(2):  # then in the slots that it left
        bad = [engine.submit([*range(9, length), token], params(12))[0] for length in (10, 50)]
        good = [engine.submit(prompt, params(12))[0] for prompt in prompts]
        finish(engine, [*bad, *good])
        assert [sample.finish_reason for sample in bad] == [FinishReason.ERROR] * 2
        assert [sample.token_ids for sample in good] == expected
    assert_idle(engine)


def test_a_prompt_in_chunks_is_scored_up_to_there(llama: Path) -> None:
    engine = make_engine(llama, max_rows=4)
    poison(engine.model.module, POISON)
    prompt = [9, 10, POISON, *range(20, 30)]
    bad, good = (engine.submit(p, params(4, prompt_logprobs=0))[0] for p in (prompt, prompt[:2]))
    finish(engine, [bad, good])
    assert isinstance(bad.error, EngineError) and bad.request.num_computed < len(prompt)
    assert good.finish_reason is FinishReason.LENGTH and len(good.prompt_logprobs) == 1
    assert_idle(engine)


@pytest.mark.parametrize(("way", "temperature"), paired(list(WAYS), [0.0, 0.9]), indirect=["way"])
@pytest.mark.parametrize("value", sized([float("nan")], [float("nan"), float("inf")]))
def test_guesses_do_not_move_the_end(llama: Path, way: dict[str, Any], temperature: float, value: float) -> None:
    """The walk down a tree does not enter the row; the tokens before it are given."""
    asked = params(temperature=temperature)
    whole = run(make_engine(llama, **way), SNIPPETS[:1], [asked])[0]
    at = next(i for i in range(8, 24) if whole[i] not in whole[:i])
    outputs = []
    for drafter in (None, Oracle(whole, POISON), RandomDrafter(VOCAB)):
        mode = {"mode": "sync", "drafter": "ngram"} if drafter else {}
        engine = make_engine(llama, drafter, **mode, **way)
        poison(engine.model.module, whole[at], value)
        sample = engine.submit(SNIPPETS[0], asked)[0]
        finish(engine, [sample])
        outputs.append((sample.token_ids, sample.text, sample.finish_reason, str(sample.error)))
        assert_idle(engine)
    assert outputs[0][0] == whole[: at + 1] and outputs[0][2] is FinishReason.ERROR
    assert outputs[1] == outputs[2] == outputs[0]


def test_a_row_that_no_output_needs_harms_nobody(llama: Path) -> None:
    asked = params(temperature=0.0)
    whole = run(make_engine(llama), SNIPPETS[:1], [asked])[0]
    wrong = next(token for token in range(20, VOCAB) if token not in whole)
    last = next(i for i in range(4, 24) if whole[i] not in whole[:i])
    for poisoned, own, expected in (
        (wrong, asked, whole),
        (whole[last], params(temperature=0.0, stop_token_ids=(whole[last],)), whole[: last + 1]),
    ):
        engine = make_engine(llama, Oracle(whole, wrong), mode="sync", drafter="ngram")
        poison(engine.model.module, poisoned)
        sample = engine.submit(SNIPPETS[0], own)[0]
        finish(engine, [sample])
        assert sample.token_ids == expected and sample.error is None
        assert sample.request.stats.accepted_tokens > 0


def test_generate_names_the_prompt(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(llama, dtype="float32", threads=1, kv_slots=4096)
    poison(llm.engine.model.module, POISON)
    submitted: list[Sample] = []
    submit = llm.engine.submit
    monkeypatch.setattr(llm.engine, "submit", lambda *given: [submitted.extend(s := submit(*given)), s][1])
    with pytest.raises(EngineError, match=r"^prompt 1: logits: those after token 3 are not finite"):
        llm.generate([[9, 10], [9, POISON, 10], [9, 11]], params(5))
    assert [len(sample.token_ids) for sample in submitted] == [5, 0, 5]
    assert_idle(llm.engine)


# -- drafts


@pytest.mark.parametrize("way", sized(["kernels", "int8 KV, reference"], list(WAYS)), indirect=True)
def test_a_draft_whose_logits_are_not_finite_costs_speed_only(llama: Path, draft: Path, way: dict[str, Any]) -> None:
    expected = run(make_engine(llama, **way), SNIPPETS[:3], [params()] * 3)
    engine = make_engine(llama, draft=draft, mode="sync", drafter="lm", **way)
    lm = engine.drafter
    poison(lm.executor.model.module, expected[0][5])  # type: ignore[attr-defined]
    samples = [engine.submit(snippet, params())[0] for snippet in SNIPPETS[:3]]
    finish(engine, samples)
    assert [sample.token_ids for sample in samples] == expected
    assert engine.worker.drafter.drafter is lm
    assert sum(sample.request.stats.accepted_tokens for sample in samples) > 0
    assert_idle(engine)


# -- finding them


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_rows_are_found(value: float) -> None:
    logits = torch.randn(5, 100)
    assert non_finite_rows(logits) == []
    logits[1, 99] = logits[4, 0] = value
    assert non_finite_rows(logits) == [1, 4]
    assert non_finite_rows(logits[:0]) == []


def test_sums_that_overflow_are_no_rows_that_do() -> None:
    assert non_finite_rows(torch.full((3, 100), 3e38)) == []
