"""Benches by command, and their options: the conditions under which they measure. Quick to import."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Struct, field

from pilotfish.cli.bench.serving.options import ServeBenchOptions
from pilotfish.cli.bench.workload import Job, Prompt, Workload, first_of_each, load_prompts
from pilotfish.config.engine import EngineConfig
from pilotfish.config.hardware.tables import read_table
from pilotfish.core.sampling.sampling_params import MAX_TOKENS
from pilotfish.engine.pairs import PairDirs, resolve_pair
from pilotfish.errors import ParameterError
from pilotfish.operate.cascade_policy import MAX_JUDGED
from pilotfish.options import REQUIRED, Option, option, options_of, pick

MANY = 1 << 20


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Of all benches, of which each has some; `engine` holds EngineConfig's. Lists in texts are separated by commas."""

    json: Annotated[bool, option("JSON on stdout and nothing else.")] = False
    out: Annotated[Path, option("Write the JSON to this file as well.")] | None = None
    pair: Annotated[str, option("pycode, or pycode@<N>m.  [default: pycode]")] | None = None
    target: Annotated[Path, option("A target's directory, with --draft, instead of a pair.")] | None = None
    draft: Annotated[Path, option("A draft's directory with --target, or a draft of the pair.")] | None = None
    prompts: Annotated[Path, option("JSON Lines of id and turns, or id and prompt.")] = Path()
    limit: Annotated[int, option("Only the first rows of the file.", 1, MANY)] | None = None
    max_tokens: Annotated[int, option("New tokens of each sequence.", 1, MAX_TOKENS)] = 96
    repeats: Annotated[int, option("Measurements of each kind.", 1, MANY)] = 3
    batches: Annotated[int, option("Sequences of a round, in multiples of the concurrency.", 1, MANY)] = 2
    temperature: Annotated[float, option("Sampling temperature.")] = 0.8
    concurrency: Annotated[int, option("Sequences at a time.", 1, MANY)] = 1
    concurrencies: Annotated[str, option("Sequences at a time, separated by commas.", names=("--concurrency",))] = "1"
    compared: Annotated[
        Literal["sync", "async"], option("sync: every drafter; async: draft workers, also paced.", names=("--mode",))
    ] = "sync"
    shard: Annotated[str, option("i/n: every n-th prompt from the i-th on.")] = "1/1"
    thread_counts: Annotated[str, option("The target's, separated by commas.", names=("--threads",))] = "1,2"
    modes: Annotated[str, option("Of speculation, separated by commas: off, sync, async.")] = "off,sync,async"
    humaneval: Annotated[
        str, option("JSON Lines of HumanEval: task_id, prompt, test, entry_point.", metavar="FILE")
    ] = ""
    each: Annotated[int, option("Only the first tasks of each category.", 1, MANY, names=("--limit",))] | None = None
    allow_code_execution: Annotated[
        bool, option("Run the programs that the model writes, in a sandbox: docs/security.md says how safe that is.")
    ] = False
    drafts: Annotated[str, option("LMs and heads, separated by commas: directories, or names of the pair's.")] = (
        "draft,eagle3,dspark"
    )
    to: Annotated[str, option("Write the trace to this file, compressed where its name ends with .gz.")] = ""
    drafters: Annotated[str, option("lm, lm+ngram, …, separated by commas.", names=("--drafter",))] = "lm"
    node_counts: Annotated[str, option("Nodes of trees, separated by commas.", names=("--nodes",))] = "8"
    level_counts: Annotated[str, option("Levels of sync's trees, separated by commas.", names=("--levels",))] = "4"
    widths: Annotated[str, option("Leaves of a level of sync, separated by commas.", names=("--width",))] = "2"
    leaf_counts: Annotated[str, option("Leaves of a level of async, separated by commas.", names=("--leaves",))] = "32"
    budgets: Annotated[str, option("auto or fixed, or both, separated by a comma.", names=("--budget",))] = "auto"
    splits: Annotated[
        str, option("Async's TARGET:DRAFT cores, as in 0-5:6,7, joined by a space.", names=("--cores",))
    ] = ""
    engines: Annotated[int, option("Engines that stay loaded at a time; others are loaded again.", 1, 64)] = 4
    candidates: Annotated[int, option("Settings of the grid that are tried, beside off and the default.", 1, 1000)] = 15
    seed: Annotated[int, option("Draws the settings and the order of prompts.", 0, MANY)] = 0
    save: Annotated[Path, option("Write what was chosen to this file: TOML.")] | None = None
    small: Annotated[Path, option("The small model, as of --target; by default the pair's draft.")] | None = None
    tokens: Annotated[int, option("Of an output, by which the small model is judged.", 1, MAX_JUDGED)] = 16
    loss: Annotated[float, option("Share of the tasks that may succeed less than with the large model.", 0, 1)] = 0.01
    peers: Annotated[str, option("Engines beside ours, separated by commas.")] = "transformers,openvino,llama.cpp"
    svg: Annotated[Path, option("Draw the speeds as a chart to this file.")] | None = None
    engine: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def models(self) -> PairDirs:
        """A named pair, maybe with one of its drafts by name, or the two directories of one."""
        if self.target is None:
            return resolve_pair(self.pair or "pycode", *([] if self.draft is None else [str(self.draft)]))
        if self.pair is not None:
            raise ParameterError("pair", self.pair, "either a pair or --target and --draft")
        if (draft := self.draft or self.small) is None:
            raise ParameterError("draft", None, "--target and --draft together")
        return PairDirs(self.target, draft)

    def compared_drafts(self) -> list[Path]:
        names, pair = self.drafts.split(","), self.pair or "pycode"
        return [Path(name) if Path(name).is_dir() else resolve_pair(pair, name).draft for name in names]

    def engine_config(self, **changes: Any) -> EngineConfig:
        """A sync engine with an LM drafter and without a prefix cache, which would answer for the contestants that come
        later, unless options or `changes` say otherwise."""
        models = self.models()
        base = {"target": models.target, "draft": models.draft, "mode": "sync", "drafter": "lm", "prefix_cache": False}
        return EngineConfig(**{**base, **self.engine, **changes})

    @property
    def precision(self) -> str:
        """The dtype that the target computes in."""
        from pilotfish.engine.memory import precision_here  # imports torch

        config = self.engine_config()
        return precision_here(config, config.target).name

    def rows(self) -> list[Prompt]:
        """Every n-th prompt of the file from the i-th on, for a shard i/n."""
        prompts = load_prompts(self.prompts, self.limit, self.models().target)
        first, _, last = self.shard.partition("/")
        prompts = first_of_each(prompts, self.each)
        if not (first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last) <= len(prompts)):
            raise ParameterError("shard", self.shard, f"i/n with 1 <= i <= n <= {len(prompts)}, the number of prompts")
        return prompts[int(first) - 1 :: int(last)]

    def workload(self) -> Workload:
        return Workload(self.rows(), self.temperature, self.max_tokens)

    def rounds(self, number: int) -> list[list[Job]]:
        """A round of so many jobs to warm up, and `repeats`."""
        workload = self.workload()
        return [workload.jobs(number, turn) for turn in range(self.repeats + 1)]


