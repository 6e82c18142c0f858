"""The opponent: what stock PyTorch gives the same Hugging Face Llama on the same ranks.

FSDP2 over ``shards``, gradients averaged over ``replicas`` (HSDP; DDP where there is one shard), 1D tensor parallelism
by `parallelize_module` over ``tensor``, the loss over vocabulary shards by `loss_parallel`, weights prefetched. The
model is not modified. It is built to be hard to beat:

- q, k and v read one replicated DTensor, and so do gate and up: a layer makes two all-reduces forward and two backward.
  Each linear that takes a tensor of its own reduces the gradient of it: that would be five backward.
- Between linears everything is a plain tensor: norms, attention and residuals pay no DTensor dispatch. AdamW is fused
  and steps the local shards, which gives the same numbers as on DTensors.
- Tensor and sequence parallelism are PyTorch's styles, or Megatron's schedule (`benchmarks.megatron`).
- FSDP2 gathers on streams of its own, and more groups ahead than it does unasked. On CPU streams do nothing, and its collectives block;
  where speed is measured (`benchmarks.slow_motion`), they are those of CUDA.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import megatron

IGNORED = -100  # the label that Hugging Face's loss leaves out
# How activations lie between linears: whole on each tensor rank, or cut by their tokens, by PyTorch's styles or as Megatron does.
Tensors = Literal["replicated", "sequence-parallel", "megatron"]


@dataclass(frozen=True)
class Layout:
    """How the ranks are split; ``tensor`` is innermost, so its ranks are neighbours."""

    replicas: int
    shards: int
    tensor: int

    @property
    def world(self) -> int:
        return self.replicas * self.shards * self.tensor

    @property
    def data(self) -> int:
        """Parts into which the global batch is cut."""
        return self.replicas * self.shards

    def __str__(self) -> str:
        return f"replicas={self.replicas} shards={self.shards} tensor={self.tensor}"


def layouts(world: int, *, heads: int, kv_heads: int, global_batch: int) -> list[Layout]:
    """Every split of ``world`` ranks that cuts the heads and the batch evenly."""
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    return [
        Layout(world // tensor // shards, shards, tensor)
        for tensor in divisors
        if heads % tensor == 0 and kv_heads % tensor == 0 and global_batch % (world // tensor) == 0
        for shards in divisors
        if world // tensor % shards == 0
    ]


class Baseline:
    """A parallel model and its AdamW. A training step is ``step``, then ``optimizer_step``."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        mesh: DeviceMesh,
        parameters: dict[str, _Parameter],
        partial: Sequence[str],
        optimizer: dict[str, Any],
    ) -> None:
        """``partial``: names of parameters whose gradients are still to be summed over the tensor ranks."""
        self.model = model
        self.layout = layout
        self._mesh = mesh
        self._data_group = make_meshes(layout)[1].get_group("data")
        self._parameters = parameters
        self._partial = partial
        self._shards = {n: nn.Parameter(_local(p.stored.detach())) for n, p in parameters.items()}
        self.optimizer = torch.optim.AdamW(self._shards.values(), **optimizer)

    def local_rows(self, global_batch: int) -> slice:
        """Rows of the global batch that this rank trains on; ranks of one tensor group share theirs."""
        rows, rest = divmod(global_batch, self.layout.data)
        if rest:
            raise ValueError(f"a batch of {global_batch} does not divide over {self.layout.data} data ranks")
        first = dist.get_rank() // self.layout.tensor * rows
        return slice(first, first + rows)

    def step(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Forward and backward of this rank's rows; the loss is the mean over the global batch.

        Each data rank averages over its own rows, and gradients are averaged over the data ranks. That is the mean of
        the global batch if each rank counts the same number of labels, so none may be left out.
        """
        if labels.min() < 0:
            raise ValueError(f"labels hold {IGNORED}; ranks would count different numbers of them")
        if self._partial and ids.shape[1] % self.layout.tensor:
            raise ValueError(f"{ids.shape[1]} tokens do not divide over tensor={self.layout.tensor}")
        if any(parameter.stored.grad is not None for parameter in self._parameters.values()):
            raise RuntimeError("gradients of the last step are still there; call optimizer_step or zero_grad")
        return self.forward_and_backward(ids, labels)

    def forward_and_backward(self, ids: Tensor, labels: Tensor) -> Tensor:
        with loss_parallel() if self.layout.tensor > 1 else nullcontext():
            loss = self.model(input_ids=ids, labels=labels, use_cache=False).loss
            reported = _local(loss.detach()).clone()
            work = dist.all_reduce(reported, dist.ReduceOp.AVG, self._data_group, async_op=True)
            loss.backward()
        self._sum_partial_gradients()
        work.wait()
        return reported

    def optimizer_step(self) -> None:
        """AdamW on the local shards; gradients are dropped."""
        for name, shard in self._shards.items():
            # FSDP2 may have moved a shard that does not divide evenly into padded storage.
            shard.data = _local(self._parameters[name].stored.detach())
            shard.grad = self._local_gradient(name)
        self.optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        for parameter in self._parameters.values():
            parameter.stored.grad = None

    def whole_gradients(self) -> dict[str, Tensor]:
        """Every gradient put together from the ranks' parts, for a comparison; all ranks have to call it."""
        return {name: self._whole_gradient(name) for name in self._parameters}

    def _local_gradient(self, name: str) -> Tensor:
        gradient = self._parameters[name].stored.grad
        if gradient is None:
            raise RuntimeError(f"{name} has no gradient; call step first")
        return _local(gradient)

    def _whole_gradient(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        if isinstance(parameter.stored.grad, DTensor):
            return parameter.stored.grad.full_tensor()
        local, placements = self._local_gradient(name), parameter.tensor_placements
        if placements is None:
            return local
        return DTensor.from_local(local, self._mesh["tensor"], placements).full_tensor()

    def _sum_partial_gradients(self) -> None:
        """Under sequence parallelism a norm has seen part of the sequence: one small sum over the tensor ranks."""
        if not self._partial:
            return
        gradients = [self._local_gradient(name) for name in self._partial]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat, group=self._mesh.get_group("tensor"))
        for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))


