"""The agent: ranks save when it is interrupted, and restart when one dies."""

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
    """A terminal sends it to all processes at once; torchrun alone would kill the ranks half a minute later."""
    command = [sys.executable, "-m", "fourfold.launch.agent", "--standalone", "--nproc-per-node=1"]
    command += [slurm_rank.__file__, str(tmp_path)]
    with subprocess.Popen(command, start_new_session=True) as agent:
        wait_until((tmp_path / "listening").exists, "rank", 60)
        os.killpg(agent.pid, signal.SIGINT)
        assert agent.wait(60) == CONTINUE
    # From the terminal, and from the agent, which does not know whether the terminal has sent it to the ranks.
    assert json.loads((tmp_path / "saved.json").read_text())[0] in ("SIGINT", "SIGUSR1")


@pytest.mark.parametrize("heard_by", ["young", "listening"])
def test_a_warning_of_the_agent_alone_reaches_the_ranks(tmp_path: Path, heard_by: str) -> None:
    """Slurm sends it only to the processes that it started, where it tracks them by cgroups; a rank may still be importing."""
    command = [sys.executable, "-m", "fourfold.launch.agent", "--standalone", "--nproc-per-node=1"]
    command += [slurm_rank.__file__, str(tmp_path)]
    with subprocess.Popen(command, start_new_session=True) as agent:
        wait_until((tmp_path / heard_by).exists, "rank", 60)
        os.kill(agent.pid, signal.SIGUSR1)
        assert agent.wait(60) == CONTINUE
    assert json.loads((tmp_path / "saved.json").read_text())[0] == "SIGUSR1"


def agents(folder: Path, module: str, options: Sequence[str], hosts: int = 2) -> list[int]:
    """The exit codes of the agents of N emulated hosts with one rank each."""
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
def test_ranks_of_two_hosts_restart_at_the_first_try(tmp_path: Path, module: str) -> None:
    """Also under torchrun alone, whose store has the addresses of dead ranks."""
    assert agents(tmp_path, module, ["--max-restarts=1", restart_rank.__file__]) == [0, 0]
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == dict.fromkeys(
        ("0-0", "0-1", "1-0", "1-1"), "2"
    )


def test_a_rank_that_ignores_sigterm_does_not_delay_a_restart(tmp_path: Path) -> None:
    """One rank fails, the other ignores SIGTERM; torchrun alone would restart half a minute later."""
    first = f"test $LOCAL_RANK = 1 && {{ trap '' TERM; touch {tmp_path}/ignoring; sleep 60; }}"
    first += f"; while ! test -e {tmp_path}/ignoring; do sleep 0.1; done; date +%s > {tmp_path}/ended; exit 1"
    again = f"date +%s > {tmp_path}/again-$LOCAL_RANK"
    script = f"if test $TORCHELASTIC_RESTART_COUNT = 0; then {first}; else {again}; fi"
    command = [sys.executable, "-m", "fourfold.launch.agent", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run([*command, "--max-restarts=1", "--no-python", "sh", "-c", script], timeout=90)
    assert ended.returncode == 0
    ended_s, again_s = (int((tmp_path / name).read_text()) for name in ("ended", "again-1"))
    assert again_s - ended_s < 20


def test_a_run_with_an_error_of_the_user_is_not_restarted(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "fourfold.launch.agent",
        "--standalone",
        "--max-restarts=3",
        "--no-python",
    ]
    ended = subprocess.run([*command, "sh", "-c", f"echo x >> {tmp_path}/starts; exit 2"], timeout=60)
    assert ended.returncode == 2
    assert (tmp_path / "starts").read_text() == "x\n"


def test_ranks_are_told_to_stop_when_their_agent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import pathlib, signal, sys, time\n"
        "from fourfold.processes import stop_with_agent\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(pathlib.Path(sys.argv[1], 'stopped').touch()))\n"
        "stop_with_agent()\n"
        "pathlib.Path(sys.argv[1], 'listening').touch()\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-m", "fourfold.launch.agent", "--standalone", "--nproc-per-node=1"]
    with subprocess.Popen([*command, str(script), str(tmp_path)]) as agent:
        wait_until((tmp_path / "listening").exists, "rank", 60)
        agent.kill()
    wait_until((tmp_path / "stopped").exists, "SIGTERM", 20)
