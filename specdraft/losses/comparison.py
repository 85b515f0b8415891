"""What a chunk of draft logits costs beside the target's distribution, with its gradient: by torch, or by one kernel.

c = positions of a chunk, V / Vd = target / draft vocabulary. ``eager.py`` is the reference and what every device has;
without a pass of its own for each operation the same is done by ``fused.py`` on a GPU and ``compiled.py`` on a
processor."""

import importlib.util
from typing import Any, Protocol

import torch
from torch import Tensor

from specdraft.errors import warn
from specdraft.losses.divergence import Compared, Divergence, kind
from specdraft.losses.eager import Eager
from specdraft.text import reason

MANY = 2**22  # elements of a processor's window from which on compiling, some seconds, soon pays


class Comparison(Protocol):
    """A way to compare the chunks of one loss."""

    def target(self, logits: Tensor, draft_ids: Tensor | None, label: Tensor | None) -> Any:
        """The target at a window's positions, of its logits ``[c, V]``, which may be overwritten; with its ``best`` and
        ``mass`` as in ``Distribution``."""

    def draft(self, z: Tensor, target: Any, index: Tensor | None, keep: bool) -> Compared:
        """The draft's logits ``z [c, Vd]`` beside the target at the positions ``index [c]``, None for all of them. The
        gradient takes z's place unless z is to be kept."""


def comparison(
    divergence: Divergence, size: int, vocabulary: int, dtype: torch.dtype, device: torch.device
) -> Comparison:
    """In fp32 and of a divergence that is known, a kernel: on a GPU that Triton compiles for, and on a processor, where
    there is much to compare, what torch compiles. Else torch."""
    other: Comparison | None = None
    known = dtype == torch.float32 and kind(divergence) is not None
    if known and device.type == "cuda" and importlib.util.find_spec("triton"):
        from specdraft.losses.fused import Fused

        other = Fused(divergence)
    elif known and device.type == "cpu" and size * vocabulary >= MANY:
        from specdraft.losses.compiled import Compiled

        other = Compiled(divergence)
    if other is not None and agrees(other, divergence, device):
        return other
    return Eager(divergence, size, vocabulary, dtype, device)


_agreeing: dict[tuple[Divergence, torch.device], bool] = {}


def agrees(other: Comparison, divergence: Divergence, device: torch.device) -> bool:
    """Whether a kernel gives what torch gives, asked once a divergence and device. Else, with a warning, it is not."""
    if (divergence, device) not in _agreeing:
        try:
            amiss = _difference(other, Eager(divergence, 4, 150, torch.float32, device), device)
        except Exception as error:  # of a compiler, of a driver
            amiss = reason(error)
        if amiss:
            warn(f"the kernel of the loss is not used, training is slower: {amiss}")
        _agreeing[divergence, device] = not amiss
    return _agreeing[divergence, device]


def _difference(one: Comparison, other: Comparison, device: torch.device) -> str:
    own = torch.Generator(device).manual_seed(0)
    logits, z = (3 * torch.randn((7, size), generator=own, device=device) for size in (300, 150))
    draft_ids, label = torch.arange(0, 300, 2, device=device), torch.arange(7, device=device)
    index = torch.tensor([0, 2, 3, 6], device=device)
    targets = (each.target(logits.clone(), draft_ids, label) for each in (one, other))
    pairs = zip((one, other), targets, strict=True)
    found = (each.draft(z[index].clone(), target, index, keep=False) for each, target in pairs)
    worst = max((a.double() - b.double()).abs().max().item() for a, b in zip(*found, strict=True))
    return "" if worst < 1e-3 else f"it differs by {worst:.2g}"
