"""The variants of the family, and a request beside a head."""

import torch

from specdraft.drafters.eagle import MTP, Eagle, Eagle3, PEagle
from tests.drafters.alone import Alone

STEPS = 4
VARIANTS = {
    "first": (Eagle, {}),
    "third": (Eagle3, {}),
    "third, fc_norm": (Eagle3, {"fc_norm": True}),
    "third, norm_output": (Eagle3, {"norm_output": True}),
    "third, both": (Eagle3, {"fc_norm": True, "norm_output": True}),
    "third, speculators": (Eagle3, {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True}),
    "third, qwen3": (Eagle3, {"qk_norm": True, "layers": (1, 2, 3, 5)}),
    "third, layers": (Eagle3, {"num_layers": 3, "norm_before_residual": True, "attention_bias": True}),
    "parallel": (PEagle, {"mask_token": 5, "sample_positions": False}),
    "parallel, layers": (PEagle, {"num_layers": 3, "fc_norm": True, "own_embedding": True, "sliding_window": 6}),
    "mtp": (MTP, {"step_decay": 0.8, "start": "scratch"}),
    "mtp, before the norm": (MTP, {"step_decay": 0.8, "before_norm": True}),
    "third, window": (Eagle3, {"sliding_window": 5}),
    "third, window, layers": (Eagle3, {"sliding_window": 6, "num_layers": 2, "own_embedding": True}),
}


def features_of(head, batch):
    return head.target.features(batch.input_ids, batch.position_ids, head.layers)


def begun(head, batch) -> Alone:
    """A request whose text are the nine tokens of the first document and one more."""
    ids = batch.input_ids[:1, :9]
    features = head.target.features(ids, batch.position_ids[:1, :9], head.layers)
    state = Alone(head, int(ids[0, 0]))
    state.advance(torch.cat([ids[0, 1:], ids[0, :1]]), features)
    return state
