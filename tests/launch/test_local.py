"""Checks before ranks start, the planner's choice of a grid, and the train command."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ranks import RankError, RankPool
from benchmarks.run_toml import to_toml
from fourfold import Grid
from fourfold.cli.main import main
from fourfold.config.describe import SIZES
from fourfold.config.run_file import from_dict, load_run
from fourfold.config.schema import CHOSEN_ALONG, EvaluationSection, RunConfig
from fourfold.launch.local import check, local_ranks
from fourfold.planner.inputs.layout import Layout
from fourfold.processes import CONTINUE
from fourfold.train.auto_layout import (
    choose_layout,
    plan_options,
    resume_or_choose_layout,
    with_layout,
    without_layout,
)
from fourfold.train.callbacks import callbacks_of
from fourfold.train.loop.trainer import Trainer, micro_batches
from fourfold.train.observe.evaluate import Evaluation
from fourfold.train.observe.run_metadata import run_metadata
from fourfold.train.run import resolve_layout, train
from tests.training import on, write_run


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_run(tmp_path_factory.mktemp("run"))


def test_a_batch_that_does_not_divide_is_rejected(values: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"are 8 sequences, which do not divide over data.z = 3 ranks; use 144"
    ):
        check(on(values, (3, 1, 1, 1)))
    with pytest.raises(
        ValueError, match="micro_batch_sequences=3 does not divide the 4 sequences of a rank; use 2"
    ):
        check(on(values, (2, 1, 1, 1), batch={"micro_batch_sequences": 3}))
    assert micro_batches(4, 2) == 2


def test_too_little_validation_text_is_rejected(values: dict[str, Any]) -> None:
    long = on(values, (1, 1, 1, 1), data={"sequence_length": 512}, batch={"tokens": 1024})
    with pytest.raises(ValueError, match="no source has 512 tokens of validation text"):
        check(long)
    with pytest.raises(ValueError, match="longer than the 64 positions"):  # the next check
        check(long.model_copy(update={"evaluation": EvaluationSection(sequences=0)}))


def test_without_validation_text_init_turns_the_evaluation_off(
    values: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    file, data = tmp_path / "run.toml", values["data"]["sources"][0]["path"]
    assert main(["init", str(file), "--size", "1b", "--data", data]) == 0  # sequences of 4,096 tokens
    assert (
        "tokens of validation text, less than one sample of 4096: the run does not evaluate"
        in capsys.readouterr().err
    )
    run = load_run(file)
    assert run.evaluation.sequences == 0
    assert not any(isinstance(callback, Evaluation) for callback in callbacks_of(run))


def test_a_model_with_a_small_vocabulary_is_rejected(values: dict[str, Any], tmp_path: Path) -> None:
    config = json.loads((Path(values["model"]["pretrained"]) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    with pytest.raises(
        ValueError, match="has a vocabulary of 100 tokens, the data of 131; set vocab_size to 131"
    ):
        check(on(values | {"model": {"config": str(tmp_path)}}, (1, 1, 1, 1)))
    with pytest.raises(ValueError, match=r"model.config: there is no config.json at .*missing.json"):
        check(on(values | {"model": {"config": str(tmp_path / "missing.json")}}, (1, 1, 1, 1)))


def test_sequences_longer_than_the_positions_of_the_model_are_rejected(
    values: dict[str, Any], tmp_path: Path
) -> None:
    config = json.loads((Path(values["model"]["pretrained"]) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8}))
    with pytest.raises(
        ValueError, match=r"data.sequence_length=\d+ is longer than the 8 positions of the model"
    ):
        check(on(values | {"model": {"config": str(tmp_path)}}, (1, 1, 1, 1)))


def test_the_number_of_ranks_follows_the_grid_or_the_option(values: dict[str, Any]) -> None:
    assert local_ranks(on(values, (1, 2, 2, 2)), None) == 8
    with pytest.raises(ValueError, match=r"--ranks 4 does not fit the grid data.z.y.x = 8"):
        local_ranks(on(values, (1, 2, 2, 2)), 4)
    for chosen in ({"cluster": "dgx-h100"}, {}, "auto"):
        automatic = from_dict(values | {"grid": chosen})
        assert (local_ranks(automatic, 4), local_ranks(automatic, None)) == (4, 1)


def test_one_rank_cannot_be_restarted(values: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "run.toml"
    file.write_text(to_toml(values))
    assert main(["train", str(file), "--max-restarts", "2"]) == 2
    assert "--max-restarts 2 has no effect on a grid of one rank" in capsys.readouterr().err


def test_the_planner_chooses_the_grid(values: dict[str, Any]) -> None:
    run = from_dict(values | {"grid": {"cluster": "dgx-h100"}})
    chosen = choose_layout(run, 8)
    assert chosen.grid.size == 8
    assert not chosen.grid.auto
    check(chosen)
    given = from_dict(
        values
        | {
            "grid": {"cluster": "dgx-h100"},
            "batch": {"tokens": 2 * values["data"]["sequence_length"]},
            "engine": {"activations": "sequence-parallel", "keep_inputs": False},
        }
    )
    small = choose_layout(given, 8)
    assert small.grid.x * small.grid.y >= 4  # two sequences can be split over at most two ranks
    assert (small.engine.activations, small.engine.keep_inputs) == ("sequence-parallel", False)
    given = from_dict(
        values
        | {
            "grid": {"cluster": "dgx-h100"},
            "batch": {"tokens": 8 * values["data"]["sequence_length"], "micro_batch_sequences": 1},
            "engine": {"keep_weights_bytes": 4096},
        }
    )
    assert plan_options(given)["keep_bytes"] == 4096
    assert plan_options(run)["keep_bytes"] is None
    for ranks in (1, 2, 8):
        small = choose_layout(given, ranks)
        assert (small.batch.micro_batch_sequences, small.engine.keep_weights_bytes) == (1, 4096)
    with pytest.raises(ValueError, match="no layout of 131072 ranks can train this model on dgx-h100"):
        choose_layout(run, 131072)


def test_without_a_cluster_all_ranks_are_on_z(values: dict[str, Any]) -> None:
    chosen = choose_layout(from_dict(values), 4)
    assert (chosen.shape, chosen.grid.auto) == ((1, 4, 1, 1), False)
    assert chosen.batch.micro_batch_sequences == 2
    check(chosen)
    long = on(values, (1, 1, 1, 1), data={"sequence_length": 4096}, batch={"tokens": 2**18})
    long = choose_layout(without_layout(long), 4)
    assert long.batch.micro_batch_sequences == 2  # 16 sequences of a rank, at most 8192 tokens at a time
    with pytest.raises(ValueError, match=r"are 8 sequences, which do not divide over 3 ranks; use 144"):
        choose_layout(from_dict(values), 3)


def test_ranks_that_cannot_share_the_batch_are_idle(
    values: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    folder = {"checkpoints": {"folder": str(tmp_path)}}
    assert resume_or_choose_layout(from_dict(values | folder), 6).grid.size == 4
    assert "only 4 of 6 ranks train: batch.tokens=" in capsys.readouterr().err


def layout_of(run: RunConfig) -> dict[str, Any]:
    layout: dict[str, Any] = run_metadata(Trainer(run, Grid.create((1, 1, 1, 1))))["layout"]
    return layout


def test_a_report_has_the_chosen_layout(pool: RankPool, values: dict[str, Any]) -> None:
    layout = Layout(1, 1, 1, 1, 4, "full", keep_bytes=4096, weights="streamed")
    (found,) = pool.run(layout_of, 1, with_layout(on(values, (1, 1, 1, 1)), layout))
    assert Layout(**found) == layout


def rejection_of(run: RunConfig) -> str:
    try:
        resolve_layout(run)
    except ValueError as refusal:
        return str(refusal)
    return "nothing"


def test_a_given_grid_leaves_no_rank_idle(pool: RankPool, values: dict[str, Any]) -> None:
    """Idle ranks are allowed with a planned layout; a given grid that is too small is an error."""
    run = on(values, (1, 1, 1, 1))
    run = run.model_copy(update={"grid": run.grid.model_copy(update={"cluster": "dgx-h100"})})
    with pytest.raises(RankError, match="needs 1 ranks, but 2 are running"):
        pool.run(train, 2, run)


def test_an_error_of_the_planner_reaches_all_ranks(
    pool: RankPool, values: dict[str, Any], tmp_path: Path
) -> None:
    """Also one that is not a ValueError, since the other ranks wait for rank 0: the cluster file is a folder."""
    (tmp_path / "cluster.toml").mkdir()
    run = from_dict(values | {"grid": {"cluster": str(tmp_path / "cluster.toml")}})
    first, other = pool.run(rejection_of, 2, run)
    assert first == other
    assert "Is a directory" in first


def test_init_writes_a_valid_run_config(values: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    file, data = tmp_path / "run.toml", values["data"]["sources"][0]["path"]
    assert main(["init", str(file), "--size", "10m", "--data", data]) == 0
    assert main(["config", str(file), "--set", "optimizer.lr=0.5"]) == 0
    shown = json.loads(capsys.readouterr().out.split("\n", 1)[1])
    assert (
        not CHOSEN_ALONG & load_run(file).engine.model_fields_set
    )  # or they could not be chosen with the grid
    assert shown["optimizer"]["lr"] == 0.5
    assert json.loads((tmp_path / "run" / "config.json").read_text())["vocab_size"] == 131
    run = load_run(file)
    assert run.grid.auto
    assert run.checkpoints.folder == str(tmp_path / "run" / "checkpoints")
    assert main(["init", str(file), "--data", data]) == 2  # never overwritten
    assert main(["init", str(tmp_path / "other.toml"), "--size", "7b", "--data", data]) == 2
    assert main(["init", str(tmp_path / "other.toml"), "--data", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    for words in ("exists already", "no size '7b'; use one of 1m", "is not a prepared data set"):
        assert words in said


def test_init_takes_a_pretrained_model_or_an_architecture(
    values: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    data, model = values["data"]["sources"][0]["path"], values["model"]["pretrained"]
    file = tmp_path / "tune.toml"
    assert main(["init", str(file), "--pretrained", model, "--data", data]) == 0
    said = capsys.readouterr()
    assert "warning: the tokenizer" in said.err
    run = load_run(file)
    assert (run.model.pretrained, run.model.config) == (Path(model), None)
    positions = json.loads((Path(model) / "config.json").read_text())["max_position_embeddings"]
    assert run.data.sequence_length == min(positions, 4096)
    assert (run.optimizer.lr, run.optimizer.weight_decay, run.schedule.steps) == (2e-5, 0.0, 2)
    assert "which change the weights little" in said.err
    often = tmp_path / "often.toml"
    assert main(["init", str(often), "--pretrained", model, "--data", data, "--epochs", "50"]) == 0
    assert load_run(often).schedule.steps >= 100
    assert main(["init", str(tmp_path / "x.toml"), "--data", data, "--epochs", "2"]) == 2
    capsys.readouterr()
    file = tmp_path / "new.toml"
    assert main(["init", str(file), "--config", model, "--data", data]) == 0
    run = load_run(file)
    assert (run.model.pretrained, run.model.config) == (None, Path(model))
    assert run.optimizer.lr == SIZES["1m"].lr
    assert run.data.sequence_length == min(positions, SIZES["1m"].length)


@pytest.mark.parametrize("option", ["--pretrained", "--config"])
def test_init_rejects_a_model_that_cannot_be_trained(
    option: str, values: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    data, config = (
        values["data"]["sources"][0]["path"],
        json.loads((Path(values["model"]["pretrained"]) / "config.json").read_text()),
    )
    bare, small = tmp_path / "bare", tmp_path / "small"
    for folder, changes in ((bare, {}), (small, {"vocab_size": 100})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | changes))
    run = tmp_path / "run.toml"
    assert main(["init", str(run), option, str(tmp_path / "nowhere"), "--data", data]) == 2
    assert "there is no config.json at" in capsys.readouterr().err
    assert main(["init", str(run), option, str(small), "--data", data]) == 2
    assert "has a vocabulary of 100 tokens, the data of 131" in capsys.readouterr().err
    assert main(["init", str(run), option, str(bare), "--data", data]) == (
        2 if option == "--pretrained" else 0
    )
    assert ("no safetensors" in capsys.readouterr().err) == (option == "--pretrained")


@pytest.mark.nightly
def test_the_command_starts_ranks_stops_on_a_signal_and_resumes(tmp_path: Path) -> None:
    """SIGTERM reaches the ranks through torchrun's launcher; the next command resumes from their checkpoint."""
    values = write_run(tmp_path)
    values["schedule"]["steps"] = 100_000
    file = tmp_path / "run.toml"
    file.write_text(to_toml(values))
    command = [sys.executable, "-m", "fourfold", "train", str(file), "--set", "grid.x=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "logs" / "metrics.jsonl"
    try:
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert "stopped and saved" in said, said
    assert process.returncode == CONTINUE
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    folders = sorted(int(p.name.split("-")[1]) for p in (tmp_path / "checkpoints").iterdir())
    assert folders[-1] == steps[-1]
    more = ["--set", f"schedule.steps={steps[-1] + 2}"]
    result = subprocess.run(
        [*command[:-2], *more], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    again = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert again == list(range(1, steps[-1] + 3))
