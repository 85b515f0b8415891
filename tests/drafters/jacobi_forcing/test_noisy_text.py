"""Where guesses stand and what they are, in words; and attention without a mask against that under a dense one."""

import pytest
import torch

from specdraft.drafters.jacobi_forcing.noisy_text import NoisyText, Schedule
from specdraft.targets.batch import Batch

HQ, HK, D = 4, 2, 6


def flat(batch: Batch) -> tuple[list[int], list[int], list[bool]]:
    """Tokens, documents (of different sequences different ones) and what is learned, position by position."""
    width = batch.input_ids.shape[1]
    documents = batch.document_ids + 10 * torch.arange(len(batch.document_ids))[:, None]
    assert documents.shape[1] == width
    return batch.input_ids.flatten().tolist(), documents.flatten().tolist(), batch.loss_mask.flatten().tolist()


def blocks_in_words(batch: Batch, size: int, steps: int) -> dict[int, int]:
    """Anchor -> how many guesses follow it."""
    _, documents, learned = flat(batch)
    found: dict[int, int] = {}
    answers: list[list[int]] = []  # positions of the tokens to be learned that have one before them
    for at in range(1, len(learned)):
        if learned[at] and documents[at] == documents[at - 1] and documents[at] % 10 != 9:
            if answers and answers[-1][-1] == at - 1:
                answers[-1].append(at)
            else:
                answers.append([at])
    turns: dict[int, int] = {}
    for answer in answers:
        for start in range(0, len(answer), size):
            block, document = answer[start : start + size], documents[answer[0]]
            turn = turns.get(document, 0)
            turns[document] = turn + 1
            guessed = -(-((turn % steps) + 1) * size // steps)
            # The last token of an answer teaches nothing as a guess: what follows it is not to be learned.
            guesses = [at for at in block[size - guessed :] if at + 1 in answer]
            if guesses:
                found[guesses[0] - 1] = len(guesses)
    return found


@pytest.mark.parametrize(("size", "steps"), [(4, 3), (3, 1), (2, 2), (5, 4), (1, 1), (40, 2)])
def test_guesses_stand_behind_the_right_tokens_of_a_block(packed, size, steps):
    text = NoisyText(packed, Schedule(size, steps))
    found = {int(anchor): count for anchors, count in text.groups for anchor in anchors}
    assert found == blocks_in_words(packed, size, steps)
    assert text.num_guesses == sum(found.values()) == sum(len(places) for _, places in text.steps)
    here = packed.position_ids.flatten()
    assert torch.equal(text.positions[0, 46:], here[text.anchors] + text.depths)
    assert torch.equal(text.ids[0], torch.cat([text.tokens, text.tokens[text.anchors]]))  # the last right one again
    for depth, (which, places) in enumerate(text.steps, start=1):
        assert torch.equal(places, text.anchors[which] + depth) and (places.diff() > 0).all()
        assert packed.before_learned().flatten()[places].all()
        assert torch.equal(text.positions[0, 46 + which], here[places])
    before = packed.before_learned().flatten()
    assert torch.equal(text.learned, before.nonzero()[:, 0])


def test_a_schedule_says_its_share():
    assert Schedule(8, 4).guessed == [2, 4, 6, 8] and Schedule(8, 4).share == 20 / 32
    assert Schedule(5, 3).guessed == [2, 4, 5] and Schedule(5, 1).guessed == [5]


def test_what_is_visible(packed):
    """Token by token, in words."""
    text = NoisyText(packed, Schedule(4, 3))
    _, documents, _ = flat(packed)
    place = [(at, 0) for at in range(46)]
    place += list(zip(text.anchors.tolist(), text.depths.tolist(), strict=True))
    visible = text.visible()[0]
    assert visible.shape == (len(place), len(place))
    for query, (anchor, depth) in enumerate(place):
        for key, (other, deep) in enumerate(place):
            of_text = deep == 0 and other <= anchor and documents[other] == documents[anchor]
            own = 0 < deep <= depth and other == anchor
            assert visible[query, key] == (of_text or own)


@pytest.mark.parametrize(("size", "scaling", "width"), [(4, None, D), (1, 0.3, D), (6, 0.3, D - 2)])
def test_attention_is_that_of_the_dense_mask_with_gradients(packed, size, scaling, width):
    text, g = NoisyText(packed, Schedule(size, 2)), torch.Generator().manual_seed(0)
    count = text.size + text.num_guesses
    shapes = (HQ, D), (HK, D), (HK, width)
    leaves = [torch.randn(1, h, count, d, generator=g, dtype=torch.float64).requires_grad_() for h, d in shapes]
    weights = torch.randn(1, count, HQ, width, generator=g, dtype=torch.float64)
    dense = torch.nn.functional.scaled_dot_product_attention(
        *leaves, attn_mask=text.visible()[:, None], scale=scaling, enable_gqa=True
    ).transpose(1, 2)
    expected = torch.autograd.grad((dense * weights).sum(), leaves)
    found = text.attend(*leaves, scaling)
    torch.testing.assert_close(found, dense)
    for one, other in zip(torch.autograd.grad((found * weights).sum(), leaves), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_guesses_from_the_text_are_of_the_same_document_and_before(packed):
    tokens, documents, _ = flat(packed)
    text = NoisyText(packed, Schedule(4, 1))
    repeated = text.ids.clone()
    torch.manual_seed(0)
    text.guess_from_text(0.0)
    assert torch.equal(text.ids, repeated)
    text.guess_from_text(1.0)
    assert torch.equal(text.ids[0, :46], repeated[0, :46]) and not torch.equal(text.ids, repeated)
    for anchor, guess in zip(text.anchors.tolist(), text.ids[0, 46:].tolist(), strict=True):
        assert guess in {tokens[at] for at in range(anchor + 1) if documents[at] == documents[anchor]}


def test_the_next_guesses_are_what_was_said_after_these(packed):
    text = NoisyText(packed, Schedule(4, 1))
    said = 100 + torch.arange(text.num_guesses)
    text.guess_again(1.0, lambda: said)
    guesses = text.ids[0, 46:].tolist()
    for index, (anchor, depth) in enumerate(zip(text.anchors.tolist(), text.depths.tolist(), strict=True)):
        # A place on; the token behind the anchor is what the pass emits.
        assert guesses[index] == (int(text.tokens[anchor + 1]) if depth == 1 else 100 + index - 1)
    again = NoisyText(packed, Schedule(4, 1))
    again.guess_again(0.0, lambda: pytest.fail("nobody asks"))
    torch.manual_seed(0)
    again.guess_again(0.5, lambda: said)
    changed = {int(a): bool((again.ids[0, 46:] == text.ids[0, 46:])[again.anchors == a].all()) for a in again.anchors}
    assert set(changed.values()) == {True, False}, "whole blocks, some of them"


def test_a_batch_without_answers_has_no_guesses(packed):
    packed.loss_mask.zero_()
    text = NoisyText(packed, Schedule(4, 2))
    assert (text.num_guesses, text.steps, text.groups, len(text.learned)) == (0, [], [], 0)
    text.guess_from_text(1.0)
    text.guess_again(1.0, lambda: pytest.fail("nobody asks"))
    assert torch.equal(text.ids[0], packed.input_ids.flatten())
