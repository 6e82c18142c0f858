"""The auxiliary loss of routers: that of one process with the same micro-batches, where ranks have different tokens."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import fourfold as ff
from benchmarks.ranks import RankPool
from benchmarks.tiny_models import find_family, tiny_batch, tiny_model
from fourfold import Grid
from fourfold.errors import UnsupportedError
from fourfold.mesh.reductions import sum_forward
from fourfold.parallel.experts.balance import BalanceLoss
from fourfold.weights.api import no_sync
from tests.models import part

Shape = tuple[int, int, int, int]
COEFFICIENT = 0.5  # large, so that a wrong auxiliary loss is a wrong gradient
ROWS = 8


@dataclass(frozen=True)
class Errors:
    loss: float
    aux: float
    gradient: float  # the worst, of its own maximum
    split: bool

    @property
    def worst(self) -> float:
        return max(self.loss, self.aux, self.gradient / 10)  # gradients have ten times the tolerance


def with_aux_loss(name: str) -> Any:
    model: Any = tiny_model(find_family(name))
    config = model.config.get_text_config()
    config.output_router_logits, config.router_aux_loss_coef = True, COEFFICIENT
    if hasattr(model, "router_aux_loss_coef"):
        model.router_aux_loss_coef = COEFFICIENT
    return model


def padded(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows of different lengths, shorter and shorter, so that ranks have different numbers of tokens."""
    length = batch["input_ids"].shape[1]
    lengths = length - torch.arange(ROWS).unsqueeze(1) - 1
    mask = (torch.arange(length) < lengths).long()
    return batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def rows_of(batch: dict[str, Tensor], rows: list[int]) -> dict[str, Tensor]:
    return {name: given[rows] for name, given in batch.items()}


