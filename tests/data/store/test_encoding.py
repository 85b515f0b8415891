import pytest
import torch

from specdraft.data.store.encoding import bytes_per_vector, decode, encode, from_fp8, squared_error
from specdraft.errors import UserError


def vectors() -> torch.Tensor:
    """Of norms from 1e-6 to 1e6, with a vector of zeros among them."""
    values = torch.randn(13, 64, generator=torch.Generator().manual_seed(0))
    values *= 10.0 ** torch.arange(-6, 7)[:, None]
    values[5] = 0
    return values


@pytest.mark.parametrize(("name", "worst"), [("float32", 0.0), ("bfloat16", 2**-8), ("float8", 2**-4)])
def test_values_come_back_within_half_a_step_of_the_mantissa(name, worst):
    values = vectors()
    back = decode(encode(values, name), torch.float32)
    largest = values.abs().amax(-1, keepdim=True)
    # Below 2^-6 of its unit fp8 has no mantissa left: 2^-10 of it, of at most 448 units in a vector.
    tiny = largest / 448 * 2**-10 if name == "float8" else torch.zeros_like(largest)
    assert ((back - values).abs() <= (worst * values.abs()).maximum(tiny) * 1.0001).all()
    difference, square = squared_error(values, encode(values, name))
    assert (difference / square) ** 0.5 <= worst


def test_the_largest_value_of_a_vector_survives_fp8():
    values = torch.rand(4096, 4, generator=torch.Generator().manual_seed(0)) * 3e38
    back = decode(encode(values, "float8"), torch.float32)
    torch.testing.assert_close(back.amax(-1), values.amax(-1), rtol=1e-6, atol=0)


def test_fp8_is_read_as_torch_reads_it():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    expected = codes.float()
    finite = expected.isfinite()
    assert finite.sum() == 254
    assert torch.equal(from_fp8(codes)[finite], expected[finite])


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8"])
def test_measuring_the_error_changes_nothing(name):
    values = vectors().double()
    encoded, again = encode(values, name), encode(values, name)
    squared_error(values, encoded)
    assert torch.equal(encoded.codes.float(), again.codes.float())


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8"])
def test_bytes_are_those_of_the_tensors(name):
    encoded = encode(vectors(), name)
    assert sum(tensor.nbytes for tensor in encoded if tensor is not None) == 13 * bytes_per_vector(name, 64)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(UserError, match="the store's dtype is 'int4': expected float32, bfloat16, float8"):
        encode(vectors(), "int4")
