"""The documentation builds without a warning, and what it tells people to type exists."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from specdraft.cli import COMMANDS

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
OWN = "add-a-drafter.md"  # lets the reader write files, and has a test of its own
SCRIPTS = {"train.py": "train", "evaluate.py": "evaluate", "export": "export"}
COMMAND = re.compile(r"^ *(?:\w+=\S+ )*(?:python|make|specdraft) [^#`\n]+", re.MULTILINE)


def commands() -> list[tuple[str, str]]:
    """(page, command) of every code block of a shell."""
    found = []
    for page in (page for page in PAGES if page.name != OWN):
        for block in re.findall(r" *```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            lines = block.replace("\\\n", " ")
            found += [(page.name, match.strip()) for match in COMMAND.findall(lines)]
    return found


def test_the_site_builds(tmp_path):
    """Every link within it leads somewhere: broken ones are warnings, and warnings are errors."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-n", "docs", str(tmp_path)]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "acceptance length" in (tmp_path / "glossary.html").read_text()
    for page in (REPOSITORY / "docs").rglob("*.md"):
        assert (tmp_path / page.relative_to(REPOSITORY / "docs")).with_suffix(".html").is_file()


def test_there_are_commands_on_every_page_that_needs_them():
    assert {"README.md", "quickstart.md", "serving.md", "recipes.md"} <= {page for page, _ in commands()}


@pytest.mark.parametrize(("page", "command"), commands())
def test_what_people_are_told_to_type_exists(page, command):
    words = shlex.split(command)
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    if words[0] == "make":
        targets = {word for word in words[1:] if "=" not in word}
        rules = re.findall(r"^([a-z0-9-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
        assert targets and targets <= set(rules)
        return
    if words[1] == "-m" and words[2].startswith(("sglang.", "vllm.")):
        return  # an engine's own
    if words[1] == "-m":
        module = REPOSITORY.joinpath(*words[2].split("."))
        assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()
        return
    if words[0] == "specdraft":
        assert words[1] in COMMANDS
        if words[1] == "import":  # options of its own
            return
    elif words[1] not in SCRIPTS:
        assert (REPOSITORY / words[1]).is_file()
        return
    overrides = [word for word in words[2:] if "=" in word]
    if "-m" in words:  # of a sweep the first
        overrides = [re.sub(r"=([^,\[{]+),.*", r"=\1", override) for override in overrides]
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base=None):
        assert compose(SCRIPTS.get(words[1], words[1]), overrides)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != OWN], ids=lambda page: page.name)
def test_named_files_exist(page):
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:benchmarks|conf|docs|tests|specdraft|notebooks)/[\w./-]+)`", text)
    named += [
        f"benchmarks/results/{name}" for name in re.findall(r"`(?:benchmarks/results/)?([\w-]+-\d{4}\.json)`", text)
    ]
    missing = [
        name for name in named if not (REPOSITORY / name).exists() and not (REPOSITORY / "specdraft" / name).exists()
    ]
    assert missing == []
