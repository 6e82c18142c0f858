"""Experts that z ranks own: the loss and gradients of one process, whatever the router chooses, and what is sent for it."""

from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fourfold as ff
from benchmarks import families, reshard
from benchmarks.experts.faults import FAULTS
from benchmarks.ranks import RankPool
from benchmarks.tiny_models import find_family, tiny_model
from fourfold import Grid, Lora
from fourfold.errors import UnsupportedError
from fourfold.weights.api import evaluating, no_sync
from tests.late import late_collectives
from tests.models import MODELS, batch, build, gradients, local_gradients, part

Shape = tuple[int, int, int, int]
OWNED: dict[str, Any] = {"experts": ("z",)}
BAR = 1e-4  # of the largest entry of a gradient
ROWS, LENGTH, EXPERTS, LAYERS, HIDDEN, BYTES, INDEX_BYTES = 8, 12, 4, 2, 32, 4, 8


def pair(in_one_place: bool = False, **changes: Any) -> tuple[nn.Module, nn.Module]:
    """The same model twice; ``in_one_place``: with routers that give all experts the same scores, so that all tokens choose the same."""
    found = build("qwen3_moe", **changes), build("qwen3_moe", **changes)
    for model in found if in_one_place else ():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                nn.init.zeros_(parameter)
    return found


def worst_error(
    shape: Shape,
    options: dict[str, Any],
    micro_batches: int = 1,
    changes: dict[str, Any] | None = None,
    fault: str | None = None,
) -> float:
    """In two steps of SGD, against one process: of losses, and of gradients by their own largest entry."""
    grid, worst = Grid.create(shape), 0.0
    with FAULTS[fault].planted() if fault else nullcontext():
        stock, model = pair(**changes or {})
        report = ff.parallelize(model, grid, **OWNED | options)
        ids, labels = batch(ROWS, LENGTH)
        own = grid.local_rows(ROWS)
        rows = (own.stop - own.start) // micro_batches
        for _ in range(2):
            expected = stock(input_ids=ids, labels=labels).loss
            expected.backward()
            total = torch.zeros(())
            items = int((labels[:, 1:] != -100).sum())
            for number in range(micro_batches):
                mine = slice(own.start + number * rows, own.start + (number + 1) * rows)
                with no_sync(model) if number + 1 < micro_batches else nullcontext():
                    loss = model(input_ids=ids[mine], labels=labels[mine], num_items_in_batch=items).loss
                    loss.backward()
                total += loss.detach()
            worst = max(worst, abs(total.item() / expected.item() - 1) * 10)
            whole = gradients(stock)
            for name, local in local_gradients(model).items():
                largest = whole[report.layouts[name].hf_name].abs().max()
                error = (
                    (local - part(whole, report, grid, name)).abs().max() / largest if local.numel() else 0.0
                )
                worst = max(worst, float(error))
            torch.optim.SGD(stock.parameters(), lr=0.5).step()
            # On shards: new shapes of DTensors take seconds.
            ff.sharded_optimizer(torch.optim.SGD)(model.parameters(), lr=0.5).step()
            for trained in (stock, model):
                trained.zero_grad()
        with evaluating(stock), evaluating(model):
            expected, loss = (
                each(input_ids=ids[rows_], labels=labels[rows_]).loss
                for each, rows_ in ((stock, slice(None)), (model, own))
            )
        worst = max(worst, abs(loss.item() / expected.item() - 1) * 10)
    return worst


SEQUENCE = {"activations": "sequence-parallel"}
REPLICATED = {"activations": "replicated"}


