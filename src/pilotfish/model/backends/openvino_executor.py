"""A draft on OpenVINO: Intel's CPUs and GPUs. OpenVINO has no slots, so KV stays here and the model is a function
without state."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import torch
from numpy.typing import NDArray
from torch import Tensor

from pilotfish.core.scheduling.executor import SequenceRows
from pilotfish.errors import ModelError, ParameterError
from pilotfish.model.backends.flat_rows import FlatRows, forwards
from pilotfish.model.backends.logits_executor import LogitsExecutor
from pilotfish.model.backends.openvino_model import UNSEEN, converted, refuse_untraceable
from pilotfish.model.loading.loader import load_model
from pilotfish.model.loading.metadata import one_line

#: Precision of products on a CPU, by our names of types. Other devices have half precision in place of bfloat16.
PRECISIONS = {"bfloat16": "bf16", "float32": "f32"}
#: Rows of a forward, at most.
MOST_ROWS = 512


class OpenVINOExecutor(LogitsExecutor):
    def __init__(self, directory: Path, device: str, dtype: str, num_slots: int, threads: int, given: int) -> None:
        """`dtype` is a key of PRECISIONS. ParameterError for an absent device, ModelError for a model that cannot
        run."""
        core = openvino.Core()
        available = [name for name in core.available_devices if name != "NPU"]  # which takes fixed sizes alone
        kind = _kind_of(device, available)
        loaded = load_model(directory, torch.float32, torch.device("cpu"), eager=True)
        config = loaded.config
        refuse_untraceable(config, directory)
        super().__init__(num_slots, config.context, config.vocab_size, given)
        shape = config.num_hidden_layers, config.num_key_value_heads, num_slots, config.head_dim
        self._keys, self._values = (np.zeros(shape, np.float32) for _ in range(2))
        try:
            model = core.compile_model(converted(loaded), device, _properties(kind, dtype, threads))
            self._request = model.create_infer_request()
        except RuntimeError as error:
            raise ModelError(f"model: {directory} cannot be compiled for {device}: {one_line(error)}") from error

    def logits(self, rows: Sequence[SequenceRows]) -> Tensor:
        parts = [self._run(flat) for flat in forwards(rows, self.num_slots, MOST_ROWS)]
        return torch.from_numpy(np.concatenate(parts))

    def _run(self, flat: FlatRows) -> NDArray[np.float32]:
        inputs = (
            flat.tokens,
            flat.positions,
            flat.kept if len(flat.kept) else np.zeros(1, flat.kept.dtype),
            np.where(flat.sees, np.float32(0.0), np.float32(UNSEEN)),
            np.take(self._keys, flat.earlier, axis=2),
            np.take(self._values, flat.earlier, axis=2),
        )
        logits, keys, values = self._request.infer(inputs, share_inputs=True, share_outputs=True).values()
        self._keys[:, :, flat.slots], self._values[:, :, flat.slots] = keys, values
        kept: NDArray[np.float32] = logits[: len(flat.kept)].copy()  # the request's own memory is written again
        return kept


def _kind_of(device: str, available: Sequence[str]) -> str:
    kinds = {name.partition(".")[0] for name in available}
    if device not in {*available, *kinds}:
        raise ParameterError("backend_device", device, f"one of {', '.join(available)}")
    return device.partition(".")[0]


def _properties(kind: str, dtype: str, threads: int) -> dict[str, Any]:
    found: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": PRECISIONS[dtype]}
    if kind == "CPU" and threads:
        found["INFERENCE_NUM_THREADS"] = threads
    if kind != "CPU" and dtype != "float32":
        found["INFERENCE_PRECISION_HINT"] = "f16"
    return found
