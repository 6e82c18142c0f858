"""Products in float8: operands are e4m3 numbers, and what rows of them are multiplied by.

    O  = I W^T     a scale for each row of I (a token) and each row of W (an output feature)
    dI = dO W      a scale for each row of dO, and one for all of W
    dW = dO^T I    not in float8

torchao calls this recipe ROWWISE_WITH_GW_HP. A scale is that of the whole row, and so the same on every grid: where ranks have parts
of a row, they reduce its largest magnitude. Scales are powers of two: only the cast to e4m3 rounds. PyTorch's operator for CPUs
multiplies the same numbers in fp32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from fourfold.mesh.collectives import Pending

_E4M3 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_E4M3).max
_LEAST = 1e-12  # so that a row of zeros has a scale

_Key = TypeVar("_Key")
# Starts to reduce largest magnitudes, in place, over the ranks that have parts of the same rows.
Share = Callable[[Tensor], Pending]


@dataclass(frozen=True)
class Float8:
    """A matrix, or several, in e4m3; ``unit``, a view of the same shape, is what each number is multiplied by."""

    values: Tensor
    unit: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, at: int | tuple[slice, ...]) -> Float8:
        return Float8(self.values[at], self.unit[at])

    def t(self) -> Float8:
        return Float8(self.values.t(), self.unit.t())

    def unflatten(self, dim: int, sizes: tuple[int, int]) -> Float8:
        return Float8(self.values.unflatten(dim, sizes), self.unit.unflatten(dim, sizes))

    def chunk(self, parts: int, dim: int = 0) -> list[Float8]:
        return _paired(self.values.chunk(parts, dim), self.unit.chunk(parts, dim))

    def split(self, sizes: list[int], dim: int) -> list[Float8]:
        return _paired(self.values.split(sizes, dim), self.unit.split(sizes, dim))


def _paired(values: Sequence[Tensor], units: Sequence[Tensor]) -> list[Float8]:
    return [Float8(*both) for both in zip(values, units, strict=True)]


def operands_of_output(
    input: Tensor, weights: Sequence[Sequence[Tensor]], share: Share
) -> tuple[Float8, list[list[Float8]]]:
    """``input`` [parts, tokens, features] and the weights [out, in] of each member; their rows are shared by the same ranks."""
    flat = [weight for of_member in weights for weight in of_member]
    found = [_largest(input, (0, 2)), *(_largest(weight, (1,)) for weight in flat)]
    packed = torch.cat(found)
    share(packed).wait()
    of_input, *of_weights = packed.split([len(each) for each in found])
    made = iter(_by_scale(w, largest.unsqueeze(1)) for w, largest in zip(flat, of_weights, strict=True))
    return _by_scale(input, of_input.view(1, -1, 1)), [
        [next(made) for _ in of_member] for of_member in weights
    ]


def operands_of_gradient(
    gradients: Mapping[_Key, Tensor],
    weights: Mapping[_Key, Sequence[Tensor]],
    share: Share,
    share_weights: Share,
) -> tuple[dict[_Key, Float8], dict[_Key, list[Float8]]]:
    """The gradients of the outputs, whose rows the ranks of ``share`` have parts of, and the weights, those of ``share_weights`` too."""
    whole = torch.stack([torch.stack([_largest(w, (0, 1)) for w in weights[m]]).amax() for m in gradients])
    pending = share_weights(whole)
    rows = [_largest(gradient, (0, 2)) for gradient in gradients.values()]
    pending.wait()
    packed = torch.cat([whole, *rows])
    share(packed).wait()
    whole, *rows = packed.split([len(whole), *(len(row) for row in rows)])
    left, right = {}, {}
    for member, of_weights, of_rows in zip(gradients, whole, rows, strict=True):
        left[member] = _by_scale(gradients[member], of_rows.view(1, -1, 1))
        # The second operand of a matmul has columns that are contiguous.
        right[member] = [_by_scale(w.t(), of_weights.view(1, 1)).t() for w in weights[member]]
    return left, right


def _largest(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The largest magnitude over ``dims``."""
    largest: Tensor = torch.linalg.vector_norm(x, math.inf, dims)
    return largest


def _by_scale(x: Tensor, largest: Tensor) -> Float8:
    """``x`` in e4m3, by the scales that belong to largest magnitudes."""
    quotient = _LARGEST / largest.double().clamp(min=_LEAST)
    scale = quotient / torch.frexp(quotient).mantissa / 2  # the power of two that is not above it
    values = (x * scale.to(x.dtype)).to(_E4M3, memory_format=torch.contiguous_format)
    return Float8(values, scale.reciprocal().float().expand(x.shape))


def multiply(a: Float8, b: Float8, out: Tensor, *, first: bool, is_gradient: bool) -> None:
    """``out = a b``, or add to it, of matrices; the rows of a, and the columns of b, are contiguous."""
    scale_a, scale_b = a.unit[:, 0].unsqueeze(1).contiguous(), b.unit[0].unsqueeze(0).contiguous()
    multiplied = functools.partial(
        torch._scaled_mm,
        a.values,
        b.values,
        scale_a,
        scale_b,
        out_dtype=out.dtype,
        # As in the recipe: outputs are summed up in a lower precision, where devices are faster by it.
        use_fast_accum=not is_gradient,
    )
    if first and out.is_contiguous():
        multiplied(out=out)
    elif first:
        out.copy_(multiplied())
    else:
        out.add_(multiplied())
