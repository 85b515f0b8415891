"""Compiled functions beside the eager ones that they are compared with; passes of drafters as graphs."""

import copy
import time
import warnings

import pytest
import torch

from specdraft.decoding import compilation
from specdraft.decoding.compilation import Compilable, compiling, is_active, seconds_spent, wanted
from specdraft.decoding.decoder import Decoder
from specdraft.drafters.dflash import DFlash, Domino, DSpark
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.eagle import MTP, Eagle, Eagle3, PEagle
from specdraft.drafters.kangaroo import Kangaroo
from specdraft.drafters.lookahead import Lookahead
from specdraft.drafters.pard import Pard
from specdraft.drafters.redrafter import ReDrafter
from specdraft.errors import UserError
from specdraft.onednn import packed
from specdraft.targets import Target
from tests.drafters.tli.drafts import translating
from tests.fakes import random_prompts, tiny_llama

DRAFTERS = {
    "eagle3": lambda target: Eagle3.for_target(target, None, layers=(1,)),
    "eagle3 of the last layer": lambda target: Eagle3.for_target(target, None, layers=(1, 2)),
    "eagle": lambda target: Eagle.for_target(target),
    "redrafter": lambda target: ReDrafter.for_target(target),
    "mtp": lambda target: MTP.for_target(target),
    "p_eagle": lambda target: PEagle.for_target(target, None, layers=(1,), num_layers=2),
    "dflash": lambda target: DFlash.for_target(target, None, layers=(1,), num_layers=2),
    "dspark": lambda target: DSpark.for_target(target, None, layers=(1,), num_layers=1),
    "domino": lambda target: Domino.for_target(target, None, layers=(1,), num_layers=1),
    "kangaroo": lambda target: Kangaroo.for_target(target, exit_layer=1),
    "draft": lambda target: DraftModel.for_target(target, copy_layers=1),
    "pard": lambda target: Pard.for_target(target, copy_layers=1),
    "lookahead": lambda target: Lookahead(3, 3, 2),
    "tli_draft": translating,
}


@pytest.fixture
def graphs(monkeypatch):
    """Graphs that are run as they were found, without a compiler to wait for."""
    monkeypatch.setattr(compilation, "BACKEND", "eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def doubled(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x * 2,)


def differs(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x * 3 if torch.compiler.is_compiling() else x * 2,)


def breaks(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x * 2 if x.sum().item() > 0 else x,)


def test_auto_compiles_on_cuda_alone():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert not wanted("auto", cpu) and wanted("auto", cuda)
    assert wanted(True, cpu) and not wanted(False, cuda)
    with pytest.raises(UserError, match=r"^decoding.compile is 'yes': expected auto, true or false$"):
        wanted("yes", cpu)


def test_it_is_on_inside_alone():
    assert not is_active()
    with compiling(True):
        assert is_active()
        with compiling(False):
            assert not is_active()
        assert is_active()
    assert not is_active()


def test_nothing_is_compiled_unless_asked(graphs):
    function = Compilable(doubled, "it")
    assert torch.equal(function(1, torch.ones(2))[0], torch.full((2,), 2.0))
    assert not torch._dynamo.utils.counters["stats"]
    prepared = []
    function = Compilable(doubled, "it", lambda: prepared.append(1))
    with compiling(True):
        for _ in range(3):
            assert torch.equal(function(1, torch.ones(2))[0], torch.full((2,), 2.0))
    assert prepared == [1]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("function", "said"), [(differs, "it differs from eager by 1"), (breaks, "the compiler says: ")]
)
def test_what_differs_or_breaks_stays_eager_with_one_line(graphs, function, said):
    compilable, x = Compilable(function, "the head"), torch.ones(3)
    with compiling(True):
        with pytest.warns(UserWarning, match=r"^the head is decoded with uncompiled, slower") as warned:
            assert torch.equal(compilable(1, x)[0], x * 2)
        assert len(warned) == 1 and said in str(warned[0].message)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            assert torch.equal(compilable(1, x)[0], x * 2)
            assert torch.equal(compilable(2, x)[0], x * 2)


def test_each_width_is_compared(graphs):
    compilable = Compilable(lambda x, wide: (x * 3 if wide and torch.compiler.is_compiling() else x * 2,), "it")
    with compiling(True):
        assert torch.equal(compilable(1, torch.ones(2), False)[0], torch.full((2,), 2.0))
        with pytest.warns(UserWarning, match="differs"):
            compilable(2, torch.ones(2), True)


def test_each_new_graph_is_compared(graphs):
    compilable = Compilable(lambda x: (x * 3 if len(x) > 2 and torch.compiler.is_compiling() else x * 2,), "it")
    with compiling(True):
        assert torch.equal(compilable(1, torch.ones(2))[0], torch.full((2,), 2.0))
        with pytest.warns(UserWarning, match="differs"):  # as wide a pass as before, of more keys
            assert torch.equal(compilable(1, torch.ones(3))[0], torch.full((3,), 2.0))


def slow(graph, inputs):
    """A compiler that takes its time."""
    time.sleep(0.2)
    return graph.forward


