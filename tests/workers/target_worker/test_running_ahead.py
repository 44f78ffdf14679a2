"""Forwards that are launched before the tokens of the one before are known give the same tokens and free all slots. As
on CUDA, but on the CPU: forwards are replayed and draw by themselves."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from recording import RecordingKernels
from support import SETTINGS, SNIPPETS, assert_idle, drain, make_engine, run

from pilotfish.core.sampling.constraint import Constraint
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import Outcome, Sampling, SequenceRows
from pilotfish.engine.engine import Engine
from pilotfish.engine.sample import Sample
from pilotfish.engine.trial import record_forwards
from pilotfish.errors import EngineError
from pilotfish.model.batch import GRAPHS
from pilotfish.model.executor import LaunchedForward, TorchExecutor
from pilotfish.wire.serving import Delta
from pilotfish.workers.ahead import AheadWorker
from pilotfish.workers.records import StepRecord


class Device(TorchExecutor):
    overlaps = True

    def __init__(self, executor: TorchExecutor) -> None:
        model = executor.model
        kernels = RecordingKernels()
        kernels.attend = model.kernels.attend  # type: ignore[method-assign]
        super().__init__(replace(model, kernels=kernels, recordable=False), executor.num_slots)
        self.model = replace(self.model, recordable=True)
        self.buckets = replace(GRAPHS, shared=8)
        self._forward = kernels.recorded(self._run_model, self._draw)
        self.calls: list[str] = []
        self.fails: Callable[[str], bool] = lambda _: False

    def launch(self, rows: Sequence[SequenceRows], sampling: Sampling) -> LaunchedForward:
        self._call("follow" if any(min(sequence.tokens) < 0 for sequence in rows) else "launch")
        return super().launch(rows, sampling)

    def collected(self, launched: LaunchedForward) -> Outcome:
        self._call("collect")
        return super().collected(launched)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.fails(name):
            raise RuntimeError(f"no {name}")


@pytest.fixture
def engine(llama: Path, draft: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    drafts: dict[str, Any] = {"draft": draft, "mode": "sync", "nodes": 8, "levels": 3, "width": 3}
    with running_ahead(llama, **drafts if getattr(request, "param", False) else {}) as engine:
        yield engine
        assert engine.worker.drafter.drafter is engine.drafter  # it has never raised
        assert_idle(engine)


BOTH = pytest.mark.parametrize("engine", [False, True], ids=["off", "drafts"], indirect=True)


def running_ahead(target: Path, **config: Any) -> Engine:
    engine = make_engine(target, **config)
    before = engine.worker
    engine.executor = Device(engine.executor)
    assert engine.grammars is not None
    engine.worker = AheadWorker(
        engine.executor, before.scheduler, engine.drafter, before.budget, masks=engine.grammars.masks
    )
    return engine


def assert_ahead(engine: Engine, least: int) -> None:
    """Forwards were launched before the tokens of the one before; with drafts none could be."""
    followed = calls(engine).count("follow")
    assert followed >= least if engine.config.mode == "off" else followed == 0


def calls(engine: Engine) -> list[str]:
    assert isinstance(engine.executor, Device)
    return engine.executor.calls


Asked = tuple[str, SamplingParams]
#: Every prompt with every setting, of which some have rules, stop tokens and filters.
ALL: list[Asked] = [
    (SNIPPETS[i % len(SNIPPETS)], SamplingParams(**{"max_tokens": 16 + i % 17, "seed": i, **setting}))
    for i, setting in enumerate(SETTINGS * 3)
]
#: Without rules, which need the tokens before they draw.
PLAIN = [one for i, one in enumerate(ALL) if i % len(SETTINGS) < 4]


def generate(engine: Engine, asked: Sequence[Asked]) -> list[list[int]]:
    samples = [engine.submit(*one)[0] for one in asked]
    drain(engine)
    return [sample.token_ids for sample in samples]


@BOTH
def test_tokens_are_those_of_one_step_after_the_other(llama: Path, engine: Engine) -> None:
    plain = make_engine(llama)
    assert generate(engine, ALL) == generate(plain, ALL)
    for one in ALL:
        assert generate(engine, [one]) == generate(plain, [one])
    assert_ahead(engine, 100)


def test_the_next_forward_is_launched_before_the_tokens_are_known(engine: Engine) -> None:
    generate(engine, [(SNIPPETS[0], SamplingParams(temperature=0.0, max_tokens=4))])
    assert calls(engine) == ["launch", "follow", "collect", "follow", "collect", "follow", "collect", "collect"]


@pytest.mark.parametrize(
    "fields", [{"logprobs": 2}, {"frequency_penalty": 0.5}, {"structured_outputs": Constraint("regex", "ab*")}]
)
def test_what_needs_the_tokens_waits_for_them(engine: Engine, fields: dict[str, Any]) -> None:
    generate(engine, [(SNIPPETS[0], SamplingParams(temperature=0.0, max_tokens=4, **fields))])
    assert "follow" not in calls(engine)


def test_a_stop_token_ends_a_request_whose_next_forward_runs(llama: Path, engine: Engine) -> None:
    prompt, params = SNIPPETS[1], SamplingParams(temperature=0.0, max_tokens=12)
    whole = generate(make_engine(llama), [(prompt, params)])[0]
    stopped = replace(params, stop_token_ids=(whole[5],))
    other = (SNIPPETS[2], SamplingParams(temperature=0.8, seed=5, max_tokens=20))
    assert generate(engine, [(prompt, stopped), other]) == generate(make_engine(llama), [(prompt, stopped), other])
    assert calls(engine).count("follow") >= 18  # no request waits for the other's end


@BOTH
def test_requests_that_come_and_go_meanwhile(llama: Path, engine: Engine) -> None:
    expected = generate(make_engine(llama), PLAIN)
    samples = []
    for place, one in enumerate(PLAIN):
        samples += engine.submit(*one)
        gone = engine.submit(SNIPPETS[place % 3], SamplingParams(max_tokens=50))
        for _ in range(place % 4):
            engine.step()
        engine.abort(gone[0])
    drain(engine)
    assert [sample.token_ids for sample in samples] == expected


@BOTH
def test_requests_that_come_and_go_right_before_a_step_is_planned(llama: Path, engine: Engine) -> None:
    """With drafts one is aborted whose last tokens were committed and not told: nobody hears of them."""
    (gone,) = engine.submit(SNIPPETS[0], SamplingParams(max_tokens=300, seed=1))
    coming, samples, told, off = PLAIN[::-1], list[Sample](), list[int](), engine.config.mode == "off"

    def take_in() -> None:
        committed = len(gone.request.output)
        if coming:
            samples.extend(engine.submit(*coming.pop()))
        elif gone.finish_reason is None and committed > 60 and (off or committed > len(gone.token_ids)):
            engine.abort(gone)

    engine.worker.take_in = take_in
    while engine.busy:
        told += [token for delta in engine.step() if delta.id == gone.request_id for token in delta.tokens]
    assert [sample.token_ids for sample in samples] == generate(make_engine(llama), PLAIN)
    assert gone.finish_reason == "abort" and told == gone.token_ids == gone.request.output[: len(told)]
    assert (len(told) == len(gone.request.output)) is off
    assert all(sample.queued is not None and sample.queued >= 0.0 for sample in samples)


@BOTH
def test_a_row_that_is_not_finite_ends_alone(llama: Path, engine: Engine) -> None:
    """Off, though its next forward runs, after no token at all."""
    samples = [engine.submit(*one)[0] for one in PLAIN[:3]]
    expected = generate(make_engine(llama), PLAIN[:3])
    for _ in range(3):
        engine.step()
    engine.executor._layers[0].keys[samples[1].request.held[-1:]] = torch.nan
    drain(engine)
    assert [sample.finish_reason for sample in samples] == ["length", "error", "length"]
    assert [sample.token_ids for sample in samples[::2]] == expected[::2]
    assert_ahead(engine, 6)


@BOTH
def test_slots_of_a_forward_that_runs_ahead_are_known_and_freed(engine: Engine) -> None:
    for prompt, params in PLAIN[:3]:
        engine.submit(prompt, replace(params, max_tokens=200))
    assert isinstance(engine.worker, AheadWorker)
    steps = 0
    while steps < 6 or engine.worker._ahead is None:
        engine.step()
        engine.check()
        steps += 1
        assert engine.busy
    with pytest.raises(EngineError, match="owners"):
        engine.worker.scheduler.check()
    engine.abort_all()
    engine.check()
    assert engine.busy and engine.step() == []  # the forward frees its own


@BOTH
def test_samples_of_a_prompt(llama: Path, engine: Engine) -> None:
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=12, n=3)
    ours, expected = (run(one, [SNIPPETS[0]], [params]) for one in (engine, make_engine(llama)))
    assert ours == expected and len(ours) == 3
    assert_ahead(engine, 8)


def test_few_slots(llama: Path) -> None:
    """The pool holds three of the requests to their ends, and more at first."""
    asked = [(prompt[:60], SamplingParams(temperature=0.8, seed=i, max_tokens=90)) for i, prompt in enumerate(SNIPPETS)]
    with running_ahead(llama, kv_slots=400) as engine:
        assert generate(engine, asked) == generate(make_engine(llama), asked)
        assert engine.worker.scheduler.preemptions and calls(engine).count("follow") > 50
        assert_idle(engine)


@pytest.mark.parametrize(("call", "time"), [("follow", 1), ("follow", 4), ("collect", 1), ("collect", 3)])
def test_a_failed_forward_frees_all(llama: Path, engine: Engine, call: str, time: int) -> None:
    assert isinstance(engine.executor, Device)
    engine.executor.fails = lambda name: name == call and calls(engine).count(call) == time
    samples = [engine.submit(*one)[0] for one in PLAIN]
    with pytest.raises(EngineError, match=f"no {call}"):
        drain(engine)
    assert {sample.finish_reason for sample in samples} == {"abort"}
    assert_idle(engine)
    assert generate(engine, PLAIN) == generate(make_engine(llama), PLAIN)


@BOTH
def test_what_fails_before_a_step_is_planned_loses_no_token(llama: Path, engine: Engine) -> None:
    engine.worker.take_in, failures = Mock(side_effect=[*[ValueError, None] * 5, *[None] * 1000]), 0
    samples = [engine.submit(*one)[0] for one in PLAIN]
    while engine.busy:
        try:
            engine.step()
        except EngineError:
            failures += 1
    assert failures == 5
    assert [sample.token_ids for sample in samples] == generate(make_engine(llama), PLAIN)


@pytest.mark.parametrize("engine", [True], indirect=True)
def test_a_failed_launch_comes_after_the_tokens_of_the_step_before(llama: Path, engine: Engine) -> None:
    assert isinstance(engine.executor, Device)
    engine.executor.fails = lambda name: name == "launch" and calls(engine).count(name) == 5
    samples, told = [engine.submit(*one)[0] for one in PLAIN], list[Delta]()
    with pytest.raises(EngineError, match="no launch"):
        while engine.busy:
            told += engine.step()
    assert {delta.finish.reason for delta in told if delta.finish} <= {"length", "stop"}
    aborted = [sample for sample in samples if sample.finish_reason == "abort"]
    assert aborted and all(sample.token_ids == sample.request.output for sample in aborted)
    assert_idle(engine)
    assert generate(engine, PLAIN) == generate(make_engine(llama), PLAIN)


def test_a_first_token_does_not_wait_for_drafting(engine: Engine) -> None:
    engine.drafter.computes = engine.worker.drafter.drafter.computes = True
    engine.submit(SNIPPETS[0], SamplingParams(max_tokens=3, logprobs=1))  # which no step follows
    launched = []
    while engine.busy:
        assert len(engine.step()[0].tokens) == 1
        launched.append(calls(engine).count("launch"))
    assert launched == [1, 3, 3]  # when a token was told: the second only once the third's forward ran


def test_forwards_are_recorded_at_start(engine: Engine) -> None:
    graphs: Any = engine.executor._forward
    record_forwards(engine.executor, 256, 16, SamplingParams())
    recorded = set(graphs._forwards)
    longest = [key[0] for key in recorded]
    assert sorted(longest) == [1024] * 5 + [2048]  # of 16 to 256 rows, without a draw too; of 16 after a longer prefix
    generate(engine, [(prompt[:80], params) for i, (prompt, params) in enumerate(PLAIN) if i % 4 < 2])
    assert set(graphs._forwards) == recorded


@BOTH
def test_moments_of_a_step_follow_each_other(engine: Engine) -> None:
    records: list[StepRecord] = []
    engine.worker.observe = records.append
    generate(engine, PLAIN)
    assert len(records) > 10
    for record in records:
        moments = msgspec.structs.astuple(record)[:9]
        assert all(before <= after for before, after in pairwise(moments))
    assert all(before.ended == after.before for before, after in pairwise(records))
