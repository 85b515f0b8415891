"""specdraft's own step."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from contenders.problem import (
    DRAWS,
    EPSILON,
    HEAD_DIM,
    LAYERS,
    MASK_TOKEN,
    ROPE_THETA,
    SHARE_DECAY,
    STEP_DECAY,
    Contender,
    Problem,
)
from specdraft.allocation import keep_freed_memory
from specdraft.drafters.dflash import DFlash
from specdraft.drafters.eagle import Eagle3, PEagle
from specdraft.onednn import learning
from specdraft.targets import Features, Target
from specdraft.targets.batch import Batch


def build(problem: Problem, sampled: bool = False) -> Contender:
    """The drafter with the problem's weights; the target lends embedding and LM head, its layers are not run. sampled:
    later steps of EAGLE-3 learn from a random share of the positions."""
    shape = problem.shape
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=HEAD_DIM,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.lm_head.weight = torch.nn.Parameter(problem.head)
    model.model.embed_tokens.weight = torch.nn.Parameter(problem.embedding)
    target = Target.from_model(model)
    keep_freed_memory()  # both as of every target that is loaded on a CPU
    target.pack()
    drafter = _drafter(problem, sampled)
    drafter.set_draft_vocabulary(problem.draft_ids)
    missing, unknown = drafter.load_state_dict(problem.weights, strict=False)
    assert not unknown and set(missing) <= {"d2t", "t2d"}, (missing, unknown)
    drafter.bind(target)

    def loss(problem: Problem) -> torch.Tensor:
        positions = torch.arange(len(problem.input_ids))
        batch = Batch(
            problem.input_ids[None], positions[None], torch.zeros_like(positions)[None], problem.loss_mask[None]
        )
        features = Features(problem.aux[None], problem.last[None])
        if shape.family == "eagle3":
            with learning(drafter):  # as the train command has it
                return drafter.training_loss(batch, features, target).loss
        torch.manual_seed(DRAWS)
        with learning(drafter):
            return drafter.training_loss(batch, features, target, _totals(problem)).loss

    return Contender(loss, drafter.parameters(), fused=True)


def _drafter(problem: Problem, sampled: bool) -> Eagle3 | DFlash:
    shape = problem.shape
    common: dict[str, Any] = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": HEAD_DIM,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "layers": LAYERS,
        "num_layers": shape.num_layers,
        "rms_norm_eps": EPSILON,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "max_position_embeddings": 4096,
    }
    if shape.family == "dflash":
        blocks: dict[str, Any] = {
            "block_size": shape.block_size,
            "num_anchors": shape.anchors,
            "mask_token": MASK_TOKEN,
        }
        return DFlash(**common, **blocks, step_decay=STEP_DECAY)
    if shape.family == "p_eagle":
        drawn: dict[str, Any] = {"step_decay": SHARE_DECAY, "sample_positions": True}
        return PEagle(**common, **drawn, mask_token=MASK_TOKEN, ttt_steps=shape.steps)
    return Eagle3(**common, ttt_steps=shape.steps, step_decay=STEP_DECAY, sample_positions=sampled)


def _totals(problem: Problem) -> list[float]:
    """What the sum of every step is divided by: the rows of all steps together, as speculators has it; in DFlash's a
    row counts for those that were not drawn, too."""
    drawn = [rows.sum().item() for rows in problem.drawn()]
    return [sum(drawn) / problem.kept] * len(drawn)
