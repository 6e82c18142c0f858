"""What torchrun's agent and its meeting need beside what they do: a clean store for each attempt, and an end that is meant.

Seen in torch 2.13.0: ranks of a new attempt connect to the store of the one before, and find the addresses of its dead in
it; a host that joins later waits for an address that nobody writes again; and a run that has saved and ended to be
continued is started again like one that has crashed.
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

# Of the meeting, where hosts come and go. Fewer than all wait for the others for so long before they go on; and a host
# that hears nothing from the meeting takes it for lost. torchrun's are 30 and 60 s.
CONF = {"last_call_timeout": 15, "read_timeout": 20}
LOOK_S = 0.5  # between two looks for hosts that have come
ANSWER_S = 10.0
AWAY_S = 3600.0  # that a host looks for the others
GONE_S = 6  # for ranks to report and end, once one of them is gone: they cannot save without it
SAVE_S = 600  # for ranks to save before they are started anew in another number


class FreshStores(RendezvousHandler):
    """A meeting of agents whose ranks find a store that nobody has used, each time.

    The agent of the first host holds it, so that it outlives its ranks, rank 0 among them.
    """

    def __init__(self, meeting: RendezvousHandler, address: str | None, *, is_elastic: bool) -> None:
        self._meeting, self._address, self._is_elastic = meeting, address, is_elastic
        self._is_static = meeting.get_backend() == "static"
        self._server: TCPStore | None = None
        self._attempt = 0
        self._waiting = 0
        self._lock = threading.Lock()  # the meeting is for one at a time
        self._looks: threading.Thread | None = None
        self._ends = threading.Event()
        self.stays_open = False

    def next_rendezvous(self) -> RendezvousInfo:
        try:
            if not self._lock.acquire(timeout=ANSWER_S):
                # The one who looks is still at it. Its sign of life must not go on for a host that has given up.
                meeting: Any = self._meeting
                threading.Thread(
                    target=meeting._stop_heartbeats, daemon=True
                ).start()  # no public name, either
                raise RendezvousConnectionError(f"the meeting has not answered for {ANSWER_S:g} s")
            try:
                info = self._meeting.next_rendezvous()
            finally:
                self._lock.release()
        except RendezvousError:
            self.stays_open = True  # for the others, who may be well
            self._ends.set()
            raise
        if self._looks is None and self._is_elastic:
            self._looks = threading.Thread(target=self._look, name="newcomers", daemon=True)
            self._looks.start()
        self._waiting = 0
        self._attempt += 1
        # A static meeting has one store for all attempts, which all agents count alike. Otherwise there is a new one
        # for each round, and an agent that has come later has counted fewer.
        store = PrefixStore(f"attempt-{self._attempt}" if self._is_static else "attempt", info.store)
        port = None
        if info.rank == 0:
            self._server = TCPStore(self._address or "0.0.0.0", 0, is_master=True, wait_for_workers=False)
            port = self._server.port
        else:
            self._server = None
        where = RendezvousStoreInfo.build(info.rank, store, local_addr=self._address, server_port=port)
        return RendezvousInfo(info.store, info.rank, info.world_size, where)

    @property
    def use_agent_store(self) -> bool:
        return True

    def num_nodes_waiting(self) -> int:
        """As it was a moment ago: on a host that is cut off, whoever asks now waits for minutes, and sees no rank die."""
        return self._waiting

    def _look(self) -> None:
        while not self._ends.wait(LOOK_S):
            with self._lock:
                try:
                    self._waiting = self._meeting.num_nodes_waiting() + self._is_forgotten()
                except RendezvousConnectionError:
                    # The first host has ended, or is cut off. What that means for the ranks here, they know best.
                    self._waiting = 0

    def _is_forgotten(self) -> bool:
        """A host whose signs of life came too late is struck off, and not told: newcomers would wait for others for ever."""
        # No public name for either (seen in torch 2.13.0).
        meeting: Any = self._meeting
        return meeting._this_node not in meeting._state_holder.state.participants

    def get_backend(self) -> str:
        return str(self._meeting.get_backend())

    def get_run_id(self) -> str:
        return str(self._meeting.get_run_id())

    def is_closed(self) -> bool:
        return bool(self._meeting.is_closed())

    def set_closed(self) -> None:
        self._meeting.set_closed()

    def shutdown(self) -> bool:
        self._ends.set()
        if self._looks is not None:
            self._looks.join(1.0)  # whoever is still in the store when Python ends would abort
        # It would be closed for all, and for good.
        return True if self.stays_open else bool(self._meeting.shutdown())


class Agent(LocalElasticAgent):
    """torchrun's agent, which knows what its ranks mean by how they end."""

    current: Agent | None = None  # of this process
    is_asked_to_end = False

    def __init__(self, spec: WorkerSpec, *args: Any, **options: Any) -> None:
        meeting = spec.rdzv_handler
        settings = getattr(meeting, "settings", None)  # a static meeting has none
        # May the number of hosts change?
        self._is_elastic = settings is not None and settings.min_nodes < settings.max_nodes
        is_alone = settings is not None and settings.max_nodes == 1
        address = "localhost" if is_alone else spec.master_addr or spec.local_addr
        spec.rdzv_handler = self._stores = FreshStores(meeting, address, is_elastic=self._is_elastic)
        spec.master_addr = spec.master_port = None  # ranks take what the meeting says
        super().__init__(spec, *args, **options)
        Agent.current = self

    def ranks(self) -> list[int]:
        """The processes of those that live."""
        started = getattr(self._pcontext, "subprocess_handlers", {}).values()
        return [rank.proc.pid for rank in started if rank.proc.poll() is None]

    def ask_to_end(self) -> None:
        """The ranks will save and end; where hosts come and go, the others go on without this one."""
        self.is_asked_to_end = True
        self._stores.stays_open = self._is_elastic

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started: dict[int, Any] = super()._start_workers(worker_group)
        context: Any = self._pcontext
        close = context.close

        def close_soon(death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
            codes = [rank.proc.poll() for rank in context.subprocess_handlers.values()]
            has_failed = any(code and not has_saved(code) for code in codes)
            close(death_sig, min(timeout, GONE_S) if has_failed else timeout)

        # After a failure torchrun waits half a minute for the others, who may not hear: one that is stopped, or one that
        # waits in a library for the rank that is gone.
        context.close = close_soon
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED and result.failures:
            # The first to end says why; it is for its sake that the others were stopped.
            first = min(result.failures.values(), key=lambda failure: failure.timestamp)
            if self.is_asked_to_end:
                self._remaining_restarts = 0
            elif has_saved(first.exitcode) and self._is_elastic:
                self._remaining_restarts += 1  # other hosts come or go; it is no failure
            elif has_saved(first.exitcode) or first.exitcode == REFUSED:
                self._remaining_restarts = 0
            elif self._remaining_restarts:
                self._say(first.exitcode, first.local_rank)
        return result

    def _say(self, code: int, local_rank: int) -> None:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        left = self._remaining_restarts - 1
        print(
            f"fourfold: local rank {local_rank} {how}; all ranks are started again from the newest checkpoint, "
            f"and may be {left} more times",
            flush=True,
        )

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        # After a failure they have ended by now. Otherwise hosts come or go, and they are to save.
        self._shutdown(timeout=SAVE_S)


def has_saved(code: int) -> bool:
    """A rank dies of the warning only on its way out, when Python has given up its handlers: it had saved by then."""
    return code in (CONTINUE, -signal.SIGUSR1)


def run_and_rejoin(options: Any, run: Callable[[Any], None]) -> None:
    """torchrun's `run`; where the number of hosts may change, one that has lost the meeting looks for it again."""
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
            print("fourfold: the run has ended without this host", flush=True)
            sys.exit(1)
        except (RendezvousConnectionError, RendezvousTimeoutError) as error:
            now_s = time.monotonic()
            if lost_s is None or now_s - start_s > AWAY_S:
                lost_s = now_s
            if now_s - lost_s > AWAY_S:
                raise
            print(f"fourfold: this host has lost the others, and looks for them: {error}", flush=True)
            time.sleep(1.0)
