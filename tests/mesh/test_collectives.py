"""Calls and bytes of collectives compared with values computed by hand; differentiable sums compared with closed forms."""

import ast
import gc
import time
import weakref
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fourfold
import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold.hf.parameter_layout import chunk
from fourfold.mesh import collectives
from fourfold.mesh.axes import Axis
from fourfold.mesh.collectives import Entry
from fourfold.mesh.grid import Grid
from fourfold.mesh.reductions import sum_backward, sum_both, sum_forward
from tests.models import batch, build

SHAPE = (1, 2, 1, 4)


def as_tuples(entries: list[Entry]) -> list[tuple[str, str, str, int, int, int, float]]:
    return [(e.axis, e.kind, e.purpose, e.ranks, e.calls, e.payload_bytes, e.bytes_sent) for e in entries]


# -- counting -------------------------------------------------------------------------------------------------------


def count_each_kind() -> list[tuple[str, str, str, int, int, int, float]]:
    collectives = Grid.create(SHAPE).collectives
    with collectives.counting() as entries:
        collectives.all_reduce(torch.zeros(10, 3), "x", "activation").wait()
        collectives.all_reduce(torch.zeros(5, dtype=torch.bfloat16), "x", "activation").wait()
        collectives.all_reduce(torch.zeros(2), "x", "norm").wait()
        collectives.all_gather(torch.zeros(4, 6), torch.zeros(6), "x", "logits").wait()
        collectives.reduce_scatter(torch.zeros(7), torch.zeros(14), "z", "gradient").wait()
        collectives.all_to_all(torch.zeros(4, 2), torch.zeros(4, 2), "x", "optimizer").wait()
    return as_tuples(entries)


def test_bytes_and_calls(pool: RankPool) -> None:
    expected = [
        # 10*3 fp32 and 5 bf16: 120 + 10 bytes, of which a ring of 4 sends 2 * 3/4
        ("x", "all_reduce", "activation", 4, 2, 130, 195.0),
        ("x", "all_reduce", "norm", 4, 1, 8, 12.0),
        # the result, 4*6 fp32: 96 bytes, 3/4 of them
        ("x", "all_gather", "logits", 4, 1, 96, 72.0),
        # what is scattered, 14 fp32: 56 bytes, 1/2 of them
        ("z", "reduce_scatter", "gradient", 2, 1, 56, 28.0),
        # the tensor that is sent, 4*2 fp32: 32 bytes, 3/4 of them
        ("x", "all_to_all", "optimizer", 4, 1, 32, 24.0),
    ]
    for counted in pool.run(count_each_kind, 8):
        assert sorted(counted) == sorted(expected)


def compute_each_kind() -> list[list[float]]:
    grid = Grid.create(SHAPE)
    x, z = float(grid.coordinate("x")), float(grid.coordinate("z"))
    total, highest = torch.tensor([x, 10 * z]), torch.tensor([x, 10 * z])
    grid.collectives.all_reduce(total, "x", "activation").wait()
    grid.collectives.all_reduce(highest, "x", "loss", dist.ReduceOp.MAX).wait()
    gathered, scattered = torch.zeros(4), torch.zeros(1)
    grid.collectives.all_gather(gathered, torch.tensor([x + 10 * z]), "x", "logits").wait()
    grid.collectives.reduce_scatter(scattered, torch.tensor([x, x + 100 + z]), "z", "gradient").wait()
    exchanged = torch.zeros(4)
    grid.collectives.all_to_all(exchanged, x + 10 * torch.arange(4.0), "x", "optimizer").wait()
    return [t.tolist() for t in (total, highest, gathered, scattered, exchanged)]


def test_values(pool: RankPool) -> None:
    for rank, (total, highest, gathered, scattered, exchanged) in enumerate(pool.run(compute_each_kind, 8)):
        x, z = rank % 4, rank // 4
        assert total == [0 + 1 + 2 + 3, 4 * 10 * z]
        assert highest == [3, 10 * z]
        assert gathered == [10 * z, 10 * z + 1, 10 * z + 2, 10 * z + 3]
        assert scattered == [2 * x if z == 0 else 2 * x + 201]
        assert exchanged == [10 * x, 10 * x + 1, 10 * x + 2, 10 * x + 3]


