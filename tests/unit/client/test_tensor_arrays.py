"""Tensors from and to arrays of numpy, torch and whatever else speaks DLPack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvplane import Tensor
from kvplane.errors import InvalidRequestError
from kvplane.layout import ELEMENT_BYTES


@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
def test_a_torch_tensor_of_every_type_comes_back_bit_for_bit(dtype: str) -> None:
    array = torch.arange(24).reshape(2, 3, 4).to(getattr(torch, dtype))
    tensor = Tensor.from_array(array)
    assert (tensor.dtype, tensor.shape) == (dtype, (2, 3, 4))
    back = tensor.torch()
    assert back.dtype == array.dtype
    assert torch.equal(back.view(torch.uint8), array.view(torch.uint8))
    assert bytes(tensor.data) == bytes(array.view(torch.uint8).numpy().data)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_numpy_array_comes_back(dtype: str) -> None:
    array = np.arange(6, dtype=dtype).reshape(3, 2)
    tensor = Tensor.from_array(array)
    assert (tensor.dtype, tensor.shape, tensor.data) == (dtype, (3, 2), array.tobytes())
    np.testing.assert_array_equal(tensor.numpy(), array)


def test_part_of_an_array_is_read_from_where_it_begins() -> None:
    array = torch.arange(12.0).reshape(4, 3)
    assert Tensor.from_array(array[2:]).numpy().tolist() == [[6, 7, 8], [9, 10, 11]]
    assert Tensor.from_array(array[:, :0]).shape == (4, 0)
    assert Tensor.from_array(array[1:2, None, :]).shape == (1, 1, 3)


def test_an_array_that_may_only_be_read_is_read() -> None:
    array = np.frombuffer(np.arange(4, dtype=np.float32).tobytes(), np.float32)
    assert not array.flags.writeable
    assert Tensor.from_array(array).numpy().tolist() == [0, 1, 2, 3]


def test_writing_to_what_was_given_away_changes_no_bytes() -> None:
    tensor = Tensor("float32", (2,), bytes(8))
    tensor.torch().fill_(1)
    assert tensor.torch().tolist() == [0, 0]


@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
def test_a_library_that_takes_dlpack_takes_it(dtype: str) -> None:
    array = torch.arange(6).to(getattr(torch, dtype))
    taken = torch.from_dlpack(Tensor.from_array(array))
    assert torch.equal(taken.view(torch.uint8), array.view(torch.uint8))


class Elsewhere:
    """An array of a GPU."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **_: Any) -> None:
        raise AssertionError("is not read")


@pytest.mark.parametrize(
    ("array", "field", "text"),
    [
        ([1.0], "array", "is a list: an array of numpy, torch or another library"),
        (torch.zeros(2, dtype=torch.float64), "dtype", "none of float32, float16, bfloat16"),
        (torch.zeros(2, 3).T, "array", "is not contiguous: pass array.contiguous()"),
        (torch.zeros(2, requires_grad=True), "array", "use tensor.detach()"),
        (Elsewhere(), "array", "is not on the CPU"),
        (torch.zeros((1,) * 9), "shape", "at most 8 extents"),
    ],
)
def test_an_array_that_cannot_be_read_is_refused_by_name(array: Any, field: str, text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Tensor.from_array(array)
    assert caught.value.field == field
    assert text in caught.value.message


def test_numpy_is_told_apart_from_torch_where_it_has_no_such_type() -> None:
    tensor = Tensor.from_array(torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(InvalidRequestError, match=r"numpy has no bfloat16: use torch\(\)"):
        tensor.numpy()
