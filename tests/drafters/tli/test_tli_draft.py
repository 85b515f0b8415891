"""Drafts with another tokenizer: what trains is what drafts, nothing else is drafted, and a checkpoint has it all."""

import json
import shutil

import pytest
import torch
import transformers

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import DynamicTree, StaticTree
from specdraft.drafters.checkpoint import load_drafter, save_drafter
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.independent import for_target
from specdraft.drafters.objective import objective
from specdraft.drafters.tli import TliDraft
from specdraft.drafters.tli.tokens import SharedTokens
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.training.planning.meta_target import MetaTarget
from tests.drafters.alone import Alone
from tests.drafters.drafts import CLOSE, LORA, features_of, noisy, tokenizer_of, whole
from tests.drafters.tli.drafts import translating
from tests.drafters.tli.two_tokenizers import CODE, PROSE, byte_level, code_target, save_prose_model
from tests.fakes import random_prompts, tiny_llama, transformers_greedy

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other

V = 97
PROMPT = random_prompts(1, [9], V, seed=4)[0]


def renumbered(target: Target, shared: int) -> TliDraft:
    """The target itself, its tokens under other numbers, of which the first are ``shared``."""
    size = target.vocab_size
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    draft = TliDraft(vocab_size=size, shared_size=shared, model=target.config.to_dict())
    draft.shared.share(SharedTokens(torch.arange(shared), order[:shared], unknown=0))
    weights = dict(target.model.state_dict())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.empty_like(weights[name]).index_copy_(0, order, weights[name])
    draft.model.load_state_dict(weights)
    draft.bind(target)
    return draft.eval()


def test_training_logits_equal_decoding_logits(target, monkeypatch):
    draft = noisy(translating(target))
    state = Alone(draft, PROMPT[0])
    state.advance(torch.tensor(PROMPT[1:]))
    text, decoded = list(PROMPT), []
    for accepted in (3, 0, 2):
        tree = state.draft(StaticTree.chain(3))
        decoded += [(len(text) - 1 + depth, z.flatten()) for depth, (_, z) in enumerate(state.read[: accepted + 1])]
        emitted = [*tree.tokens[0, :accepted].tolist(), len(text) % V]
        state.advance(torch.tensor(emitted))
        text += emitted
    seen = []

    def spy(weights, teacher, steps, divergence):
        seen.append((steps[0].hidden @ weights[0].T).detach())
        return objective(weights, teacher, steps, divergence)

    monkeypatch.setattr("specdraft.drafters.draft_model.objective", spy)
    draft.training_loss(whole(text), features_of(target, whole(text)), target)
    ids = draft.shared.draft_ids
    outside = torch.ones(V, dtype=torch.bool).index_fill_(0, ids, False)
    assert len(decoded) == 3 + 1 + 3 and set(text) - set(ids.tolist()), "some of what is read is not shared"
    for row, logits in decoded:
        torch.testing.assert_close(logits[ids], seen[0][row], **CLOSE)
        assert (logits[outside] == -torch.inf).all()


def test_the_loss_compares_q_with_the_whole_of_p(target, packed):
    draft = noisy(translating(target))
    result = draft.training_loss(packed, features_of(target, packed), target)
    alpha, mass = 0.0, 0.0
    for row, at in packed.before_learned().nonzero().tolist():
        document = packed.document_ids[row] == packed.document_ids[row, at]
        ids = packed.input_ids[row, : at + 1][document[: at + 1]]
        p = target.model(ids[None]).logits[0, -1].softmax(-1)
        z = draft.model(draft.shared.to_draft[ids][None]).logits[0, -1]
        q = torch.zeros_like(p).index_copy_(0, draft.shared.draft_ids, z[draft.shared.rows].softmax(-1))
        alpha, mass = alpha + torch.minimum(p, q).sum(), mass + p[draft.shared.draft_ids].sum()
    torch.testing.assert_close(result.metrics["step_0/alpha_sum"], alpha, **CLOSE)
    total = result.metrics["step_0/total"]
    torch.testing.assert_close(result.metrics["out_of_vocabulary_mass_sum"], total - mass, **CLOSE)


