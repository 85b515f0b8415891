"""Change the code in small ways and see whether a test fails: ``make mutants``, ``make mutants ARGS="losses rules"``.

A mutant that no test notices is a survivor. Those that change nothing a caller can see are listed in accepted.toml with
the reason; any other ends the command with status 1. Survivors and counts go to build/mutants.json.

Every mutant runs in a fork of a process that has torch and its like loaded and no module of specdraft, with the changed
source in place of the file on disk: half a second to start instead of ten, and the working tree is never touched. First
come the tests that reach the changed lines, the shortest first, then the module's others. (mutmut 3.8 leaves out
decorated functions and defaults of classes; cosmic-ray 8.7 starts Python anew for each mutant.)
"""

import argparse
import contextlib
import gc
import importlib
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mutants.operators import Mutant, diff, mutants

REPOSITORY = Path(__file__).parents[2]
ACCEPTED = Path(__file__).with_name("accepted.toml")
# Which tests are to notice a change; those in the same process as the module alone.
TESTS = {
    "specdraft.losses.divergence": ["tests/losses"],
    "specdraft.losses.chunked": ["tests/losses"],
    "specdraft.decoding.rules": [
        "tests/decoding/test_rules.py",
        "tests/decoding/test_rules_trees.py",
        "tests/decoding/test_rules_lossy.py",
    ],
    "specdraft.drafters.alignment": ["tests/drafters/test_alignment.py", "tests/drafters/eagle"],
    "specdraft.training.global_batch": ["tests/training/test_global_batch.py"],
    "specdraft.data.packing": ["tests/data/test_packing.py"],
}
PATIENCE, FACTOR = 4, 3  # seconds of the processor that a mutant may take, beside FACTOR times what its tests took


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


class Reach:
    """A pytest plugin: which lines of one file each test runs, and for how long."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.lines: dict[str, set[int]] = defaultdict(set)
        self.seconds: dict[str, float] = {}
        self._now: set[int] = set()
        self._calls: Counter[Any] = Counter()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._now, self._calls = self.lines[nodeid], Counter()
        self._started = time.process_time()
        sys.settrace(self._call)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.settrace(None)
        self.seconds[nodeid] = time.process_time() - self._started

    def _call(self, frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != self.path:
            return None
        self._calls[frame.f_code] += 1
        return self._line if self._calls[frame.f_code] <= 50 else None  # statistics call a function 100,000 times

    def _line(self, frame: Any, event: str, argument: Any) -> Any:
        self._now.add(frame.f_lineno)
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


def pytest_status(arguments: Sequence[str], plugins: Sequence[object] = ()) -> int:
    import pytest

    with tempfile.TemporaryDirectory() as folder:
        options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", f"--basetemp={folder}/tests"]
        options += ["-p", "no:unraisableexception"]  # it collects garbage for a second
        return int(pytest.main([*options, *arguments], plugins=list(plugins)))


def fork(task: Any) -> int:
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


def load_libraries() -> None:
    """Import what the modules and tests import, and forget all that is ours."""
    for name in ("hypothesis", "pytest", "scipy.stats"):
        importlib.import_module(name)
    for path in sorted((REPOSITORY / "specdraft").rglob("*.py")):
        with contextlib.suppress(ImportError):  # an engine that is not installed
            if not path.stem.startswith("__"):
                importlib.import_module(".".join(path.relative_to(REPOSITORY).with_suffix("").parts))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("specdraft", "tests")]:
        del sys.modules[name]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # those of the environment take longer than most tests
    gc.freeze()


def measure(path: Path, tests: Sequence[str]) -> Baseline:
    """Run the tests of a module as it is. Ends the program if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "reach.json"

        def task() -> int:
            plugin = Reach(path)
            status = pytest_status(tests, [plugin])
            lines = {test: sorted(found) for test, found in plugin.lines.items()}
            written.write_text(json.dumps([lines, plugin.seconds]))
            return status

        _, status = os.waitpid(fork(task), 0)
        if status:
            sys.exit(f"error: {' '.join(tests)} fail without a change: mend them first")
        lines, seconds = json.loads(written.read_text())
    reached: dict[int, set[str]] = defaultdict(set)
    for test, numbers in lines.items():
        for number in numbers:
            reached[number].add(test)
    return Baseline(seconds, reached)


@dataclass
class Trial:
    """A mutant whose tests are running."""

    mutant: Mutant
    everything: bool
    deadline: float


