"""Which replica gets a request: routing by prefixes and load beside round robin and power of two, on paced replicas."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from pilotfish.bench.contestants import take_turns
from pilotfish.bench.offered_loads import TokenRing, tokens_of
from pilotfish.bench.options import BenchOptions
from pilotfish.bench.report import ProgressBar, Report, Row, percentile
from pilotfish.bench.talks import AGENTS, CONVERSATIONS, EVEN, HOT, Talk, talks
from pilotfish.config.engine import EngineConfig
from pilotfish.config.hardware.pace import Paces
from pilotfish.config.server import ServerConfig
from pilotfish.core.cache.tiers import DEVICE
from pilotfish.core.routing.held_prefixes import Replica
from pilotfish.core.routing.router import PowerOfTwo, ReplicaLoad, RoundRobin, Route, Router, RouteRequest, Routing
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.targets.async_engine import AsyncEngine
from pilotfish.engine.targets.replica import RoutedTokens
from pilotfish.errors import EngineError
from pilotfish.model.loading.metadata import load_tokenizer
from pilotfish.wire.serving import EngineRequest, StepReport

PREFIX, ROUND_ROBIN, POWER_OF_TWO = "prefix", "round robin", "power of two"
POLICIES: dict[str, Callable[[], Routing]] = {PREFIX: Router, ROUND_ROBIN: RoundRobin, POWER_OF_TWO: PowerOfTwo}
WORKLOADS = CONVERSATIONS, AGENTS, HOT, EVEN
#: Seconds that a client waits in the mean before it goes on; before anything counts; that a fleet may take to start.
PAUSE, WARM_UP, START = 0.3, 3.0, 120.0
#: What the tokens a second may lose where nothing is shared.
EVEN_PROMISE = 0.98
#: Of its pace, by which a forward may be longer.
LATE = 1.1


@dataclass(frozen=True)
class BegunAnswer:
    """A request's first token, and what was found of its prompt."""

    prompt: int
    found: int
    seconds: float


@dataclass
class Played:
    """What came of a workload in its seconds."""

    counts: bool = False  # whether they have begun
    begun: list[BegunAnswer] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    expected: int = 0  # tokens of prompts that were believed to be held
    chosen: Counter[Replica] = field(default_factory=Counter)
    forwards: int = 0
    overruns: int = 0


class CountedRouting:
    """A policy, and how often it has chosen each replica."""

    def __init__(self, policy: Routing) -> None:
        self.policy, self.held = policy, policy.held
        self.chosen: Counter[Replica] = Counter()

    def choose(self, request: RouteRequest, candidates: Sequence[Replica]) -> Route:
        route = self.policy.choose(request, candidates)
        self.chosen[route.replica] += 1
        return route

    def undo(self, route: Route) -> None:
        self.policy.undo(route)

    def ended(self, route: Route) -> None:
        self.policy.ended(route)

    def told(self, replica: Replica, load: ReplicaLoad) -> None:
        self.policy.told(replica, load)

    def forget(self, replica: Replica) -> None:
        self.policy.forget(replica)


def run_routing(options: BenchOptions, progress: ProgressBar) -> Report:
    """Policies take turns, each with a fleet of its own, and play all workloads; `repeats` times."""
    config = replace(options.engine_config(mode="off", prefix_cache=True), draft=None)
    tokens = tokens_of(options.rows(), load_tokenizer(config.target))
    contestants = {name: partial(_play_all, options, config, tokens, policy) for name, policy in POLICIES.items()}
    progress.total = len(contestants) * options.repeats
    rounds = take_turns(contestants, range(options.repeats), warm_up=0, done=progress)
    rows = list(routing_rows(rounds))
    return Report({"workloads": rows, "even_promise": EVEN_PROMISE, "even_holds": even_holds(rows)})


# -- a fleet and its clients


def _play_all(
    options: BenchOptions, config: EngineConfig, tokens: Sequence[int], policy: Callable[[], Routing], turn: int
) -> dict[str, Played]:
    return asyncio.run(_with_fleet(options, config, tokens, CountedRouting(policy()), turn))


async def _with_fleet(
    options: BenchOptions, config: EngineConfig, tokens: Sequence[int], routing: CountedRouting, turn: int
) -> dict[str, Played]:
    engine = AsyncEngine(config, ServerConfig(replicas=options.replicas), routing=routing)
    await engine.start()
    try:
        async with asyncio.timeout(START):
            while len([one for one in engine.health.replicas if one.ready]) < options.replicas:
                if engine.health.failed:
                    raise EngineError(engine.health.reason)
                await asyncio.sleep(0.05)
        return {kind: await _play(options, engine, routing, kind, TokenRing(tokens, turn), turn) for kind in WORKLOADS}
    finally:
        await engine.close()


