"""Overlap settings change when a collective starts and is waited for, but not the results or the traffic."""

import copy
import dataclasses
import itertools
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.mesh.collectives import InFlightCollective
from tests.late import late_collectives
from tests.models import batch, build, local_gradients

Shape = tuple[int, int, int, int]
TOKENS = 11  # a prime, so that it divides into equal chunks only for 1

# -- chunks of the tokens ------------------------------------------------------------------------------------------------

# 11 tokens in chunks of ceil(11 / chunks) tokens: 5 chunks would have 3 tokens each, so there are only 4.
PARTS = {1: 1, 2: 2, 3: 3, 5: 4, 20: 11, "auto": 1}
# Linears that are computed alone, and those that are computed as one group.
ALONE = {"llama": ("o_proj", "down_proj"), "gpt2": ("c_attn", "c_proj", "c_fc")}
TOGETHER = {"llama": ("q_proj+k_proj+v_proj", "gate_proj+up_proj"), "gpt2": ()}


class Step:
    """One forward and backward, with the all-reduces of activations of each module."""

    def __init__(self, grid: Grid, kind: str, overlap: ff.Overlap) -> None:
        model = build(kind)
        # Replicated, because the number of tokens is odd.
        self.report = ff.parallelize(model, grid, overlap=overlap, activations="replicated")
        ids, labels = batch(1, TOKENS)
        with grid.collectives.recording() as forward:
            self.output = model(input_ids=ids, labels=labels)
        with grid.collectives.recording() as backward:
            self.output.loss.backward()
        self.gradients = local_gradients(model)
        self.forward, self.backward = _by_module(forward), _by_module(backward)


def _by_module(flights: list[InFlightCollective]) -> dict[str, list[int]]:
    """Bytes of each call."""
    found: dict[str, list[int]] = defaultdict(list)
    for flight in flights:
        # The head has chunks of its own, for the loss.
        if flight.purpose == "activation" and flight.module != "lm_head":
            found[flight.module].append(flight.payload_bytes)
    return dict(found)


def assert_same_results(ours: Step, expected: Step) -> None:
    bar = 1e-6
    assert float(ours.output.loss) == pytest.approx(float(expected.output.loss), rel=bar)
    scale = float(expected.output.logits.detach().abs().max())
    torch.testing.assert_close(ours.output.logits, expected.output.logits, rtol=0.0, atol=bar * scale)
    # Relative to all shards of the stock tensor, because the gradient of the keys' bias alone is rounding noise.
    scales: dict[str, float] = defaultdict(float)
    for name, gradient in expected.gradients.items():
        stock_name = expected.report.layouts[name].hf_name
        scales[stock_name] = max(scales[stock_name], float(gradient.abs().max()))
    for name, gradient in ours.gradients.items():
        atol = 10 * bar * scales[expected.report.layouts[name].hf_name]
        torch.testing.assert_close(gradient, expected.gradients[name], rtol=0.0, atol=atol)


