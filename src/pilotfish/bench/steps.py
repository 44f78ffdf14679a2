"""What a step costs on the CPU, beside what reading its weights must cost, and which kernels the difference goes to.
Random weights of known shapes; everything takes turns with a probe of the memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from pilotfish.bench.compare import Spread
from pilotfish.bench.kernels import KINDS, bytes_read, kernel_seconds
from pilotfish.bench.machine import Machine, describe_machine, read_probe, timed
from pilotfish.bench.profile import CONTEXT, WARM_UP, step_rows
from pilotfish.bench.report import print_table
from pilotfish.bench.shapes import SHAPES, VOCAB, LlamaShape, random_model
from pilotfish.config import DType, EngineConfig, Quantization
from pilotfish.core.drafter import DraftLimits
from pilotfish.core.request import Request
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.draft.lm import LMDrafter, TreeShape
from pilotfish.errors import InputError
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.loader import DTYPES, LoadedModel
from pilotfish.model.native import load_kernels
from pilotfish.model.quantize import check_quantization
from pilotfish.model.runner import Runner

TARGETS = ("88m", "344m")
ROWS = (1, 8, 16)
WIDTH = EngineConfig.width  # rows of a draft's level
LEVELS = EngineConfig.levels
NODES = 256  # more than `LEVELS` give: none is pruned, and every level has `WIDTH` rows
SLOTS = CONTEXT + 64
TEMPERATURE = 0.8
DEVICE = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """The step of one token and a tree below it, `rows` together, after `CONTEXT` tokens."""

    shape: str
    rows: int


TIMED = tuple(Case(shape, rows) for shape in TARGETS for rows in ROWS)
DRAFT = Case("draft", WIDTH)
#: Those whose kernels are timed one by one.
PROFILED = (*(Case(shape, rows) for shape in TARGETS for rows in (1, 16)), DRAFT)


@dataclass(frozen=True)
class ForwardTime:
    """Medians; ratios and shares are taken within rounds."""

    shape: str
    rows: int
    milliseconds: float
    of_one_row: float
    read_bytes: int  # weights and KV, each once
    floor_ms: float  # of reading them as fast as the probe reads
    share_of_floor: float  # floor over time: 1 is as fast as memory allows


@dataclass(frozen=True)
class DraftTime:
    """Medians for one request, with the draft's weights in whatever cache they fit into."""

    rows: int
    forward_ms: float
    level_ms: float  # the same forward inside LMDrafter: leaves chosen, noise, children hung


@dataclass(frozen=True)
class KernelTime:
    """One of `KINDS` in one forward; medians."""

    kind: str
    milliseconds: float
    read_bytes: int
    gb_per_s: float | None  # None: it reads no weights and no KV
    floor_ms: float


@dataclass(frozen=True)
class ForwardProfile:
    """A forward whose kernels are timed one by one, clocks included."""

    shape: str
    rows: int
    milliseconds: float
    kernels: list[KernelTime]


@dataclass(frozen=True)
class StepsReport:
    machine: Machine
    dtype: str
    quantization: str
    context: int
    repeats: int
    read_gb_per_s: Spread  # of the probe, once a round
    forwards: list[ForwardTime]
    draft: DraftTime
    profiles: list[ForwardProfile]


@dataclass(frozen=True)
class Round:
    """Everything once, one after the other. Seconds."""

    gb_per_s: float
    forwards: dict[Case, float]
    draft_level: float
    draft_forward: float
    kernels: dict[Case, dict[str, float]]

    def floor(self, read_bytes: int) -> float:
        """Seconds of reading so much as fast as the probe read."""
        return read_bytes / (self.gb_per_s * 1e9)


def run_steps(
    dtype: DType,
    quantization: Quantization,
    repeats: int,
    machine: Machine | None = None,
    done: Callable[[str], None] = lambda _: None,
) -> StepsReport:
    """`machine` is probed unless given. `done` is called with a label for each of `num_rounds`. InputError where the
    C++ kernels do not build."""
    check_quantization(quantization, DTYPES[dtype], DEVICE)
    if not load_kernels():
        raise InputError("bench steps: the C++ kernels are needed, and no compiler here builds them")
    bench = StepsBench(dtype, quantization)
    rounds = []
    for _ in range(num_rounds(repeats)):
        rounds.append(bench.round())
        done("rounds")
    rounds = rounds[WARM_UP:]
    return StepsReport(
        machine or describe_machine(dtype),
        dtype,
        quantization,
        CONTEXT,
        repeats,
        Spread.of([one.gb_per_s for one in rounds]),
        [forward_time(case, sum(bench.reads(case).values()), rounds) for case in TIMED],
        DraftTime(WIDTH, _median_ms(r.draft_forward for r in rounds), _median_ms(r.draft_level for r in rounds)),
        [profile_of(case, bench.reads(case), rounds) for case in PROFILED],
    )


def num_rounds(repeats: int) -> int:
    """How many rounds `run_steps` makes, warm-up included."""
    return WARM_UP + repeats


