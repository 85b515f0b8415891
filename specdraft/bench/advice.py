"""Where drafting pays, in a sentence for each load, and the settings of the engine that follow."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from specdraft.bench.engines import Contender
from specdraft.bench.load import CONCURRENCY, Load
from specdraft.bench.summary import Record

PLAIN = "plain"
# Methods that vLLM 0.32 lets draft another number of tokens by batch size, on both of its runners.
_BY_BATCH_SIZE = ("eagle", "eagle3")


def sentences(results: Sequence[Record], contenders: Sequence[Contender]) -> list[str]:
    """One for each load; none without a contender that drafts or one that does not."""
    drafting = {each.name for each in contenders if each.method != PLAIN}
    if not drafting or contenders[0].method != PLAIN:
        return []
    found = []
    for load in dict.fromkeys((each["load"]["kind"], each["load"]["value"]) for each in results):
        own = [each for each in results if (each["load"]["kind"], each["load"]["value"]) == load]
        measured = [each for each in own if each["contender"] in drafting and each["speedup"] is not None]
        at = f"At {Load(*load)}"
        if not measured:
            found.append(f"{at} nothing is known of drafting: no answer was whole both with it and without.")
            continue
        best = max(measured, key=lambda each: float(each["speedup"]))
        low, high = best["speedup_interval"] or (-math.inf, math.inf)
        around = f" [{low:.2f}, {high:.2f}]" if best["speedup_interval"] else ", without an interval of one prompt"
        figure = f"{best['contender']} is {best['speedup']:.2f} times as fast as without drafts{around}"
        if best["speedup"] <= 1:
            found.append(f"{at} drafting does not pay: the best, {figure}.")
        elif low <= 1:
            found.append(f"{at} it is not certain that drafting pays: the best, {figure}.")
        else:
            found.append(f"{at} drafting pays: {figure}.")
    return found


def best_lengths(results: Sequence[Record], contenders: Sequence[Contender], method: str) -> dict[int, int]:
    """The number of drafted tokens that was fastest at each concurrency, of the contenders of a method; 0 where none
    was faster than plain."""
    lengths = {each.name: each.num_draft_tokens for each in contenders if each.method == method}
    best: dict[int, tuple[float, int]] = {}
    for each in results:
        if each["load"]["kind"] == CONCURRENCY and each["contender"] in lengths and each["speedup"] is not None:
            size = int(each["load"]["value"])
            best[size] = max(best.get(size, (1.0, 0)), (each["speedup"], lengths[each["contender"]]))
    return {size: length for size, (_, length) in sorted(best.items())}


def schedule(best: Mapping[int, int]) -> list[list[int]]:
    """``num_speculative_tokens_per_batch_size`` of vLLM: [first, last, K]. A batch size takes the K of the nearest
    concurrency above that was measured; what is larger than all takes the last one's."""
    table: list[list[int]] = []
    first = 1
    for size, length in sorted(best.items()):
        if table and table[-1][2] == length:
            table[-1][1] = size
        else:
            table.append([first, size, length])
        first = size + 1
    return table


def vllm_settings(results: Sequence[Record], contenders: Sequence[Contender], target: str) -> dict[str, Any] | None:
    """What ``vllm serve --config FILE`` is to read, of the method that is fastest over all concurrencies; None where
    nothing was compared at a concurrency."""
    methods = {each.method: each for each in contenders if each.method != PLAIN}
    speeds = {name: _mean_speed(results, contenders, name) for name in methods}
    known = {name: speed for name, speed in speeds.items() if speed is not None}
    if not known or contenders[0].method != PLAIN:
        return None
    method = max(known, key=lambda name: known[name])
    best = best_lengths(results, contenders, method)
    settings: dict[str, Any] = {"model": target}
    if not any(best.values()):
        return settings
    options = methods[method].options
    config = json.loads(options[options.index("--speculative-config") + 1])
    by_size = config["method"] in _BY_BATCH_SIZE and not config.get("parallel_drafting")
    if by_size and len(set(best.values())) > 1:
        config["num_speculative_tokens"] = max(best.values())
        config["num_speculative_tokens_per_batch_size"] = schedule(best)
    else:
        config["num_speculative_tokens"] = next(length for length in best.values() if length)
    if "--hf-overrides" in options:
        settings["hf-overrides"] = json.loads(options[options.index("--hf-overrides") + 1])
    return settings | {"speculative-config": config}


def settings_text(settings: Mapping[str, Any], said: Sequence[str]) -> str:
    """The file, with what was found as its comment."""
    comment = "".join(f"# {sentence}\n" for sentence in said)
    return comment + OmegaConf.to_yaml(dict(settings))


def _mean_speed(results: Sequence[Record], contenders: Sequence[Contender], method: str) -> float | None:
    """The mean logarithm, over concurrencies, of a method's best speedup."""
    names = {each.name for each in contenders if each.method == method}
    best: dict[float, float] = {}
    for each in results:
        if each["load"]["kind"] == CONCURRENCY and each["contender"] in names and each["speedup"]:
            best[each["load"]["value"]] = max(best.get(each["load"]["value"], 0.0), each["speedup"])
    return sum(map(math.log, best.values())) / len(best) if best else None