@pytest.mark.parametrize(
    ("shape", "options", "micro_batches"),
    [
        ((1, 2, 1, 1), {"weights": "fsdp2"}, 2),
        pytest.param(
            (2, 2, 1, 1), {"weights": "streamed", "accumulation": "sharded"}, 2, marks=pytest.mark.nightly
        ),
        ((2, 2, 1, 1), {"weights": "fsdp2", "accumulation": "sharded"}, 2),
        # Their inner features sharded as well; streamed, two half-batches alternate.
        ((1, 2, 1, 2), {"weights": "streamed", **SEQUENCE}, 1),
        pytest.param((1, 2, 2, 1), {"weights": "streamed", **REPLICATED}, 2, marks=pytest.mark.nightly),
        ((1, 2, 2, 1), {"weights": "fsdp2", **SEQUENCE}, 1),
        # Recomputed blocks.
        pytest.param(
            (1, 2, 1, 1),
            {"weights": "streamed", "activation_checkpointing": "full"},
            2,
            marks=pytest.mark.nightly,
        ),
        ((1, 2, 1, 1), {"weights": "fsdp2", "activation_checkpointing": "selective"}, 1),
        ((1, 2, 1, 2), {"weights": "streamed", "activation_checkpointing": "selective", **SEQUENCE}, 1),
    ],
    ids=str,
)
def test_the_loss_and_gradients_of_one_process(
    pool: RankPool, shape: Shape, options: dict[str, Any], micro_batches: int
) -> None:
    ranks = shape[0] * shape[1] * shape[2] * shape[3]
    assert max(pool.run(worst_error, ranks, shape, options, micro_batches)) < BAR


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("shape", "options", "micro_batches"),
    [
        ((1, 2, 1, 1), {"weights": "streamed"}, 1),
        ((1, 4, 1, 1), {"weights": "streamed"}, 1),
        ((2, 2, 1, 1), {"weights": "fsdp2", "accumulation": "whole"}, 2),
        ((1, 2, 1, 2), {"weights": "fsdp2", **REPLICATED}, 1),
        ((1, 2, 2, 1), {"weights": "fsdp2", "activation_checkpointing": "full", **SEQUENCE}, 1),
        ((1, 2, 2, 2), {"weights": "streamed", **SEQUENCE}, 2),
    ],
    ids=str,
)
def test_other_grids(pool: RankPool, shape: Shape, options: dict[str, Any], micro_batches: int) -> None:
    ranks = shape[0] * shape[1] * shape[2] * shape[3]
    assert max(pool.run(worst_error, ranks, shape, options, micro_batches)) < BAR


# Gate and up in turns, biases; groups and a bias in the choice, a shared expert; [experts, in, out].
@pytest.mark.parametrize("shape", [(1, 2, 1, 1), pytest.param((1, 2, 2, 1), marks=pytest.mark.nightly)])
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "aria"])
def test_other_families(pool: RankPool, family: str, shape: Shape) -> None:
    ranks = shape[1] * shape[2]
    for found in pool.run(families.check_rank, ranks, family, shape, "replicated", OWNED):
        assert found.status == "verified", found


def late_error(shape: Shape, options: dict[str, Any]) -> tuple[float, list[str]]:
    with late_collectives() as seen:
        return worst_error(shape, options), seen.changed


@pytest.mark.parametrize("weights", ["streamed", "fsdp2"])
def test_every_collective_is_waited_for(pool: RankPool, weights: str) -> None:
    for error, changed in pool.run(late_error, 4, (2, 2, 1, 1), {"weights": weights}):
        assert error < BAR
        assert changed == []


# With equal scores all tokens choose the same experts, which one rank owns: the other has no rows.
@pytest.mark.parametrize("weights", ["streamed", "fsdp2"])
@pytest.mark.parametrize(("chosen", "in_one_place"), [(1, True), (2, True), (1, False), (EXPERTS, False)])
def test_odd_routing(pool: RankPool, weights: str, chosen: int, in_one_place: bool) -> None:
    changes = {"num_experts_per_tok": chosen, "in_one_place": in_one_place}
    assert max(pool.run(worst_error, 2, (1, 2, 1, 1), {"weights": weights}, 1, changes)) < BAR


@pytest.mark.parametrize("activations", ["replicated", "sequence-parallel"])
def test_a_rank_without_tokens_whose_features_are_sharded(pool: RankPool, activations: str) -> None:
    changes = {"in_one_place": True}
    options = {"activations": activations, "activation_checkpointing": "selective"}
    assert max(pool.run(worst_error, 4, (1, 2, 2, 1), options, 1, changes)) < BAR


def errors_in_bf16(shape: Shape, options: dict[str, Any]) -> tuple[float, float]:
    """The largest error of a gradient against fp32: on the grid, and of the stock model in bf16. All experts are chosen: no near tie falls otherwise."""
    stock, rounded = pair(num_experts_per_tok=EXPERTS)
    _, model = pair(num_experts_per_tok=EXPERTS)
    ids, labels = batch(ROWS, LENGTH)
    for each in (stock, rounded.to(torch.bfloat16)):
        each(input_ids=ids, labels=labels).loss.backward()
    grid = Grid.create(shape)
    report = ff.parallelize(model, grid, precision="bf16", **OWNED | options)
    rows = grid.local_rows(ROWS)
    model(input_ids=ids[rows], labels=labels[rows]).loss.backward()
    exact, in_bf16 = gradients(stock), gradients(rounded)
    worst, worst_stock = 0.0, 0.0
    for name, local in local_gradients(model).items():
        assert local.dtype == torch.float32
        whole = exact[report.layouts[name].hf_name]
        error = (local - part(exact, report, grid, name)).abs().max() / whole.abs().max()
        worst = max(worst, float(error))
        difference = in_bf16[report.layouts[name].hf_name].float() - whole
        worst_stock = max(worst_stock, float(difference.abs().max() / whole.abs().max()))
    return worst, worst_stock


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 2, 1, 1), {"weights": "streamed"}),
        ((2, 2, 1, 1), {"weights": "fsdp2"}),
        ((1, 2, 2, 1), {"weights": "streamed", **SEQUENCE}),
    ],
    ids=str,
)
def test_bf16_is_as_near_as_the_stock_model(pool: RankPool, shape: Shape, options: dict[str, Any]) -> None:
    for error, of_stock in pool.run(errors_in_bf16, 4, shape, options):
        assert error < 2 * of_stock < 0.4


