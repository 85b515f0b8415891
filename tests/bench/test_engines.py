"""Command lines, and where an engine is found."""

import json
import shutil
import sys

import pytest

from specdraft.bench.engines import SGLangServer, VLLMServer
from specdraft.errors import UserError


def test_vllm_by_its_program_or_by_a_python(program):
    words = VLLMServer(str(program), flags=("--enforce-eager",)).server("a/b", "main", ["--x"], 81, "name")
    assert words[:3] == [str(program), "serve", "a/b"] and words[-2:] == ["--enforce-eager", "--x"]
    assert {"--revision", "main", "--port", "81", "--served-model-name", "name"} <= {*words}
    assert "--no-enable-prefix-caching" in words
    words = VLLMServer(sys.executable, max_model_len=99, prefix_caching=True).server("a/b", None, [], 81, "name")
    assert words[1:6] == ["-P", "-m", "vllm.entrypoints.openai.api_server", "--model", "a/b"]
    assert "--enable-prefix-caching" in words and words[words.index("--max-model-len") + 1] == "99"


def test_options_of_drafts():
    assert json.loads(VLLMServer().ngram(2)[1])["num_speculative_tokens"] == 2
    assert json.loads(VLLMServer().head("eagle3", "dir", 3)[1])["model"] == "dir"
    assert VLLMServer().head("redrafter", "dir", 3) is None
    words = SGLangServer(sys.executable).server("a", None, SGLangServer().head("eagle3", "dir", 3), 81, "n")
    assert "sglang.launch_server" in words and words[-2:] == ["--speculative-num-draft-tokens", "4"]
    assert SGLangServer().head("medusa", "dir", 3) is None and "NGRAM" in SGLangServer().ngram(3)


def test_no_engine_is_one_sentence_that_names_the_setting(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"vllm is not installed.*expected engine\.command=PATH.* or url="):
        VLLMServer().words()
    with pytest.raises(UserError, match=r"engine\.command is 'nowhere', which is no program"):
        VLLMServer("nowhere").words()


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    found = VLLMServer().environment(3)
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "7" and found["OMP_NUM_THREADS"] == "3"
