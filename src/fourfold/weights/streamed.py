"""Streamed weights: our own schedule on (z, data), on nothing but c10d's asynchronous collectives and their `wait`.

A weight is stored in rows over z. Where the model reads it, it is gathered into a whole block; after its use the block's
memory is given back. Backward asks for it again, before the gradient of the module's output is used.

    gather      The order in which weights are read is recorded in the first step, forward and backward (a recomputed
                forward included). From then on the next ones are gathered while this one is in use.
    scatter     A weight's gradient, once complete, goes into a reduce-scatter over z; the all-reduce of the result over
                data starts one block later. They are waited for at the end of backward. Where x or y ranks have parts
                of it, these are summed first, behind the rest of the block.

Each weight has a collective of its own, straight from the shard into the block and from the gradient into the shard's
gradient: no copy where the rows divide by z. Small ones (norms, biases) share one collective each way.

The parameters of the model are the shards, DTensors, at all times. What forward reads is a plain tensor, the block, whose
memory comes and goes: autograd keeps the tensor, not the memory, as FSDP2 does. Correctness does not lean on the
recorded order: what was not foreseen is gathered when it is read.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fourfold.mesh.axes import Axis
from fourfold.mesh.collectives import Pending
from fourfold.mesh.grid import Grid
from fourfold.weights.api import set_backend
from fourfold.weights.overlap import Overlap
from fourfold.weights.streamed_weight import StreamedWeight, largest_block_bytes, shard_parameters


class StreamedWeights:
    """All weights of a model, and what is in flight."""

    name: Literal["streamed"] = "streamed"

    def __init__(
        self,
        model: nn.Module,
        grid: Grid,
        blocks: Sequence[nn.Module],
        dtype: torch.dtype,
        overlap: Overlap,
        half_batches: Callable[[], int],
    ) -> None:
        self._grid, self._collectives = grid, grid.collectives
        self._overlap, self._half_batches = overlap, half_batches
        self._weights = shard_parameters(model, grid, blocks, dtype, overlap.bundle_bytes)
        self._by_place = {place: w for w in self._weights for place in w.places}
        self._small = [w for w in self._weights if w.is_small and not w.is_alias]
        self._small_is_here = False
        self._small_pending: Pending | None = None
        self._small_buffer: Tensor | None = None
        # Weights in the order of their use, as recorded, and how far this step has come.
        self._order: list[StreamedWeight] = []
        self._this_order: list[StreamedWeight] = []
        self._this_forward_length = 0
        self._position = 0
        self._forward_length = 0
        self._kept: set[StreamedWeight] = set()
        self._in_forward = self._in_backward = False
        # Modules whose forward is under way.
        self._entered: Counter[nn.Module] = Counter()
        # Gradients on their way: parts over x and y, then over z, and then over data.
        self._sends_gradients = True
        self._summing: deque[_Gradient] = deque()
        self._scattering: deque[_Gradient] = deque()
        self._arrived: list[_Gradient] = []
        self._last_block = -2
        limit_bytes = overlap.in_flight_bytes
        self._limit_bytes = 2 * largest_block_bytes(self._weights) if limit_bytes is None else limit_bytes

        for weight in self._weights:
            weight.on_gradient = self._take_gradient
        for module in {module: None for module, _ in self._by_place}:
            set_backend(module, self)
            held = [
                self._by_place[module, key] for key in module._parameters if (module, key) in self._by_place
            ]
            streamed = [w for w in held if not w.is_alias]
            if streamed:
                module.register_forward_pre_hook(self._before_module)
                module.register_forward_hook(self._after_module(module, streamed), always_call=True)
        set_backend(model, self)
        model.register_forward_pre_hook(self._before_forward)
        model.register_forward_hook(self._after_forward, always_call=True)
        if dtype != torch.float32:
            for module in (model, *blocks):
                module.register_forward_pre_hook(_cast_inputs(dtype), with_kwargs=True)

    # -- what a model reads -----------------------------------------------------------------------------------------

    def read(self, module: nn.Module, key: str, axes: tuple[Axis, ...], by_sibling: bool) -> Tensor:
        weight = self._by_place[module, key]
        if not weight.is_alias:
            if weight.is_small:
                self._need_small()
            else:
                self._need(weight)
                # Who reads another module's weight has no hook that asks for it in backward: it has to stay.
                weight.is_read_elsewhere |= not by_sibling and not self._entered[module]
        weight.set_sum_over(axes)
        return weight.block()

    # -- gathering: ahead of use, in the recorded order -------------------------------------------------------------

    def _before_forward(self, *_: Any) -> None:
        if _inside_backward():
            return
        self._start_over()
        self._in_forward = True
        if self._small and self._overlap.prefetch:
            self._gather_small()
        self._gather_ahead()

    def _after_forward(self, *_: Any) -> None:
        if _inside_backward():
            return
        self._in_forward = False
        self._this_forward_length = len(self._this_order)
        self._choose_kept()
        if not torch.is_grad_enabled():
            self._release_all()

    def _before_module(self, module: nn.Module, args: Any) -> None:
        self._entered[module] += 1

    def _after_module(self, module: nn.Module, held: list[StreamedWeight]) -> Any:
        weights, has_small = [w for w in held if not w.is_small], any(w.is_small for w in held)
        is_lookup = isinstance(module, nn.Embedding) or getattr(module, "is_lookup", False)

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._entered[module] -= 1
            if _inside_backward():
                return  # a second forward: backward itself is next to read them
            asks_again = is_lookup or not torch.is_grad_enabled()
            if not asks_again:
                for tensor in tree_leaves(output):
                    if isinstance(tensor, Tensor) and tensor.requires_grad:
                        tensor.register_hook(before_backward)
                        asks_again = True
            for weight in weights:
                weight.passes += 1
                if (
                    asks_again
                    and weight.passes == self._half_batches()
                    and not weight.is_read_elsewhere
                    and not self._needed_soon(weight)
                ):
                    weight.release()

        def before_backward(gradient: Tensor) -> None:
            self._enter_backward()
            if has_small:
                self._need_small()  # released, if another forward or backward came before this one
            for weight in weights:
                self._need(weight)

        return hook

    def _need(self, weight: StreamedWeight) -> None:
        if self._is_alone():
            # Nothing from an earlier step may be used, and nothing is to stay.
            weight.release()
            self._gather(weight)
            weight.arrive()
            return
        self._advance(weight)
        if weight.is_released:
            self._gather(weight)
        self._gather_ahead()
        weight.arrive()

    def _is_alone(self) -> bool:
        """A part of the model was called by itself."""
        return not (self._in_forward or self._in_backward)

    def _advance(self, weight: StreamedWeight) -> None:
        """Follow the order of the last step, and record that of this one."""
        if self._position < len(self._order) and self._order[self._position] is weight:
            self._position += 1
        elif weight.is_released or weight.is_in_flight:
            end = len(self._order) if self._in_backward else self._forward_length
            if weight in self._order[self._position : end]:
                self._position = self._order.index(weight, self._position) + 1
        else:
            return
        self._this_order.append(weight)

    def _gather_ahead(self) -> None:
        end = len(self._order) if torch.is_grad_enabled() or self._in_backward else self._forward_length
        for weight in self._order[self._position : min(self._position + self._overlap.prefetch, end)]:
            if weight.is_released:
                self._gather(weight)

    def _gather(self, weight: StreamedWeight) -> None:
        source = weight.gather_input()
        target = weight.allocate()
        weight.pending = self._collectives.all_gather(target, source, "z", "weight", module=weight.name)

    def _needed_soon(self, weight: StreamedWeight) -> bool:
        """Is it among the next weights in use, so that giving it back would mean to gather it again at once?"""
        if self._is_alone():
            return False
        return weight in self._kept or (
            torch.is_grad_enabled()
            and weight in self._order[self._position : self._position + self._overlap.prefetch]
        )

    def _choose_kept(self) -> None:
        """The last weights of forward are the first of backward: keep those, within the budget."""
        self._kept.clear()
        left = self._overlap.keep_bytes
        for weight in dict.fromkeys(reversed(self._this_order)):
            left -= weight.memory_bytes
            if left < 0:
                break
            self._kept.add(weight)

    def _gather_small(self) -> None:
        """All small weights in one collective."""
        parts = [w.gather_input().view(-1) for w in self._small]
        source = torch.cat(parts)
        buffer = source.new_empty(self._grid.z * source.numel())
        self._small_buffer = buffer
        self._small_pending = self._collectives.all_gather(
            buffer, source, "z", "weight", module="small weights"
        )

    def _need_small(self) -> None:
        # Where a part of the model is called by itself, nothing from an earlier step may be used.
        if self._small_is_here and not self._is_alone():
            return
        if self._small_pending is None:
            self._gather_small()
        assert self._small_pending is not None
        assert self._small_buffer is not None
        self._small_pending.wait()
        self._small_pending = None
        by_rank = self._small_buffer.view(self._grid.z, -1)
        start = 0
        for weight in self._small:
            length = weight.padded_rows_per_rank * weight.row_numel
            weight.allocate().view(self._grid.z, -1).copy_(by_rank[:, start : start + length])
            start += length
        self._small_buffer = None
        self._small_is_here = True

    # -- scattering: in flight until the end of backward ------------------------------------------------------------

    def _enter_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            self._position = max(self._position, self._forward_length)
            # There is no public call for what has to happen once a whole backward is over (seen in torch 2.13.0).
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _take_gradient(self, weight: StreamedWeight) -> None:
        """A weight's gradient of this backward is complete."""
        self._enter_backward()
        gradient = weight.pop_gradient(keep=not self._sends_gradients)
        if not weight.is_small and not weight.is_alias:
            weight.release()
        if gradient is None:
            return
        if weight.is_small:
            self._arrived.append(_Gradient(weight, gradient))  # all together, at the end
            return
        if weight.block_index != self._last_block:
            # What the block before has under way had a block's time: what follows it can start.
            self._reduce_over_data()
            self._scatter_sums()
            self._last_block = weight.block_index
        item = _Gradient(weight, gradient)
        if not weight.sum_over:
            self._scatter(item)
            return
        item.tensor = gradient.contiguous()
        item.pending = self._sum_parts(item.tensor, weight.sum_over, weight.name)
        self._summing.append(item)
        if not self._overlap.gradients:
            self._scatter_sums()

    def _sum_parts(self, parts: Tensor, axes: Sequence[Axis], name: str) -> Pending:
        pending = Pending()
        for axis in axes:
            pending.wait()
            pending = self._collectives.all_reduce(parts, axis, "replica", module=name)
        return pending

    def _scatter_sums(self) -> None:
        while self._summing:
            item = self._summing.popleft()
            item.pending.wait()
            self._scatter(item)

    def _scatter(self, item: _Gradient) -> None:
        weight, collectives = item.weight, self._collectives
        if self._grid.z > 1:
            whole = weight.pad_rows(item.tensor)
            item.tensor = whole.new_empty(whole.shape[0] // self._grid.z, *whole.shape[1:])
            item.pending = collectives.reduce_scatter(item.tensor, whole, "z", "gradient", module=weight.name)
            item.waiting_bytes = whole.numel() * whole.element_size()
            self._scattering.append(item)
            self._limit_in_flight()
        else:
            self._start_data(item)
        if not self._overlap.gradients:
            item.pending.wait()
            self._reduce_over_data()
            item.pending.wait()

    def _limit_in_flight(self) -> None:
        """Give back the memory of whole gradients that are done, and of the oldest where too many wait."""
        waiting_bytes = sum(item.waiting_bytes for item in self._scattering)
        for item in self._scattering:
            if not item.pending.is_done() and waiting_bytes <= self._limit_bytes:
                break
            item.pending.wait()
            waiting_bytes -= item.waiting_bytes
            item.waiting_bytes = 0

    def _reduce_over_data(self) -> None:
        """All ranks come here at the same gradients, so that the order of collectives is the same on all of them."""
        if self._grid.data == 1:
            return
        while self._scattering:
            item = self._scattering.popleft()
            item.pending.wait()
            self._start_data(item)

    def _start_data(self, item: _Gradient) -> None:
        item.pending = self._collectives.all_reduce(item.tensor, "data", "gradient", module=item.weight.name)
        self._arrived.append(item)

    def _after_backward(self) -> None:
        self._scatter_sums()
        small = [item for item in self._arrived if item.weight.is_small]
        self._arrived = [item for item in self._arrived if not item.weight.is_small]
        if small:
            self._arrived.append(self._scatter_small(small))
        self._reduce_over_data()
        self._arrived += self._scattering
        for item in self._arrived:
            item.pending.wait()
            for weight, shard_gradient in item.parts():
                weight.set_gradient(shard_gradient)
        if self._this_forward_length:
            self._order, self._forward_length = self._this_order, self._this_forward_length
        self._start_over()

    def _scatter_small(self, items: list[_Gradient]) -> _Gradient:
        """The gradients of all small weights in one collective over z and one over data; and one for parts of each kind."""
        z, name = self._grid.z, "small weights"
        for axes in sorted({i.weight.sum_over for i in items if i.weight.sum_over}):
            parts = [i for i in items if i.weight.sum_over == axes]
            flat = torch.cat([i.tensor.reshape(-1) for i in parts])
            self._sum_parts(flat, axes, name).wait()
            for item, total in zip(parts, flat.split([i.tensor.numel() for i in parts]), strict=True):
                item.tensor = total.view(item.tensor.shape)
        by_rank = torch.cat([i.weight.pad_rows(i.tensor).reshape(z, -1) for i in items], dim=1)
        shards = by_rank.new_empty(by_rank.shape[1])
        self._collectives.reduce_scatter(shards, by_rank, "z", "gradient", module=name).wait()
        pending = self._collectives.all_reduce(shards, "data", "gradient", module=name)
        return _Gradient(items[0].weight, shards, pending, [i.weight for i in items])

    # -- bounds -----------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._sends_gradients = self._sends_gradients, False
        try:
            yield
        finally:
            self._sends_gradients = before

    def reshard(self) -> None:
        """Nothing to do: a forward without gradients releases what it gathered."""

    def _start_over(self) -> None:
        """Nothing is gathered, nothing in flight: what a step begins with, also after one that failed."""
        self._release_all()
        for item in (*self._summing, *self._scattering, *self._arrived):
            item.pending.wait()
        self._summing.clear()
        self._scattering.clear()
        self._arrived.clear()
        self._in_backward = self._in_forward = False
        self._position, self._last_block = 0, -2
        self._this_order, self._this_forward_length = [], 0

    def _release_all(self) -> None:
        if self._small_pending is not None:
            self._small_pending.wait()
            self._small_pending = self._small_buffer = None
        self._small_is_here = False
        for weight in self._weights:
            weight.release()


class _Gradient:
    """A gradient on its way: whole, then this rank's rows, then summed over data."""

    def __init__(
        self,
        weight: StreamedWeight,
        tensor: Tensor,
        pending: Pending | None = None,
        together: list[StreamedWeight] | None = None,
    ) -> None:
        self.weight, self.tensor = weight, tensor
        self.pending = pending or Pending()
        self.waiting_bytes = 0
        self._together = together

    def parts(self) -> list[tuple[StreamedWeight, Tensor]]:
        if self._together is None:
            return [(self.weight, self.tensor)]
        lengths = [w.padded_rows_per_rank * w.row_numel for w in self._together]
        return list(zip(self._together, self.tensor.split(lengths), strict=True))


def _cast_inputs(dtype: torch.dtype) -> Any:
    def cast_floats(module: nn.Module, args: Any, kwargs: Any) -> Any:
        def to_dtype(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return tree_map_only(Tensor, to_dtype, args), tree_map_only(Tensor, to_dtype, kwargs)

    return cast_floats


def _inside_backward() -> bool:
    """Does autograd call us? Then a forward is a second one, of a checkpoint (torch.utils.checkpoint asks the same)."""
    return torch._C._current_graph_task_id() != -1
