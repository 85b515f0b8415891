"""Cast to bfloat16, as beside a target on a GPU, a drafter keeps the rotary frequencies that it was trained with."""

import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from transformers import AutoModelForCausalLM

from specdraft.decoding.decoder import Decoder
from specdraft.drafters.base import Drafter
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.eagle import Eagle, Eagle3
from specdraft.targets import Target
from specdraft.training.module import DrafterModule
from specdraft.training.schedule import OptimizerSettings
from tests.fakes import random_prompts, tiny_llama

KINDS = {
    "eagle3": lambda target: Eagle3.for_target(target, layers=(1, 2)),
    "eagle": Eagle.for_target,
    "draft_model": lambda target: DraftModel.for_target(target, copy_layers=1),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """As ``from_pretrained`` gives it: weights in bfloat16, frequencies in float32."""
    path = tmp_path_factory.mktemp("target")
    model = tiny_llama(context=4096, head_dim=64, num_hidden_layers=4, initializer_range=0.25)
    model.save_pretrained(path)
    target = Target.from_model(AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16))
    assert target.model.model.rotary_emb.inv_freq.dtype == torch.float32
    return target


def angles(drafter: Drafter) -> torch.Tensor:
    """Cosines of late positions in the drafter's dtype: frequencies rounded to bfloat16 would turn them elsewhere."""
    like = next(drafter.parameters())
    if isinstance(drafter, DraftModel):
        return drafter.language_model.decoder.rotary_emb(like, torch.arange(3000, 4000)[None])[0][0]
    return drafter.rotary(4000, like)[0][3000:4000]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cast", [lambda d: d.to("cpu", torch.bfloat16), lambda d: d.bfloat16(), lambda d: d.half()])
def test_frequencies_are_not_rounded(kind, cast, target):
    drafter = KINDS[kind](target).float()
    exact = angles(drafter)
    cast(drafter)
    dtype = next(drafter.parameters()).dtype
    assert dtype in (torch.bfloat16, torch.float16)
    assert torch.equal(angles(drafter), exact.to(dtype))


def test_training_in_bfloat16_keeps_them_too(target):
    module = DrafterModule(KINDS["eagle3"](target).float(), target, OptimizerSettings())
    exact = angles(module.drafter)
    HalfPrecision("bf16-true").convert_module(module)
    assert next(module.drafter.parameters()).dtype == torch.bfloat16
    assert torch.equal(angles(module.drafter), exact.bfloat16())


def test_what_is_moved_to_a_meta_device_and_back_is_empty_and_no_error(target):
    drafter = KINDS["eagle3"](target).to("meta").to_empty(device="cpu")
    assert not any(parameter.is_meta for parameter in drafter.parameters())


@pytest.mark.parametrize("merged", [False, True])
def test_a_copy_of_the_target_is_accepted_whole_behind_a_long_prompt(merged, target):
    draft = DraftModel.for_target(target, copy_layers=4)
    draft = (draft.served() if merged else draft).to("cpu", torch.bfloat16).eval()
    result = Decoder(target, draft, 5).generate(random_prompts(1, [2000])[0], 60)
    assert result.accepted == result.drafted
