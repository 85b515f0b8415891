"""Mixed precision, as on a GPU: the target in bfloat16, the drafter's masters in fp32, or all in bfloat16."""

import copy
import math

import torch

from specdraft.check.gradients import usual_batch
from specdraft.check.outcome import Failed, NotApplicable
from specdraft.check.rounds import CHAIN
from specdraft.check.subject import Subject
from specdraft.check.training import gradients, step
from specdraft.decoding.decoder import Decoder
from specdraft.onednn import unpack
from specdraft.targets import Target
from specdraft.tensors import keeping_buffers

_APART = 0.2  # of the loss, and of what it may be off where all is near zero


def mixed_precision_works(subject: Subject) -> str:
    """A training step under bf16 autocast beside one in full precision, and decoding in bfloat16. What fails or strays
    here fails on every GPU, where both are the default."""
    drafter, batch = subject.drafter(), usual_batch(subject)
    full = float(step(drafter, batch, subject.target).loss.detach())
    device = subject.target.device
    low = _in_bfloat16(subject.target)
    mixed = subject.plain(low).to(device, torch.float32)
    mixed.load_state_dict(drafter.state_dict())
    mixed.bind(low)
    if not any(parameter.requires_grad for parameter in mixed.parameters()):
        raise NotApplicable("it has no parameter to train")
    with torch.autocast(device.type, torch.bfloat16):
        loss = step(mixed.eval(), batch, low).loss
    if not math.isfinite(loss.item()) or abs(loss.item() - full) > _APART * max(1.0, abs(full)):
        says = f"under bf16 autocast the loss is {loss.item():.4g}, in full precision {full:.4g}"
        raise Failed(f"{says}: expected nearly the same; compute norms, softmax and sums in fp32")
    for name, gradient in gradients(mixed, loss).items():
        if gradient is None or not bool(gradient.isfinite().all()):
            raise Failed(f"under bf16 autocast the gradient of {name} is not finite: expected numbers")
    served = mixed.to(device, torch.bfloat16).eval()
    decoded = Decoder(served.tuned(low), served, CHAIN).generate_batch(subject.prompts, 6, 2)
    if not any(any(each.drafted) for each in decoded):
        raise Failed("in bfloat16 it drafts nothing: expected drafts as in full precision")
    return f"a step's loss is {loss.item():.4g} under bf16 autocast, {full:.4g} in full; it decodes in bfloat16"


def _in_bfloat16(target: Target) -> Target:
    model = copy.deepcopy(target.model)
    unpack(model)
    with keeping_buffers(model):
        model.to(torch.bfloat16)
    return Target.from_model(model, target.tokenizer, f"{target.identity.name} in bfloat16")
