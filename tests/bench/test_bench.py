"""`fourfold bench`: a run config without data is measured on two ranks, and its page has the prediction."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.ranks import RankPool
from fourfold.bench import measure
from fourfold.bench.measure import Bench, bench, on_random_tokens
from fourfold.bench.report import Results
from fourfold.cli.main import main
from fourfold.config.schema import RunConfig
from fourfold.data.samples import NO_LABEL, Samples
from tests.models import build
from tests.train.observe.test_report import CLUSTER, text_of
from tests.training import on, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run config whose data does not exist."""
    folder = tmp_path_factory.mktemp("run")
    return on(write_run(folder), (1, 2, 1, 1), data={"sources": [{"path": str(folder / "nowhere")}]})


@pytest.fixture(scope="module")
def found(pool: RankPool, run: RunConfig) -> Bench:
    first, second = pool.run(bench, 2, run, 0.001)
    assert second is None
    return first


@pytest.mark.nightly
def test_the_least_number_of_steps_is_timed(found: Bench) -> None:
    assert len(found.seconds) == measure.LEAST  # no time was left for more
    assert 0 < found.exposed_s["z"] < sum(found.seconds)
    assert list(found.exposed_s) == ["z"]
    assert found.memory_bytes > 0


def test_a_sample_is_one_document(run: RunConfig, tmp_path: Path) -> None:
    changed = on_random_tokens(run, tmp_path)
    sample = Samples(tmp_path, "train", run.data.sequence_length)[3]
    assert sample.position_ids.tolist() == list(range(run.data.sequence_length))
    assert (sample.labels == NO_LABEL).sum() == 1
    assert changed.model.pretrained is None
    assert not changed.evaluation.sequences


def test_the_page_has_both(found: Bench, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER)
    results = Results(found, str(cluster))
    results.write(tmp_path / "bench.html")
    said = json.loads((tmp_path / "bench.json").read_text())
    assert said["step_s"] == sorted(found.seconds)[measure.LEAST // 2]
    assert said["tokens_per_s"] == pytest.approx(results.tokens / said["step_s"])
    assert said["predicted"]["step_s"] == results.predicted.step_s
    text = text_of((tmp_path / "bench.html").read_text())
    for words in (
        "exposed z, of the step",
        "worst gap",
        "two-cores",
        f"{measure.LEAST} steps on random tokens",
    ):
        assert words in text, words
    # Both columns: tokens per second of the measured median step and of the prediction.
    shown = (f"{s:,.0f}" for s in (said["tokens_per_s"], said["predicted"]["tokens_per_s"]))
    assert re.search(" +".join(["tokens/s", *shown]), text)


@pytest.mark.parametrize(
    ("device", "cluster", "reason"),
    [
        ("CPU", None, "no preset with CPU"),
        ("CPU", "dgx-h100", "It ran on CPU, and"),
        ("NVIDIA H100 80GB HBM3", None, ""),
    ],
)
def test_the_cluster_is_that_of_the_devices(
    found: Bench, device: str, cluster: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Bench({**found.metadata, "device": device}, found.seconds, found.exposed_s, found.memory_bytes)
    monkeypatch.setattr("fourfold.bench.report.compare", lambda run, cluster: cluster.name)
    results = Results(there, cluster)
    if reason:
        assert reason in str(results)
        assert results.mfu is None
    else:
        assert results.comparison == "dgx-h100"
        assert "MFU" in str(results)
        assert "peak memory" in str(results)


def test_separate_jobs_are_rejected(run: RunConfig) -> None:
    changed = run.reliability.model_copy(update={"torchft_lighthouse": "http://head:29510"})
    with pytest.raises(ValueError, match="makes each replica a job of its own; leave it out"):
        bench(run.model_copy(update={"reliability": changed}), 1)


RUN = """
[model]
config = "model"
[data]
sources = [{path = "nowhere"}]
sequence_length = 16
[batch]
tokens = 128
"""


def test_the_command_writes_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    build("llama").config.save_pretrained("model")
    Path("run.toml").write_text(RUN)
    assert main(["bench", "run.toml", "--minutes", "0.001"]) == 0
    assert "wrote bench.html and bench.json" in capsys.readouterr().out
    assert "steps on random tokens" in text_of(Path("bench.html").read_text())
    assert main(["bench", "run.toml", "--minutes", "0"]) == 2
    assert (
        main(["bench", "run.toml", "--set", "data.sequence_length=4096", "--set", "batch.tokens=4096"]) == 2
    )
    assert "is longer than the 64 positions of the model" in capsys.readouterr().err
