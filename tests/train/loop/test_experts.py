"""Training of experts: the auxiliary loss, the correction bias and the counts of a run are those of one process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.ranks import RankPool
from benchmarks.stock import Stock
from fourfold.config.schema import RunConfig
from fourfold.export import export
from fourfold.mesh.grid import Grid
from fourfold.train.callbacks import callbacks_of
from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.observe.metrics import read_metrics
from fourfold.train.observe.report import write_report
from tests.training import Shape, on, train, write_run

COEFFICIENT, RATE = 0.3, 0.01
ACROSS = 1e-5  # relative; grids sum in different orders
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


class WithAux(Callback):
    """The loss that is trained, and the auxiliary one, by step."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[float, float]] = {}

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        assert result.aux_loss is not None
        aux = float(result.aux_loss)
        self.found[result.step] = float(result.loss) + COEFFICIENT * aux, aux


def train_with_aux(
    run: RunConfig, stop_at: int | None = None, saves: bool = False
) -> dict[int, tuple[float, float]]:
    losses = WithAux()
    train(run, losses, stop_at=stop_at, saves=saves)
    return losses.found


def stock_with_aux(run: RunConfig) -> dict[int, tuple[float, float]]:
    """The model's own sum of both, and its auxiliary loss."""
    stock, found = Stock(run), dict[int, tuple[float, float]]()
    stock.model.config.output_router_logits = True
    stock.model.router_aux_loss_coef = COEFFICIENT
    aux: list[float] = []
    stock.model.register_forward_hook(lambda *given: aux.append(float(given[-1].aux_loss.detach())))
    for step, loss in stock.losses():
        found[step] = loss, aux[-1]
    return found


def close(found: dict[int, tuple[float, float]], expected: dict[int, tuple[float, float]]) -> None:
    assert found.keys() == expected.keys()
    worst = max(
        abs(a - b) / b for step, both in expected.items() for a, b in zip(found[step], both, strict=True)
    )
    assert worst <= ACROSS, (worst, found, expected)


@pytest.mark.parametrize("shape", [(1, 2, 1, 1), pytest.param((1, 1, 1, 2), marks=pytest.mark.nightly)])
def test_the_auxiliary_loss_is_that_of_the_global_batch(pool: RankPool, tmp_path: Path, shape: Shape) -> None:
    run = on(write_run(tmp_path, "qwen3_moe"), shape, experts={"aux_loss_coef": COEFFICIENT})
    for found in pool.run(train_with_aux, run.grid.size, run):
        close(found, stock_with_aux(run))


class StockWithBias(Stock):
    """Counts what its experts are called with, and updates the biases of its routers after each step."""

    def __init__(self, run: RunConfig) -> None:
        super().__init__(run)
        self.counts = torch.zeros(4)
        self.model.get_submodule("model.layers.1.mlp.experts").register_forward_pre_hook(self._count)

    def _count(self, module: Any, given: tuple[Tensor, ...]) -> None:
        self.counts = torch.bincount(given[1].flatten(), minlength=4)

    def step(self, batch: dict[str, Tensor] | None = None) -> float:
        loss = super().step(batch)
        counts = self.counts.double()
        self.model.get_buffer(BIAS).add_(RATE * torch.sign(counts.mean() - counts).float())
        return loss


def stock_with_bias(run: RunConfig) -> Iterator[tuple[int, float, list[float]]]:
    stock = StockWithBias(run)
    for step, loss in stock.losses():
        yield step, loss, stock.model.get_buffer(BIAS).tolist()


class Biases(Callback):
    def __init__(self) -> None:
        self.found: dict[int, list[float]] = {}

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        self.found[result.step] = trainer.model.get_buffer(BIAS).tolist()


def train_with_bias(
    run: RunConfig, stop_at: int | None = None
) -> tuple[dict[int, float], dict[int, list[float]]]:
    biases = Biases()
    losses, _ = train(run, biases, saves=True, stop_at=stop_at)
    return losses, biases.found


