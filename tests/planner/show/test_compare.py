"""A run simulated on one cluster, compared with another: the value that differs is named."""

import dataclasses
import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fourfold as ff
from fourfold.mesh.axes import AXES
from fourfold.planner.dry_run_estimate import Job, as_estimate, describe
from fourfold.planner.inputs.cluster import preset
from fourfold.planner.inputs.layout import Layout
from fourfold.planner.show.compare import Run, compare, compare_with, parts_of, read_run
from fourfold.planner.workers import estimate_by_dry_run

CONFIG = LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=4, num_attention_heads=16,
                     num_key_value_heads=8, vocab_size=8000)  # fmt: skip
LAYOUT = Layout(2, 8, 1, 2)  # x inside a node, z and data between nodes
CLUSTER = preset("dgx-h100")
NOTHING = {"compute": 0.0, **{f"exposed {axis}": 0.0 for axis in AXES}}


@pytest.fixture(scope="module")
def predict():
    job = Job(CONFIG, 32, 1024, "cuda")
    dry_run = estimate_by_dry_run(job, LAYOUT)
    return lambda cluster: as_estimate(dry_run, job, describe(CONFIG)[1], cluster)


def changed(section: str, **factors: float):
    part = getattr(CLUSTER, section)
    values = {name: getattr(part, name) * factor for name, factor in factors.items()}
    return dataclasses.replace(CLUSTER, **{section: dataclasses.replace(part, **values)})


def run_on(predict, cluster) -> Run:
    parts_s = parts_of(predict(cluster))
    return Run(CONFIG.to_dict(), LAYOUT, 32, 1024, "bf16", sum(parts_s.values()), parts_s)


@pytest.mark.parametrize(
    ("section", "name", "factor"),
    [("links", "node_gbps", 0.5), ("device", "best_tflops", 0.6), ("device", "memory_tbps", 0.4)],
)
def test_an_injected_fault_is_named_with_its_value(predict, section, name, factor):
    run = run_on(predict, changed(section, **{name: factor}))
    seen = compare_with(run, predict, CLUSTER)
    first = seen.explanations[0]
    assert first.parameter == name
    assert first.needed == pytest.approx(factor * first.now, rel=0.02)
    assert first.left_s < 0.01 * run.step_s
    assert f"{name} = " in str(seen)


def test_a_run_as_predicted_has_nothing_to_explain(predict):
    seen = compare_with(run_on(predict, CLUSTER), predict, CLUSTER)
    assert seen.explanations == ()
    assert "describes this run" in str(seen)


def test_a_gap_that_no_value_explains_is_reported(predict):
    run = run_on(predict, CLUSTER)
    stuck = dataclasses.replace(run, parts_s={**run.parts_s, "exposed y": run.step_s}, step_s=2 * run.step_s)
    seen = compare_with(stuck, predict, CLUSTER)  # y has one rank: no link of it can be slow
    assert seen.worst == "exposed y"
    assert seen.explanations == ()
    assert "No one number" in str(seen)


def test_a_compiled_run_is_compared_by_formulas() -> None:
    model = CONFIG.to_dict()
    expected = compare(Run(model, LAYOUT, 32, 1024, "bf16", 1.0, NOTHING, compile=True), CLUSTER).predicted
    assert not expected.is_simulated
    slower = changed("device", best_tflops=0.6)
    there = compare(Run(model, LAYOUT, 32, 1024, "bf16", 1.0, NOTHING, compile=True), slower).predicted
    seen = compare(Run(model, LAYOUT, 32, 1024, "bf16", there.step_s, parts_of(there), compile=True), CLUSTER)
    assert seen.predicted == expected
    assert seen.explanations[0].parameter == "best_tflops"
    assert seen.explanations[0].needed == pytest.approx(slower.device.best_tflops, rel=0.02)


def save_a_run(path: str) -> None:
    grid = ff.Grid.create((1, 1, 1, 2))
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=96
    )
    model = LlamaForCausalLM(config)
    ff.parallelize(model, grid)
    reports = []
    for _ in range(3):
        with ff.measure_step(grid) as report:
            model(
                input_ids=torch.zeros(2, 8, dtype=torch.int64), labels=torch.zeros(2, 8, dtype=torch.int64)
            ).loss.backward()
        reports.append(report)
    if grid.coordinate("x") == 0:
        ff.save_run(path, reports, model, grid, sequences=2, length=8, precision="fp32")


def test_a_real_run_can_be_saved_and_compared(pool, tmp_path):
    path = tmp_path / "run.json"
    pool.run(save_a_run, 2, str(path))
    run = read_run(path)
    assert (run.layout, run.sequences) == (
        Layout(1, 1, 1, 2, weights="streamed", activations="sequence-parallel"),
        2,
    )
    assert 0 < run.parts_s["compute"] < run.step_s
    assert "worst gap" in str(compare(run, CLUSTER))


def test_a_file_that_is_not_a_run_is_rejected(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"model": {}, "length": 8}))
    with pytest.raises(ValueError, match="lacks 3 of 5 parts of a run: layout, sequences, measured"):
        read_run(tmp_path / "run.json")
    with pytest.raises(ValueError, match="there is no run"):
        read_run(tmp_path / "other.json")
