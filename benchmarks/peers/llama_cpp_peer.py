"""llama.cpp as a contestant, through its Python bindings. They have prompt lookup, and a protocol by which a draft
guesses for a model; a draft of its own they have not, so that is here: a second model that goes on greedily."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding
from peers.protocol import (
    DRAFT,
    LOOKUP,
    PLAIN,
    Generated,
    LoadedPeer,
    PeerSetup,
    Question,
    Way,
    serve,
    setup_of,
)

#: Names of llama.cpp's types for KV: its default, or float32.
KV = {"bfloat16": ("float16", llama_cpp.GGML_TYPE_F16), "float32": ("float32", llama_cpp.GGML_TYPE_F32)}
#: Tokens beyond a context that a last guess may need.
MARGIN = 64


class SmallModel(LlamaDraftModel):  # type: ignore[misc]
    """Guesses as many tokens as it is told to. It keeps its KV as far as the tokens are the same."""

    def __init__(self, llama: Any) -> None:
        self.llama, self.guessed = llama, 0

    def __call__(self, input_ids: npt.NDArray[np.intc], /, **_: Any) -> npt.NDArray[np.intc]:
        return np.fromiter(islice(self.llama.generate(input_ids.tolist(), temp=0.0), self.guessed), np.intc)


@dataclass(frozen=True)
class Pair:
    """A model, and what guesses for it."""

    llama: Any
    small: SmallModel | None = None


def load(text: str) -> LoadedPeer:
    """`text` is a PeerSetup of GGUF files."""
    setup = setup_of(text)
    speculative = partial(_llama, setup.target, setup, logits_all=True)  # without, rows of a batch have no logits
    lookup = speculative(draft_model=LlamaPromptLookupDecoding())
    ways: dict[str, Way] = {
        PLAIN: partial(_generate, Pair(_llama(setup.target, setup))),
        LOOKUP: partial(_generate, Pair(lookup)),
    }
    if setup.draft is not None:
        small = SmallModel(_llama(setup.draft, setup))
        pair = Pair(speculative(draft_model=small), small)
        ways |= {f"{DRAFT} of {guessed}": partial(_generate, pair, guessed=guessed) for guessed in setup.guesses}
    return LoadedPeer(ways, f"weights {setup.dtype}, KV {KV[setup.dtype][0]}")


def _llama(file: str, setup: PeerSetup, **options: Any) -> Any:
    kind = KV[setup.dtype][1]
    return llama_cpp.Llama(
        file,
        n_ctx=setup.context + MARGIN,
        n_threads=setup.threads,
        n_threads_batch=setup.threads,
        type_k=kind,
        type_v=kind,
        verbose=False,
        **options,
    )


def _generate(pair: Pair, question: Question, guessed: int = 0) -> Generated:
    """Nothing of an earlier prompt is used again: others compute it each time."""
    pair.llama.reset()
    if pair.small is not None:
        pair.small.llama.reset()
        pair.small.guessed = guessed
    began = time.perf_counter()
    tokens = list(islice(pair.llama.generate(question.prompt, temp=0.0), question.max_tokens))
    return Generated(seconds=time.perf_counter() - began, tokens=[int(token) for token in tokens])


if __name__ == "__main__":
    serve(load)
