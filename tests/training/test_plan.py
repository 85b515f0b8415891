from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from specdraft.errors import UserError
from specdraft.training import blueprint, plan, preflight
from specdraft.training.costs import state_bytes

CONF = str(Path(__file__).parents[2] / "conf")


@pytest.fixture
def composed():
    def build(*overrides: str):
        with initialize_config_dir(CONF, version_base=None):
            config = compose("train", list(overrides), return_hydra_config=True)
        OmegaConf.set_struct(config, True)
        return config

    return build


def test_anchors_of_llama_8b_without_a_hub(composed, monkeypatch):
    def offline(*_args, **_kwargs):
        raise UserError("no hub")

    monkeypatch.setattr(plan, "target_config", offline)
    # facts: target forward 15.5, head forward + backward 2.6 / 9.5 / 16.4 GFLOP per token at 1 / 4 / 7 steps.
    for steps, expected in ((1, 2.6), (4, 9.5), (7, 16.4)):
        config = composed(
            "target=llama-8b",
            "model.draft_vocab_size=32000",
            f"model.drafter.ttt_steps={steps}",
            "data.sequence_length=2048",
            "data.batch_size=1",
        )
        architecture, source = plan.find_architecture(config)
        made = plan.make_plan(config, architecture, source)
        assert "published shape" in source
        assert made.target_forward / 1e9 == pytest.approx(15.5, rel=0.02)
        # A little below: the fusion's inputs need no gradient, which the anchors count.
        assert (made.drafter_forward + made.drafter_backward) / 1e9 == pytest.approx(expected, rel=0.05)
    assert made.target_parameters == 8_030_261_248
    assert made.memory["target weights"] == pytest.approx(16.06e9, rel=0.01)
    assert made.feature_bytes_per_token == 32 * 1024
    text = "\n".join(made.lines())
    assert "15.5 GFLOP" in text and "KiB per token" in text and "M trainable parameters" in text


def test_a_target_without_shape_or_hub_is_an_error(composed, monkeypatch):
    def offline(*_args, **_kwargs):
        raise UserError("no hub")

    monkeypatch.setattr(plan, "target_config", offline)
    with pytest.raises(UserError, match="no hub"):
        plan.find_architecture(composed("target.name=nobody/nothing"))


def test_draft_vocabulary_larger_than_the_vocabulary(composed):
    architecture = blueprint.shape_config(dict(composed("target=qwen3-8b").target_shape))
    with pytest.raises(UserError, match=r"draft_vocab_size is 200000: expected 1 to 151936"):
        plan.make_plan(composed("model.draft_vocab_size=200000"), architecture, "")


def test_mixture_counts_chosen_experts_only():
    from specdraft.training.costs import target_sizes

    config = blueprint.shape_config(
        {
            "model_type": "mixtral",
            "vocab_size": 100,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        }
    )
    target = blueprint.WeightlessTarget(config, "mixture")
    sizes = target_sizes(target.model, target.config)
    experts = 4 * 8 * 3 * 32 * 64
    assert sizes.active == sizes.total - experts * 6 // 8 - 100 * 32


def test_zero_stages_shard_what_they_say():
    whole = state_bytes(100, None, 4, mixed=False)
    assert whole == {"weights": 400, "gradients": 400, "optimizer": 800}
    assert state_bytes(100, 1, 4, mixed=False) == {"weights": 400, "gradients": 400, "optimizer": 200}
    assert state_bytes(100, 2, 4, mixed=True) == {"weights": 200, "gradients": 50, "optimizer": 300}
    assert state_bytes(100, 3, 4, mixed=True) == {"weights": 50, "gradients": 50, "optimizer": 300}


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.max_steps=-1", "trainer.max_steps is -1"),
        ("trainer.max_steps=many", "trainer.max_steps is many"),
        ("live.prompts=0", "live.prompts is 0: expected a whole number of at least 1"),
    ],
)
def test_settings_are_checked_first(composed, override, sentence):
    with pytest.raises(UserError, match=sentence):
        preflight.check_settings(composed(override))


def test_memory_is_checked_before_any_work(composed, monkeypatch, tmp_path):
    shape = blueprint.shape_config(dict(composed("target=llama-70b").target_shape))
    monkeypatch.setattr(preflight, "target_config", lambda settings: shape)
    with pytest.raises(UserError, match=r"Llama-3.3-70B-Instruct with its drafter needs about 1\d\d\.\d GB"):
        preflight.check_before_work(composed("target=llama-70b", "trainer=cpu"), tmp_path)


def test_unwritable_directory(composed, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to the directory"):
        preflight.check_before_work(composed(), tmp_path / "file" / "run")


def test_missing_target_is_one_sentence(monkeypatch, tmp_path):
    def unreachable(*_args, **_kwargs):
        raise OSError("Name or service not known")

    monkeypatch.setattr(blueprint, "get_hf_file_metadata", unreachable)
    with pytest.raises(UserError, match=r"not on this machine and the Hugging Face hub cannot be reached"):
        blueprint.target_config({"name": "nobody/nothing"})
    with pytest.raises(UserError, match="does not exist"):
        blueprint.target_config({"name": str(tmp_path / "nothing")})
    with pytest.raises(UserError, match="no embedded target"):
        blueprint.target_config({"name": "embedded://large"})


def test_every_group_option_composes(composed):
    for group in ("model", "target", "trainer", "strategy", "logger", "decoding"):
        for path in (Path(CONF) / group).glob("*.yaml"):
            assert composed(f"{group}={path.stem}")
    for path in (Path(CONF) / "experiment").glob("*.yaml"):
        assert composed(f"experiment={path.stem}")
