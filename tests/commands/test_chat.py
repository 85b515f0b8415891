"""``specdraft chat`` as a user runs it: questions from a pipe, a recording, and every bad input in one sentence."""

import io
import re
import sys

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from specdraft.chat import conversation
from specdraft.commands.chat import main
from specdraft.drafters.checkpoint import save_drafter
from specdraft.drafters.eagle import Eagle3
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.embedded.tokenizer import train_tokenizer
from specdraft.targets import Target
from tests.drafters.jacobi_forcing.conftest import trained
from tests.fakes import tiny_llama

MEASURED = r"acceptance length \d\.\d\d · \d+\.\d tokens/s · speedup \d+\.\d\d over plain decoding \(\d+\.\d tokens/s\)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """``target/``, and the drafters ``lookup/`` and ``run/drafter/`` of it."""
    path = tmp_path_factory.mktemp("chat")
    tokenizer = train_tokenizer(["def add(a, b): return a + b"] * 9, 300, 256)
    tokenizer.save_pretrained(path / "target")
    tiny_llama(300, context=256, num_hidden_layers=6).save_pretrained(path / "target")
    target = Target.load(str(path / "target"), device="cpu")
    save_drafter(PromptLookup(), path / "lookup", target.identity)
    head = Eagle3.for_target(target, torch.arange(0, 300, 2))
    save_drafter(head, path / "run" / "drafter", target.identity, {"decoding": {"num_draft_tokens": 2}})
    return path


@pytest.fixture
def chat(monkeypatch, capsys):
    """chat(settings..., lines=...) -> exit status, standard output, standard error."""

    def run(*settings: str, lines: str = "") -> tuple[int, str, str]:
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", ["chat", "target.device=cpu", "decoding.max_new_tokens=16", *settings])
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        status = 0
        try:
            main()
        except SystemExit as ended:
            status = ended.code
        return (status, *capsys.readouterr())

    return run


def test_questions_from_a_pipe(chat, folder):
    status, out, error = chat(
        f"checkpoint={folder / 'run'}", "plain_every=1", lines="def add\n/new\ndef add\n/quit\nnever\n"
    )
    assert status == 0, error
    heading, *rest = out.splitlines()
    assert heading == f"{folder / 'target'} · eagle3, chain of 2, most likely tokens · temperature 0"
    assert out.count("> def add\n") == 2 and "never" not in out and "\x1b" not in out
    first, second = "\n".join(rest).split("> /new\na new conversation\n")
    answers = [re.split(MEASURED, part)[0] for part in (first, second)]
    assert answers[0] == answers[1]
    assert len(re.findall(MEASURED, out)) == 3 and "2 drafted answers: acceptance length" in out


def test_without_a_checkpoint_prompt_lookup_drafts_or_nothing(chat, folder, tmp_path):
    name, picture = f"target.name={folder / 'target'}", tmp_path / "new" / "chat.svg"
    status, out, error = chat(name, 'questions=["def add", "why, then?"]', f"record={picture}")
    assert status == 0, error
    assert "prompt_lookup, chain of 5" in out and "> why, then?\n" in out and f"recorded: {picture}" in out
    assert picture.read_text("utf-8").startswith("<svg") and "def" in picture.read_text("utf-8")
    status, out, error = chat(name, "drafter=none", "questions=def add", "decoding.temperature=1")
    assert status == 0, error
    assert "no drafter · temperature 1" in out and "tokens/s, plain decoding" in out


def test_a_tuned_target_answers(chat, folder, tmp_path):
    target = Target.load(str(folder / "target"), device="cpu")
    drafter = trained(target)
    save_drafter(drafter, tmp_path / "drafter", target.identity)
    status, out, error = chat(f"checkpoint={tmp_path}", 'questions=["def add"]')
    assert status == 0, error
    assert f"{folder / 'target'}, tuned · jacobi_forcing, chain of 5" in out and "acceptance length" in out


def test_a_target_of_the_configuration(chat, monkeypatch):
    def stop(self, *arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(conversation.Conversation, "__init__", stop)
    assert chat("target=tiny", "target.device=cpu")[0] == 130


def test_what_was_answered_before_a_bad_question_is_recorded(chat, folder, tmp_path):
    settings = [f"checkpoint={folder / 'lookup'}", f"record={tmp_path / 'chat.svg'}"]
    status, _, error = chat(*settings, lines="def add\n/nwe\n")
    assert status == 2 and "error: /nwe is no command here" in error and (tmp_path / "chat.svg").is_file()
    status, _, error = chat(*settings, lines="word " * 400)
    assert status == 2 and "expected room for an answer" in error


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], "there is nothing to talk to: expected checkpoint=PATH of a drafter"),
        (["checkpoint=nowhere"], "there is no drafter checkpoint at nowhere"),
        (["target=tiny", "record=chat.png"], "record is chat.png: expected the path of a picture, FILE.svg"),
        (["target=tinny"], "unknown target 'tinny': expected one of"),
        (["target=tiny", "decoding.temperature=-1"], "temperature is -1"),
        (["target.name=nowhere", "decoding.temperature=[0,1]"], "expected one number"),  # seen before the target is
        (["target.name=nowhere", "plain_every=-1"], "plain_every is -1"),
        (["target=tiny", "decoding.num_draft_tokens=0"], "decoding.num_draft_tokens is 0"),
        (["target=tiny", "drafter=auto"], "drafter=auto chooses by measuring"),
        (["checkpoint=nowhere", "drafter=suffix"], "checkpoint= and drafter=suffix both say what drafts"),
        (["checkpoint=nowhere", "drafter=none"], "checkpoint= and drafter=none both say what drafts"),
    ],
)
def test_bad_input(chat, settings, said):
    status, _, error = chat(*settings)
    assert status == 2 and said in error


def test_a_drafter_of_another_target(chat, folder, tmp_path):
    tiny_llama(300, seed=1).save_pretrained(tmp_path)
    train_tokenizer(["def"], 300, 96).save_pretrained(tmp_path)
    status, _, error = chat(f"checkpoint={folder / 'run'}", f"target.name={tmp_path}")
    assert status == 2 and "this checkpoint belongs to the target" in error
