import re

import pytest
import torch
from omegaconf import OmegaConf

from specdraft.drafters.checkpoint import save_drafter
from specdraft.drafters.eagle import Eagle3
from specdraft.drafters.independent import for_target
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.training.callbacks.samples import SampleTables
from specdraft.training.fit import build_callbacks, build_drafter, copy_best_from_resumed
from tests.drafters.tli.two_tokenizers import code_target, save_prose_model
from tests.fakes import tiny_llama


def test_callbacks_keep_their_order_and_null_leaves_one_out():
    target = "specdraft.training.callbacks.samples.SampleTables"
    nodes = OmegaConf.create({"one": {"_target_": target}, "two": None, "three": {"_target_": target}})
    assert [type(each) for each in build_callbacks(nodes)] == [SampleTables, SampleTables]
    with pytest.raises(UserError, match=r"callbacks.odd makes dict: expected a lightning.Callback"):
        build_callbacks(OmegaConf.create({"odd": {"_target_": "builtins.dict"}}))


def test_the_best_head_is_copied_from_a_run_and_not_over_another(tmp_path):
    earlier, directory = tmp_path / "earlier", tmp_path / "run"
    (earlier / "checkpoints").mkdir(parents=True)
    (earlier / "drafter").mkdir()
    (earlier / "drafter" / "config.json").write_text("{}")
    torch.save({}, earlier / "checkpoints" / "best.ckpt")
    directory.mkdir()
    copy_best_from_resumed(tmp_path / "elsewhere" / "alone.ckpt", directory)
    assert list(directory.iterdir()) == []
    copy_best_from_resumed(earlier / "checkpoints" / "last.ckpt", directory)
    assert (directory / "drafter" / "config.json").read_text() == "{}"
    assert (directory / "checkpoints" / "best.ckpt").is_file()
    (directory / "drafter" / "config.json").write_text("better")
    copy_best_from_resumed(earlier / "checkpoints" / "last.ckpt", directory)
    assert (directory / "drafter" / "config.json").read_text() == "better"


PUBLISHED = {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True, "num_layers": 2}
PUBLISHED |= {"layers": [1, 2, 3, 4], "intermediate_size": 40, "sliding_window": 9}


class NewVocabulary:
    """Data whose most frequent tokens are the first ones."""

    def draft_vocabulary(self, size):
        return torch.arange(size)


@pytest.fixture
def trained_on(tmp_path):
    """trained_on(**options of the configuration) -> the published head, and what training on from it begins with."""
    target = Target.from_model(tiny_llama(num_hidden_layers=4))
    head = Eagle3.for_target(target, torch.arange(3, 60, 2), ttt_steps=2, **PUBLISHED)
    checkpoint = save_drafter(head, tmp_path / "drafter", target.identity, {})

    def build(vocabulary="own", **options):
        made = {"_target_": "specdraft.drafters.eagle.Eagle3.for_target", "layers": None, "norm_before_fc": False}
        drafter = OmegaConf.create(made | {"num_layers": 1, "sliding_window": None, "ttt_steps": 4} | options)
        made = {"drafter": drafter, "draft_vocab_size": 20}
        config = OmegaConf.create({"model": made, "init": str(checkpoint), "init_vocabulary": vocabulary})
        return target, head, *build_drafter(config, target, NewVocabulary())

    return build


def test_a_head_is_trained_on_as_it_is_and_as_the_configuration_trains(trained_on):
    target, head, drafter, vocabulary = trained_on(step_decay=0.9, projection="frozen")
    assert drafter.config() == head.config() | {"ttt_steps": 4, "step_decay": 0.9, "projection": "frozen"}
    assert drafter.target is target and vocabulary.equal(torch.arange(3, 60, 2))
    assert drafter.draft_ids.equal(vocabulary)
    assert {name for name, value in drafter.named_parameters() if not value.requires_grad} == {"lm_head.weight"}
    state = drafter.state_dict()
    for name, value in head.state_dict().items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize("option", [{"fc_norm": True}, {"num_layers": 3}, {"layers": [1, 2, 3]}])
def test_a_head_is_not_trained_on_as_what_it_is_not(trained_on, option):
    (name,) = option
    found = PUBLISHED.get(name, False)
    message = rf"a drafter with {name}={re.escape(str(found))}, and the configuration makes one with"
    with pytest.raises(UserError, match=message):
        trained_on(**option)
    assert trained_on(**{name: found})[2].config()[name] == found


def test_a_head_is_trained_on_with_a_draft_vocabulary_of_the_data(trained_on):
    target, head, drafter, vocabulary = trained_on("data")
    assert vocabulary.equal(torch.arange(20)) and drafter.draft_ids.equal(vocabulary)
    assert drafter.config() == head.config() | {"ttt_steps": 4, "draft_vocab_size": 20}
    state, before = drafter.state_dict(), head.state_dict()
    for name, value in before.items():
        if name not in ("lm_head.weight", "d2t", "t2d"):
            assert torch.equal(state[name], value), name
    for token in range(20):
        held = (head.draft_ids == token).nonzero().flatten().tolist()
        row, target_row = state["lm_head.weight"][token], target.head.weight[token]
        if held:  # trained: kept; these never were, and so they are still the target's
            assert torch.equal(row, before["lm_head.weight"][held[0]])
        assert torch.equal(row, target_row)


def test_only_a_drafter_with_a_draft_vocabulary_takes_another_one(tmp_path):
    target = Target.from_model(tiny_llama())
    checkpoint = save_drafter(for_target(target), tmp_path / "drafter", target.identity, {})
    made = {"drafter": {"_target_": "specdraft.drafters.independent.for_target"}, "draft_vocab_size": 64}
    config = OmegaConf.create({"model": made, "init": str(checkpoint), "init_vocabulary": "data"})
    with pytest.raises(UserError, match=r"of the kind DraftModel has no draft vocabulary that could be chosen anew"):
        build_drafter(config, target, NewVocabulary())


def test_a_draft_with_another_tokenizer_is_trained_on_with_all_that_belongs_to_it(tmp_path):
    target, origin = code_target(), save_prose_model(tmp_path / "origin")
    draft = for_target(target, start="checkpoint", checkpoint=origin)
    with torch.no_grad():
        draft.language_model.norm.weight.add_(1)
    checkpoint = save_drafter(draft, tmp_path / "drafter", target.identity, {})
    made = {"_target_": "specdraft.drafters.independent.for_target", "start": "checkpoint", "checkpoint": origin}
    made |= {"divergence": "jsd"}
    config = OmegaConf.create({"model": {"drafter": made}, "init": str(checkpoint), "init_vocabulary": "own"})
    again, _ = build_drafter(config, target, None)
    assert again.config() == draft.config() | {"divergence": "jsd"} and dict(again.files) == dict(draft.files)
    assert torch.equal(again.language_model.norm.weight, draft.language_model.norm.weight)
    assert torch.equal(again.shared.to_draft, draft.shared.to_draft)
