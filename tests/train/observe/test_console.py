"""Console output: a line per step with fixed columns."""

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ranks import RankPool
from fourfold.config.schema import RunConfig
from fourfold.train.observe.console import log_line
from fourfold.train.observe.metrics import read_metrics
from tests.training import on, write_run
from tests.watching import watch

SHAPE = (1, 2, 1, 1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("run")
    return on(write_run(folder), SHAPE, schedule={"steps": 12}, evaluation={"every_steps": 5})


def test_an_option_without_effect_is_reported(pool: RankPool, run: RunConfig, tmp_path: Path) -> None:
    idle = {"weights": "fsdp2", "keep_weights_bytes": 4096}
    folders = {"logging": {"folder": str(tmp_path)}, "checkpoints": {"folder": str(tmp_path / "c")}}
    other = on(run.model_dump(), SHAPE, schedule={"steps": 2}, engine=idle, **folders)
    ((_, printed), _) = pool.run(watch, 2, other)
    assert "keep_bytes=4096) has no effect with fsdp2 weights" in printed


def test_one_line_per_step_with_fixed_columns(pool: RankPool, run: RunConfig) -> None:
    (_, printed), (_, others) = pool.run(watch, 2, run)
    assert others == ""  # only rank 0 prints
    head, *body, done, report = printed.splitlines()
    notes, lines = body[:-12], body[-12:]
    assert any("weights: streamed" in note for note in notes)
    assert head.startswith("LlamaForCausalLM, ")
    assert "2 ranks (data=1, z=2, y=1, x=1)" in head
    assert done.startswith("done: 12 steps in ")
    assert report == f"report: {run.logging.folder}/report.html"
    metrics = read_metrics(run.logging.folder)
    assert len(lines) == len(metrics) == 12
    for word in ("loss", "norm", "tokens/s", "seconds", "exposed z", "left"):
        assert len({line.index(f"  {word} ") for line in lines}) == 1, word
    for line, step in zip(lines, metrics, strict=True):
        assert line.startswith(f"step {step['step']:2.0f}/12  loss {step['loss']:7.4f}")
        share = step["exposed_z_s"] / step["seconds"]
        assert f"exposed z {step['exposed_z_s']:.4f} s {share:6.1%}" in line
        assert ("validation" in line) == (step["step"] in (5, 10, 12))


def test_a_line_has_mfu_on_a_gpu() -> None:
    metrics: dict[str, Any] = {"step": 3, "loss": 2.0, "seconds": 0.5, "tokens_per_s": 9e6, "mfu": 0.4123}
    assert "  mfu  41.2%  " in log_line(metrics, 1000, 60.0)
    assert "mfu" not in log_line({k: v for k, v in metrics.items() if k != "mfu"}, 1000, 60.0)


def test_a_stopped_and_a_resumed_run_say_so(pool: RankPool, tmp_path: Path) -> None:
    stopping = on(write_run(tmp_path), (1, 1, 1, 1))
    ((_, printed),) = pool.run(watch, 1, stopping, stop_at=2)
    assert re.search(r"^stopped at step [23]: [23] steps in ", printed, re.MULTILINE)
    ((_, printed),) = pool.run(watch, 1, stopping)
    assert re.search(r"^resumed from step [23] of 6$", printed, re.MULTILINE)
