"""The target worker's side of a server's wire: what it is told, what it answers, what it frees."""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial, reduce
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from attending import TARGET, AttendingServer
from loopback import Loopback
from support import SNIPPETS, assert_idle, drain, make_engine, params, run

from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS
from pilotfish.core.routing.held_prefixes import Held, HeldCopies, routing_keys
from pilotfish.core.sampling.constraint import Constraint
from pilotfish.engine.engine import Engine
from pilotfish.engine.fingerprint import fingerprint
from pilotfish.engine.sample import Sample
from pilotfish.engine.targets import target_process
from pilotfish.engine.targets.servers import Attendance, Servers
from pilotfish.engine.targets.status import step_report
from pilotfish.engine.targets.stream import joined
from pilotfish.engine.targets.target_process import TargetService
from pilotfish.errors import EngineError
from pilotfish.grammar import compile as compiling
from pilotfish.grammar.state import MaskPlan, MatcherState
from pilotfish.wire.channel import encode
from pilotfish.wire.serving import Beat, Delta, EngineRequest, Failure, Revise, Status, StepProgress, ToServer
from pilotfish.workers.ahead import AheadWorker
from pilotfish.workers.records import StepRecord


class Target(AttendingServer):
    """A service over an engine, and its server; `start` has it run in a thread, and the engine is that thread's from
    then on."""

    def __init__(self, engine: Engine) -> None:
        channel, server = Loopback.pair(TARGET)
        super().__init__(server)
        self.engine = engine
        self.servers = Servers(channel)
        self.service = TargetService(engine, self.servers)
        self.thread = threading.Thread(target=self.service.run)
        self.attendance = Attendance(self.servers.incarnation)
        self.servers.start()
        self.tell(self.attendance.attend())

    def revise(self, number: int, max_nodes: int | None) -> None:
        self.attendance.sent += 1
        self.tell(Revise(number, self.attendance.incarnation, max_nodes))

    def next(self) -> list[ToServer]:
        """All but Beats, of which none tells of a loss. The service runs from the first call on."""
        self.start()
        heard, deadline = len(self.heard), time.monotonic() + 10.0
        while not (new := [message for message in self.heard[heard:] if not isinstance(message, Beat)]):
            assert time.monotonic() < deadline, "the target is silent"
            self.hear()
        assert self.whole
        return new

    def heard_until(self, wanted: type[Any] | None = None, request: int = 1, outputs: int = 1) -> list[ToServer]:
        """What comes up to the first message of a kind, or to the end of a request's outputs."""
        heard: list[ToServer] = []
        while True:
            heard += self.next()
            if wanted is not None and any(isinstance(message, wanted) for message in heard):
                return heard
            if sum(d.finish is not None for d in deltas_of(heard, request)) == outputs:
                return heard

    def start(self) -> None:
        if self.thread.ident is None:
            self.thread.start()

    def close(self) -> None:
        self.service.stop()
        if self.thread.ident is not None:
            self.thread.join()
        self.servers.close()


def deltas_of(messages: list[ToServer], request: int = 1) -> list[Delta]:
    return [d for m in messages if isinstance(m, StepProgress) for d in m.deltas if d.id == request]


def whole(deltas: list[Delta]) -> Delta:
    return reduce(joined, deltas)


@pytest.fixture(scope="module")
def engines(llama: Path, draft: Path) -> dict[str, Engine]:
    sync = make_engine(llama, draft=draft, mode="sync", nodes=8, levels=3, width=3)
    return {"off": make_engine(llama), "sync": sync}


@pytest.fixture
def target(request: pytest.FixtureRequest, engines: dict[str, Engine]) -> Iterator[Target]:
    target = Target(engines[getattr(request, "param", "sync")])
    yield target
    target.close()
    assert_idle(target.engine)


BOTH = pytest.mark.parametrize("target", ["off", "sync"], indirect=True)
OFF = pytest.mark.parametrize("target", ["off"], indirect=True)


