"""One pool of ranks for the whole test run, and a time limit for each test."""

import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from benchmarks.ranks import RankPool

LIMIT_S = 600.0  # for what hangs; a test that others take the cores from may be slow


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"limit(seconds): time limit of a test, {LIMIT_S:g} s unless given")


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    # Ranks import pytest (it is the main module) and the test modules: what these need is imported once, in the server.
    with RankPool(16, preload=["pytest", "hypothesis"]) as ranks:
        yield ranks


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    marker = item.get_closest_marker("limit")
    limit_s = float(marker.args[0]) if marker else LIMIT_S

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{item.nodeid} did not end within {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
