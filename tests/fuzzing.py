"""Mutated inputs for everything that reads what others wrote.

    python tests/fuzzing.py --seconds 600 [--reader NAME] [--seed N]

A reader gives a right answer or a ``UserError`` of one sentence: never another exception, a hang, or memory that the
file does not hold. ``test_fuzzing.py`` runs a fixed part of it.
"""

import argparse
import contextlib
import json
import random
import resource
import shutil
import signal
import string
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdraft.errors import UserError

SECONDS = 10  # that an input may take; the slowest of ten thousand takes half a second
MEMORY = 2**30  # that an input may add to the address space
NASTY: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 2**31, 10**9, 10**12, 2**63, 2**64, 10**30, -(10**9), 0.0, -0.5, 1e-320,
    1e308, float("nan"), float("inf"), "", " ", "a", "0", "None", "../../etc/passwd", "/etc/passwd", "..", "\x00",
    "\ud800", "a\nb", "é\u2028", "x" * 5000, "float8", "embedded://..", [], [[]], [0], [None], [-1, 5], ["a"],
    {}, {"a": 1}, {"": {}},
)  # fmt: skip


class TooLongError(BaseException):
    """No Exception, so that no reader takes it for a damaged file."""


@dataclass
class Reader:
    """``read`` a directory like ``sample``; ``mend`` makes checksums right again after a mutation of one file."""

    name: str
    sample: Path
    read: Callable[[Path], object]
    mend: Callable[[Path, str], None] = lambda _folder, _file: None


# --- mutations --------------------------------------------------------------------------------------------------------


def mutate(data: bytes, name: str, rng: random.Random) -> bytes:
    """Another file: its bytes changed, or its JSON, or the JSON of a safetensors header."""
    kind = rng.random()
    if name.endswith(".safetensors") and kind < 0.6:
        size = int.from_bytes(data[:8], "little")
        header = _mutate_json(data[8 : 8 + size], rng)
        return len(header).to_bytes(8, "little") + header + data[8 + size :]
    if name.endswith(".json") and kind < 0.8:
        return _mutate_json(data, rng)
    if name.endswith(".jsonl") and kind < 0.8:
        lines = data.split(b"\n")
        place = rng.randrange(len(lines))
        lines[place] = _mutate_json(lines[place] or b"{}", rng)
        return b"\n".join(lines)
    for _ in range(rng.choice((1, 1, 2, 8))):
        data = _mutate_bytes(data, rng)
    return data


def _mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    begin = rng.randrange(len(data) + 1)
    end = min(len(data), begin + rng.choice((0, 1, 2, 8, 64)))
    match rng.randrange(6):
        case 0:
            new = rng.randbytes(end - begin)
        case 1:
            new = b""
        case 2:
            new = data[begin:end] * 2
        case 3:
            new = rng.choice((b"\x00", b"\xff" * 8, b"{", b"}", b"[" * 5000, b'"', b"\n", b"1" * 5000, b"\xef\xbb\xbf"))
        case 4:
            return data[:begin]
        case _:
            new = bytes([data[begin] ^ (1 << rng.randrange(8))]) if begin < len(data) else b"\xf0"
            end = begin + 1
    return data[:begin] + new + data[end:]


def _mutate_json(data: bytes, rng: random.Random) -> bytes:
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        value = _mutate_value(value, rng)
    try:
        return json.dumps(value).encode()
    except RecursionError:  # too deep twice
        return b"[" * 5000


def _mutate_value(value: Any, rng: random.Random) -> Any:
    if not isinstance(value, dict | list) or not value or rng.random() < 0.03:
        return _other(value, rng)
    value = dict(value) if isinstance(value, dict) else list(value)
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    action = rng.random()
    if action < 0.12:
        del value[key]
    elif action < 0.2 and isinstance(value, dict):
        value[rng.choice(("num_labels", "layers", "a", *string.ascii_lowercase[:2], key + "s"))] = value[key]
    elif action < 0.25 and isinstance(value, list):
        value.insert(key, value[key])
    else:
        value[key] = _mutate_value(value[key], rng)
    return value


