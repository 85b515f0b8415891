"""What the entry points share: foreseeable failures end in one sentence and a non-zero exit status."""

import functools
import importlib
import os
import select
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from specdraft.errors import UserError
from specdraft.explanation import explain
from specdraft.redaction import literal_secrets, redact_text

CONF = Path(__file__).parents[1] / "conf"
INTERRUPTED = 130  # what shells expect after Ctrl-C
UNREAD = 141  # and of a program whose output nobody reads any more, as with "| head"


def entry_point(conf: Path, name: str) -> Callable[[Callable[[DictConfig], Any]], Callable[[], Any]]:
    """Like ``hydra.main`` for ``conf/name.yaml``; bad input prints ``error: ...`` and exits 2, Ctrl-C exits 130."""

    def decorate(task: Callable[[DictConfig], Any]) -> Callable[[], Any]:
        @functools.wraps(task)
        def prepared(config: DictConfig) -> Any:
            _refuse_secrets(config)
            _import(config.imports)
            return task(config)

        # Reported inside, because Hydra prints all overrides once a job has raised, and outside, for what Hydra raises.
        job = hydra.main(version_base=None, config_path=str(conf), config_name=name)(_reported(prepared))
        return _reported(job)

    return decorate


def _refuse_secrets(config: DictConfig) -> None:
    """A secret on the command line stands in the shell's history, in the list of processes and in loggers' records."""
    literal = next(literal_secrets(OmegaConf.to_container(config, resolve=False)), None)
    if literal is None:
        return
    hydra_config = HydraConfig.get()
    if hydra_config.output_subdir is not None:  # Hydra has written it there by now
        shutil.rmtree(Path(hydra_config.runtime.output_dir) / hydra_config.output_subdir, ignore_errors=True)
    raise UserError(
        f"{literal} holds a secret in plain text: expected it in an environment variable; "
        f"write {literal}='${{oc.env:NAME}}'"
    )


def _import(modules: Sequence[str]) -> None:
    """Import modules of the user's own (``imports=[my_drafter]``), so that checkpoints may name what they define."""
    sys.path.insert(0, os.getcwd())
    try:
        for module in modules:
            importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"imports={list(modules)}: {error}; expected Python modules in the working directory or on PYTHONPATH"
        ) from error
    finally:
        sys.path.remove(os.getcwd())


def _reported(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        # Makes Hydra hand its errors to us instead of printing them over several lines.
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")
        try:
            result = function(*args)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            if not _unread(sys.stdout.fileno()):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes as it ends
            sys.exit(UNREAD)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(INTERRUPTED)
        except Exception as error:
            sentence = explain(error)
            if sentence is None:
                raise
            print(f"error: {redact_text(sentence)}", file=sys.stderr)
            sys.exit(2)

    return wrapped


def _unread(pipe: int) -> bool:
    """Whether its reader is gone: a connection may break as well, and that is not to be passed over."""
    poll = select.poll()
    poll.register(pipe, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def build(config: Any, *args: Any, **kwargs: Any) -> Any:
    """``hydra.utils.instantiate``, except that a UserError inside stays a UserError."""
    try:
        return instantiate(config, *args, **kwargs)
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from error
        raise
