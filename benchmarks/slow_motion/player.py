"""A rank of a cluster in slow motion: plays a program, in real time, on its streams.

A stream's clock goes on exactly by what its work takes, and jumps to the end of what it waits for: that a sleep ends late does not
add up. Only where another stream or another rank has to know does it sleep until that moment. A collective is a ring over TCP, on
connections of its group; nothing is added up, since there are no values.
"""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.slow_motion.program import Item

Key = tuple[str, int, int]  # program and stream; ranks between neighbours, and ranks of the group

_MOST = 256  # rings of a rank
_PIECE = 1 << 16
_ZEROS = memoryview(bytes(_PIECE))
_NOTHING = bytearray(_PIECE)


@dataclass(frozen=True)
class Links:
    """Of a ring: its bytes, and word that a rank is there, which takes no time and is on no link."""

    forth: socket.socket
    back: socket.socket
    to_previous: socket.socket
    from_next: socket.socket


class Ring:
    """This rank's connections to the next and from the previous rank of a group."""

    def __init__(self, ranks: int, links: Links, piece_bytes: int = 0, mbit: float = 1.0) -> None:
        self.ranks, self.links = ranks, links
        # Of the link from the previous rank.
        self.piece_bytes, self.mbit = piece_bytes, mbit
        links.forth.setblocking(False)
        links.back.setblocking(False)

    def step(self, size: int) -> None:
        """Send so many bytes to the next rank, and receive as many from the previous."""
        to_send = to_receive = size
        forth, back = self.links.forth, self.links.back
        while to_send or to_receive:
            readers, writers, _ = select.select([back] if to_receive else [], [forth] if to_send else [], [])
            if writers:
                to_send -= forth.send(_ZEROS[: min(to_send, _PIECE)])
            if readers:
                got = back.recv_into(_NOTHING, min(to_receive, _PIECE))
                if not got:
                    raise ConnectionError("the previous rank has ended")
                to_receive -= got

    def run(self, kind: str, size: float) -> float:
        """When it is over.

        Nothing is sent before the next rank is there, too: the kernel would keep it for that rank, and it would have taken no time.
        A link hands over a piece at once, and then waits as long as it takes.
        """
        self.links.to_previous.sendall(b"!")
        _exactly(self.links.from_next, 1)
        passes = 2 if kind == "all_reduce" else 1
        part = max(1, round(size / self.ranks))
        for _ in range(passes * (self.ranks - 1)):
            self.step(part)
        return time.perf_counter() + min(part, self.piece_bytes) * 8e-6 / self.mbit


