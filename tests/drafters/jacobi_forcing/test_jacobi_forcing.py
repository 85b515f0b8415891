"""Jacobi Forcing: what a guess reads, what is learned and by whom, and that the tuned model decodes itself."""

import copy
from dataclasses import replace

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.sampling import Sampling
from specdraft.drafters.checkpoint import load_drafter, save_drafter
from specdraft.drafters.jacobi_forcing import JacobiForcing
from specdraft.drafters.jacobi_forcing.noisy_text import NoisyText
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.targets.batch import Batch
from tests.drafters.counting import CountedFlops
from tests.drafters.drafts import CLOSE, features_of, whole
from tests.drafters.jacobi_forcing.conftest import SMALL, trained
from tests.fakes import random_prompts, tiny_llama, transformers_greedy
from tests.families import FAMILIES, V

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other


def of_family(name: str, packed: Batch) -> tuple[Target, Batch]:
    return Target.from_model(FAMILIES[name].build()), replace(packed, input_ids=packed.input_ids % V)


def logits_of_guesses(drafter: JacobiForcing, target: Target, batch: Batch) -> tuple[NoisyText, torch.Tensor]:
    """The text as training reads it, guesses of all kinds in it, and what the adapted target says after each."""
    model = drafter.learning(target)
    torch.manual_seed(3)
    text = drafter.train().noisy_text(batch, model)
    drafter.eval()
    last = model.masked_features(text.ids, text.positions, text.attend, text.visible).last[0]
    return text, model.logits(last[text.size :]).detach()


def check_against_a_plain_pass(drafter: JacobiForcing, target: Target, batch: Batch) -> None:
    """Each guess alone behind its document's text up to the anchor and its block's guesses, by the merged model."""
    text, found = logits_of_guesses(drafter, target, batch)
    tuned, begins = drafter.tuned(target), text.begins.tolist()
    tokens, guesses = text.tokens.tolist(), text.ids[0, text.size :].tolist()
    assert text.num_guesses > 10
    for index, (anchor, depth) in enumerate(zip(text.anchors.tolist(), text.depths.tolist(), strict=True)):
        first = max(begin for begin in begins if begin <= anchor)
        ids = tokens[first : anchor + 1] + guesses[index - depth + 1 : index + 1]
        expected = tuned.model(torch.tensor([ids])).logits[0, -1]
        torch.testing.assert_close(found[index], expected, **CLOSE)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "granite", "qwen3-moe"])
@torch.no_grad()
def test_a_guess_reads_the_text_before_and_its_own_block(family, packed):
    """With plain attention, and under masks of windows and soft-caps."""
    target, batch = of_family(family, packed)
    check_against_a_plain_pass(trained(target), target, batch)


@pytest.mark.parametrize("wrong", ["all before", "no own", "later text"])
@torch.no_grad()
def test_the_comparison_sees_another_mask(wrong, packed, monkeypatch):
    target, batch = of_family("gemma2", packed)
    visible = NoisyText.visible

    def mutant(text: NoisyText) -> torch.Tensor:
        seen = visible(text).clone()
        guess = torch.arange(text.size, seen.shape[-1])
        if wrong == "all before":
            seen = torch.ones_like(seen).tril()
        elif wrong == "no own":
            seen[:, guess[:, None], guess] = torch.eye(len(guess), dtype=torch.bool)
        else:
            seen[0, guess, (text.anchors + 1)] = True
        return seen

    drafter = trained(target)
    monkeypatch.setattr(NoisyText, "visible", mutant)
    with pytest.raises(AssertionError, match="not close"):
        check_against_a_plain_pass(drafter, target, batch)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@torch.no_grad()
