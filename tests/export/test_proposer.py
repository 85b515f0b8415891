"""vLLM's settings for a proposer of ours: what is written is what its process reads, and builds."""

import json

import pytest
import yaml

from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.hybrid import Hybrid
from specdraft.errors import UserError
from specdraft.export.proposer import PROPOSER, chain_rule, export_proposer
from specdraft.serving.settings import ProposerSettings
from specdraft.serving.vllm import Proposer

SUFFIX = {"_target_": "specdraft.drafters.suffix.Suffix"}
SURE = {"_target_": "specdraft.decoding.stopping.Confidence", "threshold": 0.3}


def written(directory):
    return yaml.safe_load((directory / "vllm.yaml").read_text())


def test_what_vllm_is_told(tmp_path):
    assert f"{Proposer.__module__}.{Proposer.__qualname__}" == PROPOSER
    directory = export_proposer(ProposerSettings(drafter=SUFFIX), "org/model", 7, tmp_path / "out")
    said = written(directory)
    assert said["model"] == "org/model"
    assert said["speculative-config"] == {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 7}
    assert said["additional-config"] == {"specdraft": {"drafter": SUFFIX}}
    card = (directory / "README.md").read_text()
    assert card.startswith("# suffix for org/model") and f"vllm serve --config {directory / 'vllm.yaml'}" in card
    assert f"--additional-config '{json.dumps(said['additional-config'])}'" in card
    assert "default-chat-template-kwargs" not in said and "llm.chat" not in card


def test_vllm_is_told_the_options_of_the_chat_template(tmp_path):
    options = {"enable_thinking": False}
    directory = export_proposer(ProposerSettings(drafter=SUFFIX), "org/model", 7, tmp_path / "out", options)
    assert written(directory)["default-chat-template-kwargs"] == options
    card = (directory / "README.md").read_text()
    assert "--default-chat-template-kwargs '{\"enable_thinking\": false}'" in card
    assert "llm.chat(messages, chat_template_kwargs={'enable_thinking': False})" in card


def test_a_draft_model_is_in_the_directory(target, save, tmp_path):
    checkpoint = save(DraftModel.for_target(target))
    settings = ProposerSettings(checkpoint=str(checkpoint.parent), retrieval=SUFFIX, stop=SURE)
    directory = export_proposer(settings, "embedded://tiny", 5, tmp_path / "out")
    found = ProposerSettings.read(written(directory)["additional-config"])
    assert found.checkpoint == str(directory / "drafter")
    drafter, stop = found.build()
    assert isinstance(drafter, Hybrid) and stop.threshold == 0.3
    card = (directory / "README.md").read_text()
    assert card.startswith("# suffix, else draft_model for embedded://tiny") and "while 0.3 sure" in card
    assert written(directory)["model"].endswith("embedded/tiny")
    export_proposer(ProposerSettings(drafter=SUFFIX), "org/model", 5, directory)  # instead of the earlier one
    assert sorted(path.name for path in directory.iterdir()) == ["README.md", "vllm.yaml"]


def test_nobody_loses_files(tmp_path):
    (tmp_path / "mine").write_text("")
    for output in (tmp_path, tmp_path / "mine"):
        with pytest.raises(UserError, match="is not an earlier export"):
            export_proposer(ProposerSettings(drafter=SUFFIX), "org/model", 5, output)
    assert (tmp_path / "mine").exists()


def test_rules_are_those_of_chains():
    assert chain_rule(None) is None
    chain = {"_target_": "specdraft.decoding.shapes.StaticTree.chain", "num_tokens": 5}
    assert chain_rule(chain) is None and chain_rule(chain | {"stop": SURE}) == SURE
    with pytest.raises(UserError, match="vLLM verifies chains"):
        chain_rule({"_target_": "specdraft.decoding.shapes.DynamicTree"})
