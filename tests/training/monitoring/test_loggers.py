"""What a training shows: one run with all three loggers, the run that resumes it and a sweep."""

import csv
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch.loggers import CSVLogger
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from specdraft.training.callbacks.checkpoint import RunCheckpoint
from specdraft.training.planning.plan import find_architecture, make_plan
from tests.commands import test_train as cli

world, arguments, train = cli.world, cli.arguments, cli.train
PEAK = 1e12
Curves = dict[str, dict[int, float]]


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory) -> tuple[Path, Path, str]:
    """A run of 6 steps whose last checkpoint is of step 4, as after a crash; the run that resumes it; what it said."""
    folder = tmp_path_factory.mktemp("boards")
    options = [
        f"target.name={world / 'target'}",
        f"+data.source.root={world / 'source'}",
        f"data.cache_dir={folder / 'cache'}",
        *("data.regenerate=false", "data.sequence_length=192", "data.batch_size=2"),
        *("model.draft_vocab_size=200", "model.drafter.ttt_steps=2"),
        *("trainer=cpu", "trainer.max_steps=6", "trainer.log_every_n_steps=1", "trainer.val_check_interval=3"),
        *("live.every_n_steps=3", "live.prompts=3", "live.max_new_tokens=8", "decoding.num_draft_tokens=2"),
        *("evaluate=false", "export=null", "logger=[csv,tensorboard,wandb]", "logger.wandb.offline=true"),
        "checkpoint.every_n_steps=2",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cli.REPOSITORY)
        patch.syspath_prepend(str(cli.REPOSITORY))
        patch.setenv("WANDB_DATA_DIR", str(folder / "wandb-data"))
        patch.setattr("specdraft.training.module.peak_flops", lambda device, precision: PEAK)
        import train as script

        said = []
        patch.setattr("builtins.print", lambda *args, **kwargs: said.append(" ".join(map(str, args))))
        saving = RunCheckpoint._save_last
        with pytest.MonkeyPatch.context() as crash:
            crash.setattr(RunCheckpoint, "_save_last", lambda self, t: t.global_step <= 4 and saving(self, t))
            _main(script, patch, *options, f"hydra.run.dir={folder / 'first'}")
        _main(script, patch, *options, f"hydra.run.dir={folder / 'second'}", f"resume={folder / 'first'}")
    wandb.teardown()
    return folder / "first", folder / "second", "\n".join(said)


def _main(script, patch: pytest.MonkeyPatch, *overrides: str) -> None:
    GlobalHydra.instance().clear()
    patch.setattr(sys, "argv", ["train.py", *overrides])
    script.main()


