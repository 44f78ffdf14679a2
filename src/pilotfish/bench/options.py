"""Benches by command, and their options: the conditions under which they measure. Quick to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pilotfish.config import EngineConfig
from pilotfish.core.sampling_params import MAX_TOKENS
from pilotfish.options import REQUIRED, Option, option, options_of, pick

if TYPE_CHECKING:
    from pilotfish.bench.workload import Prompt, Workload
    from pilotfish.pairs import PairDirs

MANY = 1 << 20
#: Settings among which the best sync one is sought.
SYNC_GRID = "2x2:8,3x2:8,4x2:8,3x4:16,4x4:16,5x4:16,4x8:16,6x8:16"
#: As a 70B target and a 1B draft.
PACE = "target=10.4ms,draft=2.6ms"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of all benches, of which each has some; `engine` holds those of its EngineConfig. Lists in texts are
    separated by commas."""

    json: Annotated[bool, option("JSON on stdout and nothing else.")] = False
    out: Annotated[Path, option("Write the JSON to this file as well.")] | None = None
    pair: Annotated[str, option("pycode, or pycode@<N>m.  [default: pycode]")] | None = None
    target: Annotated[Path, option("A target's directory, with --draft, instead of a pair.")] | None = None
    draft: Annotated[Path, option("A draft's directory, with --target.")] | None = None
    prompts: Annotated[Path, option("JSON Lines of id and turns, or id and prompt.")] = Path()
    limit: Annotated[int, option("Only the first rows of the file.", 1, MANY)] | None = None
    max_tokens: Annotated[int, option("New tokens of each sequence.", 1, MAX_TOKENS)] = 96
    repeats: Annotated[int, option("Measurements of each kind.", 1, MANY)] = 3
    batches: Annotated[int, option("Sequences of a round, in multiples of the concurrency.", 1, MANY)] = 2
    seconds: Annotated[float, option("Of each measurement.", 0.01, 1 << 20)] = 10.0
    temperature: Annotated[float, option("Sampling temperature.")] = 0.8
    temperatures: Annotated[str, option("Separated by commas.")] = "0.8,0"
    concurrency: Annotated[int, option("Sequences at a time.", 1, MANY)] = 1
    concurrencies: Annotated[str, option("Sequences at a time, separated by commas.", names=("--concurrency",))] = "1"
    streams: Annotated[int, option("Sequences at a time, of each target.", 1, MANY)] = 1
    compared: Annotated[
        Literal["sync", "async"],
        option("sync: every drafter; async: draft workers, also paced.", names=("--mode",)),
    ] = "sync"
    shard: Annotated[str, option("i/n: every n-th prompt from the i-th on.")] = "1/1"
    thread_counts: Annotated[str, option("The target's, separated by commas.", names=("--threads",))] = "1,2"
    fixed: Annotated[str, option("Nodes of the fixed trees, separated by commas.")] = "2,4,8,16"
    sync: Annotated[str, option("LEVELSxWIDTH:NODES, joined by a comma.")] = SYNC_GRID
    round_trips: Annotated[str, option("Milliseconds, separated by commas.")] = "0,1,5,15,50"
    mbit: Annotated[float, option("Mbit/s of the network, in each direction.", 0.001, MANY)] = 100.0
    weights: Annotated[str, option("Of the targets that share a pool, separated by commas.")] = "3,1"
    pause: Annotated[float, option("Seconds for which the draft is stopped.", 0.01, 1 << 20)] = 5.0
    paces: Annotated[str, option("Emulated devices, joined by a space; none: unpaced.", names=("--pace",))] = (
        "target=20ms none"
    )
    engine: Mapping[str, Any] = field(default_factory=dict)

    def models(self) -> PairDirs:
        from pilotfish.bench.workload import choose_models

        return choose_models(self.pair, self.target, self.draft)

    def engine_config(self, **changes: Any) -> EngineConfig:
        """A sync engine with an LM drafter, unless options or `changes` say otherwise."""
        models = self.models()
        base = {"target": models.target, "draft": models.draft, "mode": "sync", "drafter": "lm"}
        return EngineConfig(**{**base, **self.engine, **changes})

    def rows(self) -> list[Prompt]:
        from pilotfish.bench.workload import load_prompts, shard_of

        return shard_of(load_prompts(self.prompts, self.limit), self.shard)

    def workload(self, temperature: float | None = None) -> Workload:
        from pilotfish.bench.workload import Workload

        return Workload(self.rows(), self.temperature if temperature is None else temperature, self.max_tokens)


