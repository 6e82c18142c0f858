"""The comparison with published runs: its split, its fit, and what is left out."""

import dataclasses

import pytest

from benchmarks import published, search
from benchmarks.published_rows import in_scope, out_of_scope_counts, read
from tests.documented import ROOT

ROWS = in_scope()


def test_every_run_is_in_scope_or_counted_out():
    built = {row.id.removesuffix("-vanilla_tp").removesuffix("-async_tp") for row in ROWS}
    assert sum(out_of_scope_counts().values()) + len(ROWS) - 2 == len(
        read()
    )  # two runs have two figures each
    assert len(built) == len(ROWS) - 2


def test_the_split_leaves_out_about_half_of_each_large_source():
    for source in ("llm-foundry", "vTrain"):
        rows = [r for r in ROWS if r.source == source]
        assert 0.35 < sum(r.is_fitted for r in rows) / len(rows) < 0.65
    zero3 = [r for r in ROWS if r.software == "zero3"]
    assert {r.workload.hidden for r in zero3 if r.is_fitted} == {20480}
    assert {r.workload.hidden for r in zero3 if not r.is_fitted} == {12288}


def test_a_fit_finds_what_was_planted():
    truth = published.Figures(matmul_share=0.6, attention_share=0.3, memory_passes=1.2)
    rows = [r for r in ROWS if r.software == "foundry-h100"][::6]
    made = [dataclasses.replace(r, measured_s=published.predict_s(r, truth)) for r in rows]
    found = published.fit(made, published.Figures(), ("matmul_share", "attention_share", "memory_passes"))
    assert found.matmul_share == pytest.approx(truth.matmul_share, rel=0.05)
    assert found.attention_share == pytest.approx(truth.attention_share, rel=0.1)
    assert all(abs(published.log_error(r, found)) < 0.03 for r in made)


def test_the_page_has_the_steps_of_lora_that_the_command_prints(capsys):
    assert search.main(["--lora", "--markdown"]) == 0
    page = (ROOT / "docs/verification/planner-accuracy.md").read_text()
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(search.ADAPTERS)
    assert [line for line in table if line not in page] == []


# -- AxoNN's Table III: three rows fitted on, twelve held out ---------------------------------------------------------

FIGURES = {name: published.Figures() for name in ("foundry-a100", "foundry-h100")}
RUNS = published.axonn_runs()
ON_PERLMUTTER = [run for run in RUNS if run.machine == "perlmutter"]


def test_the_fitted_rows_are_the_smallest_of_each_machine():
    assert len(RUNS) == 15
    smallest = [
        min((run for run in RUNS if run.machine == machine), key=lambda run: run.ranks).id
        for machine in dict.fromkeys(run.machine for run in RUNS)
    ]
    assert [run.id for run in RUNS if run.is_fitted] == smallest
    assert set(smallest) == set(published.AXONN_FITTED)


@pytest.mark.nightly
def test_a_held_out_run_does_not_move_a_prediction_and_a_fitted_one_does():
    before = published.judge_axonn(ON_PERLMUTTER, FIGURES)
    others = [
        run if run.is_fitted else run._replace(measured_pflops=2 * run.measured_pflops)
        for run in ON_PERLMUTTER
    ]
    assert [j.pflops() for j in published.judge_axonn(others, FIGURES)] == [j.pflops() for j in before]
    slower = [
        run._replace(measured_pflops=0.9 * run.measured_pflops) if run.is_fitted else run
        for run in ON_PERLMUTTER
    ]
    for old, new in zip(before, published.judge_axonn(slower, FIGURES), strict=True):
        assert new.pflops() < 0.95 * old.pflops()
        assert new.pflops(waits=False) == old.pflops(waits=False)  # what is said to be fitted on nothing


@pytest.mark.nightly
def test_the_fitted_run_comes_out_as_measured():
    found = {j.run.id: j for j in published.judge_axonn(ON_PERLMUTTER, FIGURES)}
    j = found["axonn-sc24-perlmutter-512"]
    assert j.error() == pytest.approx(0, abs=1e-9)
    assert j.waiting_s == pytest.approx(j.run.measured_s - j.best.step_s)
    # 80.8 PF/s for 9.03 s, both of the source: the FLOPs that are counted are the authors' own.
    assert j.run.measured_s == pytest.approx(9.03, rel=0.01)
