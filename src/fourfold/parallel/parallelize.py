"""The one function that states the whole order of transformations, from a Hugging Face model to a parallel one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fourfold.errors import UnsupportedError
from fourfold.hf.init_recorder import record_initialization, restore_buffers
from fourfold.hf.init_replay import InitReplay
from fourfold.hf.roles import Role, assign
from fourfold.hf.safetensors_reader import CheckpointFiles
from fourfold.mesh.grid import Grid
from fourfold.parallel.batch_split import BatchSplit, interleave, why_not
from fourfold.parallel.dropout import Dropout, seed_ranks
from fourfold.parallel.load import init_shards, load_shards
from fourfold.parallel.loss import guard_loss
from fourfold.parallel.replace_modules import replace_modules
from fourfold.parallel.report import Report, Row, describe
from fourfold.parallel.sequence import Activations, ActivationsWanted
from fourfold.parallel.sequence_roles import SequenceRoles, cut_activations
from fourfold.parallel.wrap import Inside, wrap_block, wrap_model
from fourfold.weights.api import Precision, Weights, choose_weights, is_streamed, shard_weights
from fourfold.weights.overlap import OF_STREAMED_WEIGHTS, OF_TOKEN_SHARDED, Overlap

ActivationCheckpointing = Literal["none", "full"]


def parallelize(
    model: nn.Module,
    grid: Grid,
    *,
    roles: Mapping[str, str] | None = None,
    precision: Precision = "fp32",
    activations: ActivationsWanted = "auto",
    activation_checkpointing: ActivationCheckpointing = "none",
    weights: Weights = "auto",
    overlap: Overlap | None = None,
    checkpoint: str | Path | None = None,
    seed: int = 0,
) -> Report:
    """Turn ``model`` into its parallel form on ``grid``, in place; the report says what each module became.

    ``model`` is an unmodified Hugging Face causal LM, or an `nn.Module` with ``roles``. Built on ``meta`` it never
    exists whole: each rank reads its shards from ``checkpoint`` (a folder of safetensors), or draws them, the same
    numbers on every grid, from ``seed`` by the model's own rules of initialisation. A model with real weights keeps
    them. ``activations`` are cut over both x and y (``token-sharded``), or over one and replicated over the other
    (``replicated``); ``auto`` is the first where the model's code allows it, and the report says why not where it does not.
    With y > 1 and the first, the logits are those of this rank's tokens. ``weights`` says how they are kept on z and data: by
    ``fsdp2``, or ``streamed`` by Fourfold's own schedule; ``overlap`` what hides behind computation. Make the optimizer afterwards: the model has other parameters then.

    Raises `UnsupportedError` where the grid would not give the numbers of one process.

    Example:
        >>> with torch.device("meta"):
        ...     fresh = LlamaForCausalLM(config)
        >>> report = parallelize(fresh, grid, seed=0)
        >>> report.local_parameters() == sum(p.numel() for p in fresh.parameters())  # all of them on one rank
        True
    """
    on_meta = any(p.is_meta for p in model.parameters())
    report, recipes = arrange(
        model,
        grid,
        roles=roles,
        precision=precision,
        activations=activations,
        activation_checkpointing=activation_checkpointing,
        weights=weights,
        overlap=overlap,
        seed=seed if on_meta and checkpoint is None else None,
    )

    # 7. Numbers for the shards of a model that was built on meta, or that a checkpoint has.
    notes = []
    with CheckpointFiles(checkpoint) if checkpoint is not None else nullcontext() as files:
        if on_meta:
            model.to_empty(device=grid.device)
            restore_buffers(model, grid.device, from_checkpoint=files.names() if files else ())
        else:
            _move_buffers(model, grid.device)
        if files is not None:
            unused = load_shards(model, report.layouts, files, grid)
            if unused:
                notes.append(f"{len(unused)} tensors of the checkpoint are not in the model: {_some(unused)}")
        elif on_meta:
            init_shards(model, report.layouts, recipes, grid, seed)
    seed_ranks(grid, seed)
    return replace(report, notes=(*report.notes, *notes))


def arrange(
    model: nn.Module,
    grid: Grid,
    *,
    roles: Mapping[str, str] | None = None,
    precision: Precision = "fp32",
    activations: ActivationsWanted = "auto",
    activation_checkpointing: ActivationCheckpointing = "none",
    weights: Weights = "auto",
    overlap: Overlap | None = None,
    seed: int | None = None,
) -> tuple[Report, dict[str, InitReplay]]:
    """Everything but the numbers: a model on meta has none yet, and in a dry run never.

    With a ``seed`` also how each parameter is initialised, by the model's own rules.
    """
    _check_options(model, precision, activations, activation_checkpointing, weights)
    weights, why_weights = choose_weights(weights, grid)
    overlap = overlap or Overlap()
    model_name = type(model).__name__  # fully_shard changes the class
    notes: list[str] = []

    # 1. Which module plays which role.
    assigned = assign(model, grid, roles)
    sequence_roles, why_activations = _cut_by_tokens(model, assigned, grid, activations)
    tokens = sequence_roles.tokens if sequence_roles else None
    recipes = record_initialization(model, seed=seed) if seed is not None else {}
    dropout = Dropout(grid) if _uses_dropout(model) and grid.x * grid.y > 1 else None

    # 2. Linears, norms and embeddings on the grid; every parameter becomes this rank's block, a DTensor.
    inside = Inside()
    swapped = replace_modules(model, grid, assigned, dropout, inside, overlap, sequence_roles)
    notes += swapped.notes

    # 3. The loss of logits whose vocabulary is cut over x, and of a batch that is cut over z and data.
    guard = guard_loss(model, grid, swapped.vocab_size)
    # The part of a multimodal model that reads text has a configuration of its own.
    caching = [m.config for m in model.modules() if getattr(getattr(m, "config", None), "use_cache", None)]
    if caching:
        for config in caching:
            config.use_cache = False  # type: ignore[union-attr]
        notes.append("config.use_cache set to False: training keeps no key/value cache")

    # 4. Recomputation of activations and the bounds of random numbers, block by block.
    blocks = find_blocks(model)
    names = {module: name for name, module in model.named_modules()}
    recomputed = activation_checkpointing == "full"
    for block in blocks:
        wrap_block(block, names[block], inside, dropout, recomputed=recomputed, tokens=tokens)
    wrap_model(model, inside, swapped.groups, dropout, guard, tokens)

    # 5. The halves of a batch take turns, where activations are sent.
    lanes = BatchSplit.of(grid)
    one_piece = why_not(
        model, overlap, grid, streamed=weights == "streamed", uses_dropout=dropout is not None
    )
    if one_piece is None:
        assert guard is not None  # where activations are sent, the vocabulary or the hidden features are cut
        interleave(model, lanes, swapped.groups, guard.count, tokens)

    # 6. Weights on z and data.
    shard_weights(
        model,
        grid,
        blocks,
        precision,
        weights,
        overlap,
        lanes=lanes.count,
        embedding=swapped.embedding,
        head=swapped.head,
    )

    rows = tuple(
        Row(role.name, role.word, describe(swapped.by_module.get(role.name, [])), role.why)
        for role in assigned
    )
    notes.append(
        f"weights: {weights} ({why_weights}) over z={grid.z}, gradients summed over data={grid.data}, {precision}"
    )
    notes.append(f"activation checkpointing: {activation_checkpointing}, {len(blocks)} blocks")
    cut: Activations = "token-sharded" if tokens else "replicated"
    notes.append(f"activations: {cut} ({why_activations})")
    if weights != "streamed" and (idle := overlap.without_effect(OF_STREAMED_WEIGHTS)):
        notes.append(f"{idle} with {weights} weights; use weights='streamed'")
    if tokens is None and (idle := overlap.without_effect(OF_TOKEN_SHARDED)):
        notes.append(f"{idle} with replicated activations; leave it out")
    halves = "take turns" if one_piece is None else f"do not take turns ({one_piece})"
    notes.append(f"interleaving: the halves of a batch {halves}")
    if dropout is not None:
        notes.append("dropout: equal where activations are replicated, independent where they are cut")
    report = Report(model_name, grid, rows, tuple(notes), swapped.layouts, one_piece is None, cut)
    return report, recipes


def _cut_by_tokens(
    model: nn.Module, assigned: Sequence[Role], grid: Grid, activations: ActivationsWanted
) -> tuple[SequenceRoles | None, str]:
    """What each module does where tokens are cut over x and y, or None; and why."""
    if grid.x * grid.y == 1:
        return None, "x = y = 1: nothing to cut"
    if activations == "replicated":
        return None, f"asked for: tokens are on each of x={grid.x} or of y={grid.y} ranks"
    try:
        roles = cut_activations(model, assigned, grid)
    except UnsupportedError as refusal:
        if activations == "token-sharded":
            raise
        return None, str(refusal)
    return roles, f"tokens cut over x={grid.x} and y={grid.y}; each rank has the logits of 1/{grid.y} of them"


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost repeated modules with parameters: the elements of the model's lists of layers."""
    blocks: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                blocks.extend(m for m in child if next(m.parameters(), None) is not None)
            else:
                visit(child)

    visit(model)
    return blocks


