"""Streamed weights: a prefetching weights back end that uses only c10d's asynchronous collectives and their `wait`.

The rows of a weight are sharded over z. When the model reads the weight, it is gathered into a block; after its use the
block's memory is freed. In backward it is gathered again, before the gradient of the module's output is used.

    gather      The first step records the order in which weights are read, in forward and in backward (including
                recomputed forwards). From then on the next weights are gathered while the current one is in use.
    scatter     Once a weight's gradient is complete, it is reduce-scattered over z; the all-reduce of the result over
                data starts one block later. Both are waited for at the end of backward. Where x or y ranks have parts of
                the gradient, these are summed first, while the rest of the block is computed.

Each weight has its own collectives, directly from the shard into the block and from the gradient into the shard's
gradient, without a copy if z divides the rows. Small weights (norms, biases) share one collective in each direction.

The parameters of the model are always the shards, as DTensors. Forward reads a plain tensor, the block, whose memory is
allocated and freed: as in FSDP2, autograd keeps the tensor but not its memory. The results do not depend on the recorded
order: a weight that was not prefetched is gathered when it is read.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fourfold.mesh.axes import Axis
from fourfold.mesh.collectives import Pending, copied
from fourfold.mesh.grid import Grid
from fourfold.weights.api import Accumulation, holding, set_backend
from fourfold.weights.overlap import Overlap
from fourfold.weights.streamed_weight import StreamedWeight, largest_block_bytes, shard_parameters


class StreamedWeights:
    """All weights of a model, and the collectives in flight."""

    name: Literal["streamed"] = "streamed"

    def __init__(
        self,
        model: nn.Module,
        grid: Grid,
        blocks: Sequence[nn.Module],
        dtype: torch.dtype,
        overlap: Overlap,
        half_batches: Callable[[], int],
        accumulation: Accumulation = "whole",
        is_compiled: bool = False,
        owners: Collection[nn.Module] = (),
        *,
        only_owned: bool = False,
    ) -> None:
        """``owners``: modules whose shards are whole experts; ``only_owned``: another back end has all other weights."""
        self._grid, self._collectives = grid, grid.collectives
        self._overlap, self._half_batches = overlap, half_batches
        self._halves = 1  # parts of the batch in the last forward, and so in its backward
        self._weights = shard_parameters(
            model, grid, blocks, dtype, overlap.bundle_bytes, owners, only_owned=only_owned
        )
        self._by_holder = {holder: w for w in self._weights for holder in w.holders}
        # The modules whose hooks gather and release weights: in the graph of a compiled block there are none.
        self._unit_of = {m: m for m in model.modules()}
        if is_compiled:
            self._unit_of |= {m: block for block in blocks for m in block.modules()}
        self._in_unit: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        for module, key in self._by_holder:
            self._in_unit.setdefault(self._unit_of[module], []).append((module, key))
        self._streamed = [w for w in self._weights if not w.is_alias]
        self._small = [w for w in self._streamed if w.is_small]
        self._small_is_gathered = False
        self._small_pending: Pending | None = None
        self._small_buffer: Tensor | None = None
        # The recorded order in which weights are used, and the position of this step in it.
        self._order: list[StreamedWeight] = []
        self._this_order: list[StreamedWeight] = []
        self._this_forward_length = 0
        self._position = 0
        self._forward_length = 0
        self._kept: set[StreamedWeight] = set()
        self._in_forward = self._in_backward = False
        # Modules whose forward is running.
        self._entered: Counter[nn.Module] = Counter()
        # Gradients that are complete, of linears that one product may multiply, or of a compiled block: autograd has no order among those of
        # one product, and ranks may differ.
        self._set_of = {w: self._set(w, is_compiled) for w in self._weights}
        self._index = {w: i for i, w in enumerate(self._weights)}
        self._expected: Counter[tuple[int, str]] = Counter()
        self._arrived: list[StreamedWeight] = []
        # Gradients in flight: summed over x and y, then reduce-scattered over z, then all-reduced over data.
        self._is_last = True  # of the micro-batches
        self._accumulation = accumulation
        self._summing: deque[_Gradient] = deque()
        self._scattering: deque[_Gradient] = deque()
        self._reducing: list[_Gradient] = []
        self._complete: list[tuple[StreamedWeight, Tensor]] = []  # this rank's rows, summed over all ranks
        self._last_block = -2
        # Frozen weights have no gradient whose arrival says that backward is done with them: it is once it is in another block.
        self._frozen = [w for w in self._streamed if not w.is_small and not w.parameter.requires_grad]
        self._backward_block = -2
        limit_bytes = overlap.in_flight_bytes
        self._limit_bytes = 2 * largest_block_bytes(self._weights) if limit_bytes is None else limit_bytes

        for weight in self._weights:
            weight.on_gradient = self._arrive
        for module in () if only_owned else model.modules():
            set_backend(module, self)
        for unit, held in self._in_unit.items():
            streamed = [
                w for w in dict.fromkeys(self._by_holder[holder] for holder in held) if not w.is_alias
            ]
            if streamed:
                unit.register_forward_pre_hook(self._before_unit)
                unit.register_forward_hook(self._after_unit(unit, streamed), always_call=True)
        model.register_forward_pre_hook(self._before_forward)
        model.register_forward_hook(self._after_forward, always_call=True)
        if dtype != torch.float32 and not only_owned:
            for module in (model, *blocks):
                module.register_forward_pre_hook(_cast_inputs(dtype), with_kwargs=True)

    # -- reading -----------------------------------------------------------------------------------------

    def read(self, module: nn.Module, key: str, axes: tuple[Axis, ...], by_sibling: bool) -> Tensor:
        if torch.compiler.is_compiling():  # `call_graph` has read it
            return cast(Tensor, module._parameters[key])
        weight = self._by_holder[module, key]
        if not weight.is_alias:
            if weight.is_small:
                self._need_small()
            else:
                self._need(weight)
                # No hook gathers a weight in backward for a reader outside its module, so it has to stay gathered.
                weight.is_read_elsewhere |= not by_sibling and not self._entered[self._unit_of[module]]
        if axes != weight.read_with:
            weight.set_sum_over(axes)
        return weight.block()

    def call_graph(self, block: nn.Module, graph: Callable[[], Any]) -> Any:
        # What the first forward did not read, the graph does not read either.
        weights = {holder: self._by_holder[holder].read_with for holder in self._in_unit.get(block, ())}
        held = {holder: axes for holder, axes in weights.items() if axes is not None}
        tensors = [self.read(*holder, axes, True) for holder, axes in held.items()]
        with holding([(m._parameters, key) for m, key in held], tensors):
            return graph()

    # -- gathering, ahead of use, in the recorded order -------------------------------------------------------------

    def _before_forward(self, *_: Any) -> None:
        if _inside_backward():
            return
        self._reset()
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

    def _before_unit(self, unit: nn.Module, args: Any) -> None:
        self._entered[unit] += 1

    def _after_unit(self, unit: nn.Module, held: list[StreamedWeight]) -> Any:
        weights, has_small = [w for w in held if not w.is_small], any(w.is_small for w in held)
        is_lookup = isinstance(unit, nn.Embedding) or getattr(unit, "is_lookup", False)

        def hook(unit: nn.Module, args: Any, output: Any) -> None:
            self._entered[unit] -= 1
            if _inside_backward():
                return  # a recomputed forward: backward reads them next
            is_known = getattr(output, "gradient_is_known", False)
            self._halves = self._half_batches()
            can_release = is_lookup or is_known or not torch.is_grad_enabled()
            if not can_release:
                tensors = [tensor for tensor in tree_leaves(output) if isinstance(tensor, Tensor)]
                followed = [tensor for tensor in tensors if tensor.requires_grad]
                for tensor in followed:
                    tensor.register_hook(before_backward)
                # Without a gradient, of frozen weights before the first adapter, backward does not come here.
                can_release = bool(tensors) and (bool(followed) or bool(self._frozen))
            for weight in weights:
                weight.passes += 1
                weight.gradient_is_known = is_known
                if (
                    can_release
                    and weight.passes == self._halves
                    and not weight.is_read_elsewhere
                    and not self._needed_soon(weight)
                ):
                    weight.release()

        def before_backward(gradient: Tensor) -> None:
            self._enter_backward()
            if has_small:
                self._need_small()  # released, if another forward or backward ran in between
            for weight in weights:
                self._need(weight)
                weight.backward_passes += 1
                if self._frozen and weight.backward_passes == self._halves:
                    self._release_frozen(weight.block_index)

        return hook

    def _release_frozen(self, block_index: int) -> None:
        """Backward of all half-batches is in this block: it has read the weights of the blocks after it."""
        if block_index == self._backward_block:
            return
        for weight in self._frozen:
            if weight.block_index == self._backward_block:
                weight.release()
        self._backward_block = block_index

    def _need(self, weight: StreamedWeight) -> None:
        if self._is_part_called_alone():
            # Values from an earlier step must not be used, and nothing should stay gathered.
            weight.release()
            self._gather(weight)
            weight.arrive()
            return
        self._advance(weight)
        if weight.is_released:
            self._gather(weight)
        self._gather_ahead()
        weight.arrive()

    def _is_part_called_alone(self) -> bool:
        """Is a part of the model called on its own?"""
        return not (self._in_forward or self._in_backward)

    def _advance(self, weight: StreamedWeight) -> None:
        """Advance in the order of the last step, and record the order of this one."""
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
        if weight.z == 1:
            weight.pending = copied(target, source)
        else:
            weight.pending = self._collectives.all_gather(target, source, "z", "weight", module=weight.name)

    def _needed_soon(self, weight: StreamedWeight) -> bool:
        """Is this one of the next weights in use, so that it would be gathered again at once if it were released?"""
        if self._is_part_called_alone():
            return False
        return weight in self._kept or (
            torch.is_grad_enabled()
            and weight in self._order[self._position : self._position + self._overlap.prefetch]
        )

    def _choose_kept(self) -> None:
        """Keep the last weights of forward, within the budget: backward uses them first."""
        self._kept.clear()
        left = self._overlap.keep_bytes
        for weight in dict.fromkeys(reversed(self._this_order)):
            if weight.gradient_is_known:
                continue
            left -= weight.memory_bytes
            if left < 0:
                break
            self._kept.add(weight)

    def _gather_small(self) -> None:
        """Gather all small weights in one collective."""
        parts = [w.gather_input().view(-1) for w in self._small]
        source = torch.cat(parts)
        buffer = source.new_empty(self._grid.z * source.numel())
        self._small_buffer = buffer
        self._small_pending = self._collectives.all_gather(
            buffer, source, "z", "weight", module="small weights"
        )

    def _need_small(self) -> None:
        # If a part of the model is called on its own, values from an earlier step must not be used.
        if self._small_is_gathered and not self._is_part_called_alone():
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
        self._small_is_gathered = True

    # -- scattering, in flight until the end of backward ------------------------------------------------------------

    def _enter_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            self._expected = Counter(self._set_of[w] for w in self._weights if w.parameter.requires_grad)
            self._position = max(self._position, self._forward_length)
            # There is no public call that runs a function at the end of backward (seen in torch 2.13.0).
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    @staticmethod
    def _set(weight: StreamedWeight, is_compiled: bool) -> tuple[int, str]:
        """Its block and, unless that is one node of the graph, the name of what holds its module."""
        in_graph = is_compiled and weight.block_index >= 0
        return weight.block_index, "" if in_graph else weight.name.rpartition(".")[0].rpartition(".")[0]

    def _arrive(self, weight: StreamedWeight) -> None:
        """The gradient of a weight is complete."""
        self._enter_backward()
        together = self._set_of[weight]
        if self._arrived and self._set_of[self._arrived[-1]] != together:
            self._take_arrived()
        self._arrived.append(weight)
        if len(self._arrived) == self._expected[together]:
            self._take_arrived()

    def _take_arrived(self) -> None:
        """Reduce what has arrived in an order that is the same on every rank."""
        arrived, self._arrived = self._arrived, []
        for weight in sorted(arrived, key=self._index.__getitem__, reverse=True):
            self._take_gradient(weight)

    def _take_gradient(self, weight: StreamedWeight) -> None:
        """Start to reduce the gradient of a weight."""
        gradient = self._pop_gradient(weight)
        if not weight.is_small and not weight.is_alias:
            weight.release()
        if gradient is None:
            return
        gradient = weight.rows_first(gradient)
        if weight.z == self._grid.data == 1 and not weight.sum_over:  # no other rank has a part
            self._complete.append((weight, gradient))
            return
        if weight.is_small:
            # All small ones together, at the end of backward.
            self._reducing.append(_Gradient(weight, gradient))
            return
        if weight.block_index != self._last_block:
            # The collectives of the previous block had the time of one block to finish: start those that follow them.
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

    def _pop_gradient(self, weight: StreamedWeight) -> Tensor | None:
        return weight.pop_gradient(keep=not self._is_last and self._accumulation == "whole")

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
        if weight.z > 1:
            full = weight.pad_rows(item.tensor)
            item.tensor = full.new_empty(full.shape[0] // self._grid.z, *full.shape[1:])
            item.pending = collectives.reduce_scatter(item.tensor, full, "z", "gradient", module=weight.name)
            item.in_flight_bytes = full.numel() * full.element_size()
            self._scattering.append(item)
            self._limit_in_flight()
        else:
            self._start_data(item)
        if not self._overlap.gradients:
            item.pending.wait()
            self._reduce_over_data()
            item.pending.wait()

    def _limit_in_flight(self) -> None:
        """Free the memory of unsharded gradients that are reduced; above the limit, wait for the oldest."""
        in_flight_bytes = sum(item.in_flight_bytes for item in self._scattering)
        for item in self._scattering:
            if not item.pending.is_done() and in_flight_bytes <= self._limit_bytes:
                break
            item.pending.wait()
            in_flight_bytes -= item.in_flight_bytes
            item.in_flight_bytes = 0

    def _reduce_over_data(self) -> None:
        """Start the all-reduces over data. Every rank calls this at the same gradients, so the order of collectives is equal."""
        if self._grid.data == 1:
            return
        while self._scattering:
            item = self._scattering.popleft()
            item.pending.wait()
            self._start_data(item)

    def _start_data(self, item: _Gradient) -> None:
        if self._is_last:
            for weight, part in item.parts():
                if (earlier := weight.pop_held()) is not None:
                    part.view(-1).add_(earlier.view(-1))
            item.pending = self._collectives.all_reduce(item.tensor, "data", "gradient", module=item.name)
        self._reducing.append(item)

    def _after_backward(self) -> None:
        self._take_arrived()
        self._scatter_sums()
        small = [item for item in self._reducing if item.weight.is_small]
        self._reducing = [item for item in self._reducing if not item.weight.is_small]
        if small:
            self._start_data(self._scatter_small(small))
        self._reduce_over_data()
        self._reducing += self._scattering
        for item in self._reducing:
            item.pending.wait()
            self._complete += item.parts()
        for weight, shard_gradient in self._complete:
            if self._is_last or self._grid.data == 1:
                weight.set_gradient(shard_gradient)
            else:
                weight.hold(shard_gradient)
        for weight in self._weights if self._is_last else ():
            if (earlier := weight.pop_held()) is not None:  # the last micro-batch did not use it
                self._collectives.all_reduce(earlier, "data", "gradient", module=weight.name).wait()
                weight.set_gradient(earlier)
        if self._this_forward_length:
            self._order, self._forward_length = self._this_order, self._this_forward_length
        self._reset()

    def _scatter_small(self, items: list[_Gradient]) -> _Gradient:
        """Reduce the gradients of all small weights: one collective for each set of axes to sum over, one over z, one over data."""
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
        return _Gradient(items[0].weight, shards, [i.weight for i in items])

    # -- start and end -----------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._is_last = self._is_last, False
        try:
            yield
        finally:
            self._is_last = before

    def reshard(self) -> None:
        """Nothing to do: a forward without gradients releases what it gathered."""

    def _reset(self) -> None:
        """Release everything and wait for what is in flight: the state at the start of a step, also after a failed one."""
        self._release_all()
        for item in (*self._summing, *self._scattering, *self._reducing):
            item.pending.wait()
        self._summing.clear()
        self._scattering.clear()
        self._reducing.clear()
        for weight in self._arrived:
            self._pop_gradient(weight)  # so that the next step has none of it
        self._arrived.clear()
        self._complete.clear()
        self._in_backward = self._in_forward = False
        self._position, self._last_block, self._backward_block = 0, -2, -2
        self._this_order, self._this_forward_length = [], 0

    def _release_all(self) -> None:
        if self._small_pending is not None:
            self._small_pending.wait()
            self._small_pending = self._small_buffer = None
        self._small_is_gathered = False
        for weight in self._streamed:
            weight.release()


class _Gradient:
    """A gradient in flight: unsharded, then this rank's rows, then summed over data."""

    def __init__(
        self,
        weight: StreamedWeight,
        tensor: Tensor,
        bundle: list[StreamedWeight] | None = None,
    ) -> None:
        self.weight, self.tensor = weight, tensor
        self.pending = Pending()
        self.in_flight_bytes = 0
        self._bundle = bundle

    @property
    def name(self) -> str:
        return self.weight.name if self._bundle is None else "small weights"

    def parts(self) -> list[tuple[StreamedWeight, Tensor]]:
        if self._bundle is None:
            return [(self.weight, self.tensor)]
        lengths = [w.padded_rows_per_rank * w.row_numel for w in self._bundle]
        return list(zip(self._bundle, self.tensor.split(lengths), strict=True))


def _cast_inputs(dtype: torch.dtype) -> Any:
    def cast_floats(module: nn.Module, args: Any, kwargs: Any) -> Any:
        def to_dtype(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return tree_map_only(Tensor, to_dtype, args), tree_map_only(Tensor, to_dtype, kwargs)

    return cast_floats


def _inside_backward() -> bool:
    """Does backward run? Then a forward is a recomputed one (torch.utils.checkpoint checks the same)."""
    return torch._C._current_graph_task_id() != -1
