"""Batch-split overlap: the same results, and one half-batch computes while a collective of the other is in flight."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.parallel.batch_split import BatchSplit
from tests.models import assert_shards_close, batch, build, gradients, local_gradients

Shape = tuple[int, int, int, int]
OVERLAP = ff.Overlap(bundle_bytes=1024, interleave=True)


def reference(kind: str, rows: int) -> tuple[float, dict[str, torch.Tensor]]:
    ids, labels = batch(rows)
    model = build(kind)
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    return loss.item(), gradients(model)


def interleaved_steps(shape: Shape, kind: str, rows: int, checkpointing: str) -> tuple[float, float]:
    """The loss of the third step, with half-batches that alternate, and that of one process."""
    right_loss, right = reference(kind, rows)
    model, grid = build(kind), Grid.create(shape)
    report = ff.parallelize(
        model, grid, weights="streamed", overlap=OVERLAP, activation_checkpointing=checkpointing
    )
    ids, labels = (t[grid.local_rows(rows)] for t in batch(rows))
    for _ in range(3):
        model.zero_grad()
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
    assert_shards_close(local_gradients(model), right, report, grid)
    return loss.item(), right_loss


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("shape", "kind", "rows"),
    [
        ((1, 1, 1, 4), "llama", 3),
        ((1, 1, 2, 2), "gpt2", 4),
        ((1, 2, 2, 1), "llama", 6),
        ((2, 1, 1, 2), "gpt2", 4),
    ],
)
def test_half_batches_give_the_same_results(
    shape: Shape, kind: str, rows: int, checkpointing: str, pool: RankPool
) -> None:
    for loss, right in pool.run(interleaved_steps, 4, shape, kind, rows, checkpointing):
        assert loss == pytest.approx(right, rel=1e-5)


def ignoring(shape: Shape) -> tuple[float, float]:
    """The loss with another value of ignore_index, and that of one process."""
    ids, labels = batch(4)
    stock, model, grid = build("llama"), build("llama"), Grid.create(shape)
    labels = torch.where(labels < 40, 7, labels)
    right = stock(input_ids=ids, labels=labels, ignore_index=7).loss
    right.backward()
    report = ff.parallelize(model, grid, weights="streamed", overlap=OVERLAP)
    loss = model(input_ids=ids, labels=labels, ignore_index=7).loss
    loss.backward()
    assert report.interleaved
    assert_shards_close(local_gradients(model), gradients(stock), report, grid)
    return loss.item(), right.item()


def test_ignore_index_is_respected(pool: RankPool) -> None:
    for loss, right in pool.run(ignoring, 2, (1, 1, 1, 2)):
        assert loss == pytest.approx(right, rel=1e-5)


def flights_of_a_step(shape: Shape, interleave: bool) -> list[tuple[str, str, int, int]]:
    """(module, kind, issued, waited) of each sum of activations, in the order of their start."""
    model, grid = build("llama"), Grid.create(shape)
    overlap = ff.Overlap(bundle_bytes=1024, interleave=interleave, forward_chunks=1)
    ff.parallelize(model, grid, weights="streamed", overlap=overlap)
    ids, labels = batch(4)
    for _ in range(2):
        model(input_ids=ids, labels=labels).loss.backward()
    with grid.collectives.recording() as flights:
        model(input_ids=ids, labels=labels).loss.backward()
    return [(f.module, f.kind, f.issued_ns, f.waits_ns[0][0]) for f in flights if f.purpose == "activation"]


@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (1, 1, 2, 1)])
def test_half_batches_alternate(shape: Shape, pool: RankPool) -> None:
    """Between the start of a collective and its wait, the other half starts its own; in backward as well."""
    for interleave in (True, False):
        ranks = pool.run(flights_of_a_step, 2, shape, interleave)
        modules = [[module for module, *_ in flights] for flights in ranks]
        assert modules[0] == modules[1]  # the same order on all ranks
        for flights in ranks:
            covered = [waited > flights[i + 1][2] for i, (_, _, _, waited) in enumerate(flights[:-1])]
            # Nothing overlaps with the last collective of forward, because the other half is done and backward has not begun, nor
            # with the embedding's gather over x at the end of backward, or the first gather over y of backward: the head, which
            # would run meanwhile, has computed its gradients in forward.
            alone = 2
            assert covered.count(False) == (alone if interleave else len(covered))


def failing_steps() -> list[str]:
    right_loss, _ = reference("llama", 4)
    model, grid = build("llama"), Grid.create((1, 1, 1, 2))
    ff.parallelize(model, grid, weights="streamed", overlap=OVERLAP)
    ids, labels = batch(4)
    model(input_ids=ids, labels=labels).loss.backward()
    said = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:  # in the second half
            raise ArithmeticError("injected")

    for _ in range(2):
        calls: list[int] = []
        hook = model.model.layers[1].register_forward_pre_hook(fail)
        try:
            model(input_ids=ids, labels=labels)
        except ArithmeticError as error:
            said.append(str(error))
        hook.remove()
        model.zero_grad()
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        assert abs(loss.item() - right_loss) < 1e-5 * right_loss
    return said


def test_an_error_in_one_half_is_raised_and_the_next_step_is_right(pool: RankPool) -> None:
    assert pool.run(failing_steps, 2) == [["injected", "injected"]] * 2


def outputs_of_calls() -> dict[str, Any]:
    model, grid = build("llama"), Grid.create((1, 1, 1, 2))
    ff.parallelize(model, grid, weights="streamed", overlap=OVERLAP)
    ids, labels = batch(4)
    first = model(input_ids=ids, labels=labels)
    halves = model(input_ids=ids, labels=labels)
    with torch.no_grad():
        evaluated = model(input_ids=ids, labels=labels)
    with torch.inference_mode():
        inferred = model(input_ids=ids).logits
    with FlopCounterMode(display=False) as counter:
        counted = model(input_ids=ids, labels=labels)
    one = model(input_ids=ids[:1], labels=labels[:1])
    return {
        "losses": [float(o.loss) for o in (first, halves, evaluated, counted)],
        "logits": max(
            float((o - first.logits).abs().max()) for o in (halves.logits, inferred, counted.logits)
        ),
        "one": (tuple(one.logits.shape), float((one.logits - first.logits[:1]).abs().max())),
        "flops": counter.get_total_flops() > 0,
        "graph": (halves.loss.requires_grad, evaluated.loss.requires_grad),
        "tuple": len(model(input_ids=ids, labels=labels, return_dict=False)),
    }


def test_outputs_match_those_of_the_full_batch(pool: RankPool) -> None:
    for seen in pool.run(outputs_of_calls, 2):
        assert max(seen["losses"]) - min(seen["losses"]) < 1e-5
        assert seen["logits"] < 1e-4
        assert seen["one"][0][0] == 1
        assert seen["one"][1] < 1e-4
        assert seen["flops"]
        assert seen["graph"] == (True, False)
        assert seen["tuple"] == 2


def unsupported_outputs() -> list[str]:
    grid = Grid.create((1, 1, 1, 2))
    ids, labels = batch(4)
    said = []
    for extra in (torch.tensor(3.0), object):
        model = build("llama")
        stock = model.forward

        def forward(
            input_ids: Any, labels: Any = None, *, stock: Any = stock, extra: Any = extra, **kwargs: Any
        ) -> Any:
            output = stock(input_ids=input_ids, labels=labels, **kwargs)
            return output.loss, output.logits, extra if isinstance(extra, torch.Tensor) else extra()

        model.forward = forward
        ff.parallelize(model, grid, weights="streamed", overlap=OVERLAP)
        try:
            model(input_ids=ids, labels=labels)
        except ff.UnsupportedError as error:
            said.append(str(error))
    return said


def test_outputs_that_cannot_be_joined_are_rejected(pool: RankPool) -> None:
    for number, thing in pool.run(unsupported_outputs, 2):
        assert "a scalar alongside its loss" in number
        assert "a object alongside its loss" in thing
        assert "interleave=False" in number


def cached_forward() -> tuple[int, int]:
    model, grid = build("llama"), Grid.create((1, 1, 1, 2))
    ff.parallelize(model, grid, weights="streamed", overlap=OVERLAP)
    ids, _ = batch(4)
    model(input_ids=ids)
    with torch.no_grad():
        output = model(input_ids=ids, use_cache=True)
    return len(output.logits), len(output.past_key_values.layers[0].keys)


def test_a_cache_has_the_full_batch(pool: RankPool) -> None:
    assert pool.run(cached_forward, 2) == [(4, 4)] * 2


def notes(shape: Shape, weights: str, interleave: Any) -> str:
    model, grid = build("llama"), Grid.create(shape)
    report = ff.parallelize(model, grid, weights=weights, overlap=ff.Overlap(interleave=interleave))
    return next(n for n in report.notes if n.startswith("batch-split overlap"))


@pytest.mark.parametrize(
    ("shape", "weights", "interleave", "said"),
    [
        ((1, 1, 1, 2), "streamed", "auto", "batch-split overlap: two half-batches alternate"),
        ((1, 1, 1, 2), "streamed", False, "batch-split overlap: off (asked for)"),
        ((1, 1, 1, 2), "fsdp2", "auto", "batch-split overlap: off (FSDP2"),
        ((1, 2, 1, 1), "streamed", "auto", "batch-split overlap: off (no activation is sent)"),
    ],
)
def test_the_report_says_whether_the_batch_is_split(
    shape: Shape, weights: str, interleave: Any, said: str, pool: RankPool
) -> None:
    assert said in pool.run(notes, 2, shape, weights, interleave)[0]


def fail_before_the_other_half() -> tuple[str, list[str]]:
    ran: list[str] = []

    def first() -> None:
        raise KeyError("the first half")

    with pytest.raises(KeyError) as caught:
        BatchSplit(Grid.create((1, 1, 1, 1))).run([first, lambda: ran.append("the second half")])
    return str(caught.value), ran


def test_a_half_does_not_start_after_the_other_failed(pool: RankPool) -> None:
    """Its collectives would find no peers."""
    assert pool.run(fail_before_the_other_half, 1) == [("'the first half'", [])]
