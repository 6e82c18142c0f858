"""Attention of packed rows by the bounds of their documents, without a mask of length x length.

transformers makes a mask from the positions, so that flash attention is lost, and asks for a value on the host to find out
whether rows are packed. It makes no mask for an attention function of its registry that has no mask function. Here are two such
functions: on CUDA `torch.nn.attention.varlen`, elsewhere one `scaled_dot_product_attention` for each document; and FlexAttention on CUDA, for what the
former do not have (`flex_attention.py`).
"""

from __future__ import annotations

from collections.abc import Set
from itertools import pairwise
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fourfold.errors import UnsupportedError
from fourfold.hf.flex_attention import LARGEST_HEAD, SMALLEST_HEAD, attend

Attention = Literal["auto", "varlen", "flex", "masked"]
NAME, FLEX, _PROBE = "fourfold_packed", "fourfold_flex", "fourfold_probe"
_WINDOW = "_fourfold_window"
_QUERIES = 512  # of a block of a sliding window, where a mask is needed
# What modules pass to an attention function: what this one uses, and what does not change a result.
KNOWN = {
    "position_ids", "sliding_window", "cu_seq_lens_q", "max_length_q", "is_causal",
    "output_attentions", "output_hidden_states", "use_cache", "cache_position", "return_dict", "layer_idx", "past_key_values",
    "num_items_in_batch", "output_router_logits", "position_embeddings",
}  # fmt: skip
KNOWN_TO_FLEX = {"softcap", "s_aux"}


def cumulative_lengths(position_ids: Tensor) -> tuple[Tensor, int]:
    """(where each document begins, in the tokens of all rows, and where the last one ends; the longest one), on the host.

    Example:
        >>> cumulative_lengths(torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]))
        (tensor([ 0,  2,  5, 10], dtype=torch.int32), 5)
    """
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids.diff() != 1
    bounds = begins.flatten().nonzero().flatten()
    bounds = torch.cat([bounds, bounds.new_tensor([position_ids.numel()])])
    return bounds.int(), int(bounds.diff().max())


def packed_inputs(position_ids: Tensor, device: torch.device) -> dict[str, Any]:
    """What a model needs to know of its packed rows, from positions on the host: on CUDA also the bounds of documents.

    The names are those of transformers, which hands them on to its attention functions.
    """
    inputs: dict[str, Any] = {"position_ids": position_ids.to(device, non_blocking=True)}
    if device.type == "cuda":
        bounds, longest = cumulative_lengths(position_ids)
        inputs |= document_bounds(bounds.pin_memory().to(device, non_blocking=True), longest)
    return inputs


def document_bounds(bounds: Tensor, longest: int) -> dict[str, Any]:
    """The inputs of variable-length attention. Blocks that are compiled take any number of documents in one graph."""
    torch._dynamo.maybe_mark_dynamic(bounds, 0)
    # The kernel needs an upper bound. A power of two, so that there are few graphs.
    return {"cu_seq_lens_q": bounds, "max_length_q": 1 << (longest - 1).bit_length()}


