"""llama.cpp as a contestant, through its Python bindings. They have prompt lookup, and a protocol by which a draft
guesses for a model; a draft of its own they have not, so that is here: a second model that goes on greedily."""

from __future__ import annotations

import time
from functools import partial
from itertools import islice
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

from pilotfish.cli.bench.compare.peer import GUESSES, LOOKUP, PLAIN, Generated, LoadedPeer, PeerSetup, Question
from pilotfish.config.text import config_of

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


def load(text: str) -> LoadedPeer:
    """`text` is a PeerSetup of GGUF files."""
    setup = config_of(text, PeerSetup)
    speculative = partial(_llama, setup.target, setup, logits_all=True)  # without, rows of a batch have no logits
    ways = {
        PLAIN: partial(_generate, _llama(setup.target, setup)),
        LOOKUP: partial(_generate, speculative(draft_model=LlamaPromptLookupDecoding())),
    }
    if setup.draft is not None:
        small = SmallModel(_llama(setup.draft, setup))
        assisted = partial(_generate, speculative(draft_model=small), small=small)
        ways |= {name: partial(assisted, guessed=guessed) for name, guessed in GUESSES.items()}
    return LoadedPeer(ways, f"weights {setup.dtype}, KV {KV[setup.dtype][0]}")


def _llama(file: str, setup: PeerSetup, **options: Any) -> Any:
    kind, threads = KV[setup.dtype][1], setup.threads
    options |= {"n_threads": threads, "n_threads_batch": threads, "type_k": kind, "type_v": kind}
    return llama_cpp.Llama(file, n_ctx=setup.context + MARGIN, verbose=False, **options)


def _generate(llama: Any, question: Question, small: SmallModel | None = None, guessed: int = 0) -> Generated:
    """Nothing of an earlier prompt is used again: others compute it each time."""
    llama.reset()
    if small is not None:
        small.llama.reset()
        small.guessed = guessed
    began = time.perf_counter()
    tokens = list(islice(llama.generate(question.prompt, temp=0.0), question.max_tokens))
    return Generated(seconds=time.perf_counter() - began, tokens=[int(token) for token in tokens])
