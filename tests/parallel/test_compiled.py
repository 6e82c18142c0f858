"""Blocks that are compiled: one graph for all of them, with the same bits as without where the graph's operators are the same."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.mesh import operators
from fourfold.mesh.collectives import Pending
from fourfold.parallel import compiled
from tests.models import batch, build

Shape = tuple[int, int, int, int]
SMALL = ff.Overlap(
    bundle_bytes=256, interleave=False
)  # matrices have collectives of their own, and half-batches do not alternate


def step(grid: Grid, kind: str, changes: dict[str, Any], options: dict[str, Any]) -> list[Tensor]:
    """The losses and gradients of two steps, the second of two micro-batches; the first forward is not compiled."""
    model = build(kind, **changes)
    ff.parallelize(model, grid, **{"weights": "fsdp2", **options})
    ids = batch(4, 16)[0]
    ids = ids[grid.local_rows(len(ids))]
    model(input_ids=ids, labels=ids).loss.backward()
    found: list[Tensor] = []
    for _ in range(2):
        model.zero_grad()
        with ff.no_sync(model):
            model(input_ids=ids, labels=ids).loss.backward()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        gradients: list[Any] = [p.grad for p in model.parameters()]
        found += [loss.detach(), *(getattr(g, "_local_tensor", g).clone() for g in gradients)]
    return found


def compare(shape: Shape, kind: str, changes: dict[str, Any], options: dict[str, Any]) -> tuple[int, int]:
    """(graphs, breaks); raises if a bit differs."""
    compiled.BACKEND = "aot_eager"
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    grid = Grid.create(shape)
    right = step(grid, kind, changes, options)
    for mine, expected in zip(step(grid, kind, changes, options | {"compile": True}), right, strict=True):
        assert torch.equal(mine, expected)
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.parametrize(
    ("shape", "kind", "changes", "options"),
    [
        ((1, 2, 1, 1), "llama", {}, {"activation_checkpointing": "selective"}),
        pytest.param((1, 1, 1, 2), "llama", {"num_hidden_layers": 3}, {}, marks=pytest.mark.nightly),
        pytest.param((1, 1, 2, 1), "qwen3", {}, {"activation_checkpointing": "full", "accumulation": "sharded"}, marks=pytest.mark.nightly),
        pytest.param((1, 1, 1, 2), "gpt2", {}, {"activation_checkpointing": "selective", "precision": "bf16"}, marks=pytest.mark.nightly),
        pytest.param((1, 1, 1, 2), "qwen2", {"num_key_value_heads": 1}, {"activations": "replicated"}, marks=pytest.mark.nightly),
        pytest.param((1, 1, 2, 1), "llama", {}, {"overlap": ff.Overlap(keep_inputs=False)}, marks=pytest.mark.nightly),
        pytest.param((2, 1, 1, 1), "gpt2", {}, {}, marks=pytest.mark.nightly),
        ((1, 2, 1, 1), "llama", {"num_hidden_layers": 3}, {"weights": "streamed", "activation_checkpointing": "selective", "overlap": SMALL}),
        pytest.param((1, 1, 1, 2), "llama", {}, {"weights": "streamed", "precision": "bf16", "overlap": SMALL}, marks=pytest.mark.nightly),
        pytest.param((1, 1, 2, 1), "qwen3", {}, {"weights": "streamed", "activation_checkpointing": "full", "overlap": SMALL}, marks=pytest.mark.nightly),
        pytest.param((2, 1, 1, 1), "gpt2", {}, {"weights": "streamed", "accumulation": "sharded", "overlap": SMALL}, marks=pytest.mark.nightly),
        pytest.param((1, 2, 2, 2), "llama", {}, {"weights": "streamed", "activation_checkpointing": "selective", "overlap": SMALL}, marks=pytest.mark.nightly),
        pytest.param((1, 1, 2, 1), "gemma2", {}, {"precision": "bf16"}, marks=pytest.mark.nightly),
        pytest.param((1, 1, 1, 2), "llama", {}, {"float8": "rowwise_with_gw_hp", "activation_checkpointing": "selective"}, marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_one_graph_with_the_same_bits(
    pool: RankPool, shape: Shape, kind: str, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    for graphs, breaks in pool.run(compare, math.prod(shape), shape, kind, changes, options):
        # Also of Gemma 2, whose blocks differ by the mask that they get.
        assert (graphs, breaks) == (1, 0)


def forget(shape: Shape) -> bool:
    """Are the bits the same if the sums of norms are left out of the graph?"""
    real = operators.TracedCollectives.all_reduce

    def all_reduce(*args: Any, **kwargs: Any) -> Pending:
        return Pending()

    operators.TracedCollectives.all_reduce = all_reduce  # type: ignore[method-assign]
    try:
        compare(shape, "llama", {}, {})
    except AssertionError:
        return False
    finally:
        operators.TracedCollectives.all_reduce = real  # type: ignore[method-assign]
    return True


@pytest.mark.nightly
def test_a_sum_that_is_left_out_is_found(pool: RankPool) -> None:
    assert pool.run(forget, 2, (1, 1, 2, 1)) == [False, False]


MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


def work(shape: Shape, options: dict[str, Any]) -> None:
    """Raises if a compiled step has other collectives, or another number of matmuls."""
    compiled.BACKEND = "aot_eager"
    torch._dynamo.reset()
    grid = Grid.create(shape)
    ids = batch(4, 16)[0]
    ids = ids[grid.local_rows(len(ids))]
    found = []
    for is_compiled in (False, True):
        model = build("llama")
        ff.parallelize(model, grid, weights="fsdp2", compile=is_compiled, **options)
        for _ in range(2):  # the second one is traced
            model(input_ids=ids, labels=ids).loss.backward()
        with torch.profiler.profile() as profile, grid.collectives.counting() as entries:
            model(input_ids=ids, labels=ids).loss.backward()
        matmuls = sum(e.count for e in profile.key_averages() if e.key in MATMULS)
        found.append({matmuls, *entries})
    assert found[0] == found[1], "\n".join(map(str, found[0] ^ found[1]))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 1, 1, 2), {"activation_checkpointing": "selective"}),
        pytest.param((1, 1, 2, 2), {}, marks=pytest.mark.nightly),
        pytest.param((1, 1, 2, 1), {"activation_checkpointing": "full"}, marks=pytest.mark.nightly),
        pytest.param((1, 1, 2, 2), {"activation_checkpointing": "selective"}, marks=pytest.mark.nightly),
        pytest.param((1, 2, 1, 2), {"activations": "replicated", "activation_checkpointing": "full"}, marks=pytest.mark.nightly),
        pytest.param((1, 1, 2, 2), {"overlap": ff.Overlap(forward_chunks=2)}, marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_a_graph_multiplies_and_sends_what_blocks_do(
    pool: RankPool, shape: Shape, options: dict[str, Any]
) -> None:
    pool.run(work, math.prod(shape), shape, options)


def overlapped(shape: Shape) -> list[int]:
    """The number of matmuls between start and end of each reduction of an input's gradient, in the code that Inductor makes."""
    compiled.BACKEND = "inductor"
    torch._dynamo.reset()
    grid = Grid.create(shape)
    ids = batch(4, 16)[0]
    model = build("llama")
    ff.parallelize(model, grid, weights="fsdp2", compile=True)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    step()
    torch._dynamo.utils.counters.clear()
    with torch._inductor.config.patch(fx_graph_cache=False):
        _, (_, backward) = torch._inductor.utils.run_and_get_code(step)
    # Its key does not have what a sharded product does: a run with other options would find the graph of this one.
    asked = [name for name in torch._dynamo.utils.counters["aot_autograd"] if "cache" in name]
    assert not asked, asked
    found, started = [], 0
    for line in backward[backward.index("def call(") :].splitlines():
        if "fourfold.start.default" in line and "'reduce_scatter'" in line:
            started = 0
        elif "fourfold.finish.default" in line and "'reduce_scatter'" in line:
            found.append(started)
        started += "extern_kernels." in line
    return found


