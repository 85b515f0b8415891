import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from specdraft.drafters.medusa import Medusa
from specdraft.errors import UserError
from specdraft.training.planning import meta_target as blueprint
from specdraft.training.planning import plan

REPOSITORY = Path(__file__).parents[3]
CONF = str(REPOSITORY / "conf")


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


class Forgetful(Medusa):
    def config(self):
        """What its constructor was given, without one that it cannot do without."""
        return {name: value for name, value in super().config().items() if name != self.forgotten}


@pytest.mark.parametrize(
    ("forgotten", "amiss"), [("hidden_size", "missing 1 required"), ("num_heads", "is unknown|is missing")]
)
def test_a_drafter_that_its_checkpoint_could_not_rebuild_is_an_error(composed, monkeypatch, forgotten, amiss):
    monkeypatch.setattr(Forgetful, "forgotten", forgotten, raising=False)
    name = f"{Forgetful.__module__}.Forgetful.for_target"
    config = composed("target=tiny", "model=medusa", "model.drafter.num_heads=2", f"model.drafter._target_={name}")
    with pytest.raises(
        UserError, match=f"checkpoint of Forgetful could not be loaded .*({amiss}).*constructor_arguments"
    ):
        plan.make_plan(config, *plan.find_architecture(config))


def test_options_that_the_template_does_not_name_are_an_error(composed):
    config = composed("target=tiny", "target.chat_template_options={thinking: false}")
    with pytest.raises(UserError, match="chat_template_options"):
        plan.find_architecture(config)
    assert plan.find_architecture(composed("target=tiny"))[1] == "its own configuration"


def test_draft_vocabulary_larger_than_the_vocabulary(composed):
    architecture = blueprint.shape_config(dict(composed("target=qwen3-8b").target_shape))
    with pytest.raises(UserError, match=r"draft_vocab_size is 200000: expected 1 to 151936"):
        plan.make_plan(composed("model.draft_vocab_size=200000"), architecture, "")


def test_a_draft_vocabulary_that_a_drafter_of_ones_own_would_not_notice(composed, tmp_path, monkeypatch):
    """It derives from ``Drafter`` alone, as the first one of docs/add-a-drafter.md."""
    page = (REPOSITORY / "docs" / "add-a-drafter.md").read_text(encoding="utf-8")
    (tmp_path / "bigram.py").write_text(page.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    config = composed("target=qwen3-8b")
    config.model.drafter = {"_target_": "bigram.Bigram.for_target", "width": 8}
    with pytest.raises(UserError, match="draft_vocab_size is 32000, and Bigram projects to all tokens: expected null"):
        plan.make_plan(config, blueprint.shape_config(dict(config.target_shape)), "")


def planned(composed, *overrides: str) -> plan.Plan:
    config = composed("data.sequence_length=2048", "data.batch_size=4", *overrides)
    return plan.make_plan(config, blueprint.shape_config(OmegaConf.to_container(config.target_shape)), "shape")


def test_a_target_is_partitioned_where_it_is_asked_for(composed):
    on_64 = ("target=llama-70b", "planning.gpus=64", "strategy=deepspeed_zero2")
    whole = planned(composed, *on_64, "target.placement=replicated")
    part = planned(composed, *on_64, "target.placement=zero3")
    layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
    assert whole.memory["target weights"] == 2 * whole.target_parameters
    beside = whole.target_parameters - 80 * layer  # embedding, head and the last norm stay whole
    assert beside == 2 * 128256 * 8192 + 8192
    assert part.memory["target weights"] == pytest.approx(2 * (beside + 80 * layer / 64 + 2 * layer))
    assert part.seconds["communication"] > 10 * whole.seconds["communication"]
    assert part.seconds["computation"] == whole.seconds["computation"]


def test_a_mixture_computes_with_few_experts_and_holds_all(composed):
    made = planned(composed, "target=qwen3-235b-a22b", "planning.gpus=64")
    assert made.target_parameters == pytest.approx(235.1e9, rel=0.002)
    assert made.target_forward == pytest.approx(2 * 22e9, rel=0.1)
    assert made.memory["target weights"] > 2 * 235e9 / 64


def test_what_decides_the_time(composed):
    made = planned(composed, "target=llama-8b", "planning.gpu=h200", "planning.gpus=8")
    assert made.bottleneck == "computation" and made.tokens_per_update == 8 * 4 * 2048
    computing = made.flops_per_token / (0.36 * 989e12)  # seconds a token
    moving = made.seconds["computation"] / (4 * 2048) - computing  # by the loss, one after the other
    assert 0.02 < moving / computing < 0.2
    assert made.tokens_per_second == pytest.approx(8 / (computing + moving))
    assert made.hours(3.6e6 * made.tokens_per_second) == pytest.approx(1000)
    text = "\n".join(made.lines())
    assert "one h200 has" in text and "it fits" in text and "8 x h200" in text
    assert "e+" not in text  # no powers of ten where a number is read
    few = planned(
        composed,
        "target=llama-70b",
        "planning.gpus=8",
        "data.batch_size=1",
        "data.sequence_length=64",
        "target.placement=replicated",
    )
    assert few.bottleneck == "memory bandwidth" and "it does not fit" in "\n".join(few.lines())


def test_what_does_not_fit_comes_with_advice(composed):
    def advised(*overrides):
        made = planned(composed, *overrides)
        told = [line.strip() for line in made.lines() if line.strip().startswith("try ")]
        assert told == ([] if made.memory_per_device < made.memory_there else [f"try {made.advice}"])
        return told

    whole = ("target=llama-70b", "target.placement=replicated")
    (told,) = advised(*whole)
    assert told == "try cutting the target over GPUs: target.placement=zero3 planning.gpus=8"
    assert advised(*whole, *told.split()[-2:]) == []
    assert "planning.gpus=16" in advised("target=qwen3-235b-a22b", "planning.gpu=h100", "planning.gpus=8")[0]
    assert "data.batch_size" in advised("target=llama-8b", "data.batch_size=64", "data.sequence_length=8192")[0]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("planning.gpu=h300", "planning.gpu is 'h300': expected one of a100"),
        ("planning.gpus=0", "planning.gpus is 0: expected a positive number"),
        ("target.placement=nowhere", "target.placement is 'nowhere': expected one of replicated, zero3"),
    ],
)
def test_what_cannot_be_planned(composed, override, sentence):
    with pytest.raises(UserError, match=sentence):
        planned(composed, "target=llama-8b", override)


