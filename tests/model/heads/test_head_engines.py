"""Trained heads as drafts, of every family: whatever they guess, the output is the target's own, to the token."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from head_files import write_block, write_eagle1, write_eagle3, write_medusa, write_mtp, write_peagle
from inline_drafts import inline_drafts
from inline_prefills import assert_nothing_left, inline_prefills
from loopback import Loopback
from recording import RecordingKernels, as_on_a_card
from sizes import sized
from support import SNIPPETS, assert_idle, drain, edit_tensors, make_engine, run
from thread_ranks import thread_ranks

from pilotfish.config.engine import EngineConfig
from pilotfish.config.workers import DraftConfig
from pilotfish.core.sampling.constraint import Constraint
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine import trial
from pilotfish.engine.drafts.draft_pool import make_worker
from pilotfish.engine.engine import Engine
from pilotfish.engine.fingerprint import kv_facts, output_facts
from pilotfish.errors import InputError, ParameterError
from pilotfish.model.heads.executor import HeadSetup
from pilotfish.model.heads.target import TargetFacts
from pilotfish.workers.lm import LMDrafter

#: Random heads are right by chance: often, where few tokens are allowed.
FEW = (5, 60, 300)
LENGTH = sized(12, 24)
PARAMS = (
    SamplingParams(max_tokens=24, temperature=0.0, allowed_token_ids=FEW),
    SamplingParams(max_tokens=LENGTH, temperature=0.9, seed=3, allowed_token_ids=FEW),
    SamplingParams(max_tokens=LENGTH, temperature=0.8, seed=5, n=2, allowed_token_ids=FEW),
    SamplingParams(max_tokens=LENGTH // 2, temperature=0.0),
    SamplingParams(max_tokens=LENGTH, temperature=0.7, seed=1, structured_outputs=Constraint.regex("[ab]{4,9}")),
)
PROMPTS = (SNIPPETS[0], SNIPPETS[1], SNIPPETS[2], [7], SNIPPETS[0][:60])


def eagle3(directory: Path, target: TargetFacts) -> Path:
    return HEADS["eagle3"](directory, target=target)


_REDUCED: dict[str, Any] = {"layers": (1, 2), "draft_vocab": 400, "hidden": 32, "depth": 2, "fc_norm": True}
HEADS: dict[str, Callable[..., Path]] = {
    "eagle3": partial(write_eagle3, layers=(0, 1, 2)),
    "reduced eagle3": partial(write_eagle3, dialect="modelopt", **_REDUCED),
    "peagle": partial(write_peagle, layers=(0, 1), draft_vocab=400, depth=2),
    "dspark": partial(write_block, layers=(0, 2), draft_vocab=400),
    "dflash": partial(write_block, kind="dflash", dialect="z-lab", layers=(1, 2)),
    "mtp": write_mtp,
    "eagle1": write_eagle1,
    "medusa": write_medusa,
}


#: One that each executor runs. Where its slots come from and go to, and its features, is no matter of a layout.
OF_EACH_EXECUTOR = pytest.mark.parametrize(
    "head", sized(("eagle3", "peagle", "dspark", "medusa"), tuple(HEADS)), indirect=True, scope="module"
)
#: One with KV, states and features of its own, and one without.
TWO_HEADS = pytest.mark.parametrize("head", sized(("eagle3", "medusa"), tuple(HEADS)), indirect=True, scope="module")


@pytest.fixture(scope="module")
def head(request: pytest.FixtureRequest, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return HEADS[request.param](tmp_path_factory.mktemp("head"), target=TargetFacts.read(llama))


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[list[int]]:
    with make_engine(llama, prefix_cache=False) as engine:
        return [tokens for one, params in zip(PROMPTS, PARAMS, strict=True) for tokens in run(engine, [one], [params])]


def accepted(engine: Engine, prompt: Any, params: SamplingParams) -> int:
    samples = engine.submit(prompt, params)
    while engine.busy:
        engine.step()
    return sum(sample.request.stats.accepted_tokens for sample in samples)


@pytest.fixture
def drafting(llama: Path, head: Path) -> Iterator[Engine]:
    with make_engine(llama, draft=head, mode="sync", drafter="lm") as engine:
        yield engine


@OF_EACH_EXECUTOR
def test_the_output_is_the_targets(drafting: Engine, expected: list[list[int]]) -> None:
    for _ in range(2):
        assert run(drafting, PROMPTS, PARAMS) == expected
        assert_idle(drafting)
    assert accepted(drafting, PROMPTS[0], PARAMS[0]) > 0


@pytest.mark.parametrize("head", ["eagle3", "reduced eagle3", "dspark"], indirect=True)
def test_recorded_levels_guess_as_others_do(llama: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And features stay on the device."""
    prompts, few = [(1, 2, 3), (4, 5, 6, 7), (8, 9)], SamplingParams(max_tokens=12, allowed_token_ids=FEW)
    params, told = [replace(few, temperature=t, seed=7) for t in (0.0, 0.8, 0.0)], []
    for kernels in (None, RecordingKernels()):
        if kernels is not None:
            monkeypatch.setattr(HeadSetup, "kernels", lambda *_, kernels=kernels: kernels)
        with make_engine(llama, draft=head, mode="sync", drafter="lm", eager=True) as engine:
            monkeypatch.setattr(engine.executor, "features", lambda _: pytest.fail("features were read"))
            samples = [engine.submit(*one)[0] for one in zip(prompts, params, strict=True)]
            drain(engine)
            told.append([(sample.token_ids, sample.request.stats.accepted_tokens) for sample in samples])
    assert told[1] == told[0] and any(accepted for _, accepted in told[0])


