"""What a step or a draft has made is freed when it is over, not when Python next looks for garbage: of a large target
that may be gigabytes, and the collector counts objects, not what they hold."""

import gc
from collections.abc import Callable

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from tests.drafters.test_module_calls import BATCHES, FAMILIES


def left_by(run: Callable[[], object]) -> list[tuple[int, ...]]:
    """The shapes of the tensors that nobody reaches when ``run`` is over and that are there all the same."""
    run()  # what is kept for the next time is made
    gc.collect()
    gc.disable()
    gc.freeze()  # what was there before is not looked through
    try:
        run()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return [tuple(each.shape) for each in gc.garbage if type(each) in (torch.Tensor, torch.nn.Parameter)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()


def test_garbage_is_found():
    def run():
        def again(step):
            return again(step - 1) if step else tensor

        tensor = torch.ones(3)
        again(2)

    assert left_by(run) == [(3,)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_step_leaves_none(family, target):
    drafter, batch = FAMILIES[family](target).double().train(), BATCHES["short"]

    def learn():
        drafter.training_loss(batch, batch.features(target, drafter.layers), target).loss.backward()

    def validate():
        with torch.no_grad():
            drafter.training_loss(batch, batch.features(target, drafter.layers), target)

    assert left_by(learn) == left_by(validate) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_leaves_none(family, target):
    drafter = FAMILIES[family](target).double().eval()
    decoder = Decoder(target, drafter, shape=2)
    assert left_by(lambda: decoder.generate_batch([[5, 6, 7], [9, 8]], 8, batch_size=2)) == []
