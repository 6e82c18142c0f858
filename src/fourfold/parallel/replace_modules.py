"""Replace each module that has a role by its parallel counterpart, whose parameters are DTensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fourfold.errors import UnsupportedError
from fourfold.hf.anatomy import Anatomy, find_blocks, idle_towers, linear_shape
from fourfold.hf.experts import storage_of
from fourfold.hf.parameter_layout import ParameterLayout, describe
from fourfold.hf.role_words import GIVEN, family_of, matches
from fourfold.hf.roles import Role, dim_of_heads
from fourfold.mesh.axes import Axis
from fourfold.mesh.grid import Grid
from fourfold.parallel.dropout import Dropout
from fourfold.parallel.experts.choice import OwnedExperts
from fourfold.parallel.experts.cut import (
    cut_experts,
    read_whole_features,
    seen_by_experts,
    show_local_features,
)
from fourfold.parallel.experts.own_tokens import send_own_tokens
from fourfold.parallel.experts.owned import own_experts
from fourfold.parallel.experts.whole_features import WholeFeatures
from fourfold.parallel.float8.choice import check_pieces
from fourfold.parallel.layers import Embedding4D, Norm4D
from fourfold.parallel.linear import FusedLinearGroup, Linear4D
from fourfold.parallel.local_views import (
    GradientCheck,
    reject_use,
    shard_arguments,
    shard_output,
    show_local_heads,
    show_local_parameters,
    sum_output,
    without_training_path,
)
from fourfold.parallel.lora import A, B, Lora, check_blocks, is_adapter
from fourfold.parallel.sequence import REPLICATED, show_full_shape
from fourfold.parallel.sequence_roles import SequenceRoles, head_parts
from fourfold.parallel.wrap import Inside
from fourfold.weights.api import Weights
from fourfold.weights.nf4 import packed_parameter
from fourfold.weights.overlap import Overlap


@dataclass
class Replaced:
    layouts: dict[str, ParameterLayout] = field(default_factory=dict)
    by_module: dict[str, list[ParameterLayout]] = field(default_factory=lambda: defaultdict(list))
    notes: list[str] = field(default_factory=list)
    # The embedding and the head, if they are not tied.
    embedding: nn.Module | None = None
    head: nn.Module | None = None
    vocab_size: int | None = None
    groups: list[FusedLinearGroup] = field(default_factory=list)
    # Experts that z ranks own, also those that z and x own together.
    owners: list[nn.Module] = field(default_factory=list)


class ModuleReplacement:
    """Replaces every module that has a role by its parallel form, in place.

    ``sequence_roles`` are for sequence-parallel activations, ``float8`` the linears that compute in it, ``lora`` the adapters, ``packed`` the
    linears whose weights are in NF4, ``owned`` the experts that ranks own. With x = y = 1 all other modules stay the stock ones, and with FSDP2 parameters stay plain tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        grid: Grid,
        dropout: Dropout | None,
        inside: Inside,
        overlap: Overlap,
        sequence_roles: SequenceRoles | None,
        weights: Weights,
        float8: Collection[str],
        lora: Lora | None = None,
        packed: Collection[str] = (),
        owned: OwnedExperts | None = None,
    ) -> None:
        self.weights, self.float8, self.lora, self.packed = weights, float8, lora, packed
        self.owned = owned or OwnedExperts()
        self.plain = weights == "fsdp2" and grid.x * grid.y == 1
        self.model, self.grid, self.dropout, self.inside, self.overlap = model, grid, dropout, inside, overlap
        self.sequence_roles = sequence_roles
        self.tokens = sequence_roles.tokens if sequence_roles else None
        self.blocks = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList)]
        self.family = family_of(model)
        self.stock_head = getattr(model, "get_output_embeddings", lambda: None)()
        self.out = Replaced()
        self.changes: dict[str, int] = defaultdict(int)
        # A tied weight is one parameter of several modules, and stays one.
        self.made: dict[tuple[int, tuple[int, ...]], tuple[nn.Parameter, ParameterLayout]] = {}
        self.siblings: dict[tuple[str, int, Axis | None, Axis | None, bool, bool], FusedLinearGroup] = {}
        # Of stock modules: parameter -> the axes of its gradient. Several parameters of one may have roles of their own.
        self.kept: dict[nn.Module, dict[str, tuple[Axis, ...]]] = {}
        self.checks: dict[nn.Module, dict[str, GradientCheck]] = defaultdict(dict)
        self.seen_as: dict[nn.Module, dict[str, Callable[[Tensor], Tensor]]] = {}
        # Of stock modules: the parameters that are several here, and their number.
        self.joined: dict[nn.Module, dict[str, int]] = defaultdict(dict)
        # By the module that has experts and what stands beside them.
        self.whole_features: dict[str, WholeFeatures] = {}

    def run(self, roles: list[Role]) -> Replaced:
        tied = self._tied()
        keeps_all = self.grid.x * self.grid.y == 1
        for role in roles:
            module, key = self._find(role.name)
            if role.head:
                self.out.vocab_size = linear_shape(module)[1]
            if key is not None and role.word == "channels" and not keeps_all:
                self._channels(role, module, key)
            elif key is not None:
                self._keep(role, module, [key])
            elif keeps_all and (
                role.name in self.float8 or role.name in self.packed or self._has_adapter(role, module)
            ):
                self._put(role.name, self._linear(replace(role, in_axis="y", out_axis="x"), module))
            elif keeps_all:
                self._keep(role, module, [k for k, p in module._parameters.items() if p is not None])
                self._own(role, module)
            elif role.name in self.packed and role.in_axis is None and role.out_axis is None:
                raise UnsupportedError(
                    f"{role.name} is in NF4, and on x={self.grid.x}, y={self.grid.y} it is {role.word} ({role.why}), which is not supported; "
                    "use x=1 and y=1, or quantization='none'"
                )
            elif role.in_axis or role.out_axis:
                self._put(role.name, self._linear(role, module))
            elif role.word == "embedding_rowwise":
                self._put(role.name, self._embedding(role, module))
            elif role.word in ("norm", "norm_x"):
                self._put(role.name, self._norm(role, module))
            elif role.word == "moe_tp_experts":
                self._experts(role, module)
            elif role.word in ("router", "gate"):
                self._reader(role, module)
            else:
                self._check_kept(role, module)
                if role.word == "rowwise_replicated":
                    sum_output(module, role.name, self.grid)
                self._keep(role, module, [k for k, p in module._parameters.items() if p is not None])
            if role.head and not tied:
                self.out.head = self._find(role.name)[0]
            if role.word == "embedding_rowwise" and not tied:
                self.out.embedding = self._find(role.name)[0]
        self.out.groups = list(self.siblings.values())
        if self.lora is not None and not any(is_adapter(at.hf_name) for at in self.out.layouts.values()):
            raise ValueError(
                f"no linear of {type(self.model).__name__} is a target of LoRA: {self.lora.targets!r}; use the ends of their names, "
                'such as ("q_proj", "v_proj"), or "all-linear"'
            )
        for module, gradient_axes in self.kept.items():
            if self.plain and module not in self.out.owners:
                continue
            seen_as = self.seen_as.get(module)
            show_local_parameters(
                module, gradient_axes, self.inside, self.checks[module], seen_as, self.joined[module]
            )
        if keeps_all:
            if not tied:
                self.out.embedding, self.out.head = self._stock_ends()
            self._note_changes()
            return self.out
        self._heads(roles)
        self._note_changes()
        if self.sequence_roles is not None:
            for name in sorted(self.sequence_roles.attention):
                show_full_shape(self.model.get_submodule(name), name, self.sequence_roles.tokens)
            self.out.notes += self.sequence_roles.notes
        for name, module in self.model.named_modules():
            if self.grid.y > 1 and any(matches(pattern, name) for pattern in self.family.cut_outputs):
                shard_output(module, self.grid)
        for block in find_blocks(self.model) if self.family.block_arguments else ():
            shard_arguments(block, self.family.block_arguments, self.grid)
        for tower in idle_towers(self.model):
            reject_use(self.model.get_submodule(tower), tower, self.grid)
            self.out.notes.append(f"{tower} is idle: on this grid the model trains on text only")
        return self.out

    # -- one kind of module each ----------------------------------------------------------------------------------------------

    def _check_kept(self, role: Role, module: nn.Module) -> None:
        """A linear that stays the model's own computes in no other precision, and has no adapter."""
        self._has_adapter(role, module)  # or an error
        if role.name in self.float8:
            raise UnsupportedError(
                f"{role.name} would compute in float8, and on x={self.grid.x}, y={self.grid.y} it is {role.word} ({role.why}), which is not "
                "supported; use x=1 and y=1, or float8='none'"
            )

    def _linear(self, role: Role, module: nn.Module) -> Linear4D:
        in_features, out_features = linear_shape(module)
        transposed = isinstance(module, Conv1D)
        out_dim, in_dim = (1, 0) if transposed else (0, 1)
        replicated = role.replicated_heads > 0
        weight_dims: dict[Axis, int] = {}
        bias_dims: dict[Axis, int] = {}
        if role.in_axis is not None:
            weight_dims[role.in_axis] = in_dim
        if role.out_axis is not None and not replicated:
            weight_dims[role.out_axis] = out_dim
            bias_dims[role.out_axis] = 0
        if role.name in self.packed:
            check_blocks(role.name, self.grid, in_features, role.in_axis)
        parameters: dict[str, nn.Parameter] = {}
        start = 0
        for i, width in enumerate(role.segments or (out_features,)):
            suffix = f"_{i}" if role.segments else ""
            for key, sharded_dims, dim in (("weight", weight_dims, out_dim), ("bias", bias_dims, 0)):
                source = getattr(module, key, None)
                if source is None:
                    continue
                layout = ParameterLayout.whole(f"{role.name}.{key}", source, sharded_dims)
                layout = ParameterLayout.rows(layout, dim, start, width)
                parameters[key + suffix] = self._parameter(role.name, key + suffix, source, layout)
            start += width
        adapter_scale = None
        if self.lora is not None and self._has_adapter(role, module):
            adapter_scale = self.lora.scale
            parameters |= self._adapter(role, module, weight_dims)
        used_rows = self._used_rows(role, out_features) if replicated else None
        shared_columns = 0
        if role.word == "mla_kv_a_proj":
            parent, _ = self._find(role.name.rsplit(".", 1)[0])
            shared_columns = int(parent.qk_rope_head_dim)  # type: ignore[arg-type]
        cuts = self.sequence_roles.cuts[role.name] if self.sequence_roles else REPLICATED
        if role.name in self.float8:
            in_ranks, out_ranks = self.grid.size(role.in_axis), self.grid.size(role.out_axis)
            check_pieces(
                role.name,
                self.grid,
                in_features,
                in_ranks * (out_ranks if cuts.enter == "features" else 1),
                role.segments or (out_features,),
                (role.replicated_heads or out_ranks) * (in_ranks if cuts.leave == "features" else 1),
            )
        return Linear4D(
            role.name,
            parameters,
            self._group(role, in_features, transposed),
            transposed=transposed,
            in_features=in_features,
            out_features=out_features,
            used_rows=used_rows,
            shared_columns=shared_columns,
            # Only the loss comes after the head.
            dropout=None if role.head else self.dropout,
            cuts=cuts,
            head=role.head,
            adapter_scale=adapter_scale,
            adapter_dropout=0.0 if self.lora is None else self.lora.dropout,
        )

    def _has_adapter(self, role: Role, module: nn.Module) -> bool:
        """Is this a linear with an adapter? If its adapter cannot be sharded, that is an error."""
        is_linear = isinstance(module, nn.Linear | Conv1D) and not role.head and module is not self.stock_head
        if self.lora is None or not is_linear or not self.lora.is_target(role.name):
            return False
        if self.grid.x * self.grid.y > 1 and role.in_axis is None and role.out_axis is None:
            raise UnsupportedError(
                f"{role.name} has an adapter, and on x={self.grid.x}, y={self.grid.y} it is {role.word} ({role.why}), for which adapters are not "
                "supported; leave it out of the targets, or use x=1 and y=1"
            )
        return True

    def _adapter(
        self, role: Role, module: nn.Module, weight_dims: Mapping[Axis, int]
    ) -> dict[str, nn.Parameter]:
        """A over the axis of the input's features, B, in the segments of the weight, over that of the output's."""
        assert self.lora is not None
        in_features, out_features = linear_shape(module)
        weight = cast(Tensor, module.weight)
        a_dims: dict[Axis, int] = {axis: 1 for axis in weight_dims if axis == role.in_axis}
        b_dims: dict[Axis, int] = {axis: 0 for axis in weight_dims if axis == role.out_axis}
        a, b = (
            nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=weight.device))
            for shape in ((self.lora.rank, in_features), (out_features, self.lora.rank))
        )
        made = {}
        layout = ParameterLayout.whole(f"{role.name}.{A}.weight", a, a_dims)
        made[A] = self._new(role.name, A, a, layout)
        whole = ParameterLayout.whole(f"{role.name}.{B}.weight", b, b_dims)
        start = 0
        for i, width in enumerate(role.segments or (out_features,)):
            key = f"{B}_{i}" if role.segments else B
            made[key] = self._new(role.name, key, b, ParameterLayout.rows(whole, 0, start, width))
            start += width
        return made

    def _used_rows(self, role: Role, out_features: int) -> slice:
        """The rows of the one key/value head that this x rank's query heads attend to."""
        head = self.grid.coordinate("x") * role.replicated_heads // self.grid.x
        width = out_features // role.replicated_heads
        return slice(head * width, (head + 1) * width)

    def _group(self, role: Role, in_features: int, transposed: bool) -> FusedLinearGroup:
        parent = role.name.rsplit(".", 1)[0] if "." in role.name else ""
        float8 = role.name in self.float8
        key = (parent, in_features, role.in_axis, role.out_axis, transposed, float8)
        if key not in self.siblings:
            self.siblings[key] = FusedLinearGroup(
                self.grid,
                role.in_axis,
                role.out_axis,
                self.overlap,
                self.tokens,
                defers=self.weights == "streamed",
                float8=float8,
            )
        return self.siblings[key]

    def _embedding(self, role: Role, module: nn.Module) -> Embedding4D:
        assert isinstance(module, nn.Embedding)
        layout = ParameterLayout.whole(f"{role.name}.weight", module.weight, {"x": 0, "y": 1})
        if not self.out.vocab_size:
            self.out.vocab_size = module.num_embeddings
        scale = getattr(module, "scalar_embed_scale", getattr(module, "embed_scale", None))
        return Embedding4D(
            role.name,
            self._parameter(role.name, "weight", module.weight, layout),
            self.grid,
            padding_idx=module.padding_idx,
            scale=None if scale is None else float(scale),
            dropout=self.dropout,
            tokens=self.tokens,
        )

    def _norm(self, role: Role, module: nn.Module) -> Norm4D:
        assert role.formula is not None
        axis: Axis = "y" if role.word == "norm" else "x"
        made: dict[str, nn.Parameter | None] = {"weight": None, "bias": None}
        for key in made:
            source = getattr(module, key, None)
            if source is not None:
                layout = ParameterLayout.whole(f"{role.name}.{key}", source, {axis: 0})
                made[key] = self._parameter(role.name, key, source, layout)
        outside = not any(role.name.startswith(f"{block}.") for block in self.blocks)
        return Norm4D(
            role.name,
            role.formula,
            role.features,
            made["weight"],
            made["bias"],
            self.grid,
            axis,
            gradient_axes=self._gradient_axes(role),
            tokens=self.tokens if outside else None,
        )

    def _experts(self, role: Role, module: nn.Module) -> None:
        storage = storage_of(module, role.name)
        over_x = self.owned.over_x and role.name in self.owned.names
        of_features: tuple[Axis, ...] = ("y",) if over_x else ("y", "x")
        gradient_axes = self.kept.setdefault(module, {})
        for key, source in module._parameters.items():
            if source is None:
                continue
            name, dim = f"{role.name}.{key}", storage.inner.get(key)
            cuts: dict[Axis, int] = {"x": 0} if over_x else {}
            if dim is not None:
                cuts |= dict.fromkeys(of_features, dim + (key in storage.halved))
            if dim is not None and key in storage.halved:
                layout = ParameterLayout.halves(name, source, dim, cuts)
            else:
                layout = ParameterLayout.whole(name, source, cuts)
            module._parameters[key] = self._parameter(role.name, key, source, layout)
            gradient_axes[key] = ()
        self.seen_as[module] = {
            key: seen_by_experts(key, storage, self.grid, of_features) for key in gradient_axes
        }
        self._own(role, module)
        wrap = send_own_tokens if over_x else cut_experts
        self._note(module, wrap(module, role.name, self._whole_features(role), storage))

    def _own(self, role: Role, module: nn.Module) -> None:
        if role.name in self.owned.names:
            if self.owned.over_z:
                self.out.owners.append(module)
            self._note(module, own_experts(module, role.name, self.grid, self.owned.axis))

    def _reader(self, role: Role, module: nn.Module) -> None:
        """A router or gate: stock modules, whole on each rank."""
        axes = self._gradient_axes(role)
        for sub_name, part in module.named_modules(prefix=role.name):
            gradient_axes = self.kept.setdefault(part, {})
            for key, source in part._parameters.items():
                if source is not None:
                    layout = ParameterLayout.whole(f"{sub_name}.{key}", source)
                    part._parameters[key] = self._parameter(sub_name, key, source, layout, role.name)
                    gradient_axes[key] = axes
        read_whole_features(module, role.name, self._whole_features(role), is_gate=role.word == "gate")

    def _whole_features(self, role: Role) -> WholeFeatures:
        name = role.name.rpartition(".")[0]
        if name not in self.whole_features:
            parent = self.model.get_submodule(name)
            hidden = Anatomy(self.model).hidden
            found = WholeFeatures(self.grid, name, hidden, self.tokens is not None)
            found.forget_after(parent)
            self._note(parent, show_local_features(parent, hidden, self.grid))
            self.whole_features[name] = found
        return self.whole_features[name]

    def _note(self, module: nn.Module, changed: list[str]) -> None:
        """A change of attributes, once for all modules of a class."""
        for change in changed:
            self.changes[f"{type(module).__name__}: {change}"] += 1

    def _gradient_axes(self, role: Role) -> tuple[Axis, ...]:
        """The axes over which the gradient of a parameter has to be summed."""
        if self.sequence_roles is not None:
            return self.sequence_roles.gradient_axes[role.name]
        return ("x",) if role.word == "replicated_with_grad_allreduce" else ()

    def _keep(self, role: Role, module: nn.Module, keys: list[str]) -> None:
        """Keep the stock module, and let it see this rank's shard of these parameters."""
        gradient_axes = self.kept.setdefault(module, {})
        prefix = role.name if self._find(role.name)[1] is None else role.name.rpartition(".")[0]
        for key in keys:
            source = module._parameters[key]
            assert source is not None
            sharded_dims: dict[Axis, int] = {}
            if role.word == "rowwise_replicated":
                sharded_dims["x"] = 1
            elif role.word == "heads":
                sharded_dims["x"] = dim_of_heads(source)
            elif role.word in ("features", "embedding_colwise"):
                sharded_dims["y"] = source.ndim - 1
            gradient_axes[key] = self._gradient_axes(role)
            name = f"{prefix}.{key}" if prefix else key
            if role.why == GIVEN and role.word in ("replicated", "replicated_with_grad_allreduce"):
                self.checks[module][key] = GradientCheck(name, role.word, self.grid, gradient_axes[key])
            layout = ParameterLayout.whole(name, source, sharded_dims)
            module._parameters[key] = self._parameter(prefix, key, source, layout, role.name)

    def _channels(self, role: Role, module: nn.Module, key: str) -> None:
        """Shard the channels of each segment: a parameter for each, which the module sees as one."""
        assert role.segments is not None
        source, gradient_axes = module._parameters.pop(key), self.kept.setdefault(module, {})
        assert source is not None
        name, start = role.name.rpartition(".")[0], 0
        whole = ParameterLayout.whole(role.name, source, {"x": 0})
        for number, width in enumerate(role.segments):
            part = f"{key}_{number}"
            layout = ParameterLayout.rows(whole, 0, start, width)
            module._parameters[part] = self._parameter(name, part, source, layout, role.name)
            gradient_axes[part] = self._gradient_axes(role)
            start += width
        self.joined[module][key] = len(role.segments)
        if key == "weight":
            for count in ("groups", "in_channels", "out_channels"):
                module.__dict__[count] //= self.grid.x
            self._note(module, [f"channels {start} -> {module.__dict__['groups']}"])

    def _heads(self, roles: list[Role]) -> None:
        """Set the number of local heads in attention modules."""
        attention: dict[str, int] = {}
        anatomy = Anatomy(self.model)
        for role in roles:
            if role.out_axis == "x" and not role.head and anatomy.in_attention(role.name):
                parent = role.name.rpartition(".")[0]
                attention[parent] = attention.get(parent, 0) or role.replicated_heads or self._shared(role)
        for name, replicated in attention.items():
            module, _ = self._find(name)
            parts = head_parts(name, self.sequence_roles, self.grid)
            self._note(
                module,
                show_local_heads(
                    module, self.family, *parts, replicated_heads=replicated, inside=self.inside
                ),
            )
            if any(matches(pattern, name) for pattern in self.family.without_training_path):
                module.__class__ = without_training_path(type(module))  # type: ignore[arg-type]
                self._note(module, ["training has the path of evaluation, whose projection is a module"])

    def _note_changes(self) -> None:
        self.out.notes += [f"{note} ({count} modules)" for note, count in self.changes.items()]

    def _shared(self, role: Role) -> int:
        """The number of key/value heads, if several y ranks use the same one; else 0."""
        cuts = self.sequence_roles.cuts[role.name] if self.sequence_roles else None
        return 0 if cuts is None or cuts.used_columns is None else cuts.kv_heads

    # -- parameters and names ----------------------------------------------------------------------------------------

    def _parameter(
        self, module_name: str, key: str, source: Tensor, layout: ParameterLayout, row: str | None = None
    ) -> nn.Parameter:
        self.out.by_module[row or module_name].append(layout)
        memo = (id(source), layout.start)
        if memo not in self.made:
            self.made[memo] = (self._new(module_name, key, source, layout), layout)
        parameter, first = self.made[memo]
        if first.cuts != layout.cuts:
            raise UnsupportedError(
                f"{layout.hf_name} is tied to {first.hf_name}, but their roles shard it differently ({describe([layout])}, "
                f"and {describe([first])}); give both the same role, or untie them"
            )
        return parameter

    def _new(self, module_name: str, key: str, source: Tensor, layout: ParameterLayout) -> nn.Parameter:
        self.out.layouts[f"{module_name}.{key}" if module_name else key] = layout
        is_plain = self.plain and module_name not in self.owned.names
        parameter = self._on_device(source) if is_plain else layout.parameter(source, self.grid)
        return (
            packed_parameter(parameter)
            if module_name in self.packed and key.startswith("weight")
            else parameter
        )

    def _on_device(self, source: Tensor) -> nn.Parameter:
        assert isinstance(source, nn.Parameter)
        if not source.is_meta:
            source.data = source.data.to(self.grid.device)
        return source

    def _find(self, name: str) -> tuple[nn.Module, str | None]:
        """A module by its name; or, for the name of a parameter, its module and its key."""
        try:
            return self.model.get_submodule(name), None
        except AttributeError:
            parent, _, key = name.rpartition(".")
            return self.model.get_submodule(parent), key

    def _put(self, name: str, module: nn.Module) -> None:
        parent, _, key = name.rpartition(".")
        self.model.get_submodule(parent).register_module(key, module)

    def _stock_ends(self) -> tuple[nn.Module | None, nn.Module | None]:
        """The embedding and the head of a model whose modules are not replaced."""
        ends = (
            getattr(self.model, f"get_{which}_embeddings", lambda: None)() for which in ("input", "output")
        )
        embedding, head = ends
        is_known = isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear)
        return (embedding, head) if is_known else (None, None)

    def _tied(self) -> bool:
        """Does any parameter belong to two modules?"""
        held = [p for m in self.model.modules() for p in m._parameters.values() if p is not None]
        return len({id(p) for p in held}) < len(held)
