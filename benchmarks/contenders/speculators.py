"""The training steps of vLLM's speculators 0.9.0, in an environment of its own (``make benchmark-peers``): with sdpa
attention and the eager loss, as the fused one needs a GPU.

What differs from ours by definition, and how it is met here. In all families:

- Its loss mask belongs to the token just read, ours to the token to predict: it gets a mask moved by one.
- It norms the target's last hidden state itself; features here are normed already, so that norm is left out.
- It moves tokens across document borders; the problem has one document.

EAGLE-3 and P-EAGLE:

- It freezes the LM head. ``frozen_head`` leaves it so; otherwise it is trained as ours is.
- It supervises every row whose predicted token is to be learnt, ours only rows whose draft begins behind a learnt
  token: at the border of a prompt EAGLE-3 counts s + 1 rows more at step s, so that losses are compared where all
  tokens are supervised. P-EAGLE gets a mask without the first learnt token, and the losses agree.

P-EAGLE and DFlash:

- It divides the sum over the rows of all steps by their number, ours each step's by its own: ours is given that number.
- It draws rows by another rule (as many, but other ones): it is given those that ours draws. Its own draw takes the
  anchors of DFlash from all tokens to learn but those of the last block; here they are also those, with a sequence made
  longer by a block that nothing is learnt from.
- It trains P-EAGLE's embedding. Here it is the target's, as ours is by default.
"""

import math
from typing import Any

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dflash import core as dflash_core
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.models.peagle import core as peagle_core
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from torch.nn.functional import pad
from transformers import LlamaConfig, Qwen3Config

from contenders.problem import (
    EPSILON,
    HEAD_DIM,
    LAYERS,
    MASK_TOKEN,
    ROPE_THETA,
    STEP_DECAY,
    Contender,
    Problem,
    Shape,
)


def build(problem: Problem, frozen_head: bool = False) -> Contender:
    """Its draft model with the problem's weights."""
    make, call = {
        "eagle3": (_eagle3, _eagle3_arguments),
        "p_eagle": (_p_eagle, _p_eagle_arguments),
        "dflash": (_dflash, _dflash_arguments),
    }[problem.shape.family]
    model = make(problem.shape)
    if problem.shape.draft_vocab_size < problem.shape.vocab_size:
        kept = torch.zeros(problem.shape.vocab_size, dtype=torch.bool).index_fill(0, problem.draft_ids, True)
        model.load_vocab_mappings(kept, problem.draft_ids - torch.arange(len(problem.draft_ids)))
    weights = {_renamed(name): tensor for name, tensor in problem.weights.items()}
    weights["embed_tokens.weight"] = problem.embedding
    weights["verifier_lm_head.weight"] = problem.head[problem.draft_ids]
    unknown = model.load_state_dict(weights, strict=False).unexpected_keys
    assert not unknown, unknown
    model.verifier_norm = torch.nn.Identity()
    model.lm_head.weight.requires_grad_(problem.shape.family != "dflash" and not frozen_head)
    loss_config = resolve_loss_config("kl_div", "eager")

    def loss(problem: Problem) -> Tensor:
        _, value, _ = model(**call(problem), loss_config=loss_config)
        return value

    return Contender(loss, model.parameters())


def _renamed(name: str) -> str:
    kind, _, rest = name.partition(".")
    if kind == "later":
        number, _, rest = rest.partition(".")
        return f"layers.{int(number) + 1}.{rest}"
    return f"layers.0.{rest}" if kind == "midlayer" else name.replace("blocks.", "layers.")


def _layers(shape: Shape, config_class: type) -> Any:
    config = config_class(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=HEAD_DIM,
        vocab_size=shape.vocab_size,
        max_position_embeddings=4096,
        rms_norm_eps=EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
    )
    config._attn_implementation = "sdpa"
    return config


def _common(shape: Shape, algorithm: str, tokens: int) -> dict[str, Any]:
    return {
        "draft_vocab_size": shape.draft_vocab_size,
        "speculators_config": SpeculatorsConfig(
            algorithm=algorithm,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=tokens)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    }


def _eagle3(shape: Shape) -> Any:
    return Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=_layers(shape, LlamaConfig),
            norm_before_residual=False,
            eagle_aux_hidden_state_layer_ids=list(LAYERS),
            **_common(shape, "eagle3", shape.steps),
        )
    )


def _p_eagle(shape: Shape) -> Any:
    return PEagleDraftModel(
        PEagleSpeculatorConfig(
            transformer_layer_config=_layers(shape, LlamaConfig),
            norm_before_residual=False,
            eagle_aux_hidden_state_layer_ids=list(LAYERS),
            mask_token_id=MASK_TOKEN,
            embed_requires_grad=False,
            **_common(shape, "peagle", shape.steps),
        )
    )


def _dflash(shape: Shape) -> Any:
    return DFlashDraftModel(
        DFlashSpeculatorConfig(
            transformer_layer_config=_layers(shape, Qwen3Config),
            block_size=shape.block_size,
            aux_hidden_state_layer_ids=list(LAYERS),
            mask_token_id=MASK_TOKEN,
            **_common(shape, "dflash", shape.block_size - 1),
        )
    )


def _eagle_arguments(problem: Problem, learned: Tensor) -> dict[str, Any]:
    """learned: bool ``[T]``, whether the token after each is to be learnt."""
    return {
        "hidden_states": problem.aux[None, :-1],
        "input_ids": problem.input_ids[None, 1:],
        "document_ids": torch.zeros(1, len(learned) - 1, dtype=torch.int64),
        "loss_mask": learned[None, 1:],
        "verifier_last_hidden_states": problem.last[None, 1:],
    }


def _eagle3_arguments(problem: Problem) -> dict[str, Any]:
    learned = pad(problem.loss_mask[1:], (0, 1))
    steps = {"ttt_steps": problem.shape.steps, "ttt_step_loss_decay": STEP_DECAY}
    return _eagle_arguments(problem, learned) | steps


def _p_eagle_arguments(problem: Problem) -> dict[str, Any]:
    everywhere, *later = problem.drawn()  # its first step reads every row
    rows = [torch.arange(len(everywhere) - 1), *(each.nonzero()[:, 0] for each in later)]
    depths = torch.cat([torch.full_like(each, depth) for depth, each in enumerate(rows)])
    peagle_core.generate_cod_sample_indices = lambda **_: (torch.cat(rows), depths)
    learned = pad(problem.loss_mask[1:] & problem.loss_mask[:-1], (0, 1))
    return _eagle_arguments(problem, learned) | {"num_depths": len(rows)}


def _dflash_arguments(problem: Problem) -> dict[str, Any]:
    anchors = 1 + problem.drawn()[0].nonzero()[:, 0]  # the token after the position that a draft begins at
    dflash_core.select_anchors = lambda *_: (anchors, torch.ones_like(anchors, dtype=torch.bool))
    more = problem.shape.block_size
    return {
        "hidden_states": pad(problem.aux, (0, 0, 0, more))[None],
        "input_ids": pad(problem.input_ids, (0, more))[None],
        "loss_mask": pad(problem.loss_mask, (0, more))[None],
        "verifier_last_hidden_states": pad(problem.last, (0, 0, 0, more))[None],
        "document_ids": pad(torch.zeros_like(problem.input_ids), (0, more), value=-1)[None],
        "gamma": -1 / math.log(STEP_DECAY),
        "max_anchors": len(anchors),
    }
