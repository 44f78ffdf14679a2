"""Devices that models are placed on, and what connects them and nodes: `devices.toml` and `links.toml`."""

from __future__ import annotations

from pilotfish.config.hardware.tables import Sourced, read_table


class Device(Sourced, frozen=True, kw_only=True):
    """An accelerator. Peaks are of its matrix units, without sparsity; None: there is none, or none is settled."""

    full_name: str
    memory: float  # bytes
    bandwidth: float  # of the memory, bytes a second
    bf16: float | None = None  # operations a second
    fp8: float | None = None
    fp4: float | None = None
    link: str  # to other devices of a node
    link_bandwidth: float | None = None  # bytes a second one way
    power: float | None = None  # watts, the most that its maker designs for
    price: tuple[float, float] | None = None  # USD an hour, lowest and highest offer


class Interconnect(Sourced, frozen=True, kw_only=True):
    bandwidth: float | None = None  # bytes a second one way
    latency: float | None = None  # seconds

    def exchange(self, size: float) -> float:
        """Seconds from a question to the end of its answer, of `size` bytes together. What is not published is free."""
        return 2 * (self.latency or 0.0) + (size / self.bandwidth if self.bandwidth else 0.0)


DEVICES = read_table(__file__, "devices", dict[str, Device])
LINKS = read_table(__file__, "links", dict[str, Interconnect])
