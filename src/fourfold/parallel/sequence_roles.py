"""What each module does where activations are sharded over both tensor axes, and what prevents it.

Outside attention all work between linears is done token by token, so a rank may have any part of the tokens. Attention
needs complete sequences: each rank computes 1/(x*y) of the heads or, where x*y does not divide them, 1/x of the heads on
every y rank. The report says which.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from fourfold.errors import UnsupportedError
from fourfold.hf.anatomy import Anatomy, linear_shape
from fourfold.hf.roles import SEPARATE_KV, Role
from fourfold.mesh.axes import Axis
from fourfold.mesh.grid import Grid
from fourfold.parallel.options import ActivationsWanted
from fourfold.parallel.sequence import Cuts, Tokens

_TO_LATENT = ("latent", "mla_kv_a_proj")
_ONLY_IN_LATENT_ATTENTION = {*_TO_LATENT, "colwise_from_latent", "replicated"}


@dataclass
class SequenceRoles:
    """The decisions that `replace_modules.py` applies."""

    tokens: Tokens
    # Linears by name.
    cuts: dict[str, Cuts] = field(default_factory=dict)
    # The axes over which the gradient of a parameter has to be summed, by the name of its role's module or parameter.
    gradient_axes: dict[str, tuple[Axis, ...]] = field(default_factory=dict)
    # Attention modules whose heads are sharded over y as well.
    by_heads: set[str] = field(default_factory=set)
    attention: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def choose_activations(
    model: nn.Module, roles: Sequence[Role], grid: Grid, wanted: ActivationsWanted
) -> tuple[SequenceRoles | None, str]:
    """What each module does where tokens are sharded over x and y, or None if activations are replicated; and the reason."""
    if grid.x * grid.y == 1:
        return None, "x = y = 1: nothing to shard"
    if wanted == "replicated":
        return None, f"asked for: tokens are on each of x={grid.x} or of y={grid.y} ranks"
    try:
        found = shard_activations(model, roles, grid)
    except UnsupportedError as reason:
        if wanted == "sequence-parallel":
            raise
        return None, str(reason)
    return (
        found,
        f"tokens sharded over x={grid.x} and y={grid.y}; each rank has the logits of 1/{grid.y} of them",
    )


def shard_activations(model: nn.Module, roles: Sequence[Role], grid: Grid) -> SequenceRoles:
    """What each module does; raises `UnsupportedError` if this model's activations cannot be sequence-parallel."""
    name = type(model).__name__
    config = getattr(model, "config", None)
    anatomy = Anatomy(model)
    if anatomy.embedding is None or anatomy.head is None or not hasattr(model, "loss_function"):
        raise UnsupportedError(
            f"{name} is not a Hugging Face causal LM with an embedding and a head, between which tokens could be sharded over "
            f"x={grid.x} and y={grid.y}; use activations='replicated'"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"{name} has an encoder and a decoder with different tokens, but only one batch of tokens can be sharded over "
            f"x={grid.x} and y={grid.y}{_code(model.modules(), 'encoder')}; use activations='replicated'"
        )
    if any(getattr(m, "gradient_checkpointing", False) for m in model.modules()):
        raise UnsupportedError(
            f"{name}.gradient_checkpointing_enable() was called: its blocks would be recomputed without knowing which batch the "
            f"tokens sharded over x={grid.x} and y={grid.y} belong to; use activation_checkpointing='full' instead, or "
            "activations='replicated'"
        )
    lists = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    if not any(r.word == "norm" and not any(r.name.startswith(f"{n}.") for n in lists) for r in roles):
        owners, own = [n.rpartition(".")[0] for n in lists], [n.rpartition(".")[2] for n in lists]
        raise UnsupportedError(
            f"{name} has no norm after its last block, which would return tokens that are sharded over x={grid.x} and y={grid.y} to "
            f"the batch's shape{_code(map(anatomy.modules.get, owners), *own)}; use activations='replicated'"
        )
    with_latent = {r.name.rpartition(".")[0] for r in roles if r.word in _TO_LATENT}
    with_latent = {name for name in with_latent if anatomy.in_attention(f"{name}.")}
    for role in roles:
        parent, _, child = role.name.rpartition(".")
        is_allowed = parent in with_latent or _is_frozen(anatomy, role.name)
        if role.word in _ONLY_IN_LATENT_ATTENTION and not is_allowed:
            raise UnsupportedError(
                f"{role.name} has the role {role.word!r}, whose output is complete on each rank instead of sharded by tokens over "
                f"x={grid.x} and y={grid.y}{_code([anatomy.modules.get(parent)], child)}; use activations='replicated'"
            )
    out = SequenceRoles(Tokens(grid))
    by_parent: dict[str, list[Role]] = {}
    for role in roles:
        parent = role.name.rpartition(".")[0]
        if anatomy.in_attention(role.name):
            by_parent.setdefault(parent, []).append(role)
    reasons: dict[str, int] = {}
    for parent, members in by_parent.items():
        if not any(r.out_axis == "x" for r in members):
            continue
        out.attention.add(parent)
        why = _why_not_over_y(anatomy, parent, members, grid)
        if why is None:
            out.by_heads.add(parent)
        else:
            reasons[why] = reasons.get(why, 0) + 1
    out.notes += [
        f"attention's core is computed on each of the {grid.y} y ranks: {why} ({count} modules)"
        for why, count in reasons.items()
    ]
    for role in roles:
        if role.in_axis is not None or role.out_axis is not None:
            out.cuts[role.name] = _cuts(role, anatomy, out, grid)
        out.gradient_axes[role.name] = tuple(a for a in _gradient_axes(role, out) if grid.size(a) > 1)
    return out


