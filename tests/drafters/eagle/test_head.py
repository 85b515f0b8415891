"""The EAGLE family: what every step learns; packing changes nothing."""

import itertools

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from specdraft.decoding.shapes import StaticTree
from specdraft.drafters.alignment import align
from specdraft.drafters.checkpoint import load_drafter, save_drafter
from specdraft.drafters.eagle import Eagle, Eagle3
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.targets.batch import Batch
from tests.drafters.counting import CountedFlops
from tests.drafters.eagle.variants import STEPS, begun, features_of
from tests.fakes import tiny_llama
from tests.families import FAMILIES


def unrolled(head, batch):
    """Each step's row r with its logits ``[n, Vd]``, and the token and the target's log probabilities that it is to
    match: token r+2+s, and the distribution of the target alone at r+1+s. Rows are found by looking, not by ``align``.
    """
    steps = head._unroll(align(batch, STEPS), head.feature(features_of(head, batch)), head.decay)
    ids, documents, learned = (part.flatten() for part in (batch.input_ids, batch.document_ids, batch.loss_mask))
    alone = target_alone(head.target, batch)
    width = batch.input_ids.shape[1]
    for index, step in enumerate(steps):
        rows = [
            row
            for row in range(len(ids) - 2 - index)
            if row // width == (row + 2 + index) // width
            and documents[row] == documents[row + 2 + index] >= 0
            and learned[row + 1 : row + 3 + index].all()
        ]
        assert len(rows) == len(step.hidden) > 0
        after = torch.tensor(rows) + 1 + index
        yield index, head.logits(step.hidden), alone[after], ids[after + 1]


def target_alone(target, batch):
    """Log probabilities ``[R, V]`` of the model itself, document by document."""
    found = torch.full((batch.input_ids.numel(), target.vocab_size), torch.nan, dtype=torch.float64)
    begins = [*(batch.position_ids.flatten() == 0).nonzero()[:, 0].tolist(), len(found)]
    for start, end in itertools.pairwise(begins):
        found[start:end] = target.model(batch.input_ids.flatten()[None, start:end]).logits[0].log_softmax(-1).detach()
    return found


def test_each_step_learns_the_targets_distribution_of_the_token_that_it_drafts(head, packed):
    metrics = head.training_loss(packed, features_of(head, packed), head.target).metrics
    ids = slice(None) if head.vocabulary.ids is None else head.vocabulary.ids
    for index, logits, teacher, _ in unrolled(head, packed):
        log_p, log_q = teacher[:, ids].log_softmax(-1), logits.log_softmax(-1)
        divergence = (log_p.exp() * (log_p - log_q)).sum()
        torch.testing.assert_close(metrics[f"step_{index}/loss_sum"], divergence, rtol=1e-5, atol=1e-5)
        best = head.vocabulary.to_target(logits.argmax(-1))
        if index == 0:
            assert metrics["step_0/match_sum"] == (best == teacher.argmax(-1)).sum()


def test_cross_entropy_learns_the_token_that_each_step_drafts(head, packed):
    other = type(head)(**head.config() | {"divergence": "cross_entropy"}).double()
    other.load_state_dict(head.state_dict())
    metrics = other.training_loss(packed, features_of(head, packed), head.target).metrics
    for index, logits, _, labels in unrolled(head, packed):
        log_q = torch.full((len(labels), head.vocab_size), 0.0, dtype=torch.float64)  # nothing to learn outside
        log_q[:, slice(None) if head.vocabulary.ids is None else head.vocabulary.ids] = logits.log_softmax(-1)
        expected = -log_q.gather(1, labels[:, None]).sum()
        torch.testing.assert_close(metrics[f"step_{index}/loss_sum"], expected, rtol=1e-9, atol=1e-9)


