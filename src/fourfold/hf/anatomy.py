"""Reads the structure of a model: its embedding and head, sizes and attention heads."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from torch import nn
from transformers.pytorch_utils import Conv1D

from fourfold.hf.experts import beside_all_experts

T = TypeVar("T")

HEAD_ATTRIBUTES = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_q_heads")
# Of linear attention: the heads of queries and keys, or the groups of states, to which the other heads belong.
LINEAR_HEAD_ATTRIBUTES = ("num_k_heads", "n_groups")
# Modules that work on whole sequences, with heads or channels of their own, by their classes.
_ATTENTION = re.compile(r"attention|attn|(?-i:MLA$|ForgetGate$|Indexer$|ShortConv$|Mamba2?Mixer$)", re.I)
KV_HEAD_ATTRIBUTES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")


class Anatomy:
    """The embedding, head, hidden size and head counts of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = dict(model.named_modules())
        config: Any = getattr(model, "config", None)
        text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        self.config: Any = text
        self.embedding = _call(model, "get_input_embeddings")
        self.head = _call(model, "get_output_embeddings")
        self.hidden_size = self._read_hidden_size()

    @property
    def hidden(self) -> int:
        if self.hidden_size is None:
            raise ValueError(
                f"{type(self.model).__name__} has no input embedding, config.hidden_size or norm to read the hidden size "
                "from; give the model a get_input_embeddings() method"
            )
        return self.hidden_size

    def _read_hidden_size(self) -> int | None:
        size = getattr(self.embedding, "embedding_dim", None)
        for name in ("hidden_size", "n_embd", "d_model"):
            size = getattr(self.config, name, None) or size
        if size is None:
            norms = [
                m.weight.shape[0]
                for m in self.modules.values()
                if is_norm(m) and getattr(m, "weight", None) is not None
            ]
            size = max(norms, default=None)
        return None if size is None else int(size)

    def in_attention(self, name: str) -> bool:
        """Is it a part of an attention module, by the class's name or the attribute's?"""
        holder = name.rpartition(".")[0]
        parent = self.modules.get(holder) if holder else None
        if parent is None:
            return False
        by_class = _ATTENTION.search(type(parent).__name__) is not None
        return by_class or "attn" in holder.rpartition(".")[2]

    def heads(self, name: str) -> tuple[int | None, int | None]:
        """(query heads, key/value heads) of the attention that a module belongs to."""
        parent = self.modules[name.rsplit(".", 1)[0]] if "." in name else self.model
        config = getattr(parent, "config", None) or self.config
        layer = getattr(parent, "layer_idx", None)
        if layer is not None and getattr(config, "is_heterogeneous", False):
            config = config.per_layer_config[layer]  # transformers lets no layer read the model's own
        if (linear := self.linear_heads(name)) is not None:
            heads = min(linear.values(), default=None)
            return heads, heads
        heads = first_attribute(parent, HEAD_ATTRIBUTES, int) or first_attribute(config, HEAD_ATTRIBUTES, int)
        kv_heads = first_attribute(parent, KV_HEAD_ATTRIBUTES, int) or first_attribute(
            config, KV_HEAD_ATTRIBUTES, int
        )
        return heads, kv_heads

    def linear_heads(self, name: str) -> dict[str, int] | None:
        """The head counts of the linear attention or short convolution that a module belongs to; None if it belongs to neither."""
        holder = name.rpartition(".")[0]
        parent = self.modules.get(holder)
        while parent is not None and type(parent).__name__.endswith("ForgetGate"):
            holder = holder.rpartition(".")[0]
            parent = self.modules.get(holder)
        if parent is None or not any(isinstance(child, nn.Conv1d) for child in parent.children()):
            return None
        counts = {key: vars(parent).get(key) for key in (*HEAD_ATTRIBUTES, *LINEAR_HEAD_ATTRIBUTES)}
        return {key: count for key, count in counts.items() if isinstance(count, int)}

    def head_dim(self, name: str) -> int | None:
        parent = self.modules[name.rsplit(".", 1)[0]] if "." in name else self.model
        size = first_attribute(parent, ("head_dim", "head_size", "d_head"), int)
        if size is None:
            heads, _ = self.heads(name)
            size = self.hidden // heads if heads else None
        return size


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, Conv1D))


def linears_of_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The linears of the blocks by name, but those of towers that text does not use, and of routers: rounding would choose other experts.

    The head is not in a block.
    """
    towers = idle_towers(model)
    inside = {module for block in find_blocks(model) for module in block.modules()}
    inside -= {part for name in beside_all_experts(model) for part in model.get_submodule(name).modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if module in inside and is_linear(module) and not any(name.startswith(f"{t}.") for t in towers)
    }


def linear_shape(module: nn.Module) -> tuple[int, int]:
    """(in_features, out_features)."""
    if isinstance(module, Conv1D):
        return int(module.nx), int(module.nf)
    assert isinstance(module, nn.Linear)
    return module.in_features, module.out_features


def text_root(model: nn.Module) -> str:
    """The name of the module that holds the input embedding."""
    embedding = _call(model, "get_input_embeddings")
    return next((n.rpartition(".")[0] for n, m in model.named_modules() if m is embedding), "")


def idle_towers(model: nn.Module) -> list[str]:
    """The submodules of a multimodal model that text does not pass through: neither language model nor head."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or getattr(config, "is_encoder_decoder", False):
        return []
    if config.get_text_config() is config:
        return []
    root, head = text_root(model), _call(model, "get_output_embeddings")
    towers = []
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        outside = (
            name and (not parent or root.startswith(f"{parent}.")) and not f"{root}.".startswith(f"{name}.")
        )
        used = any(m is head for m in module.modules())
        if outside and root and not used and next(module.parameters(), None) is not None:
            towers.append(name)
    return towers


def _call(model: nn.Module, method: str) -> nn.Module | None:
    function = getattr(model, method, None)
    if function is None:
        return None
    try:
        found = function()
    except (NotImplementedError, AttributeError):
        return None
    return found if isinstance(found, nn.Module) else None


def first_attribute(owner: Any, names: tuple[str, ...], kind: type[T]) -> T | None:
    """The first of these attributes that is a number of this type; a bool is not an int here."""
    values = (getattr(owner, name, None) for name in names)
    return next((value for value in values if isinstance(value, kind) and not isinstance(value, bool)), None)


def is_norm(module: nn.Module) -> bool:
    if any(True for _ in module.children()):
        return False
    name = type(module).__name__.lower()
    if "norm" not in name or "batchnorm" in name or "groupnorm" in name:
        return False
    return set(module._parameters) <= {"weight", "bias"}


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