class Bench(Struct, frozen=True):
    """As benches.toml describes it: by name options of BenchOptions and EngineConfig, or ServeBenchOptions."""

    help: str
    measure: str
    names: list[str] = field(name="options", default_factory=list)
    defaults: dict[str, Any] = {}
    timed: bool = True
    serves: bool = False  # whether it is `serve`, whose options are its own
    group: str = "bench"  # the command that it belongs to

    def declared(self) -> list[Option]:
        if self.serves:
            return pick(ServeBenchOptions)
        own = [name for name in self.names if name in options_of(BenchOptions)]
        engine = [name for name in self.names if name not in own]
        defaults = {"prompts": REQUIRED, "to": REQUIRED, **self.defaults}
        return pick(BenchOptions, *own, **defaults) + (pick(EngineConfig, *engine, **defaults) if engine else [])

    def options(self, **given: Any) -> Any:
        values = {one.name: given.get(one.name, one.default) for one in self.declared()}
        for one in self.declared():
            one.check(values[one.name])
        if self.serves:
            return ServeBenchOptions(**values)
        own = {name: values.pop(name) for name in list(values) if name in options_of(BenchOptions)}
        return BenchOptions(**own, engine=values)

    def conditions(self, options: Any) -> dict[str, Any]:
        """Conditions for a report: all options, with models, their precision and prompts resolved."""
        if self.serves:
            given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
            return {k: value for k, value in given.items() if value is not None and k not in ("json", "out")}
        found = {**vars(options), **options.engine}
        chosen = {name: found[name] for name in self.names if name not in ("json", "out", "save", "svg")}
        if "target" in self.names:
            config = options.engine_config()
            chosen |= {"target": str(config.target), "draft": str(config.draft), "dtype": options.precision}
        return chosen | ({"prompts": len(options.rows())} if "prompts" in self.names else {})


#: By command.
BENCHES = read_table(__file__, "benches", dict[str, Bench])
