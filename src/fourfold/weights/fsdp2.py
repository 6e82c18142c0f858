"""Weights stored and gathered by FSDP2: `fully_shard` over z, one group for each block, and one for the rest.

The data axis is reduced in FSDP2's hook after the reduce-scatter, which is its documented place for that. Gradients are
summed, not averaged: the loss is divided by the tokens of the global batch already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import DataParallelMeshDims, FSDPModule, MixedPrecisionPolicy, fully_shard

# The interfaces of `FSDPModule.set_custom_all_gather` and `set_custom_reduce_scatter` (seen in torch 2.13.0).
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves

from fourfold.errors import UnsupportedError
from fourfold.hf.parameter_layout import sharded_dim
from fourfold.mesh.axes import Axis
from fourfold.mesh.collectives import Collectives
from fourfold.mesh.grid import Grid
from fourfold.mesh.reductions import sum_backward
from fourfold.weights.api import Accumulation, Place, Precision, WeightBackend, holding, set_backend


class Fsdp2Weights:
    """The weights of a model that `fully_shard` was applied to."""

    name: Literal["fsdp2"] = "fsdp2"

    def __init__(
        self,
        model: nn.Module,
        grid: Grid,
        blocks: Sequence[nn.Module],
        precision: Precision,
        embedding: nn.Module | None,
        head: nn.Module | None,
        keeps_head: bool,
        accumulation: Accumulation,
        owners: Collection[nn.Module] = (),
        owned: WeightBackend | None = None,
    ) -> None:
        """``embedding`` and ``head``, where they are not tied, are groups of their own.

        The parameters of ``owners`` are shards that nobody gathers: ``owned`` has them.
        """
        self._owners, self._owned = set(owners), owned
        self._collectives = grid.collectives
        self._model = cast(FSDPModule, model)
        self._accumulation = accumulation
        self._is_last = True  # of the micro-batches
        self._places: dict[nn.Module, list[Place]] = {}  # by compiled block
        # By group: the shards of gradients of earlier micro-batches, which are not reduced over data yet.
        self._accumulated: dict[FSDPModule, Tensor] = {}
        _check_tied(model, [*blocks, *(m for m in (embedding, head) if m is not None)])

        def place(parameter: nn.Parameter) -> Shard:
            return Shard(sharded_dim(parameter, grid))

        policy = MixedPrecisionPolicy()
        if precision == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        apart = {p for module in owners for p in module._parameters.values() if p is not None}
        if grid.x * grid.y == 1:  # parameters are plain tensors, and FSDP2 is by itself
            shard = functools.partial(
                fully_shard,
                mesh=grid.mesh["z"],
                shard_placement_fn=place,
                mp_policy=policy,
                ignored_params=apart,
            )
        else:
            shard = functools.partial(
                fully_shard,
                mesh=grid.mesh,
                shard_placement_fn=place,
                dp_mesh_dims=DataParallelMeshDims(shard="z"),
                mp_policy=policy,
                ignored_params=apart,
            )
        for block in blocks:
            shard(block)
        if embedding is not None:
            # A lookup's gradient does not read the weight: no second gather.
            shard(embedding).set_unshard_in_backward(False)
        if head is not None:
            # Backward begins with the head: it stays gathered, if backward reads it.
            shard(head, reshard_after_forward=not keeps_head).set_unshard_in_backward(keeps_head)
        shard(model)
        model.register_forward_hook(_check_output)
        for module in model.modules():
            set_backend(module, self)
            if isinstance(module, FSDPModule):
                self._take_over_collectives(module)

    def read(self, module: nn.Module, key: str, axes: tuple[Axis, ...], by_sibling: bool) -> Tensor:
        if module in self._owners:
            assert self._owned is not None
            return self._owned.read(module, key, axes, by_sibling)
        block = cast(Tensor, module._parameters[key])
        if not torch.compiler.is_compiling():  # otherwise `call_graph` has done it
            (block,) = local_tensors((block,))
        for axis in axes:
            block = sum_backward(block, self._collectives, axis, "replica", getattr(module, "name", key))
        return block

    def call_graph(self, block: nn.Module, graph: Callable[[], Any]) -> Any:
        if block not in self._places:
            of_modules = [m._parameters for m in block.modules()]
            self._places[block] = [(parameters, key) for parameters in of_modules for key in parameters]
        places = [(parameters, key) for parameters, key in self._places[block] if parameters[key] is not None]
        held = [cast(Tensor, parameters[key]) for parameters, key in places]
        # A graph would take DTensors apart at each call.
        with holding(places, local_tensors(held)):
            return graph()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._is_last = False
        # Otherwise FSDP2 adds each micro-batch's shards to ``.grad``.
        self._model.set_requires_gradient_sync(self._accumulation == "sharded")
        try:
            with nullcontext() if self._owned is None else self._owned.no_sync():
                yield
        finally:
            self._is_last = True
            self._model.set_requires_gradient_sync(True)

    def reshard(self) -> None:
        """FSDP2 leaves the head and the root gathered after a forward that no backward follows.

        An optimizer made of the parameters that the model has then would train tensors that nobody reads.
        """
        for module in cast(nn.Module, self._model).modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _take_over_collectives(self, module: FSDPModule) -> None:
        """Let the grid's collectives do, or at least see, what FSDP2 sends.

        On CUDA the waits are FSDP2's own, between its streams: their seconds are not counted.
        """
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_all_gather(_ObservedAllGather(self._collectives))
        module.set_custom_reduce_scatter(_ObservedReduceScatter(self._collectives))
        if self._collectives.size("data") > 1:
            # What a micro-batch does not use has zeros, so that the shards of all of them have one layout.
            module.set_reduce_scatter_unused_params(self._accumulation == "sharded")
            module.set_all_reduce_hook(functools.partial(self._reduce_over_data, module))

    def _reduce_over_data(self, module: FSDPModule, gradient: Tensor) -> None:
        """``gradient`` is this rank's part of those of a group, which FSDP2 then adds to ``.grad``."""
        if not self._is_last:
            if module in self._accumulated:
                self._accumulated[module] += gradient
            else:
                self._accumulated[module] = gradient.clone()
            gradient.zero_()
            if gradient.is_cuda:
                gradient.record_stream(torch.cuda.current_stream())  # as below
            return
        if (earlier := self._accumulated.pop(module, None)) is not None:
            gradient += earlier
        if not gradient.is_cuda:
            self._collectives.all_reduce(gradient, "data", "gradient").wait()
            return
        # This hook runs in FSDP2's all-reduce stream: a wait there holds up no computation and is not timed.
        work = cast(
            dist.Work, dist.all_reduce(gradient, group=self._collectives.group("data"), async_op=True)
        )
        self._collectives.report("data", "all_reduce", "gradient", gradient, work, gradient)
        work.wait()
        # Allocated in FSDP2's reduce-scatter stream, used in its all-reduce stream. FSDP2 keeps such a buffer from being
        # reused too early for its own all-reduce alone; here this does.
        gradient.record_stream(torch.cuda.current_stream())


