"""Energy from the counters of the hardware: RAPL for processors, NVML for GPUs. Where there are none, or they may not
be read, nothing is measured, and nothing is estimated instead.

Both count everything that the machine does, the measurement's own client included."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

_POWERCAP = Path("/sys/class/powercap")


class EnergyMeter:
    """Joules since the meter was last read. ``sources``: what is read, empty where energy cannot be measured."""

    def __init__(self, powercap: Path = _POWERCAP, nvml: Any = None) -> None:
        """powercap: where the kernel shows its counters. nvml: the module ``pynvml``; None: imported, if there."""
        self._counters = [*_rapl(powercap), *_gpus(nvml)]
        self.sources = [name for name, _, _ in self._counters]
        self._last = self._now()

    def read(self) -> float | None:
        """Joules since the last reading, or None where there are no counters. A counter that began again is taken to
        have done so once: a package at 200 W does it every 20 minutes."""
        if not self._counters:
            return None
        before, self._last = self._last, self._now()
        pairs = zip(before, self._last, self._counters, strict=True)
        return sum(now - then + (wrap if now < then else 0.0) for then, now, (_, _, wrap) in pairs)

    def _now(self) -> list[float]:
        return [read() for _, read, _ in self._counters]


_Counter = tuple[str, Callable[[], float], float]  # name, joules so far, joules at which it begins again


def _rapl(folder: Path) -> list[_Counter]:
    """Processor packages; their parts, which packages hold already, are left out."""
    found: list[_Counter] = []
    for zone in sorted(folder.glob("intel-rapl:*")):
        try:
            name, wrap = (zone / "name").read_text().strip(), int((zone / "max_energy_range_uj").read_text()) / 1e6
            counter = zone / "energy_uj"
            int(counter.read_text())
        except (OSError, ValueError):  # to be read by root alone, on most systems
            continue
        if name.startswith("package"):
            found.append((f"RAPL {name}", lambda counter=counter: int(counter.read_text()) / 1e6, wrap))  # type: ignore[misc]
    return found


def _gpus(nvml: Any) -> list[_Counter]:
    """GPUs whose driver counts energy; it does so from Volta on."""
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
        for handle in handles:
            nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # whatever a driver that is missing, old or not ours to ask raises
        return []
    read = nvml.nvmlDeviceGetTotalEnergyConsumption
    return [
        (f"NVML GPU {number}", lambda handle=handle: read(handle) / 1e3, 0.0)  # type: ignore[misc]
        for number, handle in enumerate(handles)
    ]
