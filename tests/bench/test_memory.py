"""Bytes of a drafter from its files, and tokens from the engine's own count."""

import json

from specdraft.bench.engines import Contender
from specdraft.bench.memory import cache_bytes, memory_use, target_config

LLAMA = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}


def test_weights_cache_and_tokens_lost(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x" * 5120)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 1, "head_dim": 16}))
    contenders = [
        Contender("plain", "plain"),
        Contender("ngram K=1", "ngram", 1),
        Contender("eagle3 K=1", "eagle3", 1, (), tmp_path),
        Contender("medusa K=1", "medusa", 1, (), tmp_path),
    ]
    tokens = {"plain": 1000, "ngram K=1": 1000, "eagle3 K=1": 800, "medusa K=1": None}
    ngram, eagle, medusa = memory_use(contenders, tokens, LLAMA, "float32")
    assert ngram["weights_bytes"] == 0 == ngram["cache_bytes_per_token"] == ngram["cache_tokens_lost"]
    assert eagle["weights_bytes"] == 5120 and eagle["cache_bytes_per_token"] == 2 * 2 * 16 * 4
    assert eagle["cache_tokens_lost"] == 200 and eagle["tokens_of_weights"] == 5120 // (2 * 4 * 2 * 8 * 4)
    assert medusa["cache_bytes_per_token"] == 0 and medusa["cache_tokens_lost"] is None


def test_what_is_not_known_is_none(tmp_path):
    assert cache_bytes({}, "float32") is None and cache_bytes(LLAMA, "fp8") is None
    assert target_config("organization/name") == {}
    unknown = memory_use([Contender("plain", "plain"), Contender("drafting", "drafting", url="http://a")], {}, {}, "")
    assert set(unknown[0].values()) == {"drafting", None}
