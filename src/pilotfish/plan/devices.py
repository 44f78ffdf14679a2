"""Accelerators by their vendors' figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Peaks of one device; of its matrix units without sparsity."""

    memory: float  # bytes
    bandwidth: float  # bytes a second
    bf16: float  # operations a second
    fp8: float | None = None  # the same; None: no units for it


#: A vendor's sheet often prints peaks with sparsity, twice these.
DEVICES: Mapping[str, Device] = {
    "a100": Device(80e9, 2.0e12, 312e12),  # the SXM module of 80 GB
    "h100": Device(80e9, 3.35e12, 989e12, 1979e12),  # SXM
    "h200": Device(141e9, 4.8e12, 989e12, 1979e12),  # SXM
    "b200": Device(192e9, 8.0e12, 2250e12, 4500e12),  # HGX, 1000 W
    "gb200": Device(186e9, 8.0e12, 2500e12, 5000e12),  # one of its GPUs; memory unverified
    "l40s": Device(48e9, 0.864e12, 362e12, 733e12),
    "mi300x": Device(192e9, 5.3e12, 1307e12, 2615e12),  # FP8 unverified
    "mi355x": Device(288e9, 8.0e12, 2500e12, 5000e12),  # BF16 unverified
    "tpu-v5e": Device(16e9, 0.819e12, 197e12),
    "tpu-v6e": Device(32e9, 1.638e12, 918e12, 918e12),
    "tpu-v7": Device(206e9, 7.38e12, 2307e12, 4614e12),  # bandwidth unverified
    "trainium2": Device(103e9, 2.9e12, 667e12, 1299e12),
    "xeon-6980p": Device(3072e9, 0.845e12, 524e12),  # AMX peak derived from cores and clock; memory unverified
}
