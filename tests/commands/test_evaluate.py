"""evaluate.py as a user runs it, on a random target and head: one good run, and every bad input in one sentence."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdraft.drafters.checkpoint import save_drafter
from specdraft.drafters.eagle import Eagle3
from specdraft.targets import Target
from tests.drafters.jacobi_forcing.conftest import trained

ENTRY_POINT = Path(__file__).parents[2] / "evaluate.py"


def save_target(tokenizer, path, seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def run_directory(tokenizer, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    target = Target.load(save_target(tokenizer, root / "target", seed=0), dtype="float32", device="cpu")
    head = Eagle3.for_target(target, torch.arange(0, len(tokenizer), 2))
    save_drafter(head, root / "run" / "drafter", target.identity, {"decoding": {"num_draft_tokens": 2}})
    (root / "prompts.jsonl").write_text('{"prompt": "def a"}\n{"turns": ["x", "y"], "category": "chat"}\n')
    return root


@pytest.fixture
def run(monkeypatch, tmp_path):
    def call(*overrides):
        monkeypatch.setattr(sys, "argv", ["evaluate.py", f"hydra.run.dir={tmp_path}/out", *map(str, overrides)])
        runpy.run_path(str(ENTRY_POINT), run_name="__main__")
        return json.loads((tmp_path / "out" / "evaluation.json").read_text())

    return call


def test_a_run_directory_and_prompts(run, run_directory, capsys, tmp_path):
    written = run(
        f"checkpoint={run_directory / 'run'}",
        f"benchmark={run_directory / 'prompts.jsonl'}",
        "decoding.max_new_tokens=12",
        "target.device=cpu",
        "cost_model=null",
    )
    assert [(row["drafter"], row["temperature"]) for row in written["results"]] == [
        ("eagle3", 0.0),
        ("prompt_lookup", 0.0),
        ("eagle3", 1.0),
        ("prompt_lookup", 1.0),
        ("eagle3", 1.0),  # sampled, beside what vLLM does
    ]
    first = written["results"][0]
    assert first["num_draft_tokens"] == 2  # as trained
    assert first["lossless"] is True and first["requests"] == 3
    assert {row["category"] for row in written["categories"]} == {"chat", "uncategorized"}
    settings = written["settings"]
    assert settings["target"]["name"] == str(run_directory / "target") and settings["dtype"] == "float32"
    assert settings["checkpoint"] == str(run_directory / "run" / "drafter")
    printed = capsys.readouterr().out
    assert "acceptance length" in printed and str(tmp_path / "out" / "report.html") in printed
    assert (tmp_path / "out" / "report.html").is_file()


def test_a_target_is_sampled_as_it_is_published(run, run_directory, capsys, tmp_path):
    published = shutil.copytree(run_directory / "target", tmp_path / "published")
    file = published / "generation_config.json"
    said = {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.3}
    file.write_text(json.dumps(json.loads(file.read_text()) | said))
    options = [f"checkpoint={run_directory / 'run'}", f"target.name={published}", "decoding.max_new_tokens=12"]
    options += [f"benchmark={run_directory / 'prompts.jsonl'}", "target.device=cpu", "cost_model=null"]
    default = "temperature 0.6, top_k 20, repetition_penalty 1.3"
    written = run(*options, "decoding.temperature=[0,served]")
    assert {row["temperature"] for row in written["results"]} == {0.0, 0.6}
    shaped = {name: each for name, each in written["settings"]["sampling"]["0.6"].items() if each}
    said = f"{default}, as the target is served; sampled drafts by the temperature alone"  # as vLLM draws them
    assert shaped == {"top_k": 20, "top_p": 1.0, "repetition_penalty": 1.3, "said": said}
    assert written["settings"]["sampling"]["0"]["said"] == "temperature 0"
    assert f"{said}:".capitalize() in " ".join(capsys.readouterr().out.split())
    run(*options, "decoding.temperature=0", "decoding.repetition_penalty=1.3")
    printed = " ".join(capsys.readouterr().out.split())
    assert f"not measured: {default}, as engines sample" in printed
    assert "Temperature 0, repetition_penalty 1.3:" in printed and "NOT LOSSLESS" not in printed


def test_a_target_without_a_checkpoint(run, run_directory, capsys):
    """What compare= names drafts: prompt lookup."""
    written = run(
        f"target.name={run_directory / 'target'}",
        f"benchmark={run_directory / 'prompts.jsonl'}",
        "decoding.max_new_tokens=12",
        "target.device=cpu",
        "cost_model=null",
        "limit=2",
    )
    assert [(row["drafter"], row["temperature"]) for row in written["results"]] == [
        ("prompt_lookup", 0.0),
        ("prompt_lookup", 1.0),
    ]
    assert written["results"][0]["lossless"] is True
    assert written["settings"]["checkpoint"] is None and "drafter" not in written["settings"]
    assert "checkpoint= is missing" in fails(run, capsys, f"target.name={run_directory / 'target'}", "compare=[]")


def test_the_fastest_on_a_sample(run, run_directory, capsys):
    prompts = f"benchmark={run_directory / 'prompts.jsonl'}"
    quick = ("decoding.max_new_tokens=8", "decoding.temperature=0", "target.device=cpu", "cost_model=null")
    written = run(f"checkpoint={run_directory / 'run'}", "drafter=auto", prompts, *quick)
    selection = written["settings"]["selection"]
    looked_up = ["prompt_lookup", "suffix", "ngram_cache"]
    names = ["eagle3", *looked_up, *(f"{name}, else eagle3" for name in looked_up), "token_recycling"]
    assert sorted(each["drafter"] for each in selection["candidates"]) == sorted(names)
    assert {each["requests"] for each in selection["candidates"]} == {1}  # of the two prompts, the other is measured
    assert selection["finalists"] == []
    best = max(selection["candidates"], key=lambda each: each["speedup"])["drafter"]
    assert selection["chosen"] == best
    assert written["results"][0]["drafter"] == ("hybrid" if "else" in best else best)
    assert written["settings"]["prompts"] == 1
    assert f"drafter=auto chose {best} and expects what it did on 1 request(s)" in capsys.readouterr().out
    alone = run(f"target.name={run_directory / 'target'}", "drafter=auto", prompts, *quick)
    assert {each["drafter"] for each in alone["settings"]["selection"]["candidates"]} == {*looked_up, "token_recycling"}
    with_role = fails(run, capsys, f"checkpoint={run_directory / 'run'}", "drafter=auto", "drafter@retrieval=suffix")
    assert "drafter=auto tries look-ups before a checkpoint's drafter itself" in with_role


def test_a_drafter_that_needs_no_checkpoint(run, run_directory, capsys):
    written = run(
        f"target.name={run_directory / 'target'}",
        f"benchmark={run_directory / 'prompts.jsonl'}",
        "drafter=suffix",
        "drafter.max_tree_depth=9",
        "compare=[ngram_cache,suffix]",  # what is evaluated is not shown beside itself
        "decoding.max_new_tokens=6",
        "decoding.temperature=0",
        "target.device=cpu",
        "limit=1",
    )
    assert [row["drafter"] for row in written["results"]] == ["suffix", "ngram_cache"]
    both = fails(run, capsys, f"checkpoint={run_directory / 'run'}", "drafter=suffix")
    assert "checkpoint= and drafter= both say what to evaluate" in both
    alone = fails(run, capsys, "target.name=x", "drafter=suffix", "drafter@retrieval=suffix")
    assert "expected checkpoint=PATH with it" in alone
    known = "auto, early_exit, jacobi, lookahead, ngram_cache, none, prompt_lookup, slem, suffix, token_recycling"
    assert f"expected one of {known}" in fails(run, capsys, "drafter=sufix")
    assert "a group is set to null" in fails(run, capsys, "drafter=null")
    assert "max_tree_depth=1: expected at least 2" in fails(run, capsys, "drafter=suffix", "drafter.max_tree_depth=1")


def test_a_look_up_else_a_head(run, run_directory):
    written = run(
        f"checkpoint={run_directory / 'run'}",
        f"benchmark={run_directory / 'prompts.jsonl'}",
        "drafter@retrieval=prompt_lookup",
        "decoding.max_new_tokens=8",
        "decoding.temperature=1",
        "target.device=cpu",
        "limit=1",
        "compare=[]",
        "decoding.drafting=sampled",
        "quantize=int8",
        "cost_model.seconds=0",
        "cost_model.batch_sizes=[1]",
    )
    assert [row["drafter"] for row in written["results"]] == ["hybrid", "eagle3"]
    assert written["settings"]["retrieval"] == "prompt_lookup" and written["settings"]["quantization"] == "int8"
    assert {model["drafter"] for model in written["cost_models"]} <= {"eagle3"}


def test_drafters_made_of_drafters(run, run_directory, capsys):
    common = [
        f"benchmark={run_directory / 'prompts.jsonl'}",
        "decoding.max_new_tokens=8",
        "target.device=cpu",
        "limit=1",
        "compare=[]",
        "cost_model=null",
    ]
    run_at = f"checkpoint={run_directory / 'run'}"
    written = run(run_at, "drafter@ensemble=token_recycling", "ensemble.top_k=3", "decoding.temperature=1", *common)
    assert [row["drafter"] for row in written["results"]] == ["ensemble", "eagle3", "ensemble", "eagle3"]
    assert written["settings"]["ensemble"] == "token_recycling"
    target = f"target.name={run_directory / 'target'}"
    written = run(target, "drafter=early_exit", "drafter@inner=suffix", "decoding.temperature=0", *common)
    assert [row["drafter"] for row in written["results"]] == ["cascade", "early_exit"]
    assert written["results"][0]["lossless"] is True and written["settings"]["inner"] == "suffix"
    assert "an ensemble with 1 drafter: expected at least 2" in fails(run, capsys, run_at, "ensemble=true")
    assert "ensemble=suffix is no drafter: expected drafter@ensemble=NAME" in fails(
        run, capsys, run_at, "ensemble=suffix"
    )
    assert "inner=True is no drafter: expected drafter@inner=NAME" in fails(run, capsys, run_at, "inner=true")
    middle = fails(run, capsys, run_at, "drafter@inner=suffix")
    assert "the middle model of a cascade is eagle3: expected a draft model" in middle
    tree = [target, "drafter=early_exit", "drafter@inner=suffix", "decoding/shape=dynamic_tree", *common]
    assert "a cascade cannot draft a dynamic tree" in fails(run, capsys, *tree)


def test_overrides(run, run_directory):
    written = run(
        f"checkpoint={run_directory / 'run' / 'drafter'}",
        f"benchmark={run_directory / 'prompts.jsonl'}",
        "decoding.num_draft_tokens=3",
        "decoding.temperature=0.5",
        "decoding.max_new_tokens=6",
        "target.device=cpu",
        "limit=1",
        "compare=[]",
        "quantize=int8",
        "cost_model.seconds=0",
        "cost_model.batch_sizes=[2]",
    )
    found = [(row["label"], row["temperature"], row["drafting"]) for row in written["results"]]
    assert found == [("eagle3", 0.5, "greedy"), ("eagle3, sampled", 0.5, "sampled")]  # vLLM's way, and the other
    assert written["results"][0]["num_draft_tokens"] == 3 and written["settings"]["prompts"] == 1
    assert written["settings"]["quantization"] == "int8"


def fails(run, capsys, *overrides):
    with pytest.raises(SystemExit) as exit_status:
        run("target.device=cpu", *overrides)
    assert exit_status.value.code == 2
    printed = capsys.readouterr().err.strip().splitlines()
    errors = [line for line in printed if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in "".join(printed)
    return errors[0]


def test_a_target_that_was_tuned(run, run_directory, capsys, tmp_path):
    target = Target.load(str(run_directory / "target"), dtype="float32", device="cpu")
    save_drafter(trained(target), tmp_path / "tuned" / "drafter", target.identity)
    given = f"checkpoint={tmp_path / 'tuned'}", f"benchmark={run_directory / 'prompts.jsonl'}"
    short = "decoding.max_new_tokens=8", "decoding.temperature=0"
    written = run(*given, *short)
    name, by = written["settings"]["target"]["name"], written["settings"]["tuning"]["by"]
    assert name == f"{run_directory / 'target'}, tuned" and by == str((tmp_path / "tuned" / "drafter").resolve())
    assert all(each["lossless"] for each in written["results"])
    assert f"target: {run_directory / 'target'}, tuned by" in " ".join(capsys.readouterr().out.split())
    both = f"checkpoint=[{tmp_path / 'tuned'},{run_directory / 'run'}]"
    with pytest.raises(SystemExit):
        run(both, given[1], *short)
    assert "jacobi_forcing changes the target that eagle3 was trained for" in capsys.readouterr().err


def test_bad_checkpoints(run, run_directory, capsys, tmp_path, tokenizer):
    assert "checkpoint= is missing" in fails(run, capsys)
    assert "there is no drafter checkpoint" in fails(run, capsys, f"checkpoint={tmp_path / 'none'}")

    damaged = tmp_path / "damaged"
    damaged.mkdir()
    source = run_directory / "run" / "drafter"
    (damaged / "config.json").write_bytes((source / "config.json").read_bytes())
    (damaged / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:1000])
    assert "is damaged" in fails(run, capsys, f"checkpoint={damaged}")

    other = save_target(tokenizer, tmp_path / "other", seed=1)
    message = fails(
        run,
        capsys,
        f"checkpoint={source}",
        f"target.name={other}",
        f"benchmark={run_directory / 'prompts.jsonl'}",
    )
    assert "belongs to the target" in message and other in message


def test_bad_settings_and_prompts(run, run_directory, capsys, tmp_path):
    checkpoint = f"checkpoint={run_directory / 'run'}"
    assert "num_draft_tokens is 0" in fails(run, capsys, checkpoint, "decoding.num_draft_tokens=0")
    assert "does not exist" in fails(run, capsys, checkpoint, f"benchmark={tmp_path / 'none.jsonl'}")
    assert "unknown compare 'nothing': expected one of early_exit, jacobi" in fails(
        run, capsys, checkpoint, "compare=[nothing]"
    )
    for role in ("retrieval", "ensemble", "inner"):
        assert f"drafter@{role}= names what drafts nothing" in fails(run, capsys, checkpoint, f"drafter@{role}=auto")
    assert "unknown config key 'decoding.num_drafts'" in fails(run, capsys, checkpoint, "decoding.num_drafts=1")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("")
    assert "is empty" in fails(run, capsys, checkpoint, f"benchmark={prompts}")
    prompts.write_text('{"prompt": "fine"}\n{"prompt": \n')
    assert f"{prompts}:2 is not JSON" in fails(run, capsys, checkpoint, f"benchmark={prompts}")
    prompts.write_text(json.dumps({"prompt": "x y " * 200}))
    assert "1 of 1 prompts do not fit" in fails(run, capsys, checkpoint, f"benchmark={prompts}")
