"""The canary: what it replays, when, and what it says of it."""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from http_double import IDENTITY, Engine, Health, Server, Submitted, Update, counted, saying

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.errors import EngineError
from pilotfish.server.observe.metrics import ServerMetrics
from pilotfish.server.traffic.canary import LONGEST, WAITING, Canary, ReplayedRequest
from pilotfish.server.traffic.rollout import Rollout


@dataclass
class Rig:
    engine: Engine
    idle: bool = True
    metrics: ServerMetrics = field(default_factory=lambda: ServerMetrics("tiny"))

    def __post_init__(self) -> None:
        self.canary = Canary(self.engine, self.metrics, lambda: self.idle)  # type: ignore[arg-type]

    def results(self) -> dict[str, float]:
        replays = counted(self.metrics, "pilotfish_canary_replays_total{")
        return {name.split('"')[1]: count for name, count in replays.items() if count}

    def run(self, monkeypatch: pytest.MonkeyPatch, turns: int = 50) -> None:
        monkeypatch.setattr("pilotfish.server.traffic.canary.LOOK", 0.0)

        async def for_a_while() -> None:
            task = asyncio.create_task(self.canary.run())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()

        asyncio.run(for_a_while())


@pytest.fixture
def rig(engine: Engine) -> Rig:
    engine.says("a = b + c")
    return Rig(engine)


def replay(rig: Rig, text: str = "a = b + c", **fields: Any) -> ReplayedRequest:
    output = rig.engine.tokenizer.encode(text, add_special_tokens=False)
    given = {"id": "1", "variant": "next", "prompt": [5, 6], "params": PARAMS, "output": output}
    return ReplayedRequest(**{**given, **fields})


PARAMS = SamplingParams(seed=7, max_tokens=64)


def test_equal_tokens_are_counted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.canary.offer(replay(rig))
    rig.run(monkeypatch)
    (submitted,) = rig.engine.submitted
    assert (submitted.tokens, submitted.params.seed, submitted.max_nodes) == ([5, 6], 7, 0)
    assert submitted.cache_salt, "no KV of the first time is found"
    assert rig.results() == {"equal": 1.0}


@pytest.mark.parametrize(("dtype", "level"), [("float32", logging.ERROR), ("bfloat16", logging.INFO)])
@pytest.mark.parametrize("text", ["a = b - c", "a = b", "a = b + c + d"])
def test_an_unequal_token_is_an_error_in_float32(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str, dtype: str, level: int
) -> None:
    rig.engine.health = Health(identity=msgspec.structs.replace(IDENTITY, dtype=dtype))
    rig.canary.offer(replay(rig, text))
    with caplog.at_level(logging.INFO, logger="pilotfish.server.traffic.canary"):
        rig.run(monkeypatch)
    assert rig.results() == {"unequal": 1.0}
    (told,) = [record for record in caplog.records if "other tokens" in record.message]
    assert told.levelno == level and "variant next" in told.message and dtype in told.message


def test_it_waits_for_idle_targets_and_gives_way(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.idle = False
    rig.canary.offer(replay(rig))
    rig.run(monkeypatch)
    assert not rig.engine.submitted

    def script(submitted: Submitted) -> Iterable[Update]:
        for update in saying(rig.engine.tokenizer, "a = b + c")(submitted):
            yield update  # type: ignore[misc]
            rig.idle = False  # somebody has come

    rig.engine.script, rig.idle = script, True
    rig.run(monkeypatch)
    assert rig.engine.submitted[0].aborted and rig.results() == {"given_up": 1.0}
    rig.engine.script, rig.idle = saying(rig.engine.tokenizer, "a = b + c"), True
    rig.run(monkeypatch)
    assert rig.results() == {"given_up": 1.0, "equal": 1.0}, "it waited again"


def test_a_broken_step_is_no_verdict(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.engine.script = lambda _: [EngineError("step failed")]
    rig.canary.offer(replay(rig))
    rig.run(monkeypatch, turns=12)
    assert set(rig.results()) == {"given_up"}


def test_few_wait_and_none_that_is_long(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.canary.offer(replay(rig, prompt=[1] * LONGEST))
    for number in range(3 * WAITING):
        rig.canary.offer(replay(rig, prompt=[number, 1]))
    rig.run(monkeypatch, turns=400)
    newest = range(2 * WAITING, 3 * WAITING)
    assert sorted(one.tokens[0] for one in rig.engine.submitted) == list(newest)


@pytest.mark.parametrize(("share", "count"), [(1.0, 4), (0.0, 0)])
def test_a_server_offers_what_was_speculated_for(engine: Engine, tmp_path: Path, share: float, count: int) -> None:
    file, offered = tmp_path / "rollout.toml", list[ReplayedRequest]()
    file.write_text(f'canary = {share}\n[[variant]]\nname = "only"\n')
    rollout = Rollout(file, metrics := ServerMetrics("tiny"))
    rollout.offer = offered.append
    server = Server(engine, metrics=metrics, rollout=rollout)
    engine.says("a = b + c")
    others: list[dict[str, Any]] = [{"n": 2}, {"prompt": ["x", "y"]}, {"speculation": {"mode": "off"}}]
    for fields in ({}, {"stream": True}, {"seed": 9}, {"max_tokens": 64}, *others):
        assert server.ask(**fields).status == 200
    assert len(offered) == count
    tokens = engine.tokenizer.encode("a = b + c", add_special_tokens=False)
    assert all(list(one.output) == tokens and one.params.seed is not None for one in offered)
    assert not count or offered[2].params.seed == 9
