"""An experts function for Hugging Face's registry that keeps less for backward than `grouped_mm`, and computes the same.

For T tokens of h features, k choices each, and f inner features of an expert, autograd keeps

    grouped_mm    2*T*k*h + 4*T*k*f    the rows of tokens by expert, and the rows that experts return
    fourfold        T*h   + 4*T*k*f    the tokens, whose rows are gathered again in backward

What experts return is needed for the gradient of the choices' weights: w * y for y = a @ W has the gradient <y, dy> = <a @ W, dy> =
<a, dy @ W.T>, and dy @ W.T is computed in backward anyway. So the matmuls of a step are those of `grouped_mm`, no more and no fewer, and
the forward is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.integrations import moe

from fourfold.hf.experts import is_experts
from fourfold.mesh.kept import block_results

NAME, _STOCK = "fourfold", "grouped_mm"


def use_experts_function(model: nn.Module, *, is_compiled: bool) -> str | None:
    """Let the experts of a model use this function instead of `grouped_mm`; returns what the report says of it."""
    found = {name: module for name, module in model.named_modules() if is_experts(module)}
    if not found:
        return None
    if is_compiled:
        return "experts function: the model's own (in compiled blocks Inductor decides what is kept)"
    kept: dict[str, str] = {}
    for name, module in found.items():
        if (why := _why_stock(module)) is not None:
            kept[name] = why
    if len(kept) < len(found):
        cast(Any, model).set_experts_implementation(NAME)
    words = f"experts function: {NAME} in {len(found) - len(kept)} modules, which keep each token once for backward"
    if kept:
        example, why = next(iter(kept.items()))
        words += f"; {len(kept)} keep their own, such as {example}: {why}"
    return words


def _why_stock(module: nn.Module) -> str | None:
    if not hasattr(module, "_is_expert_parallel"):
        return f"{type(module).__name__} has a forward of its own"
    if getattr(module, "has_post_expert_norm", False):
        return "it has a norm over each expert's output"
    used = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return None if used in (_STOCK, NAME) else f"experts_implementation={used!r} was asked for"


def experts_forward(self: Any, hidden: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
    """As `transformers.integrations.moe.grouped_mm_experts_forward`; ``self`` is a module of experts."""
    if (
        self._is_expert_parallel
        or self.has_post_expert_norm
        or torch.compiler.is_compiling()
        or not torch.is_grad_enabled()
    ):
        return cast(Tensor, moe.grouped_mm_experts_forward(self, hidden, choices, weights))
    by_expert, order = torch.sort(choices.reshape(-1))
    # As there: a histogram that CUDA graphs can hold, of floats on CPUs.
    numbers = by_expert.float() if hidden.device.type in ("cpu", "mps") else by_expert.int()
    rows_of = torch.histc(numbers, bins=self.num_experts, min=0, max=self.num_experts - 1)
    ends = torch.cumsum(rows_of, dim=0, dtype=torch.int32)
    chosen = choices.size(-1)

    into = self.gate_up_proj if self.has_gate else self.up_proj
    inner = _product_of_rows(hidden.to(into.dtype), order, ends, _in_out(into, self), chosen)
    if self.has_bias:
        bias = self.gate_up_proj_bias if self.has_gate else self.up_proj_bias
        inner = inner + bias[by_expert]
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)

    out = self.down_proj
    bias = self.down_proj_bias if self.has_bias else None
    result = _weighted_sum(inner.to(out.dtype), order, ends, _in_out(out, self), weights, bias, by_expert)
    return result.to(hidden.dtype)


moe.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def _in_out(weight: Tensor, module: Any) -> Tensor:
    """[experts, in, out], whichever way it is stored."""
    return weight if module.is_transposed else weight.transpose(-2, -1)


# -- grouped matmuls, by transformers' choice of a kernel ------------------------------------------------------------------


def _has_kernel(rows: Tensor, weight: Tensor, ends: Tensor) -> bool:
    return bool(moe._can_use_grouped_mm(rows, weight, ends))


def _times(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows by expert, times the weight of their expert, [experts, in, out]."""
    if _has_kernel(rows, weight, ends):
        return torch.nn.functional.grouped_mm(rows, weight, offs=ends)
    return cast(Tensor, torch.ops.transformers.grouped_mm_fallback(rows, weight, ends))


