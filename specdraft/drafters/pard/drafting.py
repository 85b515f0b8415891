"""How PARD drafts: what was emitted and the masks behind it are read in one pass.

B = requests, n = the most tokens that one of them emitted, K = drafted tokens, V = vocabulary."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdraft.decoding.passes import Pass, Texts
from specdraft.decoding.sampling import Chance, Sampling
from specdraft.decoding.shapes import ForcedPath, Shape
from specdraft.decoding.tree import DraftTrees
from specdraft.drafters.draft_tree_builder import Level, Vocabulary
from specdraft.drafters.drafting import LevelDrafting
from specdraft.targets import Features, LanguageModel


class ParallelDrafting(LevelDrafting):
    """The keys and values of each request's text but for its newest tokens, ``unread [rows, n]``, of which there are
    ``counts [rows]``. A prompt is read when it comes, the token after it is unread."""

    def __init__(self, model: LanguageModel, mask_token: int, num_drafts: int, rows: int, capacity: int) -> None:
        self.model, self.vocabulary = model, Vocabulary(model.vocab_size)
        self.mask_token, self.num_drafts = mask_token, num_drafts
        self.cache = model.new_cache(rows, capacity + num_drafts)  # masks stand behind the longest of the newest
        self.unread = torch.zeros((rows, 1), dtype=torch.int64, device=model.device)
        self.counts = torch.zeros(rows, dtype=torch.int64, device=model.device)
        self._width = self._held = 0  # n, and a bound on the tokens before
        self._pending = False  # whether no pass has read them
        self._begun: dict[int, int] = {}  # first tokens that are not read yet, by row
        self._levels = num_drafts  # of the draft that is made
        self._logits = torch.empty(0)  # of it, [B, K, V]

    def begin(self, row: int, first_token: int) -> None:
        """See ``Drafting``."""
        self._begun[row] = first_token

    @torch.inference_mode()
    def advance(self, texts: Texts, tokens: Tensor, counts: Tensor, features: Features) -> None:
        """Note what was emitted."""
        width, held = tokens.shape[1], texts.longest
        if texts.first in self._begun:
            first = torch.tensor([[self._begun.pop(texts.first)]], device=tokens.device)
            prompt = torch.cat([first, tokens[:, :-1]], dim=1)
            reading = Pass.text(prompt, texts.lengths - 1, texts.longest - 1, simple=True)
            self.model.step(reading, self.cache, (), texts.first)
            tokens, counts, width, held = tokens[:, -1:], torch.ones_like(counts), 1, held - 1 + width
            if texts.first > 0:  # beside others
                width, held = max(width, self._width), max(held, self._held)
        elif self._pending:
            self._read(texts, 0)
        self._width, self._held, self._pending = width, held, True
        self.unread = pad(self.unread, (0, max(0, width - self.unread.shape[1])))
        here = slice(texts.first, texts.first + len(tokens))
        self.unread[here, : tokens.shape[1]], self.counts[here] = tokens, counts

    def draft(self, texts: Texts, shape: Shape | ForcedPath, sampling: Sampling, chance: Chance | None) -> DraftTrees:
        """One pass over what was emitted and a mask for every level but the first."""
        shape = shape.truncate(self.num_drafts)
        self._levels = shape.depth
        return super().draft(texts, shape, sampling, chance)

    def first(self, texts: Texts) -> Tensor:
        """See ``LevelDrafting``."""
        newest = self._read(texts, self._levels - 1)
        levels = torch.arange(self._levels, device=self.counts.device)
        asked = (self.counts[: len(texts.lengths), None] - 1) + levels  # [B, K]
        self._logits = self.model.logits(newest.take(asked).last)
        return self._logits[:, 0]

    def extend(self, texts: Texts, level: Level) -> Tensor:
        """Whatever was drafted above."""
        return self._logits[:, level.depth, None].expand(-1, level.tokens.shape[1], -1)

    def drop(self, row: int, last: int, length: int) -> None:
        """See ``Drafting``."""
        self.cache.copy(last, row, length)
        self.unread[row], self.counts[row] = self.unread[last], self.counts[last]

    def _read(self, texts: Texts, masks: int) -> Features:
        """What is unread and ``masks`` masks, ``[B, n + masks, ...]``. A request that emitted less than others has more
        of them, behind its own, where nobody looks."""
        counts = self.counts[: len(texts.lengths)]
        ids = pad(self.unread[: len(counts), : self._width], (0, masks))
        place = torch.arange(ids.shape[1], device=ids.device)
        ids = ids.where(place < counts[:, None], self.mask_token)
        reading = Pass.text(ids, texts.lengths - counts, self._held)
        reading = reading._replace(positions=reading.positions.clamp(max=self.model.max_length - 1))
        self._pending = False
        return self.model.step(reading, self.cache)
