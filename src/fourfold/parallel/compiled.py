"""Blocks that are compiled: each is one graph, in which what is sent is part of an operator (`product_operator.py`).

The first forward runs as it is: it finds which linears share an input, that attention reads nothing but the shape of its input, and over which axes the
gradients of streamed weights are summed.
Recomputation is part of the graph: Inductor drops from it what backward does not need. Blocks that are alike share a graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.attention.flex_attention  # defines its operator
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fourfold.mesh.kept import OPERATORS
from fourfold.parallel.checkpointing import ActivationCheckpointing
from fourfold.parallel.linear import Linear4D
from fourfold.parallel.sequence import Tokens
from fourfold.weights.api import backend_of

BACKEND = "inductor"
MOST_SHAPES = 4  # each is another graph; with more of them blocks run as they are
_SETTINGS = {
    # The graph is not run again as Python: what the trace of a recomputed forward changes in objects need not be changed twice.
    "skip_fwd_side_effects_in_bwd_under_checkpoint": True,
    "recompile_limit": 256,  # of all blocks of a model, if each is of another kind
}
# In the order of the graph, what is between the start of a collective and its end overlaps with it.
_INDUCTOR: dict[str, Any] = {"reorder_for_peak_memory": False}
# The matmuls of sharded products.
_PRODUCTS = {getattr(torch.ops.aten, name).out for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")}
_PRODUCTS |= {torch.ops.aten._scaled_mm.default}
_ATTENTION = {torch.ops.higher_order.flex_attention, *OPERATORS}


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """As without a graph: results of matmuls, of attention and of sums over ranks are kept, gathered inputs are not."""
    is_sum = operator is torch.ops.fourfold.finish.default and args[2] != "all_gather"
    is_kept = is_sum or operator in _ATTENTION or operator in _PRODUCTS
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


_selective = functools.partial(create_selective_checkpoint_contexts, _policy)


def compiled(
    block: nn.Module,
    name: str,
    eager: Callable[..., Any],
    checkpointing: ActivationCheckpointing,
    tokens: Tokens | None,
    inside: AbstractContextManager[None],
    keeping: Callable[[tuple[Any, ...]], AbstractContextManager[None]],
) -> Callable[..., Any]:
    """The forward of a block as one graph, after a first one by ``eager``; entered ``inside``, and ``keeping`` its arguments."""
    inner = block.forward
    recomputed = {"full": _recomputed, "selective": _partly_recomputed, "none": _run}[checkpointing]
    traced = torch.compile(
        recomputed,
        fullgraph=True,
        dynamic=False,
        backend=_inductor if BACKEND == "inductor" else BACKEND,
    )
    is_first, is_ready = True, False
    shapes: set[tuple[torch.Size, ...]] = set()

    def prepare() -> None:
        nonlocal is_first, is_ready
        # In an order that is the same on all ranks and in all runs.
        groups = dict.fromkeys(m.group for m in block.modules() if isinstance(m, Linear4D))
        is_ready = not is_first and all(group.settled for group in groups)
        is_first = False
        for group in groups if is_ready else ():
            group.prepare_trace()

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not is_ready:
            prepare()
        if not is_ready or not torch.is_grad_enabled():
            return eager(*args, **kwargs)
        if len(shapes) <= MOST_SHAPES:
            # The bounds of packed documents, the only vector, may have any length.
            tensors = (a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
            shapes.add(tuple(tensor.shape for tensor in tensors if tensor.ndim > 1))
        if len(shapes) > MOST_SHAPES or (tokens is not None and not args):
            return eager(*args, **kwargs)
        if tokens is not None:
            tokens.traced_shape = tokens.shape
            args = (tokens.own(args[0], name), *args[1:])
        backend = backend_of(block)
        assert backend is not None
        with torch._dynamo.config.patch(_SETTINGS), inside, keeping(args):
            return backend.call_graph(block, lambda: traced(inner, *args, **kwargs))

    return forward


def _inductor(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    # The key of autograd's cache has the number of a sharded product, and not what the product does: another option or another version
    # of this library would find the graph of an earlier run. Inductor's own cache is of what autograd has taken apart.
    inductor: Any = torch._dynamo.lookup_backend("inductor")
    with functorch.patch(enable_autograd_cache=False):
        return inductor(graph, inputs, config_patches=_INDUCTOR)


def _run(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return inner(*args, **kwargs)


def _recomputed(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(inner, *args, use_reentrant=False, **kwargs)


def _partly_recomputed(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(inner, *args, use_reentrant=False, context_fn=_selective, **kwargs)
