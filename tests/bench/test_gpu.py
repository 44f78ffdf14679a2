"""The GPU bench, as far as it goes without one."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from pilotfish.bench import app
from pilotfish.bench.gpu import attention_contest
from pilotfish.bench.shapes import SHAPES, llama, random_model
from pilotfish.bench.steps import kv_bytes
from pilotfish.errors import InputError

CPU = torch.device("cpu")
TINY = llama(layers=1, hidden=32, heads=4, kv_heads=2, ffn=48)


@pytest.mark.parametrize("arguments", [[], ["--dtype", "int8"]])
def test_it_is_refused_in_one_line(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["gpu", *arguments])
    assert isinstance(result.exception, InputError) and "\n" not in str(result.exception)


@pytest.mark.parametrize("rows", [1, 9])
def test_contestants_do_the_same_work(rows: int) -> None:
    pytest.importorskip("triton")
    device = torch.device("cuda") if torch.cuda.is_available() else CPU
    torch.manual_seed(0)
    contest = attention_contest(TINY, rows, torch.float32, device)
    expected = contest["dense"]()
    for other in (contest["triton"], contest["sdpa"]):
        torch.testing.assert_close(other(), expected, rtol=1e-5, atol=1e-5)


def test_shapes_have_the_sizes_of_their_names() -> None:
    millions = {"88m": 88.1, "344m": 344.0, "draft": 5.6}
    for name, shape in SHAPES.items():
        with torch.device("meta"):
            model = LlamaForCausalLM(shape)
        count = sum(p.numel() for p in model.parameters())
        assert round(count / 1e6, 1) == millions[name]


def test_keys_and_values_of_every_layer_are_read() -> None:
    assert kv_bytes(random_model(TINY, torch.float32, CPU), 10) == 4 * 10 * 2 * TINY.num_key_value_heads * 64


def test_a_random_model_runs_as_any_other() -> None:
    model = random_model(TINY, torch.bfloat16, CPU)
    assert model.dtype == torch.bfloat16 and model.config.vocab_size == 8192 and not model.generation.eos_ids
