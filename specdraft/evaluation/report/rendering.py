"""The templates of reports: text, HTML, SVG and style. Every value is escaped but in plain text."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=lambda name: name is None or not name.endswith(".txt.jinja"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(template: str, **values: Any) -> str:
    """The text of a file of ``templates/`` with these values. Raises jinja2's UndefinedError where one is missing."""
    return _ENVIRONMENT.get_template(template).render(values)
