"""The script about GPUs, as far as it goes without one."""

from __future__ import annotations

import pytest
import torch
from gpu_steps import attention_contest, run_gpu
from harness import Options
from random_models import llama, random_model

from pilotfish.cli.bench.report import ProgressBar
from pilotfish.errors import InputError

TINY = llama(layers=1, hidden=32, heads=4, kv_heads=2, ffn=48)


def test_it_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"^there is no CUDA device here$"):
        run_gpu(Options(dtype="auto", repeats=1), ProgressBar())


@pytest.mark.parametrize("rows", [1, 9])
def test_contestants_do_the_same_work(rows: int) -> None:
    pytest.importorskip("triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    contest = attention_contest(TINY, rows, torch.float32, device)
    expected = contest["dense"]()
    for other in (contest["triton"], contest["sdpa"]):
        torch.testing.assert_close(other(), expected, rtol=1e-5, atol=1e-5)


def test_a_random_model_runs_as_any_other() -> None:
    model = random_model(TINY, torch.bfloat16, torch.device("cpu"))
    assert model.dtype == torch.bfloat16 and model.config.vocab_size == 8192 and not model.generation.eos_ids
