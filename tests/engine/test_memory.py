"""The memory plan: what it counts, what it gives to KV, what it refuses and offers instead."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from sizes import paired
from support import DENSE, KINDS, PER_HEAD, kept_bytes, kept_elements, make_engine, tiny_model
from thread_ranks import thread_groups
from transformers import AutoModelForCausalLM

from pilotfish.config.engine import EngineConfig
from pilotfish.engine import memory
from pilotfish.engine.memory import plan_memory
from pilotfish.engine.processes import host_memory
from pilotfish.engine.processes.host_memory import GIB, divided
from pilotfish.errors import ModelError
from pilotfish.model.loading.footprint import footprint
from pilotfish.model.loading.loader import load_model

CPU = torch.device("cpu")


def config(target: Path, **fields: Any) -> EngineConfig:
    return EngineConfig(target=target, **{"dtype": "float32", **fields})


PRECISIONS = list(product((torch.float32, torch.bfloat16), (False, True)))


@pytest.mark.parametrize(("kind", "precision"), paired(list(KINDS), PRECISIONS))
def test_weights_are_those_loaded(tiny_models: dict[str, Path], kind: str, precision: tuple[torch.dtype, bool]) -> None:
    dtype, eager = precision
    directory = tiny_models[kind]
    planned = footprint(directory, dtype, CPU, eager=eager)
    loaded = load_model(directory, dtype, CPU, eager=eager)
    assert planned.weights == pytest.approx(kept_bytes(loaded.module), rel=0.02)
    assert planned.slot == loaded.config.num_hidden_layers * kept_elements(kind) * dtype.itemsize
    assert planned.parameters == AutoModelForCausalLM.from_pretrained(directory).num_parameters()


@pytest.mark.parametrize("kind", PER_HEAD)
def test_a_ranks_weights_are_those_of_its_shard(tmp_path: Path, kind: str) -> None:
    """Of neurons that divide into whole panels."""
    tiny_model(kind, intermediate_size=256, moe_intermediate_size=256).save_pretrained(tmp_path)
    dtype = torch.bfloat16
    planned = footprint(tmp_path, dtype, CPU, eager=False, ranks=2)
    for group in thread_groups(2):
        loaded = load_model(tmp_path, dtype, CPU, eager=False, group=group)
        assert planned.weights == pytest.approx(kept_bytes(loaded.module), rel=0.02)
    assert planned.slot == loaded.config.num_hidden_layers * 2 * 1 * 32 * dtype.itemsize  # a head of 32


@pytest.mark.parametrize("kind", DENSE[:2])
def test_int8_weights_are_planned_as_they_are_kept(tiny_models: dict[str, Path], kind: str) -> None:
    directory = tiny_models[kind]
    planned = footprint(directory, torch.bfloat16, CPU, eager=False, quantization="int8")
    loaded = load_model(directory, torch.bfloat16, CPU, eager=False, quantization="int8")
    assert planned.weights == pytest.approx(kept_bytes(loaded.module), rel=0.02)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slots_of_int8_are_planned_as_they_are_kept(llama: Path, draft: Path, dtype: str) -> None:
    engine = make_engine(llama, draft=draft, mode="sync", dtype=dtype, kv_dtype="int8", kv_slots=500)
    pools = (engine.executor.kv, engine.drafters.draft_executor.kv)
    kept = sum(plane.nbytes for pool in pools for layer in pool for plane in layer)
    assert engine.memory.slot * 501 == kept == 501 * 2 * 2 * 2 * 2 * (32 + 4)  # models, layers, planes, heads
    assert f"500 KV slots of {engine.memory.slot} bytes" in engine.memory.describe()


def test_more_slots_of_int8_fit(llama: Path) -> None:
    plain = plan_memory(config(llama, kv_slots=100_000))
    tight = {"kv_slots": 100_000, "memory": (plain.fixed + plain.total) / 2 / GIB}
    with pytest.raises(ModelError, match=r"what would fit: .*--kv-dtype int8"):
        plan_memory(config(llama, **tight))
    assert plan_memory(config(llama, kv_dtype="int8", **tight)).slots == 100_000


def test_slots_are_what_requests_can_use_and_memory_holds(llama: Path) -> None:
    few = plan_memory(config(llama, max_requests=2))
    assert few.slots == 2 * 2048  # its context
    assert plan_memory(config(llama, max_requests=2, max_model_len=1000)).slots == 2000
    tight = plan_memory(config(llama, memory=(few.fixed + 1000 * few.slot) / GIB))
    assert 0 < tight.slots <= 1000 + 4000 * 1024 // few.slot  # the process may have grown meanwhile
    assert tight.total <= tight.limit
    assert plan_memory(config(llama, kv_slots=777)).slots == 777


def test_a_draft_is_counted_where_it_is_used(llama: Path, draft: Path) -> None:
    off, ngram, lm = (
        plan_memory(config(llama, draft=draft, kv_slots=1024, **fields))
        for fields in ({"mode": "off"}, {"mode": "sync", "drafter": "ngram"}, {"mode": "sync"})
    )
    assert off.draft is None and ngram.draft is None and lm.draft is not None
    assert lm.slot == 2 * off.slot  # two models of one shape
    assert lm.draft_in_slots == lm.draft.weights // lm.target.slot + 1024
    assert "the draft takes what" in lm.describe() and "the draft" not in off.describe()


def test_what_does_not_fit_is_refused_with_what_would(llama: Path, draft: Path) -> None:
    plan = plan_memory(config(llama, draft=draft, mode="sync", kv_slots=400_000))
    with pytest.raises(ModelError, match=r"^memory: 400000 KV slots .*what would fit: --kv-slots 256") as caught:
        make_engine(llama, draft=draft, mode="sync", kv_slots=400_000, memory=0.9 * plan.total / GIB)
    assert "--mode off" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="nothing that is offered here would fit"):
        make_engine(llama, memory=0.001)


def test_the_pool_has_what_was_planned(llama: Path) -> None:
    engine = make_engine(llama, kv_slots=0, max_requests=1)
    assert engine.memory.slots == engine.worker.scheduler.pool.capacity == engine.executor.num_slots == 2048


def test_a_control_groups_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = memory.available_memory(CPU)
    numbers = {"memory.max": 3 << 20, "memory.current": 2 << 20}
    monkeypatch.setattr(host_memory, "_number", lambda path: numbers[path.name])
    stat = {"MemAvailable": whole, "active_file": 1 << 19, "inactive_file": 1 << 18}
    monkeypatch.setattr(host_memory, "status_bytes", lambda _, name, **__: stat[name])
    assert memory.available_memory(CPU) == (1 << 20) + (1 << 19) + (1 << 18) < whole


def test_a_target_and_prefill_workers_share_a_host(llama: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they take no more than one would alone, whoever plans first."""
    monkeypatch.setattr(host_memory, "free_memory", lambda: 64 * GIB)
    plain = config(llama, draft=draft, mode="async", prefill_workers=2, kv_host_memory=1.5)
    shared = divided(plain)
    target, worker = plan_memory(shared), plan_memory(shared.of_prefill, GIB // 4)
    assert target.limit - round(1.5 * GIB) == worker.limit - GIB // 4 == shared.allotted
    of_draft = GIB + 2 * (draft / "model.safetensors").stat().st_size
    assert 0 <= host_memory.SHARE * 64 * GIB - (target.limit + 2 * worker.limit + of_draft) < 3
    assert divided(shared) is shared and not shared.of_draft.allotted
    for alone in ({"prefill_workers": 0}, {"memory": 3.0}, {"device": "cuda"}):
        assert not divided(replace(plain, **alone)).allotted


def test_what_does_not_fit_beside_prefill_workers_fits_without(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = plan_memory(config(llama, kv_slots=400_000)).total
    monkeypatch.setattr(host_memory, "free_memory", lambda: 2 * alone)
    with pytest.raises(ModelError, match=r"^memory: 400000 KV slots .*what would fit: .*--prefill-workers 0"):
        plan_memory(divided(config(llama, kv_slots=400_000, prefill_workers=2)))
