"""Training steps on a fake CUDA device, in several ways and with planted faults."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import masking_utils

import fourfold as ff
from fourfold.dry_run.recorder import replaced
from fourfold.mesh.axes import AXES
from fourfold.mesh.collectives import Pending
from fourfold.mesh.grid import Grid
from fourfold.mesh.offloading import Copy, CudaCopies, HostMemory, _Input
from fourfold.parallel import parallelize
from fourfold.parallel.context import documents, prefix
from fourfold.parallel.loss.cross_entropy import count_labels
from fourfold.parallel.options import Options
from tests.fake_cuda.sanitizer import Sanitizer
from tests.models import construct

DEVICE = torch.device("cuda", 0)
Shape = tuple[int, int, int, int]
WAYS: dict[str, tuple[Shape, dict[str, Any]]] = {
    "fsdp2": ((1, 2, 1, 2), {"weights": "fsdp2"}),
    "fsdp2, replicas": ((2, 2, 2, 1), {"weights": "fsdp2", "accumulation": "whole"}),
    "fsdp2, replicas, sharded gradients, offloaded": (
        (2, 2, 1, 2),
        {
            "weights": "fsdp2",
            "accumulation": "sharded",
            "activation_checkpointing": "selective",
            "activation_offloading": True,
        },
    ),
    "fsdp2, sequence-parallel": (
        (1, 2, 2, 2),
        {
            "weights": "fsdp2",
            "activations": "sequence-parallel",
            "activation_checkpointing": "full",
            "overlap": ff.Overlap(keep_inputs=False),
        },
    ),
    "streamed": ((2, 2, 2, 2), {"weights": "streamed", "overlap": ff.Overlap(bundle_bytes=256)}),
    "streamed, two half-batches": (
        (1, 2, 1, 2),
        {"weights": "streamed", "overlap": ff.Overlap(interleave=True)},
    ),
    "streamed, recomputed": (
        (1, 4, 1, 2),
        {"weights": "streamed", "activation_checkpointing": "full", "activations": "replicated"},
    ),
    "streamed, two half-batches, offloaded": (
        (1, 2, 2, 1),
        {
            "weights": "streamed",
            "overlap": ff.Overlap(interleave=True),
            "activation_checkpointing": "selective",
            "activation_offloading": True,
        },
    ),
    "fsdp2, shared sequences": (
        (1, 4, 1, 2),
        {"weights": "fsdp2", "activation_checkpointing": "selective", "sequence_ranks": 2},
    ),
}


@contextmanager
def fake_grid(shape: Shape, sequence_ranks: int = 1) -> Iterator[Grid]:
    dist.init_process_group("fake", rank=0, world_size=math.prod(shape), store=FakeStore())
    try:
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=AXES)
        grid = Grid.from_mesh(mesh, DEVICE, sequence_ranks=sequence_ranks)
        grid.collectives._on_gloo = False  # the branches for NCCL
        yield grid
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()


def steps(
    shape: Shape, options: dict[str, Any], after_backward: Callable[[Tensor], Any] = lambda loss: None
) -> tuple[int, list[str]]:
    """Two steps of two micro-batches; how many kernels, and what the sanitizer found."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    sanitizer = Sanitizer()
    share = options.get("sequence_ranks", 1)
    options = {name: value for name, value in options.items() if name != "sequence_ranks"}
    shard = parallelize.shard_weights

    def shard_fake(*arguments: Any, **more: Any) -> Any:
        with mode:  # FSDP2 allocates on the device
            return shard(*arguments, **more)

    with torch.device("meta"):
        model = construct("llama")
    # transformers reads values of positions, which a fake tensor does not have.
    found = replaced(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    # Read once in a forward of shared sequences, before its first layer.
    sizes = replaced(documents, "sizes_of", documents.one_document)
    with fake_grid(shape, share) as grid, found, sizes:
        with replaced(parallelize, "shard_weights", shard_fake):
            parallelize.arrange(model, grid, Options(precision="bf16", **options))
        with mode:
            model.to_empty(device=DEVICE)
            optimizer = ff.sharded_optimizer(torch.optim.AdamW)(model.parameters(), lr=1e-3, fused=True)
            ids = torch.zeros(8, 32, dtype=torch.int64, device=DEVICE)
            inputs = {"input_ids": ids, "labels": ids}
            if share > 1:
                inputs = ff.cut_sequences(ids, grid, labels=ids)
            try:
                with sanitizer, sanitizer.collectives():
                    for _ in range(2):
                        _step(model, optimizer, inputs, grid, after_backward)
            except Exception as error:
                sanitizer.found.append(f"{type(error).__name__}: {str(error)[:300]}")
    return sanitizer.kernels, sorted(set(sanitizer.found))


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: dict[str, Tensor],
    grid: Grid,
    after_backward: Callable[[Tensor], Any],
) -> None:
    labels = count_labels(inputs["labels"], grid, shift=grid.sequence_ranks == 1)
    first, last = ({name: tensor.chunk(2)[i] for name, tensor in inputs.items()} for i in range(2))
    model(**first)  # without a backward
    with ff.no_sync(model):
        model(**first, num_items_in_batch=labels).loss.backward()
    loss = model(**last, num_items_in_batch=labels).loss
    loss.backward()
    after_backward(loss)
    ff.clip_grad_norm_(model.parameters(), 1.0, grid)
    optimizer.step()
    optimizer.zero_grad()


