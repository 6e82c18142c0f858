"""The `fourfold plan` command."""

import json
import re

import pytest

from fourfold.cli.main import main
from fourfold.config.describe import pretraining, starting_file
from fourfold.config.run_file import load_run
from fourfold.config.schema import EngineSection

LLAMA_8B = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
TINY = {**LLAMA_8B, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 96}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "llama-8b.json"
    path.write_text(json.dumps(LLAMA_8B))
    return path


def plan(config, *words: str) -> int:
    given = [
        "plan",
        str(config),
        "--cluster",
        "dgx-h100",
        "--gpus",
        "64",
        "--seq-len",
        "8192",
        "--global-batch-size",
        "128",
    ]
    return main([*given, "--simulate", "0", *words])


@pytest.mark.parametrize("columns", [100, 150])
def test_the_table_fits_the_terminal(config, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert plan(config) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if re.match(r"\s*\d+\s+[\d(].*%", line)]
    assert len(rows) == 10
    assert max(map(len, lines[: lines.index(rows[-1]) + 1])) <= columns
    assert not any("…" in line for line in rows)
    best = rows[0]
    assert re.search(r"\d+\.\d (ms|s)|\d s", best)
    assert best.count("%") >= 5
    headings = " ".join(lines[: lines.index(rows[0])])
    assert all(f" {word} " in headings for word in ("DP", "FSDP", "TP2", "TP", "settings"))


