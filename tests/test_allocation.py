"""Memory that is freed stays with the process: asked of the allocator in a process of its own."""

import os
import platform
import subprocess
import sys

import pytest

PROBE = """
import ctypes
from specdraft.allocation import keep_freed_memory

class Counts(ctypes.Structure):  # struct mallinfo2 of malloc.h
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    _fields_ = [(name, ctypes.c_size_t) for name in names]

mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Counts
kept = keep_freed_memory() if {asked} else None
before = mallinfo2().fordblks
logits = bytearray(31 * 2**20)  # as many as the logits of 64 requests, or of a training's window
del logits
print(kept, mallinfo2().fordblks - before)
"""


def probed(asked: bool, **environment: str) -> tuple[str, int]:
    """Whether it is kept, and how many more bytes than before are free and still the process's."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_"))}
    command = [sys.executable, "-c", PROBE.format(asked=asked)]
    found = subprocess.run(command, env=plain | environment, capture_output=True, text=True, check=True)
    kept, free = found.stdout.split()
    return kept, int(free)


@pytest.mark.skipif(sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_what_is_freed_is_used_again_without_the_system() -> None:
    _, returned = probed(False)
    kept, held = probed(True)
    assert kept == "True"
    assert returned < 2**20
    assert held >= 31 * 2**20


def test_whoever_chose_an_allocator_or_its_settings_keeps_them() -> None:
    assert probed(True, MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