def _other(value: Any, rng: random.Random) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.4:
        return rng.choice((value + 1, value - 1, value * 2, -value, str(value), float(value)))
    if rng.random() < 0.02:
        deep: Any = value
        for _ in range(rng.choice((50, 500))):
            deep = [deep]
        return deep
    return rng.choice(NASTY)


# --- the property -----------------------------------------------------------------------------------------------------


class Broken(AssertionError):
    """A reader that did what none may do."""


@contextlib.contextmanager
def limits(memory: int = MEMORY) -> Iterator[None]:
    """No more than ``memory`` on top of what the process has mapped; the alarm raises ``TooLongError``."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)

    def ring(*_: object) -> None:
        raise TooLongError

    previous = signal.signal(signal.SIGALRM, ring)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def outcome(read: Callable[[], object]) -> str:
    """What ``read`` came to: "answer" or "sentence". Raises ``Broken``."""
    signal.alarm(SECONDS)
    try:
        read()
    except UserError as error:
        text = str(error)
        if not text.strip() or "\n" in text or "allocate" in text or len(text) > 2000:
            raise Broken(f"no sentence: {text[:3000]!r}") from error
        return "sentence"
    except TooLongError as error:
        where = "".join(traceback.format_tb(error.__traceback__)[-3:])
        raise Broken(f"it took more than {SECONDS} s: {where}") from error
    except Exception as error:
        raise Broken(f"{type(error).__name__}: {str(error)[:500]}") from error
    finally:
        signal.alarm(0)
    return "answer"


def fuzz(reader: Reader, folder: Path, seeds: Iterator[int] | range) -> Counter[str]:
    """Read a mutated copy of the sample for each seed. Raises ``Broken`` with the seed, and leaves that copy behind."""
    found: Counter[str] = Counter()
    files = {
        str(path.relative_to(reader.sample)): path.read_bytes() for path in reader.sample.rglob("*") if path.is_file()
    }
    assert outcome(lambda: reader.read(reader.sample)) == "answer", f"{reader.name} cannot read its sample"
    with limits(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            rng = random.Random(f"{reader.name} {seed}")
            for name, data in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data)
            name = rng.choice(sorted(files))
            (folder / name).write_bytes(mutate(files[name], name, rng))
            if rng.random() < 0.7:
                reader.mend(folder, name)
            try:
                found[outcome(lambda: reader.read(folder))] += 1
            except Broken as error:
                raise Broken(f"{reader.name}, seed {seed}, {name} in {folder}: {error}") from error
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found


def main() -> None:
    """Fuzz all readers in turn until the time is over."""
    from tests.fuzzed_readers import readers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--reader", help="this one alone")
    parser.add_argument("--seed", type=int, help="the first; default: by the clock")
    parser.add_argument("--keep-going", action="store_true", help="print what is broken and go on")
    options = parser.parse_args()
    first = options.seed if options.seed is not None else int(time.time()) * 1000
    end = time.monotonic() + options.seconds
    totals: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as samples:
        chosen = [reader for reader in readers(Path(samples)) if options.reader in (None, reader.name)]
        while time.monotonic() < end:
            for reader in chosen:
                for begin in range(first, first + 100, 10):
                    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
                    try:
                        totals.setdefault(reader.name, Counter()).update(fuzz(reader, folder, range(begin, begin + 10)))
                        folder.rmdir()
                    except Broken as error:
                        totals.setdefault(reader.name, Counter())["broken"] += 1
                        print(error)
                        traceback.print_exception(error.__cause__.__cause__)
                        if not options.keep_going:
                            sys.exit(1)
            first += 100
    for name, counts in totals.items():
        print(f"{name}: {dict(counts)}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