@dataclass(frozen=True)
class _Parameter:
    stored: nn.Parameter  # what gets the gradient: a DTensor, or DDP's plain tensor
    tensor_placements: Sequence[Placement] | None  # on the tensor axis alone; None if it is not cut there


def build(
    config: LlamaConfig,
    layout: Layout,
    *,
    activation_checkpointing: bool = False,
    tensors: Tensors = "replicated",
    reshard_after_forward: bool = True,
    prefetch_depth: int = 1,
    precision: Literal["fp32", "bf16"] = "fp32",
    seed: int = 0,
    optimizer: dict[str, Any] | None = None,
) -> Baseline:
    """An unmodified Llama with the random weights of ``seed``, on the layout's ranks.

    Tensor parallelism first, recomputation and data parallelism around it. ``reshard_after_forward=False`` keeps the
    gathered weights until backward: fewer bytes sent for more memory. In bf16 FSDP2 casts the weights, and reduces gradients in
    fp32, also of one shard. ``optimizer`` holds options of AdamW; gradients are not accumulated over steps.
    """
    _check(config, layout)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).train()
    mesh, _ = make_meshes(layout)

    if layout.tensor > 1:
        plan = _plan(model, tensors)
        # Every rank has drawn the same weights: each cuts out its own part, nothing is sent.
        parallelize_module(model, mesh["tensor"], plan, src_data_rank=None)
    placements = {n: p.placements if isinstance(p, DTensor) else None for n, p in model.named_parameters()}
    if activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    wrapped: nn.Module = model
    if layout.shards > 1 or precision == "bf16":
        _fully_shard(model, mesh, layout, reshard_after_forward, precision)
        _prefetch(model, prefetch_depth)
    elif layout.replicas > 1:
        # FSDP2 with one shard copies every weight in and every gradient out.
        wrapped = DistributedDataParallel(
            model,
            device_mesh=mesh["replicate"],
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
            init_sync=False,
        )

    # DDP makes plain tensors of DTensors here and takes them out of the modules in the first forward.
    parameters = {n: _Parameter(p, placements[n]) for n, p in model.named_parameters()}
    cut_sequence = tensors != "replicated" and layout.tensor > 1
    return Baseline(
        wrapped,
        layout,
        mesh,
        parameters,
        [name for name in parameters if cut_sequence and "norm" in name],
        {"fused": True} | (optimizer or {}),
    )


def _check(config: LlamaConfig, layout: Layout) -> None:
    if dist.get_world_size() != layout.world:
        raise ValueError(f"{layout} needs {layout.world} ranks, there are {dist.get_world_size()}")
    if config.tie_word_embeddings:
        raise ValueError("embedding and head are sharded apart; set tie_word_embeddings=False")
    for what, count in (
        ("attention heads", config.num_attention_heads),
        ("key/value heads", config.num_key_value_heads),
        ("features", config.hidden_size),
        ("features of the MLP", config.intermediate_size),
        ("tokens of the vocabulary", config.vocab_size),
    ):
        if count % layout.tensor:
            raise ValueError(f"{count} {what} do not divide over tensor={layout.tensor}")


_meshes: dict[tuple[Any, ...], tuple[Any, DeviceMesh]] = {}


