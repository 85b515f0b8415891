"""What is trained is what is served: the logits of a training step beside those that drafts are drawn from."""

from torch import Tensor

from specdraft.check.outcome import Failed, NotApplicable
from specdraft.check.rounds import Asked, Draft, Recording, compare, count
from specdraft.check.subject import Subject
from specdraft.check.training import Rows, compared, packed
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import Shape
from specdraft.decoding.tree import DraftTrees
from specdraft.drafters.base import Drafter

_TAIL = 9  # tokens behind a draft: what is learned in blocks needs whole ones


def trained_is_served(subject: Subject) -> str:
    """Every draft is put behind its text and trained on: the distribution that step s compares with the target must be
    the one that the s-th token was drafted from. Where it is not, the loss falls and nothing is accepted in serving: a
    position off by one, a hidden state of another place, a token that is read twice or not at all."""
    drafter = subject.drafter()
    if drafter.tunes_target:
        raise NotApplicable(
            "it tunes the target, which decodes and guesses by itself: there is no second model to draft"
        )
    recording = Recording(drafter, subject.target)
    drafts = [draft for each in recording.run(subject.prompts, 12) for draft in each if draft.tokens]
    if not drafts:
        raise NotApplicable("it drafted nothing in this text")
    blind = Recording(drafter, subject.target, blind=True)
    unseeing = compare(recording.found, blind.run(subject.prompts, 12), subject.close) is None
    checked = 0
    for draft in drafts[:24]:
        rows = _training(subject, drafter, draft, unseeing)
        if not rows:
            raise NotApplicable("its loss is not made by `objective` of specdraft.drafters.objective: logits unseen")
        checked += _check(subject, draft, rows, unseeing)
    return f"{checked} distributions in {min(len(drafts), 24)} drafts, after rounds that accept none, some and all"


def _training(subject: Subject, drafter: Drafter, draft: Draft, unseeing: bool) -> Rows:
    ids = [*draft.text, *draft.tokens, *[0] * _TAIL]
    ids = ids[: subject.target.max_length]
    batch = packed([[ids]], [[[True] * len(ids)]])
    last = len(draft.text) - 1
    steps = 1 if unseeing else len(draft.tokens)
    wanted = {(step, last + step) for step in range(steps)}
    return compared(drafter, batch, subject.target, wanted)


def _check(subject: Subject, draft: Draft, rows: Rows, unseeing: bool) -> int:
    """How many tokens of the draft were compared. Raises Failed."""
    last, checked = len(draft.text) - 1, 0
    for depth, token in enumerate(draft.tokens):
        place = last + depth
        row = rows.get((depth, place))
        if row is None and unseeing:  # what reads the text alone learns every place in one step
            row = rows.get((0, place))
        if row is None and depth == 0:
            wanted = "expected position r of `align`, whose step s has its teacher at r + 1 + s"
            raise Failed(
                f"training never learns the token after {len(draft.text)} tokens, which decoding drafts; {wanted}"
            )
        if row is None:
            break  # drafts may be longer than what is trained
        _compare(subject, draft, depth, token, row)
        checked += 1
    return checked


def _compare(subject: Subject, draft: Draft, depth: int, token: int, row: Tensor) -> None:
    where = f"token {depth + 1} of the draft after {len(draft.text)} tokens"
    mend = "look at which hidden state, tokens and positions each side reads (the table in docs/add-a-drafter.md)"
    if draft.q is None:
        if row[token] < row.max() - subject.close:
            raise Failed(
                f"{where} is {token}, in training the likeliest is {int(row.argmax())}: expected the same; {mend}"
            )
        return
    gap = (draft.q[depth].double() - row.double()).abs().max().item()
    if not gap <= 5 * subject.close:
        says = f"{where} is drawn from other probabilities than training compares there (by up to {gap:.2g})"
        raise Failed(f"{says}: expected the same; {mend}")


def same_text_same_draft(subject: Subject) -> str:
    """A text that came in rounds, and the same text as a fresh prompt. A difference is a cache that holds what was
    rejected, or a state that misses what was accepted: acceptance falls the longer an answer is."""
    drafter = subject.drafter()
    target = subject.decoding_target(drafter)
    if drafter.tunes_target:
        raise NotApplicable("it tunes the target to go on with the guesses of the round before")
    rounds = Recording(drafter, target)
    rounds.run(subject.prompts[:1])
    checked = 0
    for draft in rounds.found[0]:
        fresh = Recording(drafter, target).run([draft.text[:-1]], 2)[0][0]
        if said := fresh.differs(draft, subject.close):
            mend = "expected the draft of the text alone; keep in `advance` only what was emitted"
            raise Failed(f"a text that came in rounds is drafted for otherwise than as a new prompt ({said}): {mend}")
        checked += 1
    return f"{checked} texts that came in rounds, each beside the same as a new prompt"


def drafting_keeps_nothing(subject: Subject) -> str:
    """Drafts asked for between others change no later one. Where they do, the drafts that a server throws away, or
    makes in another shape, spoil the request's state."""
    drafter = subject.drafter()
    target = subject.decoding_target(drafter)
    plain = Recording(drafter, target)
    plain.run(subject.prompts)
    if not count(plain.found):
        raise NotApplicable("it drafted nothing in this text")
    disturbed = Recording(drafter, target)

    def ask(asked: Asked, shape: Shape) -> DraftTrees:
        asked.draft(shape, disturbed.sampling)
        asked.draft(shape.truncate(2), Sampling())
        return asked.draft(shape, disturbed.sampling)

    disturbed.ask = ask
    if said := compare(plain.found, disturbed.run(subject.prompts), subject.close):
        mend = "expected `draft` to leave what `advance` keeps as it was; write to copies"
        raise Failed(f"a draft that was asked for and thrown away changes the next ({said}): {mend}")
    return f"{count(plain.found)} drafts, each once more behind others that were thrown away"
