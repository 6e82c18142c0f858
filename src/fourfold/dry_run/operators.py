"""What one operator of PyTorch does: FLOPs, and bytes of memory that it reads and writes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fourfold.dry_run.events import Work

aten = torch.ops.aten
MATMULS = {
    aten.mm,
    aten.addmm,
    aten.addmm_,
    aten.bmm,
    aten.baddbmm,
    aten.baddbmm_,
    aten._scaled_mm,
    aten._grouped_mm,
}
# Of Hugging Face's experts in fp32, and how many matmuls each is.
_GROUPED_FALLBACK = {
    "transformers::grouped_mm_fallback": 1,
    "transformers::grouped_mm_fallback_backward": 2,
}
_ATTENTION_ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_ON_CPU_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward
# Variable-length attention: matmuls, and the arguments that are the queries and the longest piece of them.
_VARLEN = {"torch_attn::_varlen_attn": (2, 0, 5), "torch_attn::_varlen_attn_backward": (5, 1, 8)}
_LOOKUPS = {aten.embedding, aten.gather, aten.index, aten.index_select}
_NOTHING = {aten.empty_like, aten.new_empty, aten.new_empty_strided, aten.empty, aten.empty_strided}


class Done(NamedTuple):
    work: Work
    flops: float
    bytes_moved: float
    # (batch, m, n, k) of a matmul; the output's shape of any other operator.
    shape: tuple[int, ...]


def work_of(func: Any, args: Any, kwargs: Any, out: Any) -> Done:
    outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
    inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    packet = func._overloadpacket
    work: Work = "memory"
    flops = 0.0
    shape: tuple[int, ...] = tuple(outputs[0].shape) if outputs else tuple(inputs[0].shape)
    if packet in MATMULS:
        operands = [t for t in args if isinstance(t, Tensor)]
        a, b = operands[:2] if packet in (aten._scaled_mm, aten._grouped_mm) else operands[-2:]
        # Of grouped ones the rows of all groups together; so also where the groups are parts of the dim that is summed over.
        shape = (a.shape[0] if a.ndim == 3 else 1, a.shape[-2], b.shape[-1], a.shape[-1])
        work, flops = "matmul", 2.0 * math.prod(shape)
    elif matmuls := _GROUPED_FALLBACK.get(packet._qualified_op_name):
        shape = (1, args[0].shape[0], args[1].shape[2], args[0].shape[1])
        work, flops = "matmul", matmuls * 2.0 * math.prod(shape)
    elif packet is _ATTENTION_ON_CPU:
        work, flops = "attention", float(sdpa_flop_count(*(t.shape for t in inputs[:3])))
    elif packet is _ATTENTION_ON_CPU_BACKWARD:
        work, flops = "attention", float(sdpa_backward_flop_count(*(t.shape for t in inputs[:4])))
    elif packet._qualified_op_name in _VARLEN:
        products, of_query, of_longest = _VARLEN[packet._qualified_op_name]
        tokens, heads, features = args[of_query].shape
        queries, keys = args[of_longest : of_longest + 2]
        # Each row is one document. Twice what a causal mask leaves of the last queries, as stock attention counts the whole square.
        work, flops = "attention", 2.0 * products * tokens * (2 * keys - queries) * heads * features
    elif packet in flop_registry:
        work, flops = "attention", float(flop_registry[packet](*args, **kwargs, out_val=out))
    return Done(work, flops, _moved_bytes(func, args, kwargs, outputs), shape)


def _moved_bytes(func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> float:
    """What an operator reads and writes of memory, by its schema: an argument may be read, written, or both."""
    packet, schema = func._overloadpacket, func._schema
    if packet in _NOTHING:
        return 0.0
    read = written = 0
    given = [*zip(schema.arguments, args, strict=False), *((a, kwargs.get(a.name)) for a in schema.arguments)]
    for argument, value in given:
        size = sum(_touched_bytes(t) for t in tree_leaves(value) if isinstance(t, Tensor))
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        written += size if is_written else 0
        # What is written is read as well, unless it is copied over or an `out`.
        read += 0 if is_written and (argument.kwarg_only or "copy" in schema.name) else size
    if not schema.is_mutable:
        written = sum(_touched_bytes(t) for t in outputs)
    if packet in _LOOKUPS:  # of the table only what is looked up
        read = 2 * written
    if packet is aten.scatter_add_:  # and only what is added to
        written = _touched_bytes(args[3])
        read = 3 * written  # with the indices
    return read + written


def cast_bytes(func: Any, args: Any, kwargs: Any) -> int:
    """What a CPU holds while an operator of several dtypes runs: copies in the common one. GPUs cast in registers."""
    if torch.Tag.pointwise not in func.tags:
        return 0
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
    widest = max((t.element_size() for t in tensors if t.ndim), default=0)
    return sum(widest * t.numel() for t in tensors if t.ndim and t.element_size() < widest)


def _touched_bytes(tensor: Tensor) -> int:
    """What it reads or writes of memory; an expanded tensor reads its storage once."""
    if isinstance(tensor, DTensor):
        return 0
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
