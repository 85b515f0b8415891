"""How often every string of up to D tokens occurs in texts that grow, and what most often follows it.

A tree of all substrings with a node each would hold D nodes for a token. Most strings occur once: they have no node,
but a leaf, the place in the text where they occur, which also says what follows. A leaf becomes a node when its string
occurs again. So there is one leaf a token, and nodes only where texts repeat themselves: on Python source 330 bytes a
token, where D is 24.

The counts and drafts are those of suffix decoding (2411.04975, section 4), as vLLM has it from arctic-inference."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Suffix:
    """A suffix of a text, from ``start`` on. As a leaf it stands for a string that occurs there alone. ``node``: of the
    string that ends with the text, if it occurs elsewhere too; None: it is a leaf."""

    __slots__ = ("node", "start", "text")

    def __init__(self, text: list[int], start: int, node: "Node | None") -> None:
        self.text, self.start, self.node = text, start, node


class Node:
    """A string that occurs ``count`` times; its continuations by their last token."""

    __slots__ = ("children", "count")

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self.children: dict[int, Node | Suffix] = {}


@dataclass(eq=False)
class GrowingText:
    """A text of the tree, itself alone its equal. open: its last suffixes, the longest of up to D tokens first."""

    tokens: list[int] = field(default_factory=list)
    open: list[Suffix] = field(default_factory=list)


class Continuation(NamedTuple):
    """What may follow. score: the sum of the estimated probabilities of its tokens being right."""

    tokens: list[int]
    score: float


class SuffixTree:
    """The substrings of up to ``depth`` tokens of all texts that were extended and not removed."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.root = Node()

    def extend(self, text: GrowingText, token: int) -> None:
        """Append a token to a text, which ends up to ``depth`` strings."""
        text.open.append(Suffix(text.tokens, len(text.tokens), self.root))
        if len(text.open) > self.depth:
            del text.open[0]
        text.tokens.append(token)
        end = len(text.tokens)
        for suffix in text.open:
            if suffix.node is None:  # it has a leaf, which grows with the text
                continue
            child = suffix.node.children.get(token)
            if child is None:
                suffix.node.children[token] = suffix
                suffix.node = None
                continue
            if isinstance(child, Suffix):
                child = suffix.node.children[token] = self._split(child, end - suffix.start)
            child.count += 1
            suffix.node = child

    def _split(self, leaf: Suffix, length: int) -> Node:
        """The node of a leaf's string, of so many tokens, which is about to occur again."""
        node, end = Node(1), leaf.start + length
        if end == len(leaf.text):  # another text that grows: its suffix ends here
            leaf.node = node
        elif length < self.depth:
            node.children[leaf.text[end]] = leaf
        return node

    def remove(self, text: GrowingText) -> None:
        """Forget all occurrences in a text, which is not extended any more."""
        for start in range(len(text.tokens)):
            node = self.root
            for token in text.tokens[start : start + self.depth]:
                child = node.children[token]
                if isinstance(child, Node) and child.count > 1:
                    child.count -= 1
                    node = child
                    continue
                del node.children[token]
                break

    def speculate(
        self, context: list[int], length: int, factor: float = 1.0, least_probability: float = 0.1
    ) -> Continuation:
        """The continuation of best score of the suffixes of ``context``. From each that occurs it goes to the most
        frequent next token (of equals the first that was seen), up to ``length`` and ``factor`` times the suffix's
        tokens, while the share of the occurrences that went this way is at least ``least_probability``."""
        best = Continuation([], 0.0)
        for matched in range(1, min(len(context), self.depth)):
            place = self._find(context[-matched:])
            if place is None:
                break  # nor does any longer suffix occur
            found = self._follow(place, matched, min(length, int(factor * matched + 1e-6)), least_probability)
            if found.score > best.score:
                best = found
        return best

    def _find(self, string: list[int]) -> "Node | Suffix | None":
        place: Node | Suffix | None = self.root
        for index, token in enumerate(string):
            if isinstance(place, Suffix):
                rest = string[index:]
                there = place.start + index
                return place if place.text[there : there + len(rest)] == rest else None
            place = None if place is None else place.children.get(token)
        return place

    def _follow(self, place: "Node | Suffix", depth: int, length: int, least_probability: float) -> Continuation:
        tokens, score, probability = list[int](), 0.0, 1.0
        while len(tokens) < length and depth < self.depth:
            if isinstance(place, Suffix):  # the one way that it ever went on
                rest = place.text[place.start + depth : place.start + min(self.depth, depth + length - len(tokens))]
                return Continuation(tokens + rest, score + probability * len(rest))
            if not place.children:
                break
            token, child = max(place.children.items(), key=_occurrences)
            probability *= _occurrences((token, child)) / place.count
            if probability < least_probability:
                break
            tokens.append(token)
            score += probability
            place, depth = child, depth + 1
        return Continuation(tokens, score)


def _occurrences(child: "tuple[int, Node | Suffix]") -> int:
    return child[1].count if isinstance(child[1], Node) else 1
