"""``specdraft bench`` from a target to its report, with an engine that is a fake program."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from specdraft.commands.bench import main
from tests.bench.conftest import program, world

__all__ = ["program", "world"]


@pytest.fixture
def bench(called, tmp_path):
    """bench(settings...) -> exit status, standard output, standard error."""
    return lambda *settings: called(main, *settings, f"hydra.run.dir={tmp_path / 'out'}")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"turns": ["x" * n, "more"], "category": "ab"[n % 2]} for n in range(1, 5)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"benchmark={path}"


def test_from_a_target_to_the_settings_of_its_engine(bench, program, prompts, tmp_path):
    settings = ["target=tiny", f"engine.command={program}", "draft_tokens=[2]", "concurrency=[1,2]", "rate=[200]"]
    status, said, errors = bench(*settings, prompts, "objective.ttft_ms=5000", "price_per_hour=1.0")
    assert status == 0, errors
    assert "ngram K=2" in said and "0 of 8" in said and "200 requests a second" in said
    found = json.loads((tmp_path / "out/bench.json").read_text())
    assert ([each["requests"] for each in found["results"]] == [8] * 6 and found["energy"] == []) or found["energy"]
    assert found["results"][1]["acceptance_length"] == 3.0 and found["memory"][0]["cache_tokens_lost"] == 200
    assert (tmp_path / "out/report.html").is_file()
    assert yaml.safe_load((tmp_path / "out/vllm.yaml").read_text())["model"].endswith("tiny")


def test_running_servers(bench, world, prompts, tmp_path):
    plain, head = world(), world(per_round=3)
    head.trouble = lambda prompt, n: "token" if prompt == "xx" else None
    status, said, errors = bench(f"url={head.url}", f"plain_url={plain.url}", prompts, "concurrency=[2]")
    assert status == 0, errors
    assert "1 of 8" in said and not (tmp_path / "out/vllm.yaml").exists()
    assert bench(f"url={head.url}", prompts, "concurrency=[2]", "max_prompts_per_category=1")[0] == 0
    assert len(json.loads((tmp_path / "out/bench.json").read_text())["contenders"]) == 1
    assert not any("chat_template_kwargs" in asked for asked in head.asked)
    head.asked.clear()
    options = ["target.chat_template_options={enable_thinking: false}"]
    assert bench(f"url={head.url}", prompts, "concurrency=[2]", *options)[0] == 0
    assert all(asked["chat_template_kwargs"] == {"enable_thinking": False} for asked in head.asked)
    status, _, errors = bench(f"url={head.url}", prompts, "target.chat_template_options=[thinking]")
    assert status != 0 and "expected names and values" in errors


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["benchmark=python-stdlib"], "there is nothing to serve: expected checkpoint=PATH, target=NAME, or url="),
        (["target=tiny", "engine.command=nowhere"], "engine.command is 'nowhere', which is no program"),
        (
            ["target=tiny", f"engine.command={sys.executable}", "target.chat_template_options={thinking: false}"],
            "the target's chat template names no option 'thinking'",
        ),
        (["target=tiny", "concurrency=[]"], "concurrency and rate are both empty"),
        (["target=tiny", "engine.name=none"], "engine.name is 'none': expected one of vllm, sglang"),
        (["target=tiny", "rounds=0"], "rounds is 0"),
        (["url=http://127.0.0.1:9"], "no OpenAI-compatible server answers"),
    ],
)
def test_bad_input(bench, settings, said):
    status, _, errors = bench(*settings)
    assert status == 2 and said in errors


def test_an_engine_that_dies_is_one_sentence(bench, program, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n{"prompt": "die"}\n')
    settings = ["target=tiny", f"engine.command={program}", "engine.flags=[--mortal]", "draft_tokens=[1]"]
    status, _, errors = bench(*settings, f"benchmark={path}", "concurrency=[1]", "rounds=6")
    assert status == 2 and "died with status 3, and what it measured is lost" in errors


def test_ctrl_c_leaves_no_server_behind(program, prompts, tmp_path):
    """A process of its own, interrupted as a terminal does it, in the middle of the measurement."""
    command = [sys.executable, "-m", "specdraft", "bench", "target=tiny", f"engine.command={program}", prompts]
    command += ["draft_tokens=[1]", "rounds=100000", f"hydra.run.dir={tmp_path / 'out'}"]
    command += [f"engine.flags=[--mark,{tmp_path}]"]
    log = tmp_path / "log"
    with log.open("w") as file:
        run = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        try:
            deadline = time.monotonic() + 60
            while "serving" not in log.read_text() and time.monotonic() < deadline:
                time.sleep(0.1)
            assert len(processes_of(tmp_path)) == 3  # the measurement and two engines
            os.kill(run.pid, signal.SIGINT)
            assert run.wait(30) == 130, log.read_text()
            assert processes_of(tmp_path) == []
        finally:  # a test that failed leaves nothing behind either
            for process in processes_of(tmp_path):
                os.kill(int(process), signal.SIGKILL)


def processes_of(folder: Path) -> list[str]:
    """The processes whose command line names it."""
    return subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True, check=False).stdout.split()