def test_rows_of_tokens_that_are_not_shared_learn_nothing(target, packed):
    draft = noisy(translating(target, tie_word_embeddings=False))
    draft.training_loss(packed, features_of(target, packed), target).loss.backward()
    taught = (draft.language_model.head.weight.grad != 0).any(1).nonzero()[:, 0]
    assert taught.tolist() == sorted(draft.shared.rows.tolist())
    read = (draft.model.get_input_embeddings().weight.grad != 0).any(1).nonzero()[:, 0].tolist()
    assert set(read) <= set(draft.shared.to_draft[packed.input_ids].flatten().tolist()) and 1 in read


def test_the_target_under_other_numbers_is_always_right():
    target = Target.from_model(tiny_llama(V, 128, initializer_range=0.3))
    draft = renumbered(target, V)
    for sampling in (Sampling(), Sampling(1.0)):
        assert Decoder(target, draft, 4, sampling).generate(PROMPT, 21).accepted == [4] * 4
    draft.shared.to_draft.copy_(draft.shared.to_draft.roll(1))
    assert sum(Decoder(target, draft, 4).generate(PROMPT, 21).accepted) < 4


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("shape", [4, DynamicTree(3, 3, 9), StaticTree(((0,), (1,), (0, 0), (1, 0)))], ids=str)
def test_greedy_decoding_is_lossless(shape, batch_size):
    target = Target.from_model(tiny_llama())
    draft = renumbered(target, 40)
    prompts = random_prompts(4, (5, 11, 8))
    results = Decoder(target, draft, shape).generate_batch(prompts, 20, batch_size)
    assert [result.tokens for result in results] == transformers_greedy(target.model, prompts, 20)
    accepted = [count for result in results for count in result.accepted]
    assert 0 < sum(accepted) < len(accepted) * 3, "drafts are sometimes right and sometimes wrong"


@pytest.mark.parametrize("shape", [StaticTree.chain(3), StaticTree(((0,), (1,), (0, 0), (1, 0))), DynamicTree(3, 3, 8)])
def test_only_shared_tokens_are_drafted(target, shape):
    draft = noisy(translating(target))
    state = Alone(draft, PROMPT[0])
    state.advance(torch.tensor(PROMPT[1:]))
    for sampling in (Sampling(), Sampling(2.0)):
        tree = state.draft(shape, sampling)
        assert set(tree.tokens.flatten().tolist()) <= set(draft.shared.draft_ids.tolist())
        if tree.q is not None:
            torch.testing.assert_close(tree.q.sum(-1), torch.ones_like(tree.q[..., 0]))
            assert (tree.q[..., ~draft.shared.t2d] == 0).all()


# --- where it comes from, and where it goes -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def code() -> Target:
    return code_target()


@pytest.fixture(scope="module")
def prose_model(tmp_path_factory) -> str:
    return save_prose_model(tmp_path_factory.mktemp("prose"))


def start_from(directory, target, **options):
    return for_target(target, start="checkpoint", checkpoint=directory, **options)


def test_the_tokenizer_decides(code, prose_model, tmp_path):
    assert type(for_target(code, start="layers")) is DraftModel
    assert type(start_from(save_prose_model(tmp_path / "same", code.tokenizer), code)) is DraftModel
    with pytest.warns(UserWarning, match=r"shares \d+ of the target's 299 tokens: the draft proposes those alone"):
        draft = start_from(prose_model, code)
    assert type(draft) is TliDraft and draft.language_model.head.weight.shape[0] != code.vocab_size
    prompts = ["def add(left, right):", "for number in"]
    ids = [code.tokenizer.encode(prompt) for prompt in prompts]
    results = Decoder(code, draft, 3).generate_batch(ids, 12, 2)
    assert [result.tokens for result in results] == transformers_greedy(code.model, ids, 12)


def test_more_rows_than_tokens_are_no_obstacle(code, tmp_path):
    """Siblings of one tokenizer whose embeddings were padded differently."""
    tiny_llama(code.vocab_size + 21).save_pretrained(tmp_path)
    code.tokenizer.save_pretrained(tmp_path)
    draft = start_from(str(tmp_path), code)
    assert type(draft) is TliDraft and draft.shared.rows.tolist() == list(range(code.vocab_size))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": True}, "parallel=true with a checkpoint of another tokenizer than the target's"),
        ({"draft_vocabulary": torch.arange(50)}, "expected model.draft_vocab_size=null"),
    ],
    ids=str,
)
def test_what_needs_one_vocabulary_is_refused(code, prose_model, options, message):
    with pytest.raises(UserError, match=message):
        start_from(prose_model, code, **options)


