"""A tiny random target to check a drafter beside: made on the spot, far from uniform, and exact."""

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdraft.errors import UserError
from specdraft.targets import Target


def random_target(
    vocab_size: int = 32,
    num_layers: int = 6,
    hidden_size: int = 32,
    context: int = 96,
    seed: int = 0,
    dtype: str = "float64",
) -> Target:
    """A Llama whose every weight matters, with a tokenizer of as many words, which never ends a text. In fp64, so that
    what is said to be equal is. Raises UserError for sizes that make no Llama of heads of 8."""
    if vocab_size < 8 or num_layers < 4 or hidden_size % 16 or context < 64 or dtype not in ("float32", "float64"):
        wanted = (
            "vocab_size of at least 8, 4 layers, hidden_size a multiple of 16, context of at least 64, dtype float64"
        )
        raise UserError(f"the random target's sizes do not do for the checks: expected {wanted}")
    heads = hidden_size // 8
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 3 // 2,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=8,
        max_position_embeddings=context,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(getattr(torch, dtype))
        with torch.no_grad():  # norms begin as ones: which one is read must show
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
    words = Tokenizer(WordLevel({f"w{word}": word for word in range(vocab_size)}, unk_token="w0"))
    tokenizer: transformers.PreTrainedTokenizerBase = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
    return Target.from_model(model, tokenizer, "a random target")
