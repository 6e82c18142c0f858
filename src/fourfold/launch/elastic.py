"""Fixes for torchrun's agent and rendezvous: a clean store for each attempt, and no restart of a run that has saved.

Seen in torch 2.13.0: ranks of a new attempt connect to the store of the previous one, which has the addresses of dead
ranks; a host that joins later waits for an address that nobody writes again; and a run that has saved and exited to be
continued is restarted like one that has crashed.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.run import parse_min_max_nnodes

from fourfold.processes import CONTINUE, REFUSED

# Rendezvous timeouts of elastic runs in seconds: how long fewer than all hosts wait for the others, and when a silent
# rendezvous counts as lost. torchrun's are 30 and 60 s.
CONF = {"last_call_timeout": 15, "read_timeout": 20}
POLL_S = 0.5  # between two checks for waiting hosts
RESPONSE_S = 10.0  # how long the rendezvous may take to respond
REJOIN_S = 3600.0  # how long a host tries to rejoin the others
REPORT_S = 6  # for ranks to report and exit after one has died: they cannot save without it
SAVE_S = 600  # for ranks to save before the number of hosts changes


class FreshStores:
    """A `RendezvousHandler` of agents that gives the ranks of each attempt a new store.

    The agent of the first host holds the store, so that it outlives the ranks, including rank 0.
    """

    use_agent_store = True

    def __init__(self, rendezvous: RendezvousHandler, address: str | None, *, is_elastic: bool) -> None:
        self._rendezvous, self._address, self._is_elastic = rendezvous, address, is_elastic
        self._is_static = rendezvous.get_backend() == "static"
        self._server: TCPStore | None = None
        self._attempt = 0
        self._waiting = 0
        self._lock = threading.Lock()  # the rendezvous is not thread-safe
        self._poller: threading.Thread | None = None
        self._closing = threading.Event()
        self.stays_open = False

    def next_rendezvous(self) -> RendezvousInfo:
        try:
            if not self._lock.acquire(timeout=RESPONSE_S):
                # The poller is still waiting. A host that gives up must not send heartbeats any longer.
                rendezvous: Any = self._rendezvous
                stop = rendezvous._stop_heartbeats  # no public name (seen in torch 2.13.0)
                threading.Thread(target=stop, daemon=True).start()
                raise RendezvousConnectionError(f"the rendezvous has not responded for {RESPONSE_S:g} s")
            try:
                info = self._rendezvous.next_rendezvous()
            finally:
                self._lock.release()
        except RendezvousError:
            self.stays_open = True  # for the other hosts, which may be running
            self._closing.set()
            raise
        if self._poller is None and self._is_elastic:
            self._poller = threading.Thread(target=self._poll, name="waiting-hosts", daemon=True)
            self._poller.start()
        self._waiting = 0
        self._attempt += 1
        # A static rendezvous has one store for all attempts, and all agents count the same attempts. Otherwise each round
        # has a new store, and an agent that joined later has counted fewer attempts.
        store = PrefixStore(f"attempt-{self._attempt}" if self._is_static else "attempt", info.store)
        port = None
        if info.rank == 0:
            self._server = TCPStore(self._address or "0.0.0.0", 0, is_master=True, wait_for_workers=False)
            port = self._server.port
        else:
            self._server = None
        where = RendezvousStoreInfo.build(info.rank, store, local_addr=self._address, server_port=port)
        return RendezvousInfo(info.store, info.rank, info.world_size, where)

    def num_nodes_waiting(self) -> int:
        """The last polled value: asking on a disconnected host blocks for minutes, in which no dead rank is noticed."""
        return self._waiting

    def _poll(self) -> None:
        while not self._closing.wait(POLL_S):
            with self._lock:
                try:
                    self._waiting = self._rendezvous.num_nodes_waiting() + self._is_removed()
                except RendezvousConnectionError:
                    # The first host has exited or is disconnected. The ranks here notice what that means for them.
                    self._waiting = 0

    def _is_removed(self) -> bool:
        """Was this host removed because its heartbeats were late? It is not told, and waiting hosts would wait forever."""
        # No public name for either (seen in torch 2.13.0).
        rendezvous: Any = self._rendezvous
        return rendezvous._this_node not in rendezvous._state_holder.state.participants

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rendezvous, name)

    def shutdown(self) -> bool:
        self._closing.set()
        if self._poller is not None:
            self._poller.join(1.0)  # a thread inside the store at interpreter exit would abort the process
        # Shutting it down would close it for all hosts, permanently.
        return True if self.stays_open else bool(self._rendezvous.shutdown())


class Agent(LocalElasticAgent):
    """torchrun's agent, which interprets the exit codes of its ranks."""

    current: Agent | None = None  # of this process
    is_asked_to_end = False

    def __init__(self, spec: WorkerSpec, *args: Any, **options: Any) -> None:
        rendezvous = spec.rdzv_handler
        settings = getattr(rendezvous, "settings", None)  # a static rendezvous has none
        # Can the number of hosts change?
        self._is_elastic = settings is not None and settings.min_nodes < settings.max_nodes
        is_alone = settings is not None and settings.max_nodes == 1
        address = "localhost" if is_alone else spec.master_addr or spec.local_addr
        self._stores = FreshStores(rendezvous, address, is_elastic=self._is_elastic)
        spec.rdzv_handler = self._stores  # type: ignore[assignment]
        spec.master_addr = spec.master_port = None  # ranks use the store of the rendezvous
        super().__init__(spec, *args, **options)
        Agent.current = self

    def ranks(self) -> list[int]:
        """The process ids of the live ranks."""
        started = getattr(self._pcontext, "subprocess_handlers", {}).values()
        return [rank.proc.pid for rank in started if rank.proc.poll() is None]

    def ask_to_end(self) -> None:
        """Do not restart ranks, which will save and exit; in an elastic run the other hosts continue."""
        self.is_asked_to_end = True
        self._stores.stays_open = self._is_elastic

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # A child process inherits an ignored signal until it installs a handler: the warning does not kill a rank that is
        # still importing.
        handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        try:
            started: dict[int, Any] = super()._start_workers(worker_group)
        finally:
            signal.signal(signal.SIGUSR1, handler)
        context: Any = self._pcontext
        close = context.close

        def close_soon(death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
            codes = [rank.proc.poll() for rank in context.subprocess_handlers.values()]
            has_failed = any(code and not has_saved(code) for code in codes)
            close(death_sig, min(timeout, REPORT_S) if has_failed else timeout)

        # After a failure torchrun waits half a minute for the other ranks, which may not react: a stopped rank, or one
        # that waits in a library for the dead rank.
        context.close = close_soon
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED and result.failures:
            # The first failure is the cause; the other ranks were stopped because of it.
            first = min(result.failures.values(), key=lambda failure: failure.timestamp)
            if self.is_asked_to_end:
                self._remaining_restarts = 0
            elif has_saved(first.exitcode) and self._is_elastic:
                self._remaining_restarts += 1  # other hosts join or leave; this is not a failure
            elif has_saved(first.exitcode) or first.exitcode == REFUSED:
                self._remaining_restarts = 0
            elif self._remaining_restarts:
                code = first.exitcode
                how = (
                    f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
                )
                print(
                    f"fourfold: local rank {first.local_rank} {how}; all ranks restart from the newest checkpoint "
                    f"({self._remaining_restarts - 1} more restarts allowed)",
                    flush=True,
                )
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        # After a failure they have exited by now. Otherwise hosts join or leave, and the ranks have to save.
        self._shutdown(timeout=SAVE_S)


def has_saved(code: int) -> bool:
    """Has the rank saved? SIGUSR1 kills it only at interpreter exit, after it has saved."""
    return code in (CONTINUE, -signal.SIGUSR1)


def run_and_rejoin(options: Any, run: Callable[[Any], None]) -> None:
    """torchrun's `run`; in an elastic run, a host that has lost the rendezvous tries to rejoin."""
    fewest, most = parse_min_max_nnodes(options.nnodes)
    if fewest == most:
        run(options)
        return
    given = options.rdzv_conf
    chosen = [f"{name}={value}" for name, value in CONF.items() if f"{name}=" not in given]
    options.rdzv_conf = ",".join([*filter(None, [given]), *chosen])
    lost_s = None
    while True:
        start_s = time.monotonic()
        try:
            run(options)
            return
        except RendezvousClosedError:
            print("fourfold: the run has finished without this host", flush=True)
            sys.exit(1)
        except (RendezvousConnectionError, RendezvousTimeoutError) as error:
            now_s = time.monotonic()
            if lost_s is None or now_s - start_s > REJOIN_S:
                lost_s = now_s
            if now_s - lost_s > REJOIN_S:
                raise
            print(f"fourfold: this host has lost the others and tries to rejoin: {error}", flush=True)
            time.sleep(1.0)
