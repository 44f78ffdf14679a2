from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp

from pilotfish.errors import ModelError
from pilotfish.printable import one_line

#: Sequences that llama.cpp knows at once.
MOST_SEQUENCES = 256
#: Rows of one decode.
BATCH = 512
#: More layers than any model has.
ALL_LAYERS = 1 << 16
#: Of llama.cpp's lines: errors.
ERROR = 4


class Complaints:
    """The first error that llama.cpp logs: it causes the later ones."""

    def __init__(self) -> None:
        self.first = ""
        self._callback = llama_cpp.llama_log_callback(self._heard)  # as long as llama.cpp may call it
        llama_cpp.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _heard(self, level: int, text: bytes, _data: object) -> None:
        if level == ERROR and not self.first:
            self.first = text.decode(errors="replace").strip().partition(": ")[2]  # without a function's name


COMPLAINTS = Complaints()


def load_gguf(file: Path, on_gpu: bool) -> Any:
    """ModelError for a file that is not GGUF, or a model whose KV cannot be shared between sequences."""
    llama_cpp.llama_backend_init()
    options = llama_cpp.llama_model_default_params()
    options.n_gpu_layers = ALL_LAYERS if on_gpu else 0
    COMPLAINTS.first = ""
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), options)
    if not model:
        reason = one_line(COMPLAINTS.first) or "it is no GGUF file"
        raise ModelError(f"draft: {file} cannot be loaded by llama.cpp: {reason}")
    if not llama_cpp.llama_model_has_decoder(model) or llama_cpp.llama_model_has_encoder(model):
        raise ModelError(f"draft: {file} is no model that generates text")
    if llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model):
        raise ModelError(f"draft: {file} is a recurrent model; one that keeps KV of every token is needed")
    return model


def new_context(model: Any, cells: int, threads: int, wide_kv: bool) -> Any:
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = cells, BATCH, BATCH, MOST_SEQUENCES
    options.kv_unified = options.swa_full = True
    if wide_kv:
        options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
    if threads:
        options.n_threads = options.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, options)
    if not context:
        raise ModelError(f"draft: llama.cpp has no memory for KV of {cells} tokens; --kv-slots asks for fewer")
    return context