async def _play(
    options: BenchOptions, engine: AsyncEngine, routing: CountedRouting, kind: str, ring: TokenRing, turn: int
) -> Played:
    """Clients that ask one request after the other, for so many seconds."""
    played, said = Played(), talks(kind, ring, options.shared, turn)
    engine.observe = _watcher(played, engine.config)
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, min_tokens=options.max_tokens)
    draws = np.random.default_rng(turn).spawn(options.streams)
    clients = [asyncio.create_task(_client(engine, said, params, played, kind, draw)) for draw in draws]
    await asyncio.wait(clients, timeout=WARM_UP, return_when=asyncio.FIRST_EXCEPTION)
    played.counts, engine.routed, routing.chosen, began = True, RoutedTokens(), played.chosen, time.perf_counter()
    await asyncio.wait(clients, timeout=options.seconds, return_when=asyncio.FIRST_EXCEPTION)
    played.counts, played.seconds, played.expected = False, time.perf_counter() - began, engine.routed.expected
    for client in clients:
        client.cancel()
    for outcome in await asyncio.gather(*clients, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome
    await _drain(engine)
    return played


async def _drain(engine: AsyncEngine) -> None:
    """Until nothing runs of what was asked."""
    async with asyncio.timeout(START):
        while any(one.status is None or one.status.running or one.requests for one in engine.health.replicas):
            await asyncio.sleep(0.05)


async def _client(
    engine: AsyncEngine,
    talks: Iterator[Talk],
    params: SamplingParams,
    played: Played,
    salt: str,
    draw: np.random.Generator,
) -> None:
    await asyncio.sleep(draw.random() * PAUSE)
    for talk in talks:
        said = list(talk.begin)
        for message in talk.messages:
            said += message
            said += await _ask(engine, said, params, played, salt, talk.name)
            await asyncio.sleep(draw.exponential(PAUSE))


async def _ask(
    engine: AsyncEngine, said: Sequence[int], params: SamplingParams, played: Played, salt: str, session: str
) -> list[int]:
    asked, answer = time.perf_counter(), list[int]()
    stream = engine.submit([EngineRequest(list(said), params, salt, session=session)])
    try:
        async for update in stream:
            if not answer and played.counts:
                found = update.delta.cached.get(DEVICE, 0)
                played.begun.append(BegunAnswer(len(said), found, time.perf_counter() - asked))
            answer += update.delta.tokens
    finally:
        stream.abort()
    return answer


def _watcher(played: Played, config: EngineConfig) -> Callable[[StepReport, Any], None]:
    pace = Paces.parse(config.pace).target

    def observe(step: StepReport, _: Any) -> None:
        if not played.counts:
            return
        played.tokens += step.committed
        played.forwards += 1
        played.overruns += pace is not None and step.forward > LATE * pace.seconds(step.rows)

    return observe


# -- figures


def routing_rows(rounds: Mapping[str, Sequence[Mapping[str, Played]]]) -> Iterator[Row]:
    """Of all rounds together. `over` are ratios to power of two: of times to first tokens, and of tokens a second.
    `busiest` is what the replica with most requests had, over the mean of all."""
    for kind in WORKLOADS:
        figures = {name: _figures([one[kind] for one in played]) for name, played in rounds.items()}
        base = figures[POWER_OF_TWO]
        for name, row in figures.items():
            over = {f"p{p}_over": row[f"first_token_p{p}_ms"] / base[f"first_token_p{p}_ms"] for p in (50, 95)}
            speed = {"tokens_per_second_over": row["tokens_per_second"] / base["tokens_per_second"]}
            yield {"workload": kind, "policy": name, **row, **over, **speed}


def _figures(played: Sequence[Played]) -> Row:
    begun = [one for each in played for one in each.begun]
    if not begun:
        raise EngineError("bench: no request had its first token; give more --seconds")
    prompt, times = sum(one.prompt for one in begun), [1000 * one.seconds for one in begun]
    busiest = [max(each.chosen.values()) / each.chosen.total() for each in played]
    return {
        "requests": len(begun),
        "prompt_tokens": prompt / len(begun),
        "found": sum(one.found for one in begun) / prompt,
        "expected": sum(each.expected for each in played) / prompt,
        "first_token_p50_ms": percentile(times, 0.5),
        "first_token_p95_ms": percentile(times, 0.95),
        "tokens_per_second": sum(each.tokens for each in played) / sum(each.seconds for each in played),
        "busiest": max(busiest) * len(played[0].chosen),
        "overruns": sum(each.overruns for each in played) / max(sum(each.forwards for each in played), 1),
    }


def even_holds(rows: Sequence[Row]) -> bool:
    """Whether routing by prefixes keeps the tokens a second of the better of the others, where nothing is shared."""
    speeds = {row["policy"]: row["tokens_per_second"] for row in rows if row["workload"] == EVEN}
    own = speeds.pop(PREFIX)
    return bool(own >= EVEN_PROMISE * max(speeds.values()))
