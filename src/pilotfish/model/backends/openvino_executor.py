"""A draft on OpenVINO: Intel's CPUs, GPUs and NPUs. OpenVINO has no slots, so KV stays here and the model is a function
without state. An NPU compiles for fixed sizes only: rows and earlier tokens are padded to the next of a few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
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
from pilotfish.model.backends.logits_executor import LogitsExecutor, no_logits
from pilotfish.model.backends.openvino_model import UNSEEN, converted, refuse_untraceable
from pilotfish.model.batch import bucket
from pilotfish.model.loading.loader import load_model
from pilotfish.model.loading.metadata import one_line

#: Precision of products on a CPU, by our names of types. Other devices have half precision in place of bfloat16.
PRECISIONS = {"bfloat16": "bf16", "float32": "f32"}
#: Rows of a forward, where the device takes any number.
MOST_ROWS = 512


@dataclass(frozen=True)
class Sizes:
    rows: tuple[int, ...] = ()
    earlier: tuple[int, ...] = ()

    @property
    def compiled(self) -> list[tuple[int, int]]:
        return list(product(self.rows, self.earlier))


ANY_SIZE = Sizes()
#: Devices that take fixed sizes alone. The largest number of earlier tokens is the context.
FIXED = {"NPU": Sizes((8, 64), (512, 2048))}


class OpenVINOExecutor(LogitsExecutor):
    def __init__(
        self,
        directory: Path,
        device: str,
        dtype: str,
        num_slots: int,
        threads: int,
        given: int,
        sizes: Sizes | None = None,
    ) -> None:
        """`dtype` is a key of PRECISIONS. ParameterError for an absent device, ModelError for a model that cannot
        run."""
        core = openvino.Core()
        kind = _kind_of(device, core.available_devices)
        self.sizes = sizes or FIXED.get(kind, ANY_SIZE)
        loaded = load_model(directory, torch.float32, torch.device("cpu"), eager=True)
        config = loaded.config
        refuse_untraceable(config, directory)
        context = min((config.context, *self.sizes.earlier[-1:]))
        super().__init__(num_slots, context, config.vocab_size, given)
        self._shape = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        layers, heads, head_dim = self._shape
        self._keys, self._values = (np.zeros((layers, heads, num_slots, head_dim), np.float32) for _ in range(2))
        try:
            self._requests = self._compiled(core, converted(loaded), device, _properties(kind, dtype, threads))
        except RuntimeError as error:
            raise ModelError(f"model: {directory} cannot be compiled for {device}: {one_line(error)}") from error

    def padded(self, rows: int) -> int:
        return bucket(rows, self.sizes.rows)

    def logits(self, rows: Sequence[SequenceRows]) -> Tensor:
        sizes = self.sizes
        most = (sizes.rows[-1], sizes.earlier[-1]) if sizes.rows else (MOST_ROWS, None)
        parts = [self._run(flat) for flat in forwards(rows, self.num_slots, *most)]
        kept = [part for part in parts if len(part)]
        return torch.from_numpy(np.concatenate(kept)) if kept else no_logits(self.vocab_size)

    def _compiled(self, core: Any, model: Any, device: str, properties: dict[str, Any]) -> dict[tuple[int, int], Any]:
        """Requests by (rows, earlier tokens); (0, 0) takes any size."""
        found, (layers, heads, head_dim) = {}, self._shape
        for rows, earlier in self.sizes.compiled or [(0, 0)]:
            if rows:
                past = [layers, heads, earlier, head_dim]
                shapes = ([rows], [rows], [rows], [rows, earlier + rows], past, past)
                model.reshape(dict(zip(model.inputs, map(openvino.PartialShape, shapes), strict=True)))
            found[rows, earlier] = core.compile_model(model, device, properties).create_infer_request()
        return found

    def _run(self, flat: FlatRows) -> NDArray[np.float32]:
        fixed = bool(self.sizes.rows)
        rows, earlier = bucket(len(flat), self.sizes.rows), bucket(len(flat.earlier), self.sizes.earlier)
        request = self._requests[(rows, earlier) if fixed else (0, 0)]
        slots = _filled(flat.earlier, earlier)
        inputs = (
            _filled(flat.tokens, rows),
            _filled(flat.positions, rows),
            _filled(flat.kept, rows if fixed else max(len(flat.kept), 1)),
            unseen(flat, rows, earlier),
            np.take(self._keys, slots, axis=2),
            np.take(self._values, slots, axis=2),
        )
        logits, keys, values = request.infer(inputs, share_inputs=True, share_outputs=True).values()
        self._keys[:, :, flat.slots] = keys[:, :, : len(flat)]
        self._values[:, :, flat.slots] = values[:, :, : len(flat)]
        kept: NDArray[np.float32] = logits[: len(flat.kept)].copy()  # the request's own memory is written again
        return kept


def unseen(flat: FlatRows, rows: int, earlier: int) -> NDArray[np.float32]:
    """[rows, earlier + rows], both padded; added to the scores."""
    found, before = np.full((rows, earlier + rows), UNSEEN, np.float32), len(flat.earlier)
    found[: len(flat), :before][flat.sees[:, :before]] = 0.0
    found[: len(flat), earlier : earlier + len(flat)][flat.sees[:, before:]] = 0.0
    return found


def _filled(values: NDArray[Any], size: int) -> NDArray[Any]:
    return values if len(values) == size else np.concatenate((values, np.zeros(size - len(values), values.dtype)))


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
