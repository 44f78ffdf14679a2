"""The target worker's side of a server's wire: what it is told, what it answers, what it frees."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from functools import reduce
from pathlib import Path
from typing import Any

import msgspec
import pytest
from loopback import Loopback
from support import SNIPPETS, asked, assert_idle, drain, make_engine, run

from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS
from pilotfish.core.routing.held_prefixes import Held, HeldCopies, routing_keys
from pilotfish.core.sampling.constraint import Constraint
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.engine.fingerprint import fingerprint
from pilotfish.engine.sample import Sample
from pilotfish.engine.targets import target_process
from pilotfish.engine.targets.servers import Attendance, Servers
from pilotfish.engine.targets.status import identity_of, step_report
from pilotfish.engine.targets.stream import joined
from pilotfish.engine.targets.target_process import TargetService
from pilotfish.errors import EngineError
from pilotfish.grammar import compile as compiling
from pilotfish.grammar.state import MaskPlan, MatcherState
from pilotfish.wire.channel import decoded
from pilotfish.wire.serving import (
    ATTEND,
    SERVER_DECODER,
    Abort,
    Beat,
    Delta,
    EngineRequest,
    Failure,
    Revise,
    Status,
    StepProgress,
    Submit,
    ToServer,
    ToTarget,
)
from pilotfish.workers.records import StepRecord


class Target:
    """A service over an engine; `start` has it run in a thread, and the engine is that thread's from then on."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        channel, self.server = Loopback.pair(b"target")
        self.servers = Servers(channel)
        self.service = TargetService(engine, self.servers)
        self.thread = threading.Thread(target=self.service.run)
        self.attendance = Attendance(self.servers.incarnation)
        self.copies = HeldCopies()
        self.follows = False  # whether it asks what the target holds
        self.servers.start()
        self.tell(self.attendance.attend())

    def tell(self, message: ToTarget) -> None:
        self.server.send(b"target", msgspec.msgpack.encode(message))

    def submit(self, number: int, tokens: list[int], params: SamplingParams) -> None:
        self.attendance.sent += 1
        self.tell(Submit(number, self.servers.incarnation, EngineRequest(tokens, params)))

    def abort(self, number: int) -> None:
        self.attendance.sent += 1
        self.tell(Abort(number, self.servers.incarnation))

    def revise(self, number: int, max_nodes: int | None) -> None:
        self.attendance.sent += 1
        self.tell(Revise(number, self.servers.incarnation, max_nodes))

    def hear(self, seconds: float = 10.0) -> list[ToServer]:
        """All but Beats, of which none tells of a loss. The service runs from the first call on."""
        self.start()
        deadline, heard = time.monotonic() + seconds, list[ToServer]()
        while not heard and (left := deadline - time.monotonic()) > 0:
            self.tell(self.attendance.attend(self.follows, self.copies.expected("target")))
            for received in self.server.receive(min(left, ATTEND)):
                message = decoded(SERVER_DECODER, received.frame)
                if isinstance(message, Beat | StepProgress | Failure):
                    assert self.attendance.follows(message)
                if isinstance(message, Held):
                    self.copies.apply("target", message)
                heard += [] if isinstance(message, Beat) else [message]
        return heard

    def until(self, wanted: type[ToServer] | None = None, request: int = 1, outputs: int = 1) -> list[ToServer]:
        """What comes up to the first message of a kind, or to the end of a request's outputs."""
        heard: list[ToServer] = []
        while True:
            messages = self.hear()
            assert messages, "the target is silent"
            heard += messages
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


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "seed": 7, "temperature": 0.8, **fields})


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


