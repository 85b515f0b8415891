"""Change the code in small ways and see whether a test fails: ``make mutants``, ``make mutants ARGS="losses rules"``.

A mutant that no test notices is a survivor. Those that change nothing a caller can see are listed in accepted.toml with
the reason; any other ends the command with status 1. Survivors and counts go to build/mutants.json.

The tests of a module are collected once. Each mutant is a fork of that process in which the functions of the changed
file have the code of the mutant, so that it costs the tests alone: those that reach the changed lines, the shortest
first, then the module's others. What runs when a module is imported is changed by importing everything again. The
working tree is never touched. (mutmut 3.8 leaves out decorated functions and defaults of classes; cosmic-ray 8.7 starts
Python and torch again for each mutant.)
"""

import argparse
import contextlib
import gc
import importlib.abc
import importlib.util
import json
import os
import resource
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NoReturn

from tests.mutants.operators import Mutant, diff, mutants

REPOSITORY = Path(__file__).parents[2]
ACCEPTED = Path(__file__).with_name("accepted.toml")
# Which tests are to notice a change; those in the same process as the module alone.
TESTS = {
    "specdraft.losses.divergence": ["tests/losses"],
    "specdraft.losses.chunked": ["tests/losses"],
    "specdraft.losses.eager": ["tests/losses"],
    "specdraft.losses.windows": ["tests/losses"],
    "specdraft.drafters.alignment": ["tests/drafters/test_alignment.py", "tests/drafters/eagle"],
    "specdraft.drafters.heads": [
        f"tests/drafters/test_{name}.py" for name in ("heads", "last_state", "medusa", "hydra")
    ],
    "specdraft.drafters.last_state": [f"tests/drafters/test_{name}.py" for name in ("last_state", "heads", "medusa")],
    "specdraft.drafters.redrafter": ["tests/drafters/test_redrafter.py", "tests/drafters/test_last_state.py"],
    "specdraft.drafters.medusa": ["tests/drafters/test_medusa.py", "tests/drafters/test_last_state.py"],
    "specdraft.drafters.hydra": ["tests/drafters/test_hydra.py", "tests/drafters/test_last_state.py"],
    "specdraft.drafters.draft_tree_builder": ["tests/drafters/test_draft_tree_builder.py"],
    "specdraft.drafters.causal_attention": ["tests/drafters/test_causal_attention.py"],
    "specdraft.drafters.eagle.eagle1": ["tests/drafters/eagle"],
    "specdraft.drafters.eagle.eagle3": ["tests/drafters/eagle"],
    "specdraft.drafters.eagle.forward": ["tests/drafters/eagle"],
    "specdraft.drafters.eagle.head": ["tests/drafters/eagle"],
    "specdraft.drafters.rotary": ["tests/drafters/eagle"],
    "specdraft.drafters.unrolled_keys": ["tests/drafters/test_unrolled_keys.py"],
    "specdraft.training.global_batch": ["tests/training/test_global_batch.py"],
    "specdraft.data.packing": ["tests/data/test_packing.py"],
    "specdraft.decoding.pace": ["tests/decoding/test_pace.py"],
    "specdraft.decoding.pacing": ["tests/decoding/test_pacing.py", "tests/decoding/test_pace.py"],
    "specdraft.decoding.rules": [
        "tests/decoding/test_rules.py",
        "tests/decoding/test_rules_trees.py",
        "tests/decoding/test_rules_lossy.py",
    ],
}
PATIENCE, FACTOR = 4, 3  # seconds of the processor that a mutant may take, beside FACTOR times what its tests took


