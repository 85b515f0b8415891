"""Packed linear layers are the plain ones: values, gradients, state, and what happens to a module on the way."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from specdraft import onednn
from specdraft.decoding.decoder import Decoder
from specdraft.drafters.dflash import DFlash, Domino, DSpark
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.eagle import Eagle, Eagle3
from specdraft.drafters.medusa import Medusa
from specdraft.drafters.pard import Pard
from specdraft.drafters.redrafter import ReDrafter
from specdraft.onednn import LearnedLinear, PackedLinear, is_faster, learning, pack, packed, plain, unpack
from specdraft.targets import Target
from specdraft.targets.batch import Batch
from tests.fakes import random_prompts, tiny_llama

pytestmark = pytest.mark.usefixtures("small_layers_packed_too")
BF16 = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(
        not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor computes bfloat16 by emulation"
    ),
)
DTYPES = [torch.float32, BF16]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (6,), (2, 5), (300,), (0,)])
def test_it_computes_what_the_plain_layer_does(dtype, bias, shape):
    linear = nn.Linear(48, 80, bias=bias).to(dtype)
    given = torch.randn(*shape, 48, dtype=dtype)
    with torch.no_grad():
        torch.testing.assert_close(PackedLinear(linear)(given), linear(given), **tolerance(dtype))
        columns = torch.randn(48, 7, dtype=dtype).T  # not contiguous
        torch.testing.assert_close(PackedLinear(linear)(columns), linear(columns), **tolerance(dtype))


def test_under_autocast_it_takes_what_other_layers_give():
    linear = nn.Linear(48, 80)
    given = torch.randn(3, 48)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = PackedLinear(linear)(given.bfloat16()), linear(given)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected.float(), **tolerance(torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_reach_the_input(dtype):
    linear = nn.Linear(48, 80).to(dtype).requires_grad_(False)
    ours, theirs = (torch.randn(5, 48, dtype=dtype, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    gradient = torch.randn(5, 80, dtype=dtype)
    PackedLinear(linear)(ours.requires_grad_()).backward(gradient)
    linear(theirs.requires_grad_()).backward(gradient)
    torch.testing.assert_close(ours.grad, theirs.grad, **tolerance(dtype))


def test_it_holds_the_weight_once_and_gives_it_back():
    linear = nn.Linear(48, 80)
    layer = PackedLinear(linear)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert layer.weight.is_mkldnn and layer.weight.shape == linear.weight.shape and not layer.weight.requires_grad
    assert torch.equal(plain(layer.weight), linear.weight) and plain(linear.weight) is linear.weight
    state = layer.state_dict()
    assert all(torch.equal(state[name], value) for name, value in linear.state_dict().items())
    assert not state["weight"].is_mkldnn


def test_a_copy_computes_the_same_and_shares_nothing():
    layer = PackedLinear(nn.Linear(48, 80))
    (twin,) = copy.deepcopy(nn.Sequential(layer))
    given = torch.randn(3, 48)
    assert isinstance(twin, PackedLinear) and torch.equal(twin(given), layer(given))
    with torch.no_grad():
        twin.bias.zero_()
    assert layer.bias.abs().sum() > 0


def test_packing_undone_leaves_the_module_as_it_was():
    module = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 4, bias=False)))
    before = copy.deepcopy(module.state_dict())
    pack(module)
    pack(module)  # again changes nothing
    assert isinstance(module[0], PackedLinear) and isinstance(module[1][1], PackedLinear)
    unpack(module)
    assert [type(each) for each in module.modules()].count(nn.Linear) == 2
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_what_is_packed_is_told_by_size_and_dtype_alone(monkeypatch):
    """Never by how long it takes, which differs beside a busy process: the same command writes the same bytes."""
    monkeypatch.setattr("specdraft.onednn._SMALL", 2**18)
    module = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 513))
    pack(module)
    assert [isinstance(each, PackedLinear) for each in module] == [False, True]
    with packed(module[:1]):
        assert not isinstance(module[0], PackedLinear)
    unpack(module)
    assert not any(isinstance(each, PackedLinear) for each in module)


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor emulates bfloat16")
def test_small_layers_of_bfloat16_are_packed(monkeypatch):
    monkeypatch.setattr("specdraft.onednn._SMALL", 2**18)
    module = nn.Sequential(nn.Linear(8, 16, dtype=torch.bfloat16), nn.Linear(8, 16))
    pack(module)
    assert [isinstance(each, PackedLinear) for each in module] == [True, False]


def test_a_packed_copy_ends_with_its_block_also_by_an_error():
    module = nn.Sequential(nn.Linear(8, 8))
    linear = module[0]

    def fail():
        with packed(module):
            assert isinstance(module[0], PackedLinear)
            raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        fail()
    assert module[0] is linear


@pytest.mark.parametrize("linear", [nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8, device="meta")], ids=str)
def test_what_onednn_does_not_compute_stays_plain(linear):
    module = nn.Sequential(linear)
    pack(module)
    assert module[0] is linear


class Router(nn.Linear):
    """As of Llama 4: a linear layer that gives more than its product."""

    def forward(self, given):
        return super().forward(given).topk(2)


def test_a_layer_with_a_forward_of_its_own_stays_plain():
    module = nn.Sequential(Router(8, 4))
    pack(module)
    assert type(module[0]) is Router


@pytest.mark.parametrize("fault", ["wrong", "refused"])
def test_a_target_that_packing_changes_stays_plain(fault, monkeypatch):
    ours, reference = target(), target()

    def forward(self, given):
        if fault == "refused":
            raise RuntimeError("no such layout")
        return 1.5 * nn.functional.linear(given, plain(self.weight))

    monkeypatch.setattr(PackedLinear, "forward", forward)
    with pytest.warns(UserWarning, match="LlamaForCausalLM stay unpacked, decoding is slower"):
        ours.pack()
    assert not any(isinstance(each, PackedLinear) for each in ours.model.modules())
    ids = torch.arange(9)[None]
    assert torch.equal(ours.features(ids, ids).last, reference.features(ids, ids).last)


def target(**options) -> Target:
    return Target.from_model(tiny_llama(num_hidden_layers=4, **options))


@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_target_is_the_same_target(tied):
    reference, ours = target(tie_word_embeddings=tied), target(tie_word_embeddings=tied)
    ours.pack()
    assert isinstance(ours.head, PackedLinear) and not ours.embedding_weight.is_mkldnn
    assert sum(isinstance(each, PackedLinear) for each in ours.model.modules()) == 4 * 7 + 1
    ids = torch.randint(64, (2, 12))
    positions = torch.arange(12).repeat(2, 1)
    for mine, theirs in zip(
        ours.features(ids, positions, (1, 2)), reference.features(ids, positions, (1, 2)), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
    prompts = random_prompts(4, (3, 9))
    decoded = [[each.tokens for each in Decoder(one).generate_batch(prompts, 20, 3)] for one in (ours, reference)]
    assert decoded[0] == decoded[1]
    unpack(ours.model)
    assert not any(isinstance(each, PackedLinear) for each in ours.model.modules())
    assert torch.equal(ours.head.weight, reference.head.weight)


@pytest.mark.parametrize("kind", [Eagle, Eagle3, Medusa, DFlash, DSpark, Domino, DraftModel, Pard, ReDrafter])
def test_drafters_are_made_for_a_packed_target_trained_beside_it_and_decode_packed(kind):
    plainly, ours = target(context=128), target(context=128)
    ours.pack()
    heads = []
    for one in (plainly, ours):
        torch.manual_seed(0)
        heads.append(kind.for_target(one))
    states = [head.state_dict() for head in heads]
    assert all(torch.equal(value, states[0][name]) for name, value in states[1].items())
    ids = torch.randint(64, (2, 20))
    batch = Batch(ids, torch.arange(20).repeat(2, 1), torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
    gradients = []
    for one, head in zip((plainly, ours), heads, strict=True):
        torch.manual_seed(1)
        head.training_loss(batch, one.features(ids, batch.position_ids, head.layers), one).loss.backward()
        gradients.append({name: each.grad for name, each in head.named_parameters() if each.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and gradients[0]
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6)
    prompts = random_prompts(3, (3, 9))
    expected = Decoder(plainly, heads[0].eval(), 3).generate_batch(prompts, 20, 3)
    names = [name for name, _ in heads[1].named_parameters()]
    with packed(heads[1].eval()):
        assert sum(isinstance(each, PackedLinear) for each in heads[1].modules()) > 1
        found = Decoder(ours, heads[1], 3).generate_batch(prompts, 20, 3)
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert [each.accepted for each in found] == [each.accepted for each in expected]
    assert [name for name, _ in heads[1].named_parameters()] == names


def test_a_loaded_target_is_packed_unless_told_otherwise():
    cpu = {"dtype": "float32", "device": "cpu"}
    loaded, reference = (Target.load("embedded://tiny", **cpu, packed=each) for each in (True, False))
    assert isinstance(loaded.head, PackedLinear) and type(reference.head) is nn.Linear
    assert loaded.identity == reference.identity
    kept = {name: parameter.numel() for name, parameter in reference.model.named_parameters()}
    own = {name: parameter.numel() for name, parameter in loaded.model.named_parameters()}
    assert kept.items() <= own.items()
    loaded.to("meta")
    assert type(loaded.head) is nn.Linear and loaded.device.type == "meta"


def test_gradients_pass_through_a_loaded_target_packed_or_not():
    for chosen in (True, False):
        loaded = Target.load("embedded://tiny", device="cpu", dtype="float32", packed=chosen)
        hidden = torch.randn(3, loaded.hidden_size, requires_grad=True)
        loaded.logits(hidden).sum().backward()
        assert hidden.grad.abs().sum() > 0
    pack(loaded.model)
    unpack(loaded.model)
    loaded.logits(hidden).sum().backward()


PRODUCTS = """
import torch
from specdraft.onednn import PackedLinear
layer = PackedLinear(torch.nn.Linear(16, 16, bias=False))
for turn in range(2):
    for rows in range(1, 1001):
        layer(torch.zeros(rows, 16))
    print("turn", flush=True)
