"""What a drafter takes of the engine's memory: its weights, its part of the cache, and the tokens that fit no more."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdraft.bench.engines import Contender
from specdraft.files import read_json

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_WITHOUT_CACHE = ("medusa",)  # heads that read the last token alone


def memory_use(
    contenders: Sequence[Contender], cache_tokens: Mapping[str, int | None], target: Mapping[str, Any], dtype: str
) -> list[dict[str, Any]]:
    """A record for each contender that drafts: ``weights_bytes`` of its files; ``cache_bytes_per_token`` by its
    configuration, in the dtype of the cache; ``cache_tokens`` that the engine says to have room for, and
    ``cache_tokens_lost`` against the first contender. Where the engine says nothing, or has the memory of its cache
    from a setting rather than from what the weights leave, ``tokens_of_weights`` is what its weights would hold.

    target: the configuration of its model. None stands for what is not known."""
    first = cache_tokens.get(contenders[0].name)
    each_token = cache_bytes(target, dtype)
    found = []
    for each in contenders[1:]:
        weights = extra = None
        if each.directory is not None:
            weights = sum(path.stat().st_size for path in each.directory.glob("*.safetensors"))
            extra = cache_bytes(read_json(each.directory / "config.json"), dtype)
        elif each.url is None:  # a look-up
            weights = extra = 0
        now = cache_tokens.get(each.name)
        found.append(
            {
                "contender": each.name,
                "weights_bytes": weights,
                "cache_bytes_per_token": 0 if each.method in _WITHOUT_CACHE else extra,
                "target_cache_bytes_per_token": each_token,
                "cache_tokens": now,
                "cache_tokens_lost": None if first is None or now is None else first - now,
                "tokens_of_weights": weights // each_token if weights is not None and each_token else None,
            }
        )
    return found


def cache_bytes(config: Mapping[str, Any], dtype: str) -> int | None:
    """Bytes that keys and values of one token take, by a model's configuration; None where it does not say."""
    config = config.get("transformer_layer_config", config)
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads")
    size = config.get("head_dim")
    if size is None and config.get("hidden_size") and config.get("num_attention_heads"):
        size = config["hidden_size"] // config["num_attention_heads"]
    layers, width = config.get("num_hidden_layers"), _BYTES.get(dtype)
    return 2 * layers * heads * size * width if layers and heads and size and width else None


def target_config(location: str) -> Mapping[str, Any]:
    """A target's configuration; nothing of one that lies on a hub."""
    path = Path(location) / "config.json"
    return dict(read_json(path)) if path.is_file() else {}
