"""What an engine has counted so far, read from its ``/metrics`` in Prometheus' text format."""

import re
from dataclasses import dataclass

import httpx

_DRAFTS = "vllm:spec_decode_num_drafts_total"
_DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_CACHE = "vllm:cache_config_info"
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Counters:
    """rounds, drafted and accepted: tokens since the engine began, over all of its ranks; per_position: accepted ones
    by position in the draft. cache_tokens: how many the cache holds, None where the engine does not say."""

    rounds: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    per_position: tuple[float, ...] = ()
    cache_tokens: int | None = None

    def since(self, before: "Counters") -> "Counters":
        """What was counted after ``before``."""
        earlier = [*before.per_position, *[0.0] * len(self.per_position)]
        per_position = tuple(now - then for now, then in zip(self.per_position, earlier, strict=False))
        return Counters(
            self.rounds - before.rounds,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            per_position,
            self.cache_tokens,
        )


def read_counters(url: str, timeout: float = 30.0) -> Counters | None:
    """What the server at ``url`` has counted; None where it has no ``/metrics`` of a known engine."""
    try:
        found = httpx.get(f"{url}/metrics", timeout=timeout, trust_env=False, follow_redirects=True)
    except httpx.HTTPError:
        return None
    return parse(found.text) if found.status_code == 200 and "vllm:" in found.text else None


def parse(text: str) -> Counters:
    """The counters of a Prometheus text."""
    sums = dict.fromkeys((_DRAFTS, _DRAFTED, _ACCEPTED), 0.0)
    positions: dict[int, float] = {}
    cache: int | None = None
    for line in text.splitlines():
        if (match := _LINE.match(line)) is None:
            continue
        name, labels, value = match[1], dict(_LABEL.findall(match[2] or "")), match[3]
        if name in sums:
            sums[name] += float(value)
        elif name == _PER_POSITION:
            at = int(labels["position"])
            positions[at] = positions.get(at, 0.0) + float(value)
        elif name == _CACHE:
            cache = (cache or 0) + _cache_tokens(labels)
    per_position = tuple(positions.get(at, 0.0) for at in range(1 + max(positions, default=-1)))
    return Counters(sums[_DRAFTS], sums[_DRAFTED], sums[_ACCEPTED], per_position, cache or None)


def _cache_tokens(labels: dict[str, str]) -> int:
    """Of an engine's rank; newer engines say the number, older ones blocks and their size. 0 if neither."""
    if (tokens := labels.get("kv_cache_size_tokens", "")).isdigit():
        return int(tokens)
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    return int(blocks) * int(size) if blocks.isdigit() and size.isdigit() else 0
