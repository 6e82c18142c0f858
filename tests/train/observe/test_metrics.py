"""Metrics of a run: complete, on the right axis, once for each step also after a kill, at little cost."""

import json
import math
import os
import socket
import statistics
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.ranks import RankPool
from fourfold.config.schema import RunConfig
from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.observe.evaluate import Evaluation
from fourfold.train.observe.meter import peak_by_name, peak_flops
from fourfold.train.observe.metrics import read_metrics
from fourfold.train.observe.trackers import check_installed
from tests.training import on, write_run
from tests.watching import SlowRank, watch

TWO = (1, 2, 1, 1)
ONE = (1, 1, 1, 1)
WAIT_S = 0.1


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_run(tmp_path_factory.mktemp("run"))


def fresh(values: dict[str, Any], folder: Path, shape: Any = ONE, **logging: Any) -> RunConfig:
    return on(
        values,
        shape,
        logging={"folder": str(folder / "logs"), **logging},
        checkpoints={"folder": str(folder / "checkpoints")},
        evaluation={"every_steps": 3},
    )


def test_every_step_has_its_metrics(pool: RankPool, values: dict[str, Any], tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = fresh(values, tmp_path, TWO)
    losses, _ = pool.run(watch, 2, run)[0]
    lines = read_metrics(run.logging.folder)
    assert {int(line["step"]): line["loss"] for line in lines} == losses
    assert [line["step"] for line in lines if "validation_loss" in line] == [3, 6]
    for line in lines:
        assert "exposed_z_s" in line
        assert not any(f"exposed_{axis}_s" in line for axis in ("x", "y", "data"))
        assert line["tokens_per_s"] == pytest.approx(run.batch.tokens / line["seconds"])
        assert line["tokens"] == line["step"] * run.batch.tokens
        assert line["memory_bytes"] > 50e6
        assert "mfu" not in line  # the peak of a CPU is not known
    assert any("checkpoint_s" in line for line in lines)
    events = EventAccumulator(str(run.logging.folder)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (step, pytest.approx(loss)) for step, loss in losses.items()
    ]
    assert [e.step for e in events.Scalars("validation/validation_loss")] == [3, 6]


@pytest.mark.nightly
def test_exposed_time_is_part_of_its_step(pool: RankPool, values: dict[str, Any], tmp_path: Path) -> None:
    run = fresh(values, tmp_path, TWO)
    pool.run(watch, 2, run)
    assert all(0 < line["exposed_z_s"] < line["seconds"] for line in read_metrics(run.logging.folder))


@pytest.mark.nightly
def test_exposed_time_is_that_of_the_step_on_its_axis(
    pool: RankPool, values: dict[str, Any], tmp_path: Path
) -> None:
    run = fresh(values, tmp_path, TWO)
    pool.run(watch, 2, run, SlowRank(WAIT_S, 0.0))
    waits = [line["exposed_z_s"] for line in read_metrics(run.logging.folder)]
    assert statistics.median(waits) > 0.5 * WAIT_S
    other = fresh(values, tmp_path / "other", TWO)
    pool.run(watch, 2, other, SlowRank(0.0, 4 * WAIT_S))
    waits = [line["exposed_z_s"] for line in read_metrics(other.logging.folder)]
    assert statistics.median(waits) < 2 * WAIT_S


def test_lines_with_several_steps_between_them(
    pool: RankPool, values: dict[str, Any], tmp_path: Path
) -> None:
    run = fresh(values, tmp_path, TWO, every_steps=4)
    pool.run(watch, 2, run)
    lines = read_metrics(run.logging.folder)
    assert [(line["step"], line["steps"]) for line in lines] == [(3, 3), (4, 1), (6, 2)]


@pytest.mark.nightly
def test_the_waits_of_several_steps_in_a_line_are_their_mean(
    pool: RankPool, values: dict[str, Any], tmp_path: Path
) -> None:
    run = fresh(values, tmp_path, TWO, every_steps=4)
    pool.run(watch, 2, run, SlowRank(WAIT_S, 0.0))
    lines = read_metrics(run.logging.folder)
    assert all(0.5 * WAIT_S < line["exposed_z_s"] < line["seconds"] for line in lines)


def test_a_killed_run_resumes_from_its_checkpoint(
    pool: RankPool, values: dict[str, Any], tmp_path: Path
) -> None:
    run = fresh(values, tmp_path)
    ((uninterrupted, _),) = pool.run(watch, 1, run)
    again = fresh(values, tmp_path / "again")
    pool.run(watch, 1, again, stop_at=3)
    path = again.logging.folder / "metrics.jsonl"
    stopped = int(read_metrics(again.logging.folder)[-1]["step"])
    assert stopped in (3, 4)  # ranks agree on a stop within a step
    # A step that is in no checkpoint, and a truncated line.
    path.write_text(path.read_text() + f'{{"step": {stopped + 1}, "loss": 99.0}}\n{{"step": 6, "lo')
    assert read_metrics(again.logging.folder)[-1] == {"step": stopped + 1, "loss": 99.0}
    pool.run(watch, 1, again)
    assert {int(line["step"]): line["loss"] for line in read_metrics(again.logging.folder)} == uninterrupted
    starts = json.loads((again.logging.folder / "run.json").read_text())["starts"]
    assert [(start["step"], start["until_step"]) for start in starts] == [
        (0, stopped),
        (stopped, 6),
    ]


def test_tokens_are_those_of_every_batch_so_far(
    pool: RankPool, values: dict[str, Any], tmp_path: Path
) -> None:
    run = fresh(values, tmp_path)
    pool.run(watch, 1, run, stop_at=2)
    done = int(read_metrics(run.logging.folder)[-1]["step"])
    doubled = run.model_copy(update={"batch": run.batch.model_copy(update={"tokens": 2 * run.batch.tokens})})
    pool.run(watch, 1, doubled)
    last = read_metrics(run.logging.folder)[-1]
    assert last["tokens"] == (done + 2 * (last["step"] - done)) * run.batch.tokens


def test_a_new_run_renames_the_metrics_of_another(
    pool: RankPool, values: dict[str, Any], tmp_path: Path
) -> None:
    run = fresh(values, tmp_path)
    run.logging.folder.mkdir()
    (run.logging.folder / "metrics.jsonl").write_text('{"step": 9, "loss": 1.0}\n')
    pool.run(watch, 1, run)
    assert [line["step"] for line in read_metrics(run.logging.folder)] == [1, 2, 3, 4, 5, 6]
    assert (run.logging.folder / "metrics.1.jsonl").read_text() == '{"step": 9, "loss": 1.0}\n'


def test_a_loss_of_nan_is_valid_json(pool: RankPool, values: dict[str, Any], tmp_path: Path) -> None:
    run = fresh(values, tmp_path)
    changes = {
        "optimizer": run.optimizer.model_copy(update={"lr": 1e30}),
        "reliability": run.reliability.model_copy(update={"skip_bad_steps": False}),
    }
    pool.run(watch, 1, run.model_copy(update=changes))
    text = (run.logging.folder / "metrics.jsonl").read_text()
    for line in text.splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert not math.isfinite(read_metrics(run.logging.folder)[-1]["loss"])


# -- trackers and exporters --------------------------------------------------------------------------------------------


class Fetch(Callback):
    """What a Prometheus server would get after each step, on rank 0."""

    def __init__(self, port: int, into: Path) -> None:
        self._port, self._into = port, into

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=5) as answer:
            (self._into / f"{result.step}.txt").write_bytes(answer.read())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_prometheus_gets_the_newest_metrics(pool: RankPool, values: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="the extra prometheus is not installed")
    port = free_port()
    run = fresh(values, tmp_path, prometheus_port=port)
    ((losses, _),) = pool.run(watch, 1, run, after=[Fetch(port, tmp_path)])
    for step, loss in losses.items():
        seen = dict(
            line.rsplit(" ", 1)
            for line in (tmp_path / f"{step}.txt").read_text().splitlines()
            if line[0] != "#"
        )
        assert float(seen["fourfold_step"]) == step
        assert float(seen["fourfold_loss"]) == loss
        assert float(seen["fourfold_steps_planned"]) == 6
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)