@pytest.mark.nightly  # it needs a C++ compiler
def test_matmuls_of_weights_overlap_with_the_reduction_of_the_gradient_of_their_input(pool: RankPool) -> None:
    # Of gate and up, and of q, k and v; o and down reduce nothing where y = 1.
    assert pool.run(overlapped, 2, (1, 1, 1, 2)) == [[2, 3], [2, 3]]


def compiled_by_the_user(shape: Shape, weights: str) -> None:
    torch._dynamo.reset()
    grid = Grid.create(shape)
    ids = batch(4, 16)[0]
    ids = ids[grid.local_rows(len(ids))]
    model = build("llama")
    ff.parallelize(model, grid, weights=weights)
    right = model(input_ids=ids, labels=ids).loss
    assert torch.equal(torch.compile(model, backend="aot_eager")(input_ids=ids, labels=ids).loss, right)
    for block in model.model.layers:
        block.compile(backend="aot_eager")
    assert torch.equal(model(input_ids=ids, labels=ids).loss, right)


@pytest.mark.nightly
@pytest.mark.parametrize("weights", ["fsdp2", "streamed"])
def test_torch_compile_of_a_parallel_model_leaves_it_as_it_is(pool: RankPool, weights: str) -> None:
    pool.run(compiled_by_the_user, 2, (1, 1, 1, 2), weights)
