"""What happens when ranks are joined by a real network of a known rate, on one machine?

Each host is a network namespace with an address of its own, joined to a switch (a bridge in one more namespace) by a
link whose rate the kernel limits both ways: what the host sends at its own end, what it receives at the switch's. A
real torchrun on each host meets the others over that network, and so does Gloo; ranks of one host talk over loopback,
which has no limit. The network of the machine itself is never touched. Needs root and iproute2.

    python -m benchmarks.cluster --hosts 4 --ranks-per-host 2 --mbit 400 -- script.py its arguments
    python -m benchmarks.cluster --hosts 2 --mbit 400 -- -m package.module its arguments

A benchmark takes `Cluster` instead.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import functools
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO

NEEDS = "needs root and iproute2 (Debian: apt-get install iproute2)"
NAMESPACES = Path("/run/netns")
MAX_HOSTS = 64
TIMED_OUT = 124  # the exit code of timeout(1)

# Headers take 0.7 % of a jumbo frame (and 4.4 % of one of 1500 bytes), so payloads move at the rate that is set.
MTU_BYTES = 9000
# The kernel hands TCP's data to a link in pieces of up to this size, whatever the rate: four frames, not 64 KB, since
# a message smaller than a piece passes at once. At 400 Mbit/s a piece lasts 0.7 ms.
PIECE_BYTES = 36_000
# What a link may send at once after a pause. HTB goes into debt for a piece larger than that, TBF would have to cut
# the piece up or hold a burst of its size. The time makes up for timers that fire late at high rates.
BURST_BYTES, BURST_S = 9_100, 1e-4
# Queue of a link. Beyond it packets are lost, and a loss can cost a retransmission timer of 200 ms.
QUEUE_BYTES = 4_000_000
UNLIMITED_MBIT = 1e6

WARM_UP_S, MEASURE_S = 0.1, 0.3
PROBE_PORT, MASTER_PORT = 29400, 29500
STOP_S = 3.0  # for agents to end after SIGTERM, before SIGKILL

_numbers = itertools.count()


@dataclass(frozen=True)
class Bandwidth:
    """Payload that one TCP connection moved, as the receiver counted it."""

    forth_mbit: float  # host 0 to host 1
    back_mbit: float
    within_mbit: float  # host 0 to itself

    @property
    def between_mbit(self) -> float:
        return (self.forth_mbit + self.back_mbit) / 2


@functools.cache
def why_not() -> str | None:
    """Why there can be no cluster here, or None; tries to build one, since a container's root may not be allowed to."""
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        return NEEDS
    try:
        with Cluster(hosts=2, mbit=100):
            return None
    except (OSError, RuntimeError) as error:
        return f"{NEEDS}, and the right to make network namespaces: {error}"


