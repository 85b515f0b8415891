"""Values that no run can use are refused, those of conf/ and others that can be are not."""

import pytest

from specdraft.errors import UserError
from specdraft.training.settings import check_values


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.max_steps=-1", "trainer.max_steps is -1"),
        ("trainer.max_steps=many", "trainer.max_steps is many"),
        ("live.prompts=0", "live.prompts is 0: expected a whole number of at least 1"),
        ("seed=null", "seed is None: expected a whole number of at least 0"),
        ("trainer.val_check_interval=0", "trainer.val_check_interval is 0: expected a whole number of at least 1"),
        ("trainer.limit_val_batches=abc", "trainer.limit_val_batches is abc: expected a whole number of validation"),
        ("trainer.limit_val_batches=1.5", "trainer.limit_val_batches is 1.5: expected"),
        ("trainer.accumulate_grad_batches=0", "trainer.accumulate_grad_batches is 0: expected a whole number"),
        ("trainer.num_nodes=two", "trainer.num_nodes is two: expected a whole number of at least 1"),
        ("trainer.num_sanity_val_steps=some", "trainer.num_sanity_val_steps is some"),
        ("trainer.check_val_every_n_epoch=x", "trainer.check_val_every_n_epoch is x: expected .* or null"),
        ("trainer.log_every_n_steps=0", "trainer.log_every_n_steps is 0"),
        ("+trainer.limit_train_batches=3", "trainer.limit_train_batches is 3: expected none, as .* leave it out"),
        ("+trainer.overfit_batches=2", "trainer.overfit_batches is 2: expected none"),
        ("trainer.enable_model_summary=no", "trainer.enable_model_summary is no: expected true or false"),
        ("data.batch_size=abc", "data.batch_size is abc"),
        ("planning.disk=0", "planning.disk is 0: expected a positive number"),
        ("trainer.gradient_clip_val=much", "trainer.gradient_clip_val is much: expected a number from 0 upwards"),
    ],
)
def test_settings_are_checked_first(composed, override, sentence):
    with pytest.raises(UserError, match=sentence):
        check_values(composed(override))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("evaluation=null", "evaluation is null: expected its settings, .*; evaluate=false leaves it out"),
        ("live=null", "live is null: expected its settings, .*every_n_steps=0 measures after the last step only"),
        ("guard=null", "guard is null: expected its settings, as conf/train.yaml has them$"),
    ],
)
def test_parts_of_the_configuration_are_not_left_out(composed, override, sentence):
    with pytest.raises(UserError, match=sentence):
        check_values(composed(override))


@pytest.mark.parametrize("override", ["limit_val_batches=2", "limit_val_batches=0.5", "num_sanity_val_steps=-1"])
def test_values_that_can_be(composed, override):
    check_values(composed(f"trainer.{override}"))
