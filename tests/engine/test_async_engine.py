"""A target worker in a process of its own: its streams, its end, its return."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import SNIPPETS, make_engine, run

from pilotfish.config import EngineConfig, config_of, config_text
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.engine.async_engine import GRACE, AsyncEngine
from pilotfish.engine.launch import WorkerState
from pilotfish.engine.silence import Silence
from pilotfish.engine.stream import Stream, joined
from pilotfish.errors import ParameterError, PromptError, TargetUnavailable
from pilotfish.kv.tiers import FLUSH
from pilotfish.wire.channel import Received
from pilotfish.wire.serving import Beat, Delta, Identity, Status

#: Seconds that ending anything else than tiers of KV takes, amply.
ENDING = 5.0
PARAMS = SamplingParams(max_tokens=24, seed=7, temperature=0.8)


def configured(llama: Path, **fields: Any) -> EngineConfig:
    return EngineConfig(**{"target": llama, "dtype": "float32", "threads": 1, "kv_slots": 4096, **fields})


def status(incarnation: str) -> Status:
    return Status(Identity("tiny", "off", "float32", 256, 512, 4096, 256, 8, 0), 0, 0, 4096, 0, incarnation)


async def until(holds: Callable[[], bool], seconds: float = 120.0) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.02)


async def output(stream: Stream) -> Delta:
    """The only output of a request, whole."""
    deltas = [update.delta async for update in stream]
    whole = deltas[0]
    for delta in deltas[1:]:
        whole = joined(whole, delta)
    return whole


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def engine(llama: Path, loop: asyncio.AbstractEventLoop) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(configured(llama))
    loop.run_until_complete(engine.start())
    assert not engine.health.ready and engine.health.reason == "target: loading"
    loop.run_until_complete(until(lambda: engine.health.ready))
    yield engine
    loop.run_until_complete(engine.close())
    with pytest.raises(TargetUnavailable):
        engine.submit([[5]], PARAMS)


def test_streams_give_what_the_engine_gives(engine: AsyncEngine, loop: asyncio.AbstractEventLoop, llama: Path) -> None:
    prompts = [engine.tokenizer.encode(text) for text in SNIPPETS]
    expected = run(make_engine(llama), prompts, [PARAMS] * len(prompts))

    async def all_at_once() -> list[Delta]:
        return await asyncio.gather(*(output(engine.submit([prompt], PARAMS)) for prompt in prompts))

    assert [delta.tokens for delta in loop.run_until_complete(all_at_once())] == expected
    assert not engine._streams


def test_a_refusal_is_the_error_that_the_engine_raised(engine: AsyncEngine, loop: asyncio.AbstractEventLoop) -> None:
    with pytest.raises(PromptError, match="prompt: 3000 tokens; the model's context allows"):
        loop.run_until_complete(output(engine.submit([[5] * 3000], PARAMS)))
    with pytest.raises(ParameterError, match="logit_bias: 100000 is not allowed") as caught:
        loop.run_until_complete(output(engine.submit([[5]], replace(PARAMS, logit_bias={100_000: 1.0}))))
    assert caught.value.field == "logit_bias"


def test_an_abort_frees_what_the_request_held(engine: AsyncEngine, loop: asyncio.AbstractEventLoop) -> None:
    async def scenario() -> None:
        stream = engine.submit([[5, 6, 7]], replace(PARAMS, max_tokens=1500, n=2))
        await anext(stream)
        stream.abort()
        stream.abort()
        assert not engine._streams
        await until(lambda: engine.health.status is not None and engine.health.status.running == 0)
        assert engine.health.status is not None and engine.health.status.free_slots == 4096

    loop.run_until_complete(scenario())


def test_a_target_that_is_killed_fails_its_requests_and_comes_back(
    engine: AsyncEngine, loop: asyncio.AbstractEventLoop
) -> None:
    async def scenario() -> None:
        before = (await output(engine.submit([[5, 6]], PARAMS))).tokens
        stream = engine.submit([[5, 6, 7]], replace(PARAMS, max_tokens=2000))
        await anext(stream)
        pid = engine._worker.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(TargetUnavailable, match=r"^target: was ended by signal 9 \(Killed\); it is started again$"):
            await output(stream)
        assert not engine.health.ready and not engine._streams
        with pytest.raises(TargetUnavailable):
            engine.submit([[5]], PARAMS)
        await until(lambda: engine.health.ready)
        assert engine.health.restarts == 1
        assert (await output(engine.submit([[5, 6]], PARAMS))).tokens == before

    loop.run_until_complete(scenario())


def test_a_target_that_stands_still_is_killed_after_a_while(llama: Path) -> None:
    async def scenario() -> None:
        engine = AsyncEngine(configured(llama, pace="target=5ms"), target_timeout=3.0)
        await engine.start()
        try:
            await until(lambda: engine.health.ready)
            stream = engine.submit([[5, 6, 7]], replace(PARAMS, max_tokens=2000))
            await anext(stream)
            assert engine._worker.pid is not None
            os.kill(engine._worker.pid, signal.SIGSTOP)
            await until(lambda: not engine.health.ready)
            assert engine.health.reason.startswith("target: silent for ") and engine.health.restarts == 0
            with pytest.raises(TargetUnavailable, match=r"^target: silent for "):
                engine.submit([[5]], PARAMS)
            with pytest.raises(TargetUnavailable, match=r"^target: was silent for 3 s and is killed; it is started"):
                await output(stream)
            assert engine.health.retry_after > 1  # as long as the start before it took
            await until(lambda: engine.health.ready)
            assert engine.health.restarts == 1 and (await output(engine.submit([[5, 6]], PARAMS))).tokens
        finally:
            await engine.close()
        assert engine.health.reason.startswith("draining: ") and engine.health.status is not None

    asyncio.run(scenario())


def test_only_a_process_that_sends_no_beats_is_silent() -> None:
    silence = Silence()
    assert [silence.look(now) for now in (10.0, 10.1, 10.2)] == pytest.approx([0.0, 0.1, 0.2])
    silence.heard()
    assert silence.look(10.3) == pytest.approx(0.1)
    assert silence.look(99.0) == pytest.approx(0.6)  # this process did not look, so it cannot have heard either


def test_a_restart_is_expected_to_take_as_long_as_the_last_start(llama: Path) -> None:
    now = [100.0]
    engine = AsyncEngine(configured(llama), clock=lambda: now[0])
    engine._worker = WorkerState("target", "running", pid=42)

    def left(at: float) -> float:
        now[0] = at
        return engine.health.retry_after

    assert left(104.0) == 4.0  # as long again: nothing is known yet
    now[0] = 110.0
    engine._handle(status("first"))
    now[0] = 200.0
    engine._note_state(WorkerState("target", "restarting", restarts=1, reason="was ended by signal 9"))
    assert left(203.0) == 7.0 and left(220.0) == 0.0


def test_requests_of_a_target_that_is_gone_are_told_when_to_come_again(llama: Path) -> None:
    now = [100.0]
    engine = AsyncEngine(configured(llama), clock=lambda: now[0])
    engine._worker = WorkerState("target", "running", pid=42)
    now[0] = 121.0
    engine._handle(status("first"))
    stream = engine._streams[1] = Stream(range(1, 2), 1, lambda: None)
    now[0] = 500.0
    engine._note_state(WorkerState("target", "restarting", restarts=1, reason="was ended by signal 9"))
    with pytest.raises(TargetUnavailable) as caught:
        asyncio.run(output(stream))
    assert caught.value.retry_after == 21.0  # what the start before took


def test_a_step_that_does_not_end_is_told_of_and_its_target_killed(llama: Path) -> None:
    killed: list[str] = []

    class Crew:
        def kill(self, _: str, reason: str) -> None:
            killed.append(reason)

    engine = AsyncEngine(configured(llama), clock=lambda: 0.0)
    engine._supervisor, engine._worker = Crew(), WorkerState("target", "running", pid=42)  # type: ignore[assignment]
    engine._in_loop = lambda call: call()  # type: ignore[method-assign]
    engine._handle(status("first"))
    beats = ((42, 1.0, True), (41, 31.0, True), (42, 31.0, False), (42, 0.5, True), (42, 301.0, False))
    for pid, seconds, ready in beats:
        engine._receive(Received(b"other", msgspec.msgpack.encode(Beat(pid, seconds, "first", 0))))
        engine._look()
        assert engine.health.ready == ready
    assert engine.health.reason == "target: in one step for 301 s"
    assert killed == ["was in one step for 300 s and is killed"]


def test_a_target_that_was_long_silent_is_not_killed_at_the_moment_it_is_ready(llama: Path) -> None:
    killed: list[str] = []

    class Crew:
        def kill(self, _: str, reason: str) -> None:
            killed.append(reason)

    class Loading(Silence):
        """While the thread looks, the loop hears that the target is ready; while that is noted, the thread looks."""

        def look(self, now: float) -> float:
            silent = super().look(now)
            if not engine._serving:
                engine._handle(status("first"))
            return silent

        def heard(self) -> None:
            if engine._serving:
                engine._look()
            super().heard()

    engine = AsyncEngine(configured(llama), clock=lambda: 0.0)
    engine._supervisor, engine._worker = Crew(), WorkerState("target", "running", pid=42)  # type: ignore[assignment]
    engine._silence = Loading()
    engine._silence.seconds = 100.0
    engine._look()
    assert engine.health.ready and killed == []


def test_the_last_word_of_a_target_that_is_gone_does_not_bring_it_back(llama: Path) -> None:
    engine = AsyncEngine(configured(llama))
    engine._handle(status("first"))
    assert engine.health.ready
    engine._drop_target("target: gone")
    engine._handle(status("first"))
    assert not engine.health.ready and engine.health.status is None
    engine._handle(status("second"))
    assert engine.health.ready


def test_a_model_without_weights_fails_for_good(tmp_path: Path, llama: Path) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()

    async def scenario() -> str:
        engine = AsyncEngine(configured(tmp_path))
        await engine.start()
        await until(lambda: engine.health.failed)
        reason = engine.health.reason
        await engine.close()
        return reason

    assert "has no safetensors weights" in asyncio.run(scenario())


def test_a_configuration_survives_its_way_to_another_process(llama: Path, draft: Path) -> None:
    config = configured(llama, draft=draft, mode="async", draft_pool=("ipc:///tmp/a", "ipc:///tmp/b"), memory=2.5)
    assert config_of(config_text(config), EngineConfig) == config
    with pytest.raises(ParameterError, match="config"):
        config_of("{}", EngineConfig)


def test_a_target_may_write_all_its_kv_before_it_is_killed() -> None:
    assert GRACE >= FLUSH + ENDING
