"""Real Python from the running interpreter's own standard library: files, splits, and functions.

Every machine with Python has this corpus, so the default recipe needs no download. Files are split by a
hash of their path: the embedded target, its drafters and the evaluation agree on what is held out, on every
Python version, without a list that could go stale.
"""

import ast
import hashlib
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SPLITS = ("train", "validation", "test")
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


def files(root: Path | None = None) -> list[str]:
    """Relative posix paths of the library's Python files, sorted; vendored packages and tables left out."""
    root = root or Path(sysconfig.get_path("stdlib"))
    found = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted(path.as_posix() for path in found if not _NOT_CODE.intersection(path.parts))


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

    Unparsable files (the library keeps some for its own tests) yield nothing. Bodies of one line are left
    out: there is nothing to draft in them.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or ast.get_docstring(node) is None:
            continue
        if len(node.body) < 2 or node.body[1].lineno <= (node.body[0].end_lineno or 0):
            continue
        doc_end = node.body[0].end_lineno or 0
        # Dedent the whole function at once, so that the body keeps its indentation below the signature.
        text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).splitlines()
        cut = doc_end - node.lineno + 1
        prompt, body = "\n".join(text[:cut]).rstrip(), "\n".join(text[cut:]).strip("\n").rstrip()
        if prompt and body.count("\n") >= 1:
            first = (*node.args.posonlyargs, *node.args.args)[:1]
            is_method = bool(first) and first[0].arg in ("self", "cls")
            yield Function(path, node.name, prompt, body, node.lineno, is_method)
