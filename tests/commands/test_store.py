"""``specdraft store`` and the training that reads what it wrote take the same overrides."""

import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning.pytorch.utilities import rank_zero_only

from specdraft.commands.store import CONF, main
from specdraft.data.store import Store, StoredBatch
from specdraft.targets import Target


@pytest.fixture
def overrides(target: Target, library: Path, tmp_path: Path) -> list[str]:
    where = tmp_path / "target"
    target.model.float().save_pretrained(where)
    target.tokenizer.save_pretrained(where)
    return [
        f"target.name={where}",
        f"+data.source.root={library}",
        f"data.cache_dir={tmp_path / 'cache'}",
        f"data.store={tmp_path / 'states'}",
        "data.limit=20",
        "data.validation_limit=4",
        "data.sequence_length=128",
        "data.max_new_tokens=4",
        "model.draft_vocab_size=64",
    ]


@pytest.fixture
def run(overrides, monkeypatch, capsys):
    def command(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["store", *overrides, *options])
        main()
        return capsys.readouterr().out

    return command


@pytest.mark.filterwarnings("ignore")
def test_training_reads_what_the_command_wrote(run, overrides, tmp_path):
    said = run("dtype=float8")
    assert str(tmp_path / "states") in said and "of float8, relative error aux 0.0" in said
    contents = Store(tmp_path / "states").contents
    assert contents.layers == [1, 2, 3] and not contents.every_last and contents.dtype == "float8"
    with initialize_config_dir(str(CONF), version_base=None):
        config = compose("train", overrides=overrides)
    data = instantiate(config.data)
    data.prepare(Target.load(str(tmp_path / "target")))
    assert isinstance(next(iter(data.train_dataloader())), StoredBatch)


@pytest.mark.filterwarnings("ignore")
def test_each_rank_of_torchrun_writes_its_share(run, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(rank_zero_only, "rank", 1)  # which Lightning reads when it is imported
    assert run("shard_mb=0.1", "model=medusa") == ""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    assert "relative error last" in run("shard_mb=0.1", "model=medusa")
    assert Store(tmp_path / "states").contents.layers == []


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("data.store=null", "expected data.store=DIR"),
        ("dtype=int8", "the store's dtype is 'int8': expected float32, bfloat16, float8"),
        ("max_gb=0.0001", "the limit is 0.0001 GB: raise max_gb"),
    ],
)
def test_what_cannot_be_is_one_sentence(run, capsys, tmp_path, option, sentence):
    with pytest.raises(SystemExit) as stop:
        run(option)
    assert stop.value.code == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and sentence in errors[0]
    assert not (tmp_path / "states").exists()


@pytest.mark.filterwarnings("ignore")
def test_a_store_of_other_settings_is_refused_before_the_target_answers(run, capsys):
    run()
    for option, sentence in (
        ("data.limit=10", "has settings.limit=20, and this would write 10: choose another path"),
        ("dtype=float8", "has dtype=bfloat16, and this would write float8"),
    ):
        with pytest.raises(SystemExit):
            run(option, "target.name=/nowhere")  # would be missed, were it asked
        assert sentence in capsys.readouterr().err
