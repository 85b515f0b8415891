"""How EAGLE heads draft: as they were trained, on chains and trees; nothing that is kept changes by it."""

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import DynamicTree, StaticTree
from specdraft.drafters.alignment import align
from specdraft.drafters.eagle import Eagle3
from specdraft.targets import Features, Target
from tests.drafters.alone import Alone
from tests.drafters.eagle.variants import STEPS, VARIANTS, begun, features_of
from tests.fakes import random_prompts, tiny_llama, transformers_greedy

BUSH = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0)))
SHAPES = [StaticTree.chain(4), BUSH, DynamicTree(4, 3, 12)]
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def test_training_logits_equal_decoding_logits(head, packed, monkeypatch):
    seen = []
    loss = head._loss
    monkeypatch.setattr(head, "_loss", lambda steps, teacher: seen.extend(steps) or loss(steps, teacher))
    features = features_of(head, packed)
    head.training_loss(packed, features, head.target)
    trained = [head.logits(step.hidden).detach() for step in seen]
    aligned = align(packed, STEPS)
    checked = 0
    for row in aligned.supervised[0].tolist():
        first = max(start for start in aligned.documents.table[1].tolist() if start <= row)
        flat = Features(*(part.flatten(0, 1)[None, first : row + 1] for part in features))
        state = Alone(head, int(aligned.tokens[first]))
        state.advance(aligned.tokens[first + 1 : row + 2], flat)
        # The true tokens, as training feeds them; `draft` would feed its own choice.
        along = state.along(aligned.tokens[row + 2 : row + 1 + STEPS].tolist())
        for step, decoded in enumerate(along):
            place = (aligned.supervised[step] == row).nonzero()
            if len(place) == 0:
                break
            torch.testing.assert_close(decoded, trained[step][place[0, 0]], **EXACT)
            checked += 1
    assert checked == sum(map(len, aligned.supervised)) > 60


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_node_of_a_tree_is_read_as_the_end_of_its_path(head, packed, shape):
    state = begun(head, packed)
    state.draft(shape)
    above, checked, levels = [[]], 0, state.read[1:]
    assert len(levels) == shape.depth - 1
    for level, logits in levels:
        nodes = zip(level.parents[0].tolist(), level.tokens[0].tolist(), strict=True)
        above = [[*above[parent], token] for parent, token in nodes]
        for path, found in zip(above, logits[0], strict=True):
            torch.testing.assert_close(state.along(path)[-1], found, rtol=1e-9, atol=1e-9)
            checked += 1
    assert checked >= 3


def test_draft_takes_the_best_tokens_and_leaves_the_state_as_it_was(head, packed):
    state = begun(head, packed)
    buffers = [part for layer in state.drafting.cache.layers for part in (layer.keys, layer.values)]
    assert len(buffers) == 2 * head.num_layers
    before = [state.along([3, 5]), *(part[:, :, :9].clone() for part in buffers)]
    tree, again = state.draft(StaticTree.chain(3)), state.draft(StaticTree.chain(3))
    assert torch.equal(tree.tokens, again.tokens) and tree.is_chain and tree.q is None
    state.draft(BUSH)
    after = [state.along([3, 5]), *(part[:, :, :9] for part in buffers)]
    assert all(map(torch.equal, after, before))
    assert tree.tokens[0, 0] == head.vocabulary.to_target(before[0][0].argmax())


def test_drafts_that_were_rejected_are_forgotten(head, packed):
    """Rounds that accept nothing, some, or all of a draft leave the head where the text alone would have led it."""
    g = torch.Generator().manual_seed(0)
    text = torch.randint(97, (1, 40), generator=g)
    features = head.target.features(text, torch.arange(40)[None], head.layers)

    def told(state, start, end):
        state.advance(text[0, start:end], Features(*(part[:, start - 1 : end - 1] for part in features)))

    drafted, plain = (Alone(head, int(text[0, 0])) for _ in range(2))
    told(drafted, 1, 9)
    start = 9
    for count, shape in ((1, SHAPES[0]), (5, SHAPES[1]), (2, SHAPES[2]), (5, SHAPES[0]), (1, SHAPES[2])):
        drafted.draft(shape)
        told(drafted, start, start + count)
        start += count
    told(plain, 1, start)
    torch.testing.assert_close(drafted.along([3, 4]), plain.along([3, 4]), **EXACT)


def test_a_sampled_draft_tells_the_distribution_that_it_came_from(head, packed):
    state = begun(head, packed)
    sampling = Sampling(temperature=1.5, top_k=5)
    tree = state.draft(StaticTree.chain(4), sampling)
    assert tree.q.shape == (1, 4, 97) and ((tree.q > 0).sum(-1) == 5).all()
    assert (tree.q[0, torch.arange(4), tree.tokens[0]] > 0).all()
    read = torch.stack([logits.flatten() for _, logits in state.read])
    torch.testing.assert_close(tree.q[0], head.vocabulary.scatter_to_target(sampling.probabilities(read)))


@pytest.fixture(scope="module")
def story():
    """A small target, five prompts and transformers' own greedy answers."""
    model = tiny_llama()
    prompts = random_prompts(5, lengths=[1, 2, 5, 13])
    return Target.from_model(model), prompts, transformers_greedy(model, prompts, 32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", ["first", "third", "third, both", "third, window, layers"])
def test_greedy_decoding_gives_the_targets_own_tokens(story, variant, shape):
    target, prompts, answers = story
    kind, options = VARIANTS[variant]
    torch.manual_seed(0)
    head = kind.for_target(target, **options, **({"layers": (1,), "ttt_steps": 4} if kind is Eagle3 else {}))
    with torch.no_grad():  # the feature passes: a head that nobody trained is right now and then
        head.fc.weight[:, -target.hidden_size :] = torch.eye(target.hidden_size)
    decoder = Decoder(target, head, shape)
    alone = [decoder.generate(prompt, 32) for prompt in prompts]
    assert [result.tokens for result in alone] == answers
    assert [result.tokens for result in decoder.generate_batch(prompts, 32, batch_size=3)] == answers
    accepted = sum(sum(result.accepted) for result in alone)
    assert 0 < accepted < sum(sum(result.drafted) for result in alone)