def _gradients(
    rows: Tensor, weight: Tensor, ends: Tensor, gradient: Tensor, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Those of the rows, and of the weight."""
    if not _has_kernel(rows, weight, ends):
        of_rows, of_weight = torch.ops.transformers.grouped_mm_fallback_backward(rows, weight, ends, gradient)
        return of_rows, of_weight
    product = torch.nn.functional.grouped_mm
    of_rows = product(gradient, weight.transpose(-2, -1), offs=ends)
    if not needs_weight:
        return of_rows, None
    if weight.stride(-2) == 1:  # stored as [experts, out, in]: so is its gradient
        return of_rows, product(gradient.t(), rows, offs=ends).transpose(-2, -1)
    return of_rows, product(rows.t(), gradient, offs=ends)


# -- what autograd has -----------------------------------------------------------------------------------------------------


def _known(ctx: Any, compute: Callable[[], Tensor]) -> Tensor:
    """What ``compute`` returns; in a recomputed block, what it has returned before, where that is kept (`mesh/kept.py`)."""
    results = block_results()
    if results is None:
        return compute()
    if (known := results.known(ctx.device)) is not None:
        return known[0]
    made = compute()
    ctx.result_index = results.keep([made])
    return made


def _filled(output: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    """``output``; with its values, if it was made without them because backward seemed not to need them."""
    results = block_results()
    if results is not None and results.is_again and results.is_empty:
        results.is_empty = False
        with torch.no_grad():
            output.copy_(compute())
    return output


def _sum_of_choices(rows: Tensor, order: Tensor, chosen: int) -> Tensor:
    """[rows by expert, width] -> [tokens, width], in the order in which the router chose."""
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return rows[place].view(-1, chosen, rows.shape[-1]).sum(1)


class _ProductOfRows(torch.autograd.Function):
    """hidden[token of each row] @ weight[expert of each row]"""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Tensor, ends: Tensor, weight: Tensor, chosen: int) -> Tensor:
        ctx.chosen, ctx.device = chosen, hidden.device
        output = _known(ctx, lambda: _times(hidden[order // chosen], weight, ends))
        ctx.save_for_backward(hidden, order, ends, weight)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, order, ends, weight = ctx.saved_tensors
        rows = hidden[order // ctx.chosen]
        of_rows, of_weight = _gradients(rows, weight, ends, gradients[0], ctx.needs_input_grad[3])
        del rows
        return _sum_of_choices(of_rows, order, ctx.chosen), None, None, of_weight, None


def _product_of_rows(hidden: Tensor, order: Tensor, ends: Tensor, weight: Tensor, chosen: int) -> Tensor:
    output = _ProductOfRows.apply(hidden, order, ends, weight, chosen)  # type: ignore[no-untyped-call]
    return _filled(output, lambda: _times(hidden[order // chosen], weight, ends))


class _WeightedSum(torch.autograd.Function):
    """The sum over a token's choices of weights[choice] * (inner[row] @ weight[expert] + bias[expert])"""

    @staticmethod
    def forward(
        ctx: Any,
        inner: Tensor,
        order: Tensor,
        ends: Tensor,
        weight: Tensor,
        weights: Tensor,
        bias: Tensor | None,
        by_expert: Tensor,
    ) -> Tensor:
        ctx.device = inner.device
        output = _known(ctx, lambda: _weighted(inner, order, ends, weight, weights, bias, by_expert))
        experts = None if bias is None else by_expert
        ctx.save_for_backward(inner, order, ends, weight, weights, bias, experts)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inner, order, ends, weight, weights, bias, by_expert = ctx.saved_tensors
        scale = weights.reshape(-1)[order].unsqueeze(-1)
        of_rows = gradients[0].to(inner.dtype)[order // weights.shape[-1]]  # before they are weighted
        weighted = (inner * scale).to(inner.dtype)
        product, of_weight = _gradients(weighted, weight, ends, of_rows, ctx.needs_input_grad[3])
        del weighted
        of_scale = (inner * product).sum(-1, dtype=torch.float32)
        of_bias = None
        if bias is not None:
            of_scale = of_scale + (bias[by_expert] * of_rows).sum(-1, dtype=torch.float32)
            # Not `index_add`, which is not deterministic on GPUs.
            of_bias = torch.zeros_like(bias).index_put(
                (by_expert,), (of_rows * scale).to(bias.dtype), accumulate=True
            )
        del of_rows
        of_weights = torch.empty_like(of_scale)
        of_weights[order] = of_scale
        of_inner = (product * scale).to(inner.dtype)
        of_weights = of_weights.view(weights.shape).to(weights.dtype)
        return of_inner, None, None, of_weight, of_weights, of_bias, None


def _weighted(
    inner: Tensor,
    order: Tensor,
    ends: Tensor,
    weight: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    by_expert: Tensor,
) -> Tensor:
    rows = _times(inner, weight, ends)
    if bias is not None:
        rows = rows.add_(bias[by_expert])
    return _sum_of_choices(rows * weights.reshape(-1)[order].unsqueeze(-1), order, weights.shape[-1])


def _weighted_sum(*given: Any) -> Tensor:
    output = _WeightedSum.apply(*given)  # type: ignore[no-untyped-call]
    return _filled(output, lambda: _weighted(*given))
