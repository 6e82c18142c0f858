"""The emulated cluster is a network: it has the rates that were set, and is gone when it should be."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from benchmarks import cluster
from benchmarks.cluster import NAMESPACES, Bandwidth, Cluster, main, why_not

pytestmark = pytest.mark.nightly

needs_network = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
ROOT = Path(__file__).parents[2]


def links() -> str:
    return subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@needs_network
def test_links_have_the_rate_that_was_set_and_loopback_has_none() -> None:
    for mbit in (60.0, 250.0):
        with Cluster(hosts=2, mbit=mbit) as network:
            # A busy machine can make a measurement slower, so the best of some counts; nothing makes it faster.
            seen: list[Bandwidth] = []
            best: dict[str, float] = {}
            while len(seen) < 8 and min(best.values(), default=0.0) < 0.85 * mbit:
                seen.append(network.measure())
                best = {way: max(getattr(s, way) for s in seen) for way in ("forth_mbit", "back_mbit")}
            for best_mbit in best.values():
                assert 0.85 * mbit < best_mbit < 1.15 * mbit, (mbit, seen)
            assert max(measured.within_mbit for measured in seen) > 3 * mbit


@needs_network
@pytest.mark.parametrize("unlimited", ["sending", "receiving"])
def test_each_end_of_a_link_limits_by_itself(unlimited: str) -> None:
    with Cluster(hosts=2, mbit=100) as network:
        ends = {
            "sending": [(f"{network.run_name}-host{index}", "eth0") for index in range(2)],
            "receiving": [(f"{network.run_name}-switch", f"port{index}") for index in range(2)],
        }
        for namespace, device in ends[unlimited]:
            subprocess.run(["tc", "-n", namespace, "qdisc", "delete", "dev", device, "root"], check=True)
        assert network.measure().between_mbit < 115


@needs_network
def test_a_host_whose_link_is_cut_is_heard_of_no_more_until_it_is_mended() -> None:
    connect = "import socket, sys; socket.create_connection((sys.argv[1], 9), 0.5)"

    def asked(source: int, target: int) -> str:
        """Nobody listens: who is there says so."""
        host = f"{network.run_name}-host{source}"
        command = ["ip", "netns", "exec", host, sys.executable, "-c", connect, network.address(target)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr

    with Cluster(hosts=3, mbit=100) as network:
        assert "ConnectionRefusedError" in asked(0, 1)
        network.cut(1)
        assert "TimeoutError" in asked(0, 1)
        assert "ConnectionRefusedError" in asked(0, 2)
        network.mend(1)
        assert "ConnectionRefusedError" in asked(0, 1)


@needs_network
def test_all_reduce_of_torchrun_ranks_takes_the_time_of_the_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "reduce.py"
    script.write_text(
        textwrap.dedent("""
            import json, os, sys, time
            import torch
            import torch.distributed as dist

            dist.init_process_group("gloo")
            rank = dist.get_rank()
            payload = torch.ones(500_000)
            hosts = [None, None]
            dist.all_gather_object(hosts, os.stat("/proc/self/ns/net").st_ino)
            times = []
            for _ in range(10):  # of which the best counts: a busy machine makes some slower
                dist.barrier()
                begin = time.perf_counter()
                dist.all_reduce(payload)
                times.append(time.perf_counter() - begin)
            if rank == 0:
                json.dump({"hosts": hosts, "times": times}, open(sys.argv[1], "w"))
            dist.barrier()
        """)
    )
    result = tmp_path / "result.json"
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    with Cluster(hosts=2, mbit=200) as network:
        assert network.run([str(script), str(result)], timeout_s=120) == 0
    seen = json.loads(result.read_text())
    assert len(set(seen["hosts"])) == 2
    assert os.stat("/proc/self/ns/net").st_ino not in seen["hosts"]
    # Two ranks: each sends 2 × (2 - 1) / 2 of the 2 MB. A link may be ahead of its rate by little more than one
    # burst and piece at each end, which is 5 % at most.
    ideal_s = 2e6 * 8 / 200e6
    assert 0.93 * ideal_s < min(seen["times"]) < 1.6 * ideal_s, seen["times"]


@needs_network
def test_one_failing_rank_fails_the_run_and_ends_the_others(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text(
        textwrap.dedent("""
            import os, sys, time
            open(f"{sys.argv[1]}/pid-{os.environ['RANK']}", "w").write(str(os.getpid()))
            while len([name for name in os.listdir(sys.argv[1]) if name.startswith("pid-")]) < 4:
                time.sleep(0.05)
            if os.environ["RANK"] == "2":
                open(f"{sys.argv[1]}/failed", "w").close()
                sys.exit(3)
            time.sleep(300)
        """)
    )
    with Cluster(hosts=2, mbit=100) as network:
        code = network.run([str(script), str(tmp_path)], ranks_per_host=2, timeout_s=120)
        assert time.time() - (tmp_path / "failed").stat().st_mtime < 20
        assert code not in (0, cluster.TIMED_OUT)
        assert not any(is_running(int(path.read_text())) for path in tmp_path.glob("pid-*"))
    assert not list(NAMESPACES.glob(f"{network.run_name}-*"))


@needs_network
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_the_command_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "wait.py").write_text(
        textwrap.dedent("""
            import os, signal, time
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a stubborn one
            open(f"pid-{os.environ['RANK']}", "w").write(str(os.getpid()))
            time.sleep(300)
        """)
    )
    links_before = links()
    options = ["--hosts", "2", "--mbit", "100", "--no-measure", "--", "wait.py"]
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.cluster", *options],
        cwd=tmp_path,
        env=environment(),
        # A shell that runs the tests in the background has them ignore SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as command:
        try:
            until_s = time.monotonic() + 60
            pids: list[int] = []
            while len(pids) < 2:
                assert time.monotonic() < until_s
                assert command.poll() is None
                time.sleep(0.1)
                texts = [path.read_text() for path in tmp_path.glob("pid-*")]
                pids = [int(text) for text in texts if text]
            assert list(NAMESPACES.glob(f"fourfold-{command.pid}-*"))
            command.send_signal(number)
            assert command.wait(timeout=30) == 128 + number
        finally:
            command.kill()
    assert not list(NAMESPACES.glob(f"fourfold-{command.pid}-*"))
    assert not any(is_running(pid) for pid in pids)
    assert links() == links_before


@needs_network
def test_leftovers_of_a_killed_owner_are_removed_and_those_of_a_living_one_stay() -> None:
    code = textwrap.dedent("""
        import os, signal, subprocess
        from benchmarks.cluster import Cluster
        network = Cluster(hosts=1, mbit=100).__enter__()
        sleep = ["ip", "netns", "exec", network.run_name + "-host0", "sleep", "300"]
        left = subprocess.Popen(sleep, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        print(network.run_name, left.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    with Cluster(hosts=1, mbit=100) as living:
        killed = subprocess.run(
            [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False
        )
        name, pid = killed.stdout.split()
        assert len(list(NAMESPACES.glob(f"{name}-*"))) == 2
        with Cluster(hosts=1, mbit=100):
            assert not list(NAMESPACES.glob(f"{name}-*"))
            assert not is_running(int(pid))
            assert len(list(NAMESPACES.glob(f"{living.run_name}-*"))) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hosts", "2"], "name the script to run after --"),
        (["--hosts", "2", "--"], "name the script to run after --"),
        (["--", "no_such_script.py"], "there is no script no_such_script.py"),
        (["--hosts", "0", "--", "-m", "this"], "hosts=0 is not in 1..64"),
        (["--mbit", "-3", "--", "-m", "this"], "mbit=-3.0 is not in"),
        (["--ranks-per-host", "0", "--", "-m", "this"], "at least one rank"),
    ],
)
def test_wrong_command_line_says_what_is_wrong(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_without_root_it_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    why_not.cache_clear()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    try:
        assert main(["--", "-m", "this"]) == 2
    finally:
        why_not.cache_clear()
    assert "needs root and iproute2 (Debian: apt-get install iproute2)" in capsys.readouterr().err
