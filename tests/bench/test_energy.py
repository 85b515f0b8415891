"""Counters of the hardware, where there are any."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from specdraft.bench.energy import EnergyMeter


def zone(folder: Path, number: str, name: str, microjoules: int) -> Path:
    path = folder / f"intel-rapl:{number}"
    path.mkdir(parents=True)
    (path / "name").write_text(f"{name}\n")
    (path / "max_energy_range_uj").write_text("10000000\n")
    (path / "energy_uj").write_text(f"{microjoules}\n")
    return path / "energy_uj"


class Gpu:
    """NVML's module with one GPU."""

    millijoules = 1000

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def nvmlInit(self) -> None:  # noqa: N802
        if self.fails:
            raise RuntimeError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 1

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:  # noqa: N802
        return number

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:  # noqa: N802
        return self.millijoules


def test_packages_and_gpus_are_summed_and_a_counter_may_begin_again(tmp_path):
    package = zone(tmp_path, "0", "package-0", 9_000_000)
    core = zone(tmp_path, "0:0", "core", 1_000_000)  # a part of the package
    gpu = Gpu()
    meter = EnergyMeter(tmp_path, gpu)
    assert meter.sources == ["RAPL package-0", "NVML GPU 0"]
    package.write_text("9500000\n")
    core.write_text("9900000\n")
    gpu.millijoules += 2000
    assert meter.read() == pytest.approx(0.5 + 2.0)
    package.write_text("500000\n")
    assert meter.read() == pytest.approx(1.0)


def test_nothing_is_guessed(tmp_path):
    (zone(tmp_path, "0", "package-0", 1).parent / "energy_uj").write_text("not for you")
    meter = EnergyMeter(tmp_path, Gpu(fails=True))
    assert meter.sources == [] and meter.read() is None
    assert EnergyMeter(tmp_path / "none", SimpleNamespace()).read() is None
