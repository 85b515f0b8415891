"""Memory that a pass on a CPU frees is kept for the next one, unless the user has said how it is to be handled.

glibc gives large blocks back to the operating system as soon as they are freed, and gets them again, page by page and
zeroed, for the next pass: 64 answers of SmolLM2-135M side by side spent a quarter of their time in that."""

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt, by malloc.h
# Bytes: larger blocks, as those of a cache, and more free memory than that still go back. More than 32 MiB of a block
# glibc refuses; with less, a window's logits in training (``losses/windows.py``) would be new pages each time.
_BLOCK, _KEPT = 2**25, 2**29


def keep_freed_memory() -> bool:
    """Ask glibc to keep what is freed; gives whether it does. Other allocators are left as they are."""
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and bool(mallopt(_MMAP_THRESHOLD, _BLOCK) and mallopt(_TRIM_THRESHOLD, _KEPT))
