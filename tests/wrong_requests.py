"""Wrong requests, and what the error of each must name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fourfold as ff
from fourfold.mesh.axes import AXES
from fourfold.mesh.grid import Grid
from tests.wrong_models import (
    ROLES,
    Embedded,
    Perceptron,
    Scaled,
    differential,
    falcon_with_shared_keys,
    llama,
    mamba,
    mixtral,
    norm_over_all_keys,
    with_images,
)

RANKS = 8


def request(make: Callable[[], nn.Module], shape: tuple[int, int, int, int], **options: Any) -> None:
    ff.parallelize(make(), Grid.create(shape), **options)


def twice(shape: tuple[int, int, int, int]) -> None:
    model, grid = llama(), Grid.create(shape)
    ff.parallelize(model, grid)
    ff.parallelize(model, grid)


def parallel_llama(shape: tuple[int, int, int, int] = (1, 1, 2, 4)) -> tuple[nn.Module, Grid]:
    model, grid = llama(), Grid.create(shape)
    ff.parallelize(model, grid)
    return model, grid


def loss_of(logits: tuple[int, ...], labels: tuple[int, ...], **options: Any) -> None:
    grid = Grid.create((1, 1, 2, 4))
    ff.cross_entropy(torch.zeros(logits), torch.zeros(labels, dtype=torch.long), grid, **options)


def labels_through_model(length: int) -> None:
    model, _ = parallel_llama()
    ids = torch.ones(2, 6, dtype=torch.long)
    model(ids, labels=ids[:, :length])


def optimizer(
    optimizer_class: type[torch.optim.Optimizer], *, before: bool = False, named: bool = False
) -> None:
    make = ff.sharded_optimizer(optimizer_class)
    model = llama() if before else parallel_llama()[0]
    parameters = list(model.named_parameters() if named else model.parameters())
    make(parameters, lr=1e-3)


def clip(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    ff.clip_grad_norm_(model.parameters(), 1.0, Grid.create((1, 1, 2, 4)))


def accumulate(model: nn.Module) -> None:
    with ff.no_sync(model):
        pass


def images(shape: tuple[int, int, int, int], *, pixels: bool) -> None:
    model, grid = with_images(), Grid.create(shape)
    ff.parallelize(model, grid)
    ids = torch.full((1, 8), 5)
    ids[0, :4] = 3 if pixels else 5
    model(ids, **({"pixel_values": torch.zeros(1, 3, 8, 8)} if pixels else {}))


def mesh_with_axes(*names: str) -> None:
    Grid.from_mesh(init_device_mesh("cpu", (1, 1, 2, 4), mesh_dim_names=names), torch.device("cpu"))


def forward(roles: dict[str, str]) -> None:
    """On x=4 and y=2: x=y would hide that a layer got an input sharded over the wrong axis."""
    model, grid = Perceptron(), Grid.create((1, 1, 2, 4))
    ff.parallelize(model, grid, roles=roles)
    model(torch.zeros(3, 8))


@dataclass(frozen=True)
class Wrong:
    """A request, what its error must say (regular expressions), and a request that follows its remedy."""

    request: Callable[[], object]
    says: tuple[str, ...]
    instead: Callable[[], object] | None = None


def cut(make: Callable[[], nn.Module], shape: tuple[int, int, int, int], *says: str, **options: Any) -> Wrong:
    """A grid that does not fit the model; the grid that its error suggests must fit."""

    def follow() -> None:
        with pytest.raises(ff.UnsupportedError, match="such as") as refused:
            request(make, shape, **options)
        found = re.search(r"such as (\w)=(\d+) with (\w)=(\d+)", str(refused.value))
        assert found
        sizes = dict(zip(AXES, shape, strict=True)) | {found[1]: int(found[2]), found[3]: int(found[4])}
        request(make, (sizes["data"], sizes["z"], sizes["y"], sizes["x"]), **options)

    return Wrong(partial(request, make, shape, **options), says, follow)


def asked(make: Callable[[], nn.Module], roles: dict[str, str], *says: str, instead: dict[str, str]) -> Wrong:
    """Wrong roles, and the roles that the error suggests."""
    return Wrong(partial(request, make, GRID, roles=roles), says, partial(request, make, GRID, roles=instead))


# -- what must be said -------------------------------------------------------------------------------------------------

ATTENTION = r"model\.layers\.0\.self_attn\b"
GRID = (1, 1, 2, 4)

WRONG: dict[str, Wrong] = {
    # -- a grid that the model cannot be cut for
    "a vocabulary that leaves a rank without rows": Wrong(
        partial(request, partial(llama, vocab_size=9), (1, 1, 1, 8)),
        (r"the 9 rows of model\.embed_tokens over x=8", "use an x of at most 3, or a larger vocabulary$"),
        partial(request, partial(llama, vocab_size=9), (1, 1, 4, 2)),
    ),
    "x and heads": cut(
        partial(llama, hidden_size=96, num_attention_heads=12, num_key_value_heads=12),
        (1, 1, 1, 8),
        rf"^x=8 does not divide num_attention_heads=12 of {ATTENTION}",
        "use an x that divides 12, such as x=4 with y=2$",
    ),
    "x and heads, where y takes no more": cut(
        partial(llama, hidden_size=63, num_attention_heads=9, num_key_value_heads=9, head_dim=8),
        (1, 1, 1, 8),
        rf"^x=8 does not divide num_attention_heads=9 of {ATTENTION}",
        "such as x=1 with z=8$",
    ),
    "x and key/value heads": cut(
        partial(llama, hidden_size=96, num_attention_heads=24, num_key_value_heads=12),
        (1, 1, 1, 8),
        rf"^x=8 does not divide num_key_value_heads=12 of {ATTENTION}",
        r"cannot be replicated \(x is not a multiple of 12",
        "use an x that divides 12, such as x=4 with y=2$",
    ),
    "x and fused key/value heads": cut(
        falcon_with_shared_keys,
        (1, 1, 1, 8),
        r"^x=8 does not divide num_key_value_heads=4 of transformer\.h\.0\.self_attention\b",
        r"cannot be replicated \(they are fused with the query heads",
        "use an x that divides 4, such as x=4 with y=2$",
    ),
    "x and a norm over all key/value heads": cut(
        norm_over_all_keys,
        (1, 1, 1, 8),
        rf"^x=8 does not divide num_key_value_heads=4 of {ATTENTION}",
        r"cannot be replicated \(model\.layers\.0\.self_attn\.k_norm is a norm over all of them",
        "use an x that divides 4, such as x=4 with y=2$",
    ),
    "y and hidden size": cut(
        partial(llama, hidden_size=60, num_attention_heads=4, num_key_value_heads=4, head_dim=16),
        (1, 1, 8, 1),
        "^y=8 does not divide hidden_size=60 of LlamaForCausalLM",
        "use a y that divides 60, such as y=4 with z=2$",
    ),
    "x and intermediate size": cut(
        partial(llama, intermediate_size=100),
        (1, 1, 1, 8),
        r"^x=8 does not divide the 100 output features of model\.layers\.0\.mlp\.gate_proj;",
        "use an x that divides 100, such as x=4 with y=2$",
    ),
    "y and a bare parameter": cut(
        partial(Perceptron, shift=20),
        (1, 1, 8, 1),
        "^y=8 does not divide the 20 entries of shift;",
        "use a y that divides 20, such as y=4 with z=2$",
        roles=ROLES,
    ),
    "global batch": Wrong(
        lambda: Grid.create((2, 2, 1, 2)).local_rows(6),
        ("^a global batch of 6 sequences", r"data\*z = 2\*2 = 4", "use a multiple of 4"),
        lambda: Grid.create((2, 2, 1, 2)).local_rows(8),
    ),
    "no batch": Wrong(
        lambda: Grid.create((2, 2, 1, 2)).local_rows(0), ("^a global batch of 0", "use a multiple of 4")
    ),
    "world": Wrong(
        lambda: Grid.create((1, 1, 3, 4)),
        (
            r"^grid data=1 \* z=1 \* y=3 \* x=4 needs 12 ranks, but 8 are running",
            r"start 12 ranks, or use a grid of 8 such as \(1, 1, 2, 4\)$",
        ),
        lambda: Grid.create((1, 1, 2, 4)),
    ),
    "a mesh of other axes": Wrong(
        partial(mesh_with_axes, "dp", "z", "y", "x"),
        (
            r"axes \('data', 'z', 'y', 'x'\), this one has \('dp', 'z', 'y', 'x'\)",
            "mesh_dim_names=fourfold.mesh.axes.AXES",
        ),
        partial(mesh_with_axes, *AXES),
    ),
    # -- families that are refused
    "experts whose features do not divide": Wrong(
        partial(request, partial(mixtral, intermediate_size=36), GRID),
        (
            r"^x\*y=8 does not divide the 36 inner features of an expert of model\.layers\.0\.mlp\.experts",
            r"use x and y whose product divides 36, such as 4, with z=2$",
        ),
        partial(request, partial(mixtral, intermediate_size=36), (1, 2, 2, 2)),
    ),
    "random numbers in the input of experts": Wrong(
        partial(request, partial(mixtral, router_jitter_noise=0.1), GRID),
        (r"^model\.layers\.0\.mlp has jitter_noise=0\.1", "set it to 0, or use x=1 and y=1$"),
        partial(request, mixtral, GRID),
    ),
    "a parameter without role": Wrong(
        partial(request, mamba, GRID),
        (
            r"^backbone\.layers\.0\.mixer\.\w+ \(MambaMixer\) is a parameter of shape \(128, 16\)",
            "no role",
            "y=2 and x=4",
            r"pass roles=\{'backbone\.layers\.0\.mixer\.\w+': \.\.\.\}",
            "or use x=1 and y=1$",
        ),
        partial(request, mamba, (2, 4, 1, 1)),
    ),
    "a family of the table": Wrong(
        partial(request, differential, GRID),
        ("^DiffLlamaForCausalLM: .*difference of head i and head i", "y=2, x=4", "use x=1 and y=1"),
        partial(request, differential, (2, 4, 1, 1)),
    ),
    "images for an idle tower": Wrong(
        partial(images, GRID, pixels=True),
        (r"^model\.vision_tower ", "y=2, x=4", "text alone", "use x=1 and y=1 for other inputs"),
        partial(images, GRID, pixels=False),
    ),
    # -- roles
    "a module that is not there": asked(
        llama,
        {"lm_hed": "colwise"},
        "'lm_hed'",
        r"none of the \d+ modules of LlamaForCausalLM",
        "did you mean 'lm_head'",
        instead={"lm_head": "colwise"},
    ),
    "a pattern that matches nothing": asked(
        llama,
        {"model.layers.*.mlp.gate": "colwise"},
        r"'model\.layers\.\*\.mlp\.gate'",
        r"did you mean 'model\.layers\.0\.mlp\.gate_proj'",
        instead={"model.layers.*.mlp.gate_proj": "colwise"},
    ),
    "a word that is misspelt": asked(
        llama,
        {"lm_head": "colwize"},
        "'colwize' of 'lm_head'",
        "did you mean 'colwise'",
        instead={"lm_head": "colwise"},
    ),
    "a role without effect: a container": asked(
        llama,
        {"model.layers.*.mlp": "colwise"},
        r"'model\.layers\.\*\.mlp', but model\.layers\.0\.mlp cannot have one",
        r"did you mean 'model\.layers\.0\.mlp\.\w+_proj'",
        instead={"model.layers.*.mlp.up_proj": "colwise"},
    ),
    "a role without effect: a linear's weight": asked(
        llama,
        {"lm_head.weight": "colwise"},
        r"'lm_head\.weight'",
        "did you mean 'lm_head'$",
        instead={"lm_head": "colwise"},
    ),
    "a word that does not fit a linear": asked(
        llama,
        {"lm_head": "features"},
        "role 'features' was given for lm_head.* Linear",
        "use one of colwise,",
        instead={"lm_head": "colwise"},
    ),
    "a word that does not fit a norm": asked(
        llama,
        {"model.norm": "colwise"},
        r"role 'colwise' was given for model\.norm.* LlamaRMSNorm",
        "use one of norm,",
        instead={"model.norm": "norm"},
    ),
    "a word that does not fit an embedding": asked(
        llama,
        {"model.embed_tokens": "colwise"},
        r"role 'colwise' was given for model\.embed_tokens.* Embedding",
        "use one of embedding_rowwise$",
        instead={"model.embed_tokens": "embedding_rowwise"},
    ),
    "a norm whose parameter has another name": Wrong(
        partial(request, Scaled, GRID, roles=ROLES | {"norm": "norm"}),
        (
            "role 'norm' was given for norm, which has a parameter 'scale'",
            "those of a norm are 'weight' and 'bias': rename it$",
        ),
        partial(request, Perceptron, GRID, roles=ROLES | {"norm": "norm"}),
    ),
    "a word that does not fit a parameter": asked(
        Perceptron,
        ROLES | {"shift": "norm"},
        "role 'norm' was given for shift.* Parameter",
        "use one of heads, features,",
        instead=ROLES,
    ),
    "a linear without role": asked(
        Perceptron,
        {"up": "colwise", "shift": "features"},
        r"^down \(Linear\) is a linear layer for which Perceptron has no role",
        "y=2 and x=4",
        r"pass roles=\{'down': \.\.\.\}",
        instead=ROLES,
    ),
    "no hidden size": Wrong(
        partial(request, partial(Perceptron, affine=False), GRID, roles=ROLES),
        ("^Perceptron has no input embedding, config.hidden_size or norm", r"get_input_embeddings\(\)"),
        partial(request, Embedded, GRID, roles=ROLES),
    ),
    "a role that does not fit what feeds it": Wrong(
        partial(forward, ROLES | {"down": "colwise", "shift": "heads"}),
        (
            r"^down expects 16 input features on each rank \(its 32 over y=2\), got 8",
            "give that module a role, or use y=1",
        ),
        partial(forward, ROLES),
    ),
    # -- options and the state of the model
    "precision": Wrong(
        partial(request, llama, GRID, precision="fp16"),
        ("^precision 'fp16'", "use 'fp32' or 'bf16'"),
        partial(request, llama, GRID, precision="bf16"),
    ),
    "activation checkpointing": Wrong(
        partial(request, llama, GRID, activation_checkpointing="some"),
        ("^activation_checkpointing 'some'", "use 'none', 'selective' or 'full'"),
        partial(request, llama, GRID, activation_checkpointing="full"),
    ),
    "checkpointed blocks": Wrong(
        partial(request, llama, GRID, activation_checkpointing="full", checkpointed_blocks=9),
        ("^checkpointed_blocks=9 is not a number of the model's 1 blocks", "use 0 to 1"),
        partial(request, llama, GRID, activation_checkpointing="full", checkpointed_blocks=1),
    ),
    "parallel already": Wrong(
        partial(twice, GRID), ("^LlamaForCausalLM is parallel already", "build a new one")
    ),
    "parallel already, on z alone": Wrong(
        partial(twice, (1, 8, 1, 1)), ("^LlamaForCausalLM is parallel already", "build a new one")
    ),
    "master weights in bf16": Wrong(
        partial(request, lambda: llama().bfloat16(), GRID),
        (r"^model\.embed_tokens\.weight is torch\.bfloat16", "fp32", "use precision='bf16'"),
        partial(request, lambda: llama().bfloat16().float(), GRID, precision="bf16"),
    ),
    # -- the loss
    "labels": Wrong(
        partial(loss_of, (2, 6, 16), (2, 5)),
        (
            r"^labels of shape \(2, 5\)",
            r"logits of shape \(2, 6, 16\)",
            "one label for each position of the batch",
        ),
        partial(loss_of, (2, 6, 16), (2, 6)),
    ),
    "labels given to the model": Wrong(
        partial(labels_through_model, 5),
        (
            r"^labels of shape \(2, 5\)",
            r"logits of shape \(1, 6, 16\)",
            "one label for each position of the batch",
            r"1/2 of the tokens",
        ),
        partial(labels_through_model, 6),
    ),
    "gathered logits": Wrong(
        partial(loss_of, (2, 6, 64), (2, 6), vocab_size=64),
        ("^logits have 64 columns", "vocabulary of 64 over x=4", "this rank 16", "not gathered"),
        partial(loss_of, (2, 6, 16), (2, 6), vocab_size=64),
    ),
    "another vocabulary": Wrong(
        partial(loss_of, (2, 6, 16), (2, 6), vocab_size=128),
        ("^logits have 16 columns", "vocabulary of 128 over x=4", "this rank 32", "vocab_size"),
        partial(loss_of, (2, 6, 16), (2, 6), vocab_size=64),
    ),
    # -- the optimizer
    "optimizer before parallelize": Wrong(
        partial(optimizer, torch.optim.AdamW, before=True),
        (r"^a parameter of shape \(64, 64\) is not a shard on the grid", r"after parallelize\(model, grid\)"),
        partial(optimizer, torch.optim.AdamW),
    ),
    "an optimizer of whole matrices": Wrong(
        partial(optimizer, torch.optim.Muon),
        ("^Muon is not known to be element-wise", "use one of AdamW, Adam, SGD"),
        partial(optimizer, torch.optim.SGD),
    ),
    "an optimizer of the whole gradient": Wrong(
        partial(optimizer, torch.optim.LBFGS), ("^LBFGS is not known", "use one of AdamW, Adam, SGD")
    ),
    "named parameters": Wrong(
        partial(optimizer, torch.optim.AdamW, named=True),
        ("given as a tuple", r"pass model\.parameters\(\)"),
        partial(optimizer, torch.optim.AdamW),
    ),
    "clipping what is not on the grid": Wrong(
        lambda: clip(Perceptron()),
        (r"^a gradient of shape \(16,\) is not on the grid", r"parallelize\(\)"),
        lambda: clip(parallel_llama()[0]),
    ),
    "accumulating before parallelize": Wrong(
        lambda: accumulate(llama()),
        ("^LlamaForCausalLM is not parallel", r"call parallelize\(model, grid\) first"),
        lambda: accumulate(parallel_llama()[0]),
    ),
    # -- checkpoints (`write_checkpoints`)
    "a checkpoint that lacks a tensor": Wrong(
        partial(request, llama, GRID, checkpoint="lacks"),
        (
            r"^model\.layers\.0\.mlp\.up_proj\.weight is not among the 11 tensors of the checkpoint lacks.model\.safetensors",
            r"the nearest is model\.layers\.0\.mlp\.\w+\.weight",
            "use a checkpoint of LlamaForCausalLM",
        ),
        partial(request, llama, GRID, checkpoint="sound"),
    ),
    "a checkpoint of another size": Wrong(
        partial(request, partial(llama, intermediate_size=256), GRID, checkpoint="sound"),
        (
            r"^model\.layers\.0\.mlp\.gate_proj\.weight has shape \(128, 64\) in sound.model\.safetensors, but \(256, 64\)",
            "use the config.json of that checkpoint",
        ),
    ),
    "a checkpoint of pickles": Wrong(
        partial(request, llama, GRID, checkpoint="pickled"),
        ("^pickled: has neither model.safetensors nor", "save_pretrained"),
    ),
    "no checkpoint": Wrong(
        partial(request, llama, GRID, checkpoint="nowhere"),
        ("^nowhere: is neither a folder nor a .safetensors",),
    ),
}
