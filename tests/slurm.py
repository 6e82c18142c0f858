"""A real Slurm of two nodes on this machine: a controller, two node daemons and munge, all in a folder of their own."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel")
NODES = ("n0", "n1")


def why_not() -> str | None:
    """What this machine lacks for a Slurm of its own."""
    missing = [name for name in NEEDED if not find(name)]
    if missing:
        return f"{', '.join(missing)} not found (Debian: slurmctld, slurmd, slurm-client, munge)"
    return None if os.geteuid() == 0 else "the daemons of Slurm need root"


def find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


@contextmanager
def slurm(folder: Path) -> Iterator[None]:
    """While it lasts, sbatch and its kind talk to this cluster."""
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    config = folder / "slurm.conf"
    config.write_text(_config(folder))
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(config)
    daemons: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str) -> None:
        path = find(name)
        assert path
        with open(folder / f"{name}.out", "ab") as out:
            daemons.append(subprocess.Popen([path, *arguments], stdout=out, stderr=out))

    try:
        socket_file = folder / "munge.socket"
        places = {"key": key, "pid": folder / "munge.pid", "seed": folder / "munge.seed"}
        start(
            "munged",
            "--foreground",
            "--force",
            f"--socket={socket_file}",
            *(f"--{name}-file={place}" for name, place in places.items()),
        )
        wait_until(socket_file.exists, "munge", 10)
        start("slurmctld", "-D")
        for node in NODES:
            start("slurmd", "-D", "-N", node)
        wait_until(lambda: ask("sinfo", "-h", "-o", "%T %D") == f"idle {len(NODES)}", "two idle nodes", 20)
        yield
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
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
        "SelectType": "select/linear",
        "SchedulerParameters": "sched_interval=1,bf_interval=1",
        "MpiDefault": "none",
        "KillWait": 20,
    }
    return "\n".join(
        [
            *(f"{name}={value}" for name, value in settings.items()),
            *(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
                for node, port in zip(NODES, ports[1:], strict=True)
            ),
            f"PartitionName=main Nodes={','.join(NODES)} Default=YES",
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
    """What a command says, or nothing while it fails."""
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def state(job: str) -> str:
    """Such as RUNNING or COMPLETED."""
    for field in ask("scontrol", "--oneliner", "show", "job", job).split():
        if field.startswith("JobState="):
            return field.partition("=")[2]
    return "UNKNOWN"


def wait_until(holds: Callable[[], object], what: str, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, f"no {what} within {limit_s:g} s"
        time.sleep(0.1)
