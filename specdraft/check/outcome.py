"""What a check comes to, and the line that says so."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """``PASSED``; ``NOT_APPLICABLE``, there is nothing to hold; ``FAILED``, also where the check could not run."""

    PASSED = "passed"
    NOT_APPLICABLE = "not applicable"
    FAILED = "FAILED"


class Failed(Exception):
    """The drafter does not hold what is checked: one sentence of what was found, what was expected, how to mend it."""


class NotApplicable(Exception):
    """The drafter has nothing that the check is about: one sentence of what it lacks."""


@dataclass(frozen=True)
class Outcome:
    """Of the check of this name. sentence: what was compared, found, or missing."""

    name: str
    level: Level
    sentence: str

    def line(self, width: int) -> str:
        """The outcome in one line, the name padded to ``width``."""
        return f"{self.level:14}  {self.name:{width}}  {self.sentence}"
