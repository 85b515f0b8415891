"""The EAGLE-3 step of vLLM's speculators 0.9.0, in an environment of its own (``make benchmark-peers``).

What differs from ours by definition, and how it is met here:

- Its loss mask belongs to the token just read, ours to the token to predict: it gets a mask moved by one.
- It supervises every row whose predicted token is to be learnt, ours only rows whose draft begins behind a learnt
  token: at the border of a prompt it counts s + 1 rows more at step s. With all tokens supervised both are the same.
- It norms the target's last hidden state itself; features here are normed already, so that norm is left out.
- It freezes the LM head. ``frozen_head`` leaves it so; otherwise it is trained as ours is.
- It moves tokens across document borders; the problem has one document.
"""

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

from contenders.problem import EPSILON, HEAD_DIM, LAYERS, ROPE_THETA, STEP_DECAY, Contender, Problem


def build(problem: Problem, frozen_head: bool = False) -> Contender:
    """Its draft model with the problem's weights, sdpa attention and the eager loss (the fused one needs a GPU)."""
    shape = problem.shape
    layer = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=HEAD_DIM,
        vocab_size=shape.vocab_size,
        max_position_embeddings=4096,
        rms_norm_eps=EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
    )
    layer._attn_implementation = "sdpa"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=shape.draft_vocab_size,
        norm_before_residual=False,
        eagle_aux_hidden_state_layer_ids=list(LAYERS),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=shape.steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    model = Eagle3DraftModel(config)
    if shape.draft_vocab_size < shape.vocab_size:
        kept = torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill(0, problem.draft_ids, True)
        model.load_vocab_mappings(kept, problem.draft_ids - torch.arange(len(problem.draft_ids)))
    weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in problem.weights.items()}
    weights["embed_tokens.weight"] = problem.embedding
    weights["verifier_lm_head.weight"] = problem.head[problem.draft_ids]
    unknown = model.load_state_dict(weights, strict=False).unexpected_keys
    assert not unknown, unknown
    model.verifier_norm = torch.nn.Identity()
    model.lm_head.weight.requires_grad_(not frozen_head)
    loss_config = resolve_loss_config("kl_div", "eager")

    def loss(problem: Problem) -> torch.Tensor:
        mask = torch.cat([problem.loss_mask[1:], problem.loss_mask.new_zeros(1)])  # of the token to predict
        _, value, _ = model(
            hidden_states=problem.aux[None, :-1],
            input_ids=problem.input_ids[None, 1:],
            document_ids=torch.zeros(1, len(mask) - 1, dtype=torch.int64),
            loss_mask=mask[None, 1:],
            verifier_last_hidden_states=problem.last[None, 1:],
            ttt_steps=shape.steps,
            ttt_step_loss_decay=STEP_DECAY,
            loss_config=loss_config,
        )
        return value

    return Contender(loss, model.parameters())
