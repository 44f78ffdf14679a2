"""A cascade over two real engines: outputs are the answering model's own, and nothing stays behind."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attending import open_requests
from inline_targets import InlineTarget
from live import LiveServer
from sizes import in_soak
from support import SETTINGS, SNIPPETS, assert_idle, make_engine, run, until

from pilotfish.config.engine import EngineConfig
from pilotfish.config.server import ServerConfig
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.targets.async_engine import AsyncEngine
from pilotfish.operate.cascade_policy import LEAST, NOBODY, CascadeAnswer, CascadePolicy, SmallModelConfig
from pilotfish.server.traffic.cascade import CascadeStream
from pilotfish.wire.serving import EngineRequest

PARAMS = SamplingParams(max_tokens=24, seed=7, temperature=0.8, n=2)


@dataclass
class Side:
    """A model, its target and a server's engine."""

    directory: Path
    model: Path
    pace: str = ""

    def __post_init__(self) -> None:
        self.target = InlineTarget(self.directory, self.model, pace=self.pace)
        self.engine = AsyncEngine(EngineConfig(target=self.model), ServerConfig(replicas=0, resume_timeout=0.1))

    async def start(self) -> None:
        await self.engine.start()
        await self.engine._fleet.set_members([self.target.member])
        await until(lambda: self.engine.health.ready)

    @property
    def idle(self) -> bool:
        return not open_requests(self.engine) and not self.target.engine.busy

    async def close(self) -> None:
        await self.engine.close()
        self.target.close()


@dataclass
class Models:
    small: Side
    large: Side

    def ask(self, threshold: float, params: SamplingParams = PARAMS, count: int = 3) -> CascadeStream:
        policy = CascadePolicy(name="auto", small=SmallModelConfig(target="x"), threshold=threshold, tokens=4)
        self.answer = CascadeAnswer()
        cascade: Any = SimpleNamespace(policy=policy, small=self.small.engine, large=self.large.engine)
        asked = [EngineRequest(prompt, params) for prompt in self.prompts[:count]]
        return CascadeStream(cascade, self.answer, "large", True, asked)

    @cached_property
    def prompts(self) -> list[list[int]]:
        return [self.large.engine.tokenizer.encode(text) for text in SNIPPETS]


async def outputs_of(stream: CascadeStream) -> list[list[int]]:
    outputs: dict[int, list[int]] = {}
    while True:
        try:
            update = await anext(stream)
        except StopAsyncIteration:
            return [outputs[index] for index in sorted(outputs)]
        assert not update.delta.logprobs
        outputs.setdefault(update.index, []).extend(update.delta.tokens)


@pytest.fixture
def models(tmp_path: Path, llama: Path, draft: Path) -> Callable[..., object]:
    @asynccontextmanager
    async def both(pace: str = "") -> AsyncIterator[Models]:
        models = Models(Side(tmp_path, draft, pace), Side(tmp_path, llama, pace))
        try:
            await models.small.start()
            await models.large.start()
            yield models
            await until(lambda: models.small.idle and models.large.idle)
        finally:
            await models.small.close()
            await models.large.close()
        assert_idle(models.small.target.engine)
        assert_idle(models.large.target.engine)

    return both


def running(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 120.0))


def test_outputs_are_the_answering_models_own(models: Callable[..., object], llama: Path, draft: Path) -> None:
    settings = [SamplingParams(max_tokens=12, seed=3, n=n, **SETTINGS[i]) for n, i in ((1, 0), (2, 1), (3, 5), (2, 6))]
    expected = {}
    for model in (draft, llama):
        with make_engine(model) as engine:
            expected[model] = [run(engine, SNIPPETS[:3], [params] * 3) for params in settings]

    async def scenario() -> None:
        async with models() as both:  # type: ignore[attr-defined]
            for place, params in enumerate(settings):
                assert await outputs_of(both.ask(LEAST, params)) == expected[draft][place]
                assert (both.answer.side, both.answer.escalated) == ("small", None)
                assert await outputs_of(both.ask(NOBODY, params)) == expected[llama][place]
                assert both.answer.escalated == "confidence" and both.answer.confidence is not None

    running(scenario())


@pytest.mark.parametrize("threshold", [LEAST, NOBODY])
@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.03, 0.06])
def test_an_aborted_request_leaves_nothing(models: Callable[..., object], threshold: float, seconds: float) -> None:
    """Whichever model has it by then; each has a step in 5 ms."""

    async def scenario() -> None:
        async with models("target=5ms") as both:  # type: ignore[attr-defined]
            stream = both.ask(threshold)
            reading = asyncio.create_task(outputs_of(stream))
            await asyncio.sleep(seconds)
            reading.cancel()
            await asyncio.wait([reading])
            stream.abort()
            assert not open_requests(both.small.engine) and not open_requests(both.large.engine)

    running(scenario())


def test_a_small_model_that_is_lost_costs_time_alone(models: Callable[..., object]) -> None:
    async def scenario() -> None:
        async with models("target=20ms") as both:  # type: ignore[attr-defined]
            outputs = asyncio.create_task(outputs_of(both.ask(LEAST)))
            await until(lambda: both.small.target.engine.busy)
            both.small.target.close()
            both.small.target = InlineTarget(both.small.directory, both.small.model)  # that nobody dials
            assert len(await outputs) == 6 and both.answer.escalated == "unavailable"
            assert len(await outputs_of(both.ask(LEAST))) == 6 and both.answer.escalated == "unavailable"

    running(scenario())


@in_soak
def test_a_live_server(llama: Path, draft: Path, tmp_path: Path) -> None:
    (tmp_path / "cascade.toml").write_text(
        f'name = "auto"\ntags = ["hard"]\nthreshold = {LEAST}\n[small]\ntarget = "{draft}"\nkv_slots = 2048\n'
    )
    sampled = {"temperature": 0.8, "seed": 5, "max_tokens": 20}
    asked = {"model": "auto", "prompt": SNIPPETS[0], "return_token_ids": True, **sampled}
    expected = {}
    for model in (draft, llama):
        with make_engine(model) as engine:
            (expected[model],) = run(engine, [SNIPPETS[0]], [SamplingParams(**sampled)])
    with LiveServer(llama, cascade=tmp_path / "cascade.toml", served_model_name="big") as server:
        while not server.metric("pilotfish_cascade_ready"):
            pass
        assert server.pids("small") and server.pids("target")
        for tag, model, said in (("easy", draft, "small"), ("hard", llama, "large")):
            status, answer = server.post("/v1/completions", {**asked, "metadata": {"tag": tag}})
            assert status == 200 and answer["choices"][0]["token_ids"] == expected[model]
            assert answer["pilotfish"]["answered_by"] == ("big" if said == "large" else "/".join(draft.parts[-2:]))
        assert [model["id"] for model in server.get("/v1/models")[1]["data"]] == ["big", "auto"]
