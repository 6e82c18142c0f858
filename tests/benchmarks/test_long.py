"""The benchmark of shared sequences sees planted faults."""

import pytest

from benchmarks import long
from benchmarks.ranks import RankError, RankPool

pytestmark = pytest.mark.nightly
SMALL = "llama", (1, 2, 1, 1), 2


def test_without_a_fault_it_is_exact(pool: RankPool) -> None:
    assert {outcome.status for outcome in pool.run(long.check_rank, 2, *SMALL, True)} == {"verified"}
    assert max(pool.run(long.documents_rank, 2, *SMALL)) == 0.0


@pytest.mark.parametrize("fault", long.FAULTS)
def test_a_planted_fault_is_found(pool: RankPool, fault: str) -> None:
    if fault == "positions":  # found before anything is computed
        with pytest.raises(RankError, match="positions of the 2 ranks that share sequences"):
            pool.run(long.check_rank, 2, *SMALL, True, fault)
        return
    assert {outcome.status for outcome in pool.run(long.check_rank, 2, *SMALL, True, fault)} == {"failed"}


def test_documents_that_see_each_other_are_found(pool: RankPool) -> None:
    assert max(pool.run(long.documents_rank, 2, *SMALL, "mask")) > 1e-2


@pytest.mark.nightly
def test_rows_are_trained_stopped_and_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--train", "--tokens", "1024", "--steps", "4"]
    assert long.main(short) == 0
    assert capsys.readouterr().out.count("resumed with") == 2
    assert long.main([*short, "--break", "dk"]) == 1
