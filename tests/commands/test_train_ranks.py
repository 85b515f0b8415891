"""train.py on two ranks, every strategy with every family, and ranks that get stuck. A person starts it once, and
Lightning the other rank; torchrun starts it once a rank, which here costs no imports (``forked.py``)."""

import csv
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from specdraft.commands import train
from tests.commands import test_train as cli
from tests.training.forked import Ranks

world, arguments = cli.world, cli.arguments
pytestmark = pytest.mark.slow
MODELS = {"pard": ("model=draft", "model.drafter.parallel=true")}  # the others are named as their models are
# Which modules are called in which order is a family's own, and ZeRO-3 is where that matters; how gradients are summed
# and where states lie is not. That ZeRO-3 computes what one rank does is seen in tests/training/test_ranks.py.
ZERO3 = (
    "medusa",
    "hydra",
    "redrafter",
    "eagle",
    "eagle3_1",
    "p_eagle",
    "mtp",
    "dflash",
    "dspark",
    "domino",
    "kangaroo",
    "pard",
)
STRATEGIES = {"draft": ("ddp", "deepspeed_zero3")}
STRATEGIES |= {"eagle3": ("ddp", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3")}
TWO_RANKS = ("trainer.accelerator=cpu", "trainer.devices=2", "evaluate=false", "export=null")
# The default data, of which the check of parity takes as much: the target answers once for both.
DATA = ("data.limit=160", "data.validation_limit=16")
QUICK = ("trainer.max_steps=6", "trainer.log_every_n_steps=1", "live.prompts=2", "live.max_new_tokens=8")
QUICK += ("model.optimizer.name=adamw",)  # what "auto" is under DeepSpeed alone
LIMIT = 600  # seconds: the first of them lets the target answer, and the others wait for that


def start(*overrides: str, **environment: str) -> subprocess.Popen[str]:
    """train.py in a session of its own: a signal reaches the first rank alone."""
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.Popen(
        [sys.executable, "train.py", *TWO_RANKS, *overrides],
        cwd=cli.REPOSITORY,
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], limit: float) -> tuple[int, str]:
    """Exit status and output; a run that takes longer is killed with all its ranks."""
    try:
        said, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        pytest.fail(f"no end within {limit} s: {said[-3000:]}")
    return process.returncode, said


def ends(processes: dict[str, subprocess.Popen[str]]) -> dict[str, tuple[int, str]]:
    """Of runs side by side, of which half of the time one rank waits for the other to be started."""
    try:
        return {name: end(process, LIMIT) for name, process in processes.items()}
    finally:
        for process in processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def trained(run: Path) -> dict[str, list[float]]:
    """The logged losses and gradient norms by name."""
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows if row[name]] for name in ("train/loss", "train/grad_norm")}


def finite(run: Path) -> dict[str, list[float]]:
    """What ``trained`` gives of a run that came to its end, with a drafter of numbers."""
    curves = trained(run)
    assert len(curves["train/loss"]) == 6
    assert all(math.isfinite(value) for values in curves.values() for value in values)
    assert json.loads((run / "drafter" / "config.json").read_text())["extra"]["training"]["step"] == 6
    weights = load_file(run / "drafter" / "model.safetensors")
    assert weights and all(weight.isfinite().all() for weight in weights.values() if weight.is_floating_point())
    return curves


def command(*overrides: str) -> None:
    """train.py with these arguments, as it is in a process that has imported what it needs."""
    sys.argv = [str(cli.REPOSITORY / "train.py"), *overrides]
    train.main()


def forked(run: Path, *overrides: str) -> None:
    """train.py to its end in ``run``, on two ranks of which each is started for itself."""
    ranks = Ranks(run.with_name(f"{run.name}-logs"), 2, command, *TWO_RANKS, *overrides, f"hydra.run.dir={run}")
    try:
        ended = [ranks.end(rank, LIMIT) for rank in (1, 0)]
    finally:
        ranks.stop()
    assert ended == [0, 0], ranks.said(0)[-3000:] + ranks.said(1)[-3000:]


