"""What the scripts of this folder share: options from the command line, a bar on stderr, tables or JSON on stdout."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from pilotfish.cli.bench.contestants import Contestant, Result, Run, take_turns
from pilotfish.cli.bench.options import BenchOptions
from pilotfish.cli.bench.report import ProgressBar, Report, cpu_name, describe_machine, provenance
from pilotfish.cli.bench.workload import Job, Prompt, Workload
from pilotfish.cli.demo import runs
from pilotfish.config.engine import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.engine.memory import precision_here
from pilotfish.engine.pairs import PairDirs
from pilotfish.errors import PilotfishError
from pilotfish.options import options_of

#: Prompts where none are given: those of `pilotfish demo`.
PROMPTS = Path(runs.__file__).with_name("demo.jsonl")
#: The two temperatures of figures on acceptance.
TEMPERATURES = (0.0, 0.8)
#: Options of scripts that run a pair on prompts; fields of BenchOptions and EngineConfig.
PAIR = ("dtype", "pair", "target", "draft", "prompts", "limit", "max_tokens", "temperature", "threads", "kv_slots")


class Options(argparse.Namespace):
    """A script's options. Those that BenchOptions or EngineConfig has mean what they mean there."""

    @cached_property
    def bench(self) -> BenchOptions:
        own = {name: value for name, value in vars(self).items() if name in options_of(BenchOptions)}
        engine = {name: value for name, value in vars(self).items() if name in options_of(EngineConfig)}
        return BenchOptions(**own, engine={name: value for name, value in engine.items() if name not in own})

    def models(self) -> PairDirs:
        return self.bench.models()

    def engine_config(self, **changes: Any) -> EngineConfig:
        return self.bench.engine_config(**changes)

    def rows(self) -> list[Prompt]:
        return self.bench.rows()

    def workload(self) -> Workload:
        return self.bench.workload()

    def rounds(self, number: int) -> list[list[Job]]:
        return self.bench.rounds(number)


def run(measure: Callable[[Options, ProgressBar], Report], *names: str, **defaults: Any) -> None:
    """The script's main function. `names` are options of BenchOptions or EngineConfig with their defaults there;
    `defaults` are others of those, or of its own: a list takes several values."""
    options = parsed(names, defaults)
    try:
        with ProgressBar() as progress:
            report = measure(options, progress)
    except PilotfishError as error:
        sys.exit(f"{sys.argv[0]}: {error}")
    given = {name: value for name, value in vars(options).items() if name not in ("json", "bench")}
    conditions = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    report = replace(report, conditions={**conditions, "run": provenance(), "machine": machine(options, report)})
    if options.json:
        sys.stdout.write(report.as_json())
    else:
        report.show()
    sys.exit(int(report.failed))


def parsed(names: tuple[str, ...], defaults: dict[str, Any]) -> Options:
    main = sys.modules["__main__"]
    parser = argparse.ArgumentParser(description=main.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {**options_of(EngineConfig), **options_of(BenchOptions)}
    for name, default in {**{name: known[name].default for name in names}, **defaults}.items():
        add_option(parser, name, PROMPTS if name == "prompts" else default)
    parser.add_argument("--json", action="store_true", help="JSON instead of tables")
    return parser.parse_args(namespace=Options())


def add_option(parser: argparse.ArgumentParser, name: str, default: Any) -> None:
    """Its values have the type of the default."""
    flag, shown = f"--{name.replace('_', '-')}", json.dumps(default, default=str)
    if isinstance(default, bool):
        parser.add_argument(flag, action="store_true")
    elif isinstance(default, list):
        parser.add_argument(flag, nargs="+", type=type(default[0]), default=default, help=shown)
    else:
        kinds = {"limit": int, "target": Path, "draft": Path}
        kind = kinds.get(name, str) if default is None else type(default)
        parser.add_argument(flag, type=kind, default=default, help=shown)


def machine(options: Options, report: Report) -> dict[str, Any]:
    """Its speed is probed where models ran."""
    if "dtype" in report.results:
        return describe_machine(report.results["dtype"])
    if "dtype" in options:
        config = options.engine_config()
        return describe_machine(precision_here(config, config.target).name)
    return {"cpu": cpu_name()}


# -- turns


def every_round(call: Callable[[], Result]) -> Callable[[object], Result]:
    """A contestant that does the same in each round."""
    return lambda _: call()


def compete(
    engine: Engine,
    contestants: Mapping[str, Contestant],
    rounds: Sequence[Sequence[Job]],
    concurrency: int,
    progress: ProgressBar,
) -> dict[str, list[Run]]:
    """Contestants take turns in one engine: same target, same pace. The first round is to warm up."""

    def run(name: str, jobs: Sequence[Job]) -> Run:
        engine.reset_pacing()
        return contestants[name].run(engine, jobs, concurrency, partial(progress, f"{name}, {concurrency} at a time"))

    return take_turns({name: partial(run, name) for name in contestants}, rounds)