def gather_logits(vocabulary: int) -> Any:
    """Column c of row r is 100 r + c."""
    grid = Grid.create(SHAPE)
    full = torch.arange(2.0).view(2, 1) * 100 + torch.arange(vocabulary)
    columns = chunk(vocabulary, grid.x, grid.coordinate("x"))
    return fourfold.full_logits(full[:, columns], grid, vocab_size=vocabulary, batch=(2,)).tolist()


@pytest.mark.parametrize("vocabulary", [8, 11, 5, 3])
def test_full_logits(vocabulary: int, pool: RankPool) -> None:
    for gathered in pool.run(gather_logits, 8, vocabulary):
        assert gathered == [list(range(vocabulary)), list(range(100, 100 + vocabulary))]


def count_on_axes_of_one() -> tuple[list[float], int]:
    """Nothing is sent on `data` and `y`, and the result is the input."""
    collectives = Grid.create(SHAPE).collectives
    values = []
    with collectives.counting() as entries:
        axes: tuple[Axis, ...] = ("data", "y")
        for axis in axes:
            tensor, output = torch.tensor([3.0]), torch.zeros(1)
            collectives.all_reduce(tensor, axis, "activation").wait()
            collectives.all_gather(output, tensor, axis, "logits").wait()
            collectives.reduce_scatter(tensor, output, axis, "gradient").wait()
            collectives.all_to_all(output, tensor, axis, "optimizer").wait()
            values += [output.item(), tensor.item()]
            leaf = tensor.requires_grad_()
            for form in (sum_forward, sum_backward, sum_both):
                values.append(float(form(leaf, collectives, axis, "norm").detach()))
        collectives.all_reduce(torch.zeros(1), None, "activation").wait()
    return values, len(entries)


def test_axes_of_one_rank_cost_nothing(pool: RankPool) -> None:
    for values, entries in pool.run(count_on_axes_of_one, 8):
        assert values == [3.0] * 10
        assert entries == 0


def count_in_nested_contexts() -> dict[str, list[int]]:
    """Calls over x: 1 outside, 2 in the outer context, 3 in the inner one, then 4 in one that fails."""
    collectives = Grid.create(SHAPE).collectives

    def send(times: int) -> None:
        for _ in range(times):
            collectives.all_reduce(torch.zeros(1), "x", "loss").wait()

    send(1)
    with collectives.counting() as outer:
        send(1)
        with collectives.counting() as inner:
            send(3)
        send(1)
    with suppress(KeyError), collectives.counting() as failed:
        send(4)
        raise KeyError
    found = {"outer": outer, "inner": inner, "failed": failed}
    return {name: [e.calls for e in entries] for name, entries in found.items()}


def test_counting_nests(pool: RankPool) -> None:
    for calls in pool.run(count_in_nested_contexts, 8):
        assert calls == {"outer": [5], "inner": [3], "failed": [4]}


# -- differentiable forms ----------------------------------------------------------------------------------------------


def differentiate() -> dict[str, tuple[float, float, int]]:
    """With t = x + 1 on rank x and f = form(t), the loss is (x + 1) * f^2 / 2; value of f, gradient of t, calls."""
    grid = Grid.create(SHAPE)
    here = float(grid.coordinate("x") + 1)
    found = {}
    for form in (sum_forward, sum_backward, sum_both):
        t = torch.tensor(here, requires_grad=True)
        with grid.collectives.counting() as entries:
            f = form(t, grid.collectives, "x", "norm")
            (here * f.square() / 2).backward()
        assert t.grad is not None
        found[form.__name__] = (f.item(), t.grad.item(), sum(e.calls for e in entries))
    return found


def test_differentiable_forms(pool: RankPool) -> None:
    for rank, found in enumerate(pool.run(differentiate, 8)):
        here = rank % 4 + 1
        # f = 1+2+3+4 = 10 on each rank; its gradient here * f stays as it is
        assert found["sum_forward"] == (10.0, here * 10.0, 1)
        # f = t; the gradients here * t are summed: 1 + 4 + 9 + 16
        assert found["sum_backward"] == (here, 30.0, 1)
        # f = 10; the gradients here * 10 are summed
        assert found["sum_both"] == (10.0, 100.0, 2)