def test_packing_changes_nothing(head, packed):
    together = head.training_loss(packed, features_of(head, packed), head.target)
    sums: dict[str, torch.Tensor] = {}
    for row, here in ((0, slice(0, 9)), (0, slice(9, 23)), (1, slice(0, 20))):
        alone = Batch(*(getattr(packed, name)[row : row + 1, here] for name in Batch.__dataclass_fields__))
        for name, value in head.training_loss(alone, features_of(head, alone), head.target).metrics.items():
            sums[name] = sums.get(name, 0) + value
    assert together.metrics.keys() == sums.keys()
    for name, value in sums.items():
        torch.testing.assert_close(together.metrics[name], value, rtol=1e-9, atol=1e-9)
    parts = {"loss": getattr(head, "distillation_weight", 1.0), "regression": getattr(head, "regression_weight", 0.0)}
    mean = sum(
        weight * 0.8**step * sums[f"step_{step}/{part}_sum"] / sums[f"step_{step}/total"]
        for part, weight in parts.items()
        for step in range(STEPS)
        if weight
    )
    torch.testing.assert_close(together.loss, mean, rtol=1e-9, atol=1e-9)


def test_matches_count_joint_prefixes(head, packed):
    """A later step counts only where every earlier one matched too, or predicted acceptance would be too high."""
    metrics = head.training_loss(packed, features_of(head, packed), head.target).metrics
    sums = [int(metrics[f"step_{s}/match_sum"]) for s in range(STEPS)]
    assert sums == sorted(sums, reverse=True)


def test_a_batch_without_answers_still_reaches_every_parameter(head, packed):
    packed.loss_mask.zero_()
    result = head.training_loss(packed, features_of(head, packed), head.target)
    result.loss.backward()
    assert result.loss == 0 and all((p.grad == 0).all() for p in head.parameters())


def test_training_moves_every_parameter_and_nothing_of_the_target(head, packed):
    head.training_loss(packed, features_of(head, packed), head.target).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())
    assert all(p.grad is None for p in head.target.model.parameters())
    own = getattr(head, "embed_tokens", None) is not None
    assert any("embed" in name for name in head.state_dict()) == own
    assert not any("target" in name for name in head.state_dict())


def test_the_divergence_is_the_one_asked_for(head, packed):
    plain = head.training_loss(packed, features_of(head, packed), head.target)
    other = type(head)(**head.config() | {"divergence": "total_variation"}).double()
    other.load_state_dict(head.state_dict())
    result = other.training_loss(packed, features_of(head, packed), head.target)
    assert all(
        torch.equal(result.metrics[f"step_{s}/alpha_sum"], plain.metrics[f"step_{s}/alpha_sum"]) for s in range(4)
    )
    rows = result.metrics["step_0/total"]
    torch.testing.assert_close(result.metrics["step_0/loss_sum"], rows - result.metrics["step_0/alpha_sum"])


def test_decoding_in_inference_mode_does_not_spoil_training(head, packed):
    with torch.inference_mode():
        begun(head, packed).draft(StaticTree.chain(3))
    head.training_loss(packed, features_of(head, packed), head.target).loss.backward()
    assert all(parameter.grad is not None for parameter in head.parameters())


def test_validation_without_gradients_gives_the_same_loss(head, packed):
    loss = head.training_loss(packed, features_of(head, packed), head.target).loss
    with torch.inference_mode():
        again = head.training_loss(packed, features_of(head, packed), head.target).loss
    assert torch.equal(loss, again) and not again.requires_grad


def test_a_checkpoint_rebuilds_it(head, packed, tmp_path):
    directory = save_drafter(head, tmp_path / "drafter", head.target.identity)
    loaded, _ = load_drafter(directory)
    assert type(loaded) is type(head) and loaded.config() == head.config()
    loaded.bind(head.target)
    loaded.double().load_state_dict(head.state_dict())  # the file is fp32
    ours, theirs = begun(head, packed), begun(loaded, packed)
    assert torch.equal(ours.along([]), theirs.along([]))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"ttt_steps": 0}, "at least 1 step of the training-time test"), ({"divergence": "nothing"}, "divergence")],
)
def test_what_cannot_be_trained_is_refused(head, change, message):
    with pytest.raises(UserError, match=message):
        type(head)(**head.config() | change)