def compare_chunks(shape: Shape, kind: str) -> dict[Any, tuple[dict[str, list[int]], dict[str, list[int]]]]:
    grid = Grid.create(shape)
    unchunked = Step(grid, kind, ff.Overlap(forward_chunks=1))
    traffic = {}
    for chunks in PARTS:
        step = Step(grid, kind, ff.Overlap(forward_chunks=chunks))  # type: ignore[arg-type]
        assert_same_results(step, unchunked)
        traffic[chunks] = (step.forward, step.backward)
    return traffic


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("llama", (1, 1, 2, 2)),
        ("gpt2", (1, 1, 4, 1)),
        pytest.param("llama", (1, 1, 4, 1), marks=pytest.mark.nightly),
        pytest.param("gpt2", (1, 1, 2, 2), marks=pytest.mark.nightly),
    ],
)
def test_chunks_change_the_number_of_calls_and_nothing_else(pool: RankPool, kind: str, shape: Shape) -> None:
    _, _, y, x = shape
    for traffic in pool.run(compare_chunks, 4, shape, kind):
        unchunked, unchunked_backward = traffic[1]
        assert {len(calls) for calls in unchunked.values()} == {1}
        for chunks, parts in PARTS.items():
            forward, backward = traffic[chunks]
            assert backward == unchunked_backward
            assert {name: sum(calls) for name, calls in forward.items()} == {
                name: sum(calls) for name, calls in unchunked.items()
            }
            alone = [name for name in forward if name.endswith(ALONE[kind])]
            together = [name for name in forward if name.endswith(TOGETHER[kind])] if TOGETHER[kind] else []
            assert alone or together
            for name in alone:
                assert len(forward[name]) == parts
                rows = -(-TOKENS // parts)
                assert max(forward[name]) * TOKENS == sum(forward[name]) * rows
            assert len(together) == (2 * 2 if kind == "llama" else 0)
            for name in together:  # each of their outputs is at least one chunk
                members = name.count("+") + 1
                assert len(forward[name]) == 1 if parts == 1 else len(forward[name]) >= members
        # By hand: o's output on this rank, in fp32, if its input is sharded.
        last = "model.layers.1.self_attn.o_proj" if kind == "llama" else "transformer.h.1.attn.c_proj"
        assert (last in unchunked) == (x > 1)
        if x > 1:
            assert unchunked[last] == [TOKENS * 32 // y * 4]


class Wide(nn.Module):
    """Wide enough that "auto" splits its outputs into several chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 1024)
        self.down = nn.Linear(1024, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(hidden))))


def chunk_by_size(shape: Shape, tokens: int) -> list[int]:
    grid = Grid.create(shape)
    torch.manual_seed(0)
    stock = Wide()
    model = copy.deepcopy(stock)
    ff.parallelize(model, grid, roles={"up": "colwise", "down": "rowwise"})
    hidden = torch.randn(tokens, 16)
    part = hidden.chunk(grid.y, dim=-1)[grid.coordinate("y")].contiguous()
    with grid.collectives.recording() as flights:
        output = model(part)
    expected = stock(hidden).chunk(grid.y, dim=-1)[grid.coordinate("y")]
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    return [f.payload_bytes for f in flights if f.module == "up"]


def test_auto_splits_large_outputs_into_chunks(pool: RankPool) -> None:
    for few, many in zip(
        pool.run(chunk_by_size, 4, (1, 1, 2, 2), 101),
        pool.run(chunk_by_size, 4, (1, 1, 2, 2), 2049),
        strict=True,
    ):
        # On a CPU a chunk has at least about 1 MiB.
        assert few == [101 * 512 * 4]
        assert len(many) > 1
        assert sum(many) == 2049 * 512 * 4
        assert max(many) - min(many) < 2**20


# -- whether anything is in flight --------------------------------------------------------------------------------------


def compare_ways(shape: Shape, kind: str) -> None:
    grid = Grid.create(shape)
    expected = Step(grid, kind, ff.Overlap(bundle_bytes=1024))
    for overlap in (ff.Overlap(bundle_bytes=1024, backward=False), ff.Overlap.none()):
        step = Step(grid, kind, overlap)
        assert_same_results(step, expected)
        assert (step.forward, step.backward) == (expected.forward, expected.backward)


@pytest.mark.parametrize(("kind", "shape"), [("llama", (1, 1, 2, 2)), ("gpt2", (1, 1, 4, 1))])
def test_results_are_the_same_without_overlap(pool: RankPool, kind: str, shape: Shape) -> None:
    pool.run(compare_ways, 4, shape, kind)


def no_overlap(shape: Shape, overlap: ff.Overlap) -> list[InFlightCollective]:
    grid = Grid.create(shape)
    model = build("llama")
    ff.parallelize(model, grid, weights="streamed", overlap=overlap)
    ids, labels = (tensor[grid.local_rows(4)] for tensor in batch(4, TOKENS))
    # Late, because a reduction that is done early is waited for at once, to free its memory.
    with late_collectives():
        for _ in range(2):
            model(input_ids=ids, labels=labels).loss.backward()
        with grid.collectives.recording() as flights:
            model(input_ids=ids, labels=labels).loss.backward()
    return flights


def in_flight_together(flights: list[InFlightCollective]) -> list[tuple[str, str]]:
    """Those that were not waited for when the next one started."""
    return [
        (a.purpose, a.module)
        for a, b in itertools.pairwise(flights)
        if not a.waits_ns or a.waits_ns[0][1] > b.issued_ns
    ]


NONE = dataclasses.replace(ff.Overlap.none(), bundle_bytes=1024)


@pytest.mark.parametrize("shape", [(2, 2, 1, 1), (1, 2, 1, 2)])
def test_without_overlap_one_collective_is_in_flight_at_a_time(pool: RankPool, shape: Shape) -> None:
    for flights in pool.run(no_overlap, 4, shape, NONE):
        assert len(flights) > 32
        assert in_flight_together(flights) == [("loss", "")]  # the count of labels
    for flights in pool.run(no_overlap, 4, shape, ff.Overlap(bundle_bytes=1024)):
        together = {purpose for purpose, _ in in_flight_together(flights)}
        assert together == {"loss", "weight", "gradient"} | ({"activation"} if shape[3] > 1 else set())


# -- errors ----------------------------------------------------------------------------------------------------


def test_a_sum_is_in_chunks_only_where_each_hides_something() -> None:
    chunks_of = ff.Overlap().chunks_of
    elements = 4096 * 4096
    assert chunks_of(elements, 2, 512, "cuda") == 1  # its matmul takes less time than a collective's start
    assert chunks_of(elements, 2, 1792, "cuda") == 1
    assert chunks_of(elements, 2, 8192, "cuda") == 2  # 16 MiB each
    assert chunks_of(16 * elements, 2, 8192, "cuda") == 4
    assert chunks_of(elements // 64, 4, 1, "cpu") == 1
    assert chunks_of(elements // 8, 4, 1, "cpu") == 4
    assert ff.Overlap(forward_chunks=3).chunks_of(1, 2, 1, "cuda") == 3


@pytest.mark.parametrize(
    "name", ["prefetch", "bundle_bytes", "keep_bytes", "in_flight_bytes", "forward_chunks"]
)
def test_a_negative_number_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}=-3"):
        ff.Overlap(**{name: -3})


def test_zero_chunks_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"forward_chunks=0.*use 1"):
        ff.Overlap(forward_chunks=0)


def test_an_unknown_word_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"forward_chunks='many'.*auto"):
        ff.Overlap(forward_chunks="many")  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [("prefetch", None), ("keep_bytes", 1.5), ("interleave", "yes")])
def test_an_invalid_value_is_rejected(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{name}={value!r}.*use"):
        ff.Overlap(**{name: value})  # type: ignore[arg-type]


def notes_of(weights: str, overlap: ff.Overlap, **options: Any) -> list[str]:
    grid = Grid.create(options.pop("shape", (1, 2, 1, 1)))
    report = ff.parallelize(build("llama"), grid, weights=weights, overlap=overlap, **options)
    return [note for note in report.notes if "no effect" in note]


def test_a_setting_without_effect_is_reported(pool: RankPool) -> None:
    asked = ff.Overlap(keep_bytes=2**30, forward_chunks=2)
    (note,) = pool.run(notes_of, 2, "fsdp2", asked)[0]
    assert "Overlap(keep_bytes=1073741824) has no effect with fsdp2 weights" in note
    assert pool.run(notes_of, 2, "streamed", asked)[0] == []
    assert pool.run(notes_of, 2, "fsdp2", ff.Overlap())[0] == []
    again, on_x = ff.Overlap(keep_inputs=False), {"shape": (1, 1, 1, 2)}
    assert pool.run(notes_of, 2, "streamed", again, **on_x)[0] == []
    (note,) = pool.run(notes_of, 2, "streamed", again, **on_x, activations="replicated")[0]
    assert "Overlap(keep_inputs=False) has no effect with replicated activations" in note