def _check_options(
    model: nn.Module, precision: str, activations: str, activation_checkpointing: str, weights: str
) -> None:
    if precision not in ("fp32", "bf16"):
        raise ValueError(f"precision {precision!r} is not known; use 'fp32' or 'bf16'")
    if activations not in get_args(ActivationsWanted):
        raise ValueError(
            f"activations {activations!r} is not known; use 'auto', 'token-sharded' or 'replicated'"
        )
    if activation_checkpointing not in ("none", "full"):
        raise ValueError(
            f"activation_checkpointing {activation_checkpointing!r} is not known; use 'none' or 'full'"
        )
    if weights not in get_args(Weights):
        raise ValueError(f"weights {weights!r} is not known; use 'auto', 'fsdp2' or 'streamed'")
    if isinstance(model, FSDPModule) or is_streamed(model):
        name = type(model).__name__.removeprefix("FSDP")
        raise ValueError(f"{name} is parallel already; build it anew for another grid")
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            raise ValueError(
                f"{name} is {parameter.dtype}, but master weights are fp32; build the model in fp32 and use "
                "precision='bf16' to compute in bf16"
            )


def _uses_dropout(model: nn.Module) -> bool:
    """A dropout module, or any module or config that holds a rate; a constant in a function's call is not seen."""
    if any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules()):
        return True
    config: Any = getattr(model, "config", None)
    holders = [vars(m) for m in model.modules()]
    if hasattr(config, "to_dict"):
        whole = config.to_dict()
        holders += [whole, *(part for part in whole.values() if isinstance(part, dict))]
    return any(
        "drop" in str(key) and isinstance(value, float) and value > 0
        for holder in holders
        for key, value in holder.items()
    )


def _some(names: set[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (", ..." if len(names) > len(first) else "")


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(device)
