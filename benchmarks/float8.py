"""What float8 is compared with: a stock model in one process, and arithmetic without noise.

Where a grid adds up in another order than one process does, its values differ by rounding. A cast to e4m3 is a step: a value next to
an edge may fall on either side, which changes it by a sixteenth, and then everything that follows. So grids are compared in
fp64, in which a value that is that near to an edge does not occur: all that is fp32 in the model and in Fourfold is fp64, and
e4m3 stays e4m3.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fourfold import selftest
from fourfold.dry_run.recorder import replaced
from fourfold.parallel import parallelize

BAR = 1e-10  # of all errors: fp64 rounds at 1e-16, and a number on the other side of an edge of e4m3 shows as 1e-6 and more

# -- the stock model --------------------------------------------------------------------------------------------------


def stock_in_float8(kind: str) -> nn.Module:
    """A small model whose linears compute in float8, by the recipe ROWWISE_WITH_GW_HP as its text says it."""
    model = selftest.build(kind)
    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head:
            module.forward = _forward_of(module)
    return model


def _forward_of(module: nn.Module) -> Any:
    def forward(input: Tensor) -> Tensor:
        weight = module.weight.t() if isinstance(module, Conv1D) else module.weight
        output = _Product.apply(input.reshape(-1, input.shape[-1]), weight).view(*input.shape[:-1], -1)
        return output if module.bias is None else output + module.bias

    return forward


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(input, weight)
        return rounded(input, (1,)) @ rounded(weight, (1,)).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        input, weight = ctx.saved_tensors
        return rounded(gradient, (1,)) @ rounded(weight, (0, 1)), gradient.t() @ input


def rounded(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The values that ``x`` has in e4m3, with one scale over ``dims``."""
    largest = x.abs().amax(dims, keepdim=True).clamp(min=1e-12)
    scale = torch.exp2(torch.floor(torch.log2(448 / largest)))
    return (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) / scale


# -- arithmetic -------------------------------------------------------------------------------------------------------


@contextmanager
def in_fp64() -> Iterator[None]:
    """Inside, what asks for fp32 gets fp64, parameters included; in all threads, as half-batches have their own."""
    changed: list[tuple[Any, str, Any]] = [
        (torch, "float32", torch.float64),
        (torch, "float", torch.float64),
        (torch.Tensor, "float", torch.Tensor.double),
        (torch, "_scaled_mm", _product),  # PyTorch's multiplies in fp32
        (parallelize, "check_model", lambda model: None),  # which refuses parameters that are not fp32
    ]
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, default)
        for owner, name, value in changed:
            stack.enter_context(replaced(owner, name, value))
        yield


def _product(
    a: Tensor, b: Tensor, unit_a: Tensor, unit_b: Tensor, *, out: Tensor | None = None, **_: Any
) -> Tensor:
    return torch.mm(a.double() * unit_a, b.double() * unit_b, out=out)
