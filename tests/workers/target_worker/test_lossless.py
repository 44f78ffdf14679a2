"""Speculation never changes the output: token ids compared with ==, whatever drafts, batches, or counts threads."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sizes import paired, sized
from support import DENSE, KINDS, MIXTURES, SETTINGS, SNIPPETS, VOCAB, RandomDrafter, assert_idle, make_engine, run

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.engine.pairs import resolve_pair
from pilotfish.model.loading.configuration import common_window, load_config

LENGTH = 24
LM: dict[str, Any] = {"mode": "sync", "drafter": "lm"}
DRAFTS: dict[str, dict[str, Any]] = {
    "lm 4": {**LM, "nodes": 4, "levels": 2, "width": 2},
    "lm 16": {**LM, "nodes": 16},
    "lm 48": {**LM, "nodes": 48, "width": 16},
    "ngram": {"mode": "sync", "drafter": "ngram", "nodes": 6},
    "lm + ngram": {"mode": "sync", "drafter": "lm+ngram", "nodes": 12, "levels": 3},
    "suffix": {"mode": "sync", "drafter": "suffix", "nodes": 6},
    "lm + suffix": {"mode": "sync", "drafter": "lm+suffix", "nodes": 12, "levels": 3},
    "all": {"mode": "sync", "drafter": "lm+ngram+suffix", "nodes": 16, "levels": 3},
    "random": {},
}
CASES = [(snippet, setting) for snippet in range(len(SNIPPETS)) for setting in range(len(SETTINGS))]
#: One of each kind.
BATCHED = ("lm 16", "ngram", "all", "random")
#: Eight mixed requests: every prompt, every setting twice.
MIXED = [(i, i % len(SETTINGS)) for i in range(len(SNIPPETS))]
Case = tuple[int, int]


def params(case: Case, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": LENGTH, "seed": 1000 * case[0] + case[1], **SETTINGS[case[1]], **fields})


def generate(engine: Engine, cases: Sequence[Case], *, together: bool) -> list[list[int]]:
    """All are of one tenant, so a suffix drafter guesses from what was generated before."""
    samples = []
    for case in cases:
        samples += engine.submit(SNIPPETS[case[0]], params(case), "tenant")
        while engine.busy and not together:
            engine.step()
    while engine.busy:
        engine.step()
    return [sample.token_ids for sample in samples]


def drafting(name: str, target: Path, draft: Path, **config: Any) -> Engine:
    if name == "off":
        return make_engine(target, **config)
    if name == "random":
        return make_engine(target, RandomDrafter(VOCAB), **config)
    return make_engine(target, draft=draft, **DRAFTS[name], **config)


@cache
def alone(target: Path) -> dict[Case, list[int]]:
    """What the target gives without draft, batch or second thread."""
    return dict(zip(CASES, generate(make_engine(target), CASES, together=False), strict=True))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_batch_changes_nothing(llama: Path, threads: int) -> None:
    engine = make_engine(llama, threads=threads)
    assert generate(engine, CASES, together=True) == list(alone(llama).values())
    assert_idle(engine)


@pytest.mark.parametrize("name", sized(["lm 16", "suffix"], [*DRAFTS]))
def test_a_draft_changes_nothing_for_one_request(llama: Path, draft: Path, name: str) -> None:
    engine = drafting(name, llama, draft)
    assert generate(engine, MIXED, together=False) == [alone(llama)[case] for case in MIXED]
    assert_idle(engine)


@pytest.mark.parametrize("name", sized(BATCHED, [*DRAFTS]))
def test_a_draft_changes_nothing_for_eight_mixed_requests(llama: Path, draft: Path, name: str) -> None:
    """Over the drafts every prompt meets every setting; in `make soak`, under each of them."""
    engine = drafting(name, llama, draft)
    step = sized(len(BATCHED), 1)
    for shift in range([*BATCHED, *DRAFTS].index(name) % step, len(SETTINGS), step):
        cases = [(i, (i + shift) % len(SETTINGS)) for i in range(len(SNIPPETS))]
        assert generate(engine, cases, together=True) == [alone(llama)[case] for case in cases]
    assert_idle(engine)


@pytest.mark.parametrize("name", sized(["lm 16"], ["lm 16", "ngram", "random"]))
def test_a_second_thread_changes_nothing(llama: Path, draft: Path, name: str) -> None:
    engine = drafting(name, llama, draft, threads=2)
    assert generate(engine, MIXED, together=True) == [alone(llama)[case] for case in MIXED]


#: For each architecture and arithmetic: a prompt and a setting of each kind.
FEW = sized(MIXED[1::2], MIXED)
#: Drafts, and what is computed in beside int8 KV.
ROUNDED = [("lm 16", "float32"), ("random", "bfloat16"), ("lm 16", "bfloat16"), ("random", "float32")]


@cache
def few_alone(target: Path, **config: Any) -> list[list[int]]:
    """What the target gives for `FEW`, one after the other, without a draft."""
    return generate(make_engine(target, **config), FEW, together=False)


@pytest.mark.parametrize(
    ("kind", "name"), paired([kind for kind in KINDS if kind != "llama"], ["lm 16", "random", "ngram"])
)
def test_kinds_are_lossless(tiny_models: dict[str, Path], tiny_drafts: dict[str, Path], kind: str, name: str) -> None:
    engine = drafting(name, tiny_models[kind], tiny_drafts[kind])
    assert generate(engine, FEW, together=True) == few_alone(tiny_models[kind])
    assert_idle(engine)


@pytest.mark.parametrize("kind", sized(["gpt_oss", "qwen2_moe", "glm4_moe", "deepseek_v3"], MIXTURES))
def test_the_reference_operations_hold_the_promise_for_experts_too(tiny_models: dict[str, Path], kind: str) -> None:
    engine = drafting("random", tiny_models[kind], tiny_models[kind], eager=True)
    assert generate(engine, FEW, together=True) == few_alone(tiny_models[kind], eager=True)


@pytest.mark.parametrize("name", sized(["lm 16"], ["lm 16", "random"]))
@pytest.mark.parametrize("kind", sized(["llama", "gemma2"], DENSE))
def test_a_draft_changes_nothing_with_int8_weights(tiny_models: dict[str, Path], kind: str, name: str) -> None:
    model = tiny_models[kind]
    plain = few_alone(model, quantization="int8")
    assert generate(drafting(name, model, model, quantization="int8"), FEW, together=True) == plain
    if kind == "llama":  # others may be sure of what they repeat
        assert plain != few_alone(model)  # they are other weights


@pytest.mark.parametrize(
    ("kind", "rounded"), paired(sized(["llama", "gemma2", "gpt_oss", "deepseek_v2"], [*KINDS]), ROUNDED)
)
def test_a_draft_changes_nothing_with_int8_kv(
    tiny_models: dict[str, Path], tiny_drafts: dict[str, Path], kind: str, rounded: tuple[str, str]
) -> None:
    name, dtype = rounded
    own = {"kv_dtype": "int8", "dtype": dtype}
    plain = few_alone(tiny_models[kind], **own)
    assert generate(drafting(name, tiny_models[kind], tiny_drafts[kind], **own), FEW, together=True) == plain
    if kind == "llama" and dtype == "float32":
        assert plain != few_alone(tiny_models[kind])  # it is rounded


#: transformers' own operations; and more than is promised: the kernels' rows are bitwise their own in bfloat16 as well.
ALIKE: list[dict[str, Any]] = [
    {"eager": True},
    {"eager": True, "quantization": "int8"},
    {"eager": True, "kv_dtype": "int8"},
    {"dtype": "bfloat16"},
]


@pytest.mark.parametrize(("own", "name"), paired(ALIKE, ["random", "lm 16"]), ids=str)
def test_other_arithmetic_holds_the_promise_too(llama: Path, draft: Path, name: str, own: dict[str, Any]) -> None:
    assert generate(drafting(name, llama, draft, **own), FEW, together=True) == few_alone(llama, **own)


SMALL = [{"max_rows": 9}, {"max_rows": 1}, {"kv_slots": 160}, {"max_requests": 3}, {"kv_slots": 96, "max_rows": 7}]


@pytest.mark.parametrize(("limits", "name"), paired(SMALL, ["lm 16", "random"]), ids=str)
def test_small_budgets_change_nothing(llama: Path, draft: Path, name: str, limits: dict[str, int]) -> None:
    """Prompts in chunks, trees cut, drafts without slots, requests that wait."""
    engine = drafting(name, llama, draft, **limits)
    assert generate(engine, MIXED, together=True) == [alone(llama)[case] for case in MIXED]
    assert_idle(engine)


@pytest.mark.parametrize("name", sized(["off", "lm 16"], ["off", "lm 16", "ngram", "random"]))
def test_preemption_changes_nothing(llama: Path, draft: Path, name: str) -> None:
    """Half of the requests lose their KV on the way; what they report of their prompts is reported once."""
    plain, engine = make_engine(llama), drafting(name, llama, draft, kv_slots=150)
    engine.worker.scheduler.headroom = 1
    asked = [(SNIPPETS[i], params((i, s), logprobs=1, prompt_logprobs=1)) for i, s in MIXED]
    samples = [engine.submit(prompt, p)[0] for prompt, p in asked]
    while engine.busy:
        engine.step()
    assert sum(sample.request.stats.preemptions for sample in samples) > 1
    assert [sample.token_ids for sample in samples] == [alone(llama)[case] for case in MIXED]
    assert_idle(engine)
    for (prompt, p), sample in zip(asked, samples, strict=True):
        (expected,) = plain.submit(prompt, p)
        while plain.busy:
            plain.step()
        assert sample.logprobs == expected.logprobs
        assert sample.prompt_logprobs == expected.prompt_logprobs


@pytest.mark.parametrize("name", sized(["lm + ngram"], ["lm + ngram", "random"]))
@pytest.mark.parametrize("kind", sized(["qwen2", "gemma2"], [kind for kind in KINDS if kind != "llama"]))
def test_preemption_changes_nothing_in_other_architectures(
    tiny_models: dict[str, Path], tiny_drafts: dict[str, Path], kind: str, name: str
) -> None:
    """With windows alone short requests give back slots, and seldom give way (tests/engine/test_windows.py)."""
    windowed = common_window(load_config(tiny_models[kind])) > 0
    engine = drafting(name, tiny_models[kind], tiny_drafts[kind], kv_slots=80 if windowed else 150)
    engine.worker.scheduler.headroom = 1
    samples = [engine.submit(SNIPPETS[case[0]], params(case))[0] for case in MIXED]
    while engine.busy:
        engine.step()
    assert windowed or sum(sample.request.stats.preemptions for sample in samples) > 1
    plain = generate(make_engine(tiny_models[kind]), MIXED, together=False)
    assert [sample.token_ids for sample in samples] == plain
    assert_idle(engine)


@pytest.mark.parametrize("name", sized(["lm + ngram"], ["lm + ngram", "suffix"]))
def test_a_budget_that_chooses_changes_nothing(llama: Path, draft: Path, name: str) -> None:
    engine = drafting(name, llama, draft, budget="auto")
    for shift in range(0, len(SETTINGS), sized(4, 1)):
        cases = [(i, (i + shift) % len(SETTINGS)) for i in range(len(SNIPPETS))]
        assert generate(engine, cases, together=True) == [alone(llama)[case] for case in cases]
    assert_idle(engine)


def test_samples_are_those_of_their_seeds(llama: Path, draft: Path) -> None:
    several = [params((0, 1), n=3), params((1, 2), n=2)]
    plain = run(make_engine(llama), SNIPPETS[:2], several)
    assert run(drafting("lm 16", llama, draft), SNIPPETS[:2], several) == plain


def test_arrivals_and_aborts_change_nothing(llama: Path, draft: Path) -> None:
    """Requests come one step apart, and every third is aborted after five steps of its own."""
    engine = drafting("lm + ngram", llama, draft)
    samples = []
    for i, case in enumerate(MIXED):
        samples += engine.submit(SNIPPETS[case[0]], params(case))
        engine.step()
        if i >= 5:
            engine.abort(samples[i - 5])
    while engine.busy:
        engine.step()
    for case, sample in zip(MIXED, samples, strict=True):
        expected = alone(llama)[case]
        assert sample.token_ids == expected[: len(sample.token_ids)]
        assert len(sample.token_ids) == LENGTH or sample.finish_reason == "abort"
    assert_idle(engine)


@pytest.mark.parametrize("kind", sized(["llama", "gemma2"], KINDS))
def test_a_draft_is_right_often_enough(tiny_models: dict[str, Path], tiny_drafts: dict[str, Path], kind: str) -> None:
    engine = drafting("lm 48", tiny_models[kind], tiny_drafts[kind])
    for case in MIXED:
        engine.submit(SNIPPETS[case[0]], params(case))
    stats = [sample.request.stats for sample in engine._samples.values()]
    while engine.busy:
        engine.step()
    accepted, steps = sum(s.accepted_tokens for s in stats), sum(s.verify_steps for s in stats)
    assert accepted / steps > 0.5
    assert max(depth for s in stats for depth, n in enumerate(s.accepted_by_depth) if n) >= 2


@pytest.mark.parametrize("name", sized(["suffix"], ["suffix", "lm + suffix"]))
def test_what_was_generated_before_is_guessed(llama: Path, draft: Path, name: str) -> None:
    """Nearly every token, where the same is generated again; and it is the same again."""
    engine = drafting(name, llama, draft)
    first, again = (generate(engine, MIXED, together=False) for _ in range(2))
    assert again == first == [alone(llama)[case] for case in MIXED]
    (sample,) = engine.submit(SNIPPETS[0], params(MIXED[0]), "tenant")
    while engine.busy:
        engine.step()
    assert sample.token_ids == first[0]
    assert sample.request.stats.accepted_tokens > LENGTH / 2
    assert_idle(engine)


@pytest.mark.parametrize("name", sized(["lm 16"], ["lm 16", "ngram", "lm + suffix", "random"]))
def test_the_bundled_pair(name: str) -> None:
    pair = resolve_pair("pycode")
    plain = generate(make_engine(pair.target), FEW, together=True)
    assert generate(drafting(name, pair.target, pair.draft), FEW, together=True) == plain
