"""One pool of ranks for each test process, a time limit for each test, and the nightly tier."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import settings

from benchmarks.ranks import RankPool

LIMIT_S = 600.0  # against hangs; a test may be slow when others use the cores


# A busy machine is not a failure: no example has a deadline.
settings.register_profile("fourfold", deadline=None)
settings.load_profile("fourfold")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nightly: run by .ci/nightly, not by .ci/run (see CONTRIBUTING.md)")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m "not nightly"`, skip importing the files that are nightly as a whole: their imports take seconds."""
    if config.option.markexpr != "not nightly" or collection_path.suffix != ".py":
        return None
    is_nightly = re.search(r"^pytestmark = pytest\.mark\.nightly$", collection_path.read_text(), re.MULTILINE)
    return True if is_nightly else None


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    # Ranks import pytest (it is the main module) and the test modules: what these need is imported once, in the server.
    with RankPool(
        16, preload=["pytest", "hypothesis", "fourfold.train.run", "fourfold.selftest", "tests.models"]
    ) as ranks:
        yield ranks


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    def stop(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{item.nodeid} did not end within {LIMIT_S:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
