"""A draft on llama.cpp: Vulkan, Metal, ROCm, CUDA, CPUs. llama.cpp keeps KV in cells of at most 256 sequences, and a
token sees its sequence's cells. So each path is a sequence that shares cells with others (`runs.py`):

    sequence 0    the ─── cat ─── sat                slot of `sat`: sequence 0, position 2
    sequence 1    the ─── cat ─── ran ─── off        made of sequence 0 up to `cat`; no KV was copied
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import torch
from torch import Tensor

from pilotfish.core.scheduling.executor import SequenceRows
from pilotfish.errors import EngineError, ModelError, ParameterError
from pilotfish.model.backends.logits_executor import LogitsExecutor
from pilotfish.model.backends.runs import NOWHERE, PathRow, PathRun, Runs, path_rows
from pilotfish.printable import one_line

#: Sequences that llama.cpp knows at once.
MOST_SEQUENCES = 256
#: Rows of one decode.
BATCH = 512
#: More layers than any model has.
ALL_LAYERS = 1 << 16
#: Of llama.cpp's lines: errors.
ERROR = 4
#: Cells for runs that are given up but still shared, as a share of the slots.
SPARE = 0.25
#: `llama_decode`'s result if it finds no cells.
NO_CELLS = 1


class LlamaCppExecutor(LogitsExecutor):
    def __init__(
        self, file: Path, num_slots: int, threads: int, given: int, *, on_gpu: bool = False, wide_kv: bool = False
    ) -> None:
        """`wide_kv`: KV in float32, not float16. ModelError for a file that cannot run, ParameterError for an absent
        device."""
        if on_gpu and not llama_cpp.llama_supports_gpu_offload():
            raise ParameterError("backend_device", "gpu", "cpu: llama.cpp was built for no other device here")
        self._model = load_gguf(file, on_gpu)
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        size = int(llama_cpp.llama_vocab_n_tokens(self._vocabulary))
        if size < given:
            raise ModelError(f"draft: {file} has {size} tokens; at least {given} are needed, as its tokenizer has")
        super().__init__(num_slots, int(llama_cpp.llama_model_n_ctx_train(self._model)), size, given)
        self._context = new_context(self._model, int(num_slots * (1 + SPARE)) + BATCH, threads, wide_kv)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.runs = Runs(MOST_SEQUENCES, self._copy, self._remove)
        self._queue: list[tuple[PathRow, PathRun]] = []

    def unlike(self, texts: Sequence[str | None]) -> int:
        own = (llama_cpp.llama_vocab_get_text(self._vocabulary, token) for token in range(len(texts)))
        return sum(text is None or mine != text.encode() for mine, text in zip(own, texts, strict=True))

    def logits(self, rows: Sequence[SequenceRows]) -> Tensor:
        kept = sum(len(sequence.kept) + len(sequence.nodes) for sequence in rows)
        found = np.zeros((kept, self.vocab_size), np.float32)
        for row in path_rows(rows):
            for lacking in self.runs.lacking(row):
                self._compute(lacking, found)
            self._compute(row, found)
        self._decode(found)
        self.runs.end_forward()
        return torch.from_numpy(found)

    def _compute(self, row: PathRow, found: Any) -> None:
        if len(self._queue) >= BATCH or self.runs.must_wait(row):
            self._decode(found)
        self._queue.append((row, self.runs.place(row)))

    def _decode(self, found: Any) -> None:
        if not self._queue:
            return
        batch = self._batch
        batch.n_tokens = len(self._queue)
        for place, (row, run) in enumerate(self._queue):
            batch.token[place], batch.pos[place] = row.token, row.position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, run.number
            batch.logits[place] = row.kept != NOWHERE
        while (status := llama_cpp.llama_decode(self._context, batch)) == NO_CELLS:
            if not self.runs.give_up_one():
                raise EngineError("llama.cpp has no room for a level: more KV slots are needed (--kv-slots)")
        if status != 0:
            raise EngineError(f"llama.cpp could not compute a level: status {status}")
        for place, (row, _) in enumerate(self._queue):
            if row.kept != NOWHERE:
                logits = llama_cpp.llama_get_logits_ith(self._context, place)
                found[row.kept] = np.ctypeslib.as_array(logits, (self.vocab_size,))
        self._queue.clear()
        self.runs.decoded()

    def _copy(self, source: int, copy: int, length: int) -> None:
        llama_cpp.llama_memory_seq_cp(self._memory, source, copy, 0, length)

    def _remove(self, number: int) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, number, -1, -1)


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
