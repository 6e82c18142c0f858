"""Records a model's own initialisation, to be replayed for any shard independently of the grid."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Private, seen in torch 2.13: the mode that sees every ATen call. There is no public name for it.
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.hf.init_replay import OVERWRITES, InitReplay, Step

# A parameter up to this size whose initialisation cannot be replayed is computed, and its values are recorded: every
# rank holds all of it. 2**18 is enough for the state matrices of state-space layers, not for a projection.
MAX_COMPUTED_ELEMENTS = 2**18

MAX_PROBLEMS_SHOWN = 8  # a problem in one layer is usually in all layers

# transformers marks what it has initialised with this attribute, on modules, parameters and buffers alike.
_FLAG = "_is_hf_initialized"


def record_initialization(model: nn.Module, *, seed: int = 0) -> dict[str, InitReplay]:
    """Run a model's initialisation without its weights, and return the steps for each parameter.

    The model is best on `meta`; its parameters are neither read nor written, and it is unchanged afterwards. Every
    module's `reset_parameters()` runs first, as at construction, then the model's own rule: `initialize_weights()` of a
    Hugging Face model, `apply(_init_weights)` of a plain module that has that method. Anything else that a constructor
    does to a parameter is not recorded.

    The keys are those of `model.named_parameters()`: a tied parameter appears once, initialised as in Hugging Face by
    the module whose weight the others share.

    `seed` matters for small parameters that are computed from random numbers (Mamba's `dt_proj.bias`): their values are
    recorded, so every rank has to use the same seed.
    """
    records = _record(model, seed, computed=frozenset())
    computed = frozenset(
        name
        for name, r in records.items()
        if r.unsupported and r.placeholder.numel() <= MAX_COMPUTED_ELEMENTS
    )
    if computed:
        # If the second run fails, what the first could not record is the better explanation.
        with contextlib.suppress(ValueError):
            records |= {name: r for name, r in _record(model, seed, computed).items() if name in computed}
    if problems := [problem for record in records.values() if (problem := record.problem())]:
        raise ValueError(
            f"cannot record the initialisation of {type(model).__name__}; load a checkpoint instead:\n  "
            + "\n  ".join(problems[:MAX_PROBLEMS_SHOWN])
            + (
                f"\n  and {len(problems) - MAX_PROBLEMS_SHOWN} more"
                if len(problems) > MAX_PROBLEMS_SHOWN
                else ""
            )
        )
    return {name: InitReplay(tuple(r.placeholder.shape), tuple(r.steps)) for name, r in records.items()}


@torch.no_grad()
def restore_buffers(
    model: nn.Module, device: torch.device | str, *, from_checkpoint: Container[str] = ()
) -> None:
    """Recompute every buffer of a model that came from `meta` by `to_empty`, as transformers does when it loads one.

    Parameters are never written. Buffers that are still on `meta`, or elsewhere, are first made on `device`.
    `from_checkpoint` names the buffers that a checkpoint supplies; any other that the model's initialisation does not
    set raises a ValueError.
    """
    device = torch.device(device)
    _materialize_buffers(model, device)
    buffers = {id(buffer): name for name, buffer in model.named_buffers()}
    restored: set[int] = {id(buffer) for buffer in model.buffers() if buffer.numel() == 0}

    def on_write(owner: Tensor, op: str, target: Tensor, operands: tuple[Any, ...]) -> bool:
        if id(owner) not in buffers:
            return False
        if op in OVERWRITES and target.numel() == owner.numel():
            restored.add(id(owner))
        return True

    with _restored_afterwards(model):
        _initialize(model, 0, on_write)

    lost = []
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            path = f"{prefix}.{name}".lstrip(".")
            if buffer is None or id(buffer) in restored or path in from_checkpoint:
                continue
            if id(buffer) not in buffers and not buffer.is_meta:  # created by the initialisation
                module._buffers[name] = buffer.to(device)
            elif id(buffer) not in buffers or buffers[id(buffer)] == path:  # a shared buffer is named once
                lost.append(path)
        lost += [
            f"{prefix}.{name} (a tensor, but not a buffer)".lstrip(".")
            for name, value in vars(module).items()
            if isinstance(value, Tensor) and value.is_meta
        ]
    if lost:
        raise ValueError(
            f"cannot restore {', '.join(lost)} of {type(model).__name__}: its initialisation does not set them; "
            "set them in the model's _init_weights, or pass them as from_checkpoint if a checkpoint holds them"
        )


def _record(model: nn.Module, seed: int, computed: frozenset[str]) -> dict[str, _Record]:
    """One run of the initialisation, with real tensors only for the parameters in `computed`."""
    with _restored_afterwards(model):
        records = _put_placeholders(model, computed)
        by_id = {id(record.placeholder): record for record in records.values()}

        def on_write(owner: Tensor, op: str, target: Tensor, operands: tuple[Any, ...]) -> bool:
            record = by_id.get(id(owner))  # None for a tied parameter or a buffer
            if record is None:
                return False
            if record.name not in computed:
                record.add(op, target, operands)
            return record.name in computed

        try:
            with _HideMeta():
                _initialize(model, seed, on_write)
        except (RuntimeError, NotImplementedError) as error:
            raise ValueError(
                f"the initialisation of {type(model).__name__} cannot run without weights ({error}); "
                "load a checkpoint instead"
            ) from error
    for name in computed:
        records[name].steps = [Step("copy_", values=records[name].placeholder.detach().float())]
    return records


def _put_placeholders(model: nn.Module, computed: frozenset[str]) -> dict[str, _Record]:
    """Replace the parameters by placeholders, and give each tied path a separate one that is not recorded.

    Hugging Face initialises before it ties. On a model already tied, the head would overwrite the embedding, and with
    it the zeros of the padding row.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    records: dict[str, _Record] = {}
    tied = _tied_paths(model)
    for path, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = names[id(parameter)]
            device = "cpu" if name in computed else "meta"
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            if empty.is_floating_point():
                empty.fill_(math.nan)  # a value that stays NaN was never set
            placeholder = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            if f"{path}.{leaf}".lstrip(".") not in tied:
                placeholder = records.setdefault(name, _Record(name, placeholder)).placeholder
            module._parameters[leaf] = placeholder
    assert records.keys() == set(names.values())
    return records


def _tied_paths(model: nn.Module) -> set[str]:
    """The paths of the parameters that share the value of another."""
    paths = set()
    for path, module in model.named_modules():
        tied = getattr(module, "all_tied_weights_keys", None)
        for target, source in tied.items() if isinstance(tied, dict) else ():
            if module.get_parameter(target) is module.get_parameter(source):
                paths.add(f"{path}.{target}".lstrip("."))
    return paths


@dataclass
class _Record:
    """The steps recorded for one parameter so far."""

    name: str
    placeholder: nn.Parameter
    steps: list[Step] = field(default_factory=list)
    unsupported: str | None = None

    def add(self, op: str, target: Tensor, operands: tuple[Any, ...]) -> None:
        step, rows = _step(op, operands), _rows(target, self.placeholder)
        if isinstance(step, str) or rows is None:
            partly = f"{op} writes a part of shape {list(target.shape)}, not whole rows"
            self.unsupported = self.unsupported or (step if isinstance(step, str) else partly)
            return
        shape = self.placeholder.shape
        height = shape[0] if shape else 1
        if step.values is not None:
            rows_shape = (rows[1] - rows[0], *shape[1:]) if shape else ()
            step = replace(step, values=step.values.expand(target.shape).reshape(rows_shape))
        if rows == (0, height):
            if step.op in OVERWRITES:  # earlier steps no longer matter
                self.steps.clear()
                self.unsupported = None
            self.steps.append(step)
        else:
            self.steps.append(replace(step, rows=rows))

    def problem(self) -> str | None:
        shape = list(self.placeholder.shape)
        if self.unsupported:
            return f"{self.name} {shape}: {self.unsupported}"
        if any(step.values is not None and step.values.isnan().any() for step in self.steps):
            return f"{self.name} {shape}: a part of it is not set, or set to NaN"
        covered, height = 0, (shape[0] if shape else 1)
        for start, stop in sorted(step.rows or (0, height) for step in self.steps if step.op in OVERWRITES):
            if start <= covered:
                covered = max(covered, stop)
        if covered < height and self.placeholder.numel():
            return (
                f"{self.name} {shape}: no _init_weights or reset_parameters sets it (rows from {covered} on)"
            )
        return None


def _step(op: str, operands: tuple[Any, ...]) -> Step | str:
    """The step for an in-place ATen operation, or why there is none."""
    if any(isinstance(operand, Tensor) and operand.device.type == "meta" for operand in operands):
        return f"{op} takes values that are computed from weights"
    if op == "copy_":
        return Step("copy_", values=operands[0].detach().to("cpu", torch.float32, copy=True))
    numbers_only = all(
        operand is None
        or isinstance(operand, float | int)
        or (isinstance(operand, Tensor) and not operand.ndim)
        for operand in operands
    )
    scales = op in ("mul_", "div_", "add_", "sub_") and len(operands) == 1
    if not (numbers_only and (scales or op in OVERWRITES or op == "clamp_")):
        return f"{op} with {len(operands)} operands is neither a fill, nor a copy, nor a scaling"
    return Step(op, tuple(None if operand is None else float(operand) for operand in operands))


def _rows(target: Tensor, parameter: Tensor) -> tuple[int, int] | None:
    """The rows of `parameter` that `target`, a view of its storage, covers; None if they are not full rows in order."""
    height = parameter.shape[0] if parameter.ndim else 1
    if target.shape == parameter.shape and target.stride() == parameter.stride():
        return 0, height
    row = parameter[0].numel() if parameter.ndim else 1
    offset = target.storage_offset() - parameter.storage_offset()
    if not (row and parameter.is_contiguous() and target.is_contiguous()):
        return None
    if offset % row or target.numel() % row:
        return None
    return offset // row, (offset + target.numel()) // row


# (tensor, operation, written view, operands)
OnWrite = Callable[[Tensor, str, Tensor, tuple[Any, ...]], bool]


class _Writes(TorchDispatchMode):
    """Calls `on_write` for every write to the storage of `tensors`.

    The write is executed only if that returns True. All other operations run unchanged.
    """

    def __init__(self, tensors: Iterator[Tensor], on_write: OnWrite) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # PyTorch returns the same Python object for a storage as long as it is alive: held here, its id identifies it.
        self._owners = {id(storage): (storage, t) for t in tensors for storage in (t.untyped_storage(),)}
        self._on_write = on_write

    def __enter__(self) -> _Writes:
        # On meta, trunc_normal_ does nothing, and elsewhere it is a loop of data-dependent redraws: it is intercepted as one
        # operation. All variants of it, transformers' included, call this private function (seen in torch 2.13).
        self._trunc_normal_ = nn.init._no_grad_trunc_normal_
        nn.init._no_grad_trunc_normal_ = self._intercepted_trunc_normal_
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        nn.init._no_grad_trunc_normal_ = self._trunc_normal_
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _intercepted_trunc_normal_(
        self,
        tensor: Tensor,
        mean: float,
        std: float,
        a: float,
        b: float,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        owner = self._owner(tensor)
        if owner is None or self._on_write(owner, "trunc_normal_", tensor, (mean, std, a, b)):
            return self._trunc_normal_(tensor, mean, std, a, b, generator)
        return tensor

    def _owner(self, tensor: Tensor) -> Tensor | None:
        return self._owners.get(id(tensor.untyped_storage()), (None, None))[1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        op = func._schema.name.removeprefix("aten::")
        if op == "scalar_tensor" and torch.device(kwargs.get("device") or "cpu").type == "meta":
            # `weight[i] = 0` creates the 0 on the weight's device; on meta it would be lost.
            kwargs = {**kwargs, "device": torch.device("cpu")}
        written = []
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                written += [value] if isinstance(value, Tensor) else list(value or ())
        owned = [(owner, target) for target in written if (owner := self._owner(target)) is not None]
        given = (*args, *(value for key, value in kwargs.items() if key != "generator"))
        operands = tuple(value for value in given if not any(value is target for target in written))
        # Not a generator expression in all(): on_write has to be called for every owner.
        if all([self._on_write(owner, op, target, operands) for owner, target in owned]):
            return func(*args, **kwargs)
        return written[0] if len(written) == 1 else None


class _HideMeta(TorchFunctionMode):
    """Makes `tensor.is_meta` False: orthogonal_, dirac_ and sparse_ would otherwise silently do nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        return func(*args, **(kwargs or {}))


def _initialize(model: nn.Module, seed: int, on_write: OnWrite) -> None:
    tensors = itertools.chain(model.parameters(), model.buffers())
    # Real values, such as rotary frequencies, have to be computed even if the caller builds on meta. Only then, because
    # the context also changes the device of `torch.eye(..., out=weight)`.
    on_meta = torch.get_default_device().type == "meta"
    on_cpu = torch.device("cpu") if on_meta else contextlib.nullcontext()
    with torch.random.fork_rng(devices=()), _Writes(tensors, on_write), torch.no_grad(), on_cpu:
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which also seeds every accelerator
        for module in reversed(list(model.modules())):  # children before parents, as at construction
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(reset):
                reset()
        _apply_own_rule(model)


def _apply_own_rule(module: nn.Module) -> None:
    rule = getattr(module, "_init_weights", None)
    initialize_weights = getattr(module, "initialize_weights", None)  # also initialises its submodels
    if callable(rule) and callable(initialize_weights):
        initialize_weights()
        return
    for child in module.children():
        _apply_own_rule(child)
    if callable(rule):
        module.apply(rule)


def _materialize_buffers(model: nn.Module, device: torch.device) -> None:
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            on_device = buffer.device.type == device.type and device.index in (None, buffer.device.index)
            if not on_device:
                module._buffers[name] = made.setdefault(id(buffer), torch.empty_like(buffer, device=device))


@contextlib.contextmanager
def _restored_afterwards(model: nn.Module) -> Iterator[None]:
    """Remove transformers' flags inside the context, and restore flags and parameters afterwards."""
    flagged: list[tuple[Any, Any]] = []
    parameters = [(module, dict(module._parameters)) for module in model.modules()]
    holders: list[Any] = [*model.modules(), *model.parameters(), *model.buffers()]
    for holder in holders:
        if _FLAG in vars(holder):
            flagged.append((holder, vars(holder)[_FLAG]))
            delattr(holder, _FLAG)
    try:
        yield
    finally:
        for module, before in parameters:
            module._parameters.clear()
            module._parameters.update(before)
        for holder in holders:
            vars(holder).pop(_FLAG, None)
        for holder, value in flagged:
            setattr(holder, _FLAG, value)