@BOTH
def test_it_says_what_it_serves_before_anything_else(target: Target) -> None:
    (first,) = target.next()
    assert isinstance(first, Status)
    identity = first.identity
    assert (identity.mode, identity.dtype, identity.kv_slots) == (target.engine.config.mode, "float32", 4096)
    assert identity.longest == identity.context
    assert identity.max_nodes == (8 if identity.mode == "sync" else 0)
    assert first.free_slots == 4096 and first.running == first.waiting == 0


def test_its_fingerprint_follows_when_it_is_known(target: Target) -> None:
    (first,) = target.next()
    assert isinstance(first, Status) and not first.identity.fingerprint and first.identity.tokenizer
    weights = Future[list[str]]()
    weights.add_done_callback(lambda digests: target.service.identify({"model": "tiny"}, digests))
    weights.set_result(["a"])
    told = [message.identity.fingerprint for message in target.heard_until(Status) if isinstance(message, Status)]
    assert told == [fingerprint({"model": "tiny"}, ["a"])]


def test_without_weights_to_read_there_is_no_fingerprint(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    weights = Future[list[str]]()
    weights.set_exception(OSError("the disk is gone"))
    target.service.identify({}, weights)
    assert "the disk is gone" in caplog.text
    target.submit(1, [5, 6], params())
    target.heard_until()
    assert not target.service._identity.fingerprint


@BOTH
def test_deltas_add_up_to_what_the_engine_gives_alone(target: Target) -> None:
    tokens = target.engine.tokenizer.encode(SNIPPETS[0])
    expected = target.engine.submit(tokens, params(n=2))
    drain(target.engine)
    target.submit(1, tokens, params(n=2))
    steps = [message for message in target.heard_until(outputs=2) if isinstance(message, StepProgress)]
    deltas = deltas_of(steps)
    assert sum(step.step.committed for step in steps) == sum(len(sample.token_ids) for sample in expected)
    assert sum(step.step.accepted for step in steps) == sum(v.accepted for d in deltas for v in d.verified)
    assert all(step.step.forward > 0 for step in steps)
    for sample in expected:
        output = whole([d for d in deltas if d.index == sample.index])
        assert output.tokens == sample.token_ids
        assert output.text == sample.text
        assert output.ends[-1] == len(sample.text) and output.ends == sorted(output.ends)
        assert output.seed == sample.request.seed
        assert output.queued is not None and output.queued >= 0.0
        assert output.finish is not None and output.finish.reason == "length"
        assert sum(v.tokens for v in output.verified) == len(output.tokens)
        assert all(v.accepted <= min(v.nodes, v.tokens) and v.accepted == len(v.origins) for v in output.verified)
        origins = Counter(origin for v in output.verified for origin in v.origins)
        assert origins == sample.request.stats.accepted_by_origin


@BOTH
def test_what_is_guessed_for_a_request_may_change_while_it_runs(target: Target) -> None:
    """From 0 nodes on it decodes plainly, to the same end; a request that has ended needs nothing."""
    tokens, long = target.engine.tokenizer.encode(SNIPPETS[3]), params(max_tokens=120, temperature=0.0)
    (expected,) = target.engine.add(EngineRequest(tokens, long, max_nodes=0))
    drain(target.engine)
    target.submit(1, tokens, long)
    heard = target.heard_until(StepProgress)
    target.revise(1, 0)
    heard += target.heard_until()
    target.revise(1, None)
    target.submit(2, tokens, long)
    again = whole(deltas_of(target.heard_until(request=2), 2))
    output = whole(deltas_of(heard))
    assert output.tokens == again.tokens == expected.token_ids
    speculates = target.engine.config.mode == "sync"
    assert any(v.nodes for v in again.verified) == speculates
    assert not output.verified[-1].nodes and sum(v.nodes > 0 for v in output.verified) <= len(again.verified)


def test_a_number_that_is_in_use_is_no_other_requests(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    target.submit(1, [5, 6], params())
    target.submit(1, [7, 8], params())
    delta = whole(deltas_of(target.heard_until()))
    assert delta.finish is not None and len(delta.tokens) == 12
    target.submit(1, [9], params(max_tokens=2))  # it is free again
    target.heard_until()
    assert "its number 1 is in use" in caplog.text


def test_a_request_that_is_none_is_refused(target: Target) -> None:
    target.attendance.sent += 1
    bad = {"type": "submit", "id": 1, "incarnation": target.attendance.incarnation, "request": {"tokens": "x"}}
    target.channel.send(TARGET, encode(bad))
    target.start()
    failure = target.until(Failure)
    assert (failure.ids, failure.refused) == ([1], True) and "tokens" in failure.reason


def test_it_says_which_prefixes_it_holds_to_who_asks(target: Target) -> None:
    tokens, copies = target.engine.tokenizer.encode("".join(SNIPPETS))[:200], HeldCopies()
    target.submit(1, tokens, params())
    target.heard_until()
    target.attendance.attend = partial(target.attendance.attend, True)  # type: ignore[method-assign]
    copies.apply("target", target.until(Held))
    assert copies.matched(routing_keys(None, tokens)) == {"target": len(tokens) // OBJECT_TOKENS}
    assert copies.matched(routing_keys("other", tokens)) == {}


@pytest.mark.parametrize("at_the_end", [False, True])
def test_leaked_slots_are_told_once_it_is_idle(
    engines: dict[str, Engine], caplog: pytest.LogCaptureFixture, at_the_end: bool
) -> None:
    target = Target(engines["off"])
    pool = target.engine.worker.scheduler.pool
    if at_the_end:
        target.service._checked = math.inf
    leaked = pool.allocate(3)
    try:
        target.submit(1, [5, 6], params())
        target.heard_until()
        while not at_the_end and not caplog.records:
            target.next()
    finally:
        target.close()
        pool.release(leaked)
    assert all(record.getMessage().startswith("KV slots leak: slots: 3 ") for record in caplog.records)
    assert caplog.records
    assert_idle(target.engine)


@pytest.mark.parametrize("mode", ["off", "sync"])
def test_progress_overlaps_the_forward(engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """But a first token, where drafting would come before it."""
    engine = engines[mode]
    parts = (engine.executor, engine.worker.scheduler, engine.drafter, engine.worker.budget)
    monkeypatch.setattr(engine, "worker", AheadWorker(*parts))
    target, order = Target(engine), list[str]()
    for owner, name in ((target.engine.executor, "run"), (target.servers, "progress")):
        monkeypatch.setattr(owner, name, partial(noted, order, name, getattr(owner, name)))
    target.submit(1, [5, 6], params(max_tokens=20))
    assert len(whole(deltas_of(target.heard_until())).tokens) == 20
    steps, first = order.count("run"), ["progress", "run"] if mode == "sync" else ["run", "progress"]
    assert steps > 2 and order == ["run", *first, *["run", "progress"] * (steps - 2), "progress"]
    target.close()
    assert_idle(target.engine)


def noted(order: list[str], name: str, call: Callable[..., Any], *args: Any) -> Any:
    order.append(name)
    return call(*args)


@OFF
def test_a_broken_step_ends_its_requests_alone(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = target.engine.executor
    forward, broken = executor.run, [True]

    def break_once(batch: Any) -> Any:
        if broken.pop() if broken else False:
            raise RuntimeError("the device is gone")
        return forward(batch)

    monkeypatch.setattr(executor, "run", break_once)
    target.submit(1, [5, 6], params(n=2))
    (failure,) = (m for m in target.heard_until(Failure) if isinstance(m, Failure))
    assert failure.ids == [1] and "the device is gone" in failure.reason and not failure.refused
    target.submit(2, [5, 6], params())
    assert whole(deltas_of(target.heard_until(request=2), 2)).finish is not None


def test_logits_that_are_not_finite_end_their_request_alone(llama: Path, draft: Path) -> None:
    """With all its outputs, whether they have ended or not; what was given before comes first."""
    engine = make_engine(llama, draft=draft, mode="sync", levels=3, width=3)
    first, second = run(engine, [[5, 6]], [params(n=2)])
    other = run(engine, [[5, 6]], [params(seed=9)])[0]
    at = next(i for i in range(4, 12) if second[i] not in [*first, *second[:i], *other, 5, 6])
    embedding = next(name for name, _ in engine.model.module.named_parameters() if name.endswith("embed_tokens.weight"))
    engine.model.module.get_parameter(embedding)[second[at]] = float("nan")
    target = Target(engine)
    target.submit(1, [5, 6], params(n=2))
    target.submit(2, [5, 6], params(seed=9))
    heard = target.heard_until(request=2)
    target.close()
    (failure,) = (message for message in heard if isinstance(message, Failure))
    reason = f"logits: those after token {2 + at + 1} are not finite (NaN or infinity); none can be sampled"
    assert (failure.ids, failure.reason) == ([1], reason)
    before = deltas_of(heard[: heard.index(failure)])
    assert whole([d for d in before if d.index == 1]).tokens == second[: at + 1]
    assert deltas_of(heard[heard.index(failure) :]) == []
    assert whole(deltas_of(heard, 2)).tokens == other
    assert_idle(engine)
    assert not target.service._samples


@OFF
def test_a_device_that_stays_broken_ends_the_process(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.engine.executor, "run", Mock(side_effect=RuntimeError("the device is gone")))
    for request in range(target_process.MAX_FAILURES):
        target.submit(request + 1, [5, 6], params())
        target.service._take(target.servers.take(10.0)[0])
        if request < target_process.MAX_FAILURES - 1:
            target.service._step()
    with pytest.raises(EngineError, match="the device is gone"):
        target.service._step()


def test_a_steps_parts_are_the_whole_of_it() -> None:
    record = StepRecord(0.0, 1.0, 1.1, 1.3, 1.4, 1.5, 3.5, 4.0, 4.25, 2, 9, 7, 3, 20, 4, 6, 1)
    report = step_report(record, before=None)
    assert report.draft == pytest.approx(0.2)
    assert (report.forward, report.verify, report.verified) == (2.0, 0.5, 4.0)
    assert report.draft + report.forward + report.verify + report.coordination == pytest.approx(3.25)
    assert step_report(record, before=0.75).coordination == pytest.approx(report.coordination + 0.25)


def test_a_prompt_that_is_scored_in_parts_begins_once(engines: dict[str, Engine]) -> None:
    engine = engines["off"]
    prompt = [3 + i % 200 for i in range(2 * engine.config.max_rows)]
    (sample,) = engine.submit(prompt, params(max_tokens=3, prompt_logprobs=0))
    deltas = [delta for _ in iter(lambda: engine.busy, False) for delta in engine.step()]
    assert sum(bool(delta.prompt_logprobs) for delta in deltas) > 1
    begun = [delta for delta in deltas if delta.queued is not None]
    assert [(delta.seed, len(delta.tokens)) for delta in begun] == [(sample.request.seed, 1)]
    every = whole(deltas)
    assert (every.seed, every.queued) == (begun[0].seed, begun[0].queued) and len(every.prompt_logprobs) == 511


SLOW, FAST = Constraint.regex("[a-f]{3}"), Constraint.regex("[0-9]{3}")


@pytest.fixture
def held(target: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Compiling SLOW waits for it."""
    assert target.engine.grammars is not None
    grammars, released = target.engine.grammars.grammars, threading.Event()
    compile_now = grammars.compile

    def compile_later(constraint: Constraint) -> Any:
        if constraint == SLOW:
            assert released.wait(10)
        return compile_now(constraint)

    monkeypatch.setattr(grammars, "compile", compile_later)
    grammars._compiled.clear()  # those of other tests
    yield released
    released.set()


def test_nobody_waits_for_anothers_grammar(target: Target, held: threading.Event) -> None:
    target.start()
    target.submit(1, [1, 2, 3], params(structured_outputs=SLOW))
    target.submit(2, [1, 2, 3], params())
    heard = target.heard_until(request=2)
    assert deltas_of(heard, 2) and not deltas_of(heard, 1)
    held.set()
    assert target.engine.tokenizer.decode(whole(deltas_of(target.heard_until(request=1))).tokens)[:1] in "abcdef"


def test_grammars_of_requests_that_have_gone_are_not_compiled(target: Target, held: threading.Event) -> None:
    others = [Constraint.regex(f"[0-9]{{{i + 4}}}") for i in range(3)]
    target.start()
    for number, constraint in enumerate((SLOW, *others)):
        target.submit(1 + number, [1, 2, 3], params(structured_outputs=constraint))
    for number in (1, 2, 3):
        target.abort(number)
    target.submit(9, [1, 2, 3], params())
    heard = target.heard_until(request=9)
    held.set()
    target.submit(10, [1, 2, 3], params(structured_outputs=FAST))
    heard += target.heard_until(request=10)
    assert not deltas_of(heard, 1) and not any(isinstance(message, Failure) for message in heard)
    assert target.engine.grammars is not None
    assert [target.engine.grammars.grammars.known(one) is not None for one in others] == [False, False, True]


def test_the_loop_never_compiles(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even what was compiled and is forgotten when its request is submitted."""
    assert target.engine.grammars is not None
    grammars = target.engine.grammars.grammars
    monkeypatch.setattr(compiling, "KEPT", 1)
    where, add, compile_now = list[str](), target.engine.add, grammars.compile

    def compile_noted(constraint: Constraint) -> Any:
        where.append(threading.current_thread().name)
        return compile_now(constraint)

    def submit_later(*given: Any) -> list[Sample]:
        assert target.engine.grammars is not None
        target.engine.grammars.compile(Constraint.regex(f"a{{{len(where)}}}b")).result()  # another takes its place
        return add(*given)

    monkeypatch.setattr(grammars, "compile", compile_noted)
    monkeypatch.setattr(target.engine, "add", submit_later)
    for number in (1, 2):
        target.submit(number, [1, 2, 3], params(structured_outputs=Constraint.regex(f"[0-9]{{{number}}}")))
        assert deltas_of(target.heard_until(request=number), number)
    assert where and all(name.startswith("grammar") for name in where)


def test_a_compiler_that_breaks_fails_its_request_alone(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    assert target.engine.grammars is not None
    monkeypatch.setattr(target.engine.grammars.grammars, "compile", Mock(side_effect=RuntimeError("no memory")))
    target.submit(1, [1, 2, 3], params(structured_outputs=FAST))
    (failure,) = (message for message in target.heard_until(Failure) if isinstance(message, Failure))
    assert (failure.ids, failure.refused, failure.reason) == ([1], False, "no memory")
    target.submit(2, [1, 2, 3], params())
    assert deltas_of(target.heard_until(request=2), 2)


def test_a_grammar_that_reaches_a_limit_is_the_requests_fault(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = MatcherState.plan
    problem = property(lambda state: "too complex" if state._output else None, lambda *_: None)
    monkeypatch.setattr(MatcherState, "problem", problem, raising=False)
    nothing = MaskPlan([], [], [], None)
    monkeypatch.setattr(MatcherState, "plan", lambda state, paths: nothing if state._output else plan(state, paths))
    target.submit(1, [1, 2, 3], params(structured_outputs=Constraint.regex("[0-9]{99}")))
    (failure,) = (message for message in target.heard_until(Failure) if isinstance(message, Failure))
    assert (failure.refused, failure.field) == (True, "structured_outputs")
    assert failure.reason.startswith("structured_outputs: after token ") and failure.reason.endswith(": too complex")
    target.submit(2, [1, 2, 3], params())
    assert deltas_of(target.heard_until(request=2), 2)
