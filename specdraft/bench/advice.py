"""Where drafting pays, in a sentence for each load, and the settings of the engine that follow."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
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


def vllm_settings(
    results: Sequence[Record], contenders: Sequence[Contender], target: str, at: int | None = None
) -> dict[str, Any] | None:
    """What ``vllm serve --config FILE`` is to read: of what was fastest over all concurrencies, or ``at`` one of them.
    One number of draft tokens, or, where vLLM takes that, one for each batch size. None where nothing was compared."""
    speeds = _speeds(results, at)
    sizes = {size for known in speeds.values() for size in known}
    drafting = [each for each in contenders if each.method != PLAIN and speeds.get(each.name, {}).keys() == sizes]
    if not sizes or not drafting or contenders[0].method != PLAIN:
        return None
    ways: list[tuple[float, Contender, dict[int, int]]] = []  # mean speed, contender, K by batch size where it differs
    ways += [(_mean(speeds[each.name].values()), each, {}) for each in drafting]
    for one in {each.method: each for each in drafting if _by_batch_size(each)}.values():
        own = [speeds[each.name] for each in drafting if each.method == one.method]
        best = best_lengths([each for each in results if _is_at(each, at)], drafting, one.method)
        if len(set(best.values())) > 1:
            ways.append((_mean(max(1.0, *(known[size] for known in own)) for size in sizes), one, best))
    speed, chosen, best = max(ways, key=lambda way: way[0])
    settings: dict[str, Any] = {"model": target}
    if speed <= 0:
        return settings
    config = _config(chosen)
    config["num_speculative_tokens"] = max(best.values(), default=chosen.num_draft_tokens)
    if best:
        config["num_speculative_tokens_per_batch_size"] = schedule(best)
    if "--hf-overrides" in chosen.options:
        settings["hf-overrides"] = json.loads(chosen.options[chosen.options.index("--hf-overrides") + 1])
    return settings | {"speculative-config": config}


def concurrencies(results: Sequence[Record]) -> list[int]:
    """Those that were measured, ascending."""
    return sorted({int(each["load"]["value"]) for each in results if each["load"]["kind"] == CONCURRENCY})


def settings_text(settings: Mapping[str, Any], said: Sequence[str]) -> str:
    """The file, with what was found as its comment."""
    comment = "".join(f"# {sentence}\n" for sentence in said)
    return comment + OmegaConf.to_yaml(dict(settings))


def _speeds(results: Sequence[Record], at: int | None) -> dict[str, dict[int, float]]:
    """By contender and concurrency."""
    found: dict[str, dict[int, float]] = {}
    for each in results:
        if _is_at(each, at) and each["speedup"]:
            found.setdefault(each["contender"], {})[int(each["load"]["value"])] = each["speedup"]
    return found


def _is_at(result: Record, at: int | None) -> bool:
    return result["load"]["kind"] == CONCURRENCY and at in (None, int(result["load"]["value"]))


def _mean(speeds: Iterable[float]) -> float:
    """The logarithm of their geometric mean."""
    return statistics.fmean(map(math.log, speeds))


def _config(contender: Contender) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(contender.options[contender.options.index("--speculative-config") + 1])
    return config


def _by_batch_size(contender: Contender) -> bool:
    config = _config(contender)
    return config["method"] in _BY_BATCH_SIZE and not config.get("parallel_drafting")