@dataclass(frozen=True)
class Bench:
    """A command: the function that measures, as `module.function` of this package, and the names of its options."""

    measure: str
    names: tuple[str, ...]
    defaults: dict[str, Any]  # other than those declared
    timed: bool  # whether the report describes the machine, whose speed is probed for that

    def declared(self) -> list[Option]:
        own = [name for name in self.names if name in options_of(BenchOptions)]
        engine = [name for name in self.names if name not in own]
        defaults = {"prompts": REQUIRED, **self.defaults}
        return pick(BenchOptions, *own, **defaults) + pick(EngineConfig, *engine, **defaults)

    def options(self, **given: Any) -> BenchOptions:
        """Checks the given options and adds this bench's defaults."""
        values = {one.name: given.get(one.name, one.default) for one in self.declared()}
        for one in self.declared():
            one.check(values[one.name])
        own = {name: values.pop(name) for name in list(values) if name in options_of(BenchOptions)}
        return BenchOptions(**own, engine=values)

    def conditions(self, options: BenchOptions) -> dict[str, Any]:
        """Conditions for a report: all options, with models and prompts resolved."""
        found = {**vars(options), **options.engine}
        chosen = {name: found[name] for name in self.names if name not in ("json", "out")}
        if "target" in self.names:
            models = options.models()
            chosen |= {"target": str(models.target), "draft": str(models.draft)}
        return chosen | ({"prompts": len(options.rows())} if "prompts" in self.names else {})


RANDOM = ("json", "out", "dtype")  # random weights
MODELS = (*RANDOM, "pair", "target", "draft")
PROMPTS = (*MODELS, "prompts", "limit", "max_tokens")
TREE = (*PROMPTS, "threads", "nodes", "levels", "width")
POOLS = (*PROMPTS, "pace", "temperature", "nodes", "leaves", "budget")
SERVER = (*PROMPTS, "mode", "threads", "budget", "kv_slots")
ROUNDS = "concurrencies temperature batches repeats"
ASYNC = "concurrencies pace sync nodes leaves drafter repeats"
ON_SERVER: dict[str, Any] = {"dtype": "float32", "kv_slots": 65536}
UP_TO_32 = "1,2,4,8,16,32"


def bench(measure: str, group: tuple[str, ...], names: str = "", *, timed: bool = True, **defaults: Any) -> Bench:
    return Bench(measure, (*group, *names.split()), defaults, timed)


BENCHES = {
    "parity": bench("parity.run_parity", PROMPTS, "compared shard thread_counts", timed=False, dtype="float32"),
    "speed": bench("speed.run_speed", TREE, "quantization repeats", threads=2),
    "acceptance": bench("speed.run_acceptance", TREE, "quantization", timed=False, threads=2),
    "profile": bench("forwards.run_profile", TREE, "quantization repeats", threads=2, repeats=20),
    "quantization": bench("forwards.run_quantization", TREE, "repeats", threads=2, repeats=20),
    "budget": bench("speculation.run_budget", TREE, f"quantization fixed {ROUNDS}", threads=2, concurrencies=UP_TO_32),
    "async": bench("speculation.run_async", PROMPTS, f"temperatures {ASYNC}", pace=PACE, nodes=16),
    "cores": bench("speculation.run_cores", PROMPTS, "temperature nodes leaves drafter budget repeats"),
    "network": bench("pools.run_network", POOLS, "round_trips mbit concurrency repeats", pace=PACE, repeats=5),
    "sharing": bench("sharing.run_sharing", POOLS, "weights streams seconds repeats", pace=PACE, streams=8),
    "stall": bench("pools.run_stall", POOLS, "pause streams seconds repeats", pace=PACE),
    "http": bench("http.run_http", SERVER, f"paces {ROUNDS}", **ON_SERVER, concurrencies="1,32", repeats=5),
    "start": bench("http.run_start", MODELS, "mode repeats", timed=False, mode="async", repeats=5),
    "memory": bench("forwards.run_memory", MODELS, "quantization kv_slots max_requests", timed=False, kv_slots=16384),
    "steps": bench("steps.run_steps", RANDOM, "threads quantization repeats", threads=2, repeats=20),
    "gpu": bench("gpu.run_gpu", RANDOM, "repeats", timed=False, repeats=50),
}
HELP = {
    "parity": "Compare the tokens of every drafter, or of mode async, with those of the target alone. Exit 1 if any "
    "differ in float32.",
    "speed": "Tokens per second beside transformers, contestants in turn on each prompt.",
    "acceptance": "Tokens that a verify step commits, at T=0 and T=0.8. Times nothing.",
    "profile": "Where the time of a step goes, and what a forward costs by its rows.",
    "quantization": "Loss, acceptance and forwards with int8 weights, beside those of plain weights.",
    "budget": "Tokens per second with the adaptive budget beside fixed trees and plain decoding, by concurrency.",
    "async": "Async against off and against sync, on devices of a given pace.",
    "cores": "Off and sync on all cores against async, whose target and draft have cores of their own.",
    "network": "Tokens per second with a draft pool at a distance, beside plain decoding.",
    "sharing": "Rows that a saturated pool grows for targets by their weights; what becomes of streams whose pool is "
    "killed.",
    "stall": "The target's steps before, while and after its draft stands still (SIGSTOP).",
    "http": "Tokens per second through HTTP beside the offline engine, and the time from verify's end to the socket.",
    "start": "Seconds until a server serves, and what its processes take then.",
    "memory": "The memory plan against what the process takes when rows and slots are all in use. CPU.",
    "steps": "What a step costs on the CPU beside the reading of its weights, kernel by kernel, with random weights.",
    "gpu": "What a step and its attention cost on a CUDA GPU, with random weights.",
}
