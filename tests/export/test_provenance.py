"""An export says whose drafter it is, and the same target is known again however it is stored and loaded."""

import json

import pytest
import torch
from transformers import LlamaForCausalLM

from specdraft.errors import UserError
from specdraft.export import export
from specdraft.export.provenance import check_provenance, read_provenance
from specdraft.export.sglang import SGLang
from specdraft.export.tensorrt_llm import TensorRTLLM
from specdraft.export.vllm import VLLM
from specdraft.targets import Target


@pytest.mark.parametrize("engine", [VLLM, SGLang, TensorRTLLM])
def test_every_engine_gets_the_identity_and_none_reads_it(make_checkpoint, identity, target, engine):
    _, checkpoint = make_checkpoint()
    directory = export(checkpoint, engine())
    assert read_provenance(directory)["target"] == identity
    known = {"quantization": "none", "chat_template_options": {}}
    assert check_provenance(directory, target)["extra"]["target"] == known
    assert not {"target", "weights_hash"} & json.loads((directory / "config.json").read_text()).keys()
    assert export(checkpoint, engine()) == directory  # an earlier export is replaced


def test_the_same_target_elsewhere_in_shards_and_in_another_dtype(make_checkpoint, target, tmp_path):
    directory = export(make_checkpoint()[1], VLLM())
    target.model.save_pretrained(tmp_path / "elsewhere", max_shard_size="20KB")
    assert len(list((tmp_path / "elsewhere").glob("*.safetensors"))) > 1
    for dtype in ("float32", "bfloat16"):
        model = LlamaForCausalLM.from_pretrained(tmp_path / "elsewhere", dtype=dtype)
        check_provenance(directory, Target.from_model(model, name="another name"))


def test_other_weights_are_refused(make_checkpoint, target):
    torch.manual_seed(7)
    other = Target.from_model(LlamaForCausalLM(target.model.config))
    directory = export(make_checkpoint()[1], VLLM())
    with pytest.raises(UserError, match=r"belongs to the target .* other weights .* or remove .*target\.json"):
        check_provenance(directory, other)
    (directory / "target.json").unlink()
    assert check_provenance(directory, other) == {}  # a head of others says nothing


def test_how_prompts_are_rendered_goes_along(make_checkpoint, tmp_path):
    _, checkpoint = make_checkpoint()
    config = json.loads((checkpoint / "config.json").read_text())
    config["extra"]["target"] |= {"chat_template_options": {"enable_thinking": False}, "chat_template_hash": "abc"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    said = read_provenance(export(checkpoint, VLLM()))["extra"]["target"]
    assert said["chat_template_options"] == {"enable_thinking": False} and said["chat_template_hash"] == "abc"


WHOLE = '"name": "a", "config_hash": "b", "weights_hash": "c"'


@pytest.mark.parametrize(
    "said",
    [
        "[]",
        "{}",
        '{"name": 1, "config_hash": "", "weights_hash": ""}',
        f'{{{WHOLE}, "chat_template_hash": 1}}',
        f'{{{WHOLE}, "chat_template_options": []}}',
    ],
)
def test_a_damaged_file(tmp_path, said):
    (tmp_path / "target.json").write_text(said)
    with pytest.raises(UserError, match="does not say whose drafter this is"):
        read_provenance(tmp_path)
