"""Experts that x ranks own, alone or together with z ranks: each sends rows of its own tokens, and the numbers are those of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fourfold as ff
from benchmarks import families, reshard
from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.errors import UnsupportedError
from tests.models import batch, build, gradients, local_gradients, part
from tests.parallel.experts.test_owned import (
    BAR,
    BYTES,
    EXPERTS,
    HIDDEN,
    INDEX_BYTES,
    LAYERS,
    LENGTH,
    REPLICATED,
    ROWS,
    SEQUENCE,
    Shape,
    errors_in_bf16,
    late_error,
    pair,
    worst_error,
)

X: dict[str, Any] = {"experts": ("x",)}
Z_X: dict[str, Any] = {"experts": ("z", "x")}
FULL = {"activation_checkpointing": "full"}
SELECTIVE = {"activation_checkpointing": "selective"}
SHARDED = {"accumulation": "sharded"}
STREAMED, FSDP2 = {"weights": "streamed"}, {"weights": "fsdp2"}
Case = tuple[Shape, dict[str, Any], int, dict[str, Any]]


def worst_errors(cases: list[Case]) -> list[float]:
    return [worst_error(shape, options, parts, changes) for shape, options, parts, changes in cases]


# Streamed and by tokens, two half-batches alternate. With all scores equal some ranks have no rows.
FOUR_RANKS: list[Case] = [
    ((1, 2, 1, 2), {**Z_X, **STREAMED, **SEQUENCE, **SELECTIVE}, 1, {}),
    ((1, 2, 1, 2), {**Z_X, **FSDP2, **REPLICATED, **SHARDED}, 2, {"in_one_place": True}),
    ((1, 2, 1, 2), {**X, **FSDP2, **SEQUENCE, **FULL}, 1, {}),
    ((1, 1, 2, 2), {**X, **STREAMED, **REPLICATED}, 1, {}),
]
NIGHTLY: dict[int, list[Case]] = {
    2: [
        ((1, 1, 1, 2), {**X, **STREAMED, **SEQUENCE}, 1, {}),
        ((1, 1, 1, 2), {**X, **FSDP2, **SEQUENCE, **SHARDED}, 2, {}),
        ((1, 1, 1, 2), {**X, **STREAMED, **REPLICATED, **FULL}, 2, {}),
        ((1, 1, 1, 2), {**X, **FSDP2, **REPLICATED, **SELECTIVE}, 1, {}),
    ],
    4: [
        *(
            ((1, 1, 2, 2), {**X, **kept, **activations}, 1, {"in_one_place": is_odd})
            for kept, activations, is_odd in (
                (FSDP2, SEQUENCE, True),
                (STREAMED, SEQUENCE, False),
                (FSDP2, REPLICATED, False),
            )
        ),
        *(
            ((2, 1, 1, 2), {**X, **kept, **SEQUENCE}, 2, {"num_experts_per_tok": chosen})
            for kept in (STREAMED, FSDP2)
            for chosen in (1, EXPERTS)
        ),
        # A grid where one of the two axes has one rank.
        ((1, 4, 1, 1), {**Z_X, **FSDP2}, 1, {}),
        ((1, 1, 1, 4), {**Z_X, **STREAMED, **SEQUENCE}, 1, {}),
        ((1, 2, 1, 2), {**Z_X, **STREAMED, **REPLICATED, **FULL}, 2, {}),
        # z shards another dim of what x ranks own.
        ((1, 2, 1, 2), {**X, **STREAMED, **SEQUENCE}, 1, {"num_experts": 2}),
        ((1, 2, 1, 2), {**X, **FSDP2, **SEQUENCE}, 1, {"num_experts": 2}),
    ],
    8: [
        ((1, 2, 2, 2), {**Z_X, **STREAMED, **SEQUENCE, **SELECTIVE}, 1, {}),
        ((1, 2, 2, 2), {**Z_X, **FSDP2, **REPLICATED}, 2, {}),
        ((2, 2, 1, 2), {**Z_X, **FSDP2, **SEQUENCE, **SHARDED}, 2, {}),
        ((2, 2, 1, 2), {**Z_X, **STREAMED, **SEQUENCE, **SHARDED}, 2, {"in_one_place": True}),
        ((1, 2, 1, 4), {**Z_X, **STREAMED, **SEQUENCE}, 1, {"num_experts": 8}),
    ],
}


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(4, FOUR_RANKS), *(pytest.param(*each, marks=pytest.mark.nightly) for each in NIGHTLY.items())],
)
def test_the_loss_and_gradients_of_one_process(pool: RankPool, ranks: int, cases: list[Case]) -> None:
    by_rank = pool.run(worst_errors, ranks, cases, timeout_s=500)
    worst = [max(errors) for errors in zip(*by_rank, strict=True)]
    assert {str(case): error for case, error in zip(cases, worst, strict=True) if not error < BAR} == {}


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "aria"])
def test_other_families(pool: RankPool, family: str) -> None:
    for shape, options in (((1, 1, 2, 2), X), ((1, 2, 1, 2), Z_X)):
        for found in pool.run(families.check_rank, 4, family, shape, "replicated", options):
            assert found.status == "verified", found


def uneven_error() -> float:
    """Of gradients, where x ranks have 3, 3, 3 and 2 of the tokens, and then 2, 2, 1 and none."""
    grid, worst = Grid.create((1, 1, 1, 4)), 0.0
    stock, model = pair()
    report = ff.parallelize(model, grid, **X, **REPLICATED)
    ids, labels = batch(1, 11)
    for length in (11, 5):
        for trained in (stock, model):
            trained.zero_grad()
            trained(input_ids=ids[:, :length], labels=labels[:, :length]).loss.backward()
        whole = gradients(stock)
        for name, local in local_gradients(model).items():
            largest = whole[report.layouts[name].hf_name].abs().max()
            worst = max(worst, float((local - part(whole, report, grid, name)).abs().max() / largest))
    return worst


def test_x_ranks_may_have_different_numbers_of_tokens(pool: RankPool) -> None:
    assert max(pool.run(uneven_error, 4)) < BAR


@pytest.mark.nightly
@pytest.mark.parametrize("weights", [STREAMED, FSDP2], ids=str)
def test_bf16_is_as_near_as_the_stock_model(pool: RankPool, weights: dict[str, Any]) -> None:
    for options in ({**Z_X, **SEQUENCE}, {**X, **REPLICATED}):
        for error, of_stock in pool.run(errors_in_bf16, 4, (1, 2, 1, 2), {**options, **weights}):
            assert error < 2 * of_stock < 0.4


@pytest.mark.nightly
@pytest.mark.parametrize("weights", [STREAMED, FSDP2], ids=str)
def test_every_collective_is_waited_for(pool: RankPool, weights: dict[str, Any]) -> None:
    for options in ({**Z_X, **SEQUENCE}, {**Z_X, **REPLICATED}):
        for error, changed in pool.run(late_error, 4, (1, 2, 1, 2), {**options, **weights}):
            assert error < BAR
            assert changed == []


# -- storage ------------------------------------------------------------------------------------------------------------


def experts_by_place(experts: Any) -> tuple[dict[str, int], list[int], list[str], bool]:
    """This rank's place, the experts that it stores as their values tell, the notes of the report, and whether all of them together are the
    model's."""
    grid, model = Grid.create((1, 2, 1, 2)), build("qwen3_moe", num_experts=8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mlp.experts." in name:
                parameter.copy_(torch.arange(8.0).view(8, 1, 1).expand_as(parameter))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = ff.parallelize(model, grid, experts=experts)
    whole = dict(ff.full_parameters(model, report))
    is_same = all(torch.equal(before[name], tensor) for name, tensor in whole.items() if name in before)
    stored = {
        tuple(int(e) for e in p.to_local().flatten(1)[:, 0])  # type: ignore[attr-defined]
        for n, p in model.named_parameters()
        if ".mlp.experts." in n
    }
    (own,) = stored
    return (
        {"x": grid.coordinate("x"), "z": grid.coordinate("z")},
        list(own),
        report.notes,
        is_same and before.keys() <= whole.keys(),
    )


@pytest.mark.parametrize("experts", [("x",), ("z", "x")])
def test_x_is_outside_of_z_where_experts_are_stored(pool: RankPool, experts: Any) -> None:
    """Expert e of E is at x = e // (E/X) and there at z = (e mod E/X) // (E/(X Z)), whether z gathers it or owns it."""
    for place, own, notes, is_same in pool.run(experts_by_place, 4, experts):
        assert is_same
        assert own == [e for e in range(8) if (e // 4, e % 4 // 2) == (place["x"], place["z"])]
        says = "z=2 and x=2, 2 of 8" if len(experts) == 2 else "x=2, 4 of 8"
        assert any(f"experts: owned over {says} on each rank" in note for note in notes)


@pytest.mark.nightly
def test_a_checkpoint_loads_where_experts_are_gathered(pool: RankPool, tmp_path: Path) -> None:
    """Over z, over x and over both; on the last grid they are gathered."""
    grids: tuple[Shape, ...] = ((1, 2, 1, 1), (1, 1, 1, 2), (1, 2, 1, 2), (2, 1, 2, 1))
    verdicts = reshard.reshard(pool, grids, tmp_path, kind="owned")
    assert len(verdicts) == len(grids) ** 2
    assert {pair: verdict for pair, verdict in verdicts.items() if not verdict.holds()} == {}


# -- traffic ------------------------------------------------------------------------------------------------------------


def sent_and_drawn(options: dict[str, Any]) -> tuple[int, dict[tuple[str, str], float], list[Tensor]]:
    """(this rank, bytes by axis and purpose that it sent in a step, the choices of its tokens by layer)."""
    grid = Grid.create((1, 2, 1, 2))
    ids, labels = batch(ROWS, LENGTH)
    rows = grid.local_rows(ROWS)
    _, model = pair()
    drawn: list[Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _, __, output: drawn.append(output[-1]))
    ff.parallelize(model, grid, **options, overlap=ff.Overlap(interleave=False))
    model(input_ids=ids[rows], labels=labels[rows])  # which linears share an input is known then
    drawn.clear()
    with grid.collectives.counting() as entries:
        model(input_ids=ids[rows], labels=labels[rows]).loss.backward()
    sent = {(e.axis, e.purpose): e.bytes_sent for e in entries}
    return grid.coordinate("zx"), sent, drawn


@pytest.mark.parametrize("activations", [REPLICATED, SEQUENCE], ids=str)
def test_ranks_send_rows_of_their_own_tokens(pool: RankPool, activations: dict[str, Any]) -> None:
    """Each of the k choices of a token sends a row forth and back, in forward and in backward, from one of the two x ranks that have the token."""
    found = sorted(pool.run(sent_and_drawn, 4, {**Z_X, **activations}), key=lambda each: each[0])
    owner = torch.tensor(
        [0, 2, 1, 3]
    )  # of each expert, in the order of ranks: x is outside in storage, z among ranks
    tokens = ROWS // 2 * LENGTH // 2
    drawn = []
    for rank, (place, _, of_layers) in enumerate(found):
        assert place == rank
        assert len(of_layers) == LAYERS
        own = slice(None) if activations == SEQUENCE else slice(rank % 2 * tokens, (rank % 2 + 1) * tokens)
        drawn.append(torch.cat([owner[choices[own]].flatten() for choices in of_layers]))
        assert len(drawn[-1]) == LAYERS * tokens * 2
    for rank, (_, sent, _) in enumerate(found):
        away = int((drawn[rank] != rank).sum())
        came = sum(int((drawn[other] == rank).sum()) for other in range(4) if other != rank)
        row = HIDDEN * BYTES
        assert sent["zx", "dispatch"] == sent["zx", "combine"] == (away + came) * row
        assert sent["zx", "counts"] == LAYERS * 3 * INDEX_BYTES  # one expert on each rank


# -- planted faults -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        ("map", {**Z_X, **SEQUENCE}),
        ("tokens", {**X, **REPLICATED}),
        ("weights-of-choices", {**X, **REPLICATED}),
    ],
)
def test_a_planted_fault_is_found(pool: RankPool, fault: str, options: dict[str, Any]) -> None:
    assert max(pool.run(worst_error, 4, (1, 2, 1, 2), options, 1, None, fault)) > 10 * BAR


# -- what is rejected ---------------------------------------------------------------------------------------------------


def rejected() -> dict[str, str]:
    found = {}
    for what, shape, experts, changes in (
        ("both", (1, 2, 1, 2), ("z", "x"), {"num_experts": 6}),
        ("x", (1, 2, 1, 2), ("x",), {"num_experts": 5}),
        ("y", (1, 1, 2, 2), ("x",), {"moe_intermediate_size": 15}),
    ):
        with pytest.raises(UnsupportedError) as error:
            ff.parallelize(build("qwen3_moe", **changes), Grid.create(shape), experts=experts)
        found[what] = str(error.value)
    return found


def test_what_is_rejected_by_name(pool: RankPool) -> None:
    for found in pool.run(rejected, 4):
        assert "z*x=4 does not divide the 6 experts of model.layers.0.mlp.experts" in found["both"]
        assert "use z=1 with data=2, or experts='cut'" in found["both"]
        assert "x=2 does not divide the 5 experts" in found["x"]
        assert "y=2 does not divide the 15 inner features of an expert" in found["y"]
