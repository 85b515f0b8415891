"""Checks that compute: the target answers some prompts, and the drafter predicts the answers under several settings.

P = prompts. Expected acceptance at step s is the mean of 1 - TV(p, q) over the positions that step s of the
training-time test predicts, with the answer's own tokens before them. If the same weights predict the answers better
with neighboring layers or the other norm, with a confidence of 99 %, then the head may have been trained with those.
Hardly trained heads do so too: of 40 and 64 steps on the embedded target by 6 to 12 % with the wrong output norm, with
which trained ones lose 19 to 40 %, and others of two steps by half of next to nothing. So a fault is a large difference
between predictions of some worth, in files that do not come from the training itself."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specdraft.data.packing import pack
from specdraft.data.prompts import Prompt, encode
from specdraft.data.tokenization.chat import Example
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.metrics import AcceptanceCounts
from specdraft.doctor.checks import DRAFT_TOKENS, Finding, LoadedDrafter, Serving, fault, note, ok
from specdraft.drafters.eagle import Eagle3
from specdraft.drafters.layers import shape_of
from specdraft.errors import UserError
from specdraft.evaluation.bootstrap import bootstrap_interval
from specdraft.export.layout import DTYPES
from specdraft.targets.batch import Batch
from specdraft.text import counted

_CONFIDENCE = 0.99  # that another setting predicts better
_WORSE = 0.85  # share of the expected acceptance below which a loss is a fault
_TRAINED = 0.2  # expected acceptance below which a head is hardly trained, whatever its setting
_COVERED = 0.9  # share of the answers' tokens that the draft vocabulary should hold
_ENOUGH = 100  # drafts by which one that is never accepted is told from a weak one
_BATCH = 8  # prompts decoded side by side; so many are decoded with the drafter


def check_predictions(
    loaded: LoadedDrafter, serving: Serving, prompts: Sequence[Prompt], max_new_tokens: int
) -> dict[str, Finding]:
    """The finding of each check that applies to this drafter. Raises UserError if no prompt fits the context."""
    system = serving.system_prompt
    if not loaded.target.tokenizer.chat_template and (system or any(len(prompt.opening) > 1 for prompt in prompts)):
        mend = "add a chat_template.jinja to the target's directory"
        return {"prompts": fault(f"conversations need a chat template, and the target's tokenizer has none: {mend}")}
    findings: dict[str, Finding] = {}
    plain = _token_ids(loaded, prompts, None, max_new_tokens)
    served = _token_ids(loaded, prompts, system, max_new_tokens) if system else plain
    if isinstance(head := loaded.drafter, Eagle3):
        answers = answer(loaded, plain, max_new_tokens)
        own = acceptance(head, loaded, answers)
        if obstacle := _obstacle(answers, own):
            return {"answers": obstacle}
        findings = _head_findings(head, loaded, answers, own, loaded.served_dtype(serving))
        if system:
            answers = answer(loaded, served, max_new_tokens)
            found = acceptance(head, loaded, answers)
            mend = "train on conversations that begin with it"
            findings["system prompt"] = _obstacle(answers, found) or _undiminished("it", found[0], own[0], mend)
    return findings | {"decoding": _decoding(loaded, served[:_BATCH], max_new_tokens)}


def answer(loaded: LoadedDrafter, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Batch]:
    """The target's greedy answers: a batch per prompt, its answer supervised."""
    batches = []
    generations = Decoder(loaded.target).generate_batch(prompts, max_new_tokens, _BATCH)
    for prompt, generation in zip(prompts, generations, strict=True):
        mask = [False] * len(prompt) + [True] * len(generation.tokens)
        batch, _ = pack([Example([*prompt, *generation.tokens], mask)], len(mask))
        batches.append(batch.to(loaded.target.device))
    return batches


@torch.no_grad()
def acceptance(
    head: Eagle3, loaded: LoadedDrafter, answers: Sequence[Batch], layers: Sequence[int] | None = None
) -> Tensor:
    """Expected acceptance in the first two steps, reading these layers of the target (None: the head's own).
    Sum and number of positions for each prompt, ``[2, P, 2]`` float64."""
    sums, head.ttt_steps = [], 2  # whatever it was trained with
    for batch in answers:
        features = batch.features(loaded.target, layers or head.layers)
        metrics = head.training_loss(batch, features, loaded.target).metrics
        sums.append([[float(metrics[f"step_{s}/{name}"]) for name in ("alpha_sum", "total")] for s in (0, 1)])
    return torch.tensor(sums, dtype=torch.float64).transpose(0, 1)