def test_explain_budget_and_json(config, capsys, tmp_path):
    out = tmp_path / "plan.json"
    assert (
        plan(
            config,
            "--explain",
            "1",
            "2,4,1,8",
            "--tokens",
            "1T",
            "--price",
            "2",
            "--watts",
            "700",
            "--json",
            str(out),
        )
        == 0
    )
    said = capsys.readouterr().out
    assert re.search(r"[AB] is \d\.\d\d x faster than [AB], most of it in", said)
    found = json.loads(out.read_text())
    hours = 1e12 / found["ranked"][0]["tokens_per_s"] / 3600
    assert f"{hours:,.1f} hours" in said
    assert f"{hours * 64 * 2:,.0f} at 2 per device hour" in said
    assert f"{hours * 64 * 700 / 1e6:,.1f} MWh" in said
    assert re.search(r"y = 1|y = \d+ is faster here", said)
    steps = [e["step_s"] for e in found["ranked"]]
    assert steps == sorted(steps)
    assert found["considered"] == len(found["ranked"]) + len(found["rejected"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--explain", "1", "99999"], "there is no layout number 99999; the table has 1 to"),
        (["--explain", "1", "3,1,1,1"], "3,1,1,1 is not a grid of 64 ranks"),
        (["--explain", "1", "best"], "'best' is not a layout"),
        (["--price", "2"], "give --tokens"),
        (["--compare-to", "nowhere.json"], "there is no run nowhere.json"),
    ],
)
def test_errors_name_the_value_and_the_remedy(config, capsys, words, said):
    assert plan(config, *words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("activations", ["replicated", "sequence-parallel", None])
def test_activations_are_considered_or_given(config, capsys, tmp_path, activations):
    out = tmp_path / "plan.json"
    words = ["--activations", activations] if activations else []
    assert plan(config, "--json", str(out), *words) == 0
    layouts = [e["layout"] for e in json.loads(out.read_text())["ranked"]]
    sharded = [layout for layout in layouts if layout["x"] * layout["y"] > 1]
    assert {layout["activations"] for layout in sharded} == (
        {activations} if activations else {"replicated", "sequence-parallel"}
    )
    said = re.search(
        r"with sequence-parallel ones|Sequence-parallel activations are faster", capsys.readouterr().out
    )
    assert bool(said) == (activations != "replicated")


@pytest.mark.parametrize(
    ("words", "expected"), [([], {True, False}), (["--keep-inputs"], {True}), (["--no-keep-inputs"], {False})]
)
def test_keeping_inputs_is_considered_or_given(config, tmp_path, words, expected):
    out = tmp_path / "plan.json"
    assert plan(config, "--json", str(out), *words) == 0
    layouts = [e["layout"] for e in json.loads(out.read_text())["ranked"]]
    assert {e["keep_inputs"] for e in layouts if e["activations"] == "sequence-parallel"} == expected


def test_missing_options_are_listed(capsys):
    assert main(["plan", "--cluster", "dgx-h100", "--seq-len", "8"]) == 2
    assert "needs a model (or --size), --gpus, --global-batch-size" in capsys.readouterr().err


@pytest.fixture
def run_config(config, tmp_path):
    chosen = {
        "model.config": str(config),
        "data.sources": [{"path": "text"}],
        **pretraining("8b"),
    }
    path = tmp_path / "run.toml"
    path.write_text(starting_file("A run.", chosen))
    return path


def test_a_size_needs_no_model_and_no_batch(capsys):
    assert main(["plan", "--size", "70b", "--cluster", "dgx-h100", "--gpus", "256"]) == 0
    assert "Llama 70B (70.6B) on 256 devices of dgx-h100, 1024 x 8192 tokens" in capsys.readouterr().out
    assert main(["plan", "--size", "7b", "--cluster", "dgx-h100", "--gpus", "256"]) == 2
    assert "no size '7b'; use one of 1m" in capsys.readouterr().err


def test_the_fastest_layout_is_written_into_a_run_config(run_config, capsys):
    """The plan is that of the run's own model, batch and engine; what else the file says stays."""
    before = load_run(run_config)
    words = ["plan", str(run_config), "--cluster", "dgx-h100", "--gpus", "256"]
    assert main([*words, "--set", "engine.activation_checkpointing=none", "--rows", "1"]) == 0
    assert "recomputed" not in capsys.readouterr().out
    assert main([*words, "--write", str(run_config)]) == 0
    said = capsys.readouterr().out
    written = re.search(r"wrote the layout \(data=(\d+), z=(\d+), y=(\d+), x=(\d+)\)", said)
    run = load_run(run_config)
    assert run.shape == tuple(int(size) for size in written.groups())
    assert run.grid.size == 256
    assert run.engine.activation_checkpointing == "selective"  # as little as fits
    sections = {"grid", "batch", "engine"}
    assert run.model_dump(exclude=sections) == before.model_dump(exclude=sections)
    assert main(words) == 0  # a layout in the file does not restrict the next plan
    assert capsys.readouterr().out.splitlines()[0] == said.splitlines()[0]


@pytest.mark.nightly
def test_a_run_config_that_was_planned_is_planned_anew(run_config, capsys):
    """What the first plan wrote does not restrict the next one, unless it is given by --set."""
    fresh = run_config.read_text()
    words = ["plan", str(run_config), "--cluster", "perlmutter-40g", "--gpus", "64"]
    assert main(words) == 0
    expected = capsys.readouterr().out
    assert (
        main(["plan", str(run_config), "--cluster", "dgx-h100", "--gpus", "8", "--write", str(run_config)])
        == 0
    )
    engine = load_run(run_config).engine
    assert engine != EngineSection()
    assert run_config.read_text() != fresh
    capsys.readouterr()
    assert main(words) == 0
    assert capsys.readouterr().out == expected
    assert main([*words, "--set", "engine.activations=replicated"]) == 0
    said = capsys.readouterr().out
    assert "Only layouts with engine.activations = replicated are ranked" in said
    assert main([*words, "--write", str(run_config)]) == 0
    assert load_run(run_config).grid.size == 64


@pytest.mark.nightly
def test_compiled_blocks_are_priced_by_formulas_alone(run_config, capsys, tmp_path):
    file = tmp_path / "plan"
    words = ["plan", str(run_config), "--cluster", "dgx-h100", "--gpus", "8", "--json", str(file)]
    steps = []
    for more in (["--no-compile"], [], ["--compile"], ["--set", "engine.compile=true"]):
        assert main([*words, *more]) == 0
        steps.append(json.loads(file.read_text())["ranked"][0]["step_s"])
    assert steps[0] > 1.05 * steps[1]
    assert steps[1] == steps[2] == steps[3], "GPUs compile unless told otherwise"
    capsys.readouterr()
    for more, said in (
        (["--simulate", "1"], "a simulation follows blocks operator by operator"),
        (["--trace", str(tmp_path / "trace")], "leave out --trace or --compile"),
    ):
        assert main([*words, "--compile", *more]) == 2
        assert said in capsys.readouterr().err
    assert main([*words, "--compile", "--write", str(run_config)]) == 0
    assert ", compile = true into" in capsys.readouterr().out
    assert load_run(run_config).engine.compile


def test_offloading_is_priced_when_it_is_asked_for(run_config, capsys, tmp_path):
    file = tmp_path / "plan"
    # Blocks have to be recomputed.
    words = ["plan", str(run_config), "--cluster", "dgx-h100", "--gpus", "8", "--json", str(file)]
    words += ["--set", "engine.activation_checkpointing=full"]
    fitting = []
    for more in ([], ["--activation-offloading"], ["--set", "engine.activation_offloading=true"]):
        assert main([*words, *more]) == 0
        ranked = json.loads(file.read_text())["ranked"]
        fitting.append(len(ranked))
        assert all(e["layout"]["activation_offloading"] == bool(more) for e in ranked)
    assert fitting[1] == fitting[2] > fitting[0]
    assert "inputs offloaded" in capsys.readouterr().out
    before = run_config.read_text()
    for more in (["--activation-offloading"], ["--set", "engine.activation_offloading=true"]):
        run_config.write_text(before)
        assert main([*words, *more, "--write", str(run_config)]) == 0
        assert ", activation_offloading = true into" in capsys.readouterr().out
        assert load_run(run_config).engine.activation_offloading


@pytest.mark.nightly
def test_a_plan_for_another_batch_is_not_written(config, run_config, capsys):
    before = run_config.read_text()
    assert plan(config, "--write", str(run_config)) == 2
    assert "has a batch of 512 x 8192 tokens, and the plan is for 128 x 8192" in capsys.readouterr().err
    words = ["plan", str(run_config), "--cluster", "dgx-h100", "--gpus", "256", "--write", str(run_config)]
    for more, said in (
        (["--precision", "fp32"], "has engine.precision=bf16, and the plan is for fp32"),
        (["--set", "optimizer.name=muon"], "has optimizer.name=adamw, and the plan is for muon"),
    ):
        assert main([*words, *more]) == 2
        assert said in capsys.readouterr().err
    assert run_config.read_text() == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "config.json", "--size", "8b"], "are two models"),
        (["plan", "--size", "8b", "--set", "grid.z=2"], "--set changes a run config"),
        (["plan", "./nowhere", "--cluster", "dgx-h100"], "there is no config.json at ./nowhere"),
    ],
)
def test_a_model_that_is_not_clear_is_rejected(words, said, capsys):
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_a_model_that_does_not_fit_names_its_memory(config, capsys):
    assert (
        main(
            [
                "plan",
                str(config),
                "--cluster",
                "dgx-a100",
                "--gpus",
                "1",
                "--seq-len",
                "8192",
                "--global-batch-size",
                "1",
            ]
        )
        == 2
    )
    assert re.search(r"needs \d+\.\d GiB of 72\.0", capsys.readouterr().err)


