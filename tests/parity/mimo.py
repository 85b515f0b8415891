"""The embedded target as a MiMo: a dense Qwen2 with a multi-token-prediction layer of its own, untrained."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from specdraft.drafters.eagle import MTP
from specdraft.drafters.eagle.mtp_layouts import LAYOUTS
from specdraft.files import atomic_directory
from specdraft.targets import Target
from specdraft.targets.loading import location

ARCHITECTURE, OWN = LAYOUTS["mimo"].architecture, LAYOUTS["mimo"].prefix

_OF_LLAMA = ("architectures", "model_type", "attention_bias", "mlp_bias", "head_dim", "pretraining_tp", "dtype")


def mimo(directory: Path) -> Path:
    """Write it to ``directory``, once: a Llama is a Qwen2 whose biases are zero."""
    if directory.exists():
        return directory
    source = Target.load("embedded://tiny", None, dtype="float32", device="cpu", packed=False)
    shape = {name: value for name, value in source.config.to_dict().items() if name not in _OF_LLAMA}
    model = Qwen2ForCausalLM(Qwen2Config(**shape, dtype="float32"))
    report = model.load_state_dict(source.model.state_dict(), strict=False)
    assert not report.unexpected_keys and all(name.endswith("bias") for name in report.missing_keys)
    with torch.no_grad():
        for name in report.missing_keys:
            model.get_parameter(name).zero_()
    torch.manual_seed(0)
    own = MTP.for_target(source, start="scratch").state_dict()
    with atomic_directory(directory) as temporary:
        model.save_pretrained(temporary)
        source.model.generation_config.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(location("embedded://tiny")).save_pretrained(temporary)
        weights, config = temporary / "model.safetensors", temporary / "config.json"
        layer = {OWN + name.removeprefix("layer."): tensor for name, tensor in own.items()}
        save_file(load_file(weights) | layer, weights, metadata={"format": "pt"})
        says = json.loads(config.read_text()) | {"architectures": [ARCHITECTURE], "num_nextn_predict_layers": 1}
        config.write_text(json.dumps(says, indent=2))
    return directory
