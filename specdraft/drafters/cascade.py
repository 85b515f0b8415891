"""A cascade of two levels: what is looked up is a draft for a draft model, whose tokens are the draft for the target
(speculative decoding in stages, 2308.04623; TriForce, 2404.11912).

B = requests, K = drafted tokens, n = tokens that were looked up for one of them, V = vocabulary.

A draft model alone takes a pass for every token of its draft. Here a look-up proposes some of them, the middle model
reads them in one pass and verifies them by an exact rule, as the target would: what it accepts and what it says instead
follows the middle model's own distribution, token by token. To the target this is an ordinary draft of that model,
whose q at every token is the row that the middle model had there, that of corrections and bonus tokens included. It
never takes more passes than the draft model alone, but each of them reads what was looked up, too."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdraft.decoding import rules
from specdraft.decoding.cache import StaticCache
from specdraft.decoding.interfaces import Drafting
from specdraft.decoding.passes import Texts
from specdraft.decoding.sampling import Chance, Sampling
from specdraft.decoding.shapes import ForcedPath, Shape, StaticTree
from specdraft.decoding.tree import DraftTrees
from specdraft.drafters.base import Drafter
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.drafting import ModelDrafting
from specdraft.drafters.early_exit import EarlyExit
from specdraft.drafters.text_drafter import TextDrafter, TextDrafting, chains
from specdraft.errors import UserError
from specdraft.targets import Features, Target


class Cascade(Drafter):
    """Drafts chains of ``middle``, for which ``inner`` drafts."""

    rates_hold = False  # how long a draft takes depends on the text

    def __init__(self, middle: Drafter, inner: Drafter) -> None:
        """Raises UserError for a middle that is no causal LM which drafts token by token, and an inner drafter that
        looks at more than the text."""
        super().__init__()
        if type(middle) not in (DraftModel, EarlyExit):
            wanted = "a draft model (model=draft) or early_exit, which read a draft in one pass"
            raise UserError(f"the middle model of a cascade is {middle.family}: expected {wanted}")
        if not isinstance(inner, TextDrafter):
            wanted = "one that looks at the text alone: prompt_lookup, suffix or ngram_cache"
            raise UserError(f"the inner drafter of a cascade is {inner.family}: expected {wanted}")
        self.middle, self.inner = middle, inner
        self.quantization = middle.quantization

    @property
    def draws(self) -> bool:
        """See ``Drafter``."""
        return self.middle.draws

    def bind(self, target: Target) -> None:
        """See ``Drafter``. Raises UserError for a middle model of another vocabulary."""
        super().bind(target)
        self.middle.bind(target)
        self.inner.bind(target)
        if isinstance(self.middle, DraftModel) and self.middle.language_model.vocab_size != target.vocab_size:
            given = f"the middle model has a vocabulary of {self.middle.language_model.vocab_size} tokens"
            raise UserError(f"{given}: expected the target's, of {target.vocab_size}")

    def num_places(self, shape: Shape) -> int:
        """See ``Drafter``: beside a request that needs many tokens, one that has almost all reads as many."""
        return 2 * _chain(shape).num_places

    def forget(self) -> None:
        """See ``Drafter``."""
        self.inner.forget()

    def drafting(self, rows: int, capacity: int) -> "CascadeDrafting":
        """See ``Drafter``."""
        return CascadeDrafting(self, rows, capacity)


class CascadeDrafting(Drafting):
    """What both keep of each request."""

    def __init__(self, drafter: Cascade, rows: int, capacity: int) -> None:
        middle = drafter.middle.drafting(rows, capacity)
        assert isinstance(middle, ModelDrafting)
        self.middle, self.inner = middle, TextDrafting(drafter.inner, rows)
        self.shares_cache = middle.shares_cache

    def borrow(self, cache: StaticCache) -> None:
        """See ``Drafting``."""
        self.middle.borrow(cache)

    def begin(self, row: int, first_token: int) -> None:
        """See ``Drafting``."""
        self.middle.begin(row, first_token)
        self.inner.begin(row, first_token)

    def advance(self, texts: Texts, tokens: Tensor, counts: Tensor, features: Features) -> None:
        """See ``Drafting``."""
        self.middle.advance(texts, tokens, counts, features)
        self.inner.advance(texts, tokens, counts, features)

    @torch.inference_mode()
    def draft(self, texts: Texts, shape: Shape | ForcedPath, sampling: Sampling, chance: Chance | None) -> DraftTrees:
        """See ``Drafting``. Rounds of the middle model until every request has K tokens, each of which waits for the
        device. Raises UserError for shapes that are no chains."""
        shape = _chain(shape)
        drawn, device = shape.sampled and not sampling.greedy, texts.lengths.device
        drafts = [list[int]() for _ in texts.lengths]
        rows = [list[Tensor]() for _ in drafts]  # of q, for every token of a draft
        for number in range(shape.depth):
            missing = [shape.depth - len(draft) for draft in drafts]
            if not any(missing):
                break
            # What the middle model says first takes no pass, unless it has to read the last emitted token for it.
            asked = number > 0 or self.middle.unread is not None
            found = chains(self._look_up(drafts, missing) if asked else drafts, device)
            logits = self._read(texts, drafts, found.tokens)  # [B, n + 1, V]
            if drawn:
                assert chance is not None
                p = sampling.probabilities(logits)
                # Nothing that the target's rule draws from: to it these are tokens of a draft like any other.
                verdict = rules.rejection_sampling(found, p, chance.apart(number).uniform(0, p.shape[1]))
            else:
                verdict = rules.greedy(found, logits.argmax(-1))
            emitted = pad(found.tokens, (0, 1)).scatter(1, verdict.accepted[:, None], verdict.next_token[:, None])
            told = torch.cat([verdict.accepted[:, None], emitted], dim=1).tolist()
            for row, (accepted, *tokens) in enumerate(told):
                if missing[row]:
                    drafts[row] += tokens[: accepted + 1]
                    if drawn:
                        rows[row].append(p[row, : accepted + 1])
        q = torch.stack([torch.cat(parts) for parts in rows]) if drawn else None
        return DraftTrees.chains(torch.tensor(drafts, device=device), q)

    def _look_up(self, drafts: Sequence[Sequence[int]], missing: Sequence[int]) -> list[Sequence[int]]:
        """What may follow the drafts: a token fewer than are missing, because the middle model adds one."""
        propose, states = self.inner.drafter.propose, self.inner.states
        pairs = zip(states, drafts, missing, strict=False)
        return [propose(state, lacking - 1, draft) if lacking > 1 else [] for state, draft, lacking in pairs]

    def _read(self, texts: Texts, drafts: Sequence[Sequence[int]], found: Tensor) -> Tensor:
        """The middle model's logits ``[B, n + 1, V]`` after the drafts, and after each of the tokens ``found [B, n]``
        that may follow them. The last token of a draft was said by the model, but not read yet."""
        if any(drafts):
            known = torch.tensor([[len(draft), draft[-1]] for draft in drafts], device=found.device)
            lengths, last = known.T  # [B]
        elif self.middle.unread is None:
            return self.middle.first(texts)[:, None]
        else:
            lengths, last = torch.zeros_like(texts.lengths), self.middle.unread[: len(drafts)]
        before = Texts(texts.lengths + lengths - 1, texts.longest + max(map(len, drafts)) - 1)
        return self.middle.read(before, torch.cat([last[:, None], found], dim=1))

    def drop(self, row: int, last: int, length: int) -> None:
        """See ``Drafting``."""
        self.middle.drop(row, last, length)
        self.inner.drop(row, last, length)


def _chain(shape: Shape | ForcedPath) -> StaticTree:
    """The shape, if it is a chain of K tokens. Raises UserError for others."""
    if isinstance(shape, StaticTree) and shape.is_chain and shape.stop is None:
        return shape
    given = "tree that is measured" if isinstance(shape, ForcedPath) else shape
    raise UserError(f"a cascade cannot draft a {given}: expected decoding/shape=chain")