@pytest.mark.slow
def test_memory_is_what_small_runs_take():
    command = [sys.executable, "benchmarks/plan_memory.py", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": "."}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True, timeout=900
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["family"] for line in found] == ["eagle3", "medusa", "draft"]
    for line in found:
        assert line["measured"] > 300e6
        assert line["planned"] == pytest.approx(line["measured"], rel=0.15), line


def test_a_machine_without_gpus_plans_for_a_node_of_them(composed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert planned(composed, "target=llama-8b").devices == 8
    assert planned(composed, "target=llama-8b", "trainer.num_nodes=2").devices == 16
    assert planned(composed, "target=llama-8b", "trainer.devices=2").devices == 2
    assert planned(composed, "target=llama-8b", "trainer=cpu").devices == 1


def test_scores_of_eager_attention_count(composed):
    sinks = planned(composed, "target=gpt-oss-20b").memory["activations and loss"]
    assert sinks == pytest.approx(4 * 64 * 2048 * (4 * 2048) * 2, rel=0.15)
    long = ("target=llama-8b", "data.sequence_length=8192")
    fused, eager = planned(composed, *long), planned(composed, *long, "target.attn_implementation=eager")
    assert eager.memory["activations and loss"] > fused.memory["activations and loss"]


def test_every_group_option_composes(composed):
    for group in ("model", "target", "trainer", "strategy", "logger", "decoding"):
        for path in (Path(CONF) / group).glob("*.yaml"):
            assert composed(f"{group}={path.stem}")
    for path in (Path(CONF) / "experiment").glob("*.yaml"):
        assert composed(f"experiment={path.stem}")


def test_what_others_read_meanwhile_costs_the_larger_and_not_the_sum(composed):
    on_8 = ("target=llama-8b", "planning.gpus=8")
    here, stored = planned(composed, *on_8), planned(composed, *on_8, "data.store=somewhere")
    assert {*stored.seconds} - {*here.seconds} == {"disk"}
    reading = 4 * 2048 * here.target_forward / (0.36 * 989e12)
    assert here.seconds["computation"] - stored.seconds["computation"] == pytest.approx(reading)
    assert stored.seconds["disk"] == pytest.approx(8 * 4 * 2048 * stored.feature_bytes_per_token / 2e9)
    assert stored.bottleneck == "disk"
    assert planned(composed, *on_8, "data.store=somewhere", "planning.disk=20").bottleneck == "computation"
    remote = ("target.placement=remote", "target.url=[http://a,http://b]")
    served = planned(composed, *on_8, *remote)
    assert served.seconds["computation"] == stored.seconds["computation"]
    assert served.seconds["servers"] == pytest.approx(8 / 2 * reading) and served.bottleneck == "servers"
    assert "the bottleneck is servers" in "\n".join(served.lines())
