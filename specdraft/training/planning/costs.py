"""Arithmetic and memory of training, from the sizes of the modules alone.

H = hidden size, A = heads * head size, T = tokens in a sequence, S = training-time-test steps, n = parameters, V / Vd =
target / draft vocabulary.

One multiply-add is 2 FLOPs. A weight costs 2 FLOPs per token forward and 4 backward (gradients of weight and input)."""

from torch import nn

from specdraft.drafters.objective import DraftHead
from specdraft.losses.comparison import MANY
from specdraft.losses.windows import POSITIONS, fitting
from specdraft.targets.parameters import Sizes


def target_forward_flops(sizes: Sizes, sequence_length: int) -> float:
    """FLOPs per token of the target's forward with its LM head; a token sees half the sequence on average."""
    return 2.0 * sizes.active + 2.0 * sizes.attention * sequence_length


def state_bytes(parameters: int, stage: int | None, devices: int, mixed: bool) -> dict[str, float]:
    """Bytes per device of the drafter's weights, gradients and optimizer states under ZeRO ``stage`` (None: no ZeRO):
    AdamW keeps two fp32 moments, mixed precision fp32 masters and 2-byte working copies."""
    n, shard = float(parameters), max(1, devices)
    element, masters = (2, 4) if mixed else (4, 0)
    if stage is None:
        weights, gradients, optimizer = (element + masters) * n, 4 * n, 8 * n
    else:
        weights = element * n / (shard if stage >= 3 else 1)
        gradients = element * n / (shard if stage >= 2 else 1)
        optimizer = (8 + masters) * n / (shard if stage >= 1 else 1)
    return {"drafter weights": weights, "drafter gradients": gradients, "optimizer states": optimizer}


def loss_bytes(drafter: nn.Module, tokens: int, vocabulary: int, draft_vocabulary: int, free: float | None) -> float:
    """Bytes that the loss holds at its peak: of a chunk of positions the logits of target and draft and what is made of
    them, and of the trained projections a gradient, which is there beside that of the step before. On GPUs, of which so
    many bytes are ``free`` (None: a CPU), a chunk is larger, and one kernel leaves it in two bytes an element."""
    gpus, element = free is not None, 4 if free is None else 2
    chunk = min(fitting(draft_vocabulary, free), tokens)
    several = 3 if chunk * draft_vocabulary >= MANY else 6  # the target's, z and exponentials where compiled
    heads = (module for module in drafter.modules() if isinstance(module, DraftHead))
    projections = {id(head.weight): head.weight.numel() for head in heads if head.weight.requires_grad}
    target = 2 * chunk * vocabulary  # logits; their exponentials, or as they were before a scale and a soft-cap
    draft = (2 if gpus else several) * chunk * draft_vocabulary  # on a GPU the target's and z
    return float(element * (target + draft) + 4 * sum(projections.values()))


def loss_traffic(drafter: nn.Module, tokens: int, sizes: tuple[int, int, int], element: int, gpus: bool) -> float:
    """Bytes that the loss of a batch reads and writes; ``sizes``: hidden, vocabulary, draft vocabulary. A test counts
    them on a CPU whose chunks are small; what is compiled for larger ones makes fewer passes, and one kernel on GPUs
    takes the place of most. Of each position the target's logits, and those of the draft vocabulary for the teacher and
    for each step; for each chunk the target's head, and for each step of it the projection, with its gradient if it is
    trained. Projections of one width take turns; those of several are summed."""
    hidden, vocabulary, draft_vocabulary = sizes
    heads = (module for module in drafter.modules() if isinstance(module, DraftHead))
    widths = {head.in_features: head.weight.requires_grad for head in heads}
    steps = getattr(drafter, "ttt_steps", getattr(drafter, "num_heads", 1))
    chunks = -(-tokens // (POSITIONS if gpus else fitting(draft_vocabulary, None)))
    # The kernel reads z three times and the target twice and writes the gradient, between a product that writes z and
    # two that read the gradient; all but the target in two bytes.
    per_step = 2 * (1 + 3 + 1 + 2) + 4 * 2 if gpus else 4 * 28
    if not gpus and min(tokens, fitting(draft_vocabulary, None)) * draft_vocabulary >= MANY:
        per_step = 4 * (1 + 9 + 2)  # exponentials are written and read again; z and the target are read more than once
    logits = float(tokens * (4 * (6 * vocabulary + 12 * draft_vocabulary) + per_step * steps * draft_vocabulary))
    projections = sum((16 if trained else 2 * element) * width for width, trained in widths.items())
    return logits + chunks * (element * hidden * vocabulary + steps * draft_vocabulary * projections)


def target_weight_bytes(sizes: Sizes, element: int, devices: int, placement: str) -> float:
    """Bytes of the target's weights that a device must hold: all; or, its layers cut over the devices, all else, a part
    of the layers, and two of them whole (the one that computes and the one that is fetched); or, its layers in other
    places, all else and the layer at work."""
    if placement in ("device_map", "remote"):
        return float(element * (sizes.total - sizes.layers + sizes.largest))
    if placement == "zero3" and devices > 1:
        return float(element * (sizes.total - sizes.layers + sizes.layers / devices + 2 * sizes.largest))
    return float(sizes.total * element)
