"""What the entry points share: foreseeable failures end in one sentence and a non-zero exit status."""

import functools
import importlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    InstantiationException,
    MissingConfigException,
)
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specdraft.errors import UserError
from specdraft.redaction import literal_secrets, redact_text

INTERRUPTED = 130  # what shells expect after Ctrl-C


def entry_point(conf: Path, name: str) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Like ``hydra.main`` for ``conf/name.yaml``; bad input prints ``error: ...`` and exits 2, Ctrl-C exits 130."""

    def decorate(task: Callable[[DictConfig], None]) -> Callable[[], None]:
        @functools.wraps(task)
        def prepared(config: DictConfig) -> None:
            _refuse_secrets(config)
            _import(config.imports)
            task(config)

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


def _reported(function: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(function)
    def wrapped(*args: Any) -> None:
        # Makes Hydra hand its errors to us instead of printing them over several lines.
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")
        try:
            function(*args)
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


def explain(error: BaseException) -> str | None:
    """The sentence for a foreseeable error, else None."""
    message = " ".join(str(error).split())
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ConfigCompositionException) and "Could not override" in message:
        key = message.split("'")[1] if "'" in message else message
        return f"unknown config key {key!r}: the config has no such key; --help and --cfg job show what there is"
    option = re.search(r"Could not find '(.+)/(.+?)' Available options in '.+?': (.+?) Config search", message)
    if isinstance(error, MissingConfigException) and option:
        group, name, options = option.groups()
        return f"unknown {group} {name!r}: expected one of {options.replace(' ', ', ')}"
    if isinstance(error, InstantiationException):
        return str(error.__cause__) if isinstance(error.__cause__, UserError) else f"bad configuration: {message}"
    if isinstance(error, HydraException | OmegaConfBaseException):
        return f"bad configuration: {message}"
    if isinstance(error, OSError) and isinstance(error.filename, str) and error.errno is not None:
        return f"cannot use {error.filename} ({error.strerror}): choose another path or change its permissions"
    return None


def build(config: Any, *args: Any, **kwargs: Any) -> Any:
    """``hydra.utils.instantiate``, except that a UserError inside stays a UserError."""
    try:
        return instantiate(config, *args, **kwargs)
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from error
        raise
