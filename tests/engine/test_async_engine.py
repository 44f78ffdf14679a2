"""A target worker in a process of its own: its streams, its end, its return."""

import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import reduce
from pathlib import Path

import pytest
from attending import open_requests
from forked import ForkedWorker
from support import until

from pilotfish.config.engine import EngineConfig
from pilotfish.config.server import ServerConfig
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.processes import launch
from pilotfish.engine.targets.async_engine import AsyncEngine
from pilotfish.engine.targets.fleet import GRACE
from pilotfish.engine.targets.stream import Stream, joined
from pilotfish.errors import ParameterError, PromptError, TargetUnavailable
from pilotfish.kv.tiers import FLUSH
from pilotfish.wire.serving import Delta, EngineRequest, Status

pytestmark = pytest.mark.anyio
#: Seconds that ending anything else than tiers of KV takes, amply.
ENDING = 5.0
PARAMS = SamplingParams(max_tokens=24, seed=7, temperature=0.8)


async def output(stream: Stream) -> Delta:
    """The only output of a request, whole."""
    return reduce(joined, [update.delta async for update in stream])


def pid_of(engine: AsyncEngine) -> int:
    worker = engine._fleet.replicas[0].worker
    assert worker is not None and worker.pid is not None
    return worker.pid


def status_of(engine: AsyncEngine) -> Status:
    found = engine.health.replicas[0].status
    assert found is not None
    return found


@pytest.fixture(scope="module")
async def engine(llama: Path) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(target=llama, dtype="float32", threads=1, kv_slots=4096, pace="target=5ms")
    engine = AsyncEngine(config, ServerConfig(target_timeout=3.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "WorkerProcess", ForkedWorker)
        await engine.start()
        assert not engine.health.ready and engine.health.reason == "target: loading"
        await until(lambda: engine.health.ready, 120.0)
        yield engine
        await engine.close()
    assert engine.health.reason.startswith("draining: ")
    with pytest.raises(TargetUnavailable):
        engine.submit([EngineRequest([5], PARAMS)])


async def test_a_refusal_is_the_error_that_the_engine_raised(engine: AsyncEngine) -> None:
    with pytest.raises(PromptError, match="prompt: 3000 tokens; the model's context allows"):
        await output(engine.submit([EngineRequest([5] * 3000, PARAMS)]))
    with pytest.raises(ParameterError, match="logit_bias: 100000 is not allowed") as caught:
        await output(engine.submit([EngineRequest([5], replace(PARAMS, logit_bias={100_000: 1.0}))]))
    assert caught.value.field == "logit_bias"


async def test_an_abort_frees_what_the_request_held(engine: AsyncEngine) -> None:
    stream = engine.submit([EngineRequest([5, 6, 7], replace(PARAMS, max_tokens=1500, n=2))])
    await anext(stream)
    stream.abort()
    stream.abort()
    assert not open_requests(engine)
    await until(lambda: status_of(engine).running == 0)
    assert status_of(engine).free_slots == 4096


async def test_a_target_that_stands_still_is_killed_after_a_while(engine: AsyncEngine) -> None:
    restarts = engine.health.restarts
    stream = engine.submit([EngineRequest([5, 6, 7], replace(PARAMS, max_tokens=2000))])
    await anext(stream)
    os.kill(pid_of(engine), signal.SIGSTOP)
    await until(lambda: not engine.health.ready)
    assert engine.health.reason.startswith("target: silent for ") and engine.health.restarts == restarts
    with pytest.raises(TargetUnavailable, match=r"^target: silent for "):
        engine.submit([EngineRequest([5], PARAMS)])
    with pytest.raises(TargetUnavailable, match=r"^target: was silent for 3 s and is killed; it is started"):
        await output(stream)
    assert engine.health.retry_after > 0  # as long as the start before it took
    await until(lambda: engine.health.ready, 120.0)
    assert engine.health.restarts == restarts + 1
    assert (await output(engine.submit([EngineRequest([5, 6], PARAMS)]))).tokens


def test_a_target_may_write_all_its_kv_before_it_is_killed() -> None:
    assert GRACE >= FLUSH + ENDING
