"""The run configs in examples/: they load, their grids fit the devices that their names say, and they say how to start them."""

import re
from pathlib import Path

import pytest

import fourfold as ff
from fourfold.config.schema import RunConfig
from fourfold.launch.world import world_of
from fourfold.planner.inputs import cluster
from fourfold.planner.search import RESERVE, memory_limit_bytes
from fourfold.train.memory_fit import fit_into_memory
from tests.documented import ROOT, check

CONFIGS = sorted((ROOT / "examples").glob("*.toml"))
# Dry runs that take half a minute or longer.
NIGHTLY = (
    "pretrain-8b-8-gpus",
    "long-context-8b-32-gpus",
    "pretrain-70b-256-gpus",
    "pretrain-405b-16384-gpus",
)


def load(path: Path) -> RunConfig:
    return ff.load_run(path)


def test_there_is_a_config_for_each_size() -> None:
    assert {re.search(r"\d+[mb]", path.stem)[0] for path in CONFIGS} == {"125m", "8b", "70b", "405b"}
    assert any(load(path).data.sequence_length >= 131_072 for path in CONFIGS)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_grid_has_the_ranks_of_its_name(path: Path) -> None:
    run = load(path)
    gpus = int(re.search(r"(\d+)-gpus", path.stem)[1])
    assert run.grid.size == gpus
    world = world_of(run.grid, gpus // 8, ranks_per_node=None, gpus_per_node=8)
    assert world is not None
    assert run.model.config is not None
    assert (ROOT / run.model.config).exists()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_commands_in_its_comments_are_right(path: Path) -> None:
    commands = [line[2:] for line in path.read_text().splitlines() if line.startswith("# fourfold ")]
    starts = [command for command in commands if f" examples/{path.name}" in command]
    assert starts
    for command in commands:
        check(command)
    for nodes, gpus in re.findall(r"--nodes (\d+) --gpus-per-node (\d+)", " ".join(starts)):
        assert int(nodes) * int(gpus) == load(path).grid.size


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.nightly] if path.stem in NIGHTLY else [], id=path.stem)
        for path in CONFIGS
    ],
)
def test_a_rank_fits_on_an_h100(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a dry run of the real grid, with at most two micro-batches: the others repeat the second."""
    monkeypatch.chdir(ROOT)
    run = load(path)
    assert run.model.config is not None
    parts = run.grid.data * run.grid.z
    micro = run.batch.micro_batch_sequences or run.sequences // parts
    micro_batches = min(run.sequences // parts // micro, 2)
    device = cluster.load("dgx-h100").device
    engine = fit_into_memory(run, device.memory_gib * 2**30, "cuda").engine
    result = ff.dryrun(
        run.model.config,
        run.shape,
        sequences=parts * micro * micro_batches,
        length=run.data.sequence_length,
        micro_batches=micro_batches,
        precision=engine.precision,
        activations=engine.activations,
        activation_checkpointing=engine.activation_checkpointing,
        checkpointed_blocks=engine.checkpointed_blocks,
        weights=engine.weights,
        accumulation=engine.accumulation,
        overlap=ff.Overlap(keep_inputs=engine.keep_inputs, keep_bytes=engine.keep_weights_bytes),
    )
    limit = memory_limit_bytes(cluster.load("dgx-h100"), RESERVE)
    assert result.peak.bytes <= limit
    assert result.peak.bytes > limit / 50, "a dry run of next to nothing says nothing"
