"""Energy that this machine says it has used: processors by Linux' powercap (RAPL), NVIDIA's GPUs by NVML. Both count
everything that runs there."""

from __future__ import annotations

import ctypes
import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

POWERCAP = Path("/sys/class/powercap")
NVML = "libnvidia-ml.so.1"


class EnergyMeter:
    """Joules by counter since it was made; `missing` says why there are none."""

    def __init__(self, url: str, powercap: Path = POWERCAP) -> None:
        self._powercap = powercap
        self._before: dict[str, float] = {}
        self.missing = ""
        if not is_here(url):
            self.missing = "not measured: the server is on another machine"
        elif not (before := self._read()):
            self.missing = "not measured: neither RAPL nor NVML has counters here that can be read"
        else:
            self._before = before

    def joules(self) -> dict[str, float]:
        """A counter that has begun again is read modulo its range."""
        after = self._read() if self._before else {}
        return {name: (after[name] - was) % self._range(name) for name, was in self._before.items() if name in after}

    def _read(self) -> dict[str, float]:
        return {**rapl_joules(self._powercap), **nvml_joules()}

    def _range(self, name: str) -> float:
        with suppress(OSError, ValueError):
            return int((self._powercap / name / "max_energy_range_uj").read_text()) / 1e6
        return float("inf")


def is_here(url: str) -> bool:
    """Whether a URL's host is this machine."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "127.0.0.1", "::1", socket.gethostname())


def rapl_joules(powercap: Path) -> dict[str, float]:
    """Of each package: zones below one are part of it. Counters that only root may read are left out."""
    found = {}
    for zone in sorted(powercap.glob("intel-rapl:*")):
        with suppress(OSError, ValueError):
            if zone.name.count(":") == 1:
                found[zone.name] = int((zone / "energy_uj").read_text()) / 1e6
    return found


def nvml_joules() -> dict[str, float]:
    """Of each GPU since its driver was loaded; none without the driver's library, or before Volta."""
    try:
        nvml = ctypes.CDLL(NVML)
    except OSError:
        return {}
    if nvml.nvmlInit_v2():
        return {}
    number = ctypes.c_uint(0)
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(number))
    found = {}
    for index in range(number.value):
        handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
        known = not nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        if known and not nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
            found[f"gpu {index}"] = millijoules.value / 1000
    nvml.nvmlShutdown()
    return found
