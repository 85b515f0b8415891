"""All checks by their names, and how they are run: one that breaks says so, and the others go on."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from specdraft.check.documents import documents_are_apart, places_do_not_matter, the_future_is_hidden
from specdraft.check.gradients import every_parameter_learns, target_is_left_alone
from specdraft.check.lossless import greedy_is_lossless, sampling_is_lossless
from specdraft.check.outcome import Failed, Level, NotApplicable, Outcome
from specdraft.check.precision import mixed_precision_works
from specdraft.check.ranks import loss_is_shared_out, ranks_call_alike
from specdraft.check.repeats import repeats_itself
from specdraft.check.saving import loads_as_saved
from specdraft.check.served import drafting_keeps_nothing, same_text_same_draft, trained_is_served
from specdraft.check.side_by_side import requests_are_apart
from specdraft.check.subject import Subject
from specdraft.check.trees import nodes_follow_their_paths
from specdraft.errors import UserError
from specdraft.text import reason

CHECKS: dict[str, Callable[[Subject], str]] = {
    "trained_is_served": trained_is_served,
    "future": the_future_is_hidden,
    "documents": documents_are_apart,
    "positions": places_do_not_matter,
    "gradients": every_parameter_learns,
    "target": target_is_left_alone,
    "rounds": same_text_same_draft,
    "drafting": drafting_keeps_nothing,
    "side_by_side": requests_are_apart,
    "trees": nodes_follow_their_paths,
    "greedy": greedy_is_lossless,
    "sampling": sampling_is_lossless,
    "checkpoint": loads_as_saved,
    "repeats": repeats_itself,
    "ranks": ranks_call_alike,
    "totals": loss_is_shared_out,
    "precision": mixed_precision_works,
}
"""A check returns what it compared; it raises Failed or NotApplicable with a sentence."""


def chosen(names: Sequence[str] | None) -> list[str]:
    """The checks of these names, in their order; None: all. Raises UserError for a name that there is not."""
    if unknown := [name for name in names or () if name not in CHECKS]:
        raise UserError(f"checks names {unknown[0]!r}: expected some of {', '.join(CHECKS)}")
    return [name for name in CHECKS if names is None or name in names]


def run_checks(subject: Subject, names: Sequence[str] | None = None) -> Iterator[Outcome]:
    """The outcome of each check, as it comes. Raises UserError for a name that there is not."""
    for name in chosen(names):
        yield run_check(name, subject)


def run_check(name: str, subject: Subject) -> Outcome:
    """The outcome of one."""
    try:
        return Outcome(name, Level.PASSED, CHECKS[name](subject))
    except NotApplicable as error:
        return Outcome(name, Level.NOT_APPLICABLE, str(error))
    except Failed as error:
        return Outcome(name, Level.FAILED, str(error))
    except Exception as error:  # whatever somebody's drafter raises
        return Outcome(name, Level.FAILED, f"could not run: {_raised(error)}")


def _raised(error: Exception) -> str:
    """What was raised, in one line, and where: in the drafter rather than in what it calls."""
    frames = traceback.extract_tb(error.__traceback__)
    package = str(Path(__file__).parents[1])
    own = [
        frame for frame in frames if not frame.filename.startswith(package) and "site-packages" not in frame.filename
    ]
    drafters = [frame for frame in frames if f"{package}/drafters" in frame.filename]
    where = (own or drafters or list(frames))[-1]
    return f"{type(error).__name__}: {reason(error)} ({Path(where.filename).name}, line {where.lineno})"
