"""Adapters of a draft model: what trains is they alone; what is served, saved and exported has them merged."""

import pytest
import torch
import transformers

from specdraft.drafters.checkpoint import load_drafter, save_drafter
from specdraft.drafters.draft_model import DraftModel
from specdraft.errors import UserError
from specdraft.training.schedule import OptimizerSettings
from tests.drafters.drafts import LORA, features_of, logits_of, start_from, whole
from tests.fakes import random_prompts

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other


@pytest.fixture
def adapted(sibling, small) -> DraftModel:
    """A sibling with trained adapters, in fp64."""
    draft = start_from(sibling(), small, lora=LORA).double()
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=g, dtype=torch.float64))
    return draft


def test_only_adapters_train(sibling, small):
    draft = start_from(sibling(), small, lora=LORA).double()
    plain = start_from(sibling(), small).double()
    torch.testing.assert_close(logits_of(draft), logits_of(plain))  # as adapters begin
    names = {name for name, parameter in draft.named_parameters() if parameter.requires_grad}
    assert len(names) == 3 * 2 * 2 and all(".lora_" in name for name in names)
    batch = whole(random_prompts(1, [12])[0])
    before = {name: parameter.detach().clone() for name, parameter in draft.named_parameters()}
    optimizer = OptimizerSettings(learning_rate=0.1).build(draft)
    for _ in range(2):  # an adapter's first matrix moves once its second is no longer zero
        draft.training_loss(batch, features_of(small, batch), small).loss.backward()
        optimizer.step()
    for name, parameter in draft.named_parameters():
        assert torch.equal(before[name], parameter) == (name not in names)
    batch.loss_mask.zero_()
    optimizer.zero_grad()
    draft.training_loss(batch, features_of(small, batch), small).loss.backward()
    assert all((parameter.grad == 0).all() for parameter in draft.parameters() if parameter.requires_grad)


def test_adapters_merge_to_the_same_logits(adapted, sibling, small):
    served = adapted.served()
    torch.testing.assert_close(logits_of(served), logits_of(adapted), rtol=1e-9, atol=1e-9)
    assert (logits_of(adapted) - logits_of(start_from(sibling(), small).double())).abs().max() > 0.1
    assert served.config()["lora"] is None and not any("lora" in name for name in served.state_dict())
    assert served.served() is served and adapted.config()["lora"] == LORA, "the trained module keeps its adapters"


def test_a_module_with_adapters_resumes_from_its_state(adapted):
    again = DraftModel(**adapted.config()).double()
    again.load_state_dict(adapted.state_dict())
    assert torch.equal(logits_of(again), logits_of(adapted))
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert {name for name, parameter in again.named_parameters() if parameter.requires_grad} == trained


def test_what_is_saved_needs_no_sibling(adapted, small, tmp_path):
    save_drafter(adapted.served(), tmp_path / "drafter", small.identity)
    loaded, _ = load_drafter(tmp_path / "drafter")
    torch.testing.assert_close(logits_of(loaded).double(), logits_of(adapted), rtol=1e-4, atol=1e-4)


def test_the_exported_model_is_plain(adapted, tmp_path):
    exported = adapted.export_model()
    assert type(exported) is transformers.LlamaForCausalLM and type(exported.lm_head) is torch.nn.Linear
    exported.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    ids = torch.tensor(random_prompts(1, [12]))
    torch.testing.assert_close(loaded(ids).logits[0], logits_of(adapted)[0], rtol=1e-9, atol=1e-9)
    ours = {parameter.data_ptr() for parameter in adapted.parameters()}
    assert ours.isdisjoint(parameter.data_ptr() for parameter in exported.parameters())


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 3}, "peft refuses model.drafter.lora"),
        ({"target_modules": ["no_such"]}, "peft refuses model.drafter.lora"),
        ({"target_modules": ["lm_head"]}, "adapts the LM head"),
    ],
    ids=str,
)
def test_bad_adapters_are_refused(sibling, small, lora, message):
    with pytest.raises(UserError, match=message):
        start_from(sibling(), small, lora=lora)
