"""The programs of training steps, of Fourfold on a grid and of stock PyTorch, and what their collectives cost alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes
from transformers import LlamaConfig

from benchmarks import baseline
from benchmarks.slow_motion.program import COMPUTE, Item, Program
from benchmarks.slow_motion.recorder import Recorder
from fourfold.dry_run.recorder import replaced
from fourfold.dry_run.run import as_module, fake_grid
from fourfold.hf.init_recorder import restore_buffers
from fourfold.optim.clip import clip_grad_norm_
from fourfold.optim.sharded_optimizer import sharded_optimizer
from fourfold.parallel.options import Options
from fourfold.parallel.parallelize import arrange
from fourfold.planner.cost.collective import collective_s
from fourfold.planner.inputs.cluster import Cluster

Shape = tuple[int, int, int, int]
Step = Callable[[Program], None]


@dataclass(frozen=True)
class Job:
    """What is trained, whatever the layout."""

    config: dict[str, Any]
    sequences: int  # of the global batch
    length: int


def fourfold(
    job: Job, shape: Shape, cluster: Cluster, *, clips: bool = True, optimizes: bool = True, **options: Any
) -> Program:
    """Forward, backward, clipping and AdamW of a rank on a grid (data, z, y, x), after steps that are not recorded."""
    with fake_grid(shape) as grid:
        model = as_module(job.config)
        arrange(model, grid, Options(**options), seed=0, is_dry=True)
        restore_buffers(model, grid.device)
        rows = grid.local_rows(job.sequences)

        def begin() -> Step:
            model.to_empty(device=grid.device)
            ids = torch.zeros(rows.stop - rows.start, job.length, dtype=torch.int64)
            optimizer = sharded_optimizer(torch.optim.AdamW)(
                model.parameters(), lr=1e-4, foreach=False, fused=True
            )

            def step(program: Program) -> None:
                loss = model(input_ids=ids, labels=ids).loss
                program.backward = program.record(COMPUTE)
                loss.backward()
                if clips:
                    clip_grad_norm_(model.parameters(), 1.0, grid)
                if optimizes:
                    optimizer.step()
                optimizer.zero_grad()

            return step

        return _recorded(begin, cluster)


def stock(job: Job, layout: baseline.Layout, cluster: Cluster, **options: Any) -> Program:
    """A step of stock PyTorch: FSDP2 with prefetch, `parallelize_module`, loss parallel, fused AdamW; without clipping."""
    shape = (layout.replicas, layout.shards, 1, layout.tensor)
    with fake_grid(shape):
        baseline.make_meshes(layout)  # which reads values
        config = LlamaConfig(**{k: v for k, v in job.config.items() if k != "model_type"})

        def begin() -> Step:
            built = baseline.build(config, layout, precision="bf16", **options)
            rows = built.local_rows(job.sequences)
            ids = torch.zeros(rows.stop - rows.start, job.length, dtype=torch.int64)

            def step(program: Program) -> None:
                built.forward_and_backward(ids, ids)
                built.optimizer_step()

            return step

        return _recorded(begin, cluster)


def price_of(cluster: Cluster) -> Callable[[Item], float]:
    """What a collective of a program takes on this cluster if it has its links for itself."""

    def price(item: Item) -> float:
        _, kind, (stride, ranks), size = item
        return collective_s(kind, size, ranks, stride, cluster)

    return price


def link_of(cluster: Cluster) -> Callable[[Item], str]:
    """The link that a collective of a program uses, as the planner names it."""

    def link(item: Item) -> str:
        _, _, (stride, ranks), _ = item
        return "between nodes" if ranks * stride > cluster.links.devices_per_node else "inside a node"

    return link


def _recorded(begin: Callable[[], Step], cluster: Cluster) -> Program:
    from transformers import masking_utils

    recorder = Recorder(cluster)
    # transformers reads off the positions whether documents are packed, which fake tensors do not have.
    unpacked = replaced(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    # A mesh reads its own ranks.
    make = DeviceMesh.__init__

    def make_outside(*args: Any, **options: Any) -> None:
        with _disable_current_modes():
            make(*args, **options)

    meshes = replaced(DeviceMesh, "__init__", make_outside)
    with FakeTensorMode(allow_non_fake_inputs=True), unpacked, meshes, recorder.streams():
        with recorder.recording() as program:
            step = begin()
            step(program)  # linears that share an input, FSDP2's buffers, the order of streamed weights
        with recorder.recording() as program:
            step(program)
    return program
