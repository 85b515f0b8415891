"""Measure a trained drafter by really decoding with it: ``python evaluate.py checkpoint=PATH``; see ``--help``."""

from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig

from specdraft.entry import CONF, build, entry_point
from specdraft.errors import UserError


@entry_point(CONF, "evaluate")
def main(config: DictConfig) -> None:
    """Decode the benchmark's prompts with and without the drafter; print a table, write JSON and HTML."""
    # Imported here so that --help answers at once.
    from specdraft.data.prompts import usual_benchmark
    from specdraft.drafters.base import Drafter
    from specdraft.drafters.checkpoint import check_target, complete_target, find, load_drafter, other_options
    from specdraft.drafters.composition import composed
    from specdraft.evaluation import CostSettings, EvaluationSettings, evaluate, load_prompts, table, write_report
    from specdraft.evaluation.report.charts import check_png, write_png
    from specdraft.evaluation.report.comparison import names
    from specdraft.evaluation.selection import Selection

    paths = config.checkpoint if isinstance(config.checkpoint, ListConfig) else [config.checkpoint]
    beside, untrained = build(config.compare), build(config.drafter)
    automatic = isinstance(untrained, Selection)
    if untrained is not None and not automatic and paths != [None]:
        raise UserError("checkpoint= and drafter= both say what to evaluate: expected one, and the other in compare=")
    if untrained is None and paths == [None] and beside:
        untrained = beside[next(iter(beside))]
    if untrained is not None and paths == [None] and config.target.name is not None:
        paths = []
        if not automatic:
            beside.pop(untrained.family, None)
    elif not paths or None in paths:
        wanted = "the path of a drafter or of a run directory that holds one, or target=NAME drafter=NAME"
        raise UserError(f"checkpoint= is missing: expected {wanted}")
    roles = {role: _in_role(config, role) for role in ("inner", "ensemble", "retrieval")}
    if roles["retrieval"] is not None and not paths:
        raise UserError("drafter@retrieval= drafts instead of a checkpoint's drafter: expected checkpoint=PATH with it")
    if automatic and any(role is not None for role in roles.values()):
        raise UserError(
            "drafter=auto tries look-ups before a checkpoint's drafter itself: expected no other drafter@ROLE"
        )
    if config.png:
        check_png()
    loaded = [load_drafter(path, config.quantize) for path in paths]
    drafter, trained = loaded[0] if loaded else (untrained, {})
    parts = [each for each, _ in loaded] or [drafter]
    evaluated = drafter if automatic else composed(parts, **roles, min_tokens=config.retrieval_min_tokens)
    if config.decoding.num_draft_tokens is None:
        config.decoding.num_draft_tokens = trained.get("extra", {}).get("decoding", {}).get("num_draft_tokens", 5)
    settings = EvaluationSettings.from_config(dict(config.decoding), config.seed)
    cost = None if config.cost_model is None else CostSettings(**config.cost_model)
    config.benchmark = config.benchmark or usual_benchmark(trained, config.target.name)
    prompts = load_prompts(config.benchmark, config.limit)

    complete_target(config.target, trained)
    target = build(config.target)
    for each, about in loaded:
        check_target(about, target)
        if other := other_options(about, target):
            print(f"note: {other}", flush=True)
        each.to(target.device, target.dtype)

    checkpoints = [str(find(path).resolve()) for path in paths]
    notes = {"benchmark": config.benchmark, "checkpoint": next(iter(checkpoints), None)}
    notes |= {"drafter": trained["drafter"]} if trained else {}
    others = names([each for each, _ in loaded], checkpoints) if loaded else {}
    engine = build(config.engine) if config.get("engine") else None
    choice = None
    if automatic:
        heads = {drafter.family: drafter, **others} if loaded else {}
        print(untrained.plan(heads, prompts), flush=True)
        choice = untrained.choose(target, heads, prompts, settings, engine)
        print(f"{choice.summary()}\n")
        evaluated, prompts = choice.drafter, choice.rest
        others = {name: each for name, each in heads.items() if each is not evaluated}
        beside = {name: each for name, each in beside.items() if name != evaluated.family}
        notes |= {"selection": choice.to_dict()}
    elif evaluated is not drafter:
        others = {drafter.family: drafter, **others}
        notes |= {role: each.family for role, each in roles.items() if isinstance(each, Drafter)}
    compare = {**others, **beside}
    notes |= {"compared": checkpoints[-len(others) :]} if others else {}
    evaluation = evaluate(target, evaluated, prompts, settings, compare, notes, cost=cost, engine=engine)
    output = Path(HydraConfig.get().runtime.output_dir)
    print(table(evaluation))
    if choice is not None:
        print(f"\n{choice.compared_with(evaluation)}")
    print(f"\nresults: {evaluation.write_json(output / 'evaluation.json')}")
    print(f"report:  {write_report(evaluation, output / 'report.html')}")
    if config.png:
        print(f"charts:  {write_png(evaluation.to_dict(), output / 'charts')[0].parent}")


def _in_role(config: DictConfig, role: str) -> Any:
    """The drafter of ``drafter@ROLE=NAME``, None, or of an ensemble true. Raises UserError for anything else."""
    from specdraft.drafters.base import Drafter

    given = config[role]
    if isinstance(given, bool) and role == "ensemble":
        return given
    if not isinstance(given, DictConfig | None):
        raise UserError(f"{role}={given} is no drafter: expected drafter@{role}=NAME, of conf/drafter")
    found = build(given)
    if given is not None and not isinstance(found, Drafter):
        raise UserError(f"drafter@{role}= names what drafts nothing by itself: expected another of conf/drafter")
    return found


if __name__ == "__main__":
    main()