def test_what_goes_into_compiling_is_known(graphs, monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", slow)
    compilable, before = Compilable(doubled, "it"), seconds_spent()
    with compiling(True):
        for x, graphs_so_far in ((torch.ones(2), 1), (torch.ones(3), 1), (torch.ones(3, dtype=torch.float64), 2)):
            compilable(1, x)
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs_so_far
            assert seconds_spent() - before >= 0.2 * graphs_so_far
            assert len(compilable._checked) == 1
        settled = seconds_spent()
        compilable(1, torch.ones(5, dtype=torch.float64))
        assert seconds_spent() == settled


def test_no_request_takes_longer_because_passes_are_compiled_in_it(graphs, monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", slow)
    target = Target.from_model(tiny_llama())
    decoder = Decoder(target, Eagle3.for_target(target, None, layers=(1,)), 3)
    prompt = random_prompts(1, [5])[0]
    with compiling(True):
        before, started = seconds_spent(), time.perf_counter()
        generation = decoder.generate(prompt, 12)
        wall, compiled = time.perf_counter() - started, seconds_spent() - before
    assert compiled >= 0.4  # the target's pass and the head's
    assert generation.draft_seconds <= generation.decode_seconds <= wall - compiled


def test_there_is_one_graph_for_texts_of_all_lengths_and_drafts_of_up_to_seven(graphs):
    target = Target.from_model(tiny_llama())
    target.pack()
    drafter, prompts = Eagle3.for_target(target, None, layers=(1,)), random_prompts(3, [3, 9, 70])
    with compiling(True), packed(drafter):
        for decoder in (Decoder(target), *(Decoder(target, drafter, length) for length in (3, 1, 7, 5))):
            for prompt in prompts:
                decoder.generate(prompt, 12)
    # The target reads one token, or several; the head what was emitted, padded, or one token that it drafted.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4


def test_a_copy_calls_the_copys_method():
    class Owner:
        def __init__(self, value: float) -> None:
            self.value = value
            self.function = Compilable(self.scaled, "it")

        def scaled(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (self.value * x,)

    one = Owner(2.0)
    other = copy.deepcopy(one)
    other.value = 5.0
    assert one.function(1, torch.ones(()))[0] == 2.0 and other.function(1, torch.ones(()))[0] == 5.0


class Choice(torch.nn.Module):
    """A module that has two graphs."""

    def __init__(self, doubles: bool) -> None:
        super().__init__()
        self.doubles, self.layer = doubles, torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.layer(x) * 2 if self.doubles else self.layer(x),)


@pytest.mark.parametrize(("frozen", "graphs_made"), [(True, 1), (False, 2)])
def test_modules_that_stay_what_they_are_are_not_asked(graphs, frozen, graphs_made):
    module, x = Choice(True), torch.ones(1, 2)
    compilable = Compilable(module.forward, "it", frozen=frozen)
    with torch.no_grad(), compiling(True):
        compilable(1, x)
        module.doubles = False
        compilable(1, x)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs_made
        module.layer.weight.zero_()  # the values of weights are read with every call
        module.layer.bias.zero_()
        assert not compilable(1, x)[0].any()


def test_graphs_of_two_modules_are_not_taken_for_each_other(graphs):
    modules, x = [Choice(True), Choice(False)], torch.ones(1, 2)
    both = [Compilable(each.forward, "it", frozen=True) for each in modules]
    with torch.no_grad(), compiling(True):
        for _ in range(2):
            for module, compilable in zip(modules, both, strict=True):
                assert torch.equal(compilable(1, x)[0], module(x)[0])


def test_a_target_is_compiled_anew_once_it_is_packed_or_moved(graphs):
    target, prompt = Target.from_model(tiny_llama(hidden_size=512, intermediate_size=1024)), random_prompts(1, [5])[0]
    expected = Decoder(target).generate(prompt, 8).tokens
    with compiling(True):
        assert Decoder(target).generate(prompt, 8).tokens == expected
        target.pack()
        assert target.packed
        assert Decoder(target).generate(prompt, 8).tokens == expected
        target.to("cpu")
        assert Decoder(target).generate(prompt, 8).tokens == expected
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafters_passes_are_graphs_and_decode_the_same(graphs, name):
    target = Target.from_model(tiny_llama())
    drafter, prompts = DRAFTERS[name](target), random_prompts(3, [3, 9, 5])
    decoder = Decoder(target, drafter, 3)
    expected = decoder.generate_batch(prompts, 16, 3)
    with warnings.catch_warnings(), compiling(True), packed(drafter):
        warnings.simplefilter("error", UserWarning)
        found = decoder.generate_batch(prompts, 16, 3)
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert [each.accepted for each in found] == [each.accepted for each in expected]
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
def test_compiled_for_this_processor_with_packed_weights():
    torch._dynamo.reset()
    target = Target.from_model(tiny_llama())
    prompts = random_prompts(2, [3, 9])
    expected = [each.tokens for each in Decoder(target).generate_batch(prompts, 12, 2)]
    target.pack()
    with warnings.catch_warnings(), compiling(True):
        warnings.simplefilter("error", UserWarning)
        found = [each.tokens for each in Decoder(target).generate_batch(prompts, 12, 2)]
    assert found == expected
