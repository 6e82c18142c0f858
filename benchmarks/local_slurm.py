"""A real Slurm of two nodes on this machine: a controller, two node daemons and munge, in a separate folder.

A node has four GPUs that no device stands behind: jobs can ask for them, and their ranks run on the CPU.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel")
NODES = ("n0", "n1")
GPUS_PER_NODE = 4
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


def why_not() -> str | None:
    """Why this machine cannot run Slurm; None if it can."""
    missing = [name for name in NEEDED if not find(name)]
    if missing:
        return f"{', '.join(missing)} not found (Debian: slurmctld, slurmd, slurm-client, munge)"
    return None if os.geteuid() == 0 else "the daemons of Slurm need root"


def find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


class Daemons:
    """The processes of the cluster."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: str, called: str | None = None) -> None:
        path = find(name)
        assert path
        with open(self._folder / f"{called or name}.out", "ab") as out:
            self._running[called or name] = subprocess.Popen([path, *arguments], stdout=out, stderr=out)

    def start_node(self, node: str) -> None:
        self.start("slurmd", "-D", "-N", node, called=node)

    def lose_node(self, node: str) -> None:
        """As after a power failure: kill its daemon and all of its processes, without any notification."""
        daemon = self._running.pop(node)
        daemon.kill()
        daemon.wait()
        ours = {
            pid: parent for pid, parent, variables in _processes() if f"SLURMD_NODENAME={node}" in variables
        }
        steps = {parent for parent in ours.values() if _program(parent) == "slurmstepd"}
        for pid in (*steps, *ours):  # first those that would report it
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        daemons = list(self._running.values())
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        # A controller that cannot save its state retries for long; the state is not needed.
        deadline_s = time.monotonic() + 5
        for daemon in daemons:
            try:
                daemon.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _processes() -> Iterator[tuple[int, int, set[str]]]:
    """(pid, parent, environment) of all processes on this machine."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            yield int(folder.name), parent, set(variables)


def _program(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/exe").resolve().name
    return ""


@contextmanager
def slurm(folder: Path) -> Iterator[Daemons]:
    """Run the cluster; inside the context, Slurm's commands use it."""
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    config = folder / "slurm.conf"
    config.write_text(_config(folder))
    for number in range(GPUS_PER_NODE):
        (folder / f"gpu{number}").touch()  # Slurm wants a device's file
    (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={folder}/gpu[0-{GPUS_PER_NODE - 1}]\n")
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(config)
    daemons = Daemons(folder)
    try:
        socket_file = folder / "munge.socket"
        paths = {"key": key, "pid": folder / "munge.pid", "seed": folder / "munge.seed"}
        daemons.start(
            "munged",
            "--foreground",
            "--force",
            f"--socket={socket_file}",
            *(f"--{name}-file={path}" for name, path in paths.items()),
        )
        wait_until(socket_file.exists, "munge", 10)
        daemons.start("slurmctld", "-D")
        for node in NODES:
            daemons.start_node(node)
        wait_until(lambda: ask("sinfo", "-h", "-o", "%T %D") == f"idle {len(NODES)}", "two idle nodes", 20)
        yield daemons
    finally:
        daemons.end()
        if before is None:
            del os.environ["SLURM_CONF"]
        else:
            os.environ["SLURM_CONF"] = before


def _config(folder: Path) -> str:
    host = socket.gethostname()
    ports = _free_ports(1 + len(NODES))
    settings = {
        "ClusterName": "fourfold",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": ports[0],
        "SlurmUser": "root",
        "AuthInfo": f"socket={folder}/munge.socket",
        "StateSaveLocation": f"{folder}/state",
        "SlurmdSpoolDir": f"{folder}/spool-%n",
        "SlurmctldPidFile": f"{folder}/slurmctld.pid",
        "SlurmdPidFile": f"{folder}/slurmd-%n.pid",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU",
        "GresTypes": "gpu",
        "SchedulerParameters": "sched_interval=1,bf_interval=1",
        "MpiDefault": "none",
        "KillWait": 20,
        # A lost node is noticed soon, and accepted again when it responds.
        "SlurmdTimeout": 10,
        "ReturnToService": 2,
        # A job of the partition "urgent" preempts others, which have a minute to save.
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
    }
    return "\n".join(
        [
            *(f"{name}={value}" for name, value in settings.items()),
            *(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
                f"CPUs={os.cpu_count()} Gres=gpu:{GPUS_PER_NODE}"
                for node, port in zip(NODES, ports[1:], strict=True)
            ),
            f"PartitionName=main Nodes={','.join(NODES)} Default=YES PriorityTier=1 GraceTime=60",
            f"PartitionName=urgent Nodes={','.join(NODES)} PriorityTier=10 PreemptMode=OFF",
            "",
        ]
    )


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def ask(*command: str) -> str:
    """The output of a command; empty while it fails."""
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def state(job: str) -> str:
    """The state of a job, such as RUNNING or COMPLETED."""
    for field in ask("scontrol", "--oneliner", "show", "job", job).split():
        if field.startswith("JobState="):
            return field.partition("=")[2]
    return "UNKNOWN"


def wait_until(holds: Callable[[], object], what: str, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, f"no {what} within {limit_s:g} s"
        time.sleep(0.1)