def mean(sums: Tensor) -> float:
    """Over all prompts, from ``[P, 2]``."""
    total, count = sums.sum(0).tolist()
    return total / count


def better(other: Tensor, own: Tensor) -> bool:
    """Whether ``other [P, 2]`` is the higher acceptance for certain: a bootstrap over prompts, paired."""
    columns = torch.cat([other, own], dim=1)  # [P, 4]
    interval = bootstrap_interval(columns, lambda s: s[:, 0] / s[:, 1] - s[:, 2] / s[:, 3], _CONFIDENCE)
    return interval is not None and interval[0] > 0


def _token_ids(loaded: LoadedDrafter, prompts: Sequence[Prompt], system: str | None, room: int) -> list[list[int]]:
    before = [{"role": "system", "content": system}] if system else []
    rendered = [encode(loaded.target.tokenizer, [*before, *prompt.opening]) for prompt in prompts]
    fitting = [ids for ids in rendered if len(ids) + room <= loaded.target.max_length]
    if not fitting:
        raise UserError(
            f"none of the {len(prompts)} prompts leaves room for {room} tokens in the target's context of "
            f"{loaded.target.max_length}: lower max_new_tokens or give shorter prompts with traffic="
        )
    return fitting


def _obstacle(answers: Sequence[Batch], sums: Tensor) -> Finding | None:
    """Why nothing can be said, if so. ``sums``: ``[2, P, 2]``."""
    total = sums.sum(1)  # [2, 2]
    if (total[:, 1] == 0).any():
        tokens = sum(int(batch.loss_mask.sum()) for batch in answers)
        few = f"{counted(tokens, 'token')} to {counted(len(answers), 'prompt')}"
        short = f"the target's answers are too short to judge by, {few}"
        return note(f"{short}: give other prompts with traffic=, or a larger max_new_tokens")
    if not total.isfinite().all():
        mend = "give target.dtype=float32, or take the head from a sound checkpoint"
        return fault(f"the head's predictions are not finite: expected finite weights and hidden states; {mend}")
    return None


def _head_findings(
    head: Eagle3, loaded: LoadedDrafter, answers: Sequence[Batch], own: Tensor, dtype: str
) -> dict[str, Finding]:
    """Whether the head predicts better with other settings than its own, or worse once it is served."""
    shifted = [[k + shift for k in head.layers] for shift in (-1, 1)]
    readable = [layers for layers in shifted if layers[0] > 0 and layers[-1] <= loaded.target.num_layers]
    others = {f"layers={layers}": acceptance(head, loaded, answers, layers)[0] for layers in readable}
    numbers = "eagle_aux_hidden_state_layer_ids, which is off by one"
    known = loaded.settings_known
    findings = {"layers": compared(f"layers={list(head.layers)}", own[0], others, numbers, known)}

    # Step 1 is the first that reads the head's own output. Neither option has a tensor that would tell.
    for check, part, option, step in (
        ("norm", head, "norm_output", 1),
        ("residual", head.midlayer, "norm_before_residual", 0),
    ):
        used = getattr(part, option)
        setattr(part, option, not used)
        other = acceptance(head, loaded, answers)[step]
        setattr(part, option, used)
        findings[check] = compared(f"{option}={used}", own[step], {f"{option}={not used}": other}, option, known)

    findings |= _epsilon(head, loaded, answers, own[0])

    # Weights are rounded to the served dtype; the arithmetic stays in the target's.
    kept = {name: value.clone() for name, value in head.state_dict().items()}
    rounded = acceptance(head.to(DTYPES[dtype]).to(loaded.target.dtype), loaded, answers)[0]
    head.load_state_dict(kept)
    findings["rounding"] = _undiminished(f"weights rounded to {dtype}", rounded, own[0], "serve it in a wider dtype")

    tokens = torch.cat([batch.input_ids[batch.loss_mask] for batch in answers])
    covered = float(torch.isin(tokens, head.draft_ids).float().mean())
    trained = loaded.recorded("data", "train_coverage")
    said = f"it holds {covered:.1%} of the target's answers" + (f" (in training {trained:.1%})" if trained else "")
    mend = f"expected at least {_COVERED:.0%}; train with a larger model.draft_vocab_size, on this traffic"
    findings["draft vocabulary"] = ok(said) if covered >= _COVERED else fault(f"{said}: {mend}")
    return findings


