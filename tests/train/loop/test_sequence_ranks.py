"""A run whose ranks share sequences: its losses are those of stock PyTorch, and it resumes on any number of ranks a sequence."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ranks import RankPool
from fourfold.config.run_file import ConfigError, from_dict
from fourfold.config.schema import EngineSection
from fourfold.train.auto_layout import choose_layout, without_layout
from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.memory_fit import fields_that_fit
from fourfold.train.observe.evaluate import Evaluation
from tests.training import Shape, on, stock_losses, train, write_run

ACROSS = 1e-5  # relative tolerance; grids sum in different orders
ENGINE = {"precision": "fp32", "activation_checkpointing": "none"}


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_run(tmp_path_factory.mktemp("run")) | {"engine": ENGINE}


def assert_close(found: dict[int, float], expected: dict[int, float]) -> None:
    assert found.keys() == expected.keys()
    assert max(abs(found[step] - loss) / loss for step, loss in expected.items()) <= ACROSS, (found, expected)


@pytest.mark.parametrize(
    ("shape", "share", "at_a_time"),
    [
        ((1, 2, 1, 2), 2, 2),
        pytest.param((2, 2, 1, 1), 2, None, marks=pytest.mark.nightly),
        pytest.param((1, 4, 2, 1), 4, 4, marks=pytest.mark.nightly),
        pytest.param((1, 8, 1, 1), "auto", None, marks=pytest.mark.nightly),
    ],
)
def test_losses_equal_those_of_stock_pytorch(
    pool: RankPool, values: dict[str, Any], shape: Shape, share: int | str, at_a_time: int | None
) -> None:
    run = on(values, shape, batch={"micro_batch_sequences": at_a_time, "sequence_ranks": share})
    for losses, _ in pool.run(train, run.grid.size, run):
        assert_close(losses, stock_losses(run))


def test_a_run_resumes_with_other_ranks_a_sequence(pool: RankPool, tmp_path: Path) -> None:
    values = write_run(tmp_path) | {"engine": ENGINE}
    expected = stock_losses(on(values, (1, 1, 1, 1)))
    found: dict[int, float] = {}
    for shape, share, stop_at in (((1, 4, 1, 1), 4, 1), ((1, 1, 1, 1), 1, 3), ((1, 2, 1, 1), 2, None)):
        run = on(values, shape, batch={"sequence_ranks": share})
        ((losses, _), *_) = pool.run(train, run.grid.size, run, saves=True, stop_at=stop_at)
        assert not found.keys() & losses.keys()
        found |= losses
    assert_close(found, expected)


def validation_loss(run: Any) -> float:
    found: list[float] = []

    class Keep(Callback):
        def on_step(self, trainer: Trainer, result: StepResult) -> None:
            found.append(result.metrics["validation_loss"])

    train(run, Evaluation(run.evaluation.sequences, 1), Keep())
    return found[-1]


def test_the_validation_loss_is_that_of_one_rank(pool: RankPool, values: dict[str, Any]) -> None:
    found = []
    for shape, share in (((1, 1, 1, 1), 1), ((1, 2, 1, 1), 2)):
        run = on(
            values, shape, batch={"sequence_ranks": share}, evaluation={"sequences": 5}, schedule={"steps": 2}
        )
        found.append(pool.run(validation_loss, run.grid.size, run)[0])
    assert abs(found[0] - found[1]) <= ACROSS * found[0]


def test_auto_shares_as_little_as_lets_the_batch_divide(values: dict[str, Any]) -> None:
    def chosen(shape: Shape, tokens: int) -> int:
        return on(values, shape, batch={"sequence_ranks": "auto", "tokens": tokens}).sequence_ranks

    assert chosen((1, 8, 1, 1), 8 * 16) == 1
    assert chosen((1, 8, 1, 1), 4 * 16) == 2
    assert chosen((2, 4, 1, 1), 2 * 16) == 4
    with pytest.raises(ConfigError, match=r"do not divide over data\*z = 8"):
        chosen((2, 4, 1, 1), 3 * 16)


def test_the_planner_chooses_how_many_share_a_sequence(
    values: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    values = {**values, "model": {"config": str(tmp_path / "config.json")}, "grid": {"cluster": "dgx-h100"}}
    values |= {
        "data": {**values["data"], "sequence_length": 2**20},
        "evaluation": {"sequences": 64},
        "engine": {},
    }
    batch = {"tokens": 2**20, "sequence_ranks": "auto"}
    run = choose_layout(from_dict({**values, "batch": batch}), 64)
    assert run.sequence_ranks == run.batch.sequence_ranks > 1
    assert run.batch.micro_batch_sequences == 1
    assert run.engine.activation_checkpointing != "auto"
    # What a run with this grid and without recomputation of its own would choose on devices of that memory.
    engine = EngineSection(activations=run.engine.activations, weights="fsdp2")
    sizes = (1, 2**20, 1)
    given = (config, run.shape, engine, sizes, "adamw", 80 * 2**30)
    known = fields_that_fit(*given, "cuda", sequence_ranks=run.sequence_ranks)
    assert known["activation_checkpointing"] != "none"
    unknown = fields_that_fit(*given, "cpu", sequence_ranks=run.sequence_ranks)
    assert unknown["activation_checkpointing"] == "none"
    assert "is known for GPUs in bf16 alone" in caplog.text
    planned = without_layout(run)
    assert planned.grid.auto
    assert planned.batch.sequence_ranks == "auto"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": {"sequence_ranks": 3}}, r"sequence_ranks=3 does not divide grid\.z=4; use one of 1, 2, 4"),
        (
            {"batch": {"sequence_ranks": 4, "tokens": 8 * 20}, "data": {"sequence_length": 20}},
            "8 chunks, which do not divide data.sequence_length=20; use 16",
        ),
        ({"engine": {"attention": "masked"}}, "attention='masked' is not supported; use 'auto'"),
        ({"reliability": {"torchft_lighthouse": "http://a:1"}}, "torchft_lighthouse is not supported"),
    ],
)
def test_what_does_not_go_together_is_refused(
    values: dict[str, Any], changes: dict[str, dict[str, Any]], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        on(values, (1, 4, 1, 1), **{"batch": {"sequence_ranks": 2}} | changes)
