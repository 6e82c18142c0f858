"""Results that are not computed again when backward recomputes a block.

`torch.utils.checkpoint` runs the forward of a block again in backward, to have the tensors that autograd saved. A selective block
keeps the results of what takes long: linears, attention, and sums over ranks; what is computed again lies between them: norms,
rotations, activation functions. In any recomputed block the last product is not computed again if backward needs only its input.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.nn.attention.varlen  # defines its operators
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fourfold.errors import UnsupportedError

_aten, _varlen = torch.ops.aten, torch.ops.torch_attn._varlen_attn
# What stock modules call, and the operators in it whose results are kept.
_FUNCTIONS = {
    torch.nn.functional.linear,
    torch.nn.functional.grouped_mm,
    torch.addmm,
    torch.nn.functional.scaled_dot_product_attention,
    _varlen,
    _varlen.default,
}
OPERATORS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _varlen.default,
}

T = TypeVar("T")
_mine = threading.local()  # half-batches run in threads, and backward in one of its own


def block_results() -> BlockResults | None:
    """Those of the block whose forward runs, or runs again; None outside of recomputed blocks."""
    return getattr(_mine, "results", None)


def computed_once(device: torch.device, compute: Callable[[], Tensor]) -> Tensor:
    """What ``compute`` returns. In a block that runs again, what it has returned before, where that is kept or only its shape is needed."""
    return all_computed_once(device, lambda: [compute()])[0]


def all_computed_once(device: torch.device, compute: Callable[[], list[Tensor]]) -> list[Tensor]:
    """The same of several results."""
    results = block_results()
    if results is None:
        return compute()
    if (known := results.known(device)) is not None:
        return known
    made = compute()
    results.keep(made)
    return made


class BlockResults:
    """The results of one forward of one block, in the order of their calls."""

    def __init__(self, name: str, *, is_selective: bool) -> None:
        self._name, self.is_selective = name, is_selective
        self.is_again = False
        self.is_empty = False  # the latest result has no values
        self._kept: list[Any] = []
        self._groups: list[Any] = []
        self._omitted = -1
        # Place and output of the latest function of stock modules, in forward.
        self._stock_output: tuple[int, Any] = (-1, None)
        self._last: list[tuple[torch.Size, torch.dtype]] = []
        self._next = self._next_group = 0

    def forward(self) -> AbstractContextManager[None]:
        return _Entered(self, is_again=False)

    def again(self) -> AbstractContextManager[None]:
        return _Entered(self, is_again=True)

    # -- operations of our own

    def as_before(self, members: list[T]) -> list[T]:
        """What is computed together now; if the block runs again, what was in its forward, whatever that has found out about it."""
        index, self._next_group = self._next_group, self._next_group + 1
        if not self.is_again:
            self._groups.append(members)
        found: list[T] = self._groups[index]
        return found

    def known(self, device: torch.device) -> list[Tensor] | None:
        """The next result, in a recomputed forward; None if it has to be computed again."""
        index, self._next = self._next, self._next + 1
        if not self.is_again:
            return None
        self.is_empty = index == self._omitted
        if self.is_empty:
            return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self._last]
        return [self._unchanged(*kept) for kept in self._take(index)] if self.is_selective else None

    def keep(self, results: Sequence[Tensor]) -> int:
        """Keep a result that was computed, in forward; returns its place."""
        if not self.is_again:
            # Aliases, because the results become outputs of the graph, which would not be freed.
            self._kept.append([(r.detach(), r._version) for r in results] if self.is_selective else None)
            self._last = [(result.shape, result.dtype) for result in results]
        return self._next - 1

    def _take(self, index: int) -> Any:
        kept, self._kept[index] = self._kept[index], None  # from here on autograd holds what it needs
        if kept is None:
            raise UnsupportedError(
                f"{self._name} is recomputed a second time, but what it keeps is used once; use activation_checkpointing='full' "
                "for several backward passes through one graph"
            )
        return kept

    def _unchanged(self, result: Tensor, version: int) -> Tensor:
        if result._version != version:
            raise UnsupportedError(
                f"{self._name} changes the output of a linear in place, which is kept for backward; use "
                "activation_checkpointing='full' or 'none'"
            )
        return result

    # -- functions of PyTorch

    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """A function of stock modules; the results of its operators are kept, or taken."""
        index, self._next = self._next, self._next + 1
        if self.is_again and index == self._omitted:
            return function(*args, **kwargs)  # the recomputation ends inside, with its input
        if self.is_again:
            with self._take(index):
                return function(*args, **kwargs)
        keeps, takes = create_selective_checkpoint_contexts(_policy)
        self._kept.append(takes)
        with keeps:
            output = function(*args, **kwargs)
        self._stock_output = index, output
        return output

    # -- the last product

    def omit_last(self, outputs: Any) -> None:
        """Do not compute a product again whose output no saved tensor depends on; ``outputs`` are those of the block."""
        last = _last_that_saves(outputs)
        (stock, output), self._stock_output = self._stock_output, (-1, None)
        is_stock = last is not None and last is _last_that_saves(output)
        index = stock if is_stock else getattr(last, "result_index", -1)
        if 0 <= index == len(self._kept) - 1:  # otherwise something follows that is kept itself
            self._omitted, self._kept[index] = index, None


class _Entered(AbstractContextManager[None]):
    def __init__(self, results: BlockResults, *, is_again: bool) -> None:
        self._results, self._is_again = results, is_again
        self._functions = _KeepFunctions(results) if results.is_selective else None

    def __enter__(self) -> None:
        self._before = block_results()
        self._results._next = self._results._next_group = 0
        self._results.is_again = self._is_again
        _mine.results = self._results
        if self._functions is not None:
            self._functions.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        if self._functions is not None:
            self._functions.__exit__(*error)  # type: ignore[no-untyped-call]
        _mine.results = self._before


class _KeepFunctions(TorchFunctionMode):
    def __init__(self, results: BlockResults) -> None:
        super().__init__()
        self._results = results

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Operations of our own run without gradients. Dropout inside attention draws random numbers, which are drawn again.
        if func not in _FUNCTIONS or not torch.is_grad_enabled() or _has_dropout(func, args, kwargs):
            return func(*args, **kwargs)
        return self._results.run(func, args, kwargs)


def _has_dropout(function: Any, args: Any, kwargs: Any) -> bool:
    is_attention = function is torch.nn.functional.scaled_dot_product_attention
    return is_attention and bool(kwargs.get("dropout_p") or (len(args) > 4 and args[4]))


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


def _last_that_saves(outputs: Any) -> Any:
    """The node of the graph that was made last of those that save a tensor for backward."""
    nodes = {t.grad_fn for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.grad_fn is not None}
    heap = [(-node._sequence_nr(), id(node), node) for node in nodes]
    heapq.heapify(heap)
    while heap:
        _, _, node = heapq.heappop(heap)
        if any(name.startswith("_raw_saved_") and _holds(node, name) for name in dir(node)):
            return node
        for following, _ in node.next_functions:
            # The node of a leaf, which accumulates its gradient, has no place in the order.
            if following is not None and following not in nodes and not hasattr(following, "variable"):
                nodes.add(following)
                heapq.heappush(heap, (-following._sequence_nr(), id(following), following))
    return None


def _holds(node: Any, name: str) -> bool:
    held = getattr(node, name)
    return held != () and held is not None
