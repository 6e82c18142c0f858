"""Assigns a role to each module, or explains why a module is unsupported. The roles are those of `role_words.py`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from fourfold.errors import UnsupportedError
from fourfold.hf.anatomy import (
    HEAD_ATTRIBUTES,
    idle_towers,
    is_linear,
    linear_shape,
    text_root,
)
from fourfold.hf.experts import beside_experts, check_jitter, storage_of
from fourfold.hf.norm_formula import Formula, epsilon_of, recognise
from fourfold.hf.parameter_layout import chunk
from fourfold.hf.role_words import (
    BESIDE_EXPERTS,
    GIVEN,
    LINEAR_AXES,
    OF_EMBEDDINGS,
    OF_EXPERTS,
    OF_KEPT_LINEARS,
    OF_NORMS,
    OF_PARAMETERS,
    RoleWords,
    matches,
)
from fourfold.mesh.axes import Axis
from fourfold.mesh.grid import Grid


@dataclass(frozen=True)
class Role:
    """The role of one module, or of one parameter that a module holds directly."""

    name: str
    word: str
    why: str
    # Linear layers: the axes of input and output features, and the widths of the segments of a fused projection, or of its channels.
    in_axis: Axis | None = None
    out_axis: Axis | None = None
    segments: tuple[int, ...] | None = None
    # Norms: their formula and number of features.
    formula: Formula | None = None
    features: int = 0
    head: bool = False
    # The number of key/value heads, if each of them is replicated on several x ranks.
    replicated_heads: int = 0


SEPARATE_KV = re.compile(r"(^|\.)(k_proj|v_proj|key|value|k|v)$")


def dim_of_heads(parameter: Tensor) -> int:
    """The dim that counts heads: the first that is not of size 1."""
    return next((dim for dim, size in enumerate(parameter.shape) if size > 1), 0)


def assign(
    model: nn.Module,
    grid: Grid,
    given: Mapping[str, str] | None = None,
    expert_axes: Sequence[Axis] = ("x", "y"),
) -> list[Role]:
    """A role for each module that holds parameters; raises `UnsupportedError` where exact results are impossible.

    ``expert_axes`` shard the inner features of experts.
    """
    return _Assignment(model, grid, given or {}, expert_axes).roles()


class _Assignment:
    def __init__(
        self, model: nn.Module, grid: Grid, given: Mapping[str, str], expert_axes: Sequence[Axis]
    ) -> None:
        self.model, self.grid, self.expert_axes = model, grid, expert_axes
        self.words = RoleWords(model, grid, given)
        self.family, self.anatomy = self.words.family, self.words.anatomy
        # Routers and gates, by name.
        self.beside: dict[str, tuple[str, str]] = {}

    def roles(self) -> list[Role]:
        self.beside = self._find_beside()
        self.words.check_words(self.beside)
        if self.grid.x == self.grid.y == 1:
            # Only the batch and the storage of weights are sharded: each module computes as before.
            return [
                Role(name, "replicated", "x = y = 1")
                for name, module in self.anatomy.modules.items()
                if module._parameters
            ]
        if self.family.unsupported:
            raise UnsupportedError(
                f"{type(self.model).__name__}: {self.family.unsupported}, so y={self.grid.y}, x={self.grid.x} is unsupported; use x=1 "
                "and y=1 (z and data alone need no roles)"
            )
        hidden = self.anatomy.hidden_size
        if hidden is not None:
            self._check_divides("y", f"hidden_size={hidden} of {type(self.model).__name__}", hidden)
        self.words.check_styles()
        roles: list[Role] = []
        idle = idle_towers(self.model)
        text = text_root(self.model) if idle else ""
        for name, module in self.anatomy.modules.items():
            tower = next((t for t in idle if name == t or name.startswith(f"{t}.")), None)
            around_text = bool(idle) and (not name or text.startswith(f"{name}."))
            if tower is not None or around_text:
                if module._parameters:
                    roles.append(Role(name, "idle", f"{tower or name}: not part of the language model"))
            elif (reader := self._reader(name)) is not None:
                if reader == name:
                    roles.append(Role(name, *self.beside[name]))
            elif self.words.is_experts(name, module):
                roles.append(self._experts(name, module))
            elif isinstance(module, nn.Embedding):
                roles.append(self._embedding(name, module))
            elif is_linear(module):
                roles.append(self._linear(name, module))
            elif self.words.is_norm(name, module):
                roles.append(self._norm(name, module))
            else:
                roles += self._own_parameters(name, module)
        return [role for role in roles if role.word != "without parameters"]

    # -- kinds of modules ------------------------------------------------------------------------------------

    def _embedding(self, name: str, module: nn.Embedding) -> Role:
        word, why = self.words.word(name)
        if module is self.anatomy.embedding or word == "embedding_rowwise":
            if type(module) is not nn.Embedding and not hasattr(module, "embed_scale"):
                raise UnsupportedError(
                    f"{name} is a {type(module).__name__}, which is not nn.Embedding nor one with an embed_scale: what "
                    "its forward does with a part of the vocabulary is not known; use x=1 and y=1"
                )
            self.words.check_fit(name, module, word, ("embedding_rowwise",))
            self._check_divides("y", f"the {module.embedding_dim} features of {name}", module.embedding_dim)
            self._check_vocabulary(name, module.num_embeddings)
            self._check_plain(name, module)
            return Role(name, "embedding_rowwise", why or "the model's input embedding")
        if word == "replicated" and why != GIVEN:
            return Role(name, word, why)
        self.words.check_fit(name, module, word, OF_EMBEDDINGS)
        self._check_plain(name, module)
        if module.embedding_dim != self.anatomy.hidden:
            raise self.words.no_role(name, module, f"an embedding of {module.embedding_dim} features")
        return Role(
            name, "embedding_colwise", why or f"its {self.anatomy.hidden} features are the hidden ones"
        )

    def _check_plain(self, name: str, module: nn.Embedding) -> None:
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                raise UnsupportedError(
                    f"{name} has {option}={getattr(module, option)}, which looks at whole rows or at the whole batch, and "
                    f"is not supported on y={self.grid.y}, x={self.grid.x}; turn it off, or use x=1 and y=1"
                )

    def _find_beside(self) -> dict[str, tuple[str, str]]:
        found = {}
        for name, module in self.anatomy.modules.items():
            word, why = self.words.word(name)
            if word in BESIDE_EXPERTS:
                found[name] = (word, why)
            elif self.words.is_experts(name, module):
                for beside, its in beside_experts(self.anatomy.modules, name).items():
                    found.setdefault(beside, (its, f"beside {name.rpartition('.')[2]}"))
        return found

    def _reader(self, name: str) -> str | None:
        """The router or gate that a module is, or is part of."""
        return next((r for r in self.beside if name == r or name.startswith(f"{r}.")), None)

    def _experts(self, name: str, module: nn.Module) -> Role:
        word, why = self.words.word(name)
        self.words.check_fit(name, module, word, OF_EXPERTS)
        storage = storage_of(module, name)
        parent = name.rpartition(".")[0]
        beside = [m for m in self.beside if m.rpartition(".")[0] == parent]
        check_jitter(parent, *(self.anatomy.modules[each] for each in (parent, *beside)))
        parts = math.prod(self.grid.size(axis) for axis in self.expert_axes)
        if storage.features % parts:
            fits = math.gcd(parts, storage.features)
            divided = "x and y whose product" if len(self.expert_axes) > 1 else f"{self.expert_axes[0]} that"
            raise UnsupportedError(
                f"{'*'.join(self.expert_axes)}={parts} does not divide the {storage.features} inner features of an expert of {name}; use "
                f"{divided} divides {storage.features}, such as {fits}, with z={self.grid.z * parts // fits}"
            )
        if storage.hidden != self.anatomy.hidden_size:
            raise UnsupportedError(
                f"{name} reads {storage.hidden} features, which are not the {self.anatomy.hidden_size} hidden ones: how they are sharded "
                f"over y={self.grid.y} is not known; use x=1 and y=1"
            )
        return Role(name, "moe_tp_experts", why or "experts", features=storage.features)

    def _linear(self, name: str, module: nn.Module) -> Role:
        word, why = self.words.word(name)
        if module is self.anatomy.head and word is None:
            word, why = "colwise_gather_output", "the model's output embedding"
        if word is None:
            raise self.words.no_role(name, module, "a linear layer")
        if word in OF_KEPT_LINEARS and why != GIVEN:
            in_features, out_features = linear_shape(module)
            if word != "replicated":
                size = out_features if word == "heads" else in_features
                self._check_divides("x", f"the {size} channels of {name}", size)
            return Role(name, word, why)
        self.words.check_fit(name, module, word, tuple(LINEAR_AXES))
        if word not in LINEAR_AXES:
            raise self.words.missing_style(name, word)
        in_axis, out_axis = LINEAR_AXES[word]
        role = Role(name, word, why, in_axis, out_axis, head=module is self.anatomy.head)
        role = replace(role, segments=self._segments(name, linear_shape(module)[1], word))
        # Heads first: if they divide, so do their features.
        role = self._with_heads(role, module)
        self._check_linear(role, module)
        return role

    def _norm(self, name: str, module: nn.Module) -> Role:
        word, why = self.words.word(name)
        self.words.check_fit(name, module, word, OF_NORMS)
        weight = getattr(module, "weight", None)
        size = weight.shape if weight is not None else None
        inside_attention = self.anatomy.in_attention(name)
        last = name.rsplit(".", 1)[-1]
        if word is None and inside_attention and size is not None:
            heads, kv_heads = self.anatomy.heads(name)
            head_dim = self.anatomy.head_dim(name)
            if len(size) == 2:
                word, why = "heads", f"one row for each of {size[0]} heads"
            elif head_dim is not None and size[0] == head_dim:
                word, why = "replicated_with_grad_allreduce", f"over the {head_dim} features of a head"
            elif (
                head_dim is not None
                and heads
                and size[0] in (heads * head_dim, (kv_heads or heads) * head_dim)
                and last.startswith(("q", "k", "v"))
            ):
                word, why = "norm_x", "over the features of all heads"
                if kv_heads and last.startswith(("k", "v")):
                    what = f"num_key_value_heads={kv_heads} of {name.rsplit('.', 1)[0]}"
                    why_not = f", and they cannot be replicated ({name} is a norm over all of them)"
                    self._check_divides("x", what, kv_heads, why_not)
        if word is None and inside_attention and size is None and last.startswith(("q", "k", "v")):
            return Role(name, "without parameters", "over the features of a head")
        if word is None and (size is None or tuple(size) == (self.anatomy.hidden,)):
            word, why = "norm", "over the hidden features"
        if word in ("norm", "norm_x"):
            formula = recognise(module)
            features = size[0] if size else self.anatomy.hidden
            if formula is None:
                raise UnsupportedError(
                    f"{name} is a {type(module).__name__} over {features} features whose formula is "
                    f"not one that Fourfold can shard over y={self.grid.y} and x={self.grid.x} (epsilon "
                    f"{epsilon_of(module)}); use y=1 and x=1"
                )
            self._check_divides(
                "y" if word == "norm" else "x", f"the {features} features of {name}", features
            )
            return Role(name, word, why, formula=formula, features=features)
        if word in ("replicated", "replicated_with_grad_allreduce", "heads"):
            return Role(name, word, why)
        raise self.words.no_role(name, module, f"a norm of {tuple(size or ())}")

    def _own_parameters(self, name: str, module: nn.Module) -> list[Role]:
        roles = []
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            full = f"{name}.{key}" if name else key
            # In plans, "colwise" on a bare parameter means that it has a row for each head (attention sinks).
            holder = full if self.words.word(full)[0] else name
            word, why = self.words.word(holder)
            word = {"colwise": "heads", "rowwise": "features"}.get(word or "", word)
            if word is None:
                raise self.words.no_role(full, module, f"a parameter of shape {tuple(parameter.shape)}")
            self.words.check_fit(holder, parameter, word, OF_PARAMETERS)
            if word not in OF_PARAMETERS:
                raise self.words.missing_style(full, word)
            segments = None
            if word == "channels":
                segments = self._channels(name, module, parameter)
            elif word in ("heads", "features"):
                axis: Axis = "x" if word == "heads" else "y"
                size = parameter.shape[dim_of_heads(parameter) if word == "heads" else -1]
                self._check_divides(axis, f"the {size} entries of {full}", size)
            roles.append(Role(full, word, why, segments=segments))
        return roles

    # -- sizes --------------------------------------------------------------------------------------------------------

    def _channels(self, name: str, module: nn.Module, parameter: nn.Parameter) -> tuple[int, ...]:
        """The widths of the segments of a convolution's channels."""
        channels = parameter.shape[0]
        if not self.anatomy.in_attention(name):
            kind = type(self.anatomy.modules[name.rpartition(".")[0]]).__name__
            raise UnsupportedError(
                f"{name} mixes tokens inside {kind}, which is not known to get whole sequences; use x=1 and y=1"
            )
        if getattr(module, "groups", None) != channels:
            raise UnsupportedError(
                f"{name} mixes channels ({module}), so they cannot be sharded over x={self.grid.x}; use x=1"
            )
        segments = self._segments(name, channels, "channels") or (channels,)
        for width in segments:
            self._check_divides("x", f"the {width} channels of {name}", width)
        return segments

    def _segments(self, name: str, out: int, word: str) -> tuple[int, ...] | None:
        """The widths of the segments of a fused projection's output, if it is fused."""
        kind = next((kind for pattern, kind in self.family.packed.items() if matches(pattern, name)), None)
        if isinstance(kind, tuple):
            parent = self.anatomy.modules[name.rpartition(".")[0]]
            widths = tuple(math.prod(getattr(parent, factor) for factor in size.split("*")) for size in kind)
            assert sum(widths) == out, (name, widths, out)
            return widths
        if kind is None and (word == "packed_colwise" or name.endswith(".gate_up_proj")):
            kind = "halves"
        if kind is None:
            return None
        assert kind in ("halves", "thirds", "q,k,v"), (name, kind)
        if kind in ("halves", "thirds"):
            parts = 2 if kind == "halves" else 3
            return (out // parts,) * parts
        heads, kv_heads = self.anatomy.heads(name)
        assert heads
        assert kv_heads
        head_dim = out // (heads + 2 * kv_heads)
        return (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)

    def _check_not_attention(self, role: Role, parent: str) -> None:
        """A user's module with a number of heads, which would stay that of all ranks."""
        module = self.anatomy.modules.get(parent)
        named = (
            [name for name in HEAD_ATTRIBUTES if isinstance(vars(module).get(name), int)] if module else []
        )
        if named and role.why == GIVEN and not role.head:
            kind = type(module).__name__
            raise UnsupportedError(
                f"{parent}, a {kind}, has {named[0]}={getattr(module, named[0])}, and a rank of x={self.grid.x} has a part of the "
                f"features of {role.name}; if it is attention, call its class {kind}Attention, otherwise rename {named[0]}"
            )

    def _check_linear(self, role: Role, module: nn.Module) -> None:
        in_features, out_features = linear_shape(module)
        if role.in_axis is not None:
            what = f"the {in_features} input features of {role.name}"
            self._check_divides(role.in_axis, what, in_features)
        if role.head:
            self._check_vocabulary(role.name, out_features)  # which does not need to divide
            return
        if role.replicated_heads or role.out_axis is None:
            return
        for width in role.segments or (out_features,):
            self._check_divides(role.out_axis, f"the {width} output features of {role.name}", width)

    def _check_vocabulary(self, name: str, rows: int) -> None:
        """Uneven shards are supported, but each rank needs a row: FSDP2 has no gradient for an empty tensor."""
        x = self.grid.x
        if chunk(rows, x, x - 1).start == rows:
            raise UnsupportedError(
                f"the {rows} rows of {name} over x={x} leave the last x rank without any; use an x of at most "
                f"{math.isqrt(rows)}, or a larger vocabulary"
            )

    def _with_heads(self, role: Role, module: nn.Module) -> Role:
        """A head is never split: check that heads divide, or that key/value heads can be replicated."""
        x = self.grid.x
        if role.out_axis != "x" or x == 1:
            return role
        parent = role.name.rpartition(".")[0]
        if not self.anatomy.in_attention(role.name):
            self._check_not_attention(role, parent)
            return role
        if (linear := self.anatomy.linear_heads(role.name)) is not None:
            for key, count in linear.items():
                self._check_divides("x", f"{key}={count} of {parent}", count)
            return role
        heads, kv_heads = self.anatomy.heads(role.name)
        if heads:
            self._check_divides("x", f"num_attention_heads={heads} of {parent}", heads)
        if kv_heads and kv_heads % x:
            separate = SEPARATE_KV.search(role.name) is not None
            fused = role.segments is not None or not (separate or self._has_separate_kv(parent))
            if x % kv_heads or fused:
                why = (
                    "they are fused with the query heads"
                    if fused
                    else f"x is not a multiple of {kv_heads} either"
                )
                what, why_not = (
                    f"num_key_value_heads={kv_heads} of {parent}",
                    f", and they cannot be replicated ({why})",
                )
                self._check_divides("x", what, kv_heads, why_not)
            if separate:
                out_features = linear_shape(module)[1]
                if out_features % kv_heads:
                    raise self.words.no_role(role.name, module, "key/value heads of unequal size")
                note = f"{role.why}; {kv_heads} key/value heads, each replicated on {x // kv_heads} x ranks"
                return replace(role, replicated_heads=kv_heads, why=note)
        return role

    def _has_separate_kv(self, parent: str) -> bool:
        return any(
            n.rsplit(".", 1)[0] == parent and SEPARATE_KV.search(n) for n in self.anatomy.modules if "." in n
        )

    def _check_divides(self, axis: Axis, what: str, size: int, because: str = "") -> None:
        """If an axis does not divide a size, the error names a grid of the same number of ranks that avoids it."""
        have = self.grid.size(axis)
        if size % have == 0:
            return
        fits = math.gcd(have, size)
        y = self.grid.y * have // fits
        # The other ranks go to y if it divides; z takes any number.
        to_y = axis == "x" and (self.anatomy.hidden_size is None or self.anatomy.hidden_size % y == 0)
        rest = f"y={y}" if to_y else f"z={self.grid.z * have // fits}"
        raise UnsupportedError(
            f"{axis}={have} does not divide {what}{because}; use {'an x' if axis == 'x' else f'a {axis}'} that divides "
            f"{size}, such as {axis}={fits} with {rest}"
        )
