"""What the commands share: a configuration of ``conf/``, and foreseeable failures said in one sentence."""

import functools
import importlib
import os
import re
import select
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from specdraft.errors import UserError, check_switch
from specdraft.files import FULL_DISK, no_room
from specdraft.leftovers import nothing_left_behind
from specdraft.redaction import literal_secrets, redact_text

_INSTALLED, _CHECKOUT = Path(__file__).parent / "conf", Path(__file__).parents[1] / "conf"
CONF = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT
INTERRUPTED = 130  # the exit status that shells expect after Ctrl-C
UNREAD = 141  # and of a program whose output nobody reads any more, as with "| head"


def entry_point(conf: Path, name: str) -> Callable[[Callable[[DictConfig], Any]], Callable[[], Any]]:
    """Like ``hydra.main`` for ``conf/name.yaml``; bad input prints ``error: ...`` and exits 2, Ctrl-C exits 130.
    What the task returns is what a Hydra sweeper optimizes. Neither ``plan=true`` nor a run or sweep that ends early,
    before it has written anything, leaves a directory."""

    def decorate(task: Callable[[DictConfig], Any]) -> Callable[[], Any]:
        @functools.wraps(task)
        def prepared(config: DictConfig) -> Any:
            _refuse_secrets(config)
            _check_switches(OmegaConf.load(conf / f"{name}.yaml"), config)
            _import(config.imports)
            return task(config)

        # Reported inside, because Hydra prints all overrides once a job has raised, and outside, for what Hydra raises.
        job = hydra.main(version_base=None, config_path=str(conf), config_name=name)(_reported(prepared))

        @functools.wraps(task)
        def main() -> Any:
            sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in ("-m", "--multirun"))  # not between others
            with _no_directory_for_a_plan(), _run_directory_named(), nothing_left_behind():
                return job()

        return _reported(main)

    return decorate


def build(config: Any, *args: Any, **kwargs: Any) -> Any:
    """``hydra.utils.instantiate``, except that a UserError inside stays a UserError."""
    try:
        return instantiate(config, *args, **kwargs)
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from error
        raise


@contextmanager
def _no_directory_for_a_plan() -> Iterator[None]:
    """Hydra makes the run's directory before the job knows that it only plans: a temporary one, then."""
    if not any(re.fullmatch(r"\+{0,2}plan=true", word, re.IGNORECASE) for word in sys.argv[1:]):
        yield
        return
    words = list(sys.argv)
    with tempfile.TemporaryDirectory(prefix="specdraft-plan-") as directory:
        # After the last override: later ones win, and options such as -m may not stand among them.
        end = 1 + max(place for place, word in enumerate(words) if "=" in word and not word.startswith("-"))
        sys.argv[end:end] = [f"hydra.run.dir={directory}", f"hydra.sweep.dir={directory}"]
        try:
            yield
        finally:
            sys.argv = words


def _refuse_secrets(config: DictConfig) -> None:
    """A secret on the command line stands in the shell's history, in the list of processes and in loggers' records."""
    for name in literal_secrets(OmegaConf.to_container(config, resolve=False)):
        hydra_config = HydraConfig.get()
        if hydra_config.output_subdir is not None:  # Hydra has written it there by now
            shutil.rmtree(Path(hydra_config.runtime.output_dir) / hydra_config.output_subdir, ignore_errors=True)
        mend = f"expected it in an environment variable; write {name}='${{oc.env:NAME}}'"
        raise UserError(f"{name} holds a secret in plain text: {mend}")


def _check_switches(usual: Any, given: Any, parents: str = "") -> None:
    """Raise UserError for what is true or false as ``usual``, in the command's own file, and neither as ``given``."""
    for key, value in usual.items_ex(resolve=False):
        found = given.get(key, value) if key != "hydra" else None
        if isinstance(value, bool):
            check_switch(f"{parents}{key}", found)
        if isinstance(value, DictConfig) and isinstance(found, DictConfig):
            _check_switches(value, found, f"{parents}{key}.")


@contextmanager
def _run_directory_named() -> Iterator[None]:
    """What the system refuses outside of the task is Hydra's directory of the run, which has an option of its own."""
    try:
        yield
    except OSError as error:
        if not isinstance(error.filename, str):
            raise
        wrong = f"cannot make the run directory {Path(error.filename).absolute()} ({error.strerror})"
        mend = "choose a place that can be written to with hydra.run.dir=DIR, with -m hydra.sweep.dir=DIR"
        raise UserError(f"{wrong}: {mend}") from error


