"""Runs with injected faults end as the undisturbed run, and a drill detects a run that does not."""

import argparse
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from benchmarks.ranks import RankError, RankPool
from benchmarks.run_toml import to_toml
from fourfold.checkpoint import Checkpoints
from fourfold.cli import drill as command
from fourfold.cli.main import main
from fourfold.config.run_file import load_run
from fourfold.config.schema import RunConfig
from fourfold.drill import drill
from fourfold.drill.fault import Action, Fault
from fourfold.drill.injector import Injector
from fourfold.drill.scenario import EXPECTED, STEPS, check_fault, last_step, scenario_for, scenarios
from fourfold.mesh.grid import Grid
from fourfold.train.callbacks import callbacks_of
from fourfold.train.loop.trainer import Trainer
from fourfold.train.observe.console import ConsoleLogger
from fourfold.train.observe.report import RunReport
from fourfold.train.recovery.stop import StopRequest
from fourfold.train.resilience.hang import LostRanks
from tests.training import write_run

# -- faults as text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("burn:at=step", "'burn' is not a fault"),
        ("kill:at=lunch", "at=lunch is not a point"),
        ("nan:at=write", "nan cannot happen at=write; use at=gradients"),
        ("kill:at=step,rank=first", "rank=first"),
        ("kill:at=step,day=3", "'day=3'"),
        ("kill:at=step,nth=0", "nth"),
    ],
)
def test_an_invalid_fault_is_rejected(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Fault.parse(text)


# -- a drill -----------------------------------------------------------------------------------------------------------


def run_ranks(run: RunConfig, faults: Sequence[Fault]) -> None:
    shape = (run.grid.data, run.grid.z, run.grid.y, run.grid.x)
    callbacks = [c for c in callbacks_of(run) if not isinstance(c, ConsoleLogger | RunReport)]
    trainer = Trainer(
        run, Grid.create(shape), [Injector(faults, record=run.logging.folder / drill.NOTES), *callbacks]
    )
    request = StopRequest()
    with Checkpoints(run.checkpoints.folder, keep_last=run.checkpoints.keep_last) as checkpoints:
        try:
            trainer.train(checkpoints, request)
        except LostRanks:
            os._exit(1)  # as a run does: a save in progress would wait for the lost ranks
    request.close()


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    file = folder / "run.toml"
    file.write_text(to_toml(write_run(folder)))
    return file


def launch_on(pool: RankPool, file: Path, shape: Sequence[int]) -> drill.Launch:
    """As the command does, but on the ranks of a pool."""

    def launch(changes: Sequence[str], faults: Sequence[Fault]) -> int:
        grid = [f"grid.{axis}={size}" for axis, size in zip(("data", "z", "y", "x"), shape, strict=True)]
        run = load_run(file, [*grid, *changes])
        try:
            pool.run(run_ranks, run.grid.size, run, faults)
        except RankError as error:
            (Path(run.logging.folder) / "error.txt").write_text(str(error))
            return 1
        return 0

    return launch


def options(folder: Path, **given: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"folder": folder, "seed": 3, "set": [], "file": None, "timeout_s": 5.0} | given
    )


# One of each kind; `benchmarks.faults` has all of them.
SOME = (
    "a rank is killed while it writes its weights",
    "a file of the newest checkpoint is damaged",
    "a gradient is NaN",
    "a bit of a replica's weights is flipped",
    "a rank is slow",
    "a rank is stopped",
)


