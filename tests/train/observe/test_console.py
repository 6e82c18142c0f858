"""Console output: a line per step with fixed columns, and on a terminal a table that fits."""

import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.config.schema import RunConfig
from fourfold.train.loop.trainer import Trainer
from fourfold.train.observe.console import COLUMNS, ConsoleLogger, columns_that_fit, log_line
from fourfold.train.observe.meter import Meter
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


def on_a_terminal(run: RunConfig, width: int) -> tuple[str, list[tuple[int, list[str]]]]:
    """(the output to the terminal, the headings that fit at some widths)."""
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=width, height=40, legacy_windows=False)
    trainer = Trainer(run, Grid.create(SHAPE), [Meter(), ConsoleLogger(console)])
    trainer.train()
    fits = []
    for available in (60, 80, 120, 200):
        columns = columns_that_fit(COLUMNS, available)
        fits.append((sum(c.width + 2 for c in columns), [c.heading for c in columns]))
    return out.getvalue(), fits


def test_a_terminal_shows_a_live_table(pool: RankPool, run: RunConfig) -> None:
    out, fits = pool.run(on_a_terminal, 2, run, 100)[0]
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out)
    assert "12 of 12   100%" in text
    assert out.count("\x1b[?25l") == out.count("\x1b[?25h") == 1  # the cursor is restored
    last = text[text.rindex("12 of 12") :]
    rows = [line.split() for line in last.splitlines() if re.match(r"\s+\d+\s", line)]
    assert [int(row[0]) for row in rows] == [2, 4, 6, 8, 10, 12]
    assert max(len(line.rstrip()) for line in last.splitlines()) <= 100
    for available, (width, headings) in zip((60, 80, 120, 200), fits, strict=True):
        assert width <= available, headings
        assert {"loss", "tokens/s"} <= set(headings)
    assert "exposed z" in fits[-1][1]
    assert "memory" not in fits[0][1]


def test_a_line_has_mfu_on_a_gpu() -> None:
    metrics: dict[str, Any] = {"step": 3, "loss": 2.0, "seconds": 0.5, "tokens_per_s": 9e6, "mfu": 0.4123}
    assert "  mfu  41.2%" in log_line(metrics, 1000, 60.0)
    assert "mfu" not in log_line({k: v for k, v in metrics.items() if k != "mfu"}, 1000, 60.0)


def test_a_stopped_and_a_resumed_run_say_so(pool: RankPool, tmp_path: Path) -> None:
    stopping = on(write_run(tmp_path), (1, 1, 1, 1))
    ((_, printed),) = pool.run(watch, 1, stopping, stop_at=2)
    assert re.search(r"^stopped at step [23]: [23] steps in ", printed, re.MULTILINE)
    ((_, printed),) = pool.run(watch, 1, stopping)
    assert re.search(r"^resumed from step [23] of 6$", printed, re.MULTILINE)