def _check_output(module: nn.Module, args: Any, output: Any) -> None:
    """FSDP2 starts its backward at the tensors of the output that PyTorch's pytrees see; without one, it reduces nothing."""
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(output)):
        raise UnsupportedError(
            f"{type(module).__name__.removeprefix('FSDP')} returns a {type(output).__name__}, in which FSDP2 finds no tensor, so "
            "it would not reduce any gradient; return a tensor, a tuple, a dict or a ModelOutput, or use weights='streamed'"
        )


def local_tensors(parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """Those of DTensors; with x = y = 1 parameters are plain tensors."""
    if not parameters or not isinstance(parameters[0], DTensor):
        return parameters
    return cast(Sequence[Tensor], _Local.apply(*parameters))  # type: ignore[no-untyped-call]


class _Local(torch.autograd.Function):
    """Local tensors of DTensors. `to_local` does the same for one, and takes the placements apart in each backward."""

    @staticmethod
    def forward(ctx: Any, *parameters: DTensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.parameters = parameters
        locals_ = [parameter._local_tensor for parameter in parameters]
        return tuple(local.view_as(local) for local in locals_)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[DTensor | None, ...]:
        return tuple(map(_add, ctx.parameters, gradients))


def _add(parameter: DTensor, gradient: Tensor | None) -> DTensor | None:
    """What autograd still has to set; to the gradient of an earlier micro-batch this one is added here.

    Autograd would add two DTensors, which takes seconds for each new shape on a mesh of four dims.
    """
    if gradient is None:
        return None
    if parameter.grad is None:
        return DTensor(gradient, parameter._spec, requires_grad=False)
    cast(DTensor, parameter.grad)._local_tensor.add_(gradient)
    return None


def _check_tied(model: nn.Module, groups: Sequence[nn.Module]) -> None:
    """FSDP2 keeps a weight tied only within one group: across two it would become two weights."""
    group_of = {module: i for i, group in enumerate(groups) for module in group.modules()}
    seen: dict[nn.Parameter, tuple[int, str]] = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            group = group_of.get(module, -1)
            first = seen.setdefault(parameter, (group, f"{name}.{key}"))
            if first[0] != group:
                raise UnsupportedError(
                    f"{name}.{key} is tied to {first[1]}, in another of the {len(groups)} blocks whose weights are gathered "
                    "separately; untie them"
                )


class _Observed:
    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _is_ours(self, tensor: Tensor, async_op: bool) -> bool:
        """On CPU, where FSDP2 has no streams to wait in, our own collective does the work."""
        return not tensor.is_cuda and not async_op and self._collectives.size("z") > 1


class _ObservedAllGather(_Observed, AllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if self._is_ours(output_tensor, async_op):
            self._collectives.all_gather(output_tensor, input_tensor, "z", "weight").wait()
            return None
        work = cast(dist.Work, dist.all_gather_single(output_tensor, input_tensor, group, async_op=True))
        self._collectives.report(
            "z", "all_gather", "weight", output_tensor, work, output_tensor, input_tensor
        )
        return _returned(work, async_op)


class _ObservedReduceScatter(_Observed, ReduceScatter):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self._is_ours(output_tensor, async_op):
            assert op == dist.ReduceOp.SUM, op
            self._collectives.reduce_scatter(output_tensor, input_tensor, "z", "gradient").wait()
            return None
        work = cast(
            dist.Work, dist.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op=True)
        )
        self._collectives.report(
            "z", "reduce_scatter", "gradient", input_tensor, work, output_tensor, input_tensor
        )
        return _returned(work, async_op)


def _returned(work: dist.Work, async_op: bool) -> dist.Work | None:
    """What a collective of c10d returns. It was started asynchronously, so that the hang monitor has a handle of it.

    Without ``async_op`` the current stream, which is one of FSDP2's own, waits for it, and not the host.
    """
    if async_op:
        return work
    work.wait()
    return None
