from pathlib import Path

from specdraft.onednn import pack
from specdraft.training.planning import meta_target
from specdraft.training.planning.costs import state_bytes, target_sizes
from tests.fakes import tiny_llama

CONF = Path(__file__).parents[2] / "conf"


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


def test_zero_stages_shard_what_they_say():
    def held(*settings, mixed):
        found = state_bytes(100, *settings, mixed=mixed)
        assert list(found) == ["drafter weights", "drafter gradients", "optimizer states"]
        return tuple(found.values())

    assert held(None, 4, mixed=False) == (400, 400, 800)
    assert held(None, 4, mixed=True) == (600, 400, 800)
    assert held(1, 4, mixed=False) == (400, 400, 200)
    assert held(2, 4, mixed=True) == (200, 50, 300)
    assert held(3, 4, mixed=True) == (50, 50, 300)


def test_packing_a_target_changes_none_of_its_arithmetic():
    for tied in (True, False):
        model = tiny_llama(tie_word_embeddings=tied)
        before = target_sizes(model, model.config)
        pack(model)
        after = target_sizes(model, model.config)
        assert after.active == before.active
        assert after.total == before.total + tied * model.get_input_embeddings().weight.numel()