class StepsBench:
    """The three shapes, loaded, and their steps."""

    def __init__(self, dtype: DType, quantization: Quantization) -> None:
        def runner(shape: LlamaShape) -> Runner:
            return Runner(random_model(shape, DTYPES[dtype], DEVICE, quantization=quantization), SLOTS)

        self._runners = {name: runner(shape) for name, shape in SHAPES.items()}
        self._steps = {case: step_rows(self._runners[case.shape], case.rows) for case in {*TIMED, *PROFILED}}
        self._levels = DraftLevels(self._runners[DRAFT.shape].model)
        self._probe = read_probe()

    def round(self) -> Round:
        """The draft's measurements follow one another, as its levels do in service: its weights stay in the cache."""
        return Round(
            self._probe(),
            {case: timed(partial(self._forward, case)) for case in TIMED},
            self._levels.seconds(),
            timed(lambda: [self._forward(DRAFT) for _ in range(LEVELS)]) / LEVELS,
            {case: kernel_seconds(self._runners[case.shape], self._steps[case]) for case in reversed(PROFILED)},
        )

    def reads(self, case: Case) -> dict[str, int]:
        """Bytes that the step reads, by kind of kernel."""
        return bytes_read(self._runners[case.shape].model, CONTEXT + case.rows)

    def _forward(self, case: Case) -> torch.Tensor:
        return self._runners[case.shape].forward([self._steps[case]])


class DraftLevels:
    """Times an LM drafter over one request."""

    def __init__(self, model: LoadedModel) -> None:
        self.drafter = LMDrafter(TorchExecutor(Runner(model, SLOTS), vocab_size=VOCAB), TreeShape(WIDTH))

    def seconds(self) -> float:
        """Of one level: what `LEVELS` take beyond the first, which has only the last token's row."""
        params = SamplingParams(temperature=TEMPERATURE, max_tokens=CONTEXT)
        request = Request(0, range(1, CONTEXT), params, 0, frozenset(), CONTEXT)
        self._propose(request, 1)  # the prompt's KV
        first, all_levels = (self._propose(request, levels) for levels in (1, LEVELS))
        self.drafter.close(request)
        return (all_levels - first) / (LEVELS - 1)

    def _propose(self, request: Request, levels: int) -> float:
        """Seconds of a tree; then a token that the tree may lack is committed."""
        limits = DraftLimits(NODES, NODES, levels, price=0.0)
        spent = timed(lambda: self.drafter.propose([request], limits))
        self.drafter.commit(request, request.extend([1]))
        return spent


def forward_time(case: Case, read_bytes: int, rounds: Sequence[Round]) -> ForwardTime:
    one_row = Case(case.shape, 1)
    return ForwardTime(
        case.shape,
        case.rows,
        _median_ms(one.forwards[case] for one in rounds),
        statistics.median(one.forwards[case] / one.forwards[one_row] for one in rounds),
        read_bytes,
        _median_ms(one.floor(read_bytes) for one in rounds),
        statistics.median(one.floor(read_bytes) / one.forwards[case] for one in rounds),
    )


def profile_of(case: Case, reads: dict[str, int], rounds: Sequence[Round]) -> ForwardProfile:
    kernels = [kernel_time(case, kind, reads[kind], rounds) for kind in KINDS]
    return ForwardProfile(case.shape, case.rows, _median_ms(sum(one.kernels[case].values()) for one in rounds), kernels)


def kernel_time(case: Case, kind: str, read_bytes: int, rounds: Sequence[Round]) -> KernelTime:
    spent = _median_ms(one.kernels[case][kind] for one in rounds)
    speed = read_bytes / (spent * 1e6) if read_bytes else None
    return KernelTime(kind, spent, read_bytes, speed, _median_ms(one.floor(read_bytes) for one in rounds))


def _median_ms(seconds: Iterable[float]) -> float:
    return 1000 * statistics.median(seconds)


def print_steps(report: StepsReport) -> None:
    machine, precision = report.machine, f"{report.dtype}, quantization {report.quantization}"
    title = f"a step at context {report.context}, {precision}, {report.repeats} rounds on {machine.threads} threads"
    probe = f"the probe reads {report.read_gb_per_s} GB/s"
    header = ("model", "rows", "ms", "of 1 row", "MB read", "floor, ms", "of the floor")
    print_table(f"{title}; {probe}", header, map(_forward_row, report.forwards))
    draft = report.draft
    row = (draft.rows, f"{draft.forward_ms:.3f}", f"{draft.level_ms:.3f}")
    print_table("one level of the draft", ("rows", "ms, forward alone", "ms, whole level"), [row])
    for profile in report.profiles:
        title = f"{profile.shape}, {profile.rows} rows, kernel by kernel: {profile.milliseconds:.2f} ms"
        header = ("", "ms", "of all", "MB read", "GB/s", "floor, ms", "above it, ms")
        print_table(title, header, [_kernel_row(kernel, profile) for kernel in profile.kernels])


def _forward_row(time: ForwardTime) -> tuple[object, ...]:
    ends = (f"{time.read_bytes / 1e6:.1f}", f"{time.floor_ms:.2f}", f"{time.share_of_floor:.0%}")
    return (time.shape, time.rows, f"{time.milliseconds:.2f}", f"{time.of_one_row:.2f}", *ends)


def _kernel_row(kernel: KernelTime, profile: ForwardProfile) -> tuple[object, ...]:
    head = (kernel.kind, f"{kernel.milliseconds:.3f}", f"{kernel.milliseconds / profile.milliseconds:.1%}")
    above = f"{kernel.milliseconds - kernel.floor_ms:.3f}"
    if kernel.gb_per_s is None:
        return (*head, "", "", "", above)
    return (*head, f"{kernel.read_bytes / 1e6:.2f}", f"{kernel.gb_per_s:.1f}", f"{kernel.floor_ms:.3f}", above)