@dataclass
class Outcome:
    """What became of the mutants of a module."""

    total: int = 0
    killed: int = 0
    timeouts: int = 0
    accepted: int = 0
    survivors: list[dict[str, Any]] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Baseline:
    """The tests of a module without a change: seconds by test, and the tests that reach a line."""

    seconds: dict[str, float]
    reached: dict[int, set[str]]

    def select(self, mutant: Mutant) -> list[str]:
        """The tests that reach the changed lines, the shortest first; of what runs at import, all."""
        if mutant.at_import:
            return self.all
        chosen = set().union(*(self.reached.get(line, set()) for line in mutant.lines))
        return sorted(chosen, key=lambda test: self.seconds[test])

    @property
    def all(self) -> list[str]:
        """Every test, the shortest first."""
        return sorted(self.seconds, key=lambda test: self.seconds[test])


class Reach:
    """Which lines of one file are run."""

    def __init__(self, path: Path) -> None:
        self.path, self.lines = str(path), set[int]()
        self._calls: Counter[Any] = Counter()

    def __enter__(self) -> set[int]:
        sys.settrace(self._call)
        return self.lines

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _call(self, frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != self.path:
            return None
        self._calls[frame.f_code] += 1
        return self._line if self._calls[frame.f_code] <= 50 else None  # statistics call a function 100,000 times

    def _line(self, frame: Any, event: str, argument: Any) -> Any:
        self.lines.add(frame.f_lineno)
        return self._line


class Changed(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports one module from a source of its own."""

    def __init__(self, module: str, path: Path, source: str) -> None:
        self.module, self.path, self.source = module, path, source

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self.module:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)  # type: ignore[arg-type]

    def get_source(self, fullname: str) -> str:
        return self.source

    def get_filename(self, fullname: str) -> str:
        return str(self.path)

    def is_package(self, fullname: str) -> bool:
        return False


def fork(task: Callable[[], int]) -> int:
    """The id of a process that ends with the status ``task`` gives, and is silent."""
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        status = task()
    finally:
        os._exit(status)


def refuse(message: str) -> NoReturn:
    """End the process of a module; pytest would wrap the message in its own traceback."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(2)


def functions_of(path: Path) -> dict[str, list[FunctionType]]:
    """The functions that a file has defined, by qualified name, whatever wraps them."""
    found = defaultdict(list)
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__code__.co_filename == str(path):
            found[thing.__code__.co_qualname].append(thing)
    return found


def replace_code(functions: dict[str, list[FunctionType]], mutant: Mutant, path: Path) -> bool:
    """Give the functions the code of the mutant; False where that cannot be done."""

    def codes(code: CodeType) -> Iterator[CodeType]:
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield constant
                yield from codes(constant)

    changed = defaultdict(list)
    for code in codes(compile(mutant.source, str(path), "exec")):
        changed[code.co_qualname].append(code)
    for name, live in functions.items():
        if len(changed[name]) != 1 or len({function.__code__ for function in live}) != 1:
            if mutant.function.startswith(name.partition(".<locals>")[0]):
                return False
            continue
        for function in live:
            if len(function.__code__.co_freevars) != len(changed[name][0].co_freevars):
                return False
            function.__code__ = changed[name][0]
    return True


class Trials:
    """A pytest plugin that runs the collected tests once for each mutant instead of once."""

    def __init__(self, module: str, path: Path, tests: Sequence[str], accepted: set[Any], jobs: int) -> None:
        self.module, self.path, self.tests, self.accepted, self.jobs = module, path, tests, accepted, jobs
        self.source = path.read_text("utf-8")
        self.outcome = Outcome()
        self.survived: set[tuple[str, str, str]] = set()

    def pytest_runtestloop(self, session: Any) -> bool:
        if session.testsfailed or not session.items:
            refuse(f"{' '.join(self.tests)} cannot be collected")
        self.items = {item.nodeid: item for item in session.items}
        self.functions = functions_of(self.path)
        gc.freeze()
        began = time.monotonic()
        self.baseline = self.measure()
        found = mutants(self.source)
        self.outcome.total = len(found)
        for number, (mutant, became) in enumerate(self.run(found), start=1):
            self.count(mutant, became)
            if number % 25 == 0 or number == len(found):
                seconds = time.monotonic() - began
                print(f"{self.module}: {number} of {len(found)}, {seconds:.0f} s", file=sys.stderr, flush=True)
        self.outcome.stale = [" | ".join(key) for key in sorted(self.accepted - self.survived)]
        self.outcome.survivors.sort(key=lambda entry: entry["line"])
        self.outcome.seconds = round(time.monotonic() - began, 1)
        return True

    def passes(self, tests: Sequence[str]) -> int:
        """Run tests one after the other until one fails: 0 if none does."""
        from _pytest.runner import runtestprotocol

        items = [self.items[test] for test in tests]
        for item, following in zip(items, [*items[1:], None], strict=True):
            if any(report.failed for report in runtestprotocol(item, log=False, nextitem=following)):
                return 1
        return 0

    def measure(self) -> Baseline:
        """Run the tests of the module as it is. Ends the program if one fails."""
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / "reach.json"

            def task() -> int:
                from _pytest.runner import runtestprotocol

                lines, seconds = {}, {}
                items = list(self.items.values())
                for item, following in zip(items, [*items[1:], None], strict=True):
                    started = time.process_time()
                    with Reach(self.path) as reached:
                        reports = runtestprotocol(item, log=False, nextitem=following)
                    if any(report.failed for report in reports):
                        written.write_text(json.dumps(str(next(each.longrepr for each in reports if each.failed))))
                        return 1
                    lines[item.nodeid], seconds[item.nodeid] = sorted(reached), time.process_time() - started
                written.write_text(json.dumps([lines, seconds]))
                return 0

            _, status = os.waitpid(fork(task), 0)
            known = json.loads(written.read_text())
        if status:
            refuse(f"{' '.join(self.tests)} fail without a change: mend them first\n{known}")
        reached = defaultdict(set)
        for test, numbers in known[0].items():
            for number in numbers:
                reached[number].add(test)
        return Baseline(known[1], reached)

    def run(self, found: Sequence[Mutant]) -> Iterator[tuple[Mutant, str]]:
        """(mutant, "killed" | "timeout" | "survived") as they come."""
        waiting = [(mutant, False) for mutant in reversed(found)]
        running: dict[int, tuple[Mutant, bool, float]] = {}
        while waiting or running:
            while waiting and len(running) < self.jobs:
                mutant, everything = waiting.pop()
                tests = self.baseline.all if everything else self.baseline.select(mutant)
                if not tests:
                    yield mutant, "survived"
                    continue
                limit = int(PATIENCE + FACTOR * sum(self.baseline.seconds[test] for test in tests))
                child = fork(lambda: self.attempt(mutant, tests, limit))  # noqa: B023  # it runs at once
                running[child] = mutant, everything, time.monotonic() + 20 * limit  # for one that waits for ever
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                for each, (*_, deadline) in running.items():
                    if time.monotonic() > deadline:
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(each, signal.SIGKILL)
                time.sleep(0.01)
                continue
            mutant, everything, _ = running.pop(child)
            if os.WIFSIGNALED(status):
                yield mutant, "timeout" if os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGXCPU) else "killed"
            elif os.WEXITSTATUS(status):
                yield mutant, "killed"
            elif everything or len(self.baseline.select(mutant)) == len(self.baseline.all):
                yield mutant, "survived"
            else:  # what a fixture or a cached function runs is counted for the first of its tests alone
                waiting.append((mutant, True))

    def attempt(self, mutant: Mutant, tests: Sequence[str], limit: int) -> int:
        """In a process of its own: 0 if the tests pass with the mutant in place."""
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        if not mutant.at_import and replace_code(self.functions, mutant, self.path):
            return self.passes(tests)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("specdraft", "tests")]:
            del sys.modules[name]
        sys.meta_path.insert(0, Changed(self.module, self.path, mutant.source))
        return run_pytest(["-x", *tests])

    def count(self, mutant: Mutant, became: str) -> None:
        """Note what became of a mutant; say it if it survived without a reason."""
        if became != "survived":
            self.outcome.killed += 1
            self.outcome.timeouts += became == "timeout"
            return
        self.survived.add(mutant.key)
        if mutant.key in self.accepted:
            self.outcome.accepted += 1
            return
        patch = diff(self.source, mutant, str(self.path.relative_to(REPOSITORY)))
        reached = len(self.baseline.select(mutant))
        entry = {"line": mutant.lines.start, "function": mutant.function, "before": mutant.before}
        self.outcome.survivors.append(entry | {"after": mutant.after, "tests": reached, "diff": patch})
        place = f"{self.module}:{mutant.lines.start} in {mutant.function or 'the module'}"
        print(f"survived {reached} tests: {place}\n{patch}", file=sys.stderr, flush=True)


