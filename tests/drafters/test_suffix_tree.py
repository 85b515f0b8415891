"""Occurrences and drafts against a search through the texts, however they grow and go."""

import random

import pytest

from specdraft.drafters.suffix_tree import GrowingText, Node, SuffixTree


def occurrences(texts, string):
    size = len(string)
    return sum(text[start : start + size] == string for text in texts for start in range(len(text) - size + 1))


def searched(texts, depth, context, length, factor, least):
    """The draft of the best match and its score, by the formulas of the paper; None where two tokens tie."""
    best, chosen = 0.0, []
    alphabet = sorted({token for text in texts for token in text})
    for matched in range(1, min(len(context), depth)):
        string, draft, score, probability = context[-matched:], [], 0.0, 1.0
        while len(draft) < min(length, int(factor * matched + 1e-6)) and len(string) < depth:
            counts = [occurrences(texts, [*string, token]) for token in alphabet]
            most = max(counts, default=0)
            if not most:
                break
            if counts.count(most) > 1:
                return None
            probability *= most / occurrences(texts, string)
            if probability < least:
                break
            draft.append(alphabet[counts.index(most)])
            string, score = [*string, draft[-1]], score + probability
        if score > best + 1e-9:
            best, chosen = score, draft
    return chosen, best


def test_the_longest_sure_match_wins_over_a_frequent_short_one():
    tree, text = SuffixTree(8), GrowingText()
    for token in [1, 2, 3, 4, 5, 9, 3, 7, 9, 3, 7, 1, 2, 3]:
        tree.extend(text, token)
    # After 3 there came 7 twice and 4 once; after 1, 2, 3 there came 4 alone; the text's own end counts as well.
    assert tree.speculate([3], 5) == ([], 0.0)  # a match leaves a token of the context before it
    found = tree.speculate([2, 3], 5)
    assert found.tokens == [7] and found.score == pytest.approx(2 / 4)
    found = tree.speculate([1, 2, 3], 5)
    assert found.tokens == [4, 5] and found.score == pytest.approx(2 * 1 / 2)


def test_limits():
    tree, text = SuffixTree(4), GrowingText()
    for token in [1, 2, 3, 4, 5, 6, 7, 8]:
        tree.extend(text, token)
    assert tree.speculate([0, 2, 3], 9).tokens == [4, 5]  # as many as were matched
    assert tree.speculate([0, 3], 9, factor=9).tokens == [4, 5, 6]  # the depth of the tree
    assert tree.speculate([0, 3], 2, factor=9).tokens == [4, 5]
    assert tree.speculate([0, 3], 9, factor=0.5).tokens == []


@pytest.mark.parametrize("least", [0.0, 0.1, 0.5])
def test_counts_and_drafts_equal_a_search_however_texts_grow_and_go(least):
    rng = random.Random(int(least * 10))
    settled = 0
    for _ in range(60):
        depth, factor = rng.randint(2, 7), rng.choice([0.5, 1.0, 2.0])
        tree, texts = SuffixTree(depth), [GrowingText() for _ in range(rng.randint(1, 3))]
        for _ in range(rng.randint(5, 40)):
            tree.extend(rng.choice(texts), rng.randrange(3))
        if rng.random() < 0.5:
            tree.remove(texts.pop())
            for _ in range(rng.randint(0, 12) if texts else 0):
                tree.extend(rng.choice(texts), rng.randrange(3))
        held = [text.tokens for text in texts]
        for _ in range(6):
            context, length = [rng.randrange(3) for _ in range(rng.randint(1, 9))], rng.randint(1, 6)
            expected = searched(held, depth, context, length, factor, least)
            if expected is not None:
                found = tree.speculate(context, length, factor, least)
                assert found.tokens == expected[0] and found.score == pytest.approx(expected[1])
                settled += bool(found.tokens)
    assert settled > 60


def nodes(place):
    return 1 + sum(nodes(child) for child in place.children.values() if isinstance(child, Node))


def test_a_tree_whose_texts_all_went_is_empty_and_what_never_repeats_has_no_nodes():
    tree, texts = SuffixTree(6), [GrowingText() for _ in range(4)]
    for token in range(1000):
        tree.extend(texts[0], token)
    assert nodes(tree.root) == 1 and len(tree.root.children) == 1000
    rng = random.Random(3)
    for _ in range(300):
        tree.extend(rng.choice(texts), rng.randrange(4))
    for text in texts:
        tree.remove(text)
    assert not tree.root.children