@pytest.mark.nightly
def test_all_scenarios_of_a_drill_succeed(pool: RankPool, run_file: Path, tmp_path: Path) -> None:
    wanted = [s for s in scenarios(2, 2, 3, 5.0) if s.name in SOME]
    assert len(wanted) == len(SOME)
    # Only rank 0 writes metrics; both replicas skip a step when the other one detects the fault.
    given = ["spike:at=gradients,rank=1,step=22", "nan:at=gradients,rank=1,step=3"]
    wanted += [scenario_for(Fault.parse(text), 5.0) for text in given]
    outcomes = list(drill.drill(tmp_path, wanted, launch_on(pool, run_file, (2, 1, 1, 1)), seed=3))
    assert [outcome for outcome in outcomes if outcome.wrong] == []
    assert [outcome.name for outcome in outcomes] == ["nothing is disturbed", *SOME, *given]
    assert "SIGKILL" in (tmp_path / "01/logs/error.txt").read_text()


def test_a_drill_detects_a_run_that_does_not_resume_exactly(
    pool: RankPool, run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    correct = launch_on(pool, run_file, (1, 2, 1, 1))

    def forgetful(changes: Sequence[str], faults: Sequence[Fault]) -> int:
        """Restarts from scratch with another learning rate, and never reports a failure."""
        if not faults and "undisturbed" not in changes[0]:
            shutil.rmtree(changes[0].partition("=")[2])
            return correct([*changes, "optimizer.lr=1e-3"], faults)
        correct(changes, faults)
        return 0

    fault = Fault.parse("kill:at=optimizer,rank=1,step=3")
    status = command.drill(
        options(tmp_path / "drill"), load_run(run_file, ["grid.z=2"]), 2, [fault], forgetful
    )
    said = capsys.readouterr().out
    assert status == 1
    assert "as if nothing had happened" in said
    assert "rank-1.safetensors is not that of the undisturbed run" in said


@pytest.mark.nightly
def test_a_given_fault_is_checked_by_its_action(
    tmp_path: Path, run_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a user types it, on ranks of its own; the user's trackers receive nothing."""
    asked = [
        "wandb_project=theirs",
        f"mlflow_uri={tmp_path / 'mlflow'}",
        "prometheus_port=1",
        "profile_steps=2:3",
    ]
    changes = [f"--set=logging.{change}" for change in asked]
    fault = "nan:at=gradients,step=3"
    status = main(["drill", str(run_file), f"--folder={tmp_path / 'drill'}", *changes, f"--fault={fault}"])
    said = capfd.readouterr().out
    assert status == 0, said + (tmp_path / "drill/ranks-01.log").read_text()[-2000:]
    assert said.count("right") == 2
    assert (tmp_path / "drill/01/logs/faults" / fault).exists()
    assert not list(tmp_path.glob("drill/*/logs/traces"))
    assert not (tmp_path / "mlflow").exists()


def test_every_action_has_an_expected_outcome() -> None:
    assert set(EXPECTED) == set(get_args(Action))
    for scenario in scenarios(4, 2, 0, 7.0):
        if scenario.fault is not None:
            check_fault(scenario.fault, 4, 2)
            assert scenario == scenario_for(scenario.fault, 7.0, scenario.name)
    assert scenario_for(Fault("stop", "forward"), 7.0).changes == ("reliability.timeout_s=7",)
    assert {a for a, expected in EXPECTED.items() if not expected.exact} == {"nan", "spike"}
    assert last_step(Fault("spike", "gradients", step=30)) > 30 > last_step(Fault("kill", "step")) == STEPS


@pytest.mark.parametrize(
    ("text", "ranks", "replicas", "said"),
    [
        ("kill:rank=7", 2, 2, "rank 7, and the run has 2 ranks"),
        ("kill:step=9", 2, 2, "in step 9, and a drill has 8"),
        ("stop:at=forward,step=3", 1, 1, "needs 2 ranks"),
        ("kill:at=collective,step=3", 1, 1, "needs 2 ranks"),
        ("flip:at=step,step=3", 4, 1, "use grid.data=2"),
        ("flip:at=step,step=2", 4, 2, "use step=3 or more"),
        ("spike:at=gradients,step=20", 2, 1, "known after 20 good steps; use step=21"),
    ],
)
def test_a_fault_that_could_not_be_detected_is_rejected(
    text: str, ranks: int, replicas: int, said: str, run_file: Path, tmp_path: Path
) -> None:
    config = load_run(run_file, [f"grid.data={replicas}"])
    with pytest.raises(ValueError, match=said):
        command.drill(options(tmp_path / "d"), config, ranks, [Fault.parse(text)], lambda c, f: 0)


def test_a_fault_that_never_happened_is_a_failure(
    pool: RankPool, run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = Fault.parse("nan:at=gradients,step=4,nth=2")
    launch = launch_on(pool, run_file, (1, 1, 1, 1))
    assert command.drill(options(tmp_path / "drill"), load_run(run_file), 1, [fault], launch) == 1
    assert "it never happened" in capsys.readouterr().out


def test_a_drill_empties_only_the_folder_of_a_drill(run_file: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "checkpoints/step-100/rank-0.safetensors"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("weeks of work")
    with pytest.raises(ValueError, match=f"{tmp_path} is not empty.*give another --folder"):
        command.drill(options(tmp_path), load_run(run_file), 1, [], lambda c, f: 1)
    assert theirs.read_text() == "weeks of work"

    drill.clear(tmp_path / "new")
    (tmp_path / "new/01/logs").mkdir(parents=True)
    (tmp_path / "new/ranks-01.log").write_text("of the drill before")
    (tmp_path / "new/02").symlink_to(theirs.parent)
    drill.clear(tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == [drill.MARKER]
    assert theirs.exists()
    drill.clear(tmp_path / "new")  # also if the earlier drill left nothing


# -- on a cluster ------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_run_on_a_cluster_is_compared_by_its_checkpoints(
    pool: RankPool, run_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`fourfold drill` as a rank, then `--compare`."""
    words = ["drill", str(run_file), "--folder", str(tmp_path), "--set=logging.wandb_project=theirs"]
    kill = "--fault=kill:at=optimizer,step=5"
    assert pool.run(as_rank, 1, words) == [0]
    assert main([*words, "--compare"]) == 1
    assert "no fault has happened" in capfd.readouterr().out
    with pytest.raises(RankError, match="SIGKILL"):
        pool.run(as_rank, 1, [*words, kill])
    assert pool.run(as_rank, 1, [*words, "--fault=kill:at=optimizer,step=6"]) == [
        2
    ]  # it would resume from step 4
    assert pool.run(as_rank, 1, [*words, kill]) == [0]  # it happens once
    assert pool.run(as_rank, 1, [*words, kill]) == [2]  # there is nothing left to disturb
    assert pool.run(as_rank, 1, words) == [2]
    assert pool.run(as_rank, 1, [*words, kill, "--compare"]) == [0]  # also inside a job step
    assert main([*words, "--compare", "--fault=kill:at=optimizer,step=6"]) == 1
    assert "step=6 has not happened" in capfd.readouterr().out
    drill.flip_bit(tmp_path / "disturbed/checkpoints/step-8/rank-0.safetensors", random.Random(0))
    assert main([*words, "--compare"]) == 1
    assert "no valid checkpoint of step 8" in capfd.readouterr().out


def test_a_run_restarted_by_a_launcher_resumes(pool: RankPool, run_file: Path, tmp_path: Path) -> None:
    """Also if all of its steps are done, or if another rank's record of the fault is not visible yet."""
    words = ["drill", str(run_file), "--folder", str(tmp_path), "--fault=nan:at=gradients,step=3"]
    assert pool.run(as_rank, 1, [*words, "--fault=kill:at=step,rank=1"]) == [2]  # there is no rank 1
    assert pool.run(as_rank, 1, words) == [0]
    assert pool.run(as_rank, 1, words, 1) == [0]
    assert main([*words, "--compare"]) == 0  # weights are not compared after a skipped step


def as_rank(words: list[str], restarts: int = 0) -> int:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
    try:
        return main(words)
    finally:
        del os.environ["TORCHELASTIC_RESTART_COUNT"]