# -- the function of transformers' registry ---------------------------------------------------------------------------


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document. Takes [rows, heads, length, features], returns [rows, length, heads, features]."""
    _check(module, attention_mask, given)
    window = _window_of(module)
    if query.is_cuda:
        longest = given.get("max_length_q") or query.shape[2]
        return _varlen(query, key, value, scaling, window, given["cu_seq_lens_q"], longest), None
    return _by_document(module, query, key, value, dropout, scaling, window, given["position_ids"]), None


def flex_packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """The same by FlexAttention, also with a soft cap of the scores and with sinks."""
    _check(module, attention_mask, given, KNOWN_TO_FLEX)
    out = attend(
        query,
        key,
        value,
        given["position_ids"],
        scaling=scaling,
        window=_window_of(module),
        softcap=given.get("softcap"),
        sinks=given.get("s_aux"),
    )
    return out, None


def _check(
    module: nn.Module, mask: Tensor | None, given: dict[str, Any], more: Set[str] = frozenset()
) -> None:
    why = _why_not(module, mask, given, more)
    if why is not None:
        raise UnsupportedError(
            f"{type(module).__name__} needs another attention for packed rows: {why}; use engine.attention = 'masked'"
        )


def use_packed_attention(
    model: nn.Module, wanted: Attention, target: str, precision: str, *, is_compiled: bool = False
) -> str:
    """Set the attention of packed rows of a model on meta, before it is sharded; returns a note for the report.

    ``target``: the device type that it will run on. ``is_compiled``: are its blocks compiled?
    """
    config: Any = getattr(model, "config", None)
    before = getattr(config, "_attn_implementation", None)
    if wanted == "masked":
        return f"attention: {before}, packed documents apart by a mask of length x length (engine.attention = 'masked')"
    # What transformers takes where a configuration says nothing.
    default = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
    if wanted == "auto" and before != default:
        by_bounds: str | None = f"its configuration says {before!r}"
        by_flex = by_bounds
    else:
        by_bounds, by_flex = _try_on_meta(model, target, precision, is_compiled=is_compiled)
    if by_bounds is None and wanted != "flex":
        set_attention(model, NAME)
        how = "variable-length flash attention" if target == "cuda" else "one document after another"
        return f"attention: by the bounds of packed documents, {how}"
    if by_flex is None and wanted != "varlen":
        set_attention(model, FLEX)
        why = "engine.attention = 'flex'" if wanted == "flex" else by_bounds
        return f"attention: FlexAttention inside packed documents ({why})"
    if wanted != "auto":
        why = f"FlexAttention: {by_flex}" if wanted == "flex" else by_bounds
        raise UnsupportedError(
            f"{type(model).__name__} needs another attention than {wanted!r} for packed rows: {why}; use engine.attention = 'masked'"
        )
    reason = (
        by_bounds if target != "cuda" or by_flex == by_bounds else f"{by_bounds}; FlexAttention: {by_flex}"
    )
    return f"attention: {before}, packed documents apart by a mask of length x length ({reason})"


def _try_on_meta(
    model: nn.Module, target: str, precision: str, *, is_compiled: bool
) -> tuple[str | None, str | None]:
    """Why the attention of this model cannot be done by the bounds of documents, and why not by FlexAttention; None if it can."""
    never_by_bounds, never_by_flex = _why_never(model, target, precision, is_compiled=is_compiled)
    if never_by_bounds is not None and never_by_flex is not None:
        return never_by_bounds, never_by_flex
    found: list[tuple[str | None, str | None]] = []

    def probe(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **given: Any,
    ) -> tuple[Tensor, None]:
        dropout, scaling = given.pop("dropout", 0.0), given.pop("scaling", None)
        by_bounds = _why_not(module, attention_mask, given)
        by_flex = _why_not(module, attention_mask, given, KNOWN_TO_FLEX)
        if target == "cuda":
            by_bounds = by_bounds or _why_not_on_cuda(query, value, dropout, given)
            by_flex = by_flex or _why_not_flex(query, value, dropout)
        found.append((by_bounds, by_flex))
        out, _ = sdpa_attention_forward(module, query, key, value, None, dropout, scaling, is_causal=True)
        return out, None

    AttentionInterface.register(_PROBE, probe)
    before = cast(Any, model.config)._attn_implementation
    set_attention(model, _PROBE)
    positions = torch.arange(4, device="meta").unsqueeze(0)
    bounds = {"cu_seq_lens_q": positions[0].int(), "max_length_q": 4} if target == "cuda" else {}
    try:
        with torch.no_grad():
            model(input_ids=positions, position_ids=positions, use_cache=False, **bounds)
    except Exception as error:  # whatever a model does that meta tensors or these arguments do not allow
        if not found:
            return (f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",) * 2
        # Something after the first attention, such as experts, has no kernel for meta. Every call is checked again when it runs.
    finally:
        set_attention(model, before)
    if not found:
        return ("it does not use transformers' attention interface",) * 2
    by_bounds, by_flex = (
        next((why for why in each if why is not None), None) for each in zip(*found, strict=True)
    )
    if not getattr(model, "_supports_sdpa", False):
        by_bounds = by_bounds or "transformers does not allow SDPA for this model"
    return never_by_bounds or by_bounds, never_by_flex or by_flex


def _why_never(
    model: nn.Module, target: str, precision: str, *, is_compiled: bool
) -> tuple[str | None, str | None]:
    """The same, as far as it does not depend on what modules pass to their attention."""
    by_bounds = by_flex = None
    if not getattr(model, "_supports_flex_attn", False):
        by_flex = "transformers does not allow it for this model"
    if target == "cuda" and precision == "fp32":
        by_bounds, by_flex = "flash attention has no fp32", "it is used in bf16 alone"
    if target != "cuda":
        by_flex = "it has no gradients on CPUs"
        if is_compiled:
            by_bounds = "one document after another cannot be in the one graph of a compiled block"
    return by_bounds, by_flex


def set_attention(model: nn.Module, name: str) -> None:
    """Set the attention of a model and of the models inside it."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = name