def _epsilon(head: Eagle3, loaded: LoadedDrafter, answers: Sequence[Batch], own: Tensor) -> dict[str, Finding]:
    """Whether the head predicts better with the target's ``rms_norm_eps``, where it has another one."""
    used, theirs = head.config()["rms_norm_eps"], shape_of(loaded.target, None)["rms_norm_eps"]
    if used == theirs:
        return {}
    norms = [module for module in head.modules() if isinstance(module, LlamaRMSNorm)]
    kept = [norm.variance_epsilon for norm in norms]
    for norm in norms:
        norm.variance_epsilon = theirs
    other = acceptance(head, loaded, answers)[0]
    for norm, epsilon in zip(norms, kept, strict=True):
        norm.variance_epsilon = epsilon
    name = "rms_norm_eps"
    others = {f"{name}={theirs:g} as the target": other}
    return {"norm epsilon": compared(f"{name}={used:g}", own, others, f"{name} in config.json", loaded.settings_known)}


def compared(setting: str, own: Tensor, others: Mapping[str, Tensor], mend: str, known: bool) -> Finding:
    """A fault if another setting predicts the answers better than the head's own, for certain, by far, and well; else,
    or if the head's own is ``known`` to be that of its training, a note."""
    certain = {name: mean(other) for name, other in others.items() if better(other, own)}
    if not certain:
        return ok(", ".join(f"{mean(sums):.3f} with {name}" for name, sums in {setting: own, **others}.items()))
    name = max(certain, key=certain.__getitem__)
    better_by = f"with {name} the head predicts {certain[name]:.3f} of the target's tokens"
    said = f"{better_by}, with its {setting} {mean(own):.3f}"
    if known:
        return note(f"{said}, as it was trained: it is hardly trained, or for other text; train it longer, or on this")
    if mean(own) > certain[name] * _WORSE or certain[name] < _TRAINED:
        return note(f"{said}: a head that is hardly trained may do so; if this one is well trained, correct {mend}")
    return fault(f"{said}: expected the setting of its training; correct {mend}")


def _undiminished(change: str, found: Tensor, own: Tensor, mend: str) -> Finding:
    said = f"expected acceptance {mean(found):.3f} with {change}, {mean(own):.3f} without"
    alike = mean(found) >= mean(own) * _WORSE  # not so for NaN
    return ok(said) if alike else fault(f"{said}: expected nearly the same; {mend}")


def _decoding(loaded: LoadedDrafter, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Finding:
    recorded = loaded.recorded("decoding", "num_draft_tokens")
    depth = recorded or DRAFT_TOKENS
    counts, emitted = AcceptanceCounts(depth), torch.zeros(loaded.target.vocab_size, dtype=torch.int64)
    for generation in Decoder(loaded.target, loaded.drafter, depth).generate_batch(prompts, max_new_tokens, _BATCH):
        counts.add(generation)
        emitted += torch.bincount(torch.tensor(generation.tokens), minlength=len(emitted))
    if not counts.rounds:
        return note("every answer ends with its first token, so nothing was drafted: give other prompts with traffic=")
    trained = loaded.recorded("training", "live_acceptance_length")
    beside = "" if trained is None else f"; during training, on its held-out prompts, {trained:.2f}"
    chosen = "as the checkpoint says" if recorded else "these files say none"
    said = f"acceptance length {counts.acceptance_length:.2f} decoded greedily, K = {depth} ({chosen})"
    said = f"{said}, on {counted(len(prompts), 'prompt')}{beside}"
    trainable = any(True for _ in loaded.drafter.parameters())  # of look-ups nothing is to be mended
    worthless = floor(said, counts, int(emitted.max()) / int(emitted.sum())) if trainable else None
    return worthless or note(said)


def floor(said: str, counts: AcceptanceCounts, commonest: float) -> Finding | None:
    """What is wrong with a draft that is accepted no oftener than chance, if it is. commonest: share of the answers'
    tokens that always drafting the most frequent one would get right. A fault only if nothing at all was accepted of
    many tokens: heads of few steps first learn which tokens are frequent."""
    drafted, accepted = counts.drafted_per_position[0], counts.accepted_per_position[0]
    if drafted < _ENOUGH or accepted > commonest * drafted:
        return None
    look = (
        "look for another target, weights that are zero or constant, norms whose epsilon is not the target's "
        "rms_norm_eps, or another layout; if all is as in training, train it longer"
    )
    if not accepted:
        return fault(f"{said}: nothing of {drafted} drafts was accepted, so that it costs time and saves none; {look}")
    guess = f"always drafting the answers' most frequent token would have {commonest:.0%}"
    return note(f"{said}: {accepted / drafted:.0%} of first drafted tokens were accepted, and {guess}; {look}")
