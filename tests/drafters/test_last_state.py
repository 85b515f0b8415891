"""What Medusa, Hydra and ReDrafter share: training and decoding are the same function, and every step is trained."""

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import DynamicTree, StaticTree
from specdraft.drafters import last_state
from specdraft.drafters.alignment import align
from specdraft.drafters.checkpoint import load_drafter, save_drafter
from specdraft.drafters.hydra import Hydra
from specdraft.drafters.medusa import Medusa
from specdraft.drafters.redrafter import ReDrafter
from specdraft.errors import UserError
from specdraft.targets import Features, Target
from specdraft.targets.batch import Batch
from tests.drafters.alone import Alone
from tests.fakes import random_prompts, tiny_llama, transformers_greedy

STEPS = 4
VOCABULARY = torch.arange(3, 97, 2)
TREE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0)))

every = pytest.mark.parametrize("kind", [Medusa, Hydra, ReDrafter])


def drafter_for(kind, target, vocabulary=VOCABULARY, seed=0, noise=0.1, steps=STEPS, decay=0.8, **options):
    torch.manual_seed(seed)
    names = ("ttt_steps", "step_decay") if kind is ReDrafter else ("num_heads", "head_decay")
    options |= dict(zip(names, (steps, decay), strict=True))
    drafter = kind.for_target(target, vocabulary, **options).to(target.dtype)
    with torch.no_grad():  # far from the identity: every part must matter
        for parameter in drafter.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return drafter


def features_of(target, batch):
    return target.features(batch.input_ids, batch.position_ids, ())


def training_logits(drafter, batch, monkeypatch):
    """The logits that the loss compares with the target, ``[n_i, Vd]`` per step."""
    seen = []
    real = last_state.objective

    def spy(weights, teacher, steps, divergence):
        seen.extend((step.hidden @ weights[step.head].T).detach() for step in steps)
        return real(weights, teacher, steps, divergence)

    monkeypatch.setattr(last_state, "objective", spy)
    drafter.training_loss(batch, features_of(drafter.target, batch), drafter.target)
    return seen


def state_after(drafter, batch, length=9):
    ids = batch.input_ids[:1, : length + 1]
    features = drafter.target.features(ids[:, :-1], batch.position_ids[:1, :length], ())
    state = Alone(drafter, int(ids[0, 0]))
    state.advance(ids[0, 1:], features)
    return state


@every
@pytest.mark.parametrize("options", [{}, {"num_layers": 3}], ids=str)
def test_training_logits_equal_decoding_logits(kind, options, target, packed, monkeypatch):
    drafter = drafter_for(kind, target, **options)
    trained = training_logits(drafter, packed, monkeypatch)
    aligned, features = align(packed, STEPS), features_of(target, packed)
    checked = 0
    for row in aligned.supervised[0].tolist():
        first = max(start for start in aligned.documents.table[1].tolist() if start <= row)
        state = Alone(drafter, int(aligned.tokens[first]))
        known = Features(*(part.flatten(0, 1)[None, first : row + 1] for part in features))
        state.advance(aligned.tokens[first + 1 : row + 2], known)
        path = aligned.tokens[row + 2 : row + 1 + STEPS].tolist()
        for head, decoded in enumerate(state.along(path)):
            place = (aligned.supervised[head] == row).nonzero()[:, 0]
            if len(place):
                torch.testing.assert_close(decoded, trained[head][place[0]], rtol=1e-10, atol=1e-10)
                checked += 1
    assert checked == sum(map(len, aligned.supervised)) > 60


