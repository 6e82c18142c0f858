"""The order of transformations, from a Hugging Face model to a parallel one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from fourfold.errors import UnsupportedError
from fourfold.hf.anatomy import find_blocks
from fourfold.hf.hub_format import ModelFiles
from fourfold.hf.init_recorder import record_initialization, restore_buffers
from fourfold.hf.init_replay import InitReplay
from fourfold.hf.roles import assign
from fourfold.hf.safetensors_reader import CheckpointFiles
from fourfold.mesh.axes import Z_AND_X
from fourfold.mesh.grid import Grid, join_z_and_x
from fourfold.mesh.offloading import Copies, Offloading, copies_of
from fourfold.parallel.batch_split import BatchSplit, split_batches, why_not_split
from fourfold.parallel.checkpointing import ActivationCheckpointing, by_blocks
from fourfold.parallel.context.model import let_share_sequences, share_sequences
from fourfold.parallel.dropout import Dropout, seed_ranks, uses_dropout
from fourfold.parallel.experts.balance import asks_for_balance_loss, balance_loss
from fourfold.parallel.experts.choice import Experts, OwnedExperts, choose_owned
from fourfold.parallel.experts.function import use_experts_function
from fourfold.parallel.float8.choice import Float8Recipe, check_device, linears_in_float8
from fourfold.parallel.lora import (
    Lora,
    base_layouts,
    check_not_experts,
    fill_adapters,
    freeze,
    linears_in_nf4,
)
from fourfold.parallel.loss.cross_entropy import chunk_loss, guard_loss
from fourfold.parallel.options import (
    ActivationsWanted,
    Options,
    check_model,
)
from fourfold.parallel.replace_modules import ModuleReplacement
from fourfold.parallel.report import Decisions, Report, compose_report
from fourfold.parallel.sequence_roles import choose_activations
from fourfold.parallel.wrap import Inside, disable_caches, wrap_block, wrap_model
from fourfold.weights.api import Accumulation, Precision, Weights
from fourfold.weights.load import init_shards, load_shards
from fourfold.weights.overlap import Overlap
from fourfold.weights.shard import choose_weights, shard_weights


def parallelize(
    model: nn.Module,
    grid: Grid,
    *,
    roles: Mapping[str, str] | None = None,
    precision: Precision = "fp32",
    activations: ActivationsWanted = "auto",
    activation_checkpointing: ActivationCheckpointing = "none",
    checkpointed_blocks: int | None = None,
    weights: Weights = "auto",
    accumulation: Accumulation = "whole",
    overlap: Overlap | None = None,
    chunked_loss: bool = True,
    compile: bool | None = False,
    activation_offloading: bool = False,
    float8: Float8Recipe = "none",
    lora: Lora | None = None,
    experts: Experts = "auto",
    checkpoint: str | Path | None = None,
    seed: int = 0,
) -> Report:
    """Turn ``model`` into its parallel form on ``grid``, in place; the report says what each module became.

    Args:
        model: an unmodified Hugging Face causal LM, or an `nn.Module` with ``roles``. Built on ``meta`` it never exists
            in full: each rank reads its shards from ``checkpoint``, or initialises them. A model with real weights keeps
            them.
        roles: the role of each module by its name; `*` stands for one part of a name, at the beginning for any number of parts.
        precision: of the computation; master weights and gradients are fp32. A model whose parameters are all frozen is stored in it.
        activations: sharded over both x and y (``sequence-parallel``, as in Megatron-LM), or sharded over one
            and replicated over the other (``replicated``). ``auto`` is the first where the model's code allows it; the
            report says why not where it does not. With y > 1 and the first, the logits are those of this rank's tokens.
        activation_checkpointing: ``full`` recomputes each block in backward; ``selective`` all but the results of its linears and
            of attention.
        checkpointed_blocks: how many blocks, from the first, have it; the others have the next weaker kind. None: all.
        weights: how they are stored over z and data: by ``fsdp2``, or ``streamed`` by Fourfold's own schedule.
        accumulation: of the gradients of several micro-batches (`no_sync`): ``whole`` on each rank, reduced once, or ``sharded``, reduced
            over z in each micro-batch, which needs less memory.
        overlap: which communication overlaps with computation.
        chunked_loss: compute the loss of ``labels`` by chunks of tokens, with only a chunk of the logits in memory.
        compile: compile each block by Inductor, as one graph; half-batches do not alternate then. None: on GPUs, if tensor ranks draw no dropout.
        activation_offloading: keep the inputs of recomputed blocks in pinned host memory from forward to backward; for GPUs.
        float8: of the matmuls of linears in blocks. ``rowwise_with_gw_hp``: outputs and the gradients of inputs in e4m3, with a scale for
            each row, as in torchao's recipe of that name; the gradients of weights in ``precision``.
        lora: train adapters of low rank (`Lora`) instead of the weights, which are frozen, and stored in ``precision``, or in NF4.
        experts: gathered over z where they are used, as other weights are, with their inner features sharded over y and x (``cut``); or
            owned by ranks, to which the tokens are sent: of z (``("z",)``), of x (``("x",)``) or of both (``("z", "x")``). Axes that are
            not named do as with ``cut``. ``auto`` is ``cut``; `fourfold.plan` prices all of them.
        checkpoint: a folder of safetensors, as `save_pretrained` writes it.
        seed: initial weights are the same values on every grid, by the model's own rules of initialisation.

    Make the optimizer afterwards: the model has other parameters then.

    Raises `UnsupportedError` where the grid would not give the values of one process.

    Example:
        >>> with torch.device("meta"):
        ...     fresh = LlamaForCausalLM(config)
        >>> report = parallelize(fresh, grid, seed=0)
        >>> report.local_parameters() == sum(p.numel() for p in fresh.parameters())  # all of them on one rank
        True
    """
    on_meta = any(p.is_meta for p in model.parameters())
    options = Options(
        roles,
        precision,
        activations,
        activation_checkpointing,
        checkpointed_blocks,
        weights,
        accumulation,
        overlap or Overlap(),
        chunked_loss,
        compile,
        activation_offloading,
        float8,
        lora,
        experts,
    )
    # transformers' rules of conversion are those of the stock model.
    files = ModelFiles(CheckpointFiles(checkpoint), model) if checkpoint is not None else None
    report, replays = arrange(model, grid, options, seed=seed if on_meta and files is None else None)

    # 7. Values for the shards of a model that was built on meta, or that a checkpoint has.
    unused: set[str] = set()
    if on_meta:
        model.to_empty(device=grid.device)
        restore_buffers(model, grid.device, from_checkpoint=files.names() if files else ())
    else:
        _move_buffers(model, grid.device)
    layouts = base_layouts(report.layouts)
    if files is not None:
        unused = load_shards(model, layouts, files, grid)
    elif on_meta:
        init_shards(model, layouts, replays, grid, seed)
    if lora is not None:
        fill_adapters(model, lora, report.layouts, grid, seed)
    seed_ranks(grid, seed)
    return report.with_unused(unused)


def arrange(
    model: nn.Module,
    grid: Grid,
    options: Options,
    *,
    seed: int | None = None,
    checkpointing: Sequence[ActivationCheckpointing] | None = None,
    is_dry: bool = False,
    copies: Copies | None = None,
) -> tuple[Report, dict[str, InitReplay]]:
    """Everything but the values: a model on meta has none yet, and in a dry run never.

    With a ``seed`` also return how each parameter is initialised, by the model's own rules. ``checkpointing`` is that of each
    block, if it is not as the options say. A dry run follows blocks operator by operator, also those that a run compiles, and has
    ``copies`` to the host of its own.
    """
    check_model(model)
    weights, why_weights = choose_weights(options.weights, grid)
    overlap = options.overlap
    model_name = type(model).__name__  # fully_shard changes the class

    owned = choose_owned(model, grid, options.experts)
    if owned.names and grid.sequence_ranks > 1:
        raise UnsupportedError(
            f"experts={options.experts!r} with sequence_ranks={grid.sequence_ranks} is not supported; use experts='cut', or sequence_ranks=1"
        )

    # 1. Sequences that neighbours along z share, and the role of each module.
    let_share_sequences(model, grid, options)
    if owned.axis == Z_AND_X:
        join_z_and_x(grid)
    roles = assign(model, grid, options.roles, ("y",) if owned.over_x else ("x", "y"))
    sequence, why_activations = choose_activations(model, roles, grid, options.activations)
    tokens = sequence.tokens if sequence else None
    replays = record_initialization(model, seed=seed) if seed is not None else {}
    dropout = Dropout(grid) if grid.x * grid.y > 1 and uses_dropout(model) else None
    is_compiled, why_compiled = options.compile, "asked for"
    if is_compiled is None:
        is_compiled = grid.target == "cuda" and dropout is None and grid.sequence_ranks == 1
        why_compiled = "auto: tensor ranks draw dropout" if dropout is not None else f"auto: on {grid.target}"
        if grid.sequence_ranks > 1:
            why_compiled = "auto: ranks share sequences"
    if dropout is not None and is_compiled:
        raise UnsupportedError(
            f"{model_name} has dropout, whose random numbers on x={grid.x}, y={grid.y} ranks are set between layers, which cannot be "
            "in the one graph of compile=True; use compile=False, or rates of 0"
        )

    draws = options.lora is not None and options.lora.dropout > 0
    if (why_eager := _why_not_compiled(model, options.lora, owned)) is not None:
        if options.compile:
            raise UnsupportedError(f"{why_eager}, so compile=True is not supported; use compile=False")
        if options.compile is None:
            is_compiled, why_compiled = False, f"auto: {why_eager}"
    experts_function = use_experts_function(model, is_compiled=bool(is_compiled))
    in_float8, not_in_float8 = set[str](), list[str]()
    if options.float8 != "none":
        check_device(grid, options.precision)
        in_float8, not_in_float8 = linears_in_float8(model)

    packed = set[str]()
    if options.lora is not None:
        check_not_experts(model, options.lora)
        if options.lora.quantization == "nf4":
            packed = linears_in_nf4(model)
    is_frozen = not any(p.requires_grad for p in model.parameters())  # a reference, as DPO has
    if options.lora is not None or is_frozen:
        freeze(model, options.precision, packed)

    # 2. Linears, norms and embeddings on the grid; every parameter becomes this rank's block, a DTensor.
    inside = Inside()
    replaced = ModuleReplacement(
        model, grid, dropout, inside, overlap, sequence, weights, in_float8, options.lora, packed, owned
    ).run(roles)

    # 3. The loss of logits whose vocabulary is sharded over x, and of a batch that is sharded over z and data.
    guard = guard_loss(model, grid, replaced.vocab_size)
    head_loss = chunk_loss(model, grid, guard) if options.chunked_loss else None
    caches = disable_caches(model)

    # 4. Recomputation of activations and the bounds of random numbers, block by block.
    blocks = find_blocks(model)
    names = {module: name for name, module in model.named_modules()}
    if checkpointing is None:
        lists = by_blocks(options.activation_checkpointing, options.checkpointed_blocks, len(blocks))
        checkpointing = [kind for kind, count in lists for _ in range(count)]
    offloading = None
    if options.activation_offloading and (copies := copies or copies_of(grid)) is not None:
        offloading = Offloading(copies)
    for block, kind in zip(blocks, checkpointing, strict=True):
        wrap_block(
            block,
            names[block],
            inside,
            dropout,
            checkpointing=kind,
            tokens=tokens,
            is_compiled=is_compiled and not is_dry,
            offloading=None if kind == "none" else offloading,
        )
    share_sequences(model, grid, guard)
    wrap_model(model, inside, replaced.groups, dropout, guard, tokens, head_loss)
    # Half-batches have sums of their own, and one auxiliary loss.
    balance = balance_loss(model, grid, by_tokens=tokens is not None, is_compiled=is_compiled)
    if balance is not None:
        balance.collect()

    # 5. Two half-batches alternate, where activations are sent.
    split = BatchSplit.of(grid)
    why_unsplit = why_not_split(
        model, overlap, grid, streamed=weights == "streamed", uses_dropout=dropout is not None or draws
    )
    if is_compiled:
        why_unsplit = "blocks are compiled"
    if why_unsplit is None:
        # Where activations are sent, the vocabulary or the hidden features are sharded.
        assert guard is not None
        split_batches(model, split, replaced.groups, guard.count, tokens)
    if balance is not None:
        balance.add()

    # 6. Weights on z and data.
    shard_weights(
        model,
        grid,
        blocks,
        options.precision,
        weights,
        overlap,
        half_batches=split.half_batches,
        embedding=replaced.embedding,
        head=replaced.head,
        keeps_head=head_loss is None,
        accumulation=options.accumulation,
        is_compiled=is_compiled and not is_dry,
        owners=replaced.owners,
    )
    decisions = Decisions(
        weights,
        why_weights,
        "sequence-parallel" if tokens else "replicated",
        why_activations,
        is_compiled,
        why_compiled,
        why_unsplit,
        sum(kind != "none" for kind in checkpointing),
        len(in_float8),
        not_in_float8,
        packed,
        [note for note in (owned.note, experts_function) if note is not None],
    )
    report = compose_report(
        model_name, grid, roles, replaced, options, decisions, caches, dropout is not None
    )
    return report, replays


def _why_not_compiled(model: nn.Module, lora: Lora | None, owned: OwnedExperts) -> str | None:
    if owned.names:
        return "ranks own experts, to which as many rows are sent as routers say"
    if any(type(module).__name__.endswith("GatedDeltaNet") for module in model.modules()):
        # Seen with torch 2.13.0 and transformers 5.23.0, in the stock model as well.
        return "the gated delta rule is traced to a graph that fails at run time"
    if asks_for_balance_loss(model):
        return "the auxiliary loss (output_router_logits) reads the logits of routers inside blocks"
    if lora is None:
        return None
    if lora.dropout:
        return "adapters have dropout, whose seed is drawn in each forward"
    return "weights are in NF4, and a graph may keep their numbers" if lora.quantization != "none" else None


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(device)