# -- faults -----------------------------------------------------------------------------------------------------------


def without_waiting() -> tuple[int, list[str]]:
    """The activations of the sharded products are not waited for."""
    with replaced(Pending, "wait", lambda pending: None):
        return steps(*WAYS["fsdp2"])


def without_recording() -> tuple[int, list[str]]:
    """The allocator is not told that FSDP2's all-reduce stream uses a buffer of its reduce-scatter stream."""
    with replaced(Sanitizer, "note_stream", lambda sanitizer, tensor, stream: None):
        return steps(*WAYS["fsdp2, replicas, sharded gradients, offloaded"])


def _offloaded(changed: Any, name: str, by: Any) -> tuple[int, list[str]]:
    with replaced(changed, name, by):
        return steps(*WAYS["fsdp2, replicas, sharded gradients, offloaded"])


def _copy_at_once(copies: CudaCopies, source: Tensor, target: Tensor) -> Copy:
    with torch.cuda.stream(copies._stream):
        target.copy_(source, non_blocking=True)
    done = copies._stream.record_event()
    return Copy(target, lambda: torch.cuda.current_stream().wait_event(done))


def _without_wait(copy: Copy, result: Any, wait: Any) -> None:
    copy.result, copy.wait = result, lambda: None


def _bounds_in_each_layer() -> tuple[int, list[str]]:
    attend = prefix.attend

    def reading(query: Tensor, keys: Tensor, values: Tensor, bounds: Any, *more: Any) -> Any:
        return attend(
            query, keys, values, bounds._replace(longest_keys=int(bounds.of_keys.diff().max())), *more
        )

    with replaced(prefix, "attend", reading):
        return steps(*WAYS["fsdp2, shared sequences"])


FAULTS: dict[str, Callable[[], tuple[int, list[str]]]] = {
    "no wait": without_waiting,
    "no record_stream": without_recording,
    "offloaded too early": lambda: _offloaded(CudaCopies, "_copy", _copy_at_once),
    "offloaded, no wait": lambda: _offloaded(Copy, "__init__", _without_wait),
    "offloaded, no wait to free": lambda: _offloaded(
        _Input, "leave_device", lambda input: vars(input).update(_device=None)
    ),
    "offloaded, no record_stream": lambda: _offloaded(CudaCopies, "will_free", lambda *_: None),
    "offloaded, from pageable memory": lambda: _offloaded(
        HostMemory, "take", lambda memory, like: torch.empty_like(like, device="cpu")
    ),
    "the loss is read": lambda: steps(*WAYS["fsdp2"], after_backward=Tensor.item),
    "bounds are read in each layer": _bounds_in_each_layer,
    "the loss is copied": lambda: steps(*WAYS["fsdp2"], after_backward=Tensor.cpu),
    "the stream is waited for": lambda: steps(
        *WAYS["fsdp2"], after_backward=lambda loss: torch.accelerator.current_stream().synchronize()
    ),
}
