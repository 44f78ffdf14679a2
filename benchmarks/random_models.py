"""Random models that engines serve, and executors whose forwards take turns."""

import shutil
import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from harness import every_round
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from pilotfish.cli.bench.contestants import take_turns
from pilotfish.cli.bench.gpu import WARM_UP, step_rows
from pilotfish.cli.bench.report import timed
from pilotfish.engine.pairs import resolve_pair
from pilotfish.model.executor import TorchExecutor


def write_served_model(shape: LlamaConfig, dtype: torch.dtype, directory: Path) -> None:
    """One that engines serve: with the bundled pair's tokenizer, which has fewer tokens."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    LlamaForCausalLM(shape).to(dtype).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_pair("pycode").target / name, directory)


def interleaved_ms(executors: Mapping[str, TorchExecutor], rows: int, repeats: int) -> dict[str, float]:
    """Median of each executor's forward of `context_and_tree`. They take turns: what else the machine does meanwhile
    slows them alike."""
    forwards = {name: partial(executor.forward, [step_rows(executor, rows)]) for name, executor in executors.items()}
    calls = {name: every_round(partial(timed, forward)) for name, forward in forwards.items()}
    times = take_turns(calls, range(WARM_UP + repeats), WARM_UP)
    return {name: 1000 * statistics.median(seconds) for name, seconds in times.items()}
