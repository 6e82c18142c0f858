"""Lazy tensors: a slice of what operations make of them is that of the real tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fourfold.hf.lazy_tensor import Box, LazyTensor, UnknownOperationError


def lazy(real: Tensor, name: str = "real", read: list[int] | None = None) -> LazyTensor:
    """``read`` gets the elements of each slice that is read."""

    def read_into(out: Tensor, box: Box) -> None:
        assert out.shape == real[box].shape
        if read is not None:
            read.append(out.numel())
        out.copy_(real[box])

    return LazyTensor.of(real.shape, real.dtype, read_into, frozenset((name,)))


def numbers(*shape: int, start: int = 0) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count, dtype=torch.float32).view(shape)


def interleave(tensor: Tensor) -> Tensor:
    return tensor.reshape(2, 3, 2, 5).transpose(1, 2).reshape(2, 6, 5)


def rotate(tensor: Tensor) -> Tensor:
    return tensor.view(2, 3, 2, 5).transpose(1, 2).reshape(12, 5)


# Each takes two tensors of 2 x 6 x 5.
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "concatenate": lambda a, b: torch.cat([a, b], dim=1),
    "merge a list": lambda a, b: torch.stack([a, b], dim=0),
    "merge a list inside": lambda a, b: torch.stack([a, b], dim=-1),
    "experts": lambda a, b: torch.cat([torch.stack([a, b]), torch.stack([b, a])], dim=2),
    "transpose": lambda a, b: torch.transpose(torch.cat([a, b], dim=0), dim0=1, dim1=2).contiguous(),
    "chunk": lambda a, b: torch.cat(list(torch.chunk(a, 2, dim=1))[::-1] + list(b.chunk(4, dim=1)), dim=1),
    "split": lambda a, b: torch.cat(list(torch.split(a, [1, 3, 2], dim=1))[1:], dim=1),
    "split a list": lambda a, b: torch.cat(
        [part.squeeze(0) for part in torch.chunk(a, 2, dim=0)][::-1], dim=0
    ),
    "unbind": lambda a, b: torch.stack(list(torch.unbind(a, dim=1))[::-1], dim=1),
    "interleave": lambda a, b: torch.cat([interleave(a), b], dim=2),
    "rotate": lambda a, b: rotate(a.reshape(12, 5)),
    "flatten": lambda a, b: a.reshape(2, -1),
    "flatten all": lambda a, b: torch.cat([a.reshape(-1), b.reshape(-1)]),
    "other dims": lambda a, b: a.reshape(3, 4, 5),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_slice_of_the_result_is_that_of_real_tensors(operation: str, data: st.DataObject) -> None:
    a, b = numbers(2, 6, 5), numbers(2, 6, 5, start=100)
    expected = OPERATIONS[operation](a, b)
    found = OPERATIONS[operation](lazy(a, "a"), lazy(b, "b"))
    assert isinstance(found, LazyTensor)
    assert found.shape == expected.shape
    assert found.sources <= {"a", "b"}
    bounds = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in expected.shape]
    if any(lo == hi for lo, hi in bounds):  # an empty slice is never read
        return
    box = tuple(slice(lo, hi) for lo, hi in bounds)
    transposed = data.draw(st.booleans())
    out = torch.full(expected[box].shape[::-1], -1.0).permute(tuple(reversed(range(expected.ndim))))
    out = out if transposed else out.contiguous()
    found.read_into(out, box)
    assert torch.equal(out, expected[box])


def test_only_the_slice_is_read() -> None:
    read: list[int] = []
    experts = [lazy(numbers(8, 4), str(i), read) for i in range(6)]
    merged = torch.cat(
        [torch.stack(experts[:3]), torch.stack(experts[3:])], dim=1
    )  # gate and up of three experts
    assert isinstance(merged, LazyTensor)
    out = torch.empty(3, 6, 4)
    merged.read_into(out, (slice(0, 3), slice(6, 12), slice(0, 4)))
    assert sorted(read) == [8] * 3 + [16] * 3  # two rows of each gate, four of each up


def test_the_rows_of_one_expert_are_read_where_its_parts_lie_apart() -> None:
    read: list[int] = []
    stored = lazy(numbers(4, 6, 5), read=read)
    apart = stored.reshape(4, 3, 2, 5).transpose(1, 2).reshape(4, 6, 5)
    assert isinstance(apart, LazyTensor)
    apart.read_into(torch.empty(4, 3, 5), (slice(0, 4), slice(0, 3), slice(0, 5)))
    assert max(read) == 30  # of 120 numbers


@pytest.mark.parametrize("operation", [lambda t: t * 2, lambda t: t.flip(0), lambda t: t[0]])
def test_an_unknown_operation_is_refused(operation: Callable[[Any], Any]) -> None:
    with pytest.raises(UnknownOperationError):
        operation(lazy(numbers(2, 3)))


def test_tensors_of_two_dtypes_are_not_put_together() -> None:
    with pytest.raises(UnknownOperationError, match="bfloat16"):
        torch.cat([lazy(numbers(2, 3)), lazy(numbers(2, 3).bfloat16())])
