"""The compiled layer gives what the layer gives, in graphs without a break; what cannot be compiled runs as it is."""

import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from specdraft.drafters.eagle import Eagle, Eagle3
from specdraft.drafters.eagle import compiled as module
from specdraft.targets.batch import Batch


@pytest.fixture
def compiling(monkeypatch):
    """Compile with a backend that needs no compiler, and count its graphs."""

    def use(backend):
        counter = CompileCounterWithBackend(backend) if isinstance(backend, str) else backend
        torch._dynamo.reset()
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
        return counter

    yield use
    torch._dynamo.reset()


def text(lengths):
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    return Batch(7 * positions % 97, positions, documents, torch.ones_like(positions, dtype=torch.bool))


def loss_and_gradients(head, batch, compiled):
    head.compiled = compiled
    loss = head.training_loss(batch, batch.features(head.target, head.layers), head.target).loss
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, trained)]


@pytest.mark.parametrize(
    ("kind", "options", "backend", "graphs"),
    [
        (Eagle, {"ttt_steps": 1}, "aot_eager", 1),
        (Eagle3, {"ttt_steps": 3}, "eager", 3),
        (Eagle3, {"ttt_steps": 3, "num_layers": 2, "qk_norm": True, "norm_before_residual": True}, "eager", 3),
    ],
    ids=["one", "three", "two layers"],
)
def test_equals_the_layer_with_a_graph_for_each_step_and_no_break(kind, options, backend, graphs, target, compiling):
    head = kind.for_target(target, **options).double()
    counter = compiling(backend)
    for batch in (text([9, 14]), text([30]), text([8, 5, 7])):
        for mine, plain in zip(*(loss_and_gradients(head, batch, each) for each in (True, False)), strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-10, atol=1e-12)
    assert counter.frame_count == graphs


def test_a_window_is_compiled_too(target, compiling):
    head = Eagle3.for_target(target, ttt_steps=4, sliding_window=6).double()
    counter = compiling("eager")
    for batch in (text([9, 14]), text([30]), text([8, 5, 7])):
        for mine, plain in zip(*(loss_and_gradients(head, batch, each) for each in (True, False)), strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-10, atol=1e-12)
    assert 4 <= counter.frame_count <= 8


def test_a_layer_that_cannot_be_compiled_runs_as_it_is(target, compiling):
    calls = []

    def failing(graph, inputs):
        calls.append(graph)
        raise ValueError("no compiler")

    compiling(failing)
    head = Eagle3.for_target(target, ttt_steps=2).double()
    with pytest.warns(UserWarning, match="cannot be compiled and runs as it is.* BackendCompilerFailed: .*no compiler"):
        found = loss_and_gradients(head, text([9, 14]), compiled=True)
    assert len(calls) == 1 and not head.compiled
    for mine, plain in zip(found, loss_and_gradients(head, text([9, 14]), compiled=False), strict=True):
        torch.testing.assert_close(mine, plain, rtol=0, atol=0)


def test_only_training_steps_of_whole_weights_are_compiled(target, monkeypatch):
    head = Eagle.for_target(target)
    head.compiled = True
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("compiled"))
    batch = text([12])
    features = batch.features(target, head.layers)
    with torch.no_grad():
        head.training_loss(batch, features, target)
    alone = Batch(*(part[:, :3] for part in vars(batch).values()))  # a single query
    head.training_loss(alone, alone.features(target, head.layers), target)
    head.fc.weight.ds_id = 0  # as under ZeRO-3
    head.training_loss(batch, features, target)
    assert module._partitioned(head) and not Eagle.compiled
