"""Heads whose layers are published in one convention or another: a short text tells which."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from head_files import write_eagle3
from support import edit_tensors, make_engine, native_model, write_model

from pilotfish.core.features.features import FINAL
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import NO_NODES, SequenceRows
from pilotfish.engine import heads
from pilotfish.engine.engine import Engine
from pilotfish.engine.heads import PROBE, PROBE_TOKENS, agreement
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.feature_tap import FeatureTap
from pilotfish.model.heads.spec import HeadFiles
from pilotfish.model.heads.target import TargetFacts
from pilotfish.model.loading.loader import LoadedModel
from pilotfish.model.loading.metadata import load_tokenizer

LAYERS, OTHERS = (2, 3, 4, 5), (1, 2, 3, 4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target"), "llama", seed=4, num_hidden_layers=6)


def probe_tokens(target: Path) -> list[int]:
    tokens: list[int] = load_tokenizer(target).encode(PROBE, add_special_tokens=False)[:PROBE_TOKENS]
    return tokens


def states_of(target: Path, layers: tuple[int, ...]) -> torch.Tensor:
    """Of the probe's tokens. [tokens, layers * hidden]"""
    model, tokens = native_model(target), probe_tokens(target)
    width = len(layers) * model.config.hidden_size
    executor = TorchExecutor(model, len(tokens), tap=FeatureTap(layers, width, lambda states: states, "raw"))
    slots = np.arange(len(tokens), dtype=np.int32)
    executor.forward([SequenceRows(0, tokens, slots, NO_NODES, [0])])
    return torch.from_numpy(executor.features(slots))


@pytest.fixture(scope="module")
def head(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It was fitted to the probe's text: from states of `LAYERS` at a token it has the target's last state at the
    next. Its file names layers in a way that may mean `OTHERS` too."""
    facts = TargetFacts.read(target)
    written = write_eagle3(tmp_path_factory.mktemp("head"), "modelopt", target=facts, layers=LAYERS)
    before, after = states_of(target, LAYERS)[:-1].double(), states_of(target, (FINAL,))[1:].double()
    fitted = torch.linalg.lstsq(before, after).solution.T.float()

    def fit(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
        tensors["fc.weight"], tensors["lm_head.weight"] = fitted.contiguous(), facts.lm_head().clone()
        tensors["norm.weight"].fill_(1.0)

    return edit_tensors(written, fit)


@pytest.mark.parametrize(("given", "expected"), [((), LAYERS), (OTHERS, OTHERS)])
def test_a_head_is_read_as_it_agrees_or_as_it_is_told(
    given: tuple[int, ...], expected: tuple[int, ...], target: Path, head: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), opened(target, head, draft_layers=given) as engine:
        assert engine.executor.tap is not None and engine.executor.tap.layers == expected
    lines = [record.getMessage() for record in caplog.records if "agrees with the target" in record.getMessage()]
    assert len(lines) == (0 if given else 1)
    assert all(part in line for line in lines for part in ("% from 2,3,4,5", "% from 1,2,3,4", "it takes 2,3,4,5"))


def test_the_probe_is_no_longer_than_the_target_s_context(target: Path, head: Path, monkeypatch: Any) -> None:
    lengths = []

    def counted(files: HeadFiles, model: LoadedModel, tokens: list[int]) -> float:
        lengths.append(len(tokens))
        return agreement(files, model, tokens)

    monkeypatch.setattr(heads, "agreement", counted)
    with opened(target, head, max_model_len=48) as engine:
        assert engine.executor.tap is not None and engine.executor.tap.layers == LAYERS
    assert lengths == [48, 48]


def test_a_head_that_was_fitted_is_right_in_an_engine(target: Path, head: Path) -> None:
    """Prompts whose KV was found have a tree in their first step: rows, features and positions belong together."""
    tokens, right = probe_tokens(target), 0
    prompts = [tokens[:count] for count in range(40, 200, 20)]
    with opened(target, head) as engine:
        for prompt in prompts * 2:
            (sample,) = engine.submit(prompt, SamplingParams(max_tokens=2, temperature=0.0))
            while engine.busy:
                engine.step()
            right += sample.request.stats.accepted_tokens
    assert right > 0.8 * len(prompts)


def opened(target: Path, head: Path, **config: Any) -> Engine:
    return make_engine(target, draft=head, mode="sync", drafter="lm", **config)
