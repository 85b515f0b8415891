"""The sentence for a foreseeable error: what Hydra raises says what was wrong, and seldom how to mend it."""

import re
import sys
from difflib import get_close_matches

from hydra.errors import ConfigCompositionException, HydraException, InstantiationException, MissingConfigException
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from specdraft.errors import UserError
from specdraft.text import reason


def explain(error: BaseException) -> str | None:
    """The sentence for a foreseeable error, else None."""
    message = " ".join(str(error).split())
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ConfigCompositionException) and "Could not override" in message:
        key = message.split("'")[1] if "'" in message else message
        return f"unknown config key {key!r}: {_nearest(error.__cause__)}--help and --cfg job show what there is"
    option = re.search(r"Could not find '(.+)/(.+?)' Available options in '.+?': (.+?) Config search", message)
    if isinstance(error, MissingConfigException) and option:
        group, name, options = option.groups()
        return f"unknown {group} {name!r}: expected one of {options.replace(' ', ', ')}"
    several = re.match(r"Ambiguous value for argument '(.+?)=(.+?)' ", message)
    if isinstance(error, HydraException) and several:
        key, values = several.groups()
        return f"{key} has several values: add -m to run with each of them, or write {key}=[{values}] for a list"
    if isinstance(error, MissingMandatoryValue) and error.full_key:
        return f"{error.full_key} is missing: expected {error.full_key}=VALUE on the command line"
    located = re.match(r"Error locating target '(.+?)'", message)
    if isinstance(error, InstantiationException) and located:
        return _not_located(error, located[1])
    if isinstance(error, InstantiationException):
        return str(error.__cause__) if isinstance(error.__cause__, UserError) else f"bad configuration: {message}"
    if isinstance(error, HydraException | OmegaConfBaseException):
        return f"bad configuration: {message}"
    if isinstance(error, OSError) and isinstance(error.filename, str) and error.errno is not None:
        return f"cannot use {error.filename} ({error.strerror}): choose another path or change its permissions"
    return None


def _nearest(error: BaseException | None) -> str:
    """The key beside the unknown one that is most like it in spelling, as the beginning of a hint."""
    if not isinstance(error, OmegaConfBaseException) or error.parent_node is None or error.full_key is None:
        return "the config has no such key; "
    parent, _, name = error.full_key.rpartition(".")
    near = get_close_matches(name, map(str, error.parent_node), n=1)
    return f"did you mean {parent and f'{parent}.'}{near[0]}? " if near else "the config has no such key; "


def _not_located(error: BaseException, name: str) -> str:
    innermost = error
    while innermost.__cause__ is not None:
        innermost = innermost.__cause__
    module = name.partition(".")[0]
    mend = "correct the name" if module in sys.modules else f"if it is of your own, add imports=[{module}]"
    return (
        f"{name!r} cannot be loaded ({reason(innermost)}): expected a class or function of an importable module; {mend}"
    )