def _mesh(names: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
    """The one mesh of these axes in this world: DTensor's caches take equal meshes for the same object."""
    world, mesh = _meshes.get((names, sizes), (None, None))
    if mesh is None or world is not dist.group.WORLD:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        _meshes[names, sizes] = (dist.group.WORLD, mesh)
    return mesh


def make_meshes(layout: Layout) -> tuple[DeviceMesh, DeviceMesh]:
    """Of (replicate, shard, tensor), and of (data, tensor)."""
    sizes = (layout.replicas, layout.shards, layout.tensor)
    return _mesh(("replicate", "shard", "tensor"), sizes), _mesh(
        ("data", "tensor"), (layout.data, layout.tensor)
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# -- tensor parallelism ---------------------------------------------------------------------------------------------------


def _plan(model: LlamaForCausalLM, tensors: Tensors) -> dict[str, ParallelStyle]:
    """Column- and row-parallel linears.

    If activations are cut along the sequence, norms and residuals are as well, and each all-reduce becomes an
    all-gather and a reduce-scatter.
    """
    outside = Replicate() if tensors == "replicated" else Shard(1)
    plan: dict[str, ParallelStyle] = {
        # Cut over its features: gathering them sends half of what summing over a cut vocabulary does, and DTensor's
        # gradient of a cut vocabulary is that of the whole one on every rank. The output stays a DTensor: it has the
        # length of the whole sequence, from which the model derives positions and mask.
        "model.embed_tokens": ColwiseParallel(output_layouts=outside, use_local_output=False),
        "model.layers.0": PrepareModuleInput(
            input_layouts=outside, desired_input_layouts=outside, use_local_output=True
        ),
        "lm_head": ColwiseParallel(input_layouts=outside, output_layouts=Shard(-1), use_local_output=False),
    }
    if tensors == "megatron":
        plan["lm_head"] = megatron.Columns()
    for i in range(len(model.model.layers)):
        name = f"model.layers.{i}"
        plan |= _megatron_layer_plan(name) if tensors == "megatron" else _layer_plan(name, outside)
    return plan


def _megatron_layer_plan(name: str) -> dict[str, ParallelStyle]:
    return {
        f"{name}.self_attn": megatron.Columns("q_proj", "k_proj", "v_proj"),
        f"{name}.mlp": megatron.Columns("gate_proj", "up_proj"),
        f"{name}.self_attn.o_proj": megatron.Rows(),
        f"{name}.mlp.down_proj": megatron.Rows(),
    }


def _layer_plan(name: str, outside: Replicate | Shard) -> dict[str, ParallelStyle]:
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    whole = Replicate()
    return {
        # One DTensor for all the linears that read it: their gradients are added before they are reduced.
        f"{name}.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": outside},
            desired_input_kwarg_layouts={"hidden_states": whole},
        ),
        f"{name}.mlp": PrepareModuleInput(input_layouts=outside, desired_input_layouts=whole),
        **{f"{name}.{column}": ColwiseParallel() for column in columns},
        **{f"{name}.{row}": RowwiseParallel(output_layouts=outside) for row in rows},
    }


# -- data parallelism -----------------------------------------------------------------------------------------------------


def _fully_shard(
    model: LlamaForCausalLM,
    mesh: DeviceMesh,
    layout: Layout,
    reshard_after_forward: bool,
    precision: Literal["fp32", "bf16"],
) -> None:
    """A group for each layer, one for the embedding, one for the last norm and the head."""
    data_mesh = mesh["replicate", "shard"] if layout.replicas > 1 else mesh["shard"]
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard = functools.partial(fully_shard, mesh=data_mesh, mp_policy=policy)
    inner = model.model
    shard(inner.embed_tokens, reshard_after_forward=reshard_after_forward)
    # A lookup's gradient does not read the weight: no second gather.
    inner.embed_tokens.set_unshard_in_backward(False)
    for layer in inner.layers:
        shard(layer, reshard_after_forward=reshard_after_forward)
    # Backward begins with these: they stay gathered.
    shard([inner.norm, model.lm_head], reshard_after_forward=False)
    shard(model)


def _prefetch(model: LlamaForCausalLM, depth: int) -> None:
    """While a group computes, the weights of the next ``depth`` are on their way, forward and backward."""
    order = [model, model.model.embed_tokens, *model.model.layers, model.lm_head]
    for i, module in enumerate(order):
        module.set_modules_to_forward_prefetch(order[i + 1 : i + 1 + depth])
    backward = order[:1:-1]  # the embedding is not gathered again
    for i, module in enumerate(backward):
        module.set_modules_to_backward_prefetch(backward[i + 1 : i + 1 + depth])
