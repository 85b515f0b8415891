"""Suffix decoding: draft what most often followed the end of the text, here or in earlier answers (training-free).

SuffixDecoding (2411.04975) keeps two trees of substrings: one of this request, one of the answers of all requests. The
end of the text is looked up in both at every length, and the draft with the greatest expected number of right tokens
wins. The longer the match and the surer the counts, the longer the draft; without a match nothing is drafted. Matching,
scores and limits are vLLM's ``suffix``."""

from collections.abc import Sequence
from dataclasses import dataclass

from specdraft.drafters.base import constructor_arguments
from specdraft.drafters.suffix_tree import GrowingText, SuffixTree
from specdraft.drafters.text_drafter import TextDrafter
from specdraft.errors import UserError


@dataclass
class SuffixState:
    """The text of one request in a tree of its own, and its answer, which the tree of all answers holds as well."""

    tree: SuffixTree
    text: GrowingText
    answer: GrowingText


class Suffix(TextDrafter):
    """Drafts from trees of strings of up to ``max_tree_depth`` tokens, match and draft together: at most
    ``max_spec_factor`` tokens for each one matched, while they are right with an estimated probability of at least
    ``min_token_prob``. Of the newest ``max_cached_requests`` requests the answers are kept; 0: none."""

    def __init__(
        self,
        max_tree_depth: int = 24,
        max_cached_requests: int = 10000,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
    ) -> None:
        """Raises UserError for a depth below 2, which leaves nothing to draft, negative limits, and no probability."""
        arguments = constructor_arguments(locals())
        super().__init__()
        for name, value, right, wanted in (
            ("max_tree_depth", max_tree_depth, max_tree_depth >= 2, "at least 2, a matched token and a drafted one"),
            ("max_cached_requests", max_cached_requests, max_cached_requests >= 0, "0 (no earlier answers) or more"),
            ("max_spec_factor", max_spec_factor, max_spec_factor > 0, "a number above 0"),
            ("min_token_prob", min_token_prob, 0 <= min_token_prob <= 1, "a probability from 0 to 1"),
        ):
            if not right:
                raise UserError(f"suffix decoding with {name}={value}: expected {wanted}")
        self._arguments = arguments
        self.max_tree_depth, self.max_cached_requests = max_tree_depth, max_cached_requests
        self.max_spec_factor, self.min_token_prob = max_spec_factor, min_token_prob
        self.forget()

    def forget(self) -> None:
        """Forget all earlier answers."""
        self.answers = SuffixTree(self.max_tree_depth)
        self.kept: dict[GrowingText, None] = {}  # what is in their tree, the oldest request's first

    def start(self, prompt: list[int]) -> SuffixState:
        """A tree of the prompt, and room for an answer, which the oldest may have to make."""
        state = SuffixState(SuffixTree(self.max_tree_depth), GrowingText(), GrowingText())
        for token in prompt:
            state.tree.extend(state.text, token)
        if self.max_cached_requests:
            self.kept[state.answer] = None
        if len(self.kept) > self.max_cached_requests:
            oldest = next(iter(self.kept))
            del self.kept[oldest]
            self.answers.remove(oldest)
        return state

    def extend(self, state: SuffixState, tokens: list[int]) -> None:
        """Append the tokens in both trees; an answer that had to go stays away."""
        for token in tokens:
            state.tree.extend(state.text, token)
            if state.answer in self.kept:
                self.answers.extend(state.answer, token)

    def propose(self, state: SuffixState, length: int, after: Sequence[int] = ()) -> list[int]:
        """The better draft of the two trees, of equals that of the request's own."""
        context = [*state.text.tokens[-self.max_tree_depth :], *after]
        own, earlier = (
            tree.speculate(context, length, self.max_spec_factor, self.min_token_prob)
            for tree in (state.tree, self.answers)
        )
        return own.tokens if own.score >= earlier.score else earlier.tokens
