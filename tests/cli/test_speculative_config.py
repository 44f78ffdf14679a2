"""vLLM's `--speculative-config`, key by key."""

import json
from pathlib import Path
from typing import Any

import pytest

from pilotfish.cli.options import engine_config
from pilotfish.cli.vllm_arguments import with_speculative_config
from pilotfish.config.engine import EngineConfig
from pilotfish.errors import InputError


def configured(llama: Path, **keys: Any) -> EngineConfig:
    return given(llama, json.dumps(keys))


def given(llama: Path, text: str, **options: Any) -> EngineConfig:
    return engine_config(with_speculative_config({"target": llama, "dtype": "float32", **options}, text))


def test_an_ngram_config(llama: Path) -> None:
    config = configured(llama, method="ngram", num_speculative_tokens=5, prompt_lookup_min=2, prompt_lookup_max=6)
    assert (config.mode, config.drafters, config.nodes, config.levels) == ("sync", ("ngram",), 5, 5)
    assert (config.ngram_min, config.ngram_max) == (2, 6)


def test_a_draft_model_is_what_a_model_means(llama: Path, draft: Path) -> None:
    config = configured(llama, model=str(draft), num_speculative_tokens=3, draft_tensor_parallel_size=1)
    assert (config.mode, config.drafters, config.draft, config.nodes) == ("sync", ("lm",), draft, 3)


def test_a_head_says_itself_whether_it_guesses_in_parallel(llama: Path, draft: Path) -> None:
    config = configured(llama, method="eagle3", model=str(draft), parallel_drafting=True)
    assert (config.drafters, config.draft) == (("lm",), draft)
    assert configured(llama, method="draft_model", model=str(draft), parallel_drafting=False).draft == draft


def test_a_mode_that_was_given_stays(llama: Path, draft: Path) -> None:
    assert given(llama, json.dumps({"model": str(draft)}), mode="async").mode == "async"


def test_adaptive_verification_is_the_budget(llama: Path) -> None:
    assert configured(llama, method="suffix", enable_adaptive_verification=False).budget == "fixed"
    assert configured(llama, method="suffix", enable_adaptive_verification=True).budget == "auto"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "speculative_config"),
        ("[]", "speculative_config"),
        ('{"method": "mlp_speculator"}', "speculative_config.method: 'mlp_speculator'"),
        ('{"method": "eagle3"}', "speculative_config.model: None"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "speculative_config.num_speculative_tokens: 0"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "speculative_config.num_speculative_tokens: True"),
        ('{"method": "ngram", "tensor_parallel_size": 2}', "speculative_config.tensor_parallel_size: 2"),
        ('{"method": "ngram", "draft_tensor_parallel_size": 2}', "speculative_config.draft_tensor_parallel_size: 2"),
        ('{"method": "ngram", "rejection_sample_method": "block"}', "speculative_config.rejection_sample_method"),
        ('{"method": "ngram", "max_model_len": 100}', "speculative_config.max_model_len: 100"),
        ('{"method": "ngram", "prompt_lookup_min": 5}', "ngram_max: 4"),
        ('{"model": ".", "parallel_drafting": true}', "speculative_config.parallel_drafting: True"),
        ('{"method": "draft_model"}', "speculative_config.model: None"),
        ('{"num_speculative_tokens": 4}', "speculative_config.method: None"),
        ('{"method": "ngram", "pace": 3}', "speculative_config.pace: there is no such option"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(llama: Path, text: str, named: str) -> None:
    with pytest.raises(InputError, match=named.replace("[", r"\[")):
        given(llama, text)