def test_a_draft_that_shares_nothing_is_refused(code, tmp_path):
    tokenizer = tokenizer_of(64, "word")
    with pytest.raises(UserError, match="shares 0 of its 64 tokens"):
        start_from(save_prose_model(tmp_path, tokenizer), code)


@pytest.mark.parametrize(
    ("name", "message"),
    [(None, "expected model.drafter.checkpoint=PATH"), ("/nowhere", "there is no directory /nowhere")],
)
def test_a_missing_draft_is_refused(code, name, message):
    with pytest.raises(UserError, match=message):
        start_from(name, code)


def test_a_plan_counts_on_all_that_can_be_shared(code, prose_model):
    with torch.device("meta"):
        draft = start_from(prose_model, MetaTarget(tiny_llama(400).config, "shape"))
    assert type(draft) is TliDraft and all(parameter.is_meta for parameter in draft.parameters())
    assert draft.config()["shared_size"] == draft.shared.draft_vocab_size < 300


def test_a_checkpoint_needs_nothing_of_what_it_came_from(code, tmp_path):
    origin = save_prose_model(tmp_path / "origin")
    draft = start_from(origin, code)
    saved = save_drafter(draft, tmp_path / "drafter", code.identity)
    shutil.rmtree(origin)
    loaded, config = load_drafter(saved)
    assert loaded.config() == draft.config() and dict(loaded.files) == dict(draft.files)
    assert config["files"] == sorted(draft.files)
    ids = [code.tokenizer.encode(CODE[0])]
    one, other = (Decoder(code, each, 3).generate_batch(ids, 12, 1)[0] for each in (draft, loaded))
    assert (one.tokens, one.accepted) == (other.tokens, other.accepted)
    own = transformers.AutoTokenizer.from_pretrained(saved)
    assert own.encode(PROSE[0]) == byte_level(PROSE, 290, ("<s>", "<|end|>")).encode(PROSE[0])
    again = save_drafter(loaded, tmp_path / "again", code.identity)
    assert {file.name for file in again.iterdir()} == {file.name for file in saved.iterdir()}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["tokenizer.json", "gone.json"], "has no readable gone.json"),
        (["../other.json"], "which lies elsewhere"),
        ("tokenizer.json", "is not a drafter's configuration"),
        ([3], "is not a drafter's configuration"),
    ],
    ids=str,
)
def test_a_checkpoint_names_files_of_its_own(code, prose_model, tmp_path, files, message):
    saved = save_drafter(start_from(prose_model, code), tmp_path / "drafter", code.identity)
    (tmp_path / "other.json").write_text("{}")
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"files": files}))
    with pytest.raises(UserError, match=message):
        load_drafter(saved)


def test_adapters_are_merged_with_all_that_belongs_to_it(code, prose_model):
    draft = start_from(prose_model, code, lora=LORA).double()
    served = draft.served()
    assert type(served) is TliDraft and dict(served.files) == dict(draft.files)
    assert torch.equal(served.shared.to_draft, draft.shared.to_draft) and served.served() is served
    batch = whole(code.tokenizer.encode(CODE[0]))
    losses = [each.training_loss(batch, features_of(code, batch), code).loss for each in (draft, served)]
    torch.testing.assert_close(*losses)
    losses[0].backward()
    assert any(parameter.grad.abs().sum() > 0 for name, parameter in draft.named_parameters() if "lora_B" in name)


def test_its_own_text_is_of_shared_tokens(target, packed):
    draft = noisy(translating(target))
    draft.on_policy = 1.0
    batch = draft.prepare(packed, torch.Generator().manual_seed(0))
    changed = batch.input_ids[batch.input_ids != packed.input_ids]
    assert len(changed) > 4 and set(changed.tolist()) <= set(draft.shared.draft_ids.tolist())
