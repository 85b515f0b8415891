"""train.py as a person runs it, on a random target of six layers and a folder of small Python files."""

import csv
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from transformers import LlamaConfig, LlamaForCausalLM

from specdraft.data.sources import stdlib
from specdraft.drafters.checkpoint import save_drafter
from specdraft.drafters.eagle import Eagle3
from specdraft.embedded.tokenizer import train_tokenizer
from specdraft.targets import Target

REPOSITORY = Path(__file__).parents[2]

FUNCTION = '''
def add_{i}(a, b):
    """Add {i} to the sum of a and b."""
    total = a + b
    total += {i}
    return total
'''


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A folder with ``target/``, ``source/`` (both splits) and ``prompts.jsonl``."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "source").mkdir()
    counts = {"train": 16, "validation": 3}
    for number in range(1000):
        split = stdlib.split_of(f"file_{number}.py")
        if counts.get(split, 0) > 0:
            counts[split] -= 1
            (folder / "source" / f"file_{number}.py").write_text(FUNCTION.format(i=number))
    tokenizer = train_tokenizer([FUNCTION.format(i=number) for number in range(50)], 320, 256)
    tokenizer.save_pretrained(folder / "target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "target")
    prompt = {"prompt": "def add_7(a, b):\n"}
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for _ in range(2)))
    return folder


@pytest.fixture
def arguments(world, tmp_path):
    """Overrides of a run of seconds that leaves its directories in ``tmp_path``."""
    return [
        f"target.name={world / 'target'}",
        f"+data.source.root={world / 'source'}",
        f"data.cache_dir={tmp_path / 'cache'}",
        "data.regenerate=false",
        "data.sequence_length=192",
        "data.batch_size=2",
        "model.draft_vocab_size=200",
        "model.drafter.ttt_steps=2",
        "trainer=cpu",
        "trainer.max_steps=4",
        "trainer.log_every_n_steps=1",
        "trainer.val_check_interval=4",
        "live.every_n_steps=3",
        "live.prompts=2",
        "live.max_new_tokens=6",
        "decoding.max_new_tokens=6",
        "decoding.num_draft_tokens=2",
        f"evaluation.benchmark={world / 'prompts.jsonl'}",
        "evaluation.cost_model.batch_sizes=[1]",
        "evaluation.cost_model.seconds=0.1",
        f"run_family={tmp_path / 'family'}",
        f"hydra.run.dir={tmp_path / 'family' / 'run'}",
    ]


