"""One form of checkpoint: what one rank or two wrote, at any ZeRO stage, any other resumes with the same losses.

And one verdict on a bad step, at any of them. One launch of two ranks serves all.
"""

import pytest
import torch
from safetensors import safe_open

from specdraft.data.sampler import ResumableSampler
from specdraft.errors import UserError
from tests.training import ranks_worker
from tests.training.launching import launch
from tests.training.test_ranks import WORKER, Trained, differences

pytestmark = pytest.mark.slow

RESUMED = (
    "one>zero3",  # reads what plain torch wrote, on two ranks that cut every parameter
    "zero3>one",
    "zero2>accumulated",  # two ranks, then one with batches half as large
    "accumulated>ddp",
    "ddp>zero2",
)
SKIPPED = ("one", "ddp", "zero2", "zero2-accumulated", "zero3")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    output = tmp_path_factory.mktemp("resumed")
    pairs = (each.split(">") for each in RESUMED)
    launch(
        WORKER,
        output,
        "eagle3/one-adamw",
        "eagle3/one-adamw>one-adamw",
        *(f"eagle3/{case}-skipped" for case in SKIPPED),
        *(f"eagle3/{before}-adamw>{after}-adamw" for before, after in pairs),
    )
    return Trained(output)


def test_one_rank_goes_on_bit_for_bit(trained):
    whole, rest = trained("eagle3/one-adamw"), trained("eagle3/one-adamw>one-adamw")
    assert rest["losses"] == whole["losses"][2:] and len(rest["losses"]) == 2
    for name, value in whole["weights"].items():
        assert torch.equal(rest["weights"][name], value)


@pytest.mark.parametrize("case", RESUMED)
def test_other_ranks_and_stages_go_on(trained, case):
    before, after = case.split(">")
    whole, rest = trained("eagle3/one-adamw"), trained(f"eagle3/{before}-adamw>{after}-adamw")
    losses, weights = differences(rest, whole | {"losses": whole["losses"][2:]})
    print(f"{case}: losses {losses:.1e}, weights {weights:.1e}")
    assert losses < 1e-6 and weights < 1e-6
    assert rest["partitioned"] == (after == "zero3")


@pytest.mark.parametrize("case", SKIPPED)
def test_a_bad_step_of_one_rank_is_left_out_by_all(trained, case):
    """The loss was not finite on the last rank alone; weights and moments stay as they were."""
    one, ours = trained("eagle3/one-skipped"), trained(f"eagle3/{case}-skipped")
    losses, weights = differences(ours, one)
    assert losses < 1e-6 and weights < 1e-6 and len(ours["losses"]) == 3
    assert ours["losses"][:2] == pytest.approx(trained("eagle3/one-adamw")["losses"][:2], abs=1e-6)
    assert differences(ours, trained("eagle3/one-adamw") | {"losses": ours["losses"]})[1] > 1e-5
    folder = trained.output / f"eagle3-{case}-skipped" / ("alone-0" if case == "one" else "") / "bad-batches"
    rank = 0 if case == "one" else 1
    with safe_open(folder / f"step-000002-rank-{rank}.safetensors", "pt") as file:
        assert file.metadata()["rank"] == str(rank) and len(file.get_tensor("sequences")) == len(
            file.get_tensor("input_ids")
        ) == 4 // (1 + rank)
        assert torch.isnan(file.get_tensor("losses")).any()


def test_the_files_are_alike(trained):
    """Names, shapes, types and the optimizer's layout are those of one process; no weight of the target."""
    paths = {
        "one": trained.output / "eagle3-one-adamw>zero3-adamw" / "before" / "alone-0",
        "zero3": trained.output / "eagle3-zero3-adamw>one-adamw" / "before",
    }
    one, zero3 = (torch.load(path / "checkpoints" / "last.ckpt", weights_only=True) for path in paths.values())
    assert one.keys() == zero3.keys()
    assert described(one["state_dict"]) == described(zero3["state_dict"])
    (ours,), (theirs,) = one["optimizer_states"], zero3["optimizer_states"]
    assert ours["param_groups"] == theirs["param_groups"]
    assert described(ours["state"]) == described(theirs["state"])
    assert one["Rows"] == zero3["Rows"] and one["Rows"]["sequences"] == 8


def described(value):
    if isinstance(value, dict):
        return {key: described(part) for key, part in value.items()}
    return value.dtype, value.shape


def test_a_step_of_other_rows_is_refused(trained):
    path = trained.output / "eagle3-zero3-adamw>one-adamw" / "before" / "checkpoints" / "last.ckpt"
    place = torch.load(path, weights_only=True)["Rows"]
    sampler = ResumableSampler(10, 1, rank=0, world_size=2)
    with pytest.raises(UserError, match=r"of the checkpoint takes 4 sequences, one of this run 2: expected"):
        sampler.load_state_dict(place)
    assert place["step_sequences"] == ranks_worker.GLOBAL_BATCH
