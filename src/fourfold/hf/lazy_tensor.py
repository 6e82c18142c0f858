"""Tensors of which only the shape is here: a slice of one is read from the stored tensors that it is made of.

transformers converts a checkpoint with operations on tensors (stack the experts, concatenate gate and up, transpose). Given lazy tensors,
the same code says which slices of which stored tensors a slice of its result is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Box = tuple[slice, ...]
# Fill a tensor, of any dtype and strides, with a slice.
Read = Callable[[Tensor, Box], None]


class UnknownOperationError(ValueError):
    """A function of tensors of which it is not known what slices of its arguments a slice of its result is."""


class LazyTensor(torch.Tensor):
    """A tensor on ``meta`` that knows how to read any slice of itself, and the names of the stored tensors that it needs."""

    read_into: Read
    sources: frozenset[str]

    @staticmethod
    def of(shape: Sequence[int], dtype: torch.dtype, read_into: Read, sources: frozenset[str]) -> LazyTensor:
        lazy = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(LazyTensor)
        lazy.read_into, lazy.sources = read_into, sources
        return lazy

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in _ASKS:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if name not in _OPERATIONS:
            raise UnknownOperationError(name)
        return _OPERATIONS[name](*args, **kwargs)


# What reads no values: `__get__` is that of attributes, such as the shape.
_ASKS = {
    "__get__",
    "size",
    "dim",
    "numel",
    "stride",
    "is_contiguous",
    "is_floating_point",
    "__repr__",
    "__len__",
}


@dataclass(frozen=True)
class _Kind:
    """The dtype and the sources of a result."""

    dtype: torch.dtype
    sources: frozenset[str]

    @staticmethod
    def of(*parts: LazyTensor) -> _Kind:
        dtypes = {part.dtype for part in parts}
        if len(dtypes) > 1:
            raise UnknownOperationError(f"a change of dtype between {', '.join(sorted(map(str, dtypes)))}")
        return _Kind(dtypes.pop(), frozenset().union(*(part.sources for part in parts)))

    def tensor(self, shape: Sequence[int], read: Read) -> LazyTensor:
        return LazyTensor.of(shape, self.dtype, read, self.sources)


# -- the operations, each by what a slice of its result is -----------------------------------------------------------------


def _cat(parts: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    dim %= parts[0].ndim
    starts = [sum(part.shape[dim] for part in parts[:i]) for i in range(len(parts))]

    def read(out: Tensor, box: Box) -> None:
        for part, start in zip(parts, starts, strict=True):
            first, last = max(box[dim].start, start), min(box[dim].stop, start + part.shape[dim])
            if first < last:
                target = out.narrow(dim, first - box[dim].start, last - first)
                part.read_into(target, _replaced(box, dim, slice(first - start, last - start)))

    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    if any(_without(part.shape, dim) != _without(parts[0].shape, dim) for part in parts):
        raise ValueError(
            f"tensors of the shapes {sorted({tuple(p.shape) for p in parts})} do not fit together"
        )
    return _Kind.of(*parts).tensor(shape, read)


def _stack(parts: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    return _cat([_unsqueeze(part, dim % (part.ndim + 1)) for part in parts], dim % (parts[0].ndim + 1))


def _unsqueeze(lazy: LazyTensor, dim: int) -> LazyTensor:
    def read(out: Tensor, box: Box) -> None:
        lazy.read_into(out.squeeze(dim), _without(box, dim))

    return _Kind.of(lazy).tensor((*lazy.shape[:dim], 1, *lazy.shape[dim:]), read)


def _narrow(lazy: LazyTensor, dim: int, start: int, length: int) -> LazyTensor:
    def read(out: Tensor, box: Box) -> None:
        lazy.read_into(out, _replaced(box, dim, slice(box[dim].start + start, box[dim].stop + start)))

    return _Kind.of(lazy).tensor(_replaced(lazy.shape, dim, length), read)


def _split(lazy: LazyTensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[LazyTensor, ...]:
    dim %= lazy.ndim
    if isinstance(sizes, int):
        sizes = [min(sizes, lazy.shape[dim] - start) for start in range(0, lazy.shape[dim], sizes)]
    if sum(sizes) != lazy.shape[dim]:
        raise ValueError(f"parts of {list(sizes)} are not the {lazy.shape[dim]} entries of a tensor")
    return tuple(_narrow(lazy, dim, sum(sizes[:i]), size) for i, size in enumerate(sizes))


def _chunk(lazy: LazyTensor, chunks: int, dim: int = 0) -> tuple[LazyTensor, ...]:
    return _split(lazy, max(1, -(-lazy.shape[dim] // chunks)), dim)


def _unbind(lazy: LazyTensor, dim: int = 0) -> tuple[LazyTensor, ...]:
    return tuple(_squeeze(part, dim) for part in _split(lazy, 1, dim))


def _squeeze(lazy: LazyTensor, dim: int) -> LazyTensor:
    dim %= lazy.ndim
    if lazy.shape[dim] != 1:
        return lazy

    def read(out: Tensor, box: Box) -> None:
        lazy.read_into(out.unsqueeze(dim), (*box[:dim], slice(0, 1), *box[dim:]))

    return _Kind.of(lazy).tensor(_without(lazy.shape, dim), read)


def _transpose(lazy: LazyTensor, dim0: int, dim1: int) -> LazyTensor:
    order = list(range(lazy.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]

    def read(out: Tensor, box: Box) -> None:
        lazy.read_into(out.transpose(dim0, dim1), tuple(box[i] for i in order))

    return _Kind.of(lazy).tensor([lazy.shape[i] for i in order], read)


def _reshape(lazy: LazyTensor, *asked: Any) -> LazyTensor:
    """Merge and split dims, one after the other: both shapes are walked through for dims of the same product."""
    shape = list(asked[0] if len(asked) == 1 and not isinstance(asked[0], int) else asked)
    if -1 in shape:
        shape[shape.index(-1)] = lazy.numel() // -math.prod(shape)
    if math.prod(shape) != lazy.numel():
        raise ValueError(f"a tensor of the shape {list(lazy.shape)} has not that of {shape}")
    dim = 0
    while dim < max(len(shape), lazy.ndim):
        if dim == lazy.ndim:
            lazy = _unsqueeze(lazy, dim)
        elif dim == len(shape):
            lazy = _squeeze(lazy, dim)
            continue
        here, wanted = lazy.shape[dim], shape[dim]
        if here == wanted:
            dim += 1
        elif here > wanted and here % wanted == 0:
            lazy = _unflatten(lazy, dim, wanted)
        else:
            lazy = _flatten(lazy, dim)
    return lazy


def _flatten(lazy: LazyTensor, dim: int) -> LazyTensor:
    """``dim`` and the next one as one."""
    outer, inner = lazy.shape[dim], lazy.shape[dim + 1]

    def read(out: Tensor, box: Box) -> None:
        first, last = box[dim].start, box[dim].stop
        at = first
        while at < last:
            row = at // inner
            # Whole rows at once, or a part of one.
            rows = (last - at) // inner if at % inner == 0 and last - at >= inner else 1
            stop = min(last, (row + rows) * inner)
            columns = slice(at - row * inner, stop - row * inner - (rows - 1) * inner)
            target = out.narrow(dim, at - first, stop - at).unflatten(dim, (rows, -1))
            lazy.read_into(target, (*box[:dim], slice(row, row + rows), columns, *box[dim + 1 :]))
            at = stop

    return _Kind.of(lazy).tensor((*lazy.shape[:dim], outer * inner, *lazy.shape[dim + 2 :]), read)


def _unflatten(lazy: LazyTensor, dim: int, outer: int) -> LazyTensor:
    """``dim`` as two, of which the first has ``outer`` entries."""
    inner = lazy.shape[dim] // outer

    def read(out: Tensor, box: Box) -> None:
        rows, columns = box[dim], box[dim + 1]
        around = (box[:dim], box[dim + 2 :])
        if rows.stop - rows.start == 1:
            both = slice(rows.start * inner + columns.start, rows.start * inner + columns.stop)
            lazy.read_into(out.squeeze(dim), (*around[0], both, *around[1]))
            return
        if dim and box[0].stop - box[0].start > 1:  # one by one: so much less is held at a time
            for i in range(box[0].start, box[0].stop):
                read(out.narrow(0, i - box[0].start, 1), (slice(i, i + 1), *box[1:]))
            return
        # Rows are read whole: their parts lie apart.
        shape = (*out.shape[:dim], (rows.stop - rows.start) * inner, *out.shape[dim + 2 :])
        held = torch.empty(shape, dtype=out.dtype, device=out.device)
        both = slice(rows.start * inner, rows.stop * inner)
        lazy.read_into(held, (*around[0], both, *around[1]))
        parts = held.unflatten(dim, (rows.stop - rows.start, inner))
        out.copy_(parts.narrow(dim + 1, columns.start, columns.stop - columns.start))

    return _Kind.of(lazy).tensor((*lazy.shape[:dim], outer, inner, *lazy.shape[dim + 1 :]), read)


def _same(lazy: LazyTensor) -> LazyTensor:
    return lazy


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "cat": _cat,
    "stack": _stack,
    "chunk": _chunk,
    "split": _split,
    "unbind": _unbind,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "reshape": _reshape,
    "view": _reshape,
    "contiguous": _same,
    "detach": _same,
}


def _replaced(values: Sequence[Any], dim: int, value: Any) -> tuple[Any, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _without(values: Sequence[Any], dim: int) -> tuple[Any, ...]:
    return (*values[:dim], *values[dim + 1 :])