class Cluster:
    """Hosts joined by links of `mbit` Mbit/s each way (None: no limit), from `with` to its end."""

    def __init__(self, hosts: int, mbit: float | None) -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise ValueError(f"hosts={hosts} is not in 1..{MAX_HOSTS}")
        _check_rate(mbit)
        self.hosts = hosts
        self.mbit = mbit
        self.run_name = f"fourfold-{os.getpid()}-{_start_ticks(os.getpid())}-{next(_numbers)}"
        self._agents: list[subprocess.Popen[bytes]] = []
        self._ports = itertools.count(MASTER_PORT)
        self._handler: object = None

    def __enter__(self) -> Cluster:
        if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
            raise RuntimeError(NEEDS)
        remove_leftovers()
        with suppress(ValueError):  # only the main thread may handle signals
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                self._handler = signal.signal(signal.SIGTERM, _exit_on_signal)
        atexit.register(self.close)
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _build(self) -> None:
        switch = _switch(self.run_name)
        _call("ip", "netns", "add", switch)
        _call("ip", "-n", switch, "link", "add", "bridge", "mtu", str(MTU_BYTES), "type", "bridge")
        _call("ip", "-n", switch, "link", "set", "bridge", "up")
        for index in range(self.hosts):
            host, port = _host(self.run_name, index), f"port{index}"
            size = ["mtu", str(MTU_BYTES), "gso_max_size", str(PIECE_BYTES)]
            _call("ip", "netns", "add", host)
            _call(
                "ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host
            )
            _call("ip", "-n", switch, "link", "set", port, *size, "master", "bridge", "up")
            _call("ip", "-n", host, "link", "set", "eth0", *size, "up")
            _call("ip", "-n", host, "link", "set", "lo", "up")
            _call("ip", "-n", host, "address", "add", f"{self.address(index)}/24", "dev", "eth0")
            # Reno is in every kernel and held all rates; BBR, the default of some, lost packets. Without IPv6, eth0
            # has one address to choose. Where /proc/sys cannot be written, the defaults have to do.
            _call(
                *("ip", "netns", "exec", host, "sh", "-c"),
                "cd /proc/sys/net; echo reno > ipv4/tcp_congestion_control; echo 1 > ipv6/conf/eth0/disable_ipv6; :",
            )
        _limit(self.run_name, self.hosts, self.mbit)

    @staticmethod
    def address(index: int) -> str:
        return f"10.77.0.{index + 1}"

    def cut(self, host: int) -> None:
        """Take a host off the switch: what is sent to it or by it is lost, and nobody is told."""
        _call("ip", "-n", _switch(self.run_name), "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        _call("ip", "-n", _switch(self.run_name), "link", "set", f"port{host}", "up")

    def measure(self) -> Bandwidth:
        """Between hosts 0 and 1, one way after the other, and within host 0; takes about 1.5 s."""
        if self.hosts < 2:
            raise ValueError("there is nothing to measure between hosts: there is one")
        return Bandwidth(self._probe(0, 1), self._probe(1, 0), self._probe(0, 0))

    def _probe(self, source: int, target: int) -> float:
        return self._probe_to(source, target, self.address(target))

    def _probe_to(self, source: int, target: int, address: str) -> float:
        command = [sys.executable, "-E", "-S", str(Path(__file__).resolve()), "--probe"]
        receiver = ["ip", "netns", "exec", _host(self.run_name, target), *command, "receive"]
        sender = ["ip", "netns", "exec", _host(self.run_name, source), *command, address]
        with (
            subprocess.Popen(receiver, stdout=subprocess.PIPE) as receiving,
            subprocess.Popen(sender) as sending,
        ):
            try:
                output, _ = receiving.communicate(timeout=30)
                return float(output)
            finally:
                receiving.kill()
                sending.kill()

    def run(
        self,
        command: list[str],
        ranks_per_host: int = 1,
        timeout_s: float | None = None,
        stdout: int | IO[bytes] | None = None,
    ) -> int:
        """Run `script.py args` or `-m module args` with torchrun on every host; gives the exit code.

        When one rank fails, all others are ended. After `timeout_s` they are too, and the code is 124. Ranks write
        to `stdout`, or where the caller does.
        """
        port = next(self._ports)
        until_s = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        try:
            for index in range(self.hosts):
                torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(self.hosts)]
                torchrun += ["--nproc-per-node", str(ranks_per_host), "--node-rank", str(index)]
                torchrun += ["--master-addr", self.address(0), "--master-port", str(port)]
                torchrun += ["--local-addr", self.address(index)]
                self.start(index, [*torchrun, *command], stdout)
            while True:
                codes = [agent.poll() for agent in self._agents]
                failed = [code for code in codes if code]
                if failed:
                    return failed[0] if failed[0] > 0 else 128 - failed[0]
                if all(code == 0 for code in codes):
                    return 0
                if time.monotonic() > until_s:
                    print(f"cluster: ended after the {timeout_s:g} s allowed", file=sys.stderr)
                    return TIMED_OUT
                time.sleep(0.05)
        finally:
            with _signals_held():
                self._stop()

    def start(
        self, host: int, command: list[str], stdout: int | IO[bytes] | None = None
    ) -> subprocess.Popen[bytes]:
        """A process on a host, which ends with the cluster."""
        # Names are not resolved on this network, at once and harmlessly; c10d would warn of each one.
        environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"} | os.environ
        environment |= {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}
        agent = subprocess.Popen(
            ["ip", "netns", "exec", _host(self.run_name, host), *command],
            env=environment,
            stdout=stdout,
            start_new_session=True,  # so that Ctrl-C reaches only this process, which then ends them in order
            preexec_fn=_begin_agent,
        )
        self._agents.append(agent)
        return agent

    def _stop(self) -> None:
        """End what runs on the hosts. Workers have sessions of their own, so agents alone would not do."""
        for agent in self._agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGTERM)
        until_s = time.monotonic() + STOP_S
        for agent in self._agents:
            with suppress(subprocess.TimeoutExpired):
                agent.wait(max(0.0, until_s - time.monotonic()))
        for index in range(self.hosts):
            _kill_inside(_host(self.run_name, index))
        for agent in self._agents:
            agent.wait()
        self._agents.clear()

    def close(self) -> None:
        """End all processes on the hosts and remove the network; a second call does nothing."""
        with _signals_held():
            self._stop()
            for namespace in NAMESPACES.glob(f"{self.run_name}-*"):
                _remove(namespace.name)
            atexit.unregister(self.close)
            if self._handler is not None:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                self._handler = None