@pytest.mark.parametrize("kind", [Eagle, Eagle3])
@pytest.mark.parametrize("partial", [1.0, 0.75])
def test_beside_a_target_whose_angles_change_with_the_length_the_heads_do_not(kind, partial):
    """Phi-3 and Phi-4-mini have short and long factors, which transformers chooses by the length of the text."""
    pairs = int(16 * partial) // 2
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": partial}
    rope |= {"short_factor": [1.0] * pairs, "long_factor": [4.0] * pairs, "original_max_position_embeddings": 64}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = Phi3Config(vocab_size=64, **sizes, **ends, max_position_embeddings=512, rope_parameters=rope)
    head = kind.for_target(Target.from_model(Phi3ForCausalLM(config).eval()))
    angles = torch.outer(torch.arange(20.0), 10000.0 ** (-torch.arange(0, 16, 2) / 16))
    for length in (20, 200, 20):
        torch.testing.assert_close(head.rotary(length, head.fc.weight)[0][:20, :8], angles.cos())
    with pytest.raises(UserError, match="rope_type=longrope, whose angles change with the length"):
        kind(**head.config() | {"rope_parameters": rope})


@pytest.mark.parametrize("options", [{}, {"num_layers": 3, "own_embedding": True, "qk_norm": True}], ids=str)
@pytest.mark.parametrize(("kind", "steps"), [(Eagle, 1), (Eagle, 3), (Eagle3, 1), (Eagle3, 4)])
def test_flops_are_those_that_a_step_takes(kind, steps, options):
    """Of a text that is all to be learned; of attention what a query sees."""
    target = Target.from_model(tiny_llama(vocab_size=512, context=256, num_hidden_layers=6))
    length, width = 200, target.hidden_size
    ids = torch.arange(length)[None]
    batch = Batch(ids, ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
    options = options if kind is Eagle3 else {}
    head = kind.for_target(target, None if kind is Eagle else torch.arange(64), ttt_steps=steps, **options)
    features = features_of(head, batch)
    with CountedFlops() as counted:
        head.training_loss(batch, features, target).loss.backward()
    attention = head.num_layers * steps * 6.0 * width * length
    forward, backward = head.training_flops(length)
    teacher = 2 * 512 * width * length
    attending = ("bmm", "causal_attention", "causal_attention_backward")  # the first: a position's own keys
    attended = sum(counted.count[name] for name in attending)
    matrices = counted.count.total() - attended - teacher
    assert forward + backward - attention == pytest.approx(matrices / length, rel=0.05 if kind is Eagle else 0.02)
    assert attention == pytest.approx(attended / length, rel=0.05)
    assert backward > forward > attention / 3


def test_a_window_costs_what_it_sees(target):
    whole, windowed = (Eagle3.for_target(target, sliding_window=window) for window in (None, 50))
    assert whole.training_flops(100) == windowed.training_flops(100)
    assert sum(whole.training_flops(100)) == sum(windowed.training_flops(1000))


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Eagle, {}),
        (Eagle3, {}),
        (Eagle3, {"num_layers": 2, "own_embedding": True}),
        (Eagle3, {"qk_norm": True, "norm_before_fc": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("wide", [{"hidden_size": 512}, {"intermediate_size": 1024}, {"head_dim": 128}], ids=str)
def test_activation_bytes_are_what_backward_keeps(kind, options, steps, wide):
    """In bf16, where one of the three parts of the estimate outweighs the others."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 8}
    target = Target.from_model(tiny_llama(vocab_size=256, context=256, num_hidden_layers=6, **sizes | wide).bfloat16())
    ids = torch.arange(200)[None]
    batch = Batch(ids, ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
    head = kind.for_target(target, ttt_steps=steps, **options).bfloat16()
    features = features_of(head, batch)
    weights = {each.untyped_storage().data_ptr() for each in (*head.parameters(), target.embedding_weight)}
    kept = {}  # by storage: alive, so that none is counted for another

    def keep(tensor):
        if tensor.numel() > 1000 and tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        head._unroll(align(batch, steps), head.feature(features), head.decay)
    held = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert (plain := head.activation_bytes(200, 2)) == pytest.approx(held, rel=0.12)
    head.compiled = True  # whose gated product is kept as well
    assert head.activation_bytes(200, 2) - plain == head.num_layers * steps * target.config.intermediate_size * 400


@pytest.mark.parametrize("kind", [Eagle, Eagle3])
def test_weights_begin_as_small_as_a_target_s(kind, target):
    head = kind.for_target(target)
    linear = [
        module for name, module in head.named_modules() if isinstance(module, torch.nn.Linear) if name != "lm_head"
    ]
    assert len(linear) == 8
    for module in linear:
        assert module.weight.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("kind", [Eagle, Eagle3])
def test_parts_of_a_larger_batch_add_up_to_its_loss(kind, target, packed):
    head = kind.for_target(target, ttt_steps=STEPS)
    parts = [Batch(*(value[number : number + 1] for value in vars(packed).values())) for number in range(2)]
    totals = head.count_supervised(packed).tolist()
    losses = [head.training_loss(each, features_of(head, each), target, totals).loss for each in parts]
    whole = head.training_loss(packed, features_of(head, packed), target).loss
    torch.testing.assert_close(sum(losses), whole)
    assert losses[0] > 0 < losses[1]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("kind", [Eagle, Eagle3])
def test_a_text_beyond_the_context_that_the_head_was_made_for_is_learned(kind, steps, target):
    head = kind.for_target(target, ttt_steps=steps)
    head.layer_config.max_position_embeddings = 8  # what the table of angles is made for unless more is asked
    ids = torch.arange(20)[None]
    batch = Batch(ids, ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
    assert head.training_loss(batch, features_of(head, batch), target).loss > 0


@pytest.mark.parametrize("kind", [Eagle, Eagle3])
def test_samples_are_for_training_alone(kind, target, packed):
    head = kind.for_target(target, ttt_steps=3, step_decay=0.5, sample_positions=True)
    whole = align(packed, 3).counts

    def totals():
        metrics = head.training_loss(packed, features_of(head, packed), target).metrics
        return [int(metrics[f"step_{step}/total"]) for step in range(3)]

    assert totals()[0] == whole[0] and totals()[1] < whole[1]
    head.eval()
    assert totals() == whole
    assert head.passes == 1.75 and kind.for_target(target, ttt_steps=3).passes == 3
    assert not kind.for_target(target).decay.sampled


@pytest.mark.parametrize("kind", [Eagle, Eagle3])
def test_steps_grow_with_the_training(kind, target, packed):
    head = kind.for_target(target, ttt_steps=4, ttt_growth=0.6).double()
    assert head.progress == 1.0 and head.steps_now == 4  # where nobody tells
    grown = []
    for done in (0.0, 0.19, 0.21, 0.39, 0.41, 0.59, 0.6, 1.0):
        head.progress = done
        metrics = head.training_loss(packed, features_of(head, packed), target).metrics
        grown.append(sum(name.endswith("/total") for name in metrics))
        assert len(head.count_supervised(packed)) == head.steps_now == grown[-1]
    assert grown == [1, 1, 2, 2, 3, 3, 4, 4]
    head.progress = 0.0
    assert head.eval().steps_now == 4  # validation is of all, as decoding is
    assert kind.for_target(target, ttt_steps=4).ttt_growth == 0.0
    with pytest.raises(UserError, match=r"ttt_growth is 1\.5: expected a share of the training"):
        kind.for_target(target, ttt_growth=1.5)


@pytest.mark.parametrize("kind", [Eagle, Eagle3])
def test_documents_may_count_alike(kind, target, packed):
    options = {"ttt_steps": 2, "regression_weight": 1.0}
    plain, other = (kind.for_target(target, sequence_mean=mean, **options).double() for mean in (False, True))
    other.load_state_dict(plain.state_dict())
    losses = []
    for row, here in ((0, slice(0, 9)), (0, slice(9, 23)), (1, slice(0, 20))):
        alone = Batch(*(getattr(packed, name)[row : row + 1, here] for name in Batch.__dataclass_fields__))
        losses.append(plain.training_loss(alone, features_of(plain, alone), target).loss)
    found = other.training_loss(packed, features_of(other, packed), target).loss
    torch.testing.assert_close(found, sum(losses) / 3, rtol=1e-9, atol=1e-9)
    assert not torch.isclose(found, plain.training_loss(packed, features_of(plain, packed), target).loss)


@pytest.mark.parametrize(("name", "window"), [("mistral", 16), ("gemma3", None), ("llama", None)])
def test_a_head_sees_what_engines_show_it(name, window):
    options = {} if name == "llama" else {"sliding_window": 16}
    target = Target.from_model(FAMILIES[name].build(**options).float())
    heads = [kind.for_target(target, ttt_steps=STEPS) for kind in (Eagle, Eagle3)]
    assert [head.sliding_window for head in heads] == [window] * 2
    own = Eagle3.for_target(target, ttt_steps=STEPS, sliding_window=12)
    assert own.sliding_window == 12
