"""Processes that only serve leave out what transformers imports for training, and miss nothing."""

import subprocess
import sys
from pathlib import Path

import pytest
from sizes import in_soak, sized
from support import DENSE, MIXTURES, SNIPPETS, make_engine, run

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.model.loading import serving_imports

LEFT_OUT = ("torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.tensor", "scipy")
ORDER = (*sized(DENSE[:1], DENSE), *sized(MIXTURES[-1:], MIXTURES))
PARAMS = [SamplingParams(temperature=0.8, seed=index, max_tokens=12) for index in range(3)]

#: A worker: its imports, engines, outputs. Arguments: model directories.
WORKER = """
import sys
from pilotfish.model.loading.serving_imports import import_for_serving
import_for_serving()
from pathlib import Path
from pilotfish import SamplingParams
from pilotfish.config.engine import EngineConfig
from pilotfish.engine.engine import Engine

outputs, left = [], []
for target in sys.argv[1:]:
    with Engine(EngineConfig(target=Path(target), dtype="float32", threads=1, kv_slots=4096)) as engine:
        samples = [engine.submit(text, SamplingParams(temperature=0.8, seed=i, max_tokens=12))[0]
                   for i, text in enumerate(TEXTS)]
        while engine.busy:
            engine.step()
        outputs.append([sample.token_ids for sample in samples])
    if len(outputs) == NUM_DENSE:
        left = [name for name in LEFT_OUT if name in sys.modules]
print(outputs)
print(left)
"""
LATER = """
import torch._dynamo
import torch.distributed
from transformers.masking_utils import TransformGetItemToIndex
print(torch.distributed.is_available(), callable(torch._dynamo.optimize), type(TransformGetItemToIndex()).__module__)
"""


@pytest.fixture(scope="module")
def printed(tiny_models: dict[str, Path]) -> list[str]:
    given = f"TEXTS, LEFT_OUT, NUM_DENSE = {SNIPPETS[:3]!r}, {LEFT_OUT!r}, {sized(1, len(DENSE))}"
    source = "\n".join((given, WORKER, sized("", LATER)))
    command = [sys.executable, "-c", source, *(str(tiny_models[kind]) for kind in ORDER)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_every_architecture_gives_the_same_tokens(printed: list[str], tiny_models: dict[str, Path]) -> None:
    expected = [run(make_engine(tiny_models[kind]), SNIPPETS[:3], PARAMS) for kind in ORDER]
    assert printed[0] == str(expected)


def test_modules_that_serving_does_not_need_are_not_imported(printed: list[str]) -> None:
    """For models without experts: experts' tensors are joined by operations that torch decomposes in Python."""
    assert printed[1] == "[]"


@in_soak
def test_modules_that_were_left_out_can_be_imported_later(printed: list[str]) -> None:
    assert printed[2] == "True True torch._dynamo._trace_wrapped_higher_order_op"


def test_a_transformers_that_cannot_do_without_is_imported_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(sys.modules)
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils")
    monkeypatch.setattr(serving_imports, "_NEEDED", ("transformers.no_such_module",))
    serving_imports.import_for_serving()
    assert {name for name in before if name != "transformers.modeling_utils"} <= sys.modules.keys()
    assert sys.modules["torch"] is before["torch"]
