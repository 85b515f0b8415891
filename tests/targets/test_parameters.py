"""Parameters of a target, and those that a token passes through."""

import pytest

from specdraft.onednn import pack
from specdraft.targets.parameters import target_sizes
from specdraft.training.planning import meta_target
from tests.fakes import tiny_llama


def test_mixture_counts_chosen_experts_only():
    config = meta_target.shape_config(
        {
            "model_type": "mixtral",
            "vocab_size": 100,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        }
    )
    target = meta_target.MetaTarget(config, "mixture")
    sizes = target_sizes(target.model, target.config)
    experts = 4 * 8 * 3 * 32 * 64
    assert sizes.active == sizes.total - experts * 6 // 8 - 100 * 32


@pytest.mark.usefixtures("small_layers_packed_too")
def test_packing_a_target_changes_none_of_its_arithmetic():
    for tied in (True, False):
        model = tiny_llama(tie_word_embeddings=tied)
        before = target_sizes(model, model.config)
        pack(model)
        after = target_sizes(model, model.config)
        assert after.active == before.active
        assert after.total == before.total + tied * model.get_input_embeddings().weight.numel()
