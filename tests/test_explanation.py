"""What Hydra raises becomes a sentence that says how to mend it."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from specdraft.errors import UserError
from specdraft.explanation import explain


@pytest.fixture
def conf(tmp_path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "small.yaml").write_text("learning_rate: 1\n")
    (tmp_path / "model" / "large.yaml").write_text("learning_rate: 2\n")
    (tmp_path / "main.yaml").write_text("defaults: [model: small]\nrun: ???\n")
    return tmp_path


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["model.learning_rat=2"], "unknown config key 'model.learning_rat': did you mean model.learning_rate? "),
        (["zzz=2"], "unknown config key 'zzz': the config has no such key; --help and --cfg job show what there is"),
        (["model=huge"], "unknown model 'huge': expected one of large, small"),
        (["model=small,large"], "model has several values: add -m to run with each of them, or write model=[small,"),
        (["model=["], "bad configuration: "),
    ],
)
def test_what_cannot_be_composed(conf, overrides, sentence):
    with pytest.raises(Exception) as raised, initialize_config_dir(str(conf), version_base=None):  # noqa: PT011
        compose("main", overrides)
    explained = explain(raised.value)
    assert explained is not None and explained.startswith(sentence)


def test_a_missing_value(conf):
    with pytest.raises(Exception) as raised, initialize_config_dir(str(conf), version_base=None):  # noqa: PT011
        _ = compose("main").run
    assert explain(raised.value) == "run is missing: expected run=VALUE on the command line"


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("no_such_package.Thing", "if it is of your own, add imports=[no_such_package]"),
        ("specdraft.errors.Thing", "expected a class or function of an importable module; correct the name"),
    ],
)
def test_what_cannot_be_located(target, sentence):
    with pytest.raises(Exception) as raised:  # noqa: PT011
        instantiate(OmegaConf.create({"_target_": target}))
    explained = explain(raised.value)
    assert explained is not None and explained.startswith(f"'{target}' cannot be loaded (") and sentence in explained


def test_errors_that_are_ours_or_the_systems_and_those_that_are_not():
    assert explain(UserError("x is 1")) == "x is 1"
    with pytest.raises(OSError, match="absent") as raised:
        Path("/absent/file").read_text()
    assert explain(raised.value) == (
        "cannot use /absent/file (No such file or directory): choose another path or change its permissions"
    )
    assert explain(ValueError("a defect")) is None and explain(BrokenPipeError("a connection")) is None