def run_pytest(arguments: Sequence[str], plugins: Sequence[object] = ()) -> int:
    """The status of pytest, without the plugins of the environment, which take longer than most tests."""
    import pytest

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        # Not --basetemp: every fork would empty the same directory before its first file.
        os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
        options = ["-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:unraisableexception", "-s", "--durations=0"]
        return int(pytest.main([*options, *arguments], plugins=list(plugins)))


def examine(module: str, accepted: Sequence[dict[str, str]], jobs: int) -> Outcome:
    """Run every mutant of a module, in a process of its own."""
    path = REPOSITORY / Path(*module.split(".")).with_suffix(".py")
    known = {(entry["function"], entry["before"], entry["after"]) for entry in accepted}
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "outcome.json"
        child = os.fork()
        if not child:
            status = 1
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # what pytest says; the survivors go to standard error
            try:
                trials = Trials(module, path, TESTS[module], known, jobs)
                status = run_pytest(TESTS[module], [trials])
                written.write_text(json.dumps(vars(trials.outcome)))
            finally:
                sys.stderr.flush()
                os._exit(status)
        os.waitpid(child, 0)
        if not written.exists():
            sys.exit(f"error: the mutants of {module} could not be run")
        return Outcome(**json.loads(written.read_text()))


def main() -> None:
    """Examine the modules whose names contain one of the arguments, or all."""
    parser = argparse.ArgumentParser(prog="make mutants", description="Which small change does no test notice?")
    parser.add_argument("modules", nargs="*", help=f"parts of names, of {', '.join(TESTS)}")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "build" / "mutants.json")
    arguments = parser.parse_args()
    chosen = [name for name in TESTS if not arguments.modules or any(part in name for part in arguments.modules)]
    if not chosen:
        parser.error(f"no module is called like {' or '.join(arguments.modules)}")
    accepted = tomllib.loads(ACCEPTED.read_text("utf-8"))
    os.chdir(REPOSITORY)
    results: dict[str, Outcome] = {}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    for name in chosen:
        results[name] = examine(name, accepted.get(name, []), arguments.jobs)
        arguments.output.write_text(json.dumps({each: vars(found) for each, found in results.items()}, indent=1) + "\n")

    print(f"\n{'module':38} {'mutants':>7} {'killed':>7} {'accepted':>8} {'survived':>8} {'seconds':>8}")
    for name, outcome in results.items():
        survived = len(outcome.survivors)
        print(
            f"{name:38} {outcome.total:7} {outcome.killed:7} {outcome.accepted:8} {survived:8} {outcome.seconds:8.0f}"
        )
    print(f"\nresults: {arguments.output}")
    stale = {name: outcome.stale for name, outcome in results.items() if outcome.stale}
    for name, entries in stale.items():
        for entry in entries:
            print(f"error: {ACCEPTED.name} lists what does not survive, {name}: {entry}", file=sys.stderr)
    sys.exit(1 if stale or any(outcome.survivors for outcome in results.values()) else 0)


if __name__ == "__main__":
    main()
