"""A model whose ranks along z share sequences: what is refused, and the forward of this rank's tokens."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.errors import UnsupportedError
from fourfold.hf.anatomy import find_blocks, idle_towers
from fourfold.hf.packed_attention import set_attention
from fourfold.mesh.grid import Grid
from fourfold.parallel.context import attention  # registers it  # noqa: F401
from fourfold.parallel.context.masks import NAME, Sequences, masks_of
from fourfold.parallel.loss.cross_entropy import LossGuard
from fourfold.parallel.options import Options

_ONE_BY_ONE = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
}  # kinds of layers that mix tokens by a mask alone
_BY_LENGTH = ("dynamic", "longrope")  # rotations that depend on the longest position of a batch


def let_share_sequences(model: nn.Module, grid: Grid, options: Options) -> None:
    """Set the attention of a model whose sequences are cut; raise if it would not be exact, or with these options was not tested."""
    if grid.sequence_ranks == 1:
        return
    name, share = type(model).__name__, grid.sequence_ranks
    for option, given in (
        ("compile=True", options.compile is True),
        (f"float8={options.float8!r}", options.float8 != "none"),
        ("activation_offloading=True", options.activation_offloading),
        ("roles of your own", options.roles is not None),
    ):
        if given:
            raise UnsupportedError(
                f"{option} with sequence_ranks={share} is not supported; leave one of them out"
            )
    why = next(_why_not(model), None)
    if why is not None:
        raise UnsupportedError(
            f"{name} cannot share sequences among sequence_ranks={share} ranks: {why}; use sequence_ranks=1"
        )
    set_attention(model, NAME)


def _why_not(model: nn.Module) -> Iterator[str]:
    config: Any = getattr(model, "config", None)
    if not getattr(model, "_supports_attention_backend", False):
        yield "its attention does not use transformers' attention interface"
    arguments = inspect.signature(model.forward).parameters
    if "position_ids" not in arguments:
        yield "its forward takes no position_ids"
    if getattr(config, "is_encoder_decoder", False):
        yield "it has an encoder and a decoder"
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = sorted({*(getattr(text, "layer_types", None) or ())} - _ONE_BY_ONE)
    if kinds:
        yield f"it has layers of the kind {', '.join(kinds)}"
    for rule in _rules_of_rotation(getattr(text, "rope_parameters", None)):
        if rule in _BY_LENGTH:
            yield f"its rotations ({rule}) depend on the longest position of a rank's batch"
    if getattr(text, "output_router_logits", False):
        yield "its auxiliary loss (output_router_logits) was not tested with them"
    if getattr(text, "attn_temperature_tuning", False):
        yield "it scales queries by their places in a rank's batch (attn_temperature_tuning)"
    towers = idle_towers(model)
    for module_name, module in model.named_modules():
        if any(f"{module_name}.".startswith(f"{tower}.") for tower in towers):
            continue
        if isinstance(module, nn.Conv1d) and module.kernel_size != (1,):
            yield f"{module_name} mixes neighbouring tokens"


def _rules_of_rotation(given: Any) -> Iterator[Any]:
    if isinstance(given, dict):
        yield given.get("rope_type")
        for value in given.values():
            yield from _rules_of_rotation(value)


def share_sequences(model: nn.Module, grid: Grid, guard: LossGuard | None) -> None:
    """Wrap the model's forward: the positions of all ranks make its masks."""
    if grid.sequence_ranks == 1:
        return
    inner, name = model.forward, type(model).__name__
    names = list(inspect.signature(inner).parameters)
    towers = idle_towers(model)
    names_of = {module: module_name for module_name, module in model.named_modules()}
    blocks = [b for b in find_blocks(model) if not any(names_of[b].startswith(f"{t}.") for t in towers)]
    is_checked = False

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_checked
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        _check_inputs(given, name, grid, shifts=guard is None or guard.shifts)
        positions: Tensor = given["position_ids"]
        sequences = Sequences.of(name, grid, positions, given.pop("row_checksums", None))
        # transformers reads documents off the positions of a rank, where there is no mask of the caller's.
        given["attention_mask"] = torch.ones_like(positions)
        with masks_of(sequences):
            output = inner(**given)
        if not is_checked:
            _check_blocks(blocks, names_of, sequences)
            is_checked = True
        return output

    model.forward = forward


def _check_inputs(given: dict[str, Any], name: str, grid: Grid, *, shifts: bool) -> None:
    share = f"sequence_ranks={grid.sequence_ranks}"
    cut = f"pass to {name} what fourfold.cut_sequences returns for the rows of the batch"
    ids, positions = given.get("input_ids"), given.get("position_ids")
    if not isinstance(ids, Tensor) or not isinstance(positions, Tensor):
        raise ValueError(f"{share} needs input_ids and position_ids: {cut}")
    if positions.shape != ids.shape or ids.shape[1] % 2:
        raise ValueError(
            f"position_ids of shape {tuple(positions.shape)} are not those of the two chunks of input_ids of shape {tuple(ids.shape)}: {cut}"
        )
    if given.get("attention_mask") is not None:
        raise ValueError(
            f"attention_mask is not supported with {share}: padding at the end of a row needs no mask, only no labels, and documents are "
            f"apart by their positions; {cut}"
        )
    if shifts and given.get("labels") is not None and given.get("shift_labels") is None:
        raise ValueError(f"labels are shifted before they are cut, so {share} needs shift_labels: {cut}")
    if not shifts and given.get("shift_labels") is not None:
        raise ValueError(
            f"{name} predicts tokens at their own place: give fourfold.cut_sequences shift=False"
        )
    if given.get("output_router_logits"):
        raise ValueError(f"output_router_logits=True is not supported with {share}; leave it out")
    if given.get("use_cache") or given.get("past_key_values") is not None:
        raise ValueError(f"use_cache=True is not supported with {share}; generate with another grid")


def _check_blocks(blocks: Sequence[nn.Module], names_of: dict[nn.Module, str], sequences: Sequences) -> None:
    """Has each block called its attention by the interface? What mixes tokens in another way would see a part of them."""
    for block in blocks:
        if not any(module in sequences.called for module in block.modules()):
            raise UnsupportedError(
                f"{names_of[block]} ({type(block).__name__}) of {sequences.model} calls no attention by transformers' interface, so it is "
                f"not known how it mixes tokens; use sequence_ranks=1 instead of {sequences.grid.sequence_ranks}"
            )
