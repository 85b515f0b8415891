"""Memory that is freed stays with the process: asked of the operating system in a process of its own."""

import os
import subprocess
import sys

import pytest

PROBE = """
import resource, torch
from specdraft.allocation import keep_freed_memory
kept = keep_freed_memory() if {asked} else None
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        [torch.ones(3 * 2**20) for _ in range(4)]  # 12 MB each, as the logits of 64 requests
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(kept, faults())
"""


def probed(asked: bool, **environment: str) -> tuple[str, int]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_"))}
    command = [sys.executable, "-c", PROBE.format(asked=asked)]
    found = subprocess.run(command, env=plain | environment, capture_output=True, text=True, check=True)
    kept, faults = found.stdout.split()
    return kept, int(faults)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_what_is_freed_is_used_again_without_the_system() -> None:
    _, returned = probed(False)
    kept, reused = probed(True)
    assert kept == "True"
    assert reused * 10 < returned


def test_whoever_chose_an_allocator_or_its_settings_keeps_them() -> None:
    assert probed(True, MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
