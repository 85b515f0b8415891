"""The frozen target against transformers' own forward, on families that differ in head, norm, window or experts."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import transformers

from specdraft.decoding.passes import Pass
from specdraft.errors import UserError
from specdraft.targets import Features, Target
from tests.fakes import tiny_llama
from tests.families import FAMILIES, LENGTH, SIZES, WINDOW, V

LAYERS = (1, 2, 3)
# Norms and rotary angles are computed in fp32 even in an fp64 model.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
EXACT = {"rtol": 0.0, "atol": 0.0}


def positions(*lengths: int) -> torch.Tensor:
    """Positions ``[1, T]`` of documents packed one behind the other."""
    return torch.cat([torch.arange(n) for n in lengths])[None]


def whole(target: Target, ids: torch.Tensor) -> Features:
    return target.features(ids, positions(ids.shape[1]).expand_as(ids), LAYERS)


def assert_same(ours: Features, expected: Features) -> None:
    torch.testing.assert_close(ours.aux, expected.aux, **CLOSE)
    torch.testing.assert_close(ours.last, expected.last, **CLOSE)


def alone(ids: torch.Tensor, start: int, end: int) -> Pass:
    """The part ``ids[:, start:end]`` of a single text."""
    return Pass.text(ids[:, start:end], torch.tensor([start]), start, simple=True)


def joined(parts: list[Features]) -> Features:
    return Features(*(torch.cat(part, dim=1) for part in zip(*parts, strict=True)))


def test_features_and_logits_equal_the_full_forward(target, ids):
    expected = target.model(ids, output_hidden_states=True, use_cache=False)
    features = whole(target, ids)
    assert features.aux.shape == (2, LENGTH, 3 * target.hidden_size)
    hidden = torch.cat([expected.hidden_states[k] for k in LAYERS], dim=-1)
    torch.testing.assert_close(features.aux, hidden, **EXACT)
    torch.testing.assert_close(features.last, expected.hidden_states[-1], **EXACT)  # transformers' last one is normed
    logits = target.logits(features.last)
    assert logits.shape == (2, LENGTH, V)
    torch.testing.assert_close(logits, expected.logits, rtol=1e-12, atol=1e-12)
    # What a re-implementation forgets is not negligible here.
    assert logits.std() > 0.05
    bare = features.last @ target.head.weight.T
    transformed = {"gemma3_text", "gemma2", "granite", "cohere"}
    assert ((bare - logits).abs().max() > 0.1) == (target.config.model_type in transformed)


def test_each_layer_is_found_under_its_number(target, ids):
    expected = target.model(ids, output_hidden_states=True, use_cache=False).hidden_states
    for k in LAYERS:
        aux = target.features(ids, positions(LENGTH).expand_as(ids), (k,)).aux
        torch.testing.assert_close(aux, expected[k], **EXACT)
        assert (aux - expected[k - 1]).abs().max() > 0.1
    none = target.features(ids, positions(LENGTH).expand_as(ids), ())
    assert none.aux.shape == (2, LENGTH, 0)
    torch.testing.assert_close(none.last, expected[-1], **EXACT)


def test_the_last_layer_is_found_before_the_final_norm(target, ids):
    last = target.num_layers
    positions = torch.arange(LENGTH).expand_as(ids)
    features = target.features(ids, positions, target.check_layers([1, last]))
    aux = features.aux.chunk(2, dim=-1)[1]
    assert not torch.allclose(aux, features.last, rtol=0.1)
    torch.testing.assert_close(target.norm(aux), features.last, rtol=1e-12, atol=1e-12)


def test_packed_rows_equal_separate_documents(target, ids):
    lengths = ((10, 14), (1, 23))
    packed = target.features(ids, torch.cat([positions(*row) for row in lengths]), LAYERS)
    for row, (first, _) in enumerate(lengths):
        separate = [whole(target, ids[row : row + 1, :first]), whole(target, ids[row : row + 1, first:])]
        assert_same(Features(*(part[row : row + 1] for part in packed)), joined(separate))
    assert (packed.last - whole(target, ids).last).abs().max() > 0.01  # the documents would have seen each other


def test_cached_steps_equal_the_uncached_forward(target, ids):
    row = ids[:1]
    cache, cuts = target.new_cache(1, LENGTH), ((0, 9), (9, 10), (10, 16), (16, 17), (17, LENGTH))
    parts = [target.step(alone(row, start, end), cache, LAYERS) for start, end in cuts]
    assert_same(joined(parts), whole(target, row))


def test_rejected_drafts_are_written_over(target, ids):
    row, drafts = ids[:1], ids[1:]
    cache = target.new_cache(1, LENGTH + 6)
    parts = [target.step(alone(row, 0, 9), cache, LAYERS)]
    for held, accepted in ((9, 0), (10, 2), (13, 5)):  # rejected drafts longer than the window lie between
        draft = torch.cat([row[:, : held + 1 + accepted], drafts[:, : 5 - accepted]], dim=1)
        step = target.step(alone(draft, held, held + 6), cache, LAYERS)
        parts.append(Features(*(part[:, : 1 + accepted] for part in step)))
    parts.append(target.step(alone(row, 19, LENGTH), cache, LAYERS))
    assert_same(joined(parts), whole(target, row))


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.windowed])
def test_the_sliding_window_bites(name, ids):
    narrow = Target.from_model(FAMILIES[name].build())
    wide = Target.from_model(FAMILIES[name].build(sliding_window=64))
    difference = (whole(narrow, ids).last - whole(wide, ids).last).abs().amax(dim=(0, 2))
    assert difference[:WINDOW].max() < 1e-5
    assert difference[WINDOW:].min() > 0.01


def test_the_target_is_frozen_and_left_as_it_was(llama, ids):
    assert not llama.model.training
    assert not any(parameter.requires_grad for parameter in llama.model.parameters())
    features = whole(llama, ids)
    assert not features.aux.requires_grad
    assert not features.last.is_inference()  # a drafter's training goes through it
    assert not any(module._forward_hooks for module in llama.model.modules())
    with pytest.raises(IndexError):
        llama.features(torch.tensor([[V]]), positions(1), LAYERS)
    assert not any(module._forward_hooks for module in llama.model.modules())


def test_embedding_rows_are_raw():
    gemma = Target.from_model(FAMILIES["gemma3"].build())
    embed = gemma.model.get_input_embeddings()
    assert gemma.embedding_weight is embed.weight
    scaled = embed(torch.tensor([3]))[0]
    torch.testing.assert_close(scaled, gemma.embedding_weight[3] * gemma.hidden_size**0.5, **CLOSE)


# A config that transformers builds, and what is missing or cannot be taken back in it.
UNSUPPORTED = {
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": V},  # an encoder
    "mamba": SIZES,  # a state, not keys and values
    "recurrent_gemma": SIZES,
    "qwen3_next": SIZES | {"num_experts": 4},  # some layers with linear attention
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": V},  # layers under another name
    "gpt_neox": SIZES,  # final norm under another name
    "opt": SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32},
}


@pytest.mark.parametrize("model_type", UNSUPPORTED)
def test_an_unsupported_architecture_gets_one_sentence(model_type):
    config = transformers.AutoConfig.for_model(model_type, **UNSUPPORTED[model_type])
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    model = auto.from_config(config)
    with pytest.raises(UserError, match=r"^the architecture \w+ is not supported: .*expected \D*$") as caught:
        Target.from_model(model)
    assert type(model).__name__ in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "transform",
    [
        lambda logits: 0.9 * logits,
        lambda logits: logits + torch.arange(V) / 50,
        lambda logits: 4 * torch.tanh(logits / 4),
        lambda logits: logits / 0,
        lambda logits: logits * torch.nan,
    ],
    ids=["scale", "bias", "soft-cap", "infinite", "not a number"],
)
def test_logits_transformed_in_an_unknown_way_are_refused(transform, monkeypatch):
    model = FAMILIES["llama"].build()
    own = model.forward

    def forward(**inputs):
        output = own(**inputs)
        output.logits = transform(output.logits)
        return output

    monkeypatch.setattr(model, "forward", forward)
    with pytest.raises(UserError, match="LlamaForCausalLM is not supported: logits from its hidden states differ"):
        Target.from_model(model)


def test_half_precision_passes_the_check_of_logits(ids):
    for family in FAMILIES.values():
        target = Target.from_model(family.build().bfloat16())
        assert target.dtype == torch.bfloat16
        assert whole(target, ids).last.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("num_layers", "expected"), [(16, (2, 8, 13)), (32, (2, 16, 29)), (8, (2, 4, 5)), (6, (1, 3, 5)), (4, (1, 2, 3))]
)
def test_default_layers(num_layers, expected):
    target = Target.from_model(tiny_llama(num_hidden_layers=num_layers))
    assert target.default_layers() == expected
    assert target.check_layers(expected) == expected


def test_too_shallow_for_the_default_layers():
    with pytest.raises(UserError, match="has 3 layers"):
        Target.from_model(tiny_llama(num_hidden_layers=3)).default_layers()


@pytest.mark.parametrize("layers", [(2, 1, 3), (1, 1, 2), (0, 1, 2), (1, 2, 5), (-1, 2, 3)])
def test_bad_layers(llama, layers):
    with pytest.raises(UserError, match="expected ascending, distinct numbers from 1 to 4"):
        llama.check_layers(layers)


def test_layers_from_a_config_become_a_tuple(llama):
    assert llama.check_layers([1, 3]) == (1, 3)
    assert llama.check_layers([]) == ()


def test_shape_and_context(llama):
    assert (llama.hidden_size, llama.vocab_size, llama.num_layers, llama.max_length) == (32, V, 4, 64)
    assert llama.device == torch.device("cpu")
    assert llama.dtype == torch.float64
    assert llama.to("cpu") is llama


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [([5, 7], 3, {5, 7}), (5, 3, {5}), (None, 3, {3}), (None, [3, 4], {3, 4}), (None, None, set())],
)
def test_ends_of_text(generation, config, expected):
    model = tiny_llama()
    model.generation_config.eos_token_id = generation
    model.config.eos_token_id = config
    assert Target.from_model(model).eos_token_ids == expected
    tokenizer = SimpleNamespace(eos_token_id=9)  # an engine ends there too
    assert Target.from_model(model, tokenizer).eos_token_ids == expected | {9}


def test_identity_tells_models_apart_but_not_dtypes():
    first = Target.from_model(tiny_llama(), name="a")
    assert first.identity == Target.from_model(tiny_llama(), name="a").identity
    assert first.identity == Target.from_model(tiny_llama().bfloat16(), name="a").identity
    assert set(dataclasses.asdict(first.identity)) == {"name", "revision", "config_hash", "weights_hash"}
    other_weights = Target.from_model(tiny_llama(seed=1), name="a").identity
    assert other_weights.config_hash == first.identity.config_hash
    assert other_weights.weights_hash != first.identity.weights_hash
    other_shape = Target.from_model(tiny_llama(intermediate_size=64), name="a").identity
    assert other_shape.config_hash != first.identity.config_hash


@pytest.mark.parametrize("name", ["packed", "trust_remote_code"])
def test_switches_are_true_or_false(name):
    with pytest.raises(UserError, match=rf"target.{name} is no: expected true or false"):
        Target.load("embedded://tiny", **{name: "no"})


def test_unknown_placements_devices_and_missing_ranks_are_one_sentence(monkeypatch):
    with pytest.raises(
        UserError, match=r"target.placement is 'zero4': expected one of replicated, zero3, device_map, remote"
    ):
        Target.load("embedded://tiny", placement="zero4")
    for device in ("gpu", "cuda:99"):
        with pytest.raises(UserError, match=rf"target.device is '{device}' \(.+\): expected auto, cpu, or a device"):
            Target.load("embedded://tiny", device=device)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UserError, match=r"RANK is not set: .* start them with torchrun"):
        Target.load("embedded://tiny", placement="zero3")
