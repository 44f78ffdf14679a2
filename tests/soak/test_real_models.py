"""Published models, as `pilotfish models get` has them from the package index."""

from pathlib import Path

import pytest
import torch
from published import library_model
from support import drain, make_engine, params, run

from pilotfish.engine.pairs.directories import PUBLISHED, download, model_directory

PROMPTS = [
    *("The capital of France is", "def fibonacci(n):", "Once upon a time, in a land far away,"),
    *("Die Hauptstadt von Deutschland", "日本の首都は", "1, 2, 3, 4,"),
]


@pytest.fixture(scope="module", params=PUBLISHED)
def name(request: pytest.FixtureRequest) -> str:
    download(request.param)
    return str(request.param)


def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    engine, library = (make_engine(model_directory("model", Path(name)), kv_slots=2048), library_model(download(name)))
    for prompt in PROMPTS:
        (sample,) = engine.submit(prompt, params(temperature=0.0, max_tokens=30))
        drain(engine)
        ids = torch.tensor([sample.request.tokens[: sample.request.num_prompt_tokens]])
        with torch.inference_mode():
            expected = library.generate(ids, max_new_tokens=30, do_sample=False)[0, ids.shape[1] :]
        assert sample.token_ids == expected.tolist(), prompt


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_speculation_changes_no_token(name: str, dtype: str) -> None:
    directory = model_directory("model", Path(name))
    for temperature in (0.0, 0.8):
        asked = [params(temperature=temperature, max_tokens=40, seed=i) for i in range(len(PROMPTS))]
        plain, speculating = (
            run(make_engine(directory, dtype=dtype, kv_slots=2048, **options), PROMPTS, asked)
            for options in ({}, {"mode": "sync", "drafter": "ngram", "nodes": 8})
        )
        assert plain == speculating
