"""OpenVINO GenAI as a contestant: default hints, and without its cache of earlier prompts, which would spare it what
all others compute each time."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import openvino_genai
from peers.openvino_files import exported, greedy, inputs_of, pipeline, properties_of
from peers.protocol import (
    DRAFT,
    LOOKUP,
    PLAIN,
    Generated,
    LoadedPeer,
    Question,
    Way,
    serve,
    setup_of,
)

#: Tokens that are guessed at a time and the longest n-gram, as in GenAI's own example.
LOOKUP_TOKENS, LOOKUP_NGRAM = 5, 3


def load(text: str) -> LoadedPeer:
    """`text` is a PeerSetup of GGUF files."""
    setup = setup_of(text)
    properties = properties_of(setup.threads, setup.dtype)
    target = exported(Path(setup.target))
    ways: dict[str, Way] = {
        PLAIN: partial(_generate, pipeline(target, properties)),
        LOOKUP: partial(
            _generate, pipeline(target, properties, prompt_lookup=True), guessed=LOOKUP_TOKENS, ngram=LOOKUP_NGRAM
        ),
    }
    if setup.draft is not None:
        guesses = openvino_genai.draft_model(exported(Path(setup.draft)), "CPU", **properties)
        assisted = partial(_generate, pipeline(target, properties, draft_model=guesses))
        ways[DRAFT] = assisted
        ways |= {f"{DRAFT} of {guessed}": partial(assisted, guessed=guessed) for guessed in setup.guesses}
    return LoadedPeer(ways, f"weights float16, products and KV {setup.dtype}")


def _generate(pipe: Any, question: Question, guessed: int = 0, ngram: int = 0) -> Generated:
    """Guesses so many tokens at a time; 0: as many as GenAI chooses."""
    config = greedy(question.max_tokens)
    if guessed:
        config.num_assistant_tokens = guessed
    if ngram:
        config.max_ngram_size = ngram
    began = time.perf_counter()
    tokens = pipe.generate(inputs_of(question.prompt), config).tokens[0]
    return Generated(seconds=time.perf_counter() - began, tokens=list(tokens))


if __name__ == "__main__":
    serve(load)
