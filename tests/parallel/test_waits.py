"""Every collective is waited for before its result is read, and its input stays until then, however late it happens."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.mesh.collectives import Collectives, Pending
from tests.late import Seen, late_collectives
from tests.models import batch, build

Shape = tuple[int, int, int, int]
WAYS: dict[str, dict[str, Any]] = {
    "streamed": {"weights": "streamed", "overlap": ff.Overlap(bundle_bytes=256, forward_chunks=3)},
    "streamed, replicated": {
        "weights": "streamed",
        "activations": "replicated",
        "activation_checkpointing": "full",
        "overlap": ff.Overlap(bundle_bytes=256),
    },
    "streamed, recomputed": {
        "weights": "streamed",
        "activation_checkpointing": "full",
        "overlap": ff.Overlap(bundle_bytes=256, keep_inputs=False),
    },
    "fsdp2": {"weights": "fsdp2", "overlap": ff.Overlap(forward_chunks=3)},
    "fsdp2, recomputed": {
        "weights": "fsdp2",
        "activation_checkpointing": "full",
        "overlap": ff.Overlap(keep_inputs=False),
    },
    # By Inductor, which uses memory again as soon as the graph allows it.
    "fsdp2, compiled": {"weights": "fsdp2", "compile": True, "overlap": ff.Overlap(forward_chunks=3)},
    "fsdp2, compiled, recomputed": {
        "weights": "fsdp2",
        "compile": True,
        "activation_checkpointing": "selective",
    },
    "streamed, compiled": {
        "weights": "streamed",
        "compile": True,
        "overlap": ff.Overlap(bundle_bytes=256),
    },
}


def steps(grid: Grid, options: dict[str, Any], *, late: bool) -> tuple[list[Tensor], Seen]:
    """The loss and the gradients of two steps, the second of them of two micro-batches."""
    model = build("llama")
    ff.parallelize(model, grid, **options)
    ids = batch(4, 16)[0]
    ids = ids[grid.local_rows(len(ids))]
    seen, found = Seen(), []
    with late_collectives() if late else nullcontext(seen) as seen:
        for micro_batches in (1, 2):
            model.zero_grad()
            for i in range(micro_batches):
                with ff.no_sync(model) if i < micro_batches - 1 else nullcontext():
                    loss = model(input_ids=ids, labels=ids).loss
                    loss.backward()
            found += [loss.detach(), *(p.grad._local_tensor.clone() for p in model.parameters())]  # type: ignore[union-attr]
        norm = ff.clip_grad_norm_(model.parameters(), 1.0, grid)
    return [*found, norm], seen


def compare(shape: Shape, way: str) -> tuple[bool, Seen]:
    """Are late results bit-equal to those of prompt collectives? And what was seen."""
    grid = Grid.create(shape)
    prompt, _ = steps(grid, WAYS[way], late=False)
    late, seen = steps(grid, WAYS[way], late=True)
    return all(torch.equal(a, b) for a, b in zip(prompt, late, strict=True)), seen


IN_CI = ("streamed",)


@pytest.mark.parametrize(
    "way", [way if way in IN_CI else pytest.param(way, marks=pytest.mark.nightly) for way in WAYS]
)
def test_late_collectives_give_the_same_bits(pool: RankPool, way: str) -> None:
    for shape in ((1, 1, 1, 2), (1, 1, 2, 1), (1, 2, 1, 1), (2, 1, 1, 1)):
        if "replicated" in way and shape[2] * shape[3] == 1:
            continue
        for is_equal, seen in pool.run(compare, 2, shape, way):
            assert is_equal, (shape, seen)
            assert seen.changed == []
            assert seen.started > 0
            assert seen.waited == seen.started, (shape, "never waited for", seen.started - seen.waited)


def forget_a_wait(shape: Shape, way: str) -> bool:
    """The same, with the waits for norms left out."""
    real = Collectives.all_reduce

    def all_reduce(
        self: Collectives, tensor: Tensor, axis: Any, purpose: Any, *rest: Any, **more: Any
    ) -> Pending:
        pending = real(self, tensor, axis, purpose, *rest, **more)
        return Pending() if purpose == "norm" else pending

    Collectives.all_reduce = all_reduce  # type: ignore[method-assign]
    try:
        return compare(shape, way)[0]
    finally:
        Collectives.all_reduce = real  # type: ignore[method-assign]


def test_a_missing_wait_is_found(pool: RankPool) -> None:
    assert pool.run(forget_a_wait, 2, (1, 1, 2, 1), "fsdp2") == [False, False]
