"""From the blocks of a measurement to what ``bench.json`` holds."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from specdraft.bench.advice import PLAIN, concurrencies, sentences, settings_text, vllm_settings
from specdraft.bench.engines import Contender
from specdraft.bench.load import CONCURRENCY, Load
from specdraft.bench.summary import Objective, by_category, summarize
from specdraft.bench.turns import Block
from specdraft.evaluation.evaluation import machine, versions


def loads_of(concurrency: Sequence[float], rate: Sequence[float]) -> list[Load]:
    """The loads of the settings. Raises UserError."""
    return [Load(CONCURRENCY, each) for each in concurrency] + [Load("rate", each) for each in rate]


def measurement(
    blocks: Sequence[Block],
    contenders: Sequence[Contender],
    settings: Mapping[str, Any],
    memory: Sequence[Mapping[str, Any]] = (),
    energy: Sequence[str] = (),
    target: str | None = None,
    dtype: str = "auto",
) -> dict[str, Any]:
    """JSON-able. settings: as given, with objective and price_per_hour. target: as the engine's settings name it; None:
    there are none, because it is not vLLM that was started here. dtype: that it was started in. ``engine_settings`` are
    files by their names: of what was fastest over all concurrencies (vllm.yaml), and at each (vllm-4.yaml)."""
    loads = list(dict.fromkeys(block.load for block in blocks))
    objective = Objective(**settings["objective"])
    results = [
        summarize(blocks, each.name, load, objective, settings["price_per_hour"])
        for load in loads
        for each in contenders
    ]
    advice = sentences(results, contenders)
    files: dict[str, str] = {}
    for at in [None, *concurrencies(results)]:
        chosen = None if target is None else vllm_settings(results, contenders, target, at)
        if chosen is not None:
            chosen |= {} if dtype == "auto" else {"dtype": dtype}
            if options := settings.get("chat_template_options"):
                chosen["default-chat-template-kwargs"] = options
            said = [advice[loads.index(Load(CONCURRENCY, at))]] if at else advice
            files["vllm.yaml" if at is None else f"vllm-{at}.yaml"] = settings_text(chosen, said)
    categories = [
        {"contender": each.name, "category": category, "speedup": speed, "speedup_interval": interval}
        for each in contenders
        if each.method != PLAIN and contenders[0].method == PLAIN
        for category, (speed, interval) in by_category(blocks, each.name, loads[0]).items()
    ]
    if len({each["category"] for each in categories}) < 2:
        categories = []
    return {
        "settings": dict(settings),
        "contenders": [
            asdict(each) | {"directory": None if each.directory is None else str(each.directory)} for each in contenders
        ],
        "results": results,
        "categories": categories,
        "memory": list(memory),
        "energy": list(energy),
        "advice": advice,
        "engine_settings": files,
        "machine": machine(),
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
