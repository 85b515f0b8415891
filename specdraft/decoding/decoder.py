"""The decode loop: one loop for plain decoding and for drafting, for one request and for many side by side.

B = requests under way, N = nodes of a draft, D = its levels, V = vocabulary.

Each round: the drafter proposes a tree after the last emitted token of every request, the target reads all of them in
one pass, the rule accepts a path and adds one token of the target's own. What was rejected is overwritten in the
target's cache. Requests accept different numbers of tokens, so they differ in length; one that ends makes room for the
next one. All of a round is launched without waiting for the device; at its end the host reads what was emitted, once.

Accounting is vLLM's: the prompt's pass emits the first token and is no round; every later target pass is one; drafted
tokens that were accepted count even where they run past the end of text or the token limit."""

from collections.abc import Iterator, Sequence
from itertools import count

import torch

from specdraft.decoding import block_verification, rules
from specdraft.decoding.generation import Generation, truncate
from specdraft.decoding.interfaces import Drafter, Target
from specdraft.decoding.requests import Request, Requests
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import Shape, as_shape
from specdraft.decoding.threads import FEW_TOKENS, limited
from specdraft.errors import UserError


class Decoder:
    """Target + drafter + shape of the draft + sampling settings + rule; without a drafter it decodes plainly."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        shape: Shape | int = 5,
        sampling: Sampling | None = None,
        rule: rules.Rule = rules.rejection_sampling,
        trace: bool = False,
        repeatable: bool = False,
    ) -> None:
        """``shape`` is that of every draft, a number a chain of as many tokens; ``rule`` verifies above temperature 0;
        ``trace``: every generation records its rounds; ``repeatable``: passes take all threads and not those that are
        measured to be fastest, with which another process could round otherwise. Raises UserError for a draft of fewer
        than 1 token and for a shape that the rule cannot verify."""
        self.target, self.drafter, self.rule = target, drafter, rule
        self.shape = as_shape(shape) if drafter is not None else None
        self.sampling = sampling or Sampling()
        self.trace, self.repeatable = trace, repeatable
        self.num_places = 0  # for the most nodes of a draft
        if self.shape is not None and drafter is not None:
            if not self.sampling.greedy:
                block_verification.check_shape(rule, self.shape, drafter.branches)
            drafter.bind(target)
            self.num_places = drafter.num_places(self.shape)

    @property
    def num_draft_tokens(self) -> int:
        """The most tokens that a round can accept; 0 without a drafter."""
        return 0 if self.shape is None else self.shape.depth

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, seed: int = 0) -> Generation:
        """Decode one prompt until the end of text, ``max_new_tokens``, or the end of the target's context. Raises
        UserError for an empty prompt and for one that leaves no room in the context."""
        return next(self.stream([prompt_ids], max_new_tokens, [seed]))[1]

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, batch_size: int, seeds: Sequence[int] | None = None
    ) -> list[Generation]:
        """Decode prompts, up to ``batch_size`` side by side, each as if decoded alone: the same tokens at temperature 0
        (up to the rounding of a batched pass), the same draws from its own seed above (default: its number; near the
        end of the context dynamic trees may differ). The results are in the order of the prompts. Raises UserError as
        ``generate`` does."""
        results = dict(self.stream(prompts, max_new_tokens, seeds, batch_size))
        return [results[number] for number in range(len(prompts))]

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        seeds: Sequence[int] | None = None,
        batch_size: int = 1,
    ) -> Iterator[tuple[int, Generation]]:
        """Yield ``(number of the prompt, generation)`` as requests end, not necessarily in their order."""
        for request, ended in self._steps(prompts, max_new_tokens, seeds, batch_size):
            if ended:
                yield request.number, request.result

    def watch(
        self, prompt_ids: Sequence[int], max_new_tokens: int, seed: int = 0, plain_every: int = 0
    ) -> Iterator[Generation]:
        """Decode one prompt as ``generate`` does, and yield its growing generation after the prompt's pass and after
        every round: always the same object, at the last what ``generate`` gives. Before the first round and then every
        ``plain_every`` rounds, one without a draft is timed at the same place; 0: none. Raises UserError as
        ``generate``."""
        for request, _ in self._steps([prompt_ids], max_new_tokens, [seed], 1, plain_every):
            yield request.result

    @torch.inference_mode()
    def _steps(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        seeds: Sequence[int] | None,
        batch_size: int,
        plain_every: int = 0,
    ) -> Iterator[tuple[Request, bool]]:
        """The loop: yields every request after its prompt's pass and after each of its rounds, and whether it ended."""
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}: expected at least 1 prompt to be decoded at a time")
        for prompt in prompts:
            if not prompt or self.target.max_length - len(prompt) < 1 or max_new_tokens < 1:
                given = f"the prompt has {len(prompt)} tokens and {max_new_tokens} are to be generated"
                room = f"room for an answer in the target's context of {self.target.max_length} tokens"
                raise UserError(f"{given}: expected at least 1 of each, and {room}")
        if not prompts:
            return
        seeds = range(len(prompts)) if seeds is None else seeds
        lengths = [min(len(prompt) + max_new_tokens, self.target.max_length) for prompt in prompts]
        requests = Requests(self, min(batch_size, len(prompts)), max(lengths))
        waiting = iter(range(len(prompts)))
        for rounds in count():
            while len(requests.under_way) < batch_size and (number := next(waiting, None)) is not None:
                request = requests.begin(number, prompts[number], lengths[number] - len(prompts[number]), seeds[number])
                yield request, self._ends(requests, len(requests.under_way) - 1)
            if not requests.under_way:
                return
            tokens = len(requests.under_way) * (1 + requests.num_read)
            with limited(self.target.decoding_threads if tokens <= FEW_TOKENS and not self.repeatable else None):
                if plain_every and rounds % plain_every == 0:
                    requests.time_plain_round()
                requests.round()
            for index in reversed(range(len(requests.under_way))):
                yield requests.under_way[index], self._ends(requests, index)

    def _ends(self, requests: Requests, index: int) -> bool:
        """Whether the request of that index has all its tokens; one that has is dropped, and its result made whole."""
        request = requests.under_way[index]
        tokens, new = request.result.tokens, request.result.tokens[request.read :]
        request.read = len(tokens)
        if len(tokens) < request.limit and self.target.eos_token_ids.isdisjoint(new):
            return False
        requests.drop(index)
        request.result.tokens = truncate(tokens, request.limit, self.target.eos_token_ids)
        if request.divergence:
            request.result.divergence = torch.stack(request.divergence).tolist()
        return True