def remove_leftovers() -> None:
    """Remove clusters whose owner was killed before it could; those of living owners stay."""
    for namespace in NAMESPACES.glob("fourfold-*"):
        made_here = re.fullmatch(r"fourfold-(\d+)-(\d+)-\d+-(switch|host\d+)", namespace.name)
        if made_here and _start_ticks(int(made_here[1])) != int(made_here[2]):
            _remove(namespace.name)


def _switch(run: str) -> str:
    return f"{run}-switch"


def _host(run: str, index: int) -> str:
    return f"{run}-host{index}"


def _start_ticks(pid: int) -> int | None:
    """When a process began, which tells it from a later one of the same number; None if it has ended."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if state == "Z" else int(rest[18])


def _check_rate(mbit: float | None) -> None:
    if mbit is not None and not 1 <= mbit <= UNLIMITED_MBIT:
        raise ValueError(f"mbit={mbit} is not in 1..{UNLIMITED_MBIT:.0f}")


def _limit(run: str, hosts: int, mbit: float | None) -> None:
    """Limit both ends of every link, all namespaces at once."""
    _check_rate(mbit)
    mbit = UNLIMITED_MBIT if mbit is None else mbit
    limits = {_host(run, index): {"eth0": mbit} for index in range(hosts)}
    limits[_switch(run)] = {f"port{index}": mbit for index in range(hosts)}
    limit(limits)


def limit(limits: Mapping[str, Mapping[str, float]]) -> None:
    """Limit what devices in namespaces send, in Mbit/s."""

    def lines(device: str, mbit: float) -> str:
        burst_bytes = max(BURST_BYTES, round(mbit * 1e6 / 8 * BURST_S))
        rate = f"rate {round(mbit * 1e6)}bit burst {burst_bytes} cburst {burst_bytes} quantum {PIECE_BYTES}"
        limit = f"class add dev {device} parent 1: classid 1:1 htb {rate}\n"
        tree = f"qdisc add dev {device} root handle 1: htb default 1\n"
        return tree + limit + f"qdisc add dev {device} parent 1:1 bfifo limit {QUEUE_BYTES}\n"

    batches = {
        namespace: "".join(lines(device, mbit) for device, mbit in devices.items())
        for namespace, devices in limits.items()
    }
    calls = []
    for namespace, batch in batches.items():
        command = ["tc", "-n", namespace, "-batch", "-"]
        call = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        assert call.stdin is not None
        call.stdin.write(batch)
        call.stdin.flush()
        calls.append(call)
    errors = [call.communicate()[1].strip() for call in calls]
    if any(call.returncode for call in calls):
        raise RuntimeError(f"tc could not set {dict(limits)} Mbit/s: {'; '.join(filter(None, errors))}")


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def _kill_inside(namespace: str) -> None:
    until_s = time.monotonic() + 10.0
    while time.monotonic() < until_s:
        found = subprocess.run(
            ["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False
        )
        if not found.stdout.split():
            return
        for pid in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)


def _remove(namespace: str) -> None:
    _kill_inside(namespace)
    # Its links go with it. It may be gone already, if two runs begin at once and find the same leftover.
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


@contextmanager
def _signals_held() -> Iterator[None]:
    """An impatient second Ctrl-C must not leave half of the network behind."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