@every
@pytest.mark.parametrize("divergence", ["forward_kl", "cross_entropy"])
def test_the_loss_compares_each_step_with_the_token_that_it_drafts(kind, divergence, target, packed, monkeypatch):
    drafter = drafter_for(kind, target, divergence=divergence, decay=0.5)
    result = drafter.training_loss(packed, features_of(target, packed), target)
    logits = training_logits(drafter, packed, monkeypatch)
    last, ids = features_of(target, packed).last.flatten(0, 1), packed.input_ids.flatten()
    expected = torch.zeros((), dtype=torch.float64)
    for head, (z, at) in enumerate(zip(logits, align(packed, STEPS).supervised, strict=True)):
        log_q = z.log_softmax(-1)
        if divergence == "forward_kl":  # step 0 drafts the token after the emitted one
            log_p = target.logits(last[at + 1 + head])[:, VOCABULARY].log_softmax(-1)
            values = (log_p.exp() * (log_p - log_q)).sum(-1)
        else:
            known = ids[at + 2 + head][:, None] == VOCABULARY  # a token outside the draft vocabulary adds nothing
            values = -(log_q * known).sum(-1)
        expected += 0.5**head * values.mean()
    torch.testing.assert_close(result.loss.detach(), expected, rtol=1e-9, atol=0)


@every
def test_a_drafter_is_trained_for_the_target_that_it_is_given(kind, target, packed):
    """A checkpoint is loaded without its target; the first loss brings it."""
    drafter = drafter_for(kind, target)
    alone = kind(**drafter.config()).to(target.dtype)
    alone.load_state_dict(drafter.state_dict())
    loss = alone.training_loss(packed, features_of(target, packed), target).loss
    assert loss == drafter.training_loss(packed, features_of(target, packed), target).loss
    assert alone.target is target


@every
@pytest.mark.parametrize("shape", [TREE, DynamicTree(STEPS, 3, 12)], ids=str)
def test_every_node_of_a_tree_is_drafted_from_its_own_path(kind, shape, target, packed):
    drafter = drafter_for(kind, target)
    state = state_after(drafter, packed)
    tree = state.draft(shape)
    assert tree.num_nodes == shape.num_nodes
    read, paths = [([], state.read[0][1][0])], [[]]
    for level, logits in state.read[1:]:
        nodes = zip(level.parents[0].tolist(), level.tokens[0].tolist(), strict=True)
        paths = [[*paths[above], token] for above, token in nodes]
        read.extend(zip(paths, logits[0], strict=True))
    assert len(read) > shape.depth and max(len(path) for path, _ in read) == shape.depth - 1
    for path, logits in read:
        torch.testing.assert_close(state.along(path)[-1], logits, rtol=1e-9, atol=1e-9)


@every
def test_a_sampled_draft_tells_the_distribution_that_it_came_from(kind, target, packed):
    drafter = drafter_for(kind, target)
    state = state_after(drafter, packed)
    sampling = Sampling(temperature=1.5, top_k=5)
    tree = state.draft(StaticTree.chain(STEPS), sampling)
    logits = state.along(tree.tokens[0, :-1].tolist())
    torch.testing.assert_close(tree.q[0][:, VOCABULARY], sampling.probabilities(logits))
    assert (tree.q[..., ~drafter.t2d] == 0).all() and (tree.q[0, torch.arange(STEPS), tree.tokens[0]] > 0).all()


@every
def test_packing_changes_nothing(kind, target, packed):
    drafter = drafter_for(kind, target)
    together = drafter.training_loss(packed, features_of(target, packed), target)
    sums: dict[str, torch.Tensor] = {}
    for row, here in ((0, slice(0, 9)), (0, slice(9, 23)), (1, slice(0, 20))):
        alone = Batch(*(getattr(packed, name)[row : row + 1, here] for name in Batch.__dataclass_fields__))
        for name, value in drafter.training_loss(alone, features_of(target, alone), target).metrics.items():
            sums[name] = sums.get(name, 0) + value
    assert together.metrics.keys() == sums.keys()
    for name, value in sums.items():
        torch.testing.assert_close(together.metrics[name], value, rtol=1e-9, atol=1e-9)
    mean = sum(0.8**i * sums[f"step_{i}/loss_sum"] / sums[f"step_{i}/total"] for i in range(STEPS))
    torch.testing.assert_close(together.loss, mean, rtol=1e-9, atol=1e-9)


