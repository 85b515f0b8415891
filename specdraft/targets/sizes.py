"""Sizes that a configuration from outside may ask for, checked before anybody makes lists or modules of them.

A ``config.json`` of 40 bytes can say ``num_hidden_layers: 1000000000``, and the library that reads it believes it."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from specdraft.errors import UserError

# By the end of a key; the largest models that are published have some 130 layers, 1,000 experts, 1,000 heads.
_MOST = ((re.compile(r"layers?$"), 1000), (re.compile(r"(heads?|experts?|labels|groups)$"), 2**16))
_LARGEST = 2**40


def check_sizes(config: Mapping[str, Any], where: str) -> None:
    """Raises UserError for a number in ``config``, at any depth, that no model has; ``where`` is the file's name."""
    for key, value in _numbers(config):
        most = next((most for pattern, most in _MOST if pattern.search(key)), _LARGEST)
        if abs(value) > most:
            raise UserError(f"{where} says {key}={value:.3g}: expected at most {most}; restore the file")


@contextmanager
def at_most(parameters: int, where: str) -> Iterator[None]:
    """Let modules be built whose ``parameters`` are no more than so many. Raises UserError at the next one."""
    count = 0

    def counted(_module: nn.Module, _name: str, _parameter: nn.Parameter) -> None:
        nonlocal count
        count += 1
        if count > parameters:
            raise UserError(f"{where} asks for more than {parameters} weights: expected those of its file; restore it")

    handle = register_module_parameter_registration_hook(counted)
    try:
        yield
    finally:
        handle.remove()


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _numbers(item, str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item, key)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield key, value
