"""What training compares with the target is what is decoded; packing and dropped masks change no expectation."""

import pytest
import torch

from specdraft.drafters.objective import objective
from specdraft.drafters.pard import Pard
from specdraft.errors import UserError
from specdraft.targets.batch import Batch
from tests.drafters.alone import Alone
from tests.drafters.drafts import CLOSE, LORA, PROMPT, features_of, logits_of, noisy, whole
from tests.families import V


@pytest.fixture
def steps_of(monkeypatch):
    """steps_of(draft, batch) -> of every step the logits ``[n, V]`` that the loss compares, and where."""

    def run(draft, batch):
        seen = []

        def spy(weights, teacher, steps, divergence):
            seen.extend(((step.hidden @ weights[0].T).detach(), step.positions) for step in steps)
            return objective(weights, teacher, steps, divergence)

        with monkeypatch.context() as patch:
            patch.setattr("specdraft.drafters.draft_model.objective", spy)
            draft.training_loss(batch, features_of(draft.target, batch), draft.target)
        return seen

    return run


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3", "gemma2", "granite", "cohere"])
def test_training_logits_equal_decoding_logits(family, build, steps_of):
    """After rounds that accepted nothing, some, or all of a draft; whether attention is made by mask or without."""
    draft, text = build(family).eval(), list(PROMPT)
    state, decoded = Alone(draft, text[0]), []
    state.advance(torch.tensor(text[1:]))
    for emitted in (4, 1, 3, 5, 2):
        decoded.append((len(text) - 1, state.along([7, 8, 9])))
        told = [(3 * len(text) + place) % V for place in range(emitted)]
        state.advance(torch.tensor(told))
        text += told
    trained = steps_of(draft, whole([*text, 1, 2, 3]))
    assert len(trained) == 4
    for anchor, logits in decoded:
        for step, (known, positions) in enumerate(trained):
            row = (positions == anchor + step).nonzero()[0, 0]
            torch.testing.assert_close(logits[step], known[row], **CLOSE)


def test_packing_changes_nothing(target, packed):
    draft = noisy(Pard.for_target(target, mask_token=5, num_drafts=3, sample_positions=False))
    together = draft.training_loss(packed, features_of(target, packed), target)
    together.loss.backward()
    gradient = draft.language_model.head.weight.grad.clone()
    draft.zero_grad()
    totals, sums = [float(together.metrics[f"step_{step}/total"]) for step in range(3)], {}
    for row, here in ((0, slice(0, 9)), (0, slice(9, 23)), (1, slice(0, 20))):
        alone = Batch(*(getattr(packed, name)[row : row + 1, here] for name in Batch.__dataclass_fields__))
        found = draft.training_loss(alone, features_of(target, alone), target, totals)
        found.loss.backward()
        for name, value in found.metrics.items():
            sums[name] = sums.get(name, 0) + value
    assert totals == draft.count_supervised(packed).tolist() == [5 + 8 + 5 + 6, 4 + 7 + 4 + 5, 3 + 6 + 3 + 4]
    for name, value in sums.items():
        torch.testing.assert_close(together.metrics[name], value, **CLOSE)
    torch.testing.assert_close(draft.language_model.head.weight.grad, gradient, **CLOSE)


def test_a_step_learns_from_a_share_of_the_step_before(target, packed):
    torch.manual_seed(0)
    draft = noisy(Pard.for_target(target, mask_token=5, num_drafts=4))
    assert [draft.decay.share(step) for step in range(7)] == pytest.approx([1, 0.7, 0.49, 0.343, 0.2401, 0.2, 0.2])
    features, counts, loss = features_of(target, packed), torch.zeros(4), 0.0
    with torch.no_grad():
        for _ in range(80):
            found = draft.training_loss(packed, features, target)
            counts += torch.stack([found.metrics[f"step_{step}/total"] for step in range(4)])
            loss += found.loss / 80
        expected = draft.count_supervised(packed) * torch.tensor([1, 0.7, 0.49, 0.343])
        torch.testing.assert_close(counts / 80, expected, rtol=0.1, atol=0)
        draft.eval()  # validation takes all, and weighs them as they would have been drawn
        torch.testing.assert_close(draft.training_loss(packed, features, target).loss, loss, rtol=0.05, atol=0)


def test_the_draw_is_no_part_of_the_files(target):
    draft = Pard.for_target(target, num_drafts=3, mask_token=5)
    again = Pard(**draft.config())
    again.load_state_dict(draft.state_dict())
    assert again.config() == draft.config() and (again.mask_token, again.num_drafts) == (5, 3)
    assert "mask_token" not in draft.training_options


def test_adapters_are_merged_into_a_draft_of_the_same_kind(build):
    draft = build()
    draft.adapt(LORA)
    noisy(draft, seed=2)
    served = draft.served()
    assert type(served) is Pard and served.config() == draft.config() | {"lora": None}
    torch.testing.assert_close(logits_of(served), logits_of(draft), **CLOSE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_token": 97}, "mask_token is 97: expected a token of 0 to 96"),
        ({"num_drafts": 0}, "num_drafts is 0: expected at least 1"),
        ({"step_decay": 1.5}, "a decay of 1.5 is a share"),
        ({"draft_vocabulary": torch.arange(50)}, "expected model.draft_vocab_size=null"),
    ],
    ids=str,
)
def test_bad_options_are_refused(target, options, message):
    with pytest.raises(UserError, match=message):
        Pard.for_target(target, **options)
