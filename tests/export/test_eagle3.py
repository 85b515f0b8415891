"""What engines load without a word and then never accept: refused here, each by its name."""

import pytest
import torch

from specdraft.errors import UserError
from specdraft.export.eagle3 import layout_config, layout_tensors, validate


@pytest.fixture
def layout(make_checkpoint):
    head, _ = make_checkpoint()
    config = layout_config(head.config(), {}, "float32")
    return config, layout_tensors(head.state_dict(), config)


def test_sound_heads_pass(layout):
    config, tensors = layout
    assert validate(config, tensors, num_target_layers=7) is None
    assert validate(config, tensors) is None


@pytest.mark.parametrize("missing", ["lm_head.weight", "d2t", "fc.weight"])
def test_missing_tensors(layout, missing):
    config, tensors = layout
    del tensors[missing]
    with pytest.raises(UserError, match=rf"missing: {missing}"):
        validate(config, tensors)


def test_unknown_tensors(layout):
    config, tensors = layout
    with pytest.raises(UserError, match=r"unknown: layers\.1\.norm\.weight"):
        validate(config, tensors | {"layers.1.norm.weight": torch.zeros(32)})
    with pytest.raises(UserError, match=r"embed_tokens\.weight is .* \[97, 31\]: expected .* \[97, 32\]"):
        validate(config, tensors | {"embed_tokens.weight": torch.zeros(97, 31)})


def test_shapes_dtypes_and_values(layout):
    config, tensors = layout
    with pytest.raises(UserError, match=r"norm\.weight is torch\.float32 \[31\]: expected torch\.float32 \[32\]"):
        validate(config, tensors | {"norm.weight": torch.ones(31)})
    with pytest.raises(UserError, match=r"d2t is torch\.int32"):
        validate(config, tensors | {"d2t": tensors["d2t"].int()})
    with pytest.raises(UserError, match=r"norm\.weight is torch\.bfloat16"):
        validate(config, tensors | {"norm.weight": torch.ones(32).bfloat16()})
    broken = tensors["fc.weight"].clone()
    broken[3, 5] = float("nan")
    with pytest.raises(UserError, match=r"fc\.weight holds values that are not finite"):
        validate(config, tensors | {"fc.weight": broken})


def test_weights_beyond_the_range_of_the_chosen_dtype(make_checkpoint):
    head, _ = make_checkpoint()
    head.norm.weight.data[0] = 1e6
    config = layout_config(head.config(), {}, "float16")
    with pytest.raises(UserError, match="not finite in float16"):
        validate(config, layout_tensors(head.state_dict(), config))


def test_draft_vocabulary(layout):
    config, tensors = layout
    absolute = tensors["d2t"] + torch.arange(32)
    with pytest.raises(UserError, match="not absolute ids"):
        validate(config, tensors | {"d2t": absolute})
    with pytest.raises(UserError, match="ascending target ids"):
        validate(config, tensors | {"d2t": -torch.arange(32)})  # every draft id maps to target id 0
    with pytest.raises(UserError, match="t2d does not mark"):
        validate(config, tensors | {"t2d": torch.zeros(97, dtype=torch.bool)})


@pytest.mark.parametrize("layers", [[4, 3, 2], [2, 2, 3], [0, 2, 3], [2, 3, 8], []])
def test_layers(layout, layers):
    config, tensors = layout
    with pytest.raises(UserError, match="ascending, distinct numbers from 1 to 7"):
        validate(config | {"eagle_aux_hidden_state_layer_ids": layers}, tensors, num_target_layers=7)


def test_what_engines_do_not_know(layout):
    config, tensors = layout
    with pytest.raises(UserError, match="hidden_act is 'gelu'"):
        validate(config | {"hidden_act": "gelu"}, tensors)
    with pytest.raises(UserError, match="draft vocabulary has 98 tokens"):
        validate(config | {"draft_vocab_size": 98}, tensors)
