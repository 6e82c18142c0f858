"""The agent between a terminal or a batch system and the ranks: an interrupt lets them save, however long that takes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from fourfold.launch import CONTINUE
from tests import slurm_rank
from tests.slurm import wait_until


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
