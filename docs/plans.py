"""The table of docs/planning.md: ``python docs/plans.py`` computes it anew."""

from pathlib import Path

from hydra import compose, initialize_config_dir

from specdraft.files import atomic_file
from specdraft.training.planning.gpus import GPUS
from specdraft.training.planning.meta_target import shape_config
from specdraft.training.planning.plan import Plan, make_plan

PAGE, CONF = Path(__file__).parent / "planning.md", Path(__file__).parents[1] / "conf"
BEGIN, END = "<!-- computed by docs/plans.py -->\n", "<!-- end -->\n"
TARGETS = {"llama-8b": "8B", "llama-70b": "70B", "qwen3-235b-a22b": "235B‑A22B"}
SETTINGS = ("model=eagle3", "strategy=deepspeed_zero2", "data.sequence_length=2048", "data.batch_size=4")
HEADER = (
    "| target | GPUs | placement | memory per GPU | fits | tokens/s | hours per 10⁹ tokens | bottleneck |\n"
    "|---|---|---|---:|---|---:|---:|---|\n"
)


def rows() -> list[str]:
    """A row per target and number of GPUs. The target is replicated where nine tenths of a GPU hold it."""
    found = []
    for target, title in TARGETS.items():
        with initialize_config_dir(str(CONF), version_base=None):
            config = compose("train", [f"target={target}", *SETTINGS])
        architecture = shape_config(config.target_shape)
        for gpu in ("h100", "h200"):
            for count in (8, 64, 512):
                config.planning.gpu, config.planning.gpus, config.target.placement = gpu, count, "replicated"
                plan = make_plan(config, architecture, "published shape")
                if plan.memory["target weights"] > 0.9 * GPUS[gpu].memory:
                    config.target.placement = "zero3"
                    plan = make_plan(config, architecture, "published shape")
                found.append(_row(title, gpu, config.target.placement, plan))
    return found


def _row(title: str, gpu: str, placement: str, plan: Plan) -> str:
    fits = "yes" if plan.memory_per_device < plan.memory_there else "no"
    cells = (
        title,
        f"{plan.devices} × {gpu.upper()}",
        placement,
        f"{plan.memory_per_device / 1e9:.0f} GB",
        fits,
        f"{float(f'{plan.tokens_per_second:.3g}'):,.0f}",
        f"{plan.hours(1e9):.3g}",
        plan.bottleneck,
    )
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    """Put the table between the page's two marks."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    with atomic_file(PAGE) as temporary:
        temporary.write_text(f"{before}{BEGIN}{HEADER}{''.join(rows())}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