def _is_frozen(anatomy: Anatomy, name: str) -> bool:
    """Is it a parameter without a gradient, or a module of such parameters?"""
    holder, _, key = name.rpartition(".")
    if name in anatomy.modules:
        return not any(p.requires_grad for p in anatomy.modules[name].parameters())
    parameter = anatomy.modules[holder]._parameters.get(key)
    return parameter is not None and not parameter.requires_grad


def _code(owners: Iterable[nn.Module | None], *children: str) -> str:
    """The line of code in which one of ``owners`` uses one of its ``children``."""
    for owner in filter(None, owners):
        try:
            lines, first = inspect.getsourcelines(type(owner).forward)
        except (OSError, TypeError):  # the class has no source file
            continue
        for number, line in enumerate(lines, first):
            if any(re.search(rf"self\.{child}\b", line) for child in children):
                file = Path(inspect.getsourcefile(type(owner)) or "").name
                return f" ({file}:{number}: {line.strip()})"
    return ""


def _why_not_over_y(anatomy: Anatomy, parent: str, members: Sequence[Role], grid: Grid) -> str | None:
    """Why the heads of an attention module cannot be sharded over y as well; None if they can."""
    parts = grid.x * grid.y
    if grid.y == 1:
        return None
    if any(r.word in _TO_LATENT for r in members):
        return "its latent projections are complete on each of them"
    first = next(r for r in members if r.out_axis == "x")
    if anatomy.linear_heads(first.name) is not None:
        return "linear attention works on all heads of an x rank"
    heads, kv_heads = anatomy.heads(first.name)
    kv_heads = kv_heads or heads
    if not heads or not kv_heads:
        return "its number of heads is not known"
    if heads % parts:
        return f"x*y={parts} does not divide its {heads} heads"
    if kv_heads % parts and parts % kv_heads:
        return f"x*y={parts} neither divides its {kv_heads} key/value heads nor is a multiple of them"
    for role in members:
        if role.word in ("norm_x", "heads"):
            return f"{role.name.rpartition('.')[2]} works on all heads of an x rank"
        module = anatomy.modules.get(role.name)
        if role.in_axis is None or module is None:
            continue
        in_features, out_features = linear_shape(module)
        shared = kv_heads % parts != 0 and SEPARATE_KV.search(role.name) is not None
        if kv_heads % parts and role.segments is not None:
            return f"its {kv_heads} key/value heads are fused with the query heads"
        if role.out_axis == "x" and not shared:
            uneven = next((w for w in role.segments or (out_features,) if w % parts), None)
            if uneven is not None:
                return f"x*y={parts} does not divide the {uneven} output features of {role.name.rpartition('.')[2]}"
        if role.out_axis == "y" and in_features % parts:
            return f"x*y={parts} does not divide the {in_features} input features of {role.name.rpartition('.')[2]}"
    separate = any(SEPARATE_KV.search(r.name) for r in members)
    if kv_heads % parts and not separate:
        return f"its {kv_heads} key/value heads are fused with the query heads"
    return None


def _cuts(role: Role, anatomy: Anatomy, out: SequenceRoles, grid: Grid) -> Cuts:
    parent = role.name.rpartition(".")[0]
    if role.word in _TO_LATENT and _inside(role, out.attention):
        return Cuts("tokens", "whole", gathers_output=True)
    if parent not in out.attention:
        return Cuts("tokens", "tokens")
    by_heads = parent in out.by_heads and anatomy.linear_heads(role.name) is None
    if role.in_axis is None:
        return Cuts("whole", "whole")
    if role.out_axis == "y":
        return Cuts("features" if by_heads else "whole", "tokens")
    if not by_heads:
        return Cuts("tokens", "whole")
    heads, kv_heads = anatomy.heads(role.name)
    assert heads
    kv_heads = kv_heads or heads
    if kv_heads % (grid.x * grid.y) == 0 or SEPARATE_KV.search(role.name) is None:
        return Cuts("tokens", "features")
    # This x rank has fewer key/value heads than there are y ranks: each y rank uses one of them.
    here = max(1, kv_heads // grid.x)
    width = linear_shape(anatomy.modules[role.name])[1] // kv_heads
    used = grid.coordinate("y") * here // grid.y
    return Cuts("tokens", "whole", slice(used * width, (used + 1) * width), kv_heads)


def _gradient_axes(role: Role, out: SequenceRoles) -> tuple[Axis, ...]:
    """The axes along which ranks use the same values of a parameter for different tokens or heads."""
    in_attention, by_heads = _inside(role, out.attention), _inside(role, out.by_heads)
    match role.word:
        case "norm" | "features" | "embedding_colwise" | "router" | "gate":
            return ("x",)
        case "norm_x" | "heads":
            return () if in_attention else ("y",)
        case "replicated_with_grad_allreduce":
            return ("x",) if in_attention and not by_heads else ("x", "y")
    return ()


def _inside(role: Role, modules: set[str]) -> bool:
    parent = role.name.rpartition(".")[0]
    return any(parent == name or parent.startswith(f"{name}.") for name in modules)


def head_parts(name: str, roles: SequenceRoles | None, grid: Grid) -> tuple[int, int]:
    """The number of parts into which the heads of an attention module are split, and the index of this rank's part."""
    if roles is None or name not in roles.by_heads:
        return grid.x, grid.coordinate("x")
    return math.prod((grid.x, grid.y)), grid.coordinate("x") * grid.y + grid.coordinate("y")