def outcomes(module: str, path: Path, found: Sequence[Mutant], baseline: Baseline, jobs: int) -> Iterator[Any]:
    """(mutant, "killed" | "timeout" | "survived") as they come."""
    waiting = [(mutant, False) for mutant in reversed(found)]
    running: dict[int, Trial] = {}

    def start(mutant: Mutant, everything: bool) -> None:
        tests = baseline.all if everything else baseline.select(mutant)
        limit = int(PATIENCE + FACTOR * sum(baseline.seconds[test] for test in tests))

        def task() -> int:
            used = int(time.process_time())
            resource.setrlimit(resource.RLIMIT_CPU, (used + limit, used + limit))
            sys.meta_path.insert(0, Changed(module, path, mutant.source))
            return pytest_status(tests)

        running[fork(task)] = Trial(mutant, everything, time.monotonic() + 20 * limit)  # of one that waits for ever

    while waiting or running:
        while waiting and len(running) < jobs:
            mutant, everything = waiting.pop()
            if not everything and not baseline.select(mutant):
                everything = True
            start(mutant, everything)
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            for each, trial in running.items():
                if time.monotonic() > trial.deadline:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(each, signal.SIGKILL)
            time.sleep(0.02)
            continue
        trial = running.pop(child)
        if os.WIFSIGNALED(status):
            yield trial.mutant, "timeout" if os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGXCPU) else "killed"
        elif os.WEXITSTATUS(status):
            yield trial.mutant, "killed"
        elif trial.everything or len(baseline.select(trial.mutant)) == len(baseline.all):
            yield trial.mutant, "survived"
        else:  # what a fixture of several tests runs is counted for the first of them alone
            waiting.append((trial.mutant, True))


def examine(module: str, accepted: Sequence[dict[str, str]], jobs: int) -> Outcome:
    """Run every mutant of a module."""
    began = time.monotonic()
    path = REPOSITORY / Path(*module.split(".")).with_suffix(".py")
    source = path.read_text("utf-8")
    baseline = measure(path, TESTS[module])
    found = mutants(source)
    unchanged = Mutant("", "", "", range(0), source, True)
    ((_, control),) = outcomes(module, path, [unchanged], baseline, 1)
    if control != "survived":
        sys.exit(f"error: the tests of {module} fail with its own source put in place")
    known = {(entry["function"], entry["before"], entry["after"]) for entry in accepted}
    outcome = Outcome(total=len(found), stale=[" | ".join(key) for key in known - {mutant.key for mutant in found}])
    for number, (mutant, became) in enumerate(outcomes(module, path, found, baseline, jobs), start=1):
        if number % 25 == 0 or number == len(found):
            print(f"{module}: {number} of {len(found)}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        if became == "survived" and mutant.key in known:
            outcome.accepted += 1
        elif became == "survived":
            patch = diff(source, mutant, f"{path.relative_to(REPOSITORY)}")
            reached = len(baseline.select(mutant))
            entry = {"line": mutant.lines.start, "function": mutant.function, "before": mutant.before}
            outcome.survivors.append(entry | {"after": mutant.after, "tests": reached, "diff": patch})
            print(f"survived {reached} tests, {module}:{mutant.lines.start} in {mutant.function}\n{patch}", flush=True)
        else:
            outcome.killed += 1
            outcome.timeouts += became == "timeout"
            if mutant.key in known:
                outcome.stale.append(" | ".join(mutant.key))
    outcome.survivors.sort(key=lambda entry: entry["line"])
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


def main() -> None:
    """Examine the modules whose names contain one of the arguments, or all."""
    parser = argparse.ArgumentParser(
        prog="make mutants", description="Which small change of the code does no test notice?"
    )
    parser.add_argument("modules", nargs="*", help=f"parts of names, of {', '.join(TESTS)}")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "build" / "mutants.json")
    arguments = parser.parse_args()
    chosen = [name for name in TESTS if not arguments.modules or any(part in name for part in arguments.modules)]
    if not chosen:
        parser.error(f"no module is called like {' or '.join(arguments.modules)}")
    accepted = tomllib.loads(ACCEPTED.read_text("utf-8"))
    os.chdir(REPOSITORY)
    load_libraries()
    results = {name: examine(name, accepted.get(name, []), arguments.jobs) for name in chosen}

    print(f"\n{'module':36} {'mutants':>7} {'killed':>7} {'accepted':>8} {'survived':>8} {'seconds':>8}")
    for name, outcome in results.items():
        survived = len(outcome.survivors)
        print(
            f"{name:36} {outcome.total:7} {outcome.killed:7} {outcome.accepted:8} {survived:8} {outcome.seconds:8.0f}"
        )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({name: vars(outcome) for name, outcome in results.items()}, indent=1) + "\n")
    print(f"\nresults: {arguments.output}")
    stale = {name: outcome.stale for name, outcome in results.items() if outcome.stale}
    for name, entries in stale.items():
        for entry in entries:
            print(f"error: {ACCEPTED.name} lists what does not survive, {name}: {entry}", file=sys.stderr)
    sys.exit(1 if stale or any(outcome.survivors for outcome in results.values()) else 0)


if __name__ == "__main__":
    main()