def sum_what_is_not_contiguous() -> tuple[bool, bool, list[list[float]]]:
    grid = Grid.create(SHAPE)
    t = torch.arange(6.0).view(2, 3).requires_grad_()
    before = t.detach().clone()
    total = sum_forward(t.t(), grid.collectives, "x", "norm")
    back = sum_backward(t, grid.collectives, "x", "norm")
    back.t().backward(torch.ones(3, 2) * (grid.coordinate("x") + 1))
    assert t.grad is not None
    return torch.equal(total.detach(), 4 * before.t()), torch.equal(t.detach(), before), t.grad.tolist()


def test_sums_do_not_change_their_input_and_take_any_strides(pool: RankPool) -> None:
    for right, untouched, gradient in pool.run(sum_what_is_not_contiguous, 8):
        assert right
        assert untouched
        assert gradient == [[10.0] * 3] * 2


# -- lifetimes ---------------------------------------------------------------------------------------------------------


def lifetimes() -> list[tuple[bool, bool]]:
    """Whether the tensors of a collective are alive before `wait` and after it, without other references to them."""
    grid = Grid.create(SHAPE)
    found = []
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        small, large = torch.ones(3), torch.ones(12)
        if kind == "all_reduce":
            pending = grid.collectives.all_reduce(large, "x", "activation")
            watched = [weakref.ref(large)]
        elif kind == "all_gather":
            pending = grid.collectives.all_gather(large, small, "x", "logits")
            watched = [weakref.ref(large), weakref.ref(small)]
        else:
            pending = grid.collectives.reduce_scatter(small, large, "x", "gradient")
            watched = [weakref.ref(large), weakref.ref(small)]
        del small, large
        gc.collect()
        alive = all(tensor() is not None for tensor in watched)
        pending.wait()
        pending.wait()  # a second wait returns at once
        # Gloo's own thread may hold them for a moment longer.
        deadline_s = time.monotonic() + 60
        while any(tensor() is not None for tensor in watched) and time.monotonic() < deadline_s:
            gc.collect()
            time.sleep(0.01)
        found.append((alive, any(tensor() is not None for tensor in watched)))
    return found


def test_tensors_live_until_wait_returns(pool: RankPool) -> None:
    for found in pool.run(lifetimes, 8):
        assert found == [(True, False)] * 3


# -- which files call collectives -------------------------------------------------------------------------------------

# By stem: `all_gather_into_tensor`, `broadcast_object_list`, `batch_isend_irecv` and whatever comes next are meant too.
STEMS = (
    "all_reduce",
    "all_gather",
    "all_to_all",
    "reduce",
    "broadcast",
    "gather",
    "scatter",
    "barrier",
    "monitored_barrier",
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend",
)


def collectives_called(source: str) -> list[str]:
    """The collectives of `torch.distributed` that a file names, however it imports them."""
    tree = ast.parse(source)
    modules: dict[str, str] = {}  # a local name -> the dotted name of what it stands for
    found = []

    def is_collective(dotted: str) -> bool:
        module, _, name = dotted.rpartition(".")
        ours = module == "torch.distributed" or module.startswith(
            (
                "torch.distributed.distributed_c10d",
                "torch.distributed._functional_collectives",
                "torch.distributed.nn",
            )
        )
        return ours and name.startswith(STEMS) and not name.startswith("reduce_op")

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                modules[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                if is_collective(f"{node.module}.{alias.name}"):
                    found.append(alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts = [node.attr]
            owner: ast.expr = node.value
            while isinstance(owner, ast.Attribute):
                parts.append(owner.attr)
                owner = owner.value
            if isinstance(owner, ast.Name) and owner.id in modules:
                dotted = ".".join([modules[owner.id], *reversed(parts)])
                if is_collective(dotted):
                    found.append(node.attr)
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.distributed as dist\ndist.all_reduce(t)", ["all_reduce"]),
        ("import torch\ntorch.distributed.barrier()", ["barrier"]),
        ("from torch import distributed as d\nd.all_gather_into_tensor(a, b)", ["all_gather_into_tensor"]),
        ("from torch.distributed import broadcast_object_list as b", ["broadcast_object_list"]),
        ("import torch.distributed.nn.functional as F\nF.all_to_all(a, b)", ["all_to_all"]),
        ("import torch.distributed as dist\ndist.init_process_group('gloo'); dist.get_rank()", []),
        ("import torch\ntorch.gather(t, 0, i); t.scatter_add_(0, i, s)", []),
        ("grid.collectives.all_reduce(t, 'x', 'loss')", []),
    ],
)
def test_the_search_for_collectives_finds_them(source: str, found: list[str]) -> None:
    assert collectives_called(source) == found


