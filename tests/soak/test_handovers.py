"""A server under load whose prefill workers and draft are killed and stopped at random, and whose network stalls,
swallows and is cut: no request fails, no output is another. For less than ten minutes:

SOAK_SECONDS=60 pytest tests/soak/test_handovers.py -s
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field

import pytest
import uvloop
from bad_relay import HOST, BadRelay
from programs import Program, start_server
from server_load import QUEUE, STREAMED, Asked, Known, Tally, alone, client, joined_prompts, metrics_of, post, settled
from support import SNIPPETS

from pilotfish.cli.bench.serving.client import COMPLETIONS, Answer
from pilotfish.cli.bench.workload import Prompt
from pilotfish.config.engine import EngineConfig
from pilotfish.engine.pairs import resolve_pair
from pilotfish.engine.processes.launch import Supervisor
from pilotfish.engine.processes.process import WorkerSpec
from pilotfish.model.loading.metadata import load_tokenizer

SECONDS, STREAMS = float(os.environ.get("SOAK_SECONDS", "600")), 32
#: Distinct requests, and tokens of their prompts from the shortest to the longest.
REQUESTS, SHORTEST, LONGEST = 48, 40, 2500
#: Share of streams that clients break off, and of requests whose KV nobody has: their tenant is a new one.
ABORTS, SALTED = 0.1, 0.7
#: Seconds between two harms, and that one lasts, at most.
BETWEEN, LASTS = 4.0, 2.5
SLOTS = 16384
PAIR = resolve_pair("pycode")
#: A pool whose memory is not to be had elsewhere, as that of another host: its segments are sent.
REMOTE = """
import sys, msgspec
from pilotfish.cli import main
from pilotfish.kv.arena import Arena
offer = Arena.offer
Arena.offer = lambda arena: msgspec.structs.replace(offer(arena), nonce=bytes(16))
sys.exit(main(sys.argv[1:]))
"""
#: Lines of a server's log that no fault elsewhere explains.
BROKEN = ("KV slots leak", "a job failed", "could not be handled", "Traceback")


def requests() -> list[Asked]:
    """Prompts of all lengths; of some of them two outputs."""
    tokenizer, draw = load_tokenizer(PAIR.target), random.Random(1)
    texts = [Prompt(f"own/{index}", text) for index, text in enumerate(SNIPPETS)]
    asked = []
    for index in range(REQUESTS):
        tokens = round(SHORTEST * (LONGEST / SHORTEST) ** (index / (REQUESTS - 1)))
        prompt = joined_prompts(texts, tokenizer, tokens, first=index)
        sampling = {"temperature": 0.8 * (index % 2), "n": 1 + (index % 8 == 0), "seed": 1000 + index}
        told = {"max_tokens": draw.randint(8, 48), "ignore_eos": True, "speculation": {"detail": True}, **STREAMED}
        asked.append(Asked("completion", COMPLETIONS, {"prompt": prompt, **sampling, **told}))
    return asked


@pytest.fixture(scope="module")
def known() -> list[Known]:
    """What a server answers that computes everything itself, without a draft."""
    config = EngineConfig(target=PAIR.target, dtype="float32", kv_slots=SLOTS)
    with start_server(config, QUEUE) as server, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(alone(server.told["url"], requests()))


# -- processes


@dataclass
class World:
    """A server with a draft, and the prefill workers of it: on this host, and behind a network."""

    server: Program
    prefills: Callable[[], dict[str, int]]  # ids of the processes
    network: BadRelay

    @property
    def url(self) -> str:
        url: str = self.server.told["url"]
        return url

    @property
    def victims(self) -> dict[str, int]:
        """Processes that may be killed."""
        drafts = {name: pid for name, pid in self.server.processes().items() if name.startswith("draft")}
        return {**self.prefills(), **drafts}

    @property
    def log(self) -> str:
        return os.pread(self.server._log.fileno(), 1 << 26, 0).decode(errors="replace")


CONFIG = EngineConfig(target=PAIR.target, draft=PAIR.draft, mode="async", dtype="float32", kv_slots=SLOTS)


@contextmanager
def of_pools() -> Iterator[World]:
    """One on this host, one behind a network."""
    with socket.create_server((HOST, 0)) as free:
        _, port = free.getsockname()
    supervisor = Supervisor()
    with closing(supervisor), BadRelay((HOST, port)) as network:
        here = f"ipc://{supervisor.directory}/prefill"
        local = _prefill("prefill 0", here, "-m", "pilotfish")
        supervisor.start([local, _prefill("prefill 1", f"tcp://{HOST}:{port}", "-c", REMOTE)])
        pools = f"--prefill-pool={here},{network.endpoint}"
        with start_server(CONFIG, [pools, "--prefill-threshold=32", *QUEUE]) as server:

            def prefills() -> dict[str, int]:
                return {state.name: state.pid for state in supervisor.poll() if state.pid is not None}

            yield World(server, prefills, network)


def _prefill(name: str, listen: str, *program: str) -> WorkerSpec:
    """Forwards are small, and there is little memory: hand-overs take many of both."""
    small = {"max-rows": 128, "segment-memory": 0.0625, "lease": 3}
    options = {"name": name, "listen": listen, "model": PAIR.target, "dtype": "float32", "kv-slots": SLOTS, **small}
    given = [f"--{option}={value}" for option, value in options.items()]
    return WorkerSpec(name, [sys.executable, *program, "prefill", *given])


# -- harm


async def harmed(world: World, draw: random.Random, over: asyncio.Event) -> Counter[str]:
    """Something is killed, stopped or cut every few seconds, until it is `over`; how often each."""
    done = Counter[str]()
    while not over.is_set():
        done[await draw.choice([_kill, _kill, _stop, _network, _network])(world, draw)] += 1
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), draw.uniform(0.2, BETWEEN))
    return done


async def _kill(world: World, draw: random.Random) -> str:
    name, pid = draw.choice(sorted(world.victims.items()) or [("nobody", 0)])
    if pid:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return f"kill {name}"


async def _stop(world: World, draw: random.Random) -> str:
    name, pid = draw.choice(sorted(world.victims.items()) or [("nobody", 0)])
    if pid:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(draw.uniform(0.1, LASTS))
            os.kill(pid, signal.SIGCONT)
    return f"stop {name}"


async def _network(world: World, draw: random.Random) -> str:
    network = world.network
    harms: dict[str, Callable[[], None]] = {
        "stall": network.stall,
        "swallow there": lambda: network.swallow("there"),
        "swallow back": lambda: network.swallow("back"),
        "cut": network.cut,
    }
    name = draw.choice(list(harms))
    harms[name]()
    await asyncio.sleep(draw.uniform(0.05, LASTS))
    network.heal()
    return name


# -- load


@dataclass
class HandedOver(Tally):
    """With what answers told of their hand-overs."""

    outcomes: Counter[str] = field(default_factory=Counter)
    midway: Counter[str] = field(default_factory=Counter)  # of those that ended early after some of it had come

    def add(self, known: Known, answer: Answer, *, cut: bool) -> None:
        super().add(known, answer, cut=cut)
        for event in answer.events:
            for report in event.data.get("pilotfish", {}).get("handovers", ()):
                self.outcomes[report["outcome"]] += 1
                self.midway[report["outcome"]] += report["outcome"] != "whole" and report["size"] > 0


async def loaded(world: World, known: Sequence[Known], tally: Tally, seconds: float) -> Counter[str]:
    over, until = asyncio.Event(), time.monotonic() + seconds
    harming = asyncio.create_task(harmed(world, random.Random(3), over))
    try:
        await asyncio.gather(*(client(world.url, ABORTS, known, tally, until, seed, SALTED) for seed in range(STREAMS)))
    finally:
        over.set()
    return await harming


async def eventually(true: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not await asyncio.to_thread(true):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.5)


def by_pool(url: str, name: str) -> dict[str, float]:
    """A metric's value for each pool."""
    return metrics_of(url, lambda sample: sample.labels["pool"] if sample.name == name else "")


