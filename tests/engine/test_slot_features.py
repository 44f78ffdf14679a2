"""Features in a target's slots are those of the tokens there, bit for bit, however the slots came by them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import CONTEXT, SNIPPETS, assert_idle, make_engine, native_model, params, settle

from pilotfish.config.fields import KVDType
from pilotfish.core.features.features import FINAL, Features
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import NO_NODES, SequenceRows
from pilotfish.engine import engine as engine_module
from pilotfish.engine.engine import Engine
from pilotfish.engine.sample import Sample
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.feature_tap import FeatureTap

PROMPTS = [[place + 3, *range(20 + 7 * place, 320 + 7 * place)] for place in range(4)]


TAP = FeatureTap((0, 2, FINAL), 10, lambda states: states[:, ::20], "every 20th")


def make_tapped(monkeypatch: pytest.MonkeyPatch, target: Path, **config: Any) -> Engine:
    def tapped(*args: Any, **options: Any) -> TorchExecutor:
        return TorchExecutor(*args, **{**options, "tap": TAP})

    monkeypatch.setattr(engine_module, "TorchExecutor", tapped)
    return make_engine(target, **config)


def finish(
    engine: Engine, prompts: Sequence[Any], each: Sequence[SamplingParams], reference: Reference
) -> list[Sample]:
    """After each step every request has the features of its tokens, as far as it holds slots of them."""
    samples = [s for prompt, asked in zip(prompts, each, strict=True) for s in engine.submit(prompt, asked)]
    seen = list[tuple[Sample, range, Features]]()
    while engine.busy:
        engine.step()
        for sample in samples:
            request = sample.request
            held = range(request.num_gone, request.num_computed)
            if request.finish_reason is None and held:
                seen.append((sample, held, engine.executor.features(request.held)))
    whole = {sample: reference.features(sample.request.tokens) for sample in samples}
    for sample, held, features in seen:
        assert np.array_equal(features, whole[sample][held.start : held.stop])
    assert len(seen) >= len(samples) and all(features.any(axis=1).all() for _, _, features in seen)
    assert_idle(engine)
    return samples


class Reference:
    """The same target, which runs each text alone, from nothing."""

    def __init__(self, target: Path, kv_dtype: KVDType = "auto") -> None:
        self._executor = TorchExecutor(native_model(target, kv_dtype=kv_dtype), CONTEXT, tap=TAP)

    def features(self, tokens: Sequence[int]) -> Features:
        slots = np.arange(len(tokens), dtype=np.int32)
        self._executor.forward([SequenceRows(0, tokens, slots, NO_NODES, ())])
        return self._executor.features(slots)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_of_prefixes_that_are_found_and_of_guesses_that_are_right(
    llama: Path, draft: Path, kv_dtype: KVDType, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = Reference(llama, kv_dtype)
    with make_tapped(monkeypatch, llama, draft=draft, mode="sync", drafter="lm", kv_dtype=kv_dtype) as engine:
        first, second = PROMPTS[0], [*PROMPTS[0][:200], 9, 8, 7]
        (one,) = finish(engine, [first], [params(20)], reference)
        (two,) = finish(engine, [second], [params(20)], reference)
        samples = finish(engine, [second], [params(20, n=3)], reference)
    assert one.request.stats.accepted_tokens and two.request.stats.cached_tokens == 200
    assert len({tuple(sample.token_ids) for sample in samples}) == 3


def test_of_requests_that_give_way(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_tapped(monkeypatch, llama, kv_slots=300, max_rows=64) as engine:
        each = [params(120, seed=seed) for seed in range(3)]
        samples = finish(engine, SNIPPETS[:3], each, Reference(llama))
    assert any(sample.request.stats.preemptions for sample in samples)


@pytest.mark.usefixtures("patient_tiers")
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_of_what_a_tier_gives_back(tier: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = {"kv_host_memory": 0.01} if tier == "host" else {"kv_disk": tmp_path / "kv", "kv_disk_size": 0.01}
    reference = Reference(llama)
    with make_tapped(monkeypatch, llama, kv_slots=512, **where) as engine:
        assert engine.tiers is not None
        for prompt in PROMPTS * 2:
            (sample,) = finish(engine, [prompt], [params(4)], reference)
            settle(engine.tiers)
    assert sample.request.stats.cached_by_tier == {tier: 256}


def test_of_a_model_of_windows_alone(tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that were given back are others' by now; those that are held have their own."""
    with make_tapped(monkeypatch, tiny_models["mistral"], kv_slots=64, max_rows=16) as engine:
        prompts, each = [PROMPTS[0][:150], PROMPTS[1][:90]], [params(60), params(90)]
        samples = finish(engine, prompts, each, Reference(tiny_models["mistral"]))
    assert all(len(sample.request.tokens) > 64 for sample in samples)
