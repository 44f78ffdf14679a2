"""A server may write meanwhile."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pilotfish.errors import ParameterError
from pilotfish.operate.capture import folder
from pilotfish.operate.capture.rows import CapturedRow, rows_of


@dataclass(frozen=True)
class PartitionSummary:
    """Times are seconds since the epoch."""

    name: str  # a digest
    files: int
    bytes: int
    rows: int
    prompt_tokens: int
    output_tokens: int
    oldest: float | None  # None: no row is whole
    newest: float | None


@dataclass(frozen=True)
class PurgedRows:
    files: int
    bytes: int


def read_rows_of(file: folder.CaptureFile) -> Iterator[CapturedRow]:
    """None of a removed file. ParameterError for an unreadable one."""
    with folder.refusing(file.path):
        try:
            contents = file.path.read_bytes()
        except FileNotFoundError:
            return
    yield from rows_of(contents)


def summarize_partitions(path: Path) -> list[PartitionSummary]:
    folder.check_folder(path)
    with folder.refusing(path):
        return [_summary(parent.name, folder.found_rows(path, parent.name)) for parent in folder.partitions(path)]


def _summary(name: str, files: Sequence[folder.CaptureFile]) -> PartitionSummary:
    count = prompt = output = 0
    times = list[float]()
    for row in (row for file in files for row in read_rows_of(file)):
        count, prompt, output = count + 1, prompt + len(row.prompt_tokens), output + len(row.output_tokens)
        times.append(row.time)
    size = sum(file.size for file in files)
    return PartitionSummary(
        name, len(files), size, count, prompt, output, min(times, default=None), max(times, default=None)
    )


def purge_client(path: Path, client: str) -> PurgedRows:
    """`client`: the name of its key. Needs the salt; ParameterError while rows of unknown clients exist."""
    folder.check_folder(path)
    with folder.refusing(path):
        rows, since = folder.found_rows(path), folder.untold_until(path)
        if rows and rows[0].begun < since:
            before = datetime.fromtimestamp(math.ceil(since), UTC).isoformat()
            problem = f"{path}: the salt was damaged, so of rows before {before} nobody can tell whose they are"
            raise ParameterError.described("client", f"client: {problem}; purge those first, with --before")
        return _purge(folder.found_rows(path, folder.partition_of(client, folder.read_salt(path))))


def purge_before(path: Path, time: float) -> PurgedRows:
    """Whole files are removed, with rows of up to an hour later; of infinity all."""
    folder.check_folder(path)
    with folder.refusing(path):
        return _purge(file for file in folder.found_rows(path) if file.begun < time)


def _purge(files: Iterable[folder.CaptureFile]) -> PurgedRows:
    gone = list(files)
    for file in gone:
        folder.remove(file)
    return PurgedRows(len(gone), sum(file.size for file in gone))