def test_the_bias_is_saved_and_exported_and_goes_on_where_it_was(pool: RankPool, tmp_path: Path) -> None:
    values = write_run(tmp_path, "glm4_moe")
    run = on(values, (1, 2, 1, 1), experts={"bias_rate": RATE}, engine={"experts": ["z"]})
    (first, before), *_ = pool.run(train_with_bias, 2, run, stop_at=2)
    (rest, after), *_ = pool.run(train_with_bias, 1, on(values, (1, 1, 1, 1), experts={"bias_rate": RATE}))
    losses, biases = first | rest, before | after
    for step, loss, bias in stock_with_bias(run):
        assert abs(losses[step] / loss - 1) < ACROSS
        assert biases[step] == bias
    assert len(set(biases[6])) > 1
    export(tmp_path / "checkpoints", tmp_path / "out")
    exported = type(StockWithBias(run).model).from_pretrained(tmp_path / "out")
    assert exported.get_buffer(BIAS).tolist() == biases[6]


def train_with_metrics(run: RunConfig) -> None:
    train(run, *callbacks_of(run))


def test_metrics_and_report_have_the_load_of_experts(pool: RankPool, tmp_path: Path) -> None:
    run = on(
        write_run(tmp_path, "qwen3_moe"),
        (1, 2, 1, 1),
        experts={"load_metrics": True, "aux_loss_coef": COEFFICIENT},
        engine={"experts": ["z"]},
        batch={"micro_batch_sequences": 2},
        logging={"every_steps": 2},
        evaluation={"sequences": 0},
    )
    pool.run(train_with_metrics, 2, run)
    lines = read_metrics(run.logging.folder)
    assert [line["step"] for line in lines] == [2, 4, 6]
    for line in lines:
        # Two steps, two choices, two layers of four experts.
        assert line["expert_tokens_mean"] == 2 * run.batch.tokens * 2 / 4
        assert line["expert_tokens_min"] <= line["expert_tokens_mean"] <= line["expert_tokens_max"]
        assert line["expert_load"] == pytest.approx(4 * line["expert_largest_share"])
        assert line["expert_load"] == line["expert_tokens_max"] / line["expert_tokens_mean"]
        assert line["expert_dropped"] == 0
        assert line["aux_loss"] > 1
    page = write_report(run.logging.folder, None).read_text()
    assert "Load of experts" in page
    assert "Auxiliary loss of routers" in page


def without_a_bias(run: RunConfig) -> str:
    with pytest.raises(ValueError, match="has no correction bias") as error:
        Trainer(run, Grid.create((1, 1, 1, 1)))
    return str(error.value)


def test_a_model_without_a_bias_is_refused(pool: RankPool, tmp_path: Path) -> None:
    run = on(write_run(tmp_path, "qwen3_moe"), (1, 1, 1, 1), experts={"bias_rate": RATE})
    (message,) = pool.run(without_a_bias, 1, run)
    assert "use the auxiliary loss" in message


# -- for longer -------------------------------------------------------------------------------------------------------

FIFTY: dict[str, dict[str, Any]] = {
    "experts": {"aux_loss_coef": COEFFICIENT},
    "optimizer": {"lr": 1e-3},
    "schedule": {"steps": 50, "warmup_steps": 5},
    "checkpoints": {"every_steps": 50},
}


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [(1, 2, 1, 2), (2, 1, 1, 1), (1, 2, 2, 1)])
def test_fifty_steps(pool: RankPool, tmp_path: Path, shape: Shape) -> None:
    run = on(write_run(tmp_path, "qwen3_moe"), shape, **FIFTY)
    for found in pool.run(train_with_aux, run.grid.size, run):
        close(found, stock_with_aux(run))


@pytest.mark.nightly
def test_fifty_steps_that_go_on_on_another_grid(pool: RankPool, tmp_path: Path) -> None:
    values = write_run(tmp_path, "qwen3_moe")
    found: dict[int, tuple[float, float]] = {}
    for shape, stop_at in (((1, 2, 1, 2), 20), ((2, 1, 1, 2), None)):
        run = on(values, shape, **FIFTY)
        own, *_ = pool.run(train_with_aux, 4, run, stop_at=stop_at, saves=True)
        assert not found.keys() & own.keys()
        found |= own
    close(found, stock_with_aux(run))
