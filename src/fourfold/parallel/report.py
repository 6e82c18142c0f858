"""What `parallelize` did: a row for each module, printable as a table."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fourfold.hf.parameter_layout import ParameterLayout, describe
from fourfold.hf.roles import Role
from fourfold.mesh.grid import Grid
from fourfold.parallel.lora import Lora, base_layouts, is_adapter
from fourfold.parallel.options import Activations, Options
from fourfold.parallel.replace_modules import Replaced
from fourfold.text_tables import as_text, table
from fourfold.weights.api import Weights
from fourfold.weights.overlap import SEQUENCE_PARALLEL_OPTIONS, STREAMED_OPTIONS


@dataclass(frozen=True)
class Decisions:
    """What was chosen for a model, and why."""

    weights: Weights
    why_weights: str
    activations: Activations
    why_activations: str
    is_compiled: bool
    why_compiled: str
    # Why a batch is not split; None if its halves alternate.
    why_unsplit: str | None
    recomputed_blocks: int
    # How many linears of blocks compute in float8, and which do not.
    in_float8: int
    not_in_float8: Sequence[str]
    in_nf4: Collection[str] = ()  # linears whose weights are packed
    experts: Sequence[str] = ()


@dataclass(frozen=True)
class Row:
    """One module: what it was, what it is now, where its parameters are, and why."""

    module: str
    role: str
    placement: str
    why: str


@dataclass(frozen=True)
class Report:
    """The outcome of `parallelize`; ``print(report)`` shows it as a table, with equal blocks in one row."""

    model: str
    grid: Grid = field(repr=False)
    rows: tuple[Row, ...] = field(repr=False)
    notes: tuple[str, ...]
    # The layout of every parameter, by its name in the parallel model.
    layouts: Mapping[str, ParameterLayout] = field(repr=False)
    interleaved: bool = False  # two half-batches alternate
    activations: Activations = "replicated"
    compiled: bool = False
    lora: Lora | None = None

    def local_parameters(self) -> int:
        """The number of parameters that this rank stores."""
        shards = (layout.shard(self.grid) for layout in self.layouts.values())
        return sum(math.prod(piece.stop - piece.start for piece in shard) for shard in shards)

    def with_unused(self, unused: set[str]) -> Report:
        """A copy with a note about the tensors of a checkpoint that the model does not have."""
        if not unused:
            return self
        some = ", ".join(sorted(unused)[:3]) + (", ..." if len(unused) > 3 else "")
        note = f"{len(unused)} tensors of the checkpoint are not in the model: {some}"
        return self.with_note(note)

    def with_note(self, note: str) -> Report:
        return replace(self, notes=(*self.notes, note))

    def __str__(self) -> str:
        groups: dict[tuple[str, str, str, str], int] = {}
        for row in self.rows:
            key = (re.sub(r"\.\d+(?=\.|$)", ".*", row.module), row.role, row.placement, row.why)
            groups[key] = groups.get(key, 0) + 1
        rows = [(module, str(count), *others) for (module, *others), count in groups.items()]
        text = ("role", "parameters", "why")
        modules = table(f"{self.model} on {self.grid}", ("module", "times", *text), rows, text=text)
        stored = f"this rank stores {self.local_parameters():,} parameters\n"
        return as_text(140, modules) + "\n".join((*self.notes, stored))


def compose_report(
    model_name: str,
    grid: Grid,
    roles: Sequence[Role],
    replaced: Replaced,
    options: Options,
    decisions: Decisions,
    caches: int,
    has_dropout: bool,
) -> Report:
    """The report: a row for each module, and a note for each decision and for each option without effect."""
    rows = tuple(
        Row(role.name, role.word, describe(replaced.by_module.get(role.name, [])), role.why) for role in roles
    )
    notes = list(replaced.notes)
    if caches:
        notes.append("config.use_cache set to False: training does not use a key/value cache")
    notes.append(
        f"weights: {decisions.weights} ({decisions.why_weights}) over z={grid.z}, gradients summed over data={grid.data}, "
        f"{options.precision}"
    )
    notes += decisions.experts
    if grid.sequence_ranks > 1:
        notes.append(
            f"sequences: each is shared by {grid.sequence_ranks} neighbours along z, which gather its keys and values in every attention"
        )
    notes.append(f"activation checkpointing: {options.checkpointing_words}")
    if options.activation_offloading:
        notes.append(_offloading(decisions.recomputed_blocks, grid.target))
    notes.append(f"activations: {decisions.activations} ({decisions.why_activations})")
    notes.append(
        f"blocks: {'compiled' if decisions.is_compiled else 'not compiled'} ({decisions.why_compiled})"
    )
    if options.lora is not None:
        notes.append(_lora(options.lora, replaced.layouts, options.precision, decisions.in_nf4))
    if decisions.in_float8:
        others = len(decisions.not_in_float8)
        example = f", such as {decisions.not_in_float8[0]}" if others else ""
        notes.append(
            f"float8: {options.float8} in {decisions.in_float8} linears of blocks; {others} others{example} and the head in {options.precision}"
        )
    if decisions.weights != "streamed" and (unused := options.overlap.without_effect(STREAMED_OPTIONS)):
        notes.append(f"{unused} with {decisions.weights} weights; use weights='streamed'")
    if decisions.activations == "replicated" and (
        unused := options.overlap.without_effect(SEQUENCE_PARALLEL_OPTIONS)
    ):
        notes.append(f"{unused} with replicated activations; leave it out")
    is_split = decisions.why_unsplit is None
    halves = "two half-batches alternate" if is_split else f"off ({decisions.why_unsplit})"
    notes.append(f"batch-split overlap: {halves}")
    if has_dropout:
        notes.append("dropout: equal where activations are replicated, independent where they are sharded")
    return Report(
        model_name,
        grid,
        rows,
        tuple(notes),
        replaced.layouts,
        is_split,
        decisions.activations,
        decisions.is_compiled,
        options.lora,
    )


def _lora(lora: Lora, layouts: Mapping[str, ParameterLayout], precision: str, packed: Collection[str]) -> str:
    adapters = {at.hf_name: math.prod(at.hf_shape) for at in layouts.values() if is_adapter(at.hf_name)}
    weights = {at.hf_name: math.prod(at.hf_shape) for at in base_layouts(layouts).values()}
    of_dropout = f", dropout {lora.dropout:g}" if lora.dropout else ""
    of_packed = ""
    if packed:
        count = sum(weights[f"{name}.weight"] for name in packed)
        of_packed = f"; but {count:,} of these, in {len(packed)} linears, in NF4"
    return (
        f"LoRA: rank {lora.rank}, scale {lora.scale:g}{of_dropout}, {sum(adapters.values()):,} parameters of {len(adapters) // 2} linears are trained; "
        f"{sum(weights.values()):,} are frozen, in {precision}" + of_packed
    )


def _offloading(recomputed_blocks: int, target: str) -> str:
    if target != "cuda":
        return f"activation_offloading=True has no effect on {target}; leave it out"
    if not recomputed_blocks:
        return (
            "activation_offloading=True has no effect where no block is recomputed; use activation_checkpointing='selective' or "
            "'full'"
        )
    return f"activation offloading: the inputs of {recomputed_blocks} blocks are in pinned host memory from forward to backward"
