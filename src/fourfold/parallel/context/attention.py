"""Attention of this rank's queries to the keys of the whole sequence, which are gathered over the ranks that share it.

Keys and values are gathered in forward and again in backward, so that between the two a rank keeps its own alone; their gradients are
summed over the ranks in fp32. On GPUs each of the two chunks is one call of a kernel, where it has the mask (`prefix.py`). Otherwise both go
block by block of the queries: of a mask and of its scores there is one block at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from fourfold.errors import UnsupportedError
from fourfold.hf.packed_attention import KNOWN, KNOWN_TO_FLEX
from fourfold.mesh.collectives import Collectives
from fourfold.mesh.kept import all_computed_once
from fourfold.parallel.context import prefix
from fourfold.parallel.context.chunks import by_rank, in_order
from fourfold.parallel.context.masks import NAME, CutMask

_KNOWN = KNOWN | KNOWN_TO_FLEX | {"shift_labels"}


def cut_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """For transformers' registry. Takes [rows, heads, own length, features], returns [rows, own length, heads, features]."""
    name = type(module).__name__
    if not isinstance(attention_mask, CutMask):
        raise UnsupportedError(
            f"{name} calls its attention without a mask of transformers' mask functions, so that it is not known which keys of other "
            "ranks it needs; use sequence_ranks=1"
        )
    if dropout:
        raise UnsupportedError(
            f"{name} has dropout={dropout:g} of its scores, which is not supported with sequence_ranks; set attention_dropout=0"
        )
    unknown = [n for n, v in given.items() if v is not None and n not in _KNOWN]
    if unknown:
        raise UnsupportedError(
            f"{name} passes {', '.join(unknown)} to its attention, which is not supported with sequence_ranks; use sequence_ranks=1"
        )
    sequences = attention_mask.sequences
    sequences.called.add(module)
    own = sequences.positions.shape[1] // sequences.grid.sequence_ranks
    if not query.shape[2] == key.shape[2] == own:
        raise UnsupportedError(
            f"{name} has {query.shape[2]} queries and {key.shape[2]} keys, not the {own} tokens of this rank; use sequence_ranks=1"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap, sinks = given.get("softcap"), given.get("s_aux")
    has_kernel = attention_mask.is_causal and not prefix.why_not_prefix(
        sequences.grid, query, value, softcap=softcap is not None, sinks=sinks is not None
    )
    work = _Work(attention_mask, sequences.grid.collectives, scale, softcap, name, has_kernel)
    return cast(Tensor, _CutAttention.apply(query, key, value, sinks, work)), None  # type: ignore[no-untyped-call]


@dataclass(frozen=True, eq=False)
class _Work:
    mask: CutMask
    collectives: Collectives
    scale: float
    softcap: float | None
    name: str
    has_kernel: bool

    def gather(self, key: Tensor, value: Tensor, *, in_forward: bool) -> tuple[Tensor, Tensor]:
        """All keys and values, in the order of the sequence."""
        own = torch.cat([key, value], dim=-1)
        gathered = own.new_empty(self.collectives.size("sequence"), *own.shape)
        pending = self.collectives.all_gather(gathered, own, "sequence", "keys-values", module=self.name)
        self.collectives.wait(pending, in_turns=in_forward)
        keys, values = in_order(gathered, 2).split([key.shape[-1], value.shape[-1]], dim=-1)
        return keys, values

    def scatter(self, sums: Tensor, features: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """The sums over the ranks of the gradients of this rank's keys and values, in fp32; ``sums`` are those of all, one beside the other."""
        parts = by_rank(sums, self.collectives.size("sequence"), 2)
        own = parts.new_empty(parts.shape[1:])
        self.collectives.reduce_scatter(own, parts, "sequence", "keys-values", module=self.name).wait()
        key, value = own.split(features, dim=-1)
        return key, value

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> list[Tensor]:
        """The output, [rows, own length, heads, features], and what backward needs of it besides."""
        rows, heads, length, _ = query.shape
        out = query.new_empty(rows, length, heads, values.shape[-1])
        if not self.has_kernel:
            for own, queries, needed in self.mask.blocks():
                read = (query[:, :, own], keys[:, :, needed], values[:, :, needed])
                out[:, own] = self.attend(*read, sinks, self.mask.of(queries, needed)).transpose(1, 2)
            return [out]
        sums = []
        chunks = zip(query.transpose(1, 2).chunk(2, 1), out.chunk(2, 1), self.mask.bounds(), strict=True)
        for of_chunk, part, bounds in chunks:
            found, lse = prefix.attend(of_chunk, keys, values, bounds, self.scale, self.mask.window)
            part.copy_(found)
            sums.append(lse)
        return [out, *sums]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, mask: Tensor) -> Tensor:
        """One block: [rows, heads, queries, features]."""
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if self.softcap is None and sinks is None:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scale)
        scores = (query @ key.transpose(2, 3)).float() * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~mask, float("-inf"))
        total = scores.logsumexp(-1, keepdim=True)
        if sinks is not None:  # a score without a value, which takes a part of the softmax
            total = torch.logaddexp(total, sinks.float().view(1, -1, 1, 1))
        return (scores - total).exp().to(value.dtype) @ value


