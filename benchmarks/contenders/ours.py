"""specdraft's own step."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from contenders.problem import EPSILON, HEAD_DIM, LAYERS, ROPE_THETA, STEP_DECAY, Contender, Problem
from specdraft.drafters.eagle import Eagle3
from specdraft.targets import Features, Target
from specdraft.targets.batch import Batch


def build(problem: Problem, sampled: bool = False) -> Contender:
    """The head with the problem's weights; the target lends embedding and LM head, its layers are not run. sampled:
    later steps learn from a random share of the positions."""
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
    head = Eagle3(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=HEAD_DIM,
        vocab_size=shape.vocab_size,
        draft_vocab_size=shape.draft_vocab_size,
        layers=LAYERS,
        rms_norm_eps=EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        max_position_embeddings=4096,
        ttt_steps=shape.steps,
        step_decay=STEP_DECAY,
        sample_positions=sampled,
    )
    head.set_draft_vocabulary(problem.draft_ids)
    head.load_state_dict(problem.weights, strict=False)
    head.bind(target)

    def loss(problem: Problem) -> torch.Tensor:
        positions = torch.arange(len(problem.input_ids))
        batch = Batch(
            problem.input_ids[None], positions[None], torch.zeros_like(positions)[None], problem.loss_mask[None]
        )
        return head.training_loss(batch, Features(problem.aux[None], problem.last[None]), target).loss

    return Contender(loss, head.parameters())
