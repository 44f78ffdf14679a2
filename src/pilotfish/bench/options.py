"""Options that several benches take, and how their results are shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar, cast

import typer

from pilotfish.config import BudgetKind, DType, EngineConfig, Mode, Quantization

if TYPE_CHECKING:
    from pilotfish.bench.budget import Workload
    from pilotfish.bench.workload import Prompt

Report = TypeVar("Report")

JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else.")]
RepeatsOption = Annotated[int, typer.Option(min=1, help="Measurements of each kind.")]
SecondsOption = Annotated[float, typer.Option(min=0.01, help="Of each measurement.")]


@dataclass(frozen=True)
class Common:
    """Options of every command."""

    prompts: Annotated[Path, typer.Option(help="JSON Lines of id and turns, or id and prompt.")]
    pair: Annotated[str | None, typer.Option(help="pycode, or pycode@<N>m.  [default: pycode]")] = None
    target: Annotated[Path | None, typer.Option(help="A target's directory, with --draft, instead of a pair.")] = None
    draft: Annotated[Path | None, typer.Option(help="A draft's directory, with --target.")] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows of the file.")] = None
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each sequence.")] = 96
    json: JsonOption = False

    def rows(self) -> list[Prompt]:
        from pilotfish.bench.workload import load_prompts

        return load_prompts(self.prompts, self.limit)

    def config(self, dtype: str) -> EngineConfig:
        """A sync engine with an LM drafter, which every comparison starts from."""
        from pilotfish.bench.workload import choose_models

        models = choose_models(self.pair, self.target, self.draft)
        checked = cast(DType, dtype)  # EngineConfig checks it
        return EngineConfig(target=models.target, draft=models.draft, mode="sync", drafter="lm", dtype=checked)


@dataclass(frozen=True)
class Shaped(Common):
    """Options of the commands that measure one tree in one precision."""

    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16"
    threads: Annotated[int, typer.Option(help="Threads; 0: all cores.")] = 2
    nodes: Annotated[int, typer.Option(help="Nodes verified in a step.")] = EngineConfig.nodes
    levels: Annotated[int, typer.Option(help="Forwards of the draft in a step, at most.")] = EngineConfig.levels
    width: Annotated[int, typer.Option(help="Leaves of each of the draft's forwards.")] = EngineConfig.width
    out: Annotated[Path | None, typer.Option(help="Write the JSON to this file as well.")] = None

    def engine_config(self) -> EngineConfig:
        tree = {"nodes": self.nodes, "levels": self.levels, "width": self.width}
        return dataclasses.replace(self.config(self.dtype), threads=self.threads, **tree)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Measured(Shaped):
    """And in one quantization."""

    quantization: Annotated[str, typer.Option(help="Weights: none or int8.")] = EngineConfig.quantization

    def engine_config(self) -> EngineConfig:
        checked = cast(Quantization, self.quantization)
        return dataclasses.replace(super().engine_config(), quantization=checked)


@dataclass(frozen=True)
class Pooled(Common):
    """Options of the commands in which drafts run in pools of their own."""

    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16"
    pace: Annotated[str, typer.Option(help='Emulated devices; "": none.')] = "target=10.4ms,draft=2.6ms"
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 0.8
    nodes: Annotated[int, typer.Option(help="Nodes of a sequence verified in a step.")] = EngineConfig.nodes
    leaves: Annotated[int, typer.Option(help="Leaves of each of a pool's forwards.")] = EngineConfig.leaves
    budget: Annotated[str, typer.Option(help="auto: guess as much as pays; fixed: always all.")] = EngineConfig.budget
    out: Annotated[Path | None, typer.Option(help="Write the JSON to this file as well.")] = None

    def engine_config(self) -> EngineConfig:
        """Of plain decoding; benches attach pools to it."""
        budget = cast(BudgetKind, self.budget)
        config = dataclasses.replace(self.config(self.dtype), mode="off", budget=budget)
        return dataclasses.replace(config, nodes=self.nodes, leaves=self.leaves, pace=self.pace)

    def workload(self) -> Workload:
        """In which a lap is every prompt once."""
        from pilotfish.bench.budget import Workload

        rows = self.rows()
        return Workload(rows, self.temperature, self.max_tokens, batches=len(rows))


@dataclass(frozen=True)
class Served(Common):
    """Options of the commands that start a server."""

    mode: Annotated[str, typer.Option(help="off, sync or async.")] = "off"
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32"
    threads: Annotated[int, typer.Option(help="Threads of the target; 0: all cores.")] = 0
    budget: Annotated[str, typer.Option(help="auto: guess as much as pays; fixed: always all.")] = EngineConfig.budget
    kv_slots: Annotated[int, typer.Option(min=1, help="Tokens that fit into the KV pool.")] = 65536
    out: Annotated[Path | None, typer.Option(help="Write the JSON to this file as well.")] = None

    def engine_config(self) -> EngineConfig:
        mode, budget = cast(Mode, self.mode), cast(BudgetKind, self.budget)  # EngineConfig checks them
        config = dataclasses.replace(self.config(self.dtype), mode=mode, budget=budget)
        return dataclasses.replace(config, threads=self.threads, kv_slots=self.kv_slots)


@contextmanager
def bar(total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar; what it gives is called with a label whenever something is done."""
    from pilotfish.bench.report import progress

    with progress() as shown:
        task = shown.add_task("loading", total=total)
        yield lambda label: shown.update(task, advance=1, description=label)


def show(report: Report, table: Callable[[Report], None], out: Path | None = None, *, json: bool) -> None:
    from pilotfish.bench.report import print_json, write_json

    if out is not None:
        write_json(report, out)
    if json:
        print_json(report)
    else:
        table(report)