def test_it_says_which_prefixes_it_holds_to_who_asks(target: Target) -> None:
    tokens = target.engine.tokenizer.encode("".join(SNIPPETS))[:200]
    target.follows = True
    target.tell(target.attendance.attend(held=True))
    target.submit(1, tokens, params())
    target.until()
    deadline, keys = time.monotonic() + 10, routing_keys(None, tokens)
    while not target.copies.matched(keys) and time.monotonic() < deadline:
        target.hear(1.0)
    assert target.copies.matched(keys) == {"target": len(tokens) // OBJECT_TOKENS}
    assert target.copies.matched(routing_keys("other", tokens)) == {}


@BOTH
def test_it_says_what_it_serves_before_anything_else(target: Target) -> None:
    (first,) = target.hear()
    assert isinstance(first, Status)
    identity = first.identity
    assert (identity.mode, identity.dtype, identity.kv_slots) == (target.engine.config.mode, "float32", 4096)
    assert identity.longest == identity.context
    assert identity.max_nodes == (8 if identity.mode == "sync" else 0)
    assert first.free_slots == 4096 and first.running == first.waiting == 0


def test_its_fingerprint_follows_when_it_is_known(target: Target) -> None:
    (first,) = target.hear()
    assert isinstance(first, Status) and not first.identity.fingerprint and first.identity.tokenizer
    weights = Future[list[str]]()
    weights.add_done_callback(lambda digests: target.service.identify({"model": "tiny"}, digests))
    weights.set_result(["a"])
    told = [message.identity.fingerprint for message in target.until(Status) if isinstance(message, Status)]
    assert told == [fingerprint({"model": "tiny"}, ["a"])]


def test_without_weights_to_read_it_serves_without_fingerprint(
    target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    weights = Future[list[str]]()
    weights.set_exception(OSError("the disk is gone"))
    target.service.identify({}, weights)
    assert "the disk is gone" in caplog.text
    target.submit(1, [5, 6], params())
    target.until()
    assert not target.service._identity.fingerprint


def test_it_names_the_dtype_that_auto_has_become(llama: Path) -> None:
    engine = make_engine(llama, dtype="auto")
    assert identity_of(engine).dtype == str(engine.model.dtype).removeprefix("torch.")


@BOTH
def test_deltas_add_up_to_what_the_engine_gives_alone(target: Target) -> None:
    tokens = target.engine.tokenizer.encode(SNIPPETS[0])
    expected = target.engine.submit(tokens, params(n=2))
    drain(target.engine)
    target.submit(1, tokens, params(n=2))
    deltas = deltas_of(target.until(outputs=2))
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
def test_progress_is_numbered_and_its_steps_add_up(target: Target) -> None:
    target.submit(1, [5, 6, 7], params(max_tokens=20))
    steps = [message for message in target.until() if isinstance(message, StepProgress)]
    assert [step.sequence for step in steps] == list(range(len(steps)))
    assert sum(step.step.committed for step in steps) == 20
    assert sum(step.step.accepted for step in steps) == sum(v.accepted for d in deltas_of(steps) for v in d.verified)
    assert all(step.step.forward > 0 for step in steps)


def test_a_request_may_do_with_fewer_guesses_or_none_beside_others(engines: dict[str, Engine]) -> None:
    engine, greedy, nodes = engines["sync"], params(max_tokens=40, temperature=0.0), dict[Sample, list[int]]()
    limits: dict[Sample, int | None] = {}
    for limit in (None, 3, 0):
        limits |= dict.fromkeys(engine.add(asked(engine, SNIPPETS[3], greedy, max_nodes=limit)), limit)
    while engine.busy:
        for sample, delta in engine.advance().items():
            nodes.setdefault(sample, []).extend(verified.nodes for verified in delta.verified)
    for sample, limit in limits.items():
        most = 8 if limit is None else limit
        assert max(nodes[sample]) <= most and (max(nodes[sample]) > 0) == (most > 0)
        assert sample.token_ids == run(engines["off"], [SNIPPETS[3]], [greedy])[0]


@BOTH
def test_what_is_guessed_for_a_request_may_change_while_it_runs(target: Target) -> None:
    """From 0 nodes on it decodes plainly, to the same end; a request that has ended needs nothing."""
    tokens, long = target.engine.tokenizer.encode(SNIPPETS[3]), params(max_tokens=120, temperature=0.0)
    (expected,) = target.engine.add(EngineRequest(tokens, long, max_nodes=0))
    drain(target.engine)
    target.submit(1, tokens, long)
    heard = target.until(StepProgress)
    target.revise(1, 0)
    heard += target.until()
    target.revise(1, None)
    target.submit(2, tokens, long)
    again = whole(deltas_of(target.until(request=2), 2))
    output = whole(deltas_of(heard))
    assert output.tokens == again.tokens == expected.token_ids
    speculates = target.engine.config.mode == "sync"
    assert any(v.nodes for v in again.verified) == speculates
    assert not output.verified[-1].nodes and sum(v.nodes > 0 for v in output.verified) <= len(again.verified)


def test_the_stop_that_ended_an_output(target: Target) -> None:
    engine = target.engine
    (free,) = engine.submit(SNIPPETS[0], params())
    drain(engine)
    middle = free.text[len(free.text) // 2 :][:3]
    target.submit(1, engine.tokenizer.encode(SNIPPETS[0]), params(stop=("never there", middle)))
    target.submit(2, engine.tokenizer.encode(SNIPPETS[0]), params(stop_token_ids=(free.token_ids[4],)))
    heard = target.until(request=1)
    if not any(d.finish for d in deltas_of(heard, 2)):
        heard += target.until(request=2)
    by_text, by_token = whole(deltas_of(heard, 1)), whole(deltas_of(heard, 2))
    assert by_text.finish is not None and (by_text.finish.reason, by_text.finish.stop) == ("stop", middle)
    assert by_text.text == free.text[: free.text.find(middle)]
    assert by_token.finish is not None and by_token.finish.stop == free.token_ids[4]


def test_what_cannot_be_served_is_refused_and_harms_nobody(target: Target) -> None:
    target.submit(1, [10_000], params())
    target.submit(2, [5] * 3000, params())
    target.submit(3, [5], params(logit_bias={100_000: 1.0}))
    target.submit(4, [5, 6], params())
    heard = target.until(request=4)
    refusals = {message.ids[0]: message for message in heard if isinstance(message, Failure) and message.refused}
    assert set(refusals) == {1, 2, 3}
    assert refusals[1].field == "prompt" and refusals[3].field == "logit_bias"
    assert refusals[2].field is None and "the model's context allows" in refusals[2].reason


def test_a_number_that_is_in_use_is_no_other_requests(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    target.submit(1, [5, 6], params())
    target.submit(1, [7, 8], params())
    delta = whole(deltas_of(target.until()))
    assert delta.finish is not None and len(delta.tokens) == 12
    target.submit(1, [9], params(max_tokens=2))  # it is free again
    target.until()
    assert "its number 1 is in use" in caplog.text


def test_an_abort_frees_everything_at_once(target: Target) -> None:
    target.submit(1, [5, 6, 7], params(max_tokens=1500, n=2))
    target.until(StepProgress)
    target.abort(1)
    target.abort(1)
    target.submit(2, [5], params(max_tokens=1))
    target.until(request=2)
    scheduler = target.engine.worker.scheduler
    assert scheduler.pool.num_available == scheduler.pool.capacity


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
        target.until()
        while not at_the_end and not caplog.records:
            assert target.hear()
    finally:
        target.close()
        pool.release(leaked)
    assert all(record.getMessage().startswith("KV slots leak: slots: 3 ") for record in caplog.records)
    assert caplog.records
    assert_idle(target.engine)


def test_a_broken_step_ends_its_requests_alone(engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(engines["off"])
    executor = target.engine.executor
    forward, broken = executor.run, [True]

    def break_once(batch: Any) -> Any:
        if broken.pop() if broken else False:
            raise RuntimeError("the device is gone")
        return forward(batch)

    monkeypatch.setattr(executor, "run", break_once)
    target.submit(1, [5, 6], params(n=2))
    (failure,) = (m for m in target.until(Failure) if isinstance(m, Failure))
    assert failure.ids == [1] and "the device is gone" in failure.reason and not failure.refused
    target.submit(2, [5, 6], params())
    assert whole(deltas_of(target.until(request=2), 2)).finish is not None
    target.close()
    assert_idle(target.engine)


def test_logits_that_are_not_finite_end_their_request_alone(llama: Path, draft: Path) -> None:
    """With all its outputs, whether they have ended or not; what was given before comes first."""
    engine = make_engine(llama, draft=draft, mode="sync", levels=3, width=3)
    first, second = run(engine, [[5, 6]], [params(n=2)])
    other = run(engine, [[5, 6]], [params(seed=9)])[0]
    at = next(i for i in range(4, 12) if second[i] not in [*first, *second[:i], *other, 5, 6])
    engine.model.module.get_parameter(embedding(engine))[second[at]] = float("nan")
    target = Target(engine)
    target.submit(1, [5, 6], params(n=2))
    target.submit(2, [5, 6], params(seed=9))
    heard = target.until(request=2)
    target.close()
    (failure,) = (message for message in heard if isinstance(message, Failure))
    assert failure.ids == [1]
    assert (
        failure.reason
        == f"logits: those after token {2 + at + 1} are not finite (NaN or infinity); none can be sampled"
    )
    before = deltas_of(heard[: heard.index(failure)])
    assert whole([d for d in before if d.index == 1]).tokens == second[: at + 1]
    assert deltas_of(heard[heard.index(failure) :]) == []
    assert whole(deltas_of(heard, 2)).tokens == other
    assert_idle(engine)
    assert not target.service._samples


def embedding(engine: Engine) -> str:
    return next(name for name, _ in engine.model.module.named_parameters() if name.endswith("embed_tokens.weight"))


def test_a_device_that_stays_broken_ends_the_process(
    engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(engines["off"])

    def broken(_: Any) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(target.engine.executor, "run", broken)
    for request in range(target_process.MAX_FAILURES):
        target.submit(request + 1, [5, 6], params())
        target.service._take(target.servers.take(10.0)[0])
        if request < target_process.MAX_FAILURES - 1:
            target.service._step()
    with pytest.raises(EngineError, match="the device is gone"):
        target.service._step()
    target.close()
    assert_idle(target.engine)


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
    heard = target.until(request=2)
    assert deltas_of(heard, 2) and not deltas_of(heard, 1)
    held.set()
    assert target.engine.tokenizer.decode(whole(deltas_of(target.until(request=1))).tokens)[:1] in "abcdef"


def test_a_request_that_ends_while_its_grammar_is_compiled_leaves_nothing(
    target: Target, held: threading.Event
) -> None:
    target.start()
    target.submit(1, [1, 2, 3], params(structured_outputs=SLOW))
    target.abort(1)
    target.submit(2, [1, 2, 3], params())
    heard = target.until(request=2)
    held.set()
    target.submit(3, [1, 2, 3], params(structured_outputs=FAST))
    heard += target.until(request=3)
    assert not deltas_of(heard, 1)
    assert not any(isinstance(message, Failure) for message in heard)


def test_grammars_of_requests_that_have_gone_are_not_compiled(target: Target, held: threading.Event) -> None:
    others = [Constraint.regex(f"[0-9]{{{i + 4}}}") for i in range(3)]
    target.start()
    for number, constraint in enumerate((SLOW, *others)):
        target.submit(1 + number, [1, 2, 3], params(structured_outputs=constraint))
    for number in (2, 3):
        target.abort(number)
    target.submit(9, [1, 2, 3], params())
    target.until(request=9)
    held.set()
    target.until(request=4)
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
        assert deltas_of(target.until(request=number), number)
    assert where and all(name.startswith("grammar") for name in where)


def test_a_grammar_that_cannot_be_is_refused_with_its_field(target: Target) -> None:
    target.submit(1, [1, 2, 3], params(structured_outputs=Constraint.regex("a{3")))
    (failure,) = (message for message in target.until(Failure) if isinstance(message, Failure))
    assert (failure.ids, failure.refused, failure.field) == ([1], True, "structured_outputs")
    assert failure.reason.startswith("structured_outputs: ")


def test_a_compiler_that_breaks_fails_its_request_alone(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    assert target.engine.grammars is not None

    def broken(_: Constraint) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(target.engine.grammars.grammars, "compile", broken)
    target.submit(1, [1, 2, 3], params(structured_outputs=FAST))
    (failure,) = (message for message in target.until(Failure) if isinstance(message, Failure))
    assert (failure.ids, failure.refused, failure.reason) == ([1], False, "no memory")
    target.submit(2, [1, 2, 3], params())
    assert deltas_of(target.until(request=2), 2)


def test_a_grammar_that_reaches_a_limit_is_the_requests_fault(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = MatcherState.plan
    monkeypatch.setattr(MatcherState, "problem", property(lambda state: "too complex" if state._output else None))
    nothing = MaskPlan([], [], [], None)
    monkeypatch.setattr(MatcherState, "plan", lambda state, paths: nothing if state._output else plan(state, paths))
    target.submit(1, [1, 2, 3], params(structured_outputs=Constraint.regex("[0-9]{99}")))
    (failure,) = (message for message in target.until(Failure) if isinstance(message, Failure))
    assert (failure.refused, failure.field) == (True, "structured_outputs")
    assert failure.reason.startswith("structured_outputs: after token ") and failure.reason.endswith(": too complex")
    target.submit(2, [1, 2, 3], params())
    assert deltas_of(target.until(request=2), 2)