def errors(
    name: str,
    shape: Shape,
    activations: Any = "auto",
    micro_batches: int = 1,
    pads: bool = False,
    fault: Callable[[pytest.MonkeyPatch], None] | None = None,
    options: dict[str, Any] | None = None,
) -> Errors:
    """Against the stock model, which takes the same rows in each micro-batch."""
    stock, model, grid = with_aux_loss(name), with_aux_loss(name), Grid.create(shape)
    batch = tiny_batch(stock, ROWS)
    batch = padded(batch) if pads else batch
    by_rank = [list(range(ROWS))[i :: grid.batch_ranks] for i in range(grid.batch_ranks)]
    size = ROWS // grid.batch_ranks // micro_batches
    firsts = range(0, ROWS // grid.batch_ranks, size)
    mine = by_rank[grid.local_rows(ROWS).start * grid.batch_ranks // ROWS]
    expected = [
        stock(**rows_of(batch, [row for rows in by_rank for row in rows[at : at + size]])) for at in firsts
    ]
    sum(output.loss for output in expected).backward()
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            fault(patch)
        report = ff.parallelize(model, grid, activations=activations, **options or {})
        found = []
        for _ in range(2):  # in the second step weights come in the recorded order
            model.zero_grad()
            found.clear()
            for at in firsts:
                is_last = at == firsts[-1]
                with nullcontext() if is_last else no_sync(model):
                    found.append(model(**rows_of(batch, mine[at : at + size])))
                    found[-1].loss.backward()
    gradient = 0.0
    whole = {key: p.grad for key, p in stock.named_parameters() if p.grad is not None}  # towers are idle
    for key, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        maximum = whole[report.layouts[key].hf_name].abs().max()
        if local.numel() and maximum > 1e-6:
            gradient = max(gradient, float((local - part(whole, report, grid, key)).abs().max() / maximum))
    pairs = list(zip(found, expected, strict=True))
    return Errors(
        max(abs(f.loss.item() / e.loss.item() - 1) for f, e in pairs),
        max(abs(f.aux_loss.item() / e.aux_loss.item() - 1) for f, e in pairs),
        gradient,
        report.interleaved,
    )


def verify(pool: RankPool, name: str, shape: Shape, activations: str = "auto", **given: Any) -> None:
    ranks = shape[0] * shape[1] * shape[2] * shape[3]
    for found in pool.run(errors, ranks, name, shape, activations, **given):
        assert found.worst < 1e-5, found


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
@pytest.mark.parametrize(
    ("shape", "activations"),
    [((2, 1, 1, 1), "replicated"), ((1, 2, 1, 2), "sequence-parallel"), ((1, 2, 2, 1), "replicated")],
)
def test_loss_and_gradients_of_one_process(pool: RankPool, name: str, shape: Shape, activations: str) -> None:
    """Also with halves in turns, which x and y have."""
    verify(pool, name, shape, activations)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
@pytest.mark.parametrize(
    ("shape", "activations"),
    [((1, 2, 1, 2), "replicated"), ((1, 2, 2, 1), "sequence-parallel"), ((1, 1, 2, 2), "sequence-parallel")],
)
def test_other_grids(pool: RankPool, name: str, shape: Shape, activations: str) -> None:
    verify(pool, name, shape, activations)


# The others that have this loss.
OTHERS = (
    "deepseek_v4", "ernie4_5_moe", "ernie4_5_vl_moe", "flex_olmo", "flint", "glm4v_moe", "glm5_next", "granitemoe",
    "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "jamba", "laguna", "mellum", "minimax", "minimax_m2",
    "minimax_m3_vl", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe", "qwen3_next", "qwen3_omni_moe", "qwen3_vl_moe", "qwen4_exp",
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("name", OTHERS)
def test_other_families(pool: RankPool, name: str) -> None:
    verify(pool, name, (1, 2, 1, 1))


@pytest.mark.parametrize(
    ("shape", "options", "given"),
    [
        (
            (1, 2, 1, 1),
            {"weights": "fsdp2", "activation_checkpointing": "full"},
            {"pads": True, "micro_batches": 2},
        ),
        (
            (1, 1, 1, 2),
            {"weights": "streamed", "activation_checkpointing": "selective", "accumulation": "sharded"},
            {"pads": True, "micro_batches": 2},
        ),
        # Owned experts: the tokens whose logits are summed are a rank's own.
        ((1, 2, 1, 2), {"weights": "fsdp2", "experts": ("z", "x")}, {"pads": True, "micro_batches": 2}),
        *(
            pytest.param(
                (1, 2, 1, 2), {"experts": experts, **options}, {"pads": True}, marks=pytest.mark.nightly
            )
            for experts, options in (
                (("z",), {"weights": "streamed", "activations": "replicated"}),
                (("x",), {"weights": "fsdp2", "activation_checkpointing": "full"}),
                (("z", "x"), {"weights": "streamed", "activations": "replicated"}),
                (("z", "x"), {"weights": "streamed", "activation_checkpointing": "selective"}),
            )
        ),
        pytest.param(
            (1, 2, 1, 2),
            {"weights": "streamed", "activation_checkpointing": "full"},
            {"pads": True},
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            (1, 2, 1, 2),
            {"weights": "fsdp2", "activation_checkpointing": "selective", "chunked_loss": False},
            {"micro_batches": 2},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_with_padding_micro_batches_and_other_options(
    pool: RankPool, shape: Shape, options: dict[str, Any], given: dict[str, Any]
) -> None:
    others = {name: value for name, value in options.items() if name != "activations"}
    verify(pool, "qwen3_moe", shape, options.get("activations", "auto"), options=others, **given)


# -- faults -----------------------------------------------------------------------------------------------------------


def each_rank_has_its_own(patch: pytest.MonkeyPatch) -> None:
    """The mean of the ranks' auxiliary losses, as a trainer has that knows nothing of them."""
    sums_of_all = BalanceLoss._of_all

    def mean_of_ranks(self: BalanceLoss, sums: Tensor) -> Tensor:
        axes, self._axes = self._axes, ()
        aux = sums_of_all(self, sums)
        self._axes = axes
        for axis in axes:
            size = self._grid.size(axis)
            aux = sum_forward(aux / size, self._grid.collectives, axis, "balance")
        return aux

    patch.setattr(BalanceLoss, "_of_all", mean_of_ranks)


def halves_are_apart(patch: pytest.MonkeyPatch) -> None:
    """The mean of the auxiliary losses of half-batches."""
    of_all = BalanceLoss._of_all

    def add(self: BalanceLoss, sums: Tensor) -> Tensor:
        return sum(of_all(self, each) for each in sums) / len(sums)  # type: ignore[return-value]

    patch.setattr(BalanceLoss, "_together", add)


def tokens_of_x_are_left_out(patch: pytest.MonkeyPatch) -> None:
    before = BalanceLoss.__init__

    def init(self: BalanceLoss, model: Any, grid: Grid, *, by_tokens: bool, is_compiled: bool) -> None:
        before(self, model, grid, by_tokens=False, is_compiled=is_compiled)

    patch.setattr(BalanceLoss, "__init__", init)


def masks_are_of_the_first_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BalanceLoss, "_own_rows", lambda self, mask, rows: mask.reshape(-1)[:rows])


@pytest.mark.parametrize(
    ("fault", "shape", "given"),
    [
        (each_rank_has_its_own, (1, 2, 1, 1), {}),
        (halves_are_apart, (1, 1, 1, 2), {}),
        (tokens_of_x_are_left_out, (1, 1, 1, 2), {}),
        (masks_are_of_the_first_rank, (1, 1, 1, 2), {"pads": True}),
    ],
)
def test_a_planted_fault_is_found(
    pool: RankPool, fault: Callable[[pytest.MonkeyPatch], None], shape: Shape, given: dict[str, Any]
) -> None:
    found = pool.run(errors, 2, "qwen3_moe", shape, fault=fault, **given)
    assert max(each.gradient for each in found) > 1e-2


# -- what is refused --------------------------------------------------------------------------------------------------


def refused() -> dict[str, str]:
    found, grid = {}, Grid.create((1, 1, 1, 1))

    def attempt(what: str, compile: bool = False, is_default: bool = True, **given: Any) -> None:
        model = with_aux_loss("qwen3_moe")
        model.config.output_router_logits = is_default
        batch = tiny_batch(model, ROWS)
        try:
            ff.parallelize(model, grid, compile=compile)
            model(**batch, **given)
        except UnsupportedError as error:
            found[what] = str(error)

    attempt("compiled", compile=True)
    attempt("compiled later", compile=True, is_default=False, output_router_logits=True)
    attempt("tuple", return_dict=False)
    attempt("mask", attention_mask=torch.ones(ROWS, 1, 16, 16, dtype=torch.bool))
    return found


def test_what_is_refused_by_name(pool: RankPool) -> None:
    (found,) = pool.run(refused, 1)
    assert "reads the logits of routers inside blocks, so compile=True is not supported" in found["compiled"]
    assert "Qwen3MoeForCausalLM has compiled blocks" in found["compiled later"]
    assert "returned a tuple" in found["tuple"]
    assert "(8, 1, 16, 16)" in found["mask"]