_libc = ctypes.CDLL(None)


def _begin_agent() -> None:
    pr_set_pdeathsig = 1  # <linux/prctl.h>: if this process is killed, the agent is told to end
    _libc.prctl(pr_set_pdeathsig, signal.SIGTERM)


def _send(address: str) -> None:
    data = bytes(1 << 18)
    until_s = time.monotonic() + 10.0
    while True:
        try:
            connection = socket.create_connection((address, PROBE_PORT), timeout=10)
            break
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.01)
    with connection, suppress(ConnectionError):  # the receiver closes when it has seen enough
        while True:
            connection.sendall(data)


def _receive() -> float:
    """Mbit/s of what comes in after a warm-up, which fills the queues and opens TCP's window."""
    buffer = bytearray(1 << 18)
    with socket.create_server(("", PROBE_PORT)) as server:
        server.settimeout(10)
        connection, _ = server.accept()
    with connection:
        connection.settimeout(10)
        begin_s = time.perf_counter()
        while (start_s := time.perf_counter()) < begin_s + WARM_UP_S:
            connection.recv_into(buffer)
        received_bytes = 0
        while (now_s := time.perf_counter()) < start_s + MEASURE_S:
            received_bytes += connection.recv_into(buffer)
    return received_bytes * 8 / 1e6 / (now_s - start_s)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--probe"]:  # one end of Cluster.measure
        if arguments[1] == "receive":
            print(_receive())
        else:
            _send(arguments[1])
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster",
        usage="%(prog)s [--hosts H] [--ranks-per-host R] [--mbit M] [--no-measure] -- script.py …",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts (2)")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="number of ranks on each (1)")
    parser.add_argument("--mbit", type=float, help="rate of each host's link, each way, in Mbit/s (no limit)")
    parser.add_argument("--no-measure", action="store_true", help="do not measure the network first")
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options, command = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    if not command or command == ["-m"]:
        parser.error("name the script to run after --, as in: --hosts 2 --mbit 400 -- script.py")
    if command[0] != "-m" and not Path(command[0]).is_file():
        parser.error(f"there is no script {command[0]}; a module is named by -m")
    if options.ranks_per_host < 1:
        parser.error(f"--ranks-per-host {options.ranks_per_host}: a host needs at least one rank")
    try:
        cluster = Cluster(options.hosts, options.mbit)
    except ValueError as error:
        parser.error(str(error))
    if (reason := why_not()) is not None:
        print(f"cluster: {reason}", file=sys.stderr)
        return 2
    try:
        with cluster:
            if not options.no_measure and options.hosts > 1:
                rate = "no limit" if options.mbit is None else f"{options.mbit:g} Mbit/s"
                seen = cluster.measure()
                print(
                    f"cluster: {options.hosts} hosts with {options.ranks_per_host} rank(s) each; set {rate}, measured "
                    f"{seen.forth_mbit:.0f} forth and {seen.back_mbit:.0f} Mbit/s back between hosts, "
                    f"{seen.within_mbit:.0f} Mbit/s within a host",
                    flush=True,
                )
            return cluster.run(command, options.ranks_per_host)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
