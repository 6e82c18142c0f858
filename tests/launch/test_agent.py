"""The agent between a terminal or a batch system and the ranks: they save when it is interrupted, and come back when one dies."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.local_slurm import wait_until
from fourfold.processes import CONTINUE
from tests import restart_rank, slurm_rank

pytestmark = pytest.mark.nightly


def test_an_interrupt_lets_the_ranks_save(tmp_path: Path) -> None:
    """A terminal sends it to all of them at once; torchrun by itself would kill the ranks half a minute later."""
    command = [sys.executable, "-m", "fourfold.launch.agent", "--standalone", "--nproc-per-node=1"]
    command += [slurm_rank.__file__, str(tmp_path)]
    with subprocess.Popen(command, start_new_session=True) as agent:
        wait_until((tmp_path / "listening").exists, "rank", 60)
        os.killpg(agent.pid, signal.SIGINT)
        assert agent.wait(60) == CONTINUE
    # From the terminal, and from the agent, which does not know whether the terminal has sent it to the ranks.
    assert json.loads((tmp_path / "saved.json").read_text())[0] in ("SIGINT", "SIGUSR1")


def agents(folder: Path, module: str, options: Sequence[str], hosts: int = 2) -> list[int]:
    """What the agents of so many hosts end with, each with one rank; all on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        module,
        f"--nnodes={hosts}",
        "--nproc-per-node=1",
        f"--master-port={port}",
    ]
    command += ["--master-addr=127.0.0.1"]
    started = [
        subprocess.Popen([*command, f"--node-rank={host}", *options, str(folder)]) for host in range(hosts)
    ]
    return [agent.wait(90) for agent in started]


@pytest.mark.parametrize("module", ["fourfold.launch.agent", "torch.distributed.run"])
def test_ranks_of_two_hosts_meet_again_at_the_first_try(tmp_path: Path, module: str) -> None:
    """Also under torchrun itself, whose ranks find the addresses of the dead in its store."""
    assert agents(tmp_path, module, ["--max-restarts=1", restart_rank.__file__]) == [0, 0]
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == dict.fromkeys(
        ("0-0", "0-1", "1-0", "1-1"), "2"
    )


def test_ranks_that_do_not_hear_are_not_waited_for_when_one_is_gone(tmp_path: Path) -> None:
    """One ends with an error, the other is deaf to SIGTERM; torchrun by itself would begin again half a minute later."""
    first = f"test $LOCAL_RANK = 1 && {{ trap '' TERM; touch {tmp_path}/deaf; sleep 60; }}"
    first += f"; while ! test -e {tmp_path}/deaf; do sleep 0.1; done; date +%s > {tmp_path}/ended; exit 1"
    again = f"date +%s > {tmp_path}/again-$LOCAL_RANK"
    script = f"if test $TORCHELASTIC_RESTART_COUNT = 0; then {first}; else {again}; fi"
    command = [sys.executable, "-m", "fourfold.launch.agent", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run([*command, "--max-restarts=1", "--no-python", "sh", "-c", script], timeout=90)
    assert ended.returncode == 0
    ended_s, again_s = (int((tmp_path / name).read_text()) for name in ("ended", "again-1"))
    assert again_s - ended_s < 20


def test_a_run_that_is_refused_is_not_started_again(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "fourfold.launch.agent",
        "--standalone",
        "--max-restarts=3",
        "--no-python",
    ]
    ended = subprocess.run([*command, "sh", "-c", f"echo x >> {tmp_path}/starts; exit 2"], timeout=60)
    assert ended.returncode == 1
    assert (tmp_path / "starts").read_text() == "x\n"


def test_of_those_that_import_it_the_server_of_ranks_alone_is_deaf() -> None:
    """A process that cannot hear SIGTERM starts others that cannot: a rank that is asked to save would go on for ever."""
    script = """if True:
        import pathlib, signal, time
        from multiprocessing import forkserver
        import fourfold.launch.block_sigterm
        from fourfold.launch import forkserver as warm
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
        warm.start_server()
        status = pathlib.Path(f"/proc/{forkserver._forkserver._forkserver_pid}/status")
        while not int(status.read_text().split("SigBlk:")[1].split()[0], 16) >> signal.SIGTERM - 1 & 1:
            time.sleep(0.1)
    """
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0