@pytest.mark.parametrize("family", STRATEGIES)
def test_every_strategy_trains_to_the_end(family, tmp_path):
    curves = {}
    for strategy in STRATEGIES[family]:
        forked(tmp_path / strategy, f"model={family}", f"strategy={strategy}", *DATA, *QUICK)
        curves[strategy] = finite(tmp_path / strategy)
    first = curves[STRATEGIES[family][0]]
    for strategy, curve in curves.items():  # they compute the same
        for name, values in curve.items():
            assert values == pytest.approx(first[name], rel=2e-3), (strategy, name)


@pytest.mark.parametrize("family", ZERO3)
def test_zero3_trains_every_family_to_the_end(family, tmp_path):
    """On the default data, whose batches are unequal: ranks that called other modules would wait for ever."""
    model = MODELS.get(family, (f"model={family}",))
    forked(tmp_path / "run", *model, "strategy=deepspeed_zero3", *DATA, *QUICK)
    finite(tmp_path / "run")


def test_layers_that_learn_by_onednn_learn_alike_where_their_weights_are_sharded(tmp_path):
    """Each is started as a person starts it, once, and Lightning starts the other rank."""

    def started(strategy):
        mine = (
            "imports=[tests.training.learned_products]",
            "trainer.precision=32-true",
            f"hydra.run.dir={tmp_path / strategy}",
        )
        return start("model=eagle3", f"strategy={strategy}", *DATA, *QUICK, *mine, PYTHONPATH=str(cli.REPOSITORY))

    for strategy, (status, said) in ends({each: started(each) for each in ("ddp", "deepspeed_zero3")}).items():
        assert status == 0, said[-3000:]
        products = [int(found) for found in re.findall(r"learned products: (\d+)", said)]
        assert len(products) == 2 and min(products) >= 6 * 7, strategy  # of a layer's seven, in every step of each rank
    sharded, whole = trained(tmp_path / "deepspeed_zero3"), trained(tmp_path / "ddp")
    for name, values in whole.items():
        assert len(values) == 6 and sharded[name] == pytest.approx(values, rel=2e-3), name


@pytest.fixture
def stuck(arguments, tmp_path):
    """Overrides of a run whose ranks get stuck in the third step, and its directory."""
    replaced = ("trainer=", "trainer.max_steps=", "live.", "strategy=")
    kept = [each for each in arguments if not each.startswith(replaced)]
    mine = ["imports=[tests.training.stuck]", "+callbacks.stuck._target_=tests.training.stuck.Stuck"]
    steps = ["trainer.max_steps=1000", "live.every_n_steps=0", "checkpoint.every_n_steps=1", "strategy=deepspeed_zero2"]
    return [*kept, *mine, *steps], tmp_path / "family" / "run"


def test_ranks_that_are_stuck_end_with_a_sentence(stuck):
    overrides, run = stuck
    limits = ("callbacks.rank_heartbeat.patience=3", "callbacks.rank_heartbeat.silence=20")
    status, said = end(start(*overrides, *limits, PYTHONPATH=str(cli.REPOSITORY)), 300)
    (sentence,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert status == 2 and "no rank has made progress for" in sentence
    assert re.search(r"rank 0 is in broadcast \(torch/distributed/\S+\) during step 3; rank 1 is in all_re", sentence)
    assert f"resume from {run / 'checkpoints' / 'last.ckpt'}" in sentence
    assert (run / "checkpoints" / "last.ckpt").resolve().name == "step-000002.ckpt"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_that_is_stuck(stuck, number):
    overrides, _ = stuck
    process = start(*overrides, "callbacks.stop_signal.grace=1", PYTHONPATH=str(cli.REPOSITORY))
    assert process.stdout is not None
    for line in process.stdout:
        if "gets stuck" in line:
            break
    process.send_signal(number)
    status, said = end(process, 120)
    assert status == 130, said
    assert "interrupted: rank 0 was in broadcast (torch/distributed/" in said