def _import(modules: str | Sequence[str] | None) -> None:
    """Import modules of the user's own (``imports=[my_drafter]``, or one alone without brackets), so that checkpoints
    may name what they define."""
    modules = [modules] if isinstance(modules, str) else modules or ()
    sys.path.insert(0, os.getcwd())
    try:
        for module in modules:
            importlib.import_module(module)
    except ImportError as error:
        expected = "expected Python modules in the working directory or on PYTHONPATH"
        raise UserError(f"imports={list(modules)}: {error}; {expected}") from error
    finally:
        sys.path.remove(os.getcwd())


def _reported(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        # Makes Hydra hand its errors to us instead of printing them over several lines.
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")
        try:
            value = function(*args)
            sys.stdout.flush()
        except BrokenPipeError:
            if not _unread(sys.stdout.fileno()):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes as it ends
            sys.exit(UNREAD)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(INTERRUPTED)
        except Exception as error:
            if (sentence := explain(error)) is None:
                raise
            print(f"error: {redact_text(sentence)}", file=sys.stderr)
            sys.exit(2)
        return value

    return wrapped


def _unread(pipe: int) -> bool:
    """Whether its reader is gone. A connection may break as well, and that is an error to be seen."""
    poll = select.poll()
    poll.register(pipe, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


# --- errors of Hydra and of the operating system, which seldom say how to mend them -----------------------------------


def explain(error: BaseException) -> str | None:
    """The sentence for a foreseeable error, else None."""
    message = " ".join(str(error).split())
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ConfigCompositionException) and "Could not override" in message:
        key = message.split("'")[1] if "'" in message else message
        return f"unknown config key {key!r}: {_nearest(error.__cause__)}--help and --cfg job show what there is"
    option = re.search(r"Could not find '(.+)' Available options in '(.+?)': (.+?) Config search", message)
    if isinstance(error, MissingConfigException) and option:
        name, group, options = option.groups()  # a name may be a path, of a model as people give them
        place = ", or target.name=PATH_OR_HUB_ID beside it" if group == "target" else ""
        return f"unknown {group} {name[len(group) + 1 :]!r}: expected one of {options.replace(' ', ', ')}{place}"
    listed = re.search(r"Could not load '(.+)/(.+?)'", message)  # one of several, as in compare=[NAME]
    if isinstance(error, MissingConfigException) and listed:
        group, name = listed.groups()
        there = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
        return f"unknown {group} {name!r}: expected one of {', '.join(there)}"
    if isinstance(error, ValueError) and message.startswith("Config group override must be a string"):
        return "a group is set to null: expected one of its options, as drafter=none, or ~GROUP to leave it out"
    several = re.match(r"Ambiguous value for argument '(.+?)=(.+?)' ", message)
    if isinstance(error, HydraException) and several:
        key, values = several.groups()
        return f"{key} has several values: add -m to run with each of them, or write {key}=[{values}] for a list"
    if isinstance(error, OverrideParseException) and "=" in error.override:  # ~ and brackets, say, are signs of Hydra's
        key, _, value = error.override.partition("=")
        return f"cannot read {error.override}: expected its value in quotes within quotes, as '{key}=\"{value}\"'"
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override!r}: expected NAME=VALUE, as checkpoint=PATH; --help shows the names"
    if isinstance(error, MissingMandatoryValue) and error.full_key:
        return f"{error.full_key} is missing: expected {error.full_key}=VALUE on the command line"
    located = re.match(r"Error locating target '(.+?)'", message)
    if isinstance(error, InstantiationException) and located:
        return _not_located(error, located[1])
    if isinstance(error, InstantiationException):
        return str(error.__cause__) if isinstance(error.__cause__, UserError) else f"bad configuration: {message}"
    if isinstance(error, HydraException | OmegaConfBaseException):
        return f"bad configuration: {message}"
    if isinstance(error, OSError) and error.errno in FULL_DISK:  # writing to an open file does not say its name
        return no_room(error.filename or "a file", error.errno)
    if isinstance(error, OSError) and isinstance(error.filename, str) and error.errno is not None:
        return f"cannot use {error.filename} ({error.strerror}): choose another path or change its permissions"
    return None


def _nearest(error: BaseException | None) -> str:
    """The key beside the unknown one that is spelled most like it, as the beginning of a hint."""
    if not isinstance(error, OmegaConfBaseException) or error.parent_node is None or error.full_key is None:
        return "the config has no such key; "
    parent, _, name = error.full_key.rpartition(".")
    near = get_close_matches(name, map(str, error.parent_node), n=1)
    return f"did you mean {parent and f'{parent}.'}{near[0]}? " if near else "the config has no such key; "


def _not_located(error: BaseException, name: str) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    said, module = " ".join(str(error).split()), name.partition(".")[0]
    mend = "correct the name" if module in sys.modules else f"if it is of your own, add imports=[{module}]"
    return f"{name!r} cannot be loaded ({said}): expected a class or function of an importable module; {mend}"
