"""``specdraft bench checkpoint=PATH`` or ``specdraft bench url=... plain_url=...``; ``--help`` says more."""

import os
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf

from specdraft.entry import CONF, entry_point
from specdraft.errors import UserError


@entry_point(CONF, "bench")
def main(config: DictConfig) -> None:
    """Start or find the servers, let them take turns; print a table, write JSON, a page, and the engine's settings."""
    if config.max_prompts_per_category is not None and config.max_prompts_per_category < 1:
        raise UserError(f"max_prompts_per_category is {config.max_prompts_per_category}: expected a positive number")
    if config.rounds < 1:
        raise UserError(f"rounds is {config.rounds}: expected a positive number")
    # Imported here so that --help answers at once.
    import json

    import torch
    from tqdm import tqdm

    from specdraft.bench.contenders import contenders, running, served
    from specdraft.bench.energy import EnergyMeter
    from specdraft.bench.engines import ENGINES
    from specdraft.bench.measurement import loads_of, measurement
    from specdraft.bench.memory import memory_use, target_config
    from specdraft.bench.report import html, table
    from specdraft.bench.streaming import Asking
    from specdraft.bench.summary import Objective
    from specdraft.bench.turns import Bench
    from specdraft.data.prompts import at_most_per_category, load_prompts, usual_benchmark
    from specdraft.drafters.checkpoint import complete_options, find, read_config
    from specdraft.files import write_text
    from specdraft.targets.chat_template import checked_options
    from specdraft.targets.loading import check_options, location

    loads = loads_of(config.concurrency, config.rate)
    if not loads:
        raise UserError("concurrency and rate are both empty: expected numbers in one of them")
    Objective(**config.objective)
    if config.price_per_hour is not None and config.price_per_hour <= 0:
        raise UserError(f"price_per_hour is {config.price_per_hour}: expected a price, or null for none")
    key = os.environ.get(config.api_key_variable, "") if config.api_key_variable else ""
    if config.engine.name not in ENGINES:
        raise UserError(f"engine.name is {config.engine.name!r}: expected one of {', '.join(ENGINES)}")

    # Who takes part.
    output = Path(HydraConfig.get().runtime.output_dir)
    paths = config.checkpoint if isinstance(config.checkpoint, ListConfig) else [config.checkpoint]
    checkpoints = [find(path) for path in paths if path is not None]
    trained = read_config(checkpoints[0]) if checkpoints else {}
    complete_options(config.target, trained)
    template_options = checked_options(config.target.get("chat_template_options"))
    asking = Asking(**config.request, temperature=config.temperature, seed=config.seed).with_options(template_options)
    options = OmegaConf.to_container(config.engine)
    assert isinstance(options, dict)
    kind = ENGINES[options.pop("name")]
    if options["dtype"] is None:
        options["dtype"] = "auto" if torch.cuda.is_available() else "float32"
    engine = kind(**{**options, "flags": tuple(map(str, options["flags"]))})
    name, revision = config.target.name, config.target.revision
    if name is None and trained:
        name, revision = trained["target"]["name"], trained["target"]["revision"]
    config.benchmark = config.benchmark or usual_benchmark(trained, name)
    prompts = at_most_per_category(load_prompts(config.benchmark, config.limit), config.max_prompts_per_category)
    found = running(config.url, config.plain_url)
    ours = not found
    if ours:
        if name is None:
            said = "there is nothing to serve"
            raise UserError(f"{said}: expected checkpoint=PATH, target=NAME, or url= of a running server")
        engine.words()  # before anything is exported
        check_options({**config.target, "name": name, "revision": revision})
        found = contenders(engine, kind.exported, checkpoints, config.draft_tokens, config.ngram, output / "heads")
    elif checkpoints:
        raise UserError("checkpoint= and url= both say what is served: expected one of them")
    address = location(name) if ours else ""

    with served(found, engine, address, revision, config.model, key) as places:
        bench = Bench(places, asking, EnergyMeter(), config.seed, key)
        questions = bench.questions(prompts, int(max([*config.concurrency, 1])))
        bench.warm_up(questions)
        with tqdm(total=bench.count(questions, loads, config.rounds), desc="serving", unit="block") as bar:
            blocks = list(bench.run(questions, loads, config.rounds, bar))

    settings = {"target": name or next(iter(places.values())).model, "benchmark": config.benchmark}
    settings |= {"prompts": len(prompts), "requests": len(questions), "max_new_tokens": asking.max_new_tokens}
    settings |= {"temperature": asking.temperature, "rounds": config.rounds, "seed": config.seed}
    settings |= {"chat_template_options": template_options}
    settings |= {"engine": f"{config.engine.name}, {engine.dtype}" if ours else "running servers"}
    settings |= {"objective": dict(config.objective), "price_per_hour": config.price_per_hour}
    settings |= {"flags": list(engine.flags), "prefix_caching": engine.prefix_caching} if ours else {}
    width = str(target_config(address).get("dtype", "")) if engine.dtype == "auto" else engine.dtype
    memory = memory_use(found, bench.cache_tokens, target_config(address), width) if len(found) > 1 else []
    vllm = address if ours and config.engine.name == "vllm" else None
    result = measurement(blocks, found, settings, memory, bench.meter.sources, vllm, engine.dtype)
    print(table(result))
    print(f"\nresults:  {write_text(output / 'bench.json', json.dumps(result, indent=2))}")
    print(f"report:   {write_text(output / 'report.html', html(result))}")
    for name, text in result["engine_settings"].items():
        without = "" if "speculative-config" in text else "  # without drafts: none was faster"
        print(f"settings: vllm serve --config {write_text(output / name, text)}{without}")


if __name__ == "__main__":
    main()
