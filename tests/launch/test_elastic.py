"""Elastic runs: agents hold a new rendezvous when hosts join or leave, and the run gets a layout for the new ranks."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.local_slurm import wait_until
from benchmarks.ranks import RankPool
from fourfold.config.run_file import from_dict
from fourfold.config.schema import RunConfig
from fourfold.mesh.rendezvous import keep_ranks
from fourfold.planner.inputs.cluster import preset, to_toml
from fourfold.train.auto_layout import layout_of_checkpoint, resume_or_choose_layout
from fourfold.train.run import tell_idle, wait_idle
from tests import elastic_rank
from tests.training import write_run


@pytest.mark.nightly
def test_a_host_is_lost_and_returns(tmp_path: Path) -> None:
    """One rank on each of two hosts; a rank that stops because hosts join is restarted, and is not a failure."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def start(host: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "fourfold.launch.agent", "--nnodes=1:2", "--nproc-per-node=1"]
        command += [
            "--max-restarts=1",
            "--rdzv-backend=c10d",
            "--rdzv-id=run",
            f"--rdzv-endpoint=127.0.0.1:{port}",
        ]
        conf = f"is_host={int(host == 0)},last_call_timeout=10,keep_alive_interval=1"
        command += ["--local-addr=127.0.0.1", f"--rdzv-conf={conf}", elastic_rank.__file__, str(tmp_path)]
        return subprocess.Popen(command, start_new_session=True)

    def worlds() -> str:
        return (tmp_path / "0.txt").read_text().strip() if (tmp_path / "0.txt").exists() else ""

    agents = [start(0), start(1)]
    try:
        # The second host may join after the first has started alone.
        wait_until(lambda: worlds().endswith("2"), "two hosts", 60)
        before = worlds()
        ranks = subprocess.run(["pgrep", "-P", str(agents[1].pid)], capture_output=True, text=True).stdout
        agents[1].kill()
        for rank in ranks.split():
            subprocess.run(["kill", "-9", rank])
        wait_until(lambda: worlds() == f"{before} 1", "host that continues alone", 60)
        agents.append(start(1))
        wait_until(lambda: worlds() == f"{before} 1 2", "two hosts again", 60)
        (tmp_path / "end").touch()
        assert [agents[0].wait(60), agents[2].wait(60)] == [0, 0]
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGKILL)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("run")
    (folder / "cluster.toml").write_text(to_toml(preset("dgx-h100")))
    values: dict[str, Any] = write_run(folder)
    return from_dict(values | {"grid": {"cluster": str(folder / "cluster.toml")}})


def test_ranks_that_no_layout_can_use_are_left_out(run: RunConfig) -> None:
    """8 sequences and 4 heads: 7, 6 and 5 divide nothing."""
    assert resume_or_choose_layout(run, 7).grid.size == 4
    with pytest.raises(ValueError, match="no layout of 8192 ranks"):
        resume_or_choose_layout(run, 8192)


def save_values(run: RunConfig) -> None:
    folder = Path(run.checkpoints.folder) / "step-7"
    folder.mkdir(parents=True, exist_ok=True)
    grid = [run.grid.data, run.grid.z, run.grid.y, run.grid.x]
    values = {
        "step": 7,
        "seed": 0,
        "data": {},
        "versions": {},
        "schedule": None,
        "saved_at": "",
        "optimizer": [],
    }
    config = run.model_dump(mode="json")
    (folder / "state.json").write_text(json.dumps({**values, "grid": grid, "config": config}))
    (folder / "manifest.json").touch()


def test_the_same_number_of_ranks_keeps_its_layout(run: RunConfig) -> None:
    """The layout of the checkpoint, not the planner's first choice."""
    best = resume_or_choose_layout(run, 4)
    other = best.model_copy(update={"grid": best.grid.model_copy(update={"data": 1, "z": 1, "y": 2, "x": 2})})
    save_values(other)
    kept = resume_or_choose_layout(run, 4)
    assert (kept.grid, kept.batch, kept.engine) == (other.grid, other.batch, other.engine)
    assert layout_of_checkpoint(run, 8) is None
    masked = run.model_copy(update={"engine": run.engine.model_copy(update={"attention": "masked"})})
    assert layout_of_checkpoint(masked, 4) is None  # its masks need memory: another layout may be the best
    asked = {
        "activations": "replicated" if kept.engine.activations == "sequence-parallel" else "sequence-parallel"
    }
    otherwise = run.model_copy(update={"engine": run.engine.model_copy(update=asked)})
    assert layout_of_checkpoint(otherwise, 4) is None
    # With one tensor rank there is nothing to shard: both settings give the same layout.
    save_values(
        best.model_copy(update={"grid": best.grid.model_copy(update={"data": 4, "z": 1, "y": 1, "x": 1})})
    )
    for activations in ("replicated", "sequence-parallel"):
        asking = run.engine.model_copy(update={"activations": activations})
        assert layout_of_checkpoint(run.model_copy(update={"engine": asking}), 4) is not None
    longer = run.model_copy(update={"batch": run.batch.model_copy(update={"tokens": 2 * run.batch.tokens})})
    assert layout_of_checkpoint(longer, 4) is None


def shrink() -> float:
    rank = dist.get_rank()
    store, is_used = keep_ranks(2)
    if not is_used:
        return float(wait_idle(store, rank, 2))
    met = torch.ones(())
    dist.all_reduce(met)
    dist.barrier()
    if rank == 0:
        tell_idle(store, True)
    return float(met)


def test_idle_ranks_end_with_the_run(pool: RankPool) -> None:
    assert pool.run(shrink, 3) == [2.0, 2.0, 1.0]
