"""Tensor and sequence parallelism as Megatron does them, as styles of `parallelize_module`: another opponent.

Column-parallel linears with one input gather its tokens once. They keep their own tokens only: backward gathers them
again while it computes the gradient of the input, and sums that gradient over the ranks while it computes the
gradients of the weights. A row-parallel linear leaves each rank its tokens of the sum. Forward waits for what it sends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

Started = Callable[[], Tensor]  # waits, and gives the result


class Columns(ParallelStyle):
    """Of the module whose children ``names`` are linears that read its input; without names, of a linear, whose output is a DTensor."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linears = [module.get_submodule(name) for name in self.names] or [module]
        for linear in linears:
            _cut(linear, device_mesh, 0)
        group = device_mesh.get_group()

        def multiply(x_BSh: Tensor) -> tuple[Tensor, ...]:
            return _Columns.apply(x_BSh, group, *[_local(linear.weight) for linear in linears])  # type: ignore[no-any-return]

        if not self.names:
            module.forward = lambda x_BSh: DTensor.from_local(  # type: ignore[method-assign]
                multiply(x_BSh)[0], device_mesh, [Shard(-1)], run_check=False
            )
            return module
        outputs: dict[str, Tensor] = {}

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            x_BSh = args[0] if args else kwargs["hidden_states"]
            products = multiply(x_BSh)
            outputs.update(zip(self.names, products, strict=True))
            # Without values: the linears have read them. The module asks for the shape of all tokens.
            whole = x_BSh.new_empty(()).expand(*products[0].shape[:-1], x_BSh.shape[-1])
            return ((whole, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": whole})

        module.register_forward_pre_hook(before, with_kwargs=True)
        for name, linear in zip(self.names, linears, strict=True):
            linear.forward = lambda _, name=name: outputs.pop(name)  # type: ignore[method-assign,misc]
        return module


class Rows(ParallelStyle):
    """Of a linear whose input features are cut."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _cut(module, device_mesh, 1)
        group = device_mesh.get_group()
        module.forward = lambda x_BSf: _Rows.apply(x_BSf, group, _local(module.weight))  # type: ignore[method-assign]
        return module


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSh: Tensor, group: dist.ProcessGroup, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.save_for_backward(x_BSh, *weights)
        whole_BSh = _gather(x_BSh, group)()
        return tuple(F.linear(whole_BSh, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_BSh, *weights = ctx.saved_tensors
        gathered = _gather(x_BSh, ctx.group)
        dx_BSh = gradients[0] @ weights[0]
        for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
            dx_BSh = dx_BSh + gradient @ weight
        whole_Th = gathered().flatten(0, 1)
        scattered = _reduce_scatter(dx_BSh, ctx.group)
        dweights = [gradient.flatten(0, 1).t() @ whole_Th for gradient in gradients]
        return scattered(), None, *dweights


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSf: Tensor, group: dist.ProcessGroup, weight: Tensor) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x_BSf, weight)
        return _reduce_scatter(F.linear(x_BSf, weight), group)()

    @staticmethod
    def backward(ctx: Any, gradient_BSh: Tensor) -> tuple[Tensor | None, ...]:
        x_BSf, weight = ctx.saved_tensors
        whole_BSh = _gather(gradient_BSh, ctx.group)()
        return whole_BSh @ weight, None, whole_BSh.flatten(0, 1).t() @ x_BSf.flatten(0, 1)


def _gather(x_BSh: Tensor, group: dist.ProcessGroup) -> Started:
    """The tokens of all ranks, in the order of the ranks."""
    mine_SBh = x_BSh.transpose(0, 1).contiguous()
    whole_SBh = mine_SBh.new_empty(mine_SBh.shape[0] * group.size(), *mine_SBh.shape[1:])
    work = dist.all_gather_single(whole_SBh, mine_SBh, group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return whole_SBh.transpose(0, 1).contiguous()

    return wait


def _reduce_scatter(part_BSh: Tensor, group: dist.ProcessGroup) -> Started:
    """This rank's tokens of the sum over the ranks."""
    part_SBh = part_BSh.transpose(0, 1).contiguous()
    mine_SBh = part_SBh.new_empty(part_SBh.shape[0] // group.size(), *part_SBh.shape[1:])
    work = dist.reduce_scatter_single(mine_SBh, part_SBh, dist.ReduceOp.SUM, group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return mine_SBh.transpose(0, 1).contiguous()

    return wait


def _cut(linear: nn.Module, mesh: DeviceMesh, dim: int) -> None:
    """Every rank has drawn the same weight, and keeps its part."""
    linear.weight = nn.Parameter(
        distribute_tensor(linear.weight.detach(), mesh, [Shard(dim)], src_data_rank=None)
    )


def _local(weight: Any) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight  # type: ignore[no-any-return]
