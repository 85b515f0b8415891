"""With the drafter the target says what it would say without it."""

import math

import torch

from specdraft.check.chance import REJECTED, goodness_of_fit
from specdraft.check.outcome import Failed
from specdraft.check.rounds import BUSH, CHAIN, Draft, Recording
from specdraft.check.subject import Subject
from specdraft.check.trees import SHAPES
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import Shape, StaticTree
from specdraft.errors import UserError
from specdraft.targets import Target

_LARGE = 64  # tokens; of a larger vocabulary the 6 most likely are sampled
_SIDE_BY_SIDE = 250
_TEMPERATURE = 2.0  # the flatter, the more drafts are accepted, and the more shows what is wrong with them


def greedy_is_lossless(subject: Subject) -> str:
    """Answers at temperature 0, drafted for as chain and trees, side by side and to the end of the context, token for
    token those of the target alone. A difference is an answer that people would not have been given."""
    drafter = subject.drafter()
    target = subject.decoding_target(drafter)
    g = torch.Generator().manual_seed(subject.seed)
    late = torch.randint(target.vocab_size, (target.max_length - 5,), generator=g).tolist()
    prompts = [*subject.prompts, late] if target.max_length <= 1024 else subject.prompts
    expected = [Decoder(target).generate(prompt, 14).tokens for prompt in prompts]
    done, accepted = [], 0
    for shape in (CHAIN, *SHAPES):
        try:
            drafter.num_places(shape)
        except UserError:
            continue
        found = Decoder(target, drafter, shape).generate_batch(prompts, 14, 3)
        for number, (mine, others) in enumerate(zip(expected, found, strict=True)):
            if mine != others.tokens:
                place = next(
                    (i for i, pair in enumerate(zip(mine, others.tokens, strict=False)) if pair[0] != pair[1]), -1
                )
                says = f"with a {shape}, answer {number + 1} differs from the target's own at token {place + 1}"
                mend = "the drafter writes to what the target reads, its cache or its weights; let it leave both alone"
                raise Failed(f"{says}: expected the same tokens; {mend}")
            accepted += sum(others.accepted)
        done.append(str(shape))
    return f"{len(prompts)} answers each with a {', a '.join(done)}; {accepted} drafted tokens accepted"


def sampling_is_lossless(subject: Subject) -> str:
    """Answers above temperature 0: joint outcomes of three tokens by a chi-square test against the target's own
    probabilities, and drafted tokens against the q that the drafter says they were drawn from. Where q is another, the
    answers of a server are drawn from a distribution that is not the target's, and nobody sees it."""
    drafter = subject.drafter()
    target = subject.decoding_target(drafter)
    sampling = Sampling(_TEMPERATURE, top_k=0 if target.vocab_size <= _LARGE else 6)
    done = []
    for shape, samples in ((StaticTree.chain(2), subject.samples), (BUSH, subject.samples // 2)):
        try:
            drafter.num_places(shape)
        except UserError:
            continue
        recording = Recording(drafter, target, shape, sampling, own=True)
        recording.run([subject.prompts[0]] * samples, 3, _SIDE_BY_SIDE)
        _as_the_target(recording, subject, shape)
        done.append(f"{samples} answers with a {shape}")
    drafts = Recording(drafter, target, StaticTree.chain(3), sampling)
    found = drafts.run([subject.prompts[1]] * (subject.samples // 2), 2, _SIDE_BY_SIDE)
    return f"{', '.join(done)}; {_drawn_as_it_says([each[0] for each in found if each and each[0].tokens])}"


def _as_the_target(recording: Recording, subject: Subject, shape: Shape) -> None:
    prompt, length = subject.prompts[0], len(subject.prompts[0])
    outcomes = [tuple(answer[length:]) for answer in recording.answers]
    if any(len(outcome) < 3 for outcome in outcomes):
        outcomes = [outcome[:1] for outcome in outcomes]  # a text may end early
    p = _joint(recording.target, prompt, recording.sampling, len(outcomes[0]))
    numbers = {outcome: number for number, outcome in enumerate(p)}
    if stranger := next((outcome for outcome in outcomes if outcome not in numbers), None):
        raise Failed(f"sampled with a {shape}, the answer {list(stranger)} came, which the target never gives")
    chances = torch.tensor(list(p.values()), dtype=torch.float64)
    fits = [goodness_of_fit(torch.tensor([numbers[each] for each in outcomes]), chances)]
    for place in range(len(outcomes[0])):  # of many rare outcomes together little is seen: of each token more
        tokens = torch.tensor([answer[place] for answer in p])
        alone = chances.new_zeros(recording.target.vocab_size).index_add_(0, tokens, chances)
        fits.append(goodness_of_fit(torch.tensor([each[place] for each in outcomes]), alone))
    fit = min(1.0, len(fits) * min(fits))
    if fit < REJECTED:
        says = f"sampled with a {shape}, {len(outcomes)} answers are not distributed as the target's (p = {fit:.1e})"
        mend = "q of a draft has to be what its tokens were drawn from, as `grow` makes it"
        raise Failed(f"{says}: expected p above {REJECTED}; {mend}")


def _joint(target: Target, prompt: list[int], sampling: Sampling, length: int) -> dict[tuple[int, ...], float]:
    """Every answer of this length that can come, and how likely it is."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        ids = torch.tensor([[*prompt, *answer] for answer in found], device=target.device)
        places = torch.arange(ids.shape[1], device=target.device).expand_as(ids)
        with torch.inference_mode():
            last = target.features(ids, places).last[:, -1]
            rows = sampling.probabilities(target.logits(last)).double().cpu()
        found = {
            (*answer, token): chance * float(row[token])
            for (answer, chance), row in zip(found.items(), rows, strict=True)
            for token in row.nonzero()[:, 0].tolist()
        }
    return found


def _drawn_as_it_says(drafts: list[Draft]) -> str:
    """The drafts behind one text were drawn from the q that they come with: first tokens by a chi-square test, and all
    by how likely q says that they are, which is a sum of known mean and variance. Raises Failed."""
    if not drafts or any(draft.q is None for draft in drafts):
        return "it chooses its tokens instead of drawing them"
    rows = torch.cat([draft.q for draft in drafts if draft.q is not None]).double()
    tokens = torch.tensor([token for draft in drafts for token in draft.tokens])
    logs = rows.clamp_min(1e-300).log()
    mean = (rows * logs).sum(-1)
    spread = ((rows * logs**2).sum(-1) - mean**2).sum().sqrt()
    apart = float((logs.gather(1, tokens[:, None])[:, 0] - mean).sum() / spread.clamp_min(1e-9))
    firsts = torch.tensor([draft.tokens[0] for draft in drafts])
    said = drafts[0].q
    assert said is not None
    fit = min(math.erfc(abs(apart) / math.sqrt(2)), goodness_of_fit(firsts, said[0]))
    if fit < REJECTED:
        says = f"{len(tokens)} tokens drafted behind the same text are not drawn from the q that they come with"
        raise Failed(f"{says} (p = {fit:.1e}): expected q to be what was sampled; let `grow` make the draft")
    return f"{len(tokens)} drafted tokens drawn from their q"
