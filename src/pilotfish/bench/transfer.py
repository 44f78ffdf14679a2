"""Speed of segments on their way out of a prefill worker's memory, by transport and size, beside a copy of the same
bytes in memory."""

from __future__ import annotations

import secrets
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from queue import Queue

import msgspec
import numpy as np

from pilotfish.bench.contestants import every_round, take_turns
from pilotfish.bench.options import BenchOptions
from pilotfish.bench.programs import Program
from pilotfish.bench.report import ProgressBar, Report, Row, Spread, cpu_name, ratios, timed
from pilotfish.bench.segment_owner import OwnerOrder, OwnerTold
from pilotfish.config.fields import available_cores
from pilotfish.core.prefilling.prefill_messages import Fetch, SegmentBytes
from pilotfish.core.prefilling.segments import SegmentReference
from pilotfish.engine.processes.launch import wait_until
from pilotfish.engine.processes.process import WorkerSpec, keep_freed_memory
from pilotfish.kv.nixl import NixlReader, nixl_installed
from pilotfish.kv.readers import SegmentReader, SharedMemoryReader, check_content, content
from pilotfish.wire.channel import ChannelThread, Received, decode_from_prefill, encode
from pilotfish.wire.curve_keys import TargetKeys, new_key_pair
from pilotfish.wire.sockets import DialingChannel

SIZES = tuple(1 << power for power in range(15, 23))  # bytes of a segment
#: Bytes that are read in one measurement, in segments of each size.
TOTAL = 64 << 20
#: Segments that are asked for before the first of them has come.
IN_FLIGHT = 32
#: Seconds that one of them may take.
PATIENCE = 30.0
#: What transports are compared with: a copy of the bytes, and their checksum, which all of them include.
COPY, CHECKSUM = "copy", "checksum alone"

#: The peer that is dialled.
POOL = b"0"
#: Reads all segments once.
ReadAll = Callable[[], None]


def run_transfer(options: BenchOptions, progress: ProgressBar) -> Report:
    """Every way to read has its turn in each of `repeats` rounds, after one to warm up."""
    keep_freed_memory()
    progress.total, speeds = len(SIZES), dict[int, dict[str, list[float]]]()
    for size in SIZES:
        speeds[size] = measured(size, TOTAL // size, options.repeats)
        progress(label(size))
    machine = {"cpu": cpu_name(), "cores": available_cores(), "megabytes": TOTAL / 1e6}
    return Report({**machine, **tables(speeds)})


def measured(size: int, segments: int, repeats: int) -> dict[str, list[float]]:
    """GB/s of each round, by what it is that reads."""
    with ways_to_read(size, segments) as ways:
        contestants = {name: every_round(partial(timed, read)) for name, read in ways.items()}
        seconds = take_turns(contestants, range(repeats + 1))
    return {name: [size * segments / one / 1e9 for one in times] for name, times in seconds.items()}


def tables(speeds: dict[int, dict[str, list[float]]]) -> dict[str, list[Row]]:
    names, sizes = list(next(iter(speeds.values()))), list(speeds)
    return {
        "gb_per_s": [
            {"transport": name, **{label(size): Spread.of(speeds[size][name]).median for size in sizes}}
            for name in names
        ],
        "of_a_copy": [
            {
                "transport": name,
                **{label(size): ratios(speeds[size][name], speeds[size][COPY]).median for size in sizes},
            }
            for name in names
            if name != COPY
        ],
    }


def label(size: int) -> str:
    return f"{size >> 10} KiB"


@contextmanager
def ways_to_read(size: int, segments: int) -> Iterator[dict[str, ReadAll]]:
    """The segments of other processes, read and checked; and the two that transports are compared with."""
    with ExitStack() as stack:
        own, directory = new_key_pair(), stack.enter_context(tempfile.TemporaryDirectory())
        owner = stack.enter_context(_owner(OwnerOrder(size, segments, directory=directory, client=own.public)))
        told = _told(owner)
        assert told.shared_memory is not None
        mapped = stack.enter_context(closing(SharedMemoryReader(told.shared_memory)))
        yield {
            **_in_memory(told, mapped),
            "shm": partial(read_all, mapped, told.references),
            **{
                name: stack.enter_context(_fetching(endpoint, told, TargetKeys(own, told.key) if "," in name else None))
                for name, endpoint in told.endpoints.items()
            },
            **({"nixl": stack.enter_context(_over_nixl(size, segments))} if nixl_installed() else {}),
        }


def _in_memory(told: OwnerTold, mapped: SharedMemoryReader) -> dict[str, ReadAll]:
    """Of the memory that the transport `shm` reads."""
    plan, memory = mapped.plan, mapped.memory
    parts = [memory[(at := plan.place_at(one.place)) : at + one.size] for one in told.references]
    copies = np.zeros((len(parts), len(parts[0])), np.uint8)

    def copy() -> None:
        for part, place in zip(parts, copies, strict=True):
            np.copyto(place, part)

    def checksum() -> None:
        for part in parts:
            content(part.data)

    return {COPY: copy, CHECKSUM: checksum}


def read_all(reader: SegmentReader, references: list[SegmentReference]) -> None:
    for reference in references:
        reader.read(reference)


def _owner(order: OwnerOrder) -> Program:
    command = (sys.executable, "-m", "pilotfish.bench.segment_owner", msgspec.json.encode(order).decode())
    return Program(WorkerSpec("segments", command))


def _told(owner: Program) -> OwnerTold:
    return msgspec.convert(owner.told, OwnerTold)


@contextmanager
def _over_nixl(size: int, segments: int) -> Iterator[ReadAll]:
    """From a process that stands still while others are measured: NIXL's thread in it would take a core."""
    with _owner(OwnerOrder(size, segments, nixl=True)) as owner:
        told = _told(owner)
        assert told.remote_memory is not None
        with closing(NixlReader(told.remote_memory)) as reader:

            def read() -> None:
                read_all(reader, told.references)

            owner.send_signal(signal.SIGSTOP)
            try:
                yield _while_running(owner, read)
            finally:
                owner.send_signal(signal.SIGCONT)


def _while_running(owner: Program, read: ReadAll) -> ReadAll:
    def run() -> None:
        owner.send_signal(signal.SIGCONT)
        read()
        owner.send_signal(signal.SIGSTOP)

    return run


@contextmanager
def _fetching(endpoint: str, told: OwnerTold, keys: TargetKeys | None) -> Iterator[ReadAll]:
    """Over a connection as targets have one."""
    channel = DialingChannel([endpoint], secrets.token_bytes(8), [keys])
    thread, came = ChannelThread(channel), Queue[SegmentBytes]()

    def handle(received: Received) -> None:
        message = decode_from_prefill(received.frame)
        assert isinstance(message, SegmentBytes)
        came.put(message)

    thread.start(handle, lambda: None)
    with closing(thread):
        wait_until(lambda: channel.problem(POOL) is None, lambda: None, PATIENCE, endpoint)
        yield partial(fetch_all, lambda reference: thread.post(POOL, encode(Fetch(reference))), came, told.references)


def fetch_all(
    ask: Callable[[SegmentReference], None], came: Queue[SegmentBytes], references: list[SegmentReference]
) -> None:
    """Ask for all, some ahead of those that have come; check each."""
    for reference in references[:IN_FLIGHT]:
        ask(reference)
    for place, reference in enumerate(references):
        message = came.get(timeout=PATIENCE)
        assert message.number == reference.number  # a connection keeps the order
        check_content(reference, message.data)
        for following in references[place + IN_FLIGHT : place + IN_FLIGHT + 1]:
            ask(following)