# They time collectives in their own process group, without training, and exchange the times.
MEASURING = ["planner/calibrate/calibrate.py", "planner/calibrate/probe.py"]
# Collectives of a step (FSDP2 calls its own through hooks, which report them), and agreements between hosts outside a step.
MODULES = ["mesh/collectives.py", "weights/fsdp2.py", "mesh/agreements.py"]


def test_only_these_files_call_collectives() -> None:
    root = Path(fourfold.__file__).parent
    called = {
        str(path.relative_to(root)): names
        for path in sorted(root.rglob("*.py"))
        if (names := collectives_called(path.read_text()))
    }
    assert set(called) == {*MODULES, *MEASURING}, called


# -- device times ------------------------------------------------------------------------------------------


class LateClock:
    """Like device events: reading a time too early would wait for it."""

    immediate = False

    def __init__(self) -> None:
        self.marks, self.ages = 0, list[int]()

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def elapsed_s(self, start: int, end: int) -> float:
        self.ages.append(self.marks - end)
        return 1.0


def wait_often(times: int) -> tuple[int, float]:
    """(how many marks ago the newest time was recorded that was read on the way, the exposed seconds)."""
    clock = LateClock()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(collectives, "_MAX_UNREAD", 64)
        grid = Grid.create((1, 1, 1, 2))
        grid.collectives.clock = clock
        with grid.collectives.counting() as entries:
            for _ in range(times):
                grid.collectives.all_reduce(torch.ones(1), "x", "check").wait()
            newest = min(clock.ages)
    return newest, sum(entry.exposed_s for entry in entries)


def test_times_are_read_when_the_device_is_past_them(pool: RankPool) -> None:
    """While a rank counts, it must not stop every few waits until its device has caught up."""
    for newest, seconds in pool.run(wait_often, 2, 200):
        assert newest >= 64
        assert seconds == 200


# -- what observing costs ------------------------------------------------------------------------------------------------


def instrumentation(weights: str) -> dict[str, list[int]]:
    """(records, marks of the clock, readings of the time) of a step that is not observed, and of one that is counted."""
    grid = Grid.create((1, 2, 1, 2))
    clock = LateClock()
    clock.immediate = True  # type: ignore[misc]
    grid.collectives.clock = clock
    model = build("llama")
    ff.parallelize(model, grid, weights=weights)  # type: ignore[arg-type]
    ids, labels = (rows[grid.local_rows(4)] for rows in batch(4))
    records: list[object] = []
    readings: list[object] = []

    class Record(collectives.InFlightCollective):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            records.append(None)
            super().__init__(*args, **kwargs)

    class Time:
        @staticmethod
        def time_ns() -> int:
            readings.append(None)
            return 0

    found = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(collectives, "InFlightCollective", Record)
        patched.setattr(collectives, "time", Time)
        for name in ("unobserved", "unobserved again", "counted"):
            records.clear()
            readings.clear()
            clock.marks = 0
            with grid.collectives.counting() if name == "counted" else nullcontext():
                model(input_ids=ids, labels=labels).loss.backward()
            found[name] = [len(records), clock.marks, len(readings)]
    return found


@pytest.mark.parametrize("weights", ["streamed", "fsdp2"])
def test_an_unobserved_step_makes_no_record_and_reads_no_clock(weights: str, pool: RankPool) -> None:
    for found in pool.run(instrumentation, 4, weights):
        assert found["unobserved"] == found["unobserved again"] == [0, 0, 0]
        assert min(found["counted"]) > 0