class _CutAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, work: _Work
    ) -> Tensor:
        def attend() -> list[Tensor]:
            return work.forward(query, *work.gather(key, value, in_forward=True), sinks)

        out, *sums = all_computed_once(query.device, attend)
        ctx.work = work
        ctx.save_for_backward(query, key, value, sinks, *([out, *sums] if work.has_kernel else []))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        work: _Work = ctx.work
        query, key, value, sinks, *made = ctx.saved_tensors
        keys, values = work.gather(key, value, in_forward=False)
        features = (key.shape[-1], value.shape[-1])
        sums = torch.zeros(*keys.shape[:-1], sum(features), dtype=torch.float32, device=keys.device)
        of_whole = sums.split(features, dim=-1)
        of_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=torch.float32)
        if work.has_kernel:
            of_query = _by_kernel(work, gradients[0], query, keys, values, made, of_whole)
        else:
            of_query = _by_blocks(work, gradients[0], query, keys, values, sinks, of_whole, of_sinks)
        del keys, values
        of_key, of_value = work.scatter(sums, features)
        return (
            of_query,
            of_key.to(key.dtype),
            of_value.to(value.dtype),
            None if of_sinks is None else of_sinks.to(sinks.dtype),
            None,
        )


def _by_kernel(
    work: _Work,
    gradient: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    made: Sequence[Tensor],
    of_whole: tuple[Tensor, ...],
) -> Tensor:
    """The gradient of the queries; those of keys and values are added up in ``of_whole``."""
    out, *sums = made
    of_query = torch.empty_like(query)
    halves = (
        tensor.chunk(2, 1) for tensor in (gradient, query.transpose(1, 2), out, of_query.transpose(1, 2))
    )
    for (wanted, queries, part, into), lse, bounds in zip(
        zip(*halves, strict=True), sums, work.mask.bounds(), strict=True
    ):
        read = (wanted, queries, keys, values, part, lse, bounds, work.scale, work.mask.window)
        into.copy_(prefix.add_gradients(*read, of_whole))
    return of_query


def _by_blocks(
    work: _Work,
    gradient: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks: Tensor | None,
    of_whole: tuple[Tensor, ...],
    of_sinks: Tensor | None,
) -> Tensor:
    """The same by a forward of each block."""
    of_query = torch.empty_like(query)
    of_keys, of_values = of_whole
    for own, queries, needed in work.mask.blocks():
        read = (query[:, :, own], keys[:, :, needed], values[:, :, needed])
        inputs = [tensor.detach().requires_grad_() for tensor in read]
        if sinks is not None:
            inputs.append(sinks.detach().requires_grad_())
        with torch.enable_grad():
            q, k, v, *sink = inputs
            out = work.attend(q, k, v, sink[0] if sink else None, work.mask.of(queries, needed))
        found = torch.autograd.grad(out, inputs, gradient[:, own].transpose(1, 2))
        of_query[:, :, own] = found[0]
        of_keys[:, :, needed] += found[1]
        of_values[:, :, needed] += found[2]
        if of_sinks is not None:
            of_sinks += found[3]
    return of_query


AttentionInterface.register(NAME, cut_attention)