# -- traffic ------------------------------------------------------------------------------------------------------------


def sent_and_drawn(
    shape: Shape, options: dict[str, Any], in_one_place: bool
) -> tuple[dict[str, tuple[int, float]], list[Tensor], dict[str, float]]:
    """(calls and bytes by purpose that this rank sent on z in a step, choices of its tokens by layer, bytes of weights and gradients with
    experts that are gathered)."""
    grid = Grid.create(shape)
    ids, labels = batch(ROWS, LENGTH)
    rows = grid.local_rows(ROWS)

    def step(experts: Any) -> tuple[dict[str, tuple[int, float]], list[Tensor]]:
        _, model = pair(in_one_place)
        drawn: list[Tensor] = []
        for name, module in model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(lambda _, __, output: drawn.append(output[-1]))
        overlap = ff.Overlap(prefetch=0, bundle_bytes=0, keep_bytes=0)
        ff.parallelize(model, grid, experts=experts, overlap=overlap, **options)
        with grid.collectives.counting() as entries:
            model(input_ids=ids[rows], labels=labels[rows]).loss.backward()
        found: dict[str, tuple[int, float]] = {
            e.purpose: (e.calls, e.bytes_sent) for e in entries if e.axis == "z"
        }
        return found, drawn

    gathered, _ = step("cut")
    sent, drawn = step(("z",))
    return sent, drawn[:LAYERS], {purpose: size for purpose, (_, size) in gathered.items()}