def watch_with(environment: dict[str, str], run: RunConfig, stop_at: int | None = None) -> Any:
    os.environ.update(environment)
    return watch(run, stop_at=stop_at)


def test_mlflow_keeps_a_resumed_run_as_one(pool: RankPool, values: dict[str, Any], tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    uri = f"file://{tmp_path}/store"
    run = fresh(values, tmp_path, mlflow_uri=uri)
    allowed = {"MLFLOW_ALLOW_FILE_STORE": "true"}
    pool.run(watch_with, 1, allowed, run, stop_at=3)
    pool.run(watch_with, 1, allowed, run)
    client = mlflow.MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name("fourfold").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["optimizer.lr"] == "0.01"
    seen = {
        metric.step: metric.value for metric in client.get_metric_history(found.info.run_id, "train/loss")
    }
    assert seen == {int(line["step"]): line["loss"] for line in read_metrics(run.logging.folder)}


def test_wandb_writes_offline(pool: RankPool, values: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    run = fresh(values, tmp_path, wandb_project="test")
    pool.run(watch_with, 1, {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}, run)
    (record,) = (run.logging.folder / "wandb").glob("offline-run-*/run-*.wandb")
    content = record.read_bytes()
    assert b"train/loss" in content
    assert b"validation/validation_loss" in content


def test_a_missing_extra_is_named() -> None:
    with pytest.raises(ValueError, match=r"logging\.some needs the package no_such.*fourfold\[some\]"):
        check_installed("no_such", "some", "logging.some")


def test_traces_of_chosen_steps(pool: RankPool, values: dict[str, Any], tmp_path: Path) -> None:
    run = fresh(values, tmp_path, (1, 1, 1, 2), profile_steps="4:5")
    pool.run(watch, 2, run)
    traces = run.logging.folder / "traces"
    names = [f"step-{step:06d}-rank-{rank}.json" for step in (4, 5) for rank in (0, 1)]
    assert sorted(path.name for path in traces.iterdir()) == names
    for name in names:
        events = json.loads((traces / name).read_text())["traceEvents"]
        assert "x all_gather model.layers.1.self_attn.q_proj+k_proj+v_proj" in {e.get("name") for e in events}


# -- overhead --------------------------------------------------------------------------------------------------------


class _Timed(Callback):
    def __init__(self, inner: Callback, spent_s: dict[int, float]) -> None:
        self._inner, self._spent_s = inner, spent_s
        self.on_start, self.on_end = inner.on_start, inner.on_end  # type: ignore[method-assign]

    @contextmanager
    def around_step(self, trainer: Trainer) -> Iterator[None]:
        around, start_s = self._inner.around_step(trainer), time.thread_time()
        around.__enter__()
        entered_s = time.thread_time()
        yield
        left_s = time.thread_time()
        around.__exit__(None, None, None)
        spent_s = entered_s - start_s + time.thread_time() - left_s
        self._spent_s[trainer.step] = self._spent_s.get(trainer.step, 0.0) + spent_s

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        start_s = time.thread_time()
        self._inner.on_step(trainer, result)
        self._spent_s[result.step - 1] += time.thread_time() - start_s


def cost(run: RunConfig) -> list[float]:
    """Seconds of this thread in each step for all callbacks but the evaluation."""
    from fourfold.mesh.grid import Grid
    from fourfold.train.callbacks import callbacks_of

    spent_s: dict[int, float] = {}
    callbacks = [_Timed(c, spent_s) for c in callbacks_of(run) if not isinstance(c, Evaluation)]
    Trainer(run, Grid.create(ONE), callbacks).train()
    return list(spent_s.values())


@pytest.mark.nightly
def test_callbacks_take_less_than_a_millisecond_per_step(
    pool: RankPool, values: dict[str, Any], tmp_path: Path
) -> None:
    long = {**values, "schedule": {"steps": 100, "warmup_steps": 2}}
    (spent_s,) = pool.run(cost, 1, fresh(long, tmp_path))
    assert len(spent_s) == 100
    assert statistics.median(spent_s) < 1e-3


def test_only_a_known_device_has_a_peak() -> None:
    assert peak_by_name("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_by_name("NVIDIA GB200") != peak_by_name("NVIDIA B200")
    assert peak_by_name("NVIDIA A100-PCIE-40GB") is None
    assert peak_by_name("NVIDIA GeForce RTX 4090") is None
    assert peak_flops(torch.device("cpu"), "bf16") is None