"""


@pytest.mark.parametrize(("capacity", "again"), [(None, 0), ("1024", 1000)])
def test_products_of_a_thousand_numbers_of_rows_are_prepared_once(capacity, again):
    """Unless the user has said how many are kept."""
    environment = {name: value for name, value in os.environ.items() if name != "ONEDNN_PRIMITIVE_CACHE_CAPACITY"}
    environment |= {} if capacity is None else {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": capacity}
    environment |= {"ONEDNN_VERBOSE": "profile_create"}
    ran = subprocess.run([sys.executable, "-c", PRODUCTS], env=environment, capture_output=True, text=True, check=True)
    first, second, _ = ran.stdout.split("turn\n")
    made = [turn.count("create:cache_miss,cpu,inner_product") for turn in (first, second)]
    if made[0] == 0:
        pytest.skip("this build of oneDNN does not say what it prepares")
    assert made[0] == 1000 and abs(made[1] - again) <= 1


@pytest.fixture
def on_amd(monkeypatch):
    """Every product counts as large, on a processor where that pays."""
    monkeypatch.setattr(onednn, "is_faster", lambda: True)
    monkeypatch.setattr(onednn, "_LARGE", 1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7,), (2, 5), (300,)])
def test_a_layer_that_learns_has_the_plain_layers_gradients(on_amd, bias, shape):
    linear = nn.Linear(48, 80, bias=bias)
    given = torch.randn(*shape, 48, requires_grad=True)
    weights = torch.randn(*shape, 80)
    leaves = [given, *linear.parameters()]
    expected = linear(given)
    gradients = torch.autograd.grad((expected * weights).sum(), leaves)
    with learning(linear):
        found = linear(given)
        assert type(found.grad_fn).__name__ == "_LearnedProductBackward"
    torch.testing.assert_close(found, expected, **tolerance(torch.float32))
    for mine, theirs in zip(torch.autograd.grad((found * weights).sum(), leaves), gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)


def test_only_what_needs_a_gradient_costs_one(on_amd):
    linear = nn.Linear(48, 80)
    with learning(linear):
        linear(torch.randn(7, 48)).sum().backward()  # of an input that learns nothing
        linear.bias.requires_grad_(False)
        linear.zero_grad()
        linear(torch.randn(7, 48)).sum().backward()
    assert linear.weight.grad is not None and linear.bias.grad is None


def test_autocast_small_products_and_inference_stay_torchs(on_amd, monkeypatch):
    linear, given = nn.Linear(48, 80), torch.randn(7, 48)

    def ours():
        return "Learned" in type(linear(given).grad_fn).__name__

    with learning(linear):
        assert ours()
        with torch.autocast("cpu", torch.bfloat16):
            assert not ours() and linear(given).dtype == torch.bfloat16
        with torch.no_grad():
            assert not ours()
        monkeypatch.setattr(onednn, "_LARGE", 7 * 48 * 80 + 1)
        assert not ours()


def test_layers_learn_as_such_and_are_left_as_they_were(on_amd):
    class Own(nn.Linear):
        pass

    module = nn.Sequential(nn.Linear(4, 4), Own(4, 4), nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4).double())
    kinds, state = [type(each) for each in module], set(module.state_dict())
    with learning(module):
        assert [type(each) for each in module] == [LearnedLinear, *kinds[1:]]
        assert set(module.state_dict()) == state and copy.deepcopy(module)[0].weight.shape == (4, 4)
    assert [type(each) for each in module] == kinds


def test_nothing_is_changed_where_torch_is_as_fast(monkeypatch):
    monkeypatch.setattr(onednn, "is_faster", lambda: False)
    linear = nn.Linear(4, 4)
    with learning(linear):
        assert type(linear) is nn.Linear


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        ("AuthenticAMD", "avx2 avx512f", True),
        ("AuthenticAMD", "avx2", False),
        ("GenuineIntel", "avx2 avx512f", False),
        (None, "", False),
    ],
)
def test_which_processors_want_it(monkeypatch, name, flags, expected):
    def read(path):
        if name is None:
            raise FileNotFoundError(path)
        return f"vendor_id\t: {name}\nflags\t\t: fpu {flags}\n"

    monkeypatch.setattr(onednn.Path, "read_text", read)
    assert is_faster.__wrapped__() is expected
    assert onednn.reads_few_rows_slowly.__wrapped__() is (name == "AuthenticAMD" and not expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("shape", "weight_first"), [((1, 1), 0), ((1, 2), 1), ((1, 8), 1), ((1, 9), 0), ((2, 3), 0)])
def test_a_few_rows_are_multiplied_from_the_other_side_in_a_graph_alone(bias, shape, weight_first):
    plain, few = nn.Linear(12, 20, bias), onednn.FewRowsLinear(12, 20, bias)
    few.load_state_dict(plain.state_dict())
    given, products = torch.randn(*shape, 12), []

    def backend(graph, _inputs):
        products.extend(node for node in graph.graph.nodes if node.target is torch.mm)
        return graph.forward

    torch._dynamo.reset()
    with torch.inference_mode():
        assert torch.equal(few(given), plain(given))
        found = torch.compile(few, backend=backend, fullgraph=True)(given)
        torch.testing.assert_close(found, plain(given))
    assert found.shape == (*shape, 20) and len(products) == weight_first


def test_small_layers_are_told_of_few_rows_where_they_decode(monkeypatch):
    def make():
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).bfloat16(), nn.Linear(1024, 512), LearnedLinear(8, 8))

    kinds = [onednn.FewRowsLinear, nn.Linear, PackedLinear, LearnedLinear]
    monkeypatch.setattr(onednn, "_native", lambda weight: weight.dtype == torch.float32)
    monkeypatch.setattr(onednn, "_SMALL", 64)
    for slowly in (True, False):
        monkeypatch.setattr(onednn, "reads_few_rows_slowly", lambda slowly=slowly: slowly)
        expected = kinds if slowly else [nn.Linear, *kinds[1:]]
        module = make()
        before = [type(each) for each in module]
        with packed(module):
            assert [type(each) for each in module] == expected
        assert [type(each) for each in module] == before
        pack(module)
        assert [type(each) for each in module] == expected
        unpack(module)
        assert [type(each) for each in module] == before


@pytest.mark.parametrize("faster", [False, True])
def test_a_weight_by_columns_is_torchs_where_its_library_knows_the_processor(monkeypatch, faster):
    monkeypatch.setattr(onednn, "is_faster", lambda: faster)
    computed = onednn._product
    asked = []
    monkeypatch.setattr(onednn, "_product", lambda *given: asked.append(given) or computed(*given))
    a, columns = torch.randn(3, 5), torch.randn(5, 4)
    torch.testing.assert_close(onednn.product(a, columns.T), a @ columns)
    assert len(asked) == faster
    torch.testing.assert_close(onednn.product(a, columns.T.contiguous()), a @ columns)
    assert len(asked) == 1 + faster


def test_a_layer_that_learns_is_packed_where_it_decodes(on_amd):
    module = nn.Sequential(nn.Linear(2048, 1024))
    with learning(module):
        with packed(module):
            assert isinstance(module[0], PackedLinear)
        assert type(module[0]) is LearnedLinear
