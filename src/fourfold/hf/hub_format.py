"""Checkpoints as the hub has them: transformers' own rules say which stored tensors make up a tensor of a model, and back.

Files hold experts one by one, and some projections fused or by other names; transformers converts them when it loads and saves. The rules
are transformers' (`conversion_mapping.py`) and so is the code that applies them: here it runs on lazy tensors, of which a rank reads its shard.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from fourfold.hf.lazy_tensor import LazyTensor, UnknownOperationError
from fourfold.hf.parameter_layout import checked_bounds
from fourfold.hf.safetensors_reader import CheckpointFiles


class ModelFiles:
    """The tensors of a checkpoint by their names in a model: stored like that, or made of stored tensors by transformers' rules.

    Make it of the model as its class builds it. Nothing is read until `read_into`, and then only what the slice is made of.
    """

    def __init__(self, files: CheckpointFiles, model: nn.Module) -> None:
        self._files, self.path = files, files.path
        # In the model's names; what is stored for no tensor of the model keeps its own.
        self._made: dict[str, LazyTensor] = {}
        self._stored = {name: name for name in files.names()}
        if isinstance(model, PreTrainedModel):
            self._stored = {}
            self._convert(model)

    def names(self) -> set[str]:
        return {*self._stored, *self._made}

    def shape(self, name: str) -> tuple[int, ...]:
        made = self._made.get(name)
        return tuple(made.shape) if made is not None else self._files.shape(self._stored[name])

    def read_into(self, name: str, out: Tensor, index: tuple[slice, ...]) -> None:
        """Fill ``out``, of any device, dtype and strides, with the slice ``index`` of tensor ``name``."""
        made = self._made.get(name)
        if made is None:
            self._files.read_into(self._stored[name], out, index)
            return
        checked_bounds(index, tuple(made.shape), out, name, f"{self.path}: ")
        if out.numel():
            made.read_into(out.detach(), index)

    def _convert(self, model: PreTrainedModel) -> None:
        """As `convert_and_load_state_dict_in_model` of transformers does, without values (seen in transformers 5.23)."""
        wanted = model.state_dict()
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        converter_of = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        used: dict[str, WeightConverter] = {}
        for key in sorted(self._files.names(), key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
            if name not in wanted and key in wanted:
                name, pattern = rename_source_key(key, [], [], model.base_model_prefix, wanted)
            if name not in wanted:
                self._stored[key] = key
            elif pattern is None:
                self._stored[name] = key
            else:
                rule = used.setdefault(name, copy.deepcopy(converter_of[pattern]))
                rule.add_tensor(name, key, pattern, self._lazy(key))
        for name, rule in used.items():
            self._made |= _applied(rule, name, model, str(self.path))

    def _lazy(self, key: str) -> LazyTensor:
        def read(out: Tensor, index: tuple[slice, ...]) -> None:
            self._files.read_into(key, out, index)

        return LazyTensor.of(self._files.shape(key), self._files.dtype(key), read, frozenset((key,)))


def _applied(rule: WeightConverter, name: str, model: PreTrainedModel, where: str) -> dict[str, LazyTensor]:
    try:
        found = rule.convert(name, model=model, config=model.config)
    except (UnknownOperationError, RuntimeError, IndexError, KeyError, ValueError) as error:
        raise ValueError(
            f"{where}: {name} of {type(model).__name__} is made of {', '.join(rule.source_patterns)} by transformers' rule "
            f"{' and '.join(map(repr, rule.operations))}, which cannot be followed ({type(error).__name__}: {error}); load and save the "
            "model with transformers, with save_original_format=False"
        ) from error
    return {key: made[0] if isinstance(made, list) else made for key, made in found.items()}


# -- the other way -----------------------------------------------------------------------------------------------------------


def in_hub_format(model: PreTrainedModel, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The tensors that `save_pretrained` would write for the ``tensors`` of a model, which may be on ``meta``."""
    try:
        return dict(revert_weight_conversion(model, dict(tensors)))
    except UnknownOperationError as error:
        raise ValueError(
            f"{type(model).__name__} cannot be written as save_pretrained writes it: transformers converts its weights by {error}, "
            "which is not supported"
        ) from error


def stock_model(model: nn.Module) -> PreTrainedModel | None:
    """The model that a parallel one was made of, on ``meta``; None if it is not one of Hugging Face."""
    if not isinstance(model, PreTrainedModel):
        return None
    # FSDP2 makes a class of its own, which transformers does not know.
    stock = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    return _on_meta(stock, copy.deepcopy(model.config))


def stock_model_of(config: Mapping[str, Any]) -> PreTrainedModel | None:
    """The model of a config.json, on ``meta``; None if its class is not in transformers."""
    architecture = (config.get("architectures") or [""])[0]
    stock = getattr(transformers, architecture, None)
    if not isinstance(stock, type) or not issubclass(stock, PreTrainedModel):
        return None
    return _on_meta(stock, cast(Any, stock).config_class.from_dict(dict(config)))


def _on_meta(stock: Callable[[Any], Any], config: Any) -> PreTrainedModel:
    with torch.device("meta"):
        model = stock(config)
    assert isinstance(model, PreTrainedModel)
    return model
