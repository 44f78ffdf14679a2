"""What precision a model runs in, and that PyTorch multiplies bfloat16 only where there are instructions for it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import Loopback
from sizes import sized
from support import KINDS, SNIPPETS, make_engine, native_model, run, write_model
from torch.utils._python_dispatch import TorchDispatchMode

from pilotfish.config.engine import EngineConfig
from pilotfish.config.text import config_of, config_text
from pilotfish.config.workers import DraftConfig
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.checks import check_models
from pilotfish.engine.drafts.draft_pool import make_worker
from pilotfish.engine.memory import precision_here
from pilotfish.errors import ParameterError
from pilotfish.model.cpu.native import load_kernels
from pilotfish.model.loading import precision
from pilotfish.model.loading.configuration import load_config
from pilotfish.model.loading.precision import multiplies_bfloat16, precision_of, quickest

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PRODUCTS = ("mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "addmv", "dot", "linear", "matmul", "einsum", "_scaled_mm")
needs_kernels = pytest.mark.skipif(not load_kernels(), reason="no C++ compiler")


class Products(TorchDispatchMode):
    """Notes the dtypes that PyTorch multiplies meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and func.name().split("::")[1].split(".")[0] in PRODUCTS:
            self.dtypes |= {arg.dtype for arg in args if isinstance(arg, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.fixture
def without_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda _: False)


# -- whether there are instructions

#: Limits of oneDNN without products of bfloat16.
WITHOUT = ("AVX512_CORE_VNNI", "avx2", "AVX2_VNNI_2", "SSE41")


@pytest.mark.parametrize("limit", ["", "ALL", "AVX512_CORE_BF16", "avx512_core_amx", *WITHOUT])
@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_pytorch_multiplies_with_what_its_library_may_use(
    name: str, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    for other in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, limit)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert multiplies_bfloat16(CPU) == (limit not in WITHOUT)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert not multiplies_bfloat16(CPU)


# -- the choice


@pytest.mark.parametrize(
    ("kernels", "instructions", "name"),
    [(True, True, "bfloat16"), (True, False, "bfloat16"), (False, True, "bfloat16"), (False, False, "float32")],
)
def test_auto_is_what_the_machine_is_quick_in(
    kernels: bool, instructions: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda _: instructions)
    chosen = quickest(CPU, kernels=kernels)
    assert chosen.name == name and chosen.dtype == getattr(torch, name)
    assert str(chosen) == f"dtype: {name} ({chosen.why})" and chosen.why and "\n" not in str(chosen)


@pytest.mark.usefixtures("without_instructions")
def test_bfloat16_without_instructions_is_refused_where_no_kernel_runs_it(llama: Path) -> None:
    config = load_config(llama)
    with pytest.raises(
        ParameterError, match=r"^dtype: 'bfloat16' is not allowed; expected auto or float32: "
    ) as caught:
        precision_of("bfloat16", config, CPU, eager=True)
    assert precision_of("float32", config, CPU, eager=True).name == "float32"
    assert precision_of("auto", config, CPU, eager=True).name == "float32"
    asked = EngineConfig(target=llama, mode="off", dtype="bfloat16", eager=True, kv_slots=256)
    assert check_models(asked).problems == [str(caught.value)]


# -- products


@needs_kernels
@pytest.mark.parametrize("kind", sized(("llama", "gemma2", "gpt_oss"), KINDS))
def test_the_kernels_leave_no_bfloat16_product_to_pytorch(kind: str, tiny_models: dict[str, Path]) -> None:
    with Products() as products:
        engine = make_engine(tiny_models[kind], dtype="bfloat16")
        run(engine, SNIPPETS[:1], [SamplingParams(temperature=0.8, max_tokens=4, seed=0)])
    assert torch.bfloat16 not in products.dtypes
    assert native_model(tiny_models[kind], torch.bfloat16).native


@pytest.mark.usefixtures("without_instructions")
@pytest.mark.parametrize("quantization", sized(["none"], ["none", "int8"]))
def test_without_kernels_all_is_multiplied_in_float32(quantization: str, llama: Path, draft: Path) -> None:
    asked = {"dtype": "auto", "eager": True, "quantization": quantization, "budget": "auto"}
    with Products() as products:
        engine = make_engine(llama, draft=draft, mode="sync", **asked)
        run(engine, SNIPPETS[:1], [SamplingParams(temperature=0.8, max_tokens=4, seed=0)])
    assert engine.model.dtype == engine.drafters.draft_executor.model.dtype == torch.float32
    assert products.dtypes and torch.bfloat16 not in products.dtypes
    assert all(plane.dtype == torch.float32 for layer in engine.executor.kv for plane in layer)


@needs_kernels
@pytest.mark.usefixtures("without_instructions")
def test_a_draft_that_the_kernels_do_not_run_has_its_own_precision(llama: Path, tmp_path: Path) -> None:
    narrow = write_model(tmp_path, "llama", head_dim=16)
    engine = make_engine(llama, draft=narrow, mode="sync", dtype="auto")
    assert engine.model.dtype == torch.bfloat16 and engine.drafters.draft_executor.model.dtype == torch.float32
    assert precision_here(engine.config, narrow).name == "float32"
    params = [SamplingParams(temperature=0.8, max_tokens=8, seed=0)]
    assert run(engine, SNIPPETS[:1], params) == run(make_engine(llama, dtype="auto"), SNIPPETS[:1], params)


@pytest.mark.usefixtures("without_instructions")
def test_a_draft_worker_finds_its_precision_where_it_runs(llama: Path, draft: Path) -> None:
    target = EngineConfig(target=llama, draft=draft, mode="async", kv_slots=1024, threads=1, eager=True)
    config = config_of(config_text(target), EngineConfig).of_draft
    assert config.dtype == "auto"
    channel, _ = Loopback.pair(b"draft")
    worker = make_worker(DraftConfig(model=config, listen="ipc://nowhere"), channel)
    assert worker.grower.executor.kv[0].keys.dtype == torch.float32


def test_the_line_says_what_was_chosen_and_why(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="pilotfish"):
        engine = make_engine(llama, dtype="auto")
    lines = [message for message in caplog.messages if message.startswith("dtype: ")]
    assert lines == [str(engine.precision)] and engine.precision.why


@pytest.mark.parametrize("eager", [False, True])
def test_float16_is_for_cuda(llama: Path, eager: bool) -> None:
    config = load_config(llama)
    found = precision_of("float16", config, CUDA, eager=eager)
    assert (found.dtype, str(found)) == (torch.float16, "dtype: float16")
    with pytest.raises(ParameterError, match=r"expected auto, bfloat16 or float32 on a CPU; float16 needs CUDA"):
        precision_of("float16", config, CPU, eager=eager)
