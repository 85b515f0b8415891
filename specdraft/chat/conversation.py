"""A conversation with a target that a drafter helps, answer by answer, and the time that plain decoding takes."""

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specdraft.data.prompts import encode
from specdraft.data.sources.base import Message
from specdraft.data.tokenization.chat import answer_in_words
from specdraft.decoding.compilation import compiling, wanted
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.generation import Generation
from specdraft.decoding.shapes import AUTO
from specdraft.decoding.trace import Segment, SegmentStream
from specdraft.drafters.quantization import ready_to_decode
from specdraft.errors import UserError
from specdraft.evaluation.settings import EvaluationSettings, drafted
from specdraft.export.engine import GREEDY

if TYPE_CHECKING:
    from specdraft.drafters.base import Drafter
    from specdraft.targets import Target

_WARM_UP_TOKENS = 16
_WARM_UP = "Hello! Who are you?"


@dataclass
class Answer:
    """An answer that grows: its tokens as text, its counts and seconds. drafted: whether a drafter helped."""

    question: str
    drafted: bool
    generation: Generation
    segments: list[Segment] = field(default_factory=list)


def check_settings(settings: EvaluationSettings, plain_every: int) -> None:
    """Raises UserError unless the settings are one way of decoding, and ``plain_every`` is a number of rounds."""
    if len(settings.temperatures) != 1:
        given = f"decoding.temperature is {list(settings.temperatures)}"
        raise UserError(f"{given}: expected one number, as an answer is decoded at one temperature")
    if settings.batch_size != 1:
        raise UserError(
            f"decoding.batch_size is {settings.batch_size}: expected 1, as a chat has one request at a time"
        )
    if settings.search is not None:
        said = "decoding.num_draft_tokens" if settings.num_draft_tokens == AUTO else "decoding/shape"
        wanted = "what specdraft evaluate finds with it (found_drafts in evaluation.json)"
        raise UserError(f"{said} is auto, for which an evaluation measures: expected {wanted}")
    if not isinstance(plain_every, int) or plain_every < 0:
        raise UserError(f"plain_every is {plain_every}: expected 0 (not measured) or a positive number of rounds")


class Conversation:
    """What was said so far, and how the next answer is decoded.

    drafting: whether the drafter helps, to be switched at any time. messages: what the target reads before the next
    question. answers: all that were given, those from before a reset too."""

    def __init__(
        self,
        target: "Target",
        drafter: "Drafter | None",
        settings: EvaluationSettings,
        system: str | None = None,
        plain_every: int = 8,
    ) -> None:
        """``system``: the message that every conversation begins with. ``plain_every``: in a drafted answer, a round
        without a draft is timed every so many rounds; 0 for none. Raises UserError as ``check_settings``, and for a
        target without a tokenizer."""
        if target.tokenizer is None:
            raise UserError("the target has no tokenizer: expected one in its directory")
        check_settings(settings, plain_every)
        settings = settings.known(target)
        self.target, self.drafter, self.settings = target, drafter, settings
        self.plain_every = plain_every
        self.remembers = bool(getattr(target.tokenizer, "chat_template", None))
        if system is not None and not self.remembers:
            raise UserError("the target's tokenizer has no chat template, which system= needs: expected system=null")
        sampling = settings.sampling(settings.numbers[0])
        self._plain = Decoder(target, sampling=sampling, trace=True)
        self._drafted: Decoder | None = None
        drafts = "no drafter"
        if drafter is not None:
            drafter.eval()
            way = GREEDY if sampling.greedy or not drafter.draws else settings.draftings(None)[0]
            shape = drafted(settings.draft_shape(drafter, target), way)
            self._drafted = Decoder(target, drafter, shape, sampling, settings.rule, trace=True)
            drafts = f"{drafter.family}, {shape}"
        self.description = f"{target.identity.name} \u00b7 {drafts} \u00b7 {sampling}"
        self.drafting = drafter is not None
        self._opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.answers: list[Answer] = []
        self.reset()

    def reset(self) -> None:
        """The next question begins a conversation of its own."""
        self.messages = list(self._opening)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Inside, answers are decoded at full speed: passes compiled and weights packed as for an evaluation, and
        buffers and kernels chosen by a first decoding of each kind."""
        with ExitStack() as stack:
            stack.enter_context(compiling(wanted(self.settings.compile, self.target.device)))
            if self.drafter is not None:
                stack.enter_context(ready_to_decode(self.drafter))
            ids = encode(self.target.tokenizer, [{"role": "user", "content": _WARM_UP}])
            for decoder in filter(None, (self._plain, self._drafted)):
                decoder.generate(ids, min(_WARM_UP_TOKENS, self.settings.max_new_tokens), self.settings.seed)
            yield

    def ask(self, question: str) -> Generator[Answer, None, None]:
        """Yield the answer after every round, always the same object. Whoever stops early keeps what has been said.
        Raises UserError, and forgets the question, where there is no room for an answer in the target's context."""
        asked: Message = {"role": "user", "content": question}
        if not self.remembers:
            self.reset()
        ids = encode(self.target.tokenizer, [*self.messages, asked])
        if len(ids) >= self.target.max_length:
            said = f"the conversation has {len(ids)} tokens and the target's context {self.target.max_length}"
            raise UserError(f"{said}: expected room for an answer; ask less, or forget what was said with /new")
        decoder = self._drafted if self.drafting and self._drafted is not None else self._plain
        seed = self.settings.seed + len(self.answers)
        stream, answer = SegmentStream(self.target.tokenizer), None
        try:
            plain_every = self.plain_every if decoder is self._drafted else 0
            for generation in decoder.watch(ids, self.settings.max_new_tokens, seed, plain_every):
                if answer is None:
                    answer = Answer(question, decoder is self._drafted, generation)
                    self.answers.append(answer)
                if generation.trace is not None:
                    answer.segments += stream.read(generation.trace, len(generation.tokens))
                yield answer
        finally:
            if answer is not None:
                said = answer_in_words(self.target.tokenizer, answer.generation.tokens)
                self.messages += [asked, {"role": "assistant", "content": said}]
