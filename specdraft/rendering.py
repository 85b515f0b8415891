"""The templates that lie beside the code: text, Markdown, HTML, SVG and style."""

import json
import shlex
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from specdraft.text import counted

_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=lambda name: name is None or not name.endswith((".txt.jinja", ".md.jinja")),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
# As they stand in a JSON document, in a shell's command line, in Python.
_ENVIRONMENT.filters |= {"json": json.dumps, "shell": shlex.quote, "python": repr, "parsed": json.loads}
_ENVIRONMENT.filters["counted"] = counted


def render(template: str, **values: Any) -> str:
    """The text of a template, named by its path in the package; values are escaped but in plain text and Markdown.
    Raises jinja2's UndefinedError where a value is missing."""
    return _ENVIRONMENT.get_template(template).render(values)
