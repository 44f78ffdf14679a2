"""A process that takes steps of a model and says how long each took: our forward, or that of transformers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from pilotfish.bench.forwards import CONTEXT, step_rows
from pilotfish.engine.processes.process import die_with_parent, name_process
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.loading.loader import DTYPES, load_model

WARM_UP = 1  # steps
LEAST = 2  # steps: spinning threads beside neighbours take seconds for one


class Stepper(Protocol):
    def prepare(self, rows: int) -> Callable[[], object]:
        """The next step of so many rows, after `CONTEXT` tokens. Untimed."""
        ...


class OurStepper:
    """A token and a tree below it."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        executor = TorchExecutor(load_model(directory, dtype, torch.device("cpu"), eager=False), 2 * CONTEXT)
        self.prepare = cache(lambda rows: partial(executor.forward, [step_rows(executor, rows)]))


class TheirStepper:
    """As many tokens in a row, as transformers verifies what an assistant guessed; one is plain decoding."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        self._tokens = torch.arange(1, CONTEXT + 2)[None]
        self._cache, self._grown = DynamicCache(), 0
        self._model(self._tokens[:, :CONTEXT], past_key_values=self._cache)

    def prepare(self, rows: int) -> Callable[[], object]:
        if self._grown:
            self._cache.crop(-self._grown)
        self._grown = rows
        return partial(self._model, self._tokens[:, -rows:], past_key_values=self._cache)


STEPPERS: dict[str, Callable[[Path, torch.dtype], Stepper]] = {"ours": OurStepper, "transformers": TheirStepper}


def step_seconds(stepper: Stepper, rows: int, seconds: float) -> list[float]:
    """Times of the steps that begin within so many seconds, `LEAST` at least, after those to warm up."""
    for _ in range(WARM_UP):
        stepper.prepare(rows)()
    times, end = list[float](), time.perf_counter() + seconds
    while len(times) < LEAST or time.perf_counter() < end:
        step, began = stepper.prepare(rows), time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return times


def main() -> None:
    """Arguments: one of STEPPERS, a model's directory, a format, threads."""
    name, directory, dtype, threads = sys.argv[1:]
    name_process(f"steps of {name}")
    die_with_parent()
    torch.set_num_threads(int(threads))
    with torch.inference_mode():
        stepper = STEPPERS[name](Path(directory), DTYPES[dtype])
        _answer({})
        for line in sys.stdin:
            _answer({"times": step_seconds(stepper, **json.loads(line))})


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
