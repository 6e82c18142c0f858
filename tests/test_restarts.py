"""Ranks killed at random: the small version of the benchmark, and what it would say if something were wrong."""

from benchmarks.faults import kills


def test_a_run_whose_ranks_are_killed_ends_as_if_nothing_had_happened() -> None:
    rows = list(kills.run(small=True))
    assert [row.what for row in rows if not row.holds] == []
    assert rows[0].what.startswith("3 random SIGKILLs")


def test_what_goes_wrong_is_seen() -> None:
    bad = kills.Outcome(
        2, 4, ["rank-0.safetensors is not that of the undisturbed run"], [9.0, 10.0], [7, 2], [1, 0]
    )
    assert [row.holds for row in kills.rows([bad], "")] == [False, False, False, False]
    good = kills.Outcome(2, 3, [], [2.0, 3.0], [6, 2], [2, 0])
    assert [row.holds for row in kills.rows([good], "")] == [True, True, True, True]