@pytest.fixture
def train(monkeypatch, capsys):
    """Run train.py in this process; gives (exit status, standard output, standard error)."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.syspath_prepend(str(REPOSITORY))
    import train as script

    def run(*overrides: str) -> tuple[int, str, str]:
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", ["train.py", *overrides])
        status = 0
        try:
            script.main()
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 1
        return status, *capsys.readouterr()

    return run


def metrics(directory: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((directory / "metrics.csv").open()))


def losses(directory: Path) -> dict[str, str]:
    return {row["step"]: row["train/loss"] for row in metrics(directory) if row["train/loss"]}


def test_trains_measures_and_exports(train, arguments, tmp_path, monkeypatch):
    secrets = {"HF_TOKEN": "hf_planted_one", "WANDB_API_KEY": "planted-number-two", "SERVER_PASSWORD": "planted three"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    hidden = "+server={api_key: '${oc.env:WANDB_API_KEY}', url: 'https://user:${oc.env:SERVER_PASSWORD}@host'}"
    status, out, err = train(*arguments, hidden)
    assert status == 0, err
    run = tmp_path / "family" / "run"
    written = {path: path.read_bytes() for path in (tmp_path / "family").rglob("*") if path.is_file()}
    assert any(b"oc.env:WANDB_API_KEY" in data for data in written.values())
    assert any(b"user:***@host" in data for data in written.values())
    for secret in secrets.values():
        assert secret not in out + err
        assert [path for path, data in written.items() if secret.encode() in data] == []
    assert {path.name for path in (run / "drafter").iterdir()} == {"config.json", "model.safetensors"}
    assert {path.name for path in (run / "checkpoints").iterdir()} == {
        "best.ckpt",
        "last.ckpt",
        "step-000003.ckpt",
        "step-000004.ckpt",
    }
    assert [row["step"] for row in metrics(run) if row["acceptance_length"]] == ["3", "4"]
    written = json.loads((run / "evaluation.json").read_text())
    assert {result["temperature"] for result in written["results"]} == {0.0, 1.0}
    assert (run / "report.html").is_file() and (run / "export-vllm" / "config.json").is_file()
    for path in ("drafter", "evaluation.json", "report.html", "export-vllm"):
        assert str(run / path) in out
    assert "step 4/4" in err and "tokens/s" in err
    extra = json.loads((run / "drafter" / "config.json").read_text())["extra"]
    assert extra["decoding"] == {"num_draft_tokens": 2}
    assert len(extra["target"].pop("chat_template_hash")) == 16
    assert extra["target"].pop("name") == json.loads((run / "drafter" / "config.json").read_text())["target"]["name"]
    assert extra["target"] == {
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "quantization": "none",
        "chat_template_options": {},
        "num_hidden_layers": 6,
        "vocab_size": 320,
        "max_position_embeddings": 256,
        "logit_scale": 1.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_a_file_of_ones_own_goes_from_regeneration_to_an_export(train, arguments, tmp_path):
    """Conversations of two turns in a file: the target answers them, and a head that learnt from it is exported."""
    rows = []
    for i in range(60):
        said = (("user", f"add {i}"), ("assistant", "no"), ("user", f"return {i}"), ("assistant", "never"))
        rows.append({"messages": [{"role": role, "content": content} for role, content in said]})
    mine = tmp_path / "mine.jsonl"
    mine.write_text("".join(json.dumps(row) + "\n" for row in rows))
    replaced = ("+data.source.root", "data.regenerate")
    kept = [argument for argument in arguments if not argument.startswith(replaced)]
    options = ["data.max_new_tokens=8", "data.limit=12", "data.validation_limit=2", "model.draft_vocab_size=100"]
    status, out, err = train(*kept, "data=messages", f"data.path={mine}", *options)
    assert status == 0, err
    manifests = [json.loads(path.read_text()) for path in (tmp_path / "cache").rglob("manifest-*.json")]
    shards = [shard for manifest in manifests for shard in manifest["shards"]]
    assert sorted(shard["conversations"] for shard in shards) == [2, 12]
    # Of two turns in each, those after an answer that was cut are not asked for.
    assert sum(shard["turns"] + shard["dropped"] for shard in shards) == 28
    assert sum(shard["unfinished"] for shard in shards) >= sum(shard["dropped"] for shard in shards) > 0
    exported = tmp_path / "family" / "run" / "export-vllm"
    assert str(exported) in out and (exported / "model.safetensors").is_file()


def test_a_checkpoint_that_would_run_code_is_not_resumed(train, arguments, tmp_path):
    torch.save({"state_dict": Payload(tmp_path / "ran")}, tmp_path / "foreign.ckpt")
    status, _, err = train(*arguments, f"resume={tmp_path / 'foreign.ckpt'}")
    assert status == 2 and "foreign.ckpt is damaged, or holds more than tensors and settings" in err
    assert not (tmp_path / "ran").exists()


def test_nothing_is_asked_of_the_network_once_training_begins(train, arguments, tmp_path, monkeypatch):
    """The hub may vanish in the midst of a run: training, evaluation and export open no connection."""
    from specdraft.training import fit

    begin = fit.fit

    def alone(*args):
        def connect(self, address):
            raise AssertionError(f"asked {address}")

        monkeypatch.setattr(socket.socket, "connect", connect)
        with pytest.raises(AssertionError, match="asked"):
            urllib.request.urlopen("http://127.0.0.1:9")  # the guard works
        return begin(*args)

    monkeypatch.setattr(fit, "fit", alone)
    status, _, err = train(*arguments)
    assert status == 0, err
    run = tmp_path / "family" / "run"
    assert (run / "evaluation.json").is_file() and (run / "export-vllm" / "config.json").is_file()


def test_logging_survives_a_server_that_does_not_answer(train, arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setattr("specdraft.training.monitoring.loggers.INIT_SECONDS", 2.0)
    began = time.monotonic()
    status, _, err = train(*arguments, "evaluate=false", "export=null", "logger=[csv,wandb]")
    assert status == 0, err
    assert "W&B's server does not answer: the run is logged offline" in err
    assert time.monotonic() - began < 60
    run = tmp_path / "family" / "run"
    assert len(losses(run)) == 4 and list(run.glob("wandb/offline-run-*/*.wandb"))


def test_a_second_run_in_the_same_directory_is_refused(train, arguments, tmp_path):
    run = tmp_path / "family" / "run"
    run.mkdir(parents=True)
    (run / "metrics.csv").write_text("of the first\n")
    claiming = "import sys, pathlib; from specdraft.training.run_lock import acquire_run_lock as lock"
    claiming += "; lock(pathlib.Path(sys.argv[1]))"
    claiming += "; print(); input()"
    command = [sys.executable, "-c", claiming, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY) as first:
        assert first.stdout is not None and first.stdout.readline()
        status, _, err = train(*arguments)
        first.kill()
    assert status == 2 and f"error: another run writes into {run} (process {first.pid} on" in err
    assert (run / "metrics.csv").read_text() == "of the first\n"


@pytest.mark.parametrize("model", ["draft", "eagle", "eagle3_1", "medusa"])
def test_every_family_trains_and_exports(train, arguments, tmp_path, model):
    vocabulary = ["model.draft_vocab_size=256" if model == "eagle3_1" else "model.draft_vocab_size=null"]
    overrides = [each for each in arguments if not each.startswith("model.")]
    quantize = "int8" if model == "draft" else "null"
    status, _, err = train(*overrides, *vocabulary, f"model={model}", f"quantize={quantize}", "evaluate=false")
    assert status == 0, err
    run = tmp_path / "family" / "run"
    loss = losses(run)
    assert len(loss) == 4 and all(float(value) > 0 for value in loss.values())
    exported = json.loads((run / "export-vllm" / "config.json").read_text())
    assert ("quantization_config" in exported) is (model == "draft")


@pytest.mark.parametrize(
    ("model", "engine", "sentence"),
    [
        ("hydra", "vllm", "Hydra, which no serving engine loads"),
        ("medusa", "sglang", "sglang serves no Medusa heads: expected one of"),
    ],
)
def test_a_drafter_that_is_not_served_is_refused_before_the_target_answers(train, arguments, model, engine, sentence):
    overrides = [each for each in arguments if not each.startswith("model.")]
    status, out, err = train(*overrides, f"model={model}", "model.draft_vocab_size=null", f"export={engine}")
    assert status == 2 and sentence in err
    assert "data:" not in out


@pytest.mark.parametrize("layers", [None, (1, 2, 3)])
def test_a_drafter_to_learn_the_misses_of_is_refused_before_the_target_answers(
    train, arguments, world, tmp_path, layers
):
    target = Target.load(str(world / "target"), device="cpu")
    identity = target.identity if layers else replace(target.identity, weights_hash="0")
    save_drafter(Eagle3.for_target(target, None, layers=layers), tmp_path / "other", identity, {})
    status, out, err = train(*arguments, f"boost={tmp_path / 'other'}")
    assert status == 2 and ("reads the target's layers [1, 2, 3]" if layers else "has other weights") in err
    assert "conversations to train on" not in out


def test_init_trains_on(train, arguments, tmp_path):
    first, second = tmp_path / "family" / "first", tmp_path / "family" / "second"
    quick = [*arguments, "evaluate=false", "export=null"]
    assert train(*quick, f"hydra.run.dir={first}")[0] == 0
    still = ["model.optimizer.learning_rate=1e-30", "model.optimizer.muon_learning_rate=1e-30"]
    still += ["model.drafter.step_decay=0.9", f"hydra.run.dir={second}"]
    status, _, err = train(*quick, f"init={first}", *still)
    assert status == 0, err
    weights = [(run / "drafter" / "model.safetensors").read_bytes() for run in (first, second)]
    assert weights[0] == weights[1]
    for override, sentence in (
        ("model.drafter.qk_norm=true", "qk_norm=False, and the configuration makes one with True"),
        ("model=medusa", "kind Eagle3, and the configuration makes Medusa"),
        ("init=/nowhere", "there is no drafter checkpoint at /nowhere"),
    ):
        overrides = [each for each in quick if not (override == "model=medusa" and each.startswith("model."))]
        status, out, err = train(*overrides, f"init={first}", override)
        assert status == 2 and sentence in err, err
        assert "conversations to train on" not in out  # refused before the target answers


def test_interrupt_leaves_a_checkpoint_and_resume_continues(train, arguments, tmp_path):
    quick = [*arguments, "evaluate=false", "export=null", "trainer.max_steps=40", "live.every_n_steps=0"]
    whole, part, rest = (tmp_path / "family" / name for name in ("whole", "part", "rest"))

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, "train.py", *quick, f"hydra.run.dir={part}"],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 3/"):
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    assert "resume=auto" in out
    assert (part / "checkpoints" / "last.ckpt").is_file()
    stopped = max(int(step) for step in losses(part))
    assert 3 <= stopped < 40

    status, _, err = train(*quick, f"hydra.run.dir={rest}", "resume=auto")
    assert status == 0, err
    status, _, other = train(*quick, f"hydra.run.dir={whole}")
    assert status == 0, other
    expected = losses(whole)
    assert f"step {stopped}/40" not in err and f"step {stopped + 1}/40" in err
    for step, loss in losses(rest).items():  # the whole curve, what was before the stop included
        assert float(loss) == pytest.approx(float(expected[step]), rel=1e-5)
    assert set(losses(rest)) == set(expected)


def test_two_ranks_equal_one(train, arguments, tmp_path):
    quick = [*arguments, "evaluate=false", "export=null"]
    one, two = tmp_path / "one", tmp_path / "two"
    status, _, err = train(*quick, f"hydra.run.dir={one}")
    assert status == 0, err
    options = ["trainer.devices=2", "data.batch_size=1", "strategy=ddp", f"hydra.run.dir={two}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "train.py", *quick, *options]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert losses(one).keys() == losses(two).keys()
    for name in ("train/loss", "validation/loss", "acceptance_length", "draft_acceptance_rate"):
        ours, theirs = ([float(row[name]) for row in metrics(run) if row[name]] for run in (one, two))
        assert theirs == pytest.approx(ours, rel=1e-4), name


CLIMB = """
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