def csv_curves(run: Path) -> Curves:
    curves: Curves = defaultdict(dict)
    with (run / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if name != "step" and value:
                    assert int(row["step"]) not in curves[name], f"{name} was logged twice at step {row['step']}"
                    curves[name][int(row["step"])] = float(value)
    return dict(curves)


def tensorboard_curves(run: Path) -> Curves:
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    curves: Curves = {}
    for name in events.Tags()["scalars"]:
        points = [(event.step, event.value) for event in events.Scalars(name)]
        curves[name] = dict(points)
        assert len(points) == len(curves[name]), f"{name} has a step twice"
    return curves


def wandb_file(run: Path) -> Path:
    (path,) = run.glob("wandb/offline-run-*/run-*.wandb")
    return path


def wandb_records(run: Path) -> Iterator[Record]:
    """W&B's own file is a LevelDB log: after 7 bytes, pieces of (crc 4, length 2, kind 1, payload) in 32 KiB blocks."""
    data = wandb_file(run).read_bytes()
    assert data[:4] == b":W&B"
    position, payload = 7, b""
    while position + 7 <= len(data):
        rest = 32768 - position % 32768
        if rest < 7:
            position += rest
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        payload += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = Record()
            record.ParseFromString(payload)
            yield record
            payload = b""


def wandb_curves(run: Path) -> Curves:
    curves: Curves = defaultdict(dict)
    for record in wandb_records(run):
        values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for name, value in values.items():
            if name[0] != "_" and not name.startswith(("samples/", "conditional_acceptance/", "trainer/")):
                curves[name][values["_step"]] = value
    return dict(curves)


def assert_same(ours: Curves, theirs: Curves, rel: float = 1e-12) -> None:
    assert ours.keys() == theirs.keys()
    for name, curve in ours.items():
        assert theirs[name] == pytest.approx(curve, rel=rel), name


def test_three_loggers_hold_the_same_numbers(runs):
    first, *_ = runs
    curves = csv_curves(first)
    assert set(curves["train/loss"]) == set(range(1, 7)) and set(curves["acceptance_length"]) == {3, 6}
    assert_same(curves, wandb_curves(first))
    assert_same(curves, tensorboard_curves(first), rel=1e-6)  # which keeps 32 bits


def test_the_numbers_are_what_their_names_say(runs):
    first, *_ = runs
    curves = csv_curves(first)
    plan_of = OmegaConf.load(first / ".hydra" / "config.yaml")
    flops = make_plan(plan_of, *find_architecture(plan_of)).flops_per_token
    for step, rate in curves["train/tokens_per_second"].items():
        assert curves["train/peak_flops_share"][step] == pytest.approx(rate * flops / PEAK)
        assert 0 < curves["train/data_wait_share"][step] < 1
        assert 0.05 < curves["train/memory_resident_gib"][step] < 64
        assert 0 < curves["train/out_of_vocabulary_mass"][step] < 1  # 200 of 320 tokens of a random target
        assert 0 <= curves["train/out_of_vocabulary_tokens"][step] < 0.5
    for step, length in curves["acceptance_length"].items():
        step_cost = curves["verification_cost_ratio"][step] + 2 * curves["cost_ratio"][step]
        assert curves["predicted_speedup"][step] == pytest.approx(length / step_cost)


def test_a_resumed_run_is_one_curve(runs):
    first, second, _ = runs
    before, after = csv_curves(first), csv_curves(second)
    deterministic = [name for name in before if "loss" in name or ("accept" in name and "seconds" not in name)]
    for name in deterministic:
        assert after[name] == pytest.approx(before[name], rel=1e-6), name
    kept = {name: {step: value for step, value in curve.items() if step <= 4} for name, curve in before.items()}
    assert {name: {s: v for s, v in after[name].items() if s <= 4} for name in kept} == kept  # times included
    assert_same(after, tensorboard_curves(second), rel=1e-6)
    assert wandb_file(first).name == wandb_file(second).name  # run-ID.wandb
    continued = wandb_curves(second)
    assert set(continued["train/loss"]) == {5, 6}
    assert continued["train/loss"] == {step: after["train/loss"][step] for step in (5, 6)}


def test_wandb_knows_settings_code_data_and_target(runs, world):
    first, *_ = runs
    config: dict[str, object] = {}
    artifacts: dict[str, list] = defaultdict(list)
    for record in wandb_records(first):
        config |= {item.key: json.loads(item.value_json) for item in record.config.update}
        if record.HasField("artifact"):
            artifacts[record.artifact.type].append(record.artifact)
    assert config["model.drafter.ttt_steps"] == 2 and config["seed"] == 0 and config["data_counts.source"]
    assert re.fullmatch(r"[0-9a-f]{40}", str(config["code.commit"])) and isinstance(config["code.dirty"], bool)
    (dataset,), (target,) = artifacts["dataset"], artifacts["target"]
    assert len(json.loads(dataset.metadata)["train_rows"]) >= 16
    identity = json.loads((first / "drafter" / "config.json").read_text())["target"]
    assert json.loads(target.metadata) == identity and identity["name"] == str(world / "target")
    for artifact in (dataset, target):  # names and hashes alone are sent
        assert [entry.path for entry in artifact.manifest.contents] == ["identity.json"]
        assert artifact.manifest.contents[0].size < 2000


def test_wandb_shows_samples_and_positions(runs):
    first, *_ = runs
    tables = [record.artifact for record in wandb_records(first) if record.artifact.type == "run_table"]
    samples = [table for table in tables if table.name.endswith("-samples")]
    assert len(samples) == 2  # one a measurement
    for table in samples:
        files = {entry.path: Path(entry.local_path).read_text() for entry in table.manifest.contents}
        content = json.loads(files.pop("samples.table.json"))
        assert content["columns"] == ["step", "category", "prompt", "answer", "acceptance_length"]
        assert len(content["data"]) == 3
        for row in content["data"]:
            page = files[row[3]["path"]]
            answer = page.partition('<pre class="sample">')[2]
            assert "<b>" in answer or "<u>" in answer
    curves = csv_curves(first)
    shown = sorted(wandb_file(first).parent.glob("files/media/table/conditional_acceptance_*.json"))
    assert len(shown) == 2
    for path in shown:
        for step, position, reached, accepted, rate, survival in json.loads(path.read_text())["data"]:
            curve = curves.get(f"conditional_acceptance_rate_{position}", {})
            assert (rate is None) == (reached == 0) == (step not in curve)
            assert rate is None or (rate == curve[step] == accepted / reached and survival <= rate)


def test_every_name_is_documented_and_every_panel_shows_something(runs):
    names = set(csv_curves(runs[0]))
    page = (cli.REPOSITORY / "docs" / "metrics.md").read_text()
    documented = {
        name
        for line in page.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(.+?)`", line.split("|")[1])
    }
    patterns = {name: re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(name))) for name in documented}
    for name in names:
        assert any(pattern.fullmatch(name) for pattern in patterns.values()), f"{name} is not in docs/metrics.md"
    absent = {name for name, pattern in patterns.items() if not any(pattern.fullmatch(each) for each in names)}
    of_others = {
        f"{loop}/{name}_{{s}}" for loop in ("train", "validation") for name in ("regression", "confidence_error")
    }
    elsewhere = {"train/memory_gpu_peak_gib"} | of_others
    one_category = {"acceptance_length_by_category/{category}"}
    assert absent == elsewhere | one_category | {"samples", "conditional_acceptance"}

    layout = OmegaConf.to_container(OmegaConf.load(cli.REPOSITORY / "conf" / "dashboard.yaml"))
    for panel in (panel for section in layout["sections"] for panel in section["panels"]):
        if "regex" in panel:
            known = names | {"acceptance_length_by_category/method"}
            assert any(re.search(panel["regex"], name) for name in known), panel
        else:
            assert set(panel.get("y", [panel.get("table")])) <= documented, panel


def test_the_summary_fits_80_columns(runs):
    *_, said = runs
    table = said.split("\nhead:")[0]
    assert max(map(len, table.splitlines())) <= 80
    for words in (
        "6 steps in",
        "tokens/s",
        "train loss",
        "teacher-forced",
        "really decoded",
        "best head",
        "by position",
    ):
        assert words in table
    assert "metrics.csv" in said and "tensorboard" in said


def test_categories_are_counted_apart(make_run, tmp_path):
    logger = CSVLogger(tmp_path, name="", version="", flush_logs_every_n_steps=1)
    trainer, module, data, live, _ = make_run(max_steps=2, every=2, logger=logger)
    live.categories = ["plain", "odd", "plain"]
    measured = []
    decode = live._decode
    live._decode = lambda *args: measured.append(decode(*args)) or measured[-1]
    trainer.fit(module, data)
    curves, (result,) = csv_curves(tmp_path), measured
    for name, counts in result.by_category.items():
        assert curves[f"acceptance_length_by_category/{name}"][2] == counts.acceptance_length
    plain, odd = result.by_category["plain"], result.by_category["odd"]
    assert plain.rounds > 0 < odd.rounds and plain + odd == result.counts
    assert curves["acceptance_length"][2] == result.counts.acceptance_length


def test_a_sweep_begins_a_run_for_each_job(train, arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    quick = [each for each in arguments if "hydra.run.dir" not in each and "max_steps" not in each]
    quick += ["evaluate=false", "export=null", f"hydra.sweep.dir={tmp_path / 'sweep'}", "trainer.max_steps=1"]
    status, _, err = train("-m", *quick, "logger=wandb", "logger.wandb.offline=true", "seed=1,2")
    assert status == 0, err
    assert "WANDB_MODE" not in os.environ  # a later run of this process need not be offline
    wandb.teardown()
    losses = [wandb_curves(tmp_path / "sweep" / job)["train/loss"] for job in ("0", "1")]
    assert all(set(curve) == {1} for curve in losses) and losses[0] != losses[1]
    assert wandb_file(tmp_path / "sweep" / "0").name != wandb_file(tmp_path / "sweep" / "1").name

    status, _, err = train("-m", *quick, "trainer.devices=2", "seed=1,2")
    assert status == 2
    assert [line for line in err.splitlines() if line.startswith("error: ")] == [
        "error: a sweep (-m) trains on one device at a time, trainer.devices=2 makes 2: set trainer.devices=1, or "
        "start the trainings one by one without -m"
    ]
