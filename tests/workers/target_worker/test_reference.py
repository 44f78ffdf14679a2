"""Greedy decoding is that of transformers.generate, up to where its own two best logits are too close to call."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sizes import sized
from support import KINDS, drain, make_engine, run, sure_tokens
from transformers import AutoModelForCausalLM

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import NO_NODES, SequenceRows
from pilotfish.engine.engine import Engine
from pilotfish.engine.pairs import resolve_pair

NEW_TOKENS = sized(16, 32)
LENGTHS = (1, 2, 17, 47, 63, 64, 65, 700)  # up to and over a block of keys, and three times a tiny model's window
CLOSE = 1e-4


ALL = [*KINDS, "pycode"]


@pytest.fixture
def directory(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> Path:
    return resolve_pair("pycode").target if request.param == "pycode" else tiny_models[request.param]


#: Logits are compared for all; what follows from them, for a dense one, one with windows and one with experts.
some = pytest.mark.parametrize("directory", sized(["llama", "gemma2", "gpt_oss"], ALL), indirect=True)


@cache
def both(directory: Path) -> tuple[Any, Engine]:
    """transformers' model, and ours."""
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return reference.eval(), make_engine(directory)


def prompt_of(length: int, vocab: int) -> list[int]:
    return np.random.default_rng(length).integers(1, vocab, length).tolist()


@some
def test_greedy_tokens_of_a_batch_are_those_of_generate(directory: Path) -> None:
    reference, engine = both(directory)
    prompts = [prompt_of(length, engine.model.config.vocab_size) for length in LENGTHS]
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    for prompt, tokens in zip(prompts, run(engine, prompts, [greedy] * len(prompts)), strict=True):
        expected = sure_tokens(reference, prompt, NEW_TOKENS, CLOSE)
        assert tokens[: len(expected)] == expected, f"after {len(prompt)} tokens"
        assert expected  # so that something was compared


@pytest.mark.parametrize("directory", ALL, indirect=True)
def test_logits_are_those_of_transformers(directory: Path) -> None:
    reference, engine = both(directory)
    for length in LENGTHS:
        prompt = prompt_of(length, engine.model.config.vocab_size)
        rows = SequenceRows(0, prompt, np.arange(length, dtype=np.int32), NO_NODES, kept=[len(prompt) - 1])
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(engine.executor.forward([rows])[0], expected, rtol=0, atol=1e-4)


@some
def test_logprobs_are_those_of_transformers(directory: Path) -> None:
    """Of prompt and output, reported by an engine whose prompts come in chunks and whose batch mixes lengths."""
    reference, _ = both(directory)
    engine = make_engine(directory, max_rows=48)
    prompts = [prompt_of(length, engine.model.config.vocab_size) for length in (1, 2, 65, 130)]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, logprobs=3, prompt_logprobs=2)
    samples = [engine.submit(prompt, params)[0] for prompt in prompts]
    drain(engine)
    for prompt, sample in zip(prompts, samples, strict=True):
        tokens = prompt + sample.token_ids
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)
        reported = [*sample.prompt_logprobs, *sample.logprobs]
        assert [entry.token for entry in reported] == tokens[1:]
        for row, entry in zip(expected, reported, strict=False):
            assert entry.logprob == pytest.approx(row[entry.token].item(), abs=1e-4)
            for token, logprob in entry.top:
                assert logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert {len(entry.top) for entry in sample.logprobs} == {3}