def test_documents_do_not_see_each_other(family, packed):
    target, batch = of_family(family, packed)
    drafter = trained(target, from_text=0.0, own_guesses=0.0)
    _, found = logits_of_guesses(drafter, target, batch)
    ids = batch.input_ids.clone()
    ids[0, :9] = (ids[0, :9] + 1) % V  # the first document
    text, others = logits_of_guesses(drafter, target, replace(batch, input_ids=ids))
    changed = text.anchors < 9
    assert changed.any() and (found - others)[changed].abs().max() > 1e-3
    torch.testing.assert_close(found[~changed], others[~changed], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_the_loss_is_that_of_plain_formulas(divergence, packed):
    """A guess learns what the frozen target says after the right text; the clean text what it says there."""
    target, batch = of_family("gemma3", packed)  # whose head has a soft-cap
    drafter = trained(target, divergence=divergence, ar_weight=3.0)
    found = drafter.training_loss(batch, features_of(target, batch), target)
    text = drafter.noisy_text(batch, drafter.learning(target))
    tuned = drafter.tuned(target)
    teacher = target.logits(features_of(target, batch).last.flatten(0, 1)).log_softmax(-1)
    clean = tuned.logits(features_of(tuned, batch).last.flatten(0, 1)).log_softmax(-1)
    _, guessed = logits_of_guesses(trained(target, from_text=0.0, own_guesses=0.0), target, batch)
    guessed = guessed.log_softmax(-1)

    def mean(log_p, log_q):
        if divergence == "reverse_kl":
            log_p, log_q = log_q, log_p
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean()

    of_clean = mean(teacher[text.learned], clean[text.learned])
    of_guesses = mean(teacher[text.anchors + text.depths], guessed)
    torch.testing.assert_close(found.loss, 3 * of_clean + of_guesses, **CLOSE)
    values = found.metrics
    torch.testing.assert_close(values["clean_loss_sum"] / values["clean_loss_total"], of_clean, **CLOSE)
    right = teacher.argmax(-1)[text.anchors + text.depths] == guessed.argmax(-1)
    assert values["step_0/match_sum"] == right[text.depths == 1].sum()
    assert values["step_0/total"] == (text.depths == 1).sum()


def test_parts_add_up_to_the_whole(packed, target):
    """Each sum is divided by the count of the whole batch."""
    drafter = trained(target)

    def loss(batch: Batch, *totals):
        return drafter.training_loss(batch, features_of(target, batch), target, *totals).loss

    totals = drafter.count_supervised(packed).double().tolist()
    parts = [Batch(*(value[row : row + 1] for value in vars(packed).values())) for row in range(2)]
    torch.testing.assert_close(sum(loss(part, totals) for part in parts), loss(packed))
    assert sum(drafter.count_supervised(part) for part in parts).tolist() == totals


def test_adapters_alone_learn_and_they_do(packed, target):
    """With guesses of all kinds; the frozen target is the same to the bit."""
    before = copy.deepcopy(target.model.state_dict())
    drafter = JacobiForcing.for_target(target, **SMALL).double().train()
    parameters = list(drafter.parameters())
    assert all(parameter.requires_grad for parameter in parameters) and len(parameters) == 6 * 7 * 2
    optimizer = torch.optim.Adam(parameters, lr=5e-3)
    features, losses = features_of(target, packed), []
    for step in range(40):
        torch.manual_seed(step)
        result = drafter.training_loss(packed, features, target)
        optimizer.zero_grad()
        result.loss.backward()
        if step > 0:  # an adapter's first matrix moves once its second is no longer zero
            assert all(parameter.grad.abs().sum() > 0 for parameter in parameters)
        optimizer.step()
        losses.append(result.loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert all(torch.equal(before[name], value) for name, value in target.model.state_dict().items())
    assert all(parameter.grad is None for parameter in target.model.parameters())


def test_a_batch_with_nothing_to_learn_gives_zeros(packed, target):
    packed.loss_mask.zero_()
    drafter = trained(target).train()
    result = drafter.training_loss(packed, features_of(target, packed), target)
    result.loss.backward()
    assert result.loss == 0 and all((parameter.grad == 0).all() for parameter in drafter.parameters())


def test_a_checkpoint_holds_the_adapters_and_gives_the_same_model(tmp_path):
    target = Target.from_model(tiny_llama())
    drafter = trained(target, target_modules=["q_proj", "up_proj"])
    path = save_drafter(drafter, tmp_path / "drafter", target.identity)
    again, config = load_drafter(path)
    assert sum(value.numel() for value in again.state_dict().values()) == 2 * (3 * (32 + 32) + 3 * (32 + 48))
    assert again.config() == drafter.config() and config["drafter"]["rank"] == 3
    ids = torch.arange(9)[None]
    assert torch.equal(again.tuned(target).model(ids).logits, drafter.tuned(target).model(ids).logits)
    copied = copy.deepcopy(drafter)
    assert torch.equal(copied.tuned(target).model(ids).logits, drafter.tuned(target).model(ids).logits)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_tuned_model_decodes_as_it_does_alone(rows):
    target = Target.from_model(tiny_llama())
    drafter = trained(target)
    tuned = drafter.tuned(target)
    assert tuned.identity.name == "in-memory, tuned" and tuned.identity.weights_hash != target.identity.weights_hash
    prompts = random_prompts(5, [1, 2, 9])
    plain = transformers_greedy(tuned.model, prompts, 60)
    assert plain != transformers_greedy(target.model, prompts, 60)
    found = Decoder(tuned, drafter, 4).generate_batch(prompts, 60, rows)
    assert [each.tokens for each in found] == plain
    assert sum(map(sum, (each.accepted for each in found))) > 0
    sampled = Decoder(tuned, drafter, 4, Sampling(1.0)).generate(prompts[0], 20)
    assert len(sampled.tokens) == 20 and not drafter.draws


def test_the_arithmetic_is_what_is_counted(target):
    batch = whole(random_prompts(1, [96], 97)[0])
    features = features_of(target, batch)
    for own in (0.0, 0.5):
        drafter = JacobiForcing.for_target(target, **SMALL | {"own_guesses": own}).double().train()
        drafter.learning(target)
        with CountedFlops() as counted:
            drafter.training_loss(batch, features, target).loss.backward()
        # The head is read where something is learned; attention of blocks is counted in full.
        assert sum(drafter.training_flops(96)) == pytest.approx(counted.count.total() / 96, rel=0.25)
    assert drafter.activation_bytes(96, 4) == 4 * drafter.activation_bytes(24, 4) > 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rank": 0}, "model.drafter.rank is 0"),
        ({"block_size": 0}, "model.drafter.block_size is 0"),
        ({"noise_steps": 1.5}, "model.drafter.noise_steps is 1.5"),
        ({"from_text": 2}, "model.drafter.from_text is 2"),
        ({"own_guesses": -0.1}, "model.drafter.own_guesses is -0.1"),
        ({"ar_weight": -1}, "model.drafter.ar_weight is -1"),
        ({"divergence": "none"}, "the divergence is 'none'"),
        ({"draft_vocabulary": torch.arange(5)}, "has 5 of 97 ids: the target itself guesses"),
    ],
)
def test_bad_options(target, options, sentence):
    with pytest.raises(UserError, match=sentence):
        JacobiForcing.for_target(target, **options)


def test_zero3_is_refused(target, packed):
    drafter = trained(target)
    next(drafter.parameters()).ds_id = 0
    with pytest.raises(UserError, match="expected strategy=ddp, deepspeed_zero1 or deepspeed_zero2"):
        drafter.training_loss(packed, features_of(target, packed), target)