class Climb(BasicSweeper):
    best = None

    def sweep(self, arguments):
        jobs = [job for batch in super().sweep(arguments) for job in batch]
        Climb.best = max((job.return_value, list(job.overrides)) for job in jobs)
"""


def test_a_sweeper_gets_the_best_live_acceptance_length(train, arguments, tmp_path, monkeypatch):
    """One that optimizes knows no more of a job than what it returns."""
    (tmp_path / "hydra_plugins").mkdir()  # Hydra takes sweepers from a package of this name alone
    (tmp_path / "hydra_plugins" / "climb.py").write_text(CLIMB)
    monkeypatch.syspath_prepend(str(tmp_path))
    climbing = importlib.import_module("hydra_plugins.climb")
    Plugins.instance().register(climbing.Climb)
    quick = [each for each in arguments if "hydra.run.dir" not in each and "max_steps" not in each]
    quick += ["evaluate=false", "export=null", f"hydra.sweep.dir={tmp_path / 'sweep'}", "trainer.max_steps=2"]
    climb = "hydra.sweeper._target_=hydra_plugins.climb.Climb"
    status, _, err = train("-m", *quick, climb, "model.optimizer.learning_rate=1e-6,1e-2")
    assert status == 0, err
    lengths = {}
    for job, rate in (("0", "1e-06"), ("1", "0.01")):
        config = json.loads((tmp_path / "sweep" / job / "drafter" / "config.json").read_text())
        lengths[f"model.optimizer.learning_rate={rate}"] = config["extra"]["training"]["live_acceptance_length"]
    length, overrides = climbing.Climb.best
    assert length == max(lengths.values()) and [lengths[each] for each in overrides if each in lengths] == [length]


def test_a_callback_of_ones_own_and_one_left_out(train, arguments, tmp_path, monkeypatch):
    (tmp_path / "counting.py").write_text(
        "from lightning import Callback\n\nclass Count(Callback):\n    steps = 0\n"
        "    def on_train_batch_end(self, *_):\n        Count.steps += 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = ["imports=[counting]", "+callbacks.count._target_=counting.Count", "callbacks.rank_heartbeat=null"]
    quick = [*arguments, "evaluate=false", "export=null"]
    status, _, err = train(*quick, *mine)
    assert status == 0, err
    assert sys.modules["counting"].Count.steps == 4
    status, _, err = train(*quick, "+callbacks.count._target_=builtins.object", f"hydra.run.dir={tmp_path / 'other'}")
    assert status == 2 and "error: callbacks.count makes object: expected a lightning.Callback" in err


def test_a_finished_run_is_not_resumed(train, arguments, tmp_path):
    first, second = tmp_path / "family" / "first", tmp_path / "family" / "second"
    assert train(*arguments, "evaluate=false", "export=null", f"hydra.run.dir={first}")[0] == 0
    last = first / "checkpoints" / "step-000004.ckpt"
    for resume in ("auto", first):
        status, out, err = train(*arguments, f"hydra.run.dir={second}", f"resume={resume}")
        assert status == 2 and not out
        assert err == (
            f"error: the checkpoint {last} has 4 steps and trainer.max_steps is 4: "
            "raise trainer.max_steps to train on; evaluate.py and export take its head as it is\n"
        )
    assert not (second / "drafter").exists()


def test_a_run_that_its_time_ended_at_once_says_so(train, arguments, tmp_path):
    first, second = tmp_path / "family" / "first", tmp_path / "family" / "second"
    quick = [*arguments, "evaluate=false", "export=null", "live.every_n_steps=0", "+trainer.max_time=00:00:00:01"]
    assert train(*quick, "trainer.max_steps=1000", f"hydra.run.dir={first}")[0] == 0
    assert (first / "drafter").is_dir() and (first / "checkpoints" / "last.ckpt").exists()
    status, _, err = train(*quick, "trainer.max_steps=1000", f"hydra.run.dir={second}", "resume=auto")
    assert status == 2 and "error: no step was trained behind " in err and "such as trainer.max_time" in err


def test_other_data_or_another_drafter_is_not_resumed(train, arguments, tmp_path, monkeypatch):
    first, second = tmp_path / "family" / "first", tmp_path / "family" / "second"
    quick = [*arguments, "evaluate=false", "export=null", "trainer.max_steps=1", "live.every_n_steps=0"]
    assert train(*quick, f"hydra.run.dir={first}")[0] == 0
    monkeypatch.setattr(Target, "load", lambda *_args, **_kwargs: pytest.fail("loaded"))
    kept = [argument for argument in quick if not argument.startswith("model.")]
    for options, sentence in (
        ([*quick, "data.sequence_length=128"], "data.sequence_length=192, and this run has 128"),
        ([*kept, "model=medusa"], "Eagle3.for_target, and this run has specdraft.drafters.medusa.Medusa.for_target"),
    ):
        status, _, err = train(*options, "trainer.max_steps=2", f"hydra.run.dir={second}", f"resume={first}")
        assert status == 2 and err.startswith("error: the checkpoint ") and sentence in err, err


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["trainer.max_stepz=3"], "unknown config key 'trainer.max_stepz'"),
        (["nonsense=3"], "unknown config key 'nonsense'"),
        (["target=/mine/tiny"], "unknown target '/mine/tiny': expected one of gpt-oss-20b, llama-70b"),
        (["target=meta/llama"], "or target.name=PATH_OR_HUB_ID beside it"),
        (["target=llama-9b"], "unknown target 'llama-9b': expected one of gpt-oss-20b, llama-70b, llama-8b"),
        (["target.name=embedded://large"], "no embedded target 'embedded://large'"),
        (["quantize=int5"], "quantize is 'int5': expected int8, int4, or null"),
        (["decoding.num_draft_tokens=0"], "decoding.num_draft_tokens is 0"),
        (["model.draft_vocab_size=321"], "model.draft_vocab_size is 321"),
        (["model.draft_vocab_size=few"], "model.draft_vocab_size is few: expected 1 to"),
        (["compile=maybe"], "compile is 'maybe': expected auto, true or false"),
        (["model.optimizer.schedule=triangle"], "model.optimizer.schedule is 'triangle': expected cosine"),
        (["model.optimizer.learning_rate=high"], "model.optimizer.learning_rate is high: expected a positive number"),
        (["evaluation.limit=0"], "limit is 0: expected a whole number of at least 1, prompts"),
        (["evaluation.benchmark={long}"], "1 of 1 prompts do not fit the target's context"),
        (
            ["export=tensorrt"],
            "export=tensorrt is unknown: expected recurrent_drafting, sglang",
        ),
        (["resume=/nonexistent"], "does not exist"),
        (["strategy=single", "trainer.devices=2"], "strategy=single trains on one device"),
        (["modle=eagle3"], "unknown config key 'modle': did you mean model? --help and"),
        (["model.drafter.tttsteps=3"], "did you mean model.drafter.ttt_steps? --help"),
        (
            ["model.drafter._target_=gruhead.Gru.for_target"],
            "(No module named 'gruhead'): expected a class or function",
        ),
        (["model.drafter._target_=gruhead.Gru.for_target"], "if it is of your own, add imports=[gruhead]"),
        (
            ["model.drafter._target_=specdraft.drafters.eagle.Egle"],
            "expected a class or function of an importable module; correct",
        ),
        (["trainer.max_steps=3,4"], "add -m to run with each of them, or write trainer.max_steps=[3,4] for a list"),
        (["trainer.precision=fp8"], "trainer.precision is fp8: expected auto"),
        (["hydra.run.dir={file}/run"], "cannot"),
    ],
)
def test_bad_input_is_one_sentence(train, arguments, tmp_path, overrides, sentence):
    (tmp_path / "file").touch()
    (long := tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "word " * 4000}))
    overrides = [override.format(file=tmp_path / "file", long=long) for override in overrides]
    status, _, err = train(*arguments, *overrides)
    assert status == 2
    lines = [line for line in err.splitlines() if line]
    assert len(lines) == 1 and lines[0].startswith("error: ") and sentence in lines[0]


def test_a_file_that_is_not_given_is_missed_before_the_target_is_loaded(train, arguments, monkeypatch):
    monkeypatch.setattr(Target, "load", lambda *_args, **_kwargs: pytest.fail("loaded"))
    kept = [argument for argument in arguments if not argument.startswith("+data.source.root")]
    status, _, err = train(*kept, "data=messages")
    assert (status, err) == (2, "error: data.path is missing: expected data.path=VALUE on the command line\n")


def test_the_real_target_fails_early_without_a_hub(train, monkeypatch, tmp_path):
    def unreachable(*_args, **_kwargs):
        raise OSError("Name or service not known")

    monkeypatch.setattr("specdraft.training.planning.meta_target.get_hf_file_metadata", unreachable)
    monkeypatch.setattr("specdraft.training.planning.meta_target._cached", lambda *_args: False)
    status, out, err = train("model=eagle3", "target=llama-8b", "trainer=cpu", f"hydra.run.dir={tmp_path}")
    assert status == 2 and not out
    assert err.startswith("error: the target 'meta-llama/Llama-3.1-8B-Instruct' is not on this machine")
    status, out, _ = train("target=llama-8b", "plan=true", f"hydra.run.dir={tmp_path}")
    assert status == 0 and "8,030.3 M parameters" in out and "GFLOP" in out


def test_nan_loss_is_one_sentence(train, arguments, tmp_path):
    status, _, err = train(*arguments, "model.optimizer.learning_rate=1e30")
    assert status == 2
    assert "error: the training loss is " in err and "at step" in err


def test_live_drafts_are_drawn_as_the_engine_draws_them(train, arguments, tmp_path):
    status, said, error = train(*arguments, "decoding.temperature=1", "decoding.top_k=4", "evaluate=false")
    assert status == 0, said + error
    state = torch.load(tmp_path / "family" / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    (measures,) = (each["measures"] for each in state["callbacks"].values() if "measures" in each)
    assert measures["top_k"] == 4 and measures["truncates_drafts"] is False  # the run exports for vLLM
