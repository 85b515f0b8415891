"""The decode loop accepts what it is told to, and what a drafter is shown is what its drafts are noted behind."""

from itertools import pairwise

from specdraft.check.rounds import BUSH, CHAIN, Recording, compare, count
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.shapes import DynamicTree, StaticTree
from tests.check.mine import subject


def test_requests_grow_at_different_paces_along_the_target_s_answer():
    mine = subject()
    recording = Recording(mine.drafter(), mine.target)
    found = recording.run(mine.prompts, batch_size=3)
    for prompt, answer, drafts in zip(mine.prompts, recording.answers, found, strict=True):
        assert answer == [*prompt, *Decoder(mine.target).generate(prompt, 14).tokens]
        assert all(draft.text == answer[: len(draft.text)] for draft in drafts)
        paces = {len(b.text) - len(a.text) for a, b in pairwise(drafts)}
        assert len(paces) >= 3 and paces <= set(range(1, CHAIN.depth + 2))
    assert count(found) == sum(map(len, found)) > 16
    assert compare(found, found, 0.0) is None


def test_a_drafter_shown_nothing_drafts_otherwise():
    mine = subject()
    seen, unseen = (Recording(mine.drafter(), mine.target, blind=blind).run(mine.prompts) for blind in (False, True))
    assert "of request 1, after" in (compare(seen, unseen, 1e-5) or "")
    found = [[draft._replace(text=[*draft.text, 1]) for draft in each] for each in seen]
    assert "the text goes on" in (compare(seen, found, 1e-5) or "")
    assert "is drafted for" in (compare(seen, [each[:1] for each in seen], 1e-5) or "")
    found = [[draft._replace(q=None) for draft in each] for each in seen]
    assert "has none" in (compare(seen, found, 1e-5) or "")


def test_drafts_are_as_long_as_was_trained_where_a_shorter_one_is_another():
    mine = subject()
    drafter = mine.drafter()
    assert Recording(drafter, mine.target).shape == CHAIN
    drafter.whole_drafts = 6
    assert Recording(drafter, mine.target).shape == StaticTree.chain(6)
    bush = Recording(drafter, mine.target, BUSH).shape
    assert (bush.depth, bush.num_nodes) == (6, 11) and set(BUSH.paths) < set(bush.paths)
    assert Recording(drafter, mine.target, DynamicTree(3, 3, 8)).shape == DynamicTree(6, 3, 8)
    drafter.whole_drafts = 2  # drafts are cut to it anyway
    assert Recording(drafter, mine.target).shape == CHAIN
