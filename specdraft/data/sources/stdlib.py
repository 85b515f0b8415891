"""Documented functions of the running interpreter's own standard library, as conversations.

Every machine with Python has this corpus, so the default recipe needs no download. Files are split by a hash of their
path: the embedded target, its drafters and the evaluation agree on what is held out, on every Python version, without a
list that could go stale."""

import ast
import hashlib
import json
import os
import sys
import sysconfig
import textwrap
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path

import numpy as np

from specdraft.data.sources.base import Conversation, Selection, check_request, digest
from specdraft.errors import UserError
from specdraft.files import cache_directory, write_text
from specdraft.text import fingerprint

# 99.5 % of the library's prompts are shorter, and 2,000 characters of Python are some 600 tokens: with room for an
# answer they fit a context of 1,024.
MAX_PROMPT_CHARACTERS = 2000
# Vendored packages are not the standard library; the two tables are data, not code.
_NOT_CODE = {"site-packages", "dist-packages", "__pycache__", "pydoc_data", "encodings", "ensurepip"}
_TEST_FOLDERS = {"test", "tests", "idle_test"}


@dataclass(frozen=True)
class Function:
    """A documented function: ``prompt`` is its signature and docstring, ``body`` the rest, both dedented."""

    path: str
    name: str
    prompt: str
    body: str
    line: int
    is_method: bool


@dataclass(frozen=True)
class PythonStdlib:
    """The user gives signature and docstring, the assistant the body; the category is ``function`` or ``method``.
    Splits are by file. Of equal prompts the first counts, and those of the training split are not held out again."""

    include_tests: bool = False
    root: str | None = None
    name = "python-stdlib"
    max_malformed = 0  # the library is well-formed

    def conversations(self, split: str, limit: int | None = None) -> Selection:
        """As ``Source`` says."""
        check_request(split, limit)
        found = _conversations(self.root, self.include_tests, split)
        if not found:
            said = f"{self.root or 'the standard library'} has no documented functions in its {split} split"
            raise UserError(f"{said}: expected Python source files")
        chosen = found[:limit]
        digests = np.frombuffer(b"".join(map(digest, chosen)), dtype=np.uint8).reshape(-1, 16)
        return Selection(chosen.__getitem__, range(len(chosen)), digests)

    def prompts(self, split: str, limit: int | None = None) -> list[Conversation]:
        """Conversations for evaluation: those whose prompts leave room for an answer in a context of 1,024 tokens."""
        found = self.conversations(split)
        return [c for c in found if len(c.prompt_messages[0]["content"]) <= MAX_PROMPT_CHARACTERS][:limit]


def files(root: Path | None = None) -> list[str]:
    """Relative posix paths of the library's Python files, sorted; vendored packages and tables left out."""
    root = root or Path(sysconfig.get_path("stdlib"))
    found: list[str] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_CODE]  # site-packages may hold a hundred thousand
        found.extend((Path(folder) / name).relative_to(root).as_posix() for name in names if name.endswith(".py"))
    return sorted(found)


def is_test(path: str) -> bool:
    """Whether ``path`` belongs to the library's own test suite (some distributions leave it out)."""
    return bool(_TEST_FOLDERS.intersection(path.split("/")))


def split_of(path: str) -> str:
    """The split that the file at this relative path belongs to: 90 % train, 5 % validation, 5 % test."""
    bucket = int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") % 100
    return "test" if bucket < 5 else "validation" if bucket < 10 else "train"


def read(path: str, root: Path | None = None) -> str:
    """The file's text; undecodable bytes (the library tests some on purpose) become replacement marks."""
    root = root or Path(sysconfig.get_path("stdlib"))
    return (root / path).read_text(encoding="utf-8", errors="replace")


def functions(source: str, path: str) -> Iterator[Function]:
    """Yield the documented functions and methods of a source file, outermost first.
    Unparsable files (the library keeps some for its own tests) yield nothing, and so do bodies of one line."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = source.splitlines()
    for node in _statements(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or ast.get_docstring(node) is None:
            continue
        doc_end = node.body[0].end_lineno or 0
        if len(node.body) < 2 or node.body[1].lineno <= doc_end:
            continue
        # Dedent the whole function at once, so that the body keeps its indentation below the signature.
        text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).splitlines()
        body_start = doc_end - node.lineno + 1
        prompt, body = "\n".join(text[:body_start]).rstrip(), "\n".join(text[body_start:]).strip("\n").rstrip()
        if prompt and body.count("\n") >= 1:
            first = (*node.args.posonlyargs, *node.args.args)[:1]
            is_method = bool(first) and first[0].arg in ("self", "cls")
            yield Function(path, node.name, prompt, body, node.lineno, is_method)


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Those of ``ast.walk``, in its order; expressions, nine of ten nodes, hold no function with a docstring."""
    todo = deque[ast.AST]([tree])
    while todo:
        node = todo.popleft()
        yield node
        for name in ("body", "handlers", "orelse", "finalbody", "cases"):
            if isinstance(below := getattr(node, name, None), list):
                todo.extend(below)


@cache
def _conversations(root: str | None, include_tests: bool, split: str) -> tuple[Conversation, ...]:
    """All conversations of a split, shuffled by a hash of their ids."""
    folder = Path(root) if root else None
    if folder is not None and not folder.is_dir():
        raise UserError(f"the folder {root} does not exist: expected a folder with Python files, or null")
    known = () if split == "train" else _conversations(root, include_tests, "train")
    taken = {conversation.prompt_messages[0]["content"] for conversation in known}
    found: list[Conversation] = []
    for function in _all_functions(folder, include_tests):
        if split_of(function.path) == split and function.prompt not in taken:
            taken.add(function.prompt)
            category = "method" if function.is_method else "function"
            prompt = ({"role": "user", "content": function.prompt},)
            name = f"{function.path}:{function.line}:{function.name}"
            found.append(Conversation(name, category, prompt, function.body))
    return tuple(sorted(found, key=lambda c: hashlib.sha256(c.id.encode()).digest()))


@cache
def _all_functions(root: Path | None, include_tests: bool) -> tuple[Function, ...]:
    """Those of all files. Parsing takes seconds, of every rank and every run, so the library's are kept on disk."""
    paths = [path for path in files(root) if include_tests or not is_test(path)]
    parsed = (function for path in paths for function in functions(read(path, root), path))
    if root is not None:
        return tuple(parsed)
    library = Path(sysconfig.get_path("stdlib"))
    stats = [(path, stat.st_size, stat.st_mtime_ns) for path in paths for stat in [(library / path).stat()]]
    kept = cache_directory() / "python-stdlib" / f"{fingerprint([sys.version, stats, Path(__file__).read_text()])}.json"
    with suppress(OSError, ValueError, TypeError):  # not there, or damaged
        return tuple(Function(*fields) for fields in json.loads(kept.read_text()))
    found = tuple(parsed)
    with suppress(OSError, UserError):  # a home that cannot be written to costs these seconds again, no more
        write_text(kept, json.dumps([astuple(function) for function in found]))
    return found