@pytest.mark.parametrize(
    ("options", "in_one_place", "passes"),
    [
        ({"weights": "streamed"}, False, 1),
        ({"weights": "fsdp2"}, True, 1),
        ({"weights": "streamed", "activation_checkpointing": "selective"}, False, 1),
        ({"weights": "streamed", "activation_checkpointing": "full"}, False, 2),
    ],
    ids=str,
)
def test_ranks_send_what_routers_drew(
    pool: RankPool, options: dict[str, Any], in_one_place: bool, passes: int
) -> None:
    """Each of the k choices of a token whose expert another rank owns sends a row forth and back, in forward and in backward, and no expert's
    weight is sent. ``passes``: how often forward sends rows; what a recomputed forward makes last, the result, is not needed again."""
    ranks, share = 2, EXPERTS // 2
    weights = LAYERS * EXPERTS * 3 * 16 * HIDDEN * BYTES * (ranks - 1) / ranks
    found = pool.run(sent_and_drawn, ranks, (1, ranks, 1, 1), options, in_one_place)
    away_of = []
    for rank, (sent, drawn, gathered) in enumerate(found):
        away = sum(int((choices // share != rank).sum()) for choices in drawn)
        away_of.append(away)
        assert len(drawn) == LAYERS
        assert sent["counts"] == (LAYERS * passes, passes * LAYERS * (ranks - 1) * share * INDEX_BYTES)
        assert gathered["gradient"] - sent["gradient"][1] == weights
        assert gathered["weight"] - sent["weight"][1] == 2 * weights
        assert not {"counts", "dispatch", "combine"} & set(gathered)
    for rank, (sent, _, _) in enumerate(found):
        row = HIDDEN * BYTES
        # Forth by this rank, and the gradients of the rows of the other; results of its rows, and their gradients of this rank's.
        own, other = away_of[rank], away_of[1 - rank]
        assert sent["dispatch"] == (LAYERS * (passes + 1), (passes * own + other) * row)
        assert sent["combine"] == (LAYERS * (passes + 1), (passes * other + own) * row)
    # Then one rank has all tokens.
    assert not in_one_place or sorted(away_of) == [0, LAYERS * ROWS // ranks * LENGTH * 2]


# -- planted faults -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "shape", "weights"),
    [
        ("pair", (1, 2, 1, 1), "streamed"),
        ("order", (1, 2, 1, 1), "streamed"),
        ("counts", (1, 2, 1, 1), "streamed"),
        ("z", (2, 2, 1, 1), "streamed"),
        ("z", (2, 2, 1, 1), "fsdp2"),
        ("data", (2, 2, 1, 1), "streamed"),
        ("data", (2, 2, 1, 1), "fsdp2"),
    ],
)
def test_a_planted_fault_is_found(pool: RankPool, fault: str, shape: Shape, weights: str) -> None:
    ranks = shape[0] * shape[1]
    assert max(pool.run(worst_error, ranks, shape, {"weights": weights}, 1, None, fault)) > 10 * BAR


# -- what is rejected, and what is the same -----------------------------------------------------------------------------


def rejected(shape: Shape) -> dict[str, str]:
    grid, found = Grid.create(shape), {}

    def attempt(what: str, family: str, experts: Any = ("z",), **options: Any) -> None:
        with pytest.raises((UnsupportedError, ValueError)) as error:
            ff.parallelize(tiny_model(find_family(family)), grid, experts=experts, **options)
        found[what] = str(error.value)

    attempt("y", "qwen3_moe", ("y",))
    attempt("word", "qwen3_moe", "own")
    attempt("dense", "llama")
    attempt("compile", "qwen3_moe", compile=True)
    attempt("lora", "qwen3_moe", lora=Lora(targets=("q_proj",)))
    attempt("offloading", "qwen3_moe", activation_checkpointing="full", activation_offloading=True)
    attempt("forward", "llama4")
    attempt("tied", "diffusion_gemma")
    with pytest.raises(UnsupportedError) as error:
        ff.parallelize(build("qwen3_moe", num_experts=5), grid, experts=("z",))
    found["odd"] = str(error.value)
    return found


def test_what_is_rejected_by_name(pool: RankPool) -> None:
    for found in pool.run(rejected, 2, (1, 2, 1, 1)):
        assert "use ('z',), ('x',) or ('z', 'x'), or 'cut'" in found["y"]
        assert "'own' is not supported" in found["word"]
        assert "has no experts" in found["dense"]
        assert "with compile=True is not supported" in found["compile"]
        assert "with lora is not supported" in found["lora"]
        assert "with activation_offloading=True" in found["offloading"]
        assert "with a forward of its own" in found["forward"]
        assert "and ranks cannot own experts of two modules" in found["tied"]
        assert "z=2 does not divide the 5 experts of model.layers.0.mlp.experts" in found["odd"]
        assert "use z=1 with data=2" in found["odd"]


def stored(shape: Shape, weights: Any) -> bool:
    """Does a rank store the same values of the same rectangles, and of each parameter as much, whether experts are owned or gathered?"""
    grid = Grid.create(shape)
    models = pair()
    reports = [
        ff.parallelize(m, grid, weights=weights, experts=e)
        for m, e in zip(models, ("cut", ("z",)), strict=True)
    ]
    cut, own = (dict(model.named_parameters()) for model in models)
    assert reports[0].layouts == reports[1].layouts
    assert any("owned over z=2, 2 of 4 on each rank" in note for note in reports[1].notes)
    return all(torch.equal(cut[name].to_local(), own[name].to_local()) for name in cut)


@pytest.mark.parametrize("weights", ["streamed", "fsdp2"])
def test_storage_is_that_of_gathered_experts(pool: RankPool, weights: str) -> None:
    assert all(pool.run(stored, 2, (1, 2, 1, 1), weights))


def test_a_dry_run_has_rows_spread_evenly() -> None:
    _, config_class, options = MODELS["qwen3_moe"]
    run = ff.dryrun(
        config_class(**options),
        (1, 2, 1, 1),
        sequences=4,
        length=LENGTH,
        target="cpu",
        trace_all=True,
        **OWNED,
    )
    size: dict[str, float] = defaultdict(float)
    for start in run.collectives:
        size[start.purpose] += start.payload_bytes
    rows = 2 * LENGTH * 2  # of two sequences, each token to two experts
    assert size["dispatch"] == size["combine"] == 2 * LAYERS * rows * HIDDEN * 2  # in bf16
    assert size["counts"] == LAYERS * EXPERTS * INDEX_BYTES


def test_a_checkpoint_loads_where_experts_are_gathered(pool: RankPool, tmp_path: Path) -> None:
    """Saved where ranks own experts, over z and x together, loaded in one process, and back: bit-equal, and training goes on."""
    grids: tuple[Shape, ...] = ((1, 1, 1, 1), (1, 2, 1, 2))
    verdicts = reshard.reshard(pool, grids, tmp_path, kind="owned")
    assert len(verdicts) == len(grids) ** 2
    assert {pair: verdict for pair, verdict in verdicts.items() if not verdict.holds()} == {}
