"""Time to the first token of requests that begin as earlier ones did: with the KV of those, and without."""

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from dialogues import Ask, TextSupply, play, scripts_of
from harness import PAIR, Options, run

from pilotfish.cli.bench.contestants import OFF, check_drafter, take_turns
from pilotfish.cli.bench.report import ProgressBar, Report, Row, Spread, equal_share, ratios
from pilotfish.core.cache.tiers import save_coldest
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.errors import EngineError

HOST, DISK = "host", "disk"
#: How the engines of our contestants differ. Those with tiers find nothing in their pools: others had need of it.
OURS: dict[str, dict[str, Any]] = {
    OFF: {"prefix_cache": False},
    "device": {"prefix_cache": True},
    HOST: {"prefix_cache": True, "kv_host_memory": 2.0},
    DISK: {"prefix_cache": True},
}
#: Seconds that an object may take to be written.
WRITTEN = 60.0
#: Tokens of a first request, which is no part of any workload.
WARM_UP = 600


@dataclass(frozen=True)
class Answered:
    """A request's way to its first tokens, and what came of it."""

    prompt_tokens: int
    cached_tokens: int  # 0 where it is not told
    seconds: float  # until every sample had its first token
    text: str  # of the first sample
    outputs: list[list[int]]


#: Requests of one round, by workload, in order.
Played = dict[str, list[tuple[Ask, Answered]]]


def run_reuse(options: Options, progress: ProgressBar) -> Report:
    """Every contestant plays all scripts in each of `repeats` rounds."""
    rounds = options.repeats
    contestants = {name: partial(_round, options, name) for name in OURS}
    progress.total = rounds * len(contestants)
    return Report(figures_of(take_turns(contestants, range(rounds), warm_up=0, done=progress)))


def _round(options: Options, name: str, turn: int) -> Played:
    """All scripts in a new engine."""
    with (
        tempfile.TemporaryDirectory(prefix="pilotfish-kv-") as directory,
        _engine_of(options, name, directory) as engine,
    ):
        answer = partial(ask_engine, engine, max_tokens=options.max_tokens)
        texts = TextSupply(options.rows(), engine.tokenizer)
        answer(Ask(texts.take(WARM_UP), timed=False))
        played = play_all(answer, texts, options.shared, turn)
        check_drafter(engine)
        return played


def _engine_of(options: Options, name: str, directory: str) -> Engine:
    on_disk = {"kv_disk": Path(directory, "kv")} if name == DISK else {}
    return Engine(options.engine_config(**OURS[name], **on_disk))


def _forget(engine: Engine) -> None:
    """What is idle in the pool goes, as if others had need of all slots; to tiers, as it always does."""
    cache, tiers = engine.worker.scheduler.cache, engine.tiers
    if cache is None or tiers is None:
        return
    save_coldest(cache, tiers, cache.pool.capacity)
    if not tiers.settle(WRITTEN):
        raise EngineError(f"KV was not written within {WRITTEN:g} seconds")
    cache.evict(cache.pool.capacity)


def ask_engine(engine: Engine, ask: Ask, max_tokens: int, cache_salt: str | None = None) -> Answered:
    """Generates the answers of an idle engine to the end; greedily, and as long for all contestants."""
    _forget(engine)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, n=ask.samples)
    began, seconds = time.perf_counter(), 0.0
    samples = engine.submit(ask.text, params, cache_salt)
    while engine.busy:
        engine.step()
        if not seconds and all(sample.token_ids for sample in samples):
            seconds = time.perf_counter() - began
    first = samples[0].request
    outputs = [sample.token_ids for sample in samples]
    return Answered(first.num_prompt_tokens, first.stats.cached_tokens, seconds, samples[0].text, outputs)


def play_all(ask_one: Callable[[Ask], Answered], texts: TextSupply, shared: int, turn: int) -> Played:
    """All scripts, one request at a time. Each round has texts of its own, which are the same for all contestants."""
    played: Played = {}

    def answer(workload: str, asked: Ask) -> str:
        answered = ask_one(asked)
        played.setdefault(workload, []).append((asked, answered))
        return answered.text

    for workload, script in scripts_of(texts, shared, f"# Round {turn}").items():
        play(script, partial(answer, workload))
    return played


def figures_of(rounds: Mapping[str, Sequence[Played]]) -> dict[str, Any]:
    """Figures of the timed requests, and the share of our outputs that are the same with reuse."""
    rows = []
    for workload in rounds[OFF][0]:
        timed = {name: timed_of(workload, played) for name, played in rounds.items()}
        rows += [row_of(workload, name, timed) for name in timed]
    outputs = {name: [one.outputs for played in rounds[name] for _, one in chain(*played.values())] for name in OURS}
    equal = {name: equal_share(own, outputs[OFF]) for name, own in outputs.items() if name != OFF}
    return {"first_tokens": rows, "equal_outputs": equal}


def timed_of(workload: str, rounds: Sequence[Played]) -> list[Answered]:
    return [answered for played in rounds for ask, answered in played[workload] if ask.timed]


def row_of(workload: str, name: str, timed: Mapping[str, Sequence[Answered]]) -> Row:
    """`speedup` is the time of who computes everything again over the contestant's own, request by request."""
    own, base = timed[name], timed[OFF]
    return {
        "workload": workload,
        "contestant": name,
        "requests": len(own),
        "prompt_tokens": statistics.median(one.prompt_tokens for one in own),
        "cached_tokens": statistics.median(one.cached_tokens for one in own),
        "first_token_ms": Spread.of([1000 * one.seconds for one in own]),
        "speedup": ratios([one.seconds for one in base], [one.seconds for one in own]),
    }


if __name__ == "__main__":
    run(run_reuse, *PAIR, mode="off", threads=2, kv_slots=32768, max_tokens=16, shared=2000, repeats=3)
