import pickle

import pytest
from omegaconf import OmegaConf

from specdraft.data.preparation import _tokenizer as _tokenizer_hash
from specdraft.data.sources.base import Conversation
from specdraft.data.tokenization.chat import example_from_words, prompt_ids, tokenizer_fingerprint
from specdraft.embedded.tokenizer import train_tokenizer
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.targets.chat_template import bind_options, checked_options, in_words, options_of, template_hash

TEMPLATE = (
    "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}today: {{ date_string }}\n"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token if m.role == 'assistant' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: "
    "{% if enable_thinking is defined and enable_thinking is false %}no thoughts{% endif %}{% endif %}"
)
ASKED = [{"role": "user", "content": "hello"}]


def _tokenizer(options=None, template=TEMPLATE):
    tokenizer = train_tokenizer(["today: hello there, user and assistant\n"] * 4, 300, 256)
    tokenizer.chat_template = template
    bind_options(tokenizer, options)
    return tokenizer


def test_options_reach_prompts_and_training_data():
    plain, bound = _tokenizer(), _tokenizer({"enable_thinking": False, "date_string": "1 May 2025"})
    prompts = [tokenizer.decode(prompt_ids(tokenizer, ASKED)) for tokenizer in (plain, bound)]
    assert "26 Jul 2024" in prompts[0] and "no thoughts" not in prompts[0]
    assert "1 May 2025" in prompts[1] and prompts[1].endswith("no thoughts")
    conversation = Conversation("one", "chat", (*ASKED,), "there")
    dated = _tokenizer({"date_string": "1 May 2025"})
    example = example_from_words(dated, conversation, {dated.eos_token_id})
    assert "1 May 2025" in dated.decode(example.input_ids) and any(example.loss_mask)


def test_fingerprints_depend_on_them_and_stay_without_any():
    plain, none, bound = _tokenizer(), _tokenizer({}), _tokenizer({"enable_thinking": False})
    other = _tokenizer({"enable_thinking": True})
    assert tokenizer_fingerprint(plain) == tokenizer_fingerprint(none)
    assert _tokenizer_hash(plain) == _tokenizer_hash(none)
    for named in (tokenizer_fingerprint, _tokenizer_hash):
        assert len({named(each) for each in (plain, bound, other)}) == 3
    assert template_hash(plain) == template_hash(bound)  # that of the file, which a server has as well


def test_options_travel_with_the_tokenizer_into_other_processes():
    assert options_of(pickle.loads(pickle.dumps(_tokenizer({"enable_thinking": False})))) == {"enable_thinking": False}


def test_several_templates_are_read():
    assert options_of(_tokenizer({"other": 1}, {"default": TEMPLATE, "tool_use": "{{ other }}"})) == {"other": 1}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("enable_thinking", "expected names and values"),
        ([1], "expected names and values"),
        ({1: True}, "expected names and values"),
        ({"enable_thinking": object()}, "which JSON does not hold"),
        ({"date_string": float("nan")}, "which JSON does not hold"),
        ({"tools": []}, "sets tools, which every rendering sets itself"),
        ({"enable_thinkng": False}, "names no option 'enable_thinkng'"),
        ({"date": "today"}, "names no option 'date'"),
    ],
)
def test_what_is_refused(options, said):
    with pytest.raises(UserError, match=said):
        _tokenizer(options)


def test_no_template_takes_no_options():
    assert not options_of(_tokenizer(None, None))
    with pytest.raises(UserError, match="no chat template"):
        _tokenizer({"enable_thinking": False}, None)


def test_settings_are_plain_values():
    found = checked_options(OmegaConf.create({"a": {"b": [1]}}))
    assert type(found) is dict and type(found["a"]) is dict and found == {"a": {"b": [1]}}
    assert checked_options(None) == {}
    assert in_words({}) == "no options of the chat template" and '{"a": 1}' in in_words({"a": 1})


def test_a_target_is_loaded_with_them():
    with pytest.raises(UserError, match="expected names and values"):
        Target.load("there-is-none", chat_template_options="x")
    with pytest.raises(UserError, match="names no option 'enable_thinking'"):
        Target.load("embedded://tiny", device="cpu", chat_template_options={"enable_thinking": False})
