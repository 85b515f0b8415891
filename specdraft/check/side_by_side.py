"""Requests that are decoded side by side beside each alone."""

from specdraft.check.outcome import Failed
from specdraft.check.rounds import Recording, compare, count
from specdraft.check.subject import Subject


def requests_are_apart(subject: Subject) -> str:
    """Four requests in three rows, of which one ends and another takes its row, each beside the same alone. A
    difference is an answer that depends on who else is being served."""
    drafter = subject.drafter()
    target = subject.decoding_target(drafter)
    together = Recording(drafter, target).run(subject.prompts, batch_size=3)
    alone = Recording(drafter, target).run(subject.prompts)
    if said := compare(alone, together, subject.close):
        mend = "expected the draft that it would have alone; keep what belongs to a request in its row, and mind `drop`"
        raise Failed(f"beside others a request is drafted for otherwise ({said}): {mend}")
    return f"{count(alone)} drafts of 4 requests that grow at different paces, in 3 rows and alone"
