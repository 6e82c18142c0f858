"""Small versions of the benchmarks: what they promise holds, and a planted fault makes them fail."""

import re

import pytest

from benchmarks import cluster, engine, families, headline, memory, overlap, parity, traffic
from benchmarks.experts import __main__ as experts
from benchmarks.slow_motion import steps
from fourfold.config.describe import sized_model_config
from fourfold.selftest import KINDS, Errors, grids_of

nightly = pytest.mark.nightly


def worst(pool, ranks, shape, kind, fault=None) -> Errors:
    return Errors.worst(pool.run(parity.run_rank, ranks, shape, kind, fault))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 2, 2, 2), pytest.param((2, 1, 1, 4), marks=nightly)])
def test_a_grid_trains_like_one_process(pool, kind, shape):
    assert worst(pool, 8, shape, kind).within_bars()


@pytest.mark.parametrize("ranks", [2, pytest.param(8, marks=nightly)])
@pytest.mark.parametrize("axis", range(4))
def test_each_axis_alone_trains_like_one_process(pool, axis, ranks):
    shape = tuple(ranks if axis == i else 1 for i in range(4))
    assert worst(pool, ranks, shape, "llama").within_bars()


@pytest.mark.nightly
def test_sixteen_ranks_train_like_one_process(pool):
    assert worst(pool, 16, (2, 2, 2, 2), "gpt2").within_bars()


@pytest.mark.parametrize("fault", parity.FAULTS)
def test_a_planted_fault_is_found(pool, fault):
    assert not worst(pool, 4, (1, 1, 2, 2), "llama", fault).within_bars()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("apertus", "verified"),  # two parameters of one module have roles
        ("olmo2", "verified"),
        ("phi3", "verified"),
        ("bloom", "verified"),
        ("minicpm3", "verified"),
        ("qwen2_vl", "verified"),
        ("eurobert", "verified"),  # labels that are not shifted
        ("mixtral", "verified"),
        ("muse_spark", "refused"),  # a norm of each expert's output
        ("granitemoehybrid", "refused"),  # one group of states for all heads
    ],
)
def test_a_family_is_exact_or_refused(pool, name, status):
    assert families.check(pool, families.find_family(name)).status == status


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_a_first_forward_that_splits_a_group_of_linears_is_recomputed_as_it_was(pool, kind):
    """Of minicpm3's q_a, kv_a and others: what looks like one input is several."""
    found = pool.run(
        families.check_rank, 2, "minicpm3", (1, 1, 1, 2), "replicated", {"activation_checkpointing": kind}
    )
    assert [outcome.status for outcome in found] == ["verified"] * 2


@nightly
def test_a_block_that_changes_an_output_in_place_is_compiled(pool):
    found = pool.run(families.check_rank, 2, "falcon", (1, 1, 1, 2), "replicated", {"compile": True})
    assert [outcome.status for outcome in found] == ["verified"] * 2


def test_a_family_without_its_code_is_missing_and_not_refused(monkeypatch):
    def without(module):
        def tiny_model(family, **changes):
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)

        monkeypatch.setattr(families, "tiny_model", tiny_model)

    without("transformers.models.llama.modeling_llama")
    outcome = families.check_rank("llama", (1, 1, 1, 1))
    assert (outcome.status, "modeling_llama" in outcome.detail) == ("missing", True)
    assert families.summarise({"llama": outcome})["missing"] == {"llama"}
    without("sentencepiece")
    with pytest.raises(ModuleNotFoundError):
        families.check_rank("llama", (1, 1, 1, 1))


@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=nightly)])
@pytest.mark.parametrize("weights", ["fsdp2", "streamed"])
@pytest.mark.parametrize(
    "shape",
    [shape if shape == (1, 2, 2, 2) else pytest.param(shape, marks=nightly) for shape in traffic.GRIDS],
)
def test_each_rank_sends_the_bytes_of_the_formulas(pool, kind, shape, weights):
    for forward, backward in pool.run(traffic.count_rank, 8, kind, shape, weights):
        assert traffic.check(kind, shape, weights, forward, backward) == []


