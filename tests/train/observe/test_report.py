"""The HTML report: made from the files of a run alone, self-contained, with measured and predicted times."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.ranks import RankPool
from fourfold.cli.main import main
from fourfold.config.schema import RunConfig
from fourfold.planner.show.compare import Comparison
from fourfold.train.observe.metrics import read_metrics
from fourfold.train.observe.report import compare_with_prediction, times_of, write_report
from fourfold.train.observe.run_metadata import read_run_metadata
from tests.training import on, write_run
from tests.watching import SlowRank, watch

WAIT_S = 0.1
CLUSTER = """
name = "two-cores"
[device]
name = "a core"
best_tflops = 0.05
memory_gib = 8
memory_tbps = 0.01
multiprocessors = 1
[links]
devices_per_node = 8
device_gbps = 2
node_gbps = 2
[library]
name = "gloo"
algorithms = ["ring"]
"""


@pytest.fixture(scope="module")
def run(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run on two ranks, one of them slow, that is over."""
    folder = tmp_path_factory.mktemp("run")
    run = on(write_run(folder), (1, 2, 1, 1), schedule={"steps": 12}, evaluation={"every_steps": 4})
    pool.run(watch, 2, run, SlowRank(WAIT_S, 0.0))
    return run


@pytest.fixture
def logs(run: RunConfig, tmp_path: Path) -> Path:
    """A copy of its files without the report."""
    for name in ("run.json", "metrics.jsonl"):
        (tmp_path / name).write_bytes((run.logging.folder / name).read_bytes())
    return tmp_path


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<(style|title|script).*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL))


def test_the_report_is_self_contained(run: RunConfig) -> None:
    page = (run.logging.folder / "report.html").read_text()
    assert not re.search(r"<script[^>]* src|<link|<img|@import", page)
    text = text_of(page)
    lines = read_metrics(run.logging.folder)
    for words in (
        "12 of 12 steps on (data=1, z=2, y=1, x=1)",
        f"{lines[-1]['loss']:.4f} loss",
        f"{lines[-1]['validation_loss']:.4f} validation loss",
        "8 sequences of 16 tokens",
        "No cluster is given",
        "Learning rate",
    ):
        assert words in text, words


def test_the_files_alone_make_the_same_report(run: RunConfig, logs: Path) -> None:
    assert main(["report", str(logs)]) == 0
    assert (logs / "report.html").read_text() == (run.logging.folder / "report.html").read_text()


def test_a_run_without_steps_left_keeps_the_report(pool: RankPool, run: RunConfig) -> None:
    """Metrics since the last start are compared with the prediction, and there would be none."""
    files = ("run.json", "metrics.jsonl", "report.html")
    before = [(run.logging.folder / name).read_bytes() for name in files]
    ((losses, printed), _) = pool.run(watch, 2, run)
    assert not losses
    assert "done: 0 steps" in printed
    assert [(run.logging.folder / name).read_bytes() for name in files] == before


def test_a_folder_without_a_run_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "there is no" in capsys.readouterr().err


@pytest.fixture
def timed_logs(logs: Path) -> Path:
    """The same run with given times: a step of 1 s waits 0.75 s for z and 0.05 s for data."""
    lines = read_metrics(logs)
    for line in lines:
        line |= {"seconds": 1.0, "exposed_z_s": 0.75, "data_wait_s": 0.05}
        line |= {part: 0.5 for part in ("evaluation_s", "checkpoint_s") if part in line}
    (logs / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    metadata = json.loads((logs / "run.json").read_text())
    metadata["starts"][-1] |= {"seconds": 20.0, "unlogged_s": {"checkpoint": 0.25}}
    (logs / "run.json").write_text(json.dumps(metadata))
    return logs


def test_the_parts_add_up_to_the_total_time(timed_logs: Path) -> None:
    lines = read_metrics(timed_logs)
    times_s = times_of(read_run_metadata(timed_logs), lines)
    evaluations, saves = (sum(f"{part}_s" in line for line in lines) for part in ("evaluation", "checkpoint"))
    assert evaluations == 3
    assert saves >= 4  # a step that waits for a save is listed, too
    assert times_s == pytest.approx(
        {
            "compute": 12 * 0.2,
            "exposed z": 12 * 0.75,
            "waiting for data": 12 * 0.05,
            "evaluation": 0.5 * evaluations,
            "checkpoint": 0.5 * saves + 0.25,  # the last is after them
            "other": 20.0 - 12 - 0.5 * (evaluations + saves) - 0.25,
        }
    )


@pytest.mark.nightly
def test_the_parts_add_up_to_the_measured_time(logs: Path) -> None:
    metadata, lines = read_run_metadata(logs), read_metrics(logs)
    times_s = times_of(metadata, lines)
    whole_s = metadata["starts"][-1]["seconds"]
    assert sum(times_s.values()) == pytest.approx(whole_s, rel=1e-6)
    assert times_s["exposed z"] > 0.5 * WAIT_S * 12
    assert times_s["evaluation"] > 0
    assert times_s["checkpoint"] > sum(
        line.get("checkpoint_s", 0.0) for line in lines
    )  # the last checkpoint is after them
    assert times_s["other"] < 0.5 * whole_s


def test_a_killed_run_has_a_report(logs: Path) -> None:
    metadata = json.loads((logs / "run.json").read_text())
    for key in ("seconds", "until_step", "unlogged_s"):
        del metadata["starts"][-1][key]
    (logs / "run.json").write_text(json.dumps(metadata))
    lines = (logs / "metrics.jsonl").read_text().splitlines()
    (logs / "metrics.jsonl").write_text("\n".join(lines[:7]) + '\n{"step": 8, "lo')
    text = text_of(write_report(logs, None).read_text())
    assert "7 of 12 steps" in text
    assert "did not end normally" in text


def compare_on(logs: Path, cluster: Path) -> Comparison:
    cluster.write_text(CLUSTER)
    comparison = compare_with_prediction(read_run_metadata(logs), read_metrics(logs), str(cluster))
    assert isinstance(comparison, Comparison)
    assert comparison.worst == "exposed z"  # no simulation knows of the slow rank
    return comparison


@pytest.mark.nightly
def test_a_measured_wait_is_the_worst_gap(logs: Path, tmp_path: Path) -> None:
    comparison = compare_on(logs, tmp_path / "cluster.toml")
    assert comparison.run.parts_s["exposed z"] - comparison.predicted_s["exposed z"] > 0.5 * WAIT_S
    assert sum(comparison.run.parts_s.values()) == pytest.approx(comparison.run.step_s, rel=0.1)


def test_measured_and_predicted_side_by_side(timed_logs: Path, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    comparison = compare_on(timed_logs, cluster)
    assert comparison.run.step_s == 1.0
    assert comparison.run.parts_s["exposed z"] == 0.75
    assert comparison.run.parts_s["compute"] == pytest.approx(0.2)
    assert main(["report", str(timed_logs), "--cluster", str(cluster)]) == 0
    text = text_of((timed_logs / "report.html").read_text())
    assert "predicted measured gap" in text
    assert "The worst gap is exposed z" in text


@pytest.mark.parametrize(
    ("cluster", "reason"),
    [(None, "No cluster is given"), ("dgx-h100", "It ran on CPU"), ("dgx-h200", "no cluster named")],
)
def test_without_a_prediction_the_report_says_why(logs: Path, cluster: str | None, reason: str) -> None:
    comparison = compare_with_prediction(read_run_metadata(logs), read_metrics(logs), cluster)
    assert isinstance(comparison, str)
    assert reason in comparison