class Latch:
    """An event: whether it is over, and when it was."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self.time_s = 0.0

    def set(self, time_s: float) -> None:
        self.time_s = time_s
        self._over.set()

    def wait(self) -> float:
        self._over.wait()
        return self.time_s


def _sleep_until(time_s: float) -> None:
    left = time_s - time.perf_counter()
    if left > 0:
        time.sleep(left)


class Player:
    def __init__(self, plan: dict[str, Any], rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.dilation, self.payload = plan["dilation"], plan["payload"]
        self.rings: dict[Key, Ring] = {}

    # -- connections ----------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """A ring for each stream that sends, in an order that is the same on all ranks."""
        wanted = []
        for name, streams in self.plan["programs"].items():
            for stream, items in streams.items():
                groups = {tuple(item[2]) for item in items if item[0] == "send"}
                wanted += [(f"{name}/{stream}", *group) for group in sorted(groups)]
        with (
            socket.create_server(("", self.plan["port"]), backlog=_MOST) as data,
            socket.socket(socket.AF_UNIX) as words,
        ):
            words.bind(self._door(self.rank))
            words.listen(_MOST)
            forth = {key: self._to_next(key) for key in wanted}
            to_previous = {key: self._to_previous(key) for key in wanted}
            back, from_next = (self._from_others(server, len(wanted)) for server in (data, words))
        for key in wanted:
            _, where = self._neighbour(key, -1)
            links = Links(forth[key], back[key], to_previous[key], from_next[key])
            self.rings[key] = Ring(key[2], links, self.plan["piece_bytes"][where], self.plan["mbit"][where])

    def _door(self, rank: int) -> str:
        return f"{self.plan['folder']}/{rank}"

    def _neighbour(self, key: Key, step: int) -> tuple[int, str]:
        """A rank next to this one in its group, and which links lead there."""
        _, stride, ranks = key
        place = self.rank // stride % ranks
        other = self.rank + ((place + step) % ranks - place) * stride
        per_node = self.plan["per_node"]
        return other, "inside" if other // per_node == self.rank // per_node else "outside"

    def _to_next(self, key: Key) -> socket.socket:
        following, where = self._neighbour(key, 1)
        address = (self.plan[where][following], self.plan["port"])
        connection = _patiently(lambda: socket.create_connection(address, timeout=60))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _introduced(connection, key)

    def _to_previous(self, key: Key) -> socket.socket:
        previous, _ = self._neighbour(key, -1)

        def connect() -> socket.socket:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(self._door(previous))
            return connection

        return _introduced(_patiently(connect), key)

    def _from_others(self, server: socket.socket, number: int) -> dict[Key, socket.socket]:
        found: dict[Key, socket.socket] = {}
        while len(found) < number:
            connection, _ = server.accept()
            size = int.from_bytes(_exactly(connection, 2), "big")
            stream, stride, ranks = json.loads(_exactly(connection, size))
            found[stream, stride, ranks] = connection
        return found

    # -- playing --------------------------------------------------------------------------------------------------------

    def play(self, name: str, start_s: float) -> dict[str, Any]:
        """Every stream in its thread; the seconds of the step."""
        streams: dict[str, list[Item]] = self.plan["programs"][name]
        latches = {item[1]: Latch() for items in streams.values() for item in items if item[0] == "record"}
        ends: dict[str, float] = {}

        def run(stream: str, items: list[Item]) -> None:
            try:
                ends[stream] = self._run(f"{name}/{stream}", items, latches, start_s)
            except BaseException:
                traceback.print_exc()
                os._exit(1)  # other streams would wait for this one

        threads = [threading.Thread(target=run, args=item) for item in streams.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        end_s = max(ends.values())
        _sleep_until(end_s)
        return {"seconds": end_s - start_s}

    def _run(
        self,
        stream: str,
        items: list[Item],
        latches: dict[int, Latch],
        now_s: float,
    ) -> float:
        for item in items:
            if item[0] == "work":
                now_s += item[1] * self.dilation
            elif item[0] == "await":
                now_s = max(now_s, latches[item[1]].wait())
            elif item[0] == "record":
                _sleep_until(now_s)
                latches[item[1]].set(now_s)
            else:
                _, kind, (stride, ranks), size = item
                _sleep_until(now_s + self._latency_s(stride, ranks, kind))
                now_s = self.rings[stream, stride, ranks].run(kind, size / self.payload)
        return now_s

    def _latency_s(self, stride: int, ranks: int, kind: str) -> float:
        """The base and the hops of a ring, as the planner counts them."""
        library = self.plan["library"]
        near = max(1, min(ranks, self.plan["per_node"] // stride))
        nodes = -(-ranks // near)
        hops_us = (ranks - nodes) * library["hop_us"] + (nodes - 1) * library["net_hop_us"]
        passes = 2 if kind == "all_reduce" else 1
        return float((library["base_us"] + passes * hops_us) * 1e-6 * self.dilation)


def _patiently(connect: Callable[[], socket.socket]) -> socket.socket:
    """The other rank may not listen yet."""
    until_s = time.monotonic() + 60
    while True:
        try:
            return connect()
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.05)


def _introduced(connection: socket.socket, key: Key) -> socket.socket:
    said = json.dumps(key).encode()
    connection.sendall(len(said).to_bytes(2, "big") + said)
    return connection


def _exactly(connection: socket.socket, size: int) -> bytes:
    said = b""
    while len(said) < size:
        piece = connection.recv(size - len(said))
        if not piece:
            raise ConnectionError("a rank has ended")
        said += piece
    return said


def main() -> int:
    """A rank: waits for what to play from the conductor, which listens on a socket of the file system."""
    path, rank = sys.argv[1], int(sys.argv[2])
    # It runs as soon as it wakes up, also beside other work, and hardly ever does.
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    conductor = socket.socket(socket.AF_UNIX)
    conductor.connect(path)
    lines = conductor.makefile("rw")
    print(rank, file=lines, flush=True)
    player = Player(json.loads(lines.readline()), rank)
    player.connect()
    print("ready", file=lines, flush=True)
    for line in lines:
        name, start_s = json.loads(line)
        cpu = resource.getrusage(resource.RUSAGE_SELF)
        _sleep_until(start_s)
        result = player.play(name, start_s)
        after = resource.getrusage(resource.RUSAGE_SELF)
        result["cpu_s"] = after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime
        print(json.dumps(result), file=lines, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
