"""Tensors that other code has made are checked before their memory is used by its address."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import zckpt
from tests.support.coded import Coded
from zckpt.transfer.host_memory import memory
from zckpt.transfer.memory import check_memory


def resized(nbytes: int, start: int = 0, stop: int = 8) -> torch.Tensor:
    """Returns elements of a tensor whose memory has been resized."""
    tensor = torch.ones(8)
    view = tensor[start:stop]
    tensor.untyped_storage().resize_(nbytes)
    return view


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(8)


class Named(torch.Tensor):
    """A tensor with memory of its own and nothing but another class."""


REFUSED: dict[str, tuple[Any, str]] = {
    "meta": (lambda: torch.ones(8, device="meta"), "is on the device meta"),
    "lazy": (torch.nn.UninitializedParameter, "is not initialized yet"),
    "subclass": (lambda: Coded(torch.zeros(8, dtype=torch.int8), torch.ones(1)), "is of the class Coded"),
    "fake": (fake, "is of the class FakeTensor"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
    "rows": (lambda: torch.eye(3).to_sparse_csr(), "layout torch.sparse_csr"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2)]), "layout nested"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "layout nested"),
    "mkldnn": (lambda: torch.ones(8).to_mkldnn(), "layout torch._mkldnn"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(8), 1.0, 0, torch.qint8), "torch.qint8"),
    "freed": (lambda: resized(0), "needs 32 bytes of memory, and its storage has 0"),
    "a view of what was freed": (lambda: resized(0, 2, 5), "needs 20 bytes of memory, and its storage has 0"),
    "cut": (lambda: resized(16), "needs 32 bytes of memory, and its storage has 16"),
}


@pytest.mark.filterwarnings("ignore:.*(prototype stage|beta state|quantiz|TypedStorage|ao.quantization)")
@pytest.mark.parametrize("kind", REFUSED)
def test_values_that_are_not_in_the_tensor_s_memory_are_refused_by_name(kind: str) -> None:
    make, why = REFUSED[kind]
    with pytest.raises(zckpt.StateError, match=f"^second .*{why}") as refused:
        check_memory([("first", torch.ones(3)), ("second", make())])
    assert refused.value.key == "second"
    with pytest.raises(zckpt.MismatchError):
        check_memory([("second", make())], zckpt.MismatchError)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(8), torch.empty(0), torch.ones(()), torch.ones(1).expand(8),
        torch.ones(5).as_strided((4, 2), (1, 1)), torch.nn.Parameter(torch.ones(3)),
        torch.ones(8).as_subclass(Named), torch.ones(4, 6).t()[1:, ::2],
    ],
    ids=["plain", "empty", "scalar", "expanded", "overlapping", "parameter", "subclass", "strided"],
)  # fmt: skip
def test_values_in_the_tensor_s_memory_are_accepted(tensor: torch.Tensor) -> None:
    assert check_memory([("name", tensor)]) == ()


def test_there_is_no_memory_in_the_first_page() -> None:
    for address in (0, 8):
        with pytest.raises(ValueError, match=f"no memory at the address {address}"):
            memory(address, 8192)