def _window_of(module: nn.Module) -> int | None:
    """The sliding window of a layer by the model's configuration."""
    if torch.compiler.is_compiling() and _WINDOW in module.__dict__:
        # As in the first forward. A graph that reads the number of its layer would be that of one layer.
        return cast("int | None", module.__dict__[_WINDOW])
    config: Any = getattr(module, "config", None)
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    is_full = kinds is not None and index is not None and kinds[index] != "sliding_attention"
    window = None if is_full else getattr(config, "sliding_window", None) or None
    if not torch.compiler.is_compiling():
        module.__dict__[_WINDOW] = window
    return window


def _why_not(
    module: nn.Module, attention_mask: Tensor | None, given: dict[str, Any], more: Set[str] = frozenset()
) -> str | None:
    if attention_mask is not None:
        return "it has a mask of its own"
    positions = given.get("position_ids")
    if positions is None or positions.ndim != 2:
        return (
            "it does not pass the positions on" if positions is None else "its positions have several parts"
        )
    if given.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        return "it is not causal"
    config: Any = getattr(module, "config", None)
    # A layer of another kind, such as linear attention, would carry something from one document to the next.
    others = sorted({*(getattr(config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"})
    if others:
        return f"it has layers of the kind {', '.join(others)}"
    window, passed = _window_of(module), given.get("sliding_window") or None
    if passed != window:
        return f"its window is {window}, and it passes {passed} to its attention"
    unknown = [name for name, value in given.items() if value is not None and name not in KNOWN | more]
    return f"it passes {', '.join(unknown)} to its attention" if unknown else None


def _why_not_on_cuda(query: Tensor, value: Tensor, dropout: float, given: dict[str, Any]) -> str | None:
    if given.get("cu_seq_lens_q") is None:
        return "it does not pass the bounds of documents on"
    if dropout:
        return "variable-length attention has no dropout"
    if query.shape[-1] > 256 or query.shape[-1] != value.shape[-1]:
        return f"flash attention has no kernel for heads of {query.shape[-1]} and {value.shape[-1]} features"
    return None


def _why_not_flex(query: Tensor, value: Tensor, dropout: float) -> str | None:
    if dropout:
        return "it has no dropout"
    features = sorted({query.shape[-1], value.shape[-1]})
    if not SMALLEST_HEAD <= features[0] <= features[-1] <= LARGEST_HEAD:
        return f"it has no kernel for heads of {' and '.join(map(str, features))} features"
    return None


# -- on CUDA ----------------------------------------------------------------------------------------------------------


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    cu_seq_lens: Tensor,
    longest: int,
) -> Tensor:
    rows, heads, length, _ = query.shape
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    out = varlen_attn(
        q,
        k,
        v,
        cu_seq_lens,
        cu_seq_lens,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),  # tokens to the left, besides the query's own
        enable_gqa=heads != key.shape[1],
    )
    found: Tensor = cast(Tensor, out).unflatten(0, (rows, length))
    return found


# -- elsewhere --------------------------------------------------------------------------------------------------------


def _by_document(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    scaling: float | None,
    window: int | None,
    position_ids: Tensor,
) -> Tensor:
    rows, _, length, _ = query.shape
    bounds, longest = cumulative_lengths(position_ids.expand(rows, -1))

    def attend(rows: slice, queries: slice, keys: slice, mask: Tensor | None = None) -> Tensor:
        q, k, v = (tensor[rows, :, part] for tensor, part in ((query, queries), (key, keys), (value, keys)))
        out, _ = sdpa_attention_forward(module, q, k, v, mask, dropout, scaling, is_causal=mask is None)
        return cast(Tensor, out)

    if longest == length and len(bounds) == rows + 1 and (window is None or window >= length):
        return attend(slice(None), slice(None), slice(None))  # each row is a document
    parts = []
    ends = bounds.tolist()
    for begin, end in pairwise(ends):
        row, first = divmod(begin, length)
        last = first + end - begin
        own = slice(row, row + 1)
        if window is None or window >= last - first:
            parts.append(attend(own, slice(first, last), slice(first, last)))
            continue
        for start in range(first, last, _QUERIES):
            stop = min(start + _QUERIES, last)
            oldest = max(first, start - window + 1)
            ago = torch.arange(start, stop).unsqueeze(1) - torch.arange(oldest, stop)
            mask = ((ago >= 0) & (ago < window))[None, None]
            parts.append(attend(own, slice(start, stop), slice(oldest, stop), mask))
    return torch.cat(parts, dim=1).view(rows, length, *parts[0].shape[2:])


AttentionInterface.register(NAME, packed_attention)
AttentionInterface.register(FLEX, flex_packed_attention)