@TWO_HEADS
@pytest.mark.parametrize("dtype", sized(["float32"], ["float32", "int8", "fp8"]))
def test_a_draft_worker_changes_nothing_either(
    llama: Path, head: Path, dtype: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config: dict[str, Any] = {"draft": head, "mode": "async", "drafter": "lm", "feature_dtype": dtype}
    with inline_drafts(monkeypatch), make_engine(llama, **config) as engine:
        for _ in range(2):
            assert run(engine, PROMPTS, PARAMS) == expected
            assert_idle(engine)
        assert dtype != "float32" or accepted(engine, PROMPTS[0], PARAMS[0]) > 0


@pytest.mark.parametrize(
    ("head", "mode"), [*((head, "sync") for head in (*HEADS, "")), ("", "async"), ("mtp", "async")]
)
def test_where_no_kernel_runs_all_use_the_reference(
    head: str, mode: str, llama: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Target, drafts and prefill workers, each with one warning."""
    options: dict[str, Any] = {"draft": HEADS[head](tmp_path, target=TargetFacts.read(llama)) if head else draft}
    options |= {"mode": mode, "drafter": "lm", "prefill_workers": int(mode == "async")}
    with make_engine(llama, eager=True) as engine:
        plain = run(engine, PROMPTS[:2], PARAMS[:2])
    as_on_a_card(monkeypatch)
    tried = trial._tried
    monkeypatch.setattr(trial, "_tried", lambda *given: tried(*given) and 1 / 0)
    with inline_drafts(monkeypatch), inline_prefills(monkeypatch), make_engine(llama, **options) as engine:
        assert run(engine, PROMPTS[:2], PARAMS[:2]) == plain
    warned = [record.message for record in caplog.records if "--eager is used for" in record.message]
    assert len(warned) == (3 if mode == "async" else 2) == len({*warned})


@TWO_HEADS
def test_requests_give_way_to_each_other(llama: Path, head: Path, expected: list[list[int]]) -> None:
    with make_engine(llama, draft=head, mode="sync", drafter="lm", kv_slots=sized(100, 120)) as engine:
        assert run(engine, PROMPTS, PARAMS) == expected
        assert engine.worker.scheduler.preemptions > 0
        assert_idle(engine)


OTHER_TARGETS: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {}),  # gives slots back, features with them
    ("llama", {"kv_host_memory": 0.05, "kv_slots": 160}),
    ("llama", {"kv_dtype": "int8"}),
    ("gemma3_text", {}),
    ("llama", {"eager": True}),
]


@pytest.mark.parametrize(("kind", "options"), sized(OTHER_TARGETS[:1], OTHER_TARGETS), ids=str)
def test_targets_of_other_kinds(
    kind: str, options: dict[str, Any], tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    target, arithmetic = tiny_models[kind], {name: options[name] for name in options.keys() & {"eager", "kv_dtype"}}
    with make_engine(target, prefix_cache=False, **arithmetic) as engine:
        plain = run(engine, PROMPTS, PARAMS)
    head = eagle3(tmp_path, TargetFacts.read(target))
    with make_engine(target, draft=head, mode="sync", drafter="lm", **options) as engine:
        for _ in range(2):
            assert run(engine, PROMPTS, PARAMS) == plain
        assert accepted(engine, PROMPTS[0], PARAMS[0]) > 0


def test_a_head_beside_other_drafters(llama: Path, expected: list[list[int]], tmp_path: Path) -> None:
    head = eagle3(tmp_path, TargetFacts.read(llama))
    with make_engine(llama, draft=head, mode="sync", drafter="lm+ngram+suffix", budget="auto") as engine:
        assert run(engine, PROMPTS, PARAMS) == expected


@pytest.mark.parametrize("tensor", sized(["norm.weight"], ["fc.weight", "norm.weight", "lm_head.weight"]))
def test_a_head_that_gives_no_numbers(tensor: str, llama: Path, expected: list[list[int]], tmp_path: Path) -> None:
    """Features, states or logits overflow: there are no guesses, and the same output."""
    directory = eagle3(tmp_path, TargetFacts.read(llama))
    edit_tensors(directory, lambda tensors: tensors.update({tensor: tensors[tensor] * 1e38}))
    with make_engine(llama, draft=directory, mode="sync", drafter="lm") as engine:
        assert run(engine, PROMPTS, PARAMS) == expected
        assert_idle(engine)


@OF_EACH_EXECUTOR
def test_memory_counts_the_head_and_its_features(llama: Path, head: Path) -> None:
    with make_engine(llama, draft=head, mode="sync", drafter="lm", kv_slots=300) as engine:
        drafter = engine.drafter
        assert isinstance(drafter, LMDrafter)
        own = [plane for part in engine.executor.kv for plane in part]
        held = sum(plane.element_size() * plane.numel() for plane in own)
        assert held == pytest.approx(engine.memory.target.slot * 301, rel=0.01)
        planes = [plane for layer in getattr(drafter.executor, "kv", []) for plane in layer]
        planes += [states] if (states := getattr(drafter.executor, "states", None)) is not None else []
        held = sum(plane.element_size() * plane.numel() for plane in planes)
        assert engine.memory.draft is not None and held <= engine.memory.draft.slot * 301


def test_a_target_of_several_ranks(llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    head, outputs, guessed = eagle3(tmp_path, TargetFacts.read(llama)), [], 0
    with thread_ranks(monkeypatch):
        for mode in ("off", "sync"):
            with make_engine(llama, draft=head, mode=mode, drafter="lm", tensor_parallel=2) as engine:
                outputs.append(run(engine, PROMPTS, PARAMS))
                guessed += accepted(engine, PROMPTS[0], PARAMS[0])
    assert outputs[0] == outputs[1] and guessed > 0


def test_kv_from_elsewhere_comes_with_features(
    llama: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A prefill worker makes them too: a request that was handed over has a tree in its first step."""
    head = eagle3(tmp_path, TargetFacts.read(llama))
    given = {"draft": head, "mode": "sync", "drafter": "lm", "prefill_workers": 1, "prefill_threshold": "8"}
    with inline_prefills(monkeypatch) as workers, make_engine(llama, **given) as engine:
        assert run(engine, PROMPTS, PARAMS) == expected
        (sample,) = engine.submit([*range(40, 90)], replace(PARAMS[3], max_tokens=2))
        while engine.busy:
            engine.step()
        stats = sample.request.stats
        assert [report.tokens for report in stats.handovers] == [49]
        assert stats.offered_by_depth == [1]  # there is no room for one in another step
        assert_nothing_left(workers, engine)


def test_outputs_go_on_at_a_target_without_the_head(llama: Path, tmp_path: Path) -> None:
    head = eagle3(tmp_path, TargetFacts.read(llama))
    with make_engine(llama) as plain, make_engine(llama, draft=head, mode="sync", drafter="lm") as engine:
        of_outputs = [output_facts(one.config, one.executor, one.tokenizer) for one in (plain, engine)]
        of_kv = [kv_facts(one.config, one.executor) for one in (plain, engine)]
        assert of_outputs[0] == of_outputs[1] and of_kv[0] != of_kv[1]


def refusal(target: Path, draft: Path, **config: Any) -> str:
    with pytest.raises(InputError) as caught:
        make_engine(target, **{"draft": draft, "mode": "sync", "drafter": "lm", **config})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_work_is_refused(llama: Path, draft: Path, tmp_path: Path) -> None:
    head, facts = eagle3(tmp_path / "head", TargetFacts.read(llama)), TargetFacts.read(llama)
    other = eagle3(tmp_path / "other", facts)
    assert refusal(llama, head, features=other).startswith("features: ")
    assert refusal(llama, draft, features=draft).startswith("features: ")
    assert refusal(llama, draft, draft_layers=(0, 1)).startswith("draft_layers: '0,1' is not allowed; expected nothing")
    assert refusal(llama, head, draft_layers=(0, 1, 7)).startswith("draft_layers: 7 is not allowed")


def test_a_pool_is_told_its_heads_target_and_nothing_else(llama: Path, tmp_path: Path) -> None:
    head = eagle3(tmp_path, TargetFacts.read(llama))
    for draft, target, said in ((head, None, "which is a trained head"), (llama, llama, "is a model, no trained head")):
        config = DraftConfig(model=EngineConfig(target=draft, dtype="float32"), listen="ipc://unused", target=target)
        with pytest.raises(ParameterError, match=f"^target: .*{said}"):
            make_worker(config, Loopback(b"pool"))
