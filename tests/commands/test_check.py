"""``specdraft check`` from a model's configuration to its lines and exit status."""

import sys
from functools import partial

import pytest

from specdraft.commands.check import main
from specdraft.entry import CONF
from tests.check.mine import SOURCE

MODEL = """
drafter:
  _target_: MODULE.Rolling.for_target
  width: 48
draft_vocab_size: null
"""


@pytest.fixture
def check(called):
    """check(settings...) -> exit status, standard output, standard error."""
    return partial(called, main)


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A folder with a drafter of somebody's own, which nothing has installed; gives its settings."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "model").mkdir(parents=True)

    def write(name: str, source: str) -> list[str]:
        (tmp_path / f"{name}.py").write_text(source)
        (tmp_path / "conf" / "model" / f"{name}.yaml").write_text(MODEL.replace("MODULE", name))
        return [f"hydra.searchpath=[file://{tmp_path}/conf]", f"imports=[{name}]", f"model={name}"]

    yield write
    for name in ("good_drafter", "bad_drafter"):
        sys.modules.pop(name, None)


def test_a_drafter_outside_the_checkout(check, outside):
    status, out, err = check(*outside("good_drafter", SOURCE), "checks=[trained_is_served,checkpoint,totals]")
    assert status == 0, out + err
    assert out.startswith("good_drafter.Rolling beside a random target of 32 tokens\n")
    lines = [line.split()[0] for line in out.splitlines()[1:4]]
    assert lines == ["passed", "passed", "not"] and "2 of 2 checks hold, 1 not applicable (" in out


def test_failures_set_the_exit_status_and_the_other_checks_go_on(check, outside):
    source = SOURCE.replace("features.last[0, -1:]", "features.last[0, :1]").replace("self._arguments = arguments", "")
    settings = outside("bad_drafter", source)
    status, out, _ = check(*settings, "checks=[trained_is_served,gradients,checkpoint]")
    assert status == 1 and out.endswith("FAILED: trained_is_served, checkpoint\n")
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["FAILED", "passed", "FAILED"]


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted(path.stem for path in (CONF / "model").glob("*.yaml")))
def test_every_family_of_our_own_holds_all(check, model):
    status, out, err = check(f"model={model}", "samples=500")
    assert status == 0 and "FAILED" not in out, out + err


def test_a_target_whose_weights_are_packed(check):
    status, out, err = check("model=medusa", "target=tiny", "checks=[target,gradients]")
    assert status == 0 and "beside embedded://tiny of 4096 tokens" in out, out + err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], "model= is missing: expected"),
        (["model=medusa", "checks=[speed]"], "checks names 'speed': expected some of"),
        (["model=medusa", "samples=3"], "samples is 3: expected at least 100"),
        (["model=nobody"], "unknown model 'nobody': expected one of"),
        (["model=medusa", "model.drafter.num_heads=0"], "num_heads"),
        (["model=medusa", "random.vocab_size=3"], "expected vocab_size of at least 8"),
    ],
)
def test_bad_input(check, settings, said):
    status, _, error = check(*settings)
    assert status == 2 and error.startswith("error: ") and said in error


def test_help_names_the_folder_that_one_works_in(check):
    status, out, _ = check("--help")
    assert status == 0 and "hydra.searchpath=[file://$PWD/conf]" in out