async def idle(world: World) -> None:
    """All pools are there again; nothing is held, here or there."""
    url = world.url
    await eventually(lambda: list(by_pool(url, "pilotfish_prefill_pool_ready").values()) == [1, 1], 120)
    await eventually(lambda: not any(by_pool(url, "pilotfish_prefill_pool_leases").values()), 30)
    await eventually(lambda: set(by_pool(url, "pilotfish_prefill_pool_free_slots").values()) == {SLOTS}, 30)


def test_whatever_is_harmed_no_request_fails_and_no_output_is_another(known: list[Known]) -> None:
    tally, after = HandedOver(), HandedOver()
    with of_pools() as found, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(eventually(lambda: list(by_pool(found.url, "pilotfish_prefill_pool_ready").values()) == [1, 1], 120))
        harms = runner.run(loaded(found, known, tally, SECONDS))
        held = settled(lambda: metrics_of(found.url))
        runner.run(idle(found))
        metrics = metrics_of(found.url)
        runner.run(again(found, known, after))
        runner.run(idle(found))
        log = found.log
    report = {"seconds": SECONDS, "harms": dict(harms), "statuses": dict(tally.statuses), "aborted": tally.aborted}
    report |= {"failed": tally.failed, "unequal": tally.unequal.total(), "handovers": dict(tally.outcomes)}
    report |= {"midway": dict(+tally.midway), "afterwards": dict(after.outcomes), "held": held}
    told = ("handover_tokens", "handover_bytes", "prefill_pool_refused")
    report |= {name: metrics[f"pilotfish_{name}_total"] for name in told}
    print(json.dumps(report))  # noqa: T201  # pytest shows it with -s, and if the test fails
    for one in (tally, after):
        assert one.statuses.keys() == {"200"} and not (one.failed or one.unequal.total() or any(held.values()))
    assert tally.aborted > 0 and sum(tally.outcomes.values()) > len(known)
    assert tally.midway.total() > 0 and any(name.startswith("kill prefill") for name in harms)
    assert after.outcomes.keys() == {"whole"} and after.outcomes["whole"] >= len(known)
    assert not [line for line in log.splitlines() if any(word in line for word in BROKEN)]


async def again(world: World, known: Sequence[Known], tally: Tally) -> None:
    """Each request once more, undisturbed."""
    for one in known:
        answer = await post(
            world.url, one.asked.path, {**one.asked.body, "cache_salt": f"again {one.asked.body['seed']}"}
        )
        tally.add(one, answer, cut=False)