@every
def test_training_moves_every_parameter_and_nothing_of_the_target(kind, target, packed):
    drafter = drafter_for(kind, target, num_layers=2)
    before = target.embedding_weight.clone()
    drafter.training_loss(packed, features_of(target, packed), target).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in drafter.parameters())
    assert torch.equal(before, target.embedding_weight) and target.embedding_weight.grad is None


@every
@pytest.mark.parametrize("answer", [0, 2, 3], ids=lambda tokens: f"{tokens} tokens to learn")
def test_steps_that_see_no_row_still_get_a_gradient(kind, answer, target, packed):
    """Ranks of a distributed run wait for each other's gradients, whatever their batches hold."""
    drafter = drafter_for(kind, target)
    packed.loss_mask.zero_()
    packed.loss_mask[0, 3 : 3 + answer] = True
    result = drafter.training_loss(packed, features_of(target, packed), target)
    result.loss.backward()
    assert all(p.grad is not None for p in drafter.parameters())
    assert (result.loss > 0) == (answer > 0)


@every
def test_a_step_weighs_less_than_the_one_before(kind, target, packed):
    features = features_of(target, packed)
    losses = []
    for decay in (0.0, 0.5, 1.0):
        drafter = drafter_for(kind, target, decay=decay)
        result = drafter.training_loss(packed, features, target)
        means = [result.metrics[f"step_{i}/loss_sum"] / result.metrics[f"step_{i}/total"] for i in range(STEPS)]
        losses.append(result.loss.item())
        assert losses[-1] == pytest.approx(sum(decay**i * mean.item() for i, mean in enumerate(means)))
    assert losses == sorted(set(losses))


@every
@pytest.mark.parametrize("vocabulary", [VOCABULARY, None], ids=["pruned", "whole"])
def test_a_checkpoint_brings_back_the_same_drafter(kind, vocabulary, target, packed, tmp_path):
    drafter = drafter_for(kind, target, vocabulary).float()
    loaded, _ = load_drafter(save_drafter(drafter, tmp_path / "drafter", target.identity))
    assert type(loaded) is kind and loaded.config() == drafter.config()
    assert ("d2t" in loaded.state_dict()) == (vocabulary is not None)
    loaded.double().bind(target)
    shape = StaticTree.chain(STEPS)
    expected = state_after(drafter.double(), packed).draft(shape)
    assert torch.equal(state_after(loaded, packed).draft(shape).tokens, expected.tokens)
    assert torch.equal(loaded.draft_ids, drafter.draft_ids)


@every
@pytest.mark.parametrize("shape", [StaticTree.chain(3), TREE, DynamicTree(3, 3, 9)], ids=str)
def test_greedy_decoding_is_the_targets_own(kind, shape):
    model = tiny_llama()
    target = Target.from_model(model)
    drafter = drafter_for(kind, target, torch.arange(0, 64, 2), noise=0.02)
    prompts = random_prompts(5, [4, 9, 6])
    decoder = Decoder(target, drafter, shape)
    generations = decoder.generate_batch(prompts, 24, batch_size=3)
    assert [g.tokens for g in generations] == transformers_greedy(model, prompts, 24)
    assert any(sum(generation.accepted) for generation in generations)


@every
def test_an_unknown_divergence_is_refused_when_it_is_named(kind, target):
    with pytest.raises(UserError, match="hellinger"):
        kind.for_target(target, divergence="hellinger")


@every
def test_samples_are_for_training_alone(kind, target, packed):
    drafter = drafter_for(kind, target, sample_positions=True, decay=0.5)
    whole = align(packed, STEPS).counts

    def totals():
        metrics = drafter.training_loss(packed, features_of(target, packed), target).metrics
        return [int(metrics[f"step_{step}/total"]) for step in range(STEPS)]

    assert totals()[0] == whole[0] and totals()[1] < whole[1]
    drafter.eval()
    assert totals() == whole