@pytest.mark.nightly
def test_the_html_report_and_the_trace_show_the_simulated_step(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    page, trace, table = tmp_path / "plan.html", tmp_path / "trace.json", tmp_path / "plan.json"
    words = [
        "plan",
        str(path),
        "--cluster",
        "dgx-h100",
        "--gpus",
        "4",
        "--seq-len",
        "64",
        "--global-batch-size",
        "8",
    ]
    assert (
        main([*words, "--simulate", "2", "--html", str(page), "--trace", str(trace), "--json", str(table)])
        == 0
    )
    best = json.loads(table.read_text())["ranked"][0]
    assert best["is_simulated"]
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    ends_s = max(e["ts"] + e["dur"] for e in events) / 1e6
    assert ends_s == pytest.approx(best["step_s"], rel=1e-6)
    compute_s = sum(e["dur"] for e in events if e["cat"] == "compute") / 1e6
    assert compute_s == pytest.approx(sum(best["compute_s"].values()), rel=1e-6)
    text = page.read_text()
    assert not re.search(r"<script[^>]* src|<link|<img", text)
    assert text.count('class="plotly-graph-div"') == 3
    for word in ("Where the time of a step goes", "Memory of a rank", "The search space"):
        assert word in text


# -- experts ------------------------------------------------------------------------------------------------------------

# So wide that gathered experts do not fit, and a batch so small that rows are few.
WIDE = {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 32768, "num_hidden_layers": 4, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 64, "num_experts_per_tok": 2}  # fmt: skip


def test_a_plan_chooses_who_has_experts(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(WIDE))
    file, out = tmp_path / "run.toml", tmp_path / "plan.json"
    chosen = {
        "model.config": str(config),
        "data.sources": [{"path": "text"}],
        "data.sequence_length": 4096,
        "batch.tokens": 64 * 4096,
    }
    file.write_text(starting_file("A run.", chosen))
    words = ["plan", str(file), "--cluster", "dgx-h100", "--gpus", "64", "--rows", "1"]
    assert main([*words, "--write", str(file)]) == 0
    said = " ".join(capsys.readouterr().out.split())  # wherever lines end
    assert "experts owned over z" in said
    assert "a rank has memory for" in said
    run = load_run(file)
    assert run.engine.experts == ["z"]
    assert run.grid.z > 1
    # What was written does not restrict the next plan; what --set and --experts say does.
    assert main([*words, "--experts", "cut", "--json", str(out)]) in (0, 2)
    assert "experts owned" not in capsys.readouterr().out
    steps = []
    for load in ("1.0", "1.5", "worst"):
        assert main([*words, "--experts", "z", "--expert-load", load, "--json", str(out)]) == 0
        steps.append(json.loads(out.read_text())["ranked"][0]["step_s"])
    assert steps[0] < steps[1] < steps[2]
    assert main([*words, "--experts", "z", "--compile"]) == 2
    assert "experts that ranks own with compile=True are not supported" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, "--expert-load", "0.5"])
    assert "0.5 is not a load of experts" in capsys.readouterr().err