@pytest.mark.parametrize(
    ("kind", "shape"), [pytest.param("llama", (1, 1, 4, 2), marks=nightly), ("gpt2", (1, 2, 2, 2))]
)
def test_sequence_parallel_activations_send_the_same_bytes(pool, kind, shape):
    options = (kind, shape, "streamed", "sequence-parallel")
    for forward, backward in pool.run(traffic.count_rank, 8, *options):
        assert traffic.check(kind, shape, "streamed", forward, backward, "sequence-parallel") == []


def test_bytes_that_are_not_in_the_formulas_are_noticed(pool):
    forward, backward = pool.run(traffic.count_rank, 8, "llama", (1, 2, 2, 2), "fsdp2")[0]
    assert traffic.check("llama", (1, 2, 2, 2), "fsdp2", forward, backward[1:]) != []


@nightly
def test_loading_holds_no_more_than_a_ranks_own_part():
    assert memory.main([]) == 0


def test_the_self_test_cuts_every_axis():
    for ranks in (1, 2, 3, 4, 6, 8, 12, 64, 512):
        shapes = grids_of(ranks)
        assert shapes
        assert all(d * z * y * x == ranks for d, z, y, x in shapes)
    assert {axis for shape in grids_of(8) for axis in range(4) if shape[axis] > 1} == {0, 1, 2, 3}


needs_cluster = pytest.mark.skipif(cluster.why_not() is not None, reason=str(cluster.why_not()))


@pytest.mark.nightly
@needs_cluster
def test_overlap_is_measured_and_drawn(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(overlap, "LAYERS", 1)
    monkeypatch.setattr(overlap, "STEP_S", 0.2)
    figure = tmp_path / "overlap.png"
    assert overlap.main(["--axes", "z", "--rounds", "2", "--figure", str(figure)]) in (0, 1)
    said = capsys.readouterr().out
    assert all(name in said for name in overlap.VARIANTS["z"])
    assert figure.stat().st_size > 10_000


@pytest.mark.nightly
@needs_cluster
def test_a_part_of_the_engine_is_played_at_the_balanced_rate(capsys, monkeypatch):
    small = sized_model_config("1m", 512) | {"num_hidden_layers": 1, "tie_word_embeddings": False}
    monkeypatch.setattr(engine, "JOB", steps.Job(small, sequences=4, length=64))
    monkeypatch.setattr(engine, "STEP_S", 0.2)
    code = engine.main(["--only", "z2-nodes", "--rounds", "1"])
    said = capsys.readouterr().out
    (ratio,) = re.findall(r"FSDP2, two nodes: ([0-9.]+) .* GB/s", said)
    assert code == (0 if float(ratio) <= 0.90 else 1)


@pytest.mark.nightly
@needs_cluster
def test_both_sides_of_the_headline_are_searched_and_played(tmp_path, capfd, monkeypatch):
    small = sized_model_config("1m", 512) | {"num_hidden_layers": 1, "tie_word_embeddings": False}
    for name, value in {
        "MODEL": small | {"num_key_value_heads": 2},
        "NODES": 2,
        "PER_NODE": 2,
        "WORLD": 4,
        "STEP_S": 0.2,
        "BEST": 2,
        "REGIMES": {"strong scaling": (2, 64)},
    }.items():
        monkeypatch.setattr(headline, name, value)
    figure = tmp_path / "headline.png"
    code = headline.main(["--clusters", "dgx-h100", "--rounds", "1", "--figure", str(figure)])
    assert figure.stat().st_size > 10_000
    said = capfd.readouterr().out
    (faster,) = re.findall(r"([0-9.]+) x faster", said)
    assert code == (0 if float(faster) >= headline.THRESHOLD else 1)
    assert "rejected" not in said
    # z * data is 1 or 2, so x * y is 4 or 2: seven grids, and three splits of theirs.
    assert len(set(re.findall(r"^    ours (\(.*?\))", said, re.MULTILINE))) == 7
    assert len(set(re.findall(r"^    theirs (replicas=\d+ shards=\d+ tensor=\d+)", said, re.MULTILINE))) == 2
    assert said.count(" played ") >= 4


@nightly
def test_experts_send_the_bytes_of_the_formulas_and_a_planted_fault_fails():
    assert experts.main(["--only", "traffic"]) == 0
    assert experts.main(["--break", "map"]) == 1
