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

from pilotfish.core.cache.slots import Slots
from pilotfish.core.scheduling.executor import SequenceRows
from pilotfish.errors import ModelError, ParameterError
from pilotfish.model.attention import AttentionMetadata
from pilotfish.model.backends.logits_executor import LogitsExecutor
from pilotfish.model.backends.openvino_model import UNSEEN, converted, refuse_untraceable
from pilotfish.model.batch import Batch, Buckets
from pilotfish.model.loading.loader import load_model
from pilotfish.model.loading.metadata import one_line

#: Precision of products on a CPU, by our names of types. Other devices have half precision in place of bfloat16.
PRECISIONS = {"bfloat16": "bf16", "float32": "f32"}
#: Forwards of up to 512 rows, without padding.
BUCKETS = Buckets(rows=tuple(range(1, 513)))


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
        parts = [self._run(batch) for batch in Batch.build(rows, BUCKETS, self.num_slots)]
        return torch.from_numpy(np.concatenate(parts))

    def _run(self, batch: Batch) -> NDArray[np.float32]:
        slots, (earlier, sees) = batch.metadata.row_slots.numpy(), seen_columns(batch.metadata, self.num_slots)
        inputs = (
            batch.input_ids.numpy(),
            batch.metadata.row_positions.long().numpy(),
            batch.keep.numpy(),
            np.where(sees, np.float32(0.0), np.float32(UNSEEN)),
            np.take(self._keys, earlier, axis=2),
            np.take(self._values, earlier, axis=2),
        )
        logits, keys, values = self._request.infer(inputs, share_inputs=True, share_outputs=True).values()
        self._keys[:, :, slots], self._values[:, :, slots] = keys, values
        kept: NDArray[np.float32] = logits[: batch.num_kept].copy()  # the request's own memory is written again
        return kept


def seen_columns(metadata: AttentionMetadata, num_slots: int) -> tuple[Slots, NDArray[np.bool_]]:
    """Slots with KV of earlier tokens that some row sees, ascending; whether each row sees each column. [earlier],
    [rows, earlier + rows]

    columns    [ earlier ][ rows of this forward ]
    """
    slots, starts, positions, prefixes, paths, prefix_slots = (x.numpy() for x in metadata.tensors())
    rows, places = np.nonzero(np.arange(paths.shape[1]) <= (positions - prefixes)[:, None])
    seen = {start: np.flatnonzero(starts == start) for start in np.unique(starts).tolist()}  # rows, by sequence
    ends = {start: start + min(prefixes[own[0]], positions[own].max() + 1) for start, own in seen.items()}
    before = np.zeros(num_slots, np.bool_)
    before[np.concatenate([paths[rows, places], *(prefix_slots[start:end] for start, end in ends.items())])] = True
    before[slots] = False
    earlier = np.flatnonzero(before).astype(np.int32)
    column = np.zeros(num_slots, np.int64)
    column[np.concatenate((earlier, slots))] = np.arange(len(earlier) + len(slots))
    sees = np.zeros((len(slots), len(earlier) + len(slots)), np.bool_)
    for start, own in seen.items():
        prefix = column[prefix_slots[start : ends[start]]]
        sees[np.ix_(own, prefix)] = np.arange(len(prefix)) <= positions[own, None]
    sees[rows, column[paths[rows, places]]] = True
    return earlier, sees


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
