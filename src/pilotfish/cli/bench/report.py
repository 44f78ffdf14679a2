"""Figures, the machine that they were measured on, and reports: rows that print as tables and become JSON."""

import dataclasses
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pilotfish.cli.pages.document import write_file
from pilotfish.config.fields import available_cores
from pilotfish.model.loading.loader import DTYPES
from pilotfish.model.loading.precision import library_dtype
from pilotfish.printable import one_line
from pilotfish.progress import PhaseProgress

#: Columns of tables that go to a file or a pipe.
FILE_WIDTH = 240
#: Rows of the longest table; JSON holds all.
MAX_ROWS = 100

#: Figures by name: a row of a table, whose names are the columns.
Row = dict[str, Any]


@dataclass(frozen=True)
class Spread:
    minimum: float
    lower: float
    median: float
    upper: float
    maximum: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Spread of at least one value; quartiles by linear interpolation."""
        quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        lower, median, upper = quartiles
        return cls(min(values), lower, median, upper, max(values), len(values))

    def __str__(self) -> str:
        return f"{text_of(self.median)} ({text_of(self.lower)} – {text_of(self.upper)})"


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Ratios of values measured in the same round."""
    return Spread.of([a / b for a, b in zip(numerators, denominators, strict=True)])


def equal_share(outputs: Sequence[object], others: Sequence[object]) -> float:
    return statistics.mean(a == b for a, b in zip(outputs, others, strict=True))


def distinct_ngrams(sequences: Sequence[Sequence[int]], n: int = 4) -> float:
    """Share of n-grams that had not occurred earlier in their own output, over all outputs.

    1 means that no output repeats itself. An output that loops has few, and loops are easy to draft."""
    grams = [[tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)] for tokens in sequences]
    total = sum(map(len, grams))
    return sum(len(set(own)) for own in grams) / total if total else 1.0


@dataclass(frozen=True)
class Report:
    """Results of a bench, and the conditions under which they hold. `failed` makes the command exit with 1.
    Tables whose names are `unshown` are only in the JSON. `error` is a line that says why results are partial, or no
    good: once they are written and shown the command fails with it."""

    results: dict[str, Any]  # by name: figures, and tables as lists of rows
    failed: bool = False
    conditions: dict[str, Any] = field(default_factory=dict)
    unshown: Sequence[str] = ()
    error: str = ""

    def as_json(self) -> str:
        return json.dumps({**self.conditions, **self.results}, indent=2, default=dataclasses.asdict) + "\n"

    def show(self) -> None:
        everything = {k: v for k, v in {**self.conditions, **self.results}.items() if k not in self.unshown}
        listed = {k: v if isinstance(v, list) else [v] for k, v in everything.items()}
        tables = {k: rows for k, rows in listed.items() if all(isinstance(row, dict) for row in rows)}
        sys.stdout.write(one_line(text_of({k: v for k, v in self.conditions.items() if k not in tables})) + "\n")
        for name, rows in tables.items():
            print_table(name.replace("_", " "), rows)
        print_table("", [{k: v for k, v in self.results.items() if k in everything and k not in tables}])


def print_table(title: str, rows: Sequence[Row]) -> None:
    """All columns but the first are right-aligned. In a file no cell is folded, only headers are."""
    table, is_file = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD), not sys.stdout.isatty()
    columns = {name: [one_line(text_of(row.get(name))) for row in rows[:MAX_ROWS]] for row in rows for name in row}
    for index, (name, cells) in enumerate(columns.items()):
        width = max(map(len, cells)) if is_file else None
        table.add_column(str(name).replace("_", " "), justify="right" if index else "left", min_width=width)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, row))
    if columns:
        Console(width=FILE_WIDTH if is_file else None).print(table)


def text_of(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text_of(one)}" for name, one in value.items() if one is not None)
    if isinstance(value, list | tuple):
        return " ".join(map(text_of, value))
    return str(value)


class ProgressBar(PhaseProgress):
    """On stderr. Called with a label for each part of a bench that is done, of `total`, which the bench sets."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.begin("loading")

    def note(self, label: str) -> None:
        """What goes on, where it is no part."""
        self.update(self.task_ids[0], description=label)

    def __call__(self, label: str) -> None:
        self.update(self.task_ids[0], advance=1, total=self.total, description=label)


TRIALS = 5
MEBIBYTE = 1 << 20


def describe_machine(dtype: str) -> Row:
    """Processor, GPU if there is one, libraries, and the speed of two simple operations with the threads of the run.
    Probes read 512 MiB and multiply two matrices of 2048 by 2048 in `dtype`; in float32 where PyTorch has no
    instructions for bfloat16, whose emulation would take minutes and say nothing about our kernels."""
    import transformers

    product = library_dtype(DTYPES[dtype], torch.device("cpu"))
    read, multiply = read_probe(), matmul_probe(product)
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        "cpu": cpu_name(),
        **gpu,
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "read_gb_per_s": max(read() for _ in range(TRIALS)),
        "matmul_gflop_per_s": max(multiply() for _ in range(TRIALS)),
        "matmul_dtype": str(product).removeprefix("torch."),
    }


def cpu_name(path: Path = Path("/proc/cpuinfo")) -> str:
    lines = path.read_text().splitlines() if path.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def read_probe(mebibytes: int = 512) -> Callable[[], float]:
    """Each call reads `mebibytes` from memory and returns GB/s."""
    data = torch.ones(mebibytes * MEBIBYTE // 4)
    return lambda: data.nbytes / timed(data.sum) / 1e9


def matmul_probe(dtype: torch.dtype, size: int = 2048) -> Callable[[], float]:
    """Each call multiplies two square matrices and returns GFLOP/s."""
    a = torch.randn(size, size).to(dtype)
    return lambda: 2 * size**3 / timed(lambda: a @ a) / 1e9


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


PACKAGES = ("pilotfish", "torch", "transformers")


def provenance() -> dict[str, Any]:
    """`commit` is that of the source, with a + where files differ from it; without a repository, the version."""
    versions = {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
    return {
        "command": shlex.join(["pilotfish", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(Path(__file__).parent) or versions["pilotfish"],
        "versions": versions,
    }


def write_toml(said: str, values: Mapping[str, Any], path: Path) -> None:
    """For `--save`: what was found, with how it came about as comments."""
    made = provenance()
    head = (said, f"{made['date']}, commit {made['commit']}", made["command"])
    lines = [*(f"# {line}" for line in head), *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
    write_file("\n".join(lines) + "\n", path, "save")


def _commit(directory: Path) -> str:
    """Empty for an installation, which may lie in somebody else's repository."""
    if not _git(directory, "ls-files", "--error-unmatch", Path(__file__).name):
        return ""
    return _git(directory, "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*")


def _git(directory: Path, *arguments: str) -> str:
    try:
        command = ["git", "-C", str(directory), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
