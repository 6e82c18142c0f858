"""A dry run of ranks that share sequences: the collectives and the memory of a real step, and the work of a kernel that skips what is masked."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks import dryrun as benchmark
from benchmarks.ranks import RankPool
from fourfold.cli.main import main
from fourfold.dry_run.run import DryRun, dryrun
from fourfold.errors import UnsupportedError

nightly = pytest.mark.nightly
BY_TOKENS = "sequence-parallel"


@pytest.mark.parametrize(
    ("shape", "share", "weights", "precision", "activations", "checkpointing"),
    [
        ((1, 2, 1, 2), 2, "fsdp2", "fp32", BY_TOKENS, "selective"),
        pytest.param((1, 2, 1, 1), 2, "streamed", "fp32", "replicated", "none", marks=nightly),
        pytest.param((1, 4, 1, 1), 2, "fsdp2", "fp32", "replicated", "full", marks=nightly),
        pytest.param((1, 4, 1, 1), 4, "fsdp2", "fp32", "replicated", "none", marks=nightly),
        pytest.param((2, 2, 1, 1), 2, "fsdp2", "bf16", "replicated", "full", marks=nightly),
        pytest.param((1, 2, 1, 2), 2, "streamed", "fp32", BY_TOKENS, "none", marks=nightly),
    ],
)
def test_a_dry_run_of_shared_sequences_equals_the_real_one(
    pool: RankPool, shape: Any, share: int, weights: str, precision: str, activations: str, checkpointing: str
) -> None:
    given = (weights, precision, activations, True, "none", share, checkpointing)
    same, off = benchmark.compare(pool, shape, *given)
    assert same
    assert abs(off) <= benchmark.MEMORY_BAR


def on_gpus(shape: Any, share: int, **options: Any) -> DryRun:
    sizes = {"sequences": 4, "length": 256, "weights": "fsdp2", "sequence_ranks": share}
    return dryrun(benchmark.small_config(), shape, **sizes, **options)


def attention_flops(run: DryRun) -> Counter[str]:
    found: Counter[str] = Counter()
    for operation in run.operations:
        if operation.work == "attention":
            found[operation.phase] += int(operation.flops)
    return found


def test_attention_is_as_much_work_on_each_rank_and_is_not_repeated() -> None:
    whole = attention_flops(on_gpus((1, 1, 1, 1), 1))
    for rank in (0, 3):
        part = attention_flops(on_gpus((1, 4, 1, 1), 4, rank=rank, activation_checkpointing="selective"))
        assert {phase: 4 * flops for phase, flops in part.items()} == dict(whole)
    again = attention_flops(on_gpus((1, 4, 1, 1), 4, activation_checkpointing="full"))
    assert 4 * again["recompute"] == whole["forward"]


def test_all_blocks_equal_those_that_are_made_of_two_copies() -> None:
    few, every = (on_gpus((1, 2, 1, 2), 2, trace_all=trace_all) for trace_all in (False, True))
    assert list(few.trace.events) == list(every.trace.events)
    assert few.peak == every.peak


def test_the_command_takes_the_ranks_that_share_a_sequence(tmp_path: Path) -> None:
    small = benchmark.small_config()
    small.save_pretrained(tmp_path)
    file, out = tmp_path / "run.toml", tmp_path / "out.json"
    file.write_text(
        f"model = {{config = '{tmp_path}'}}\ndata = {{sources = [{{path = 't'}}], sequence_length = 64}}\nevaluation = {{sequences = 4}}\n"
        "batch = {tokens = 128, sequence_ranks = 'auto'}\ngrid = {z = 4}\n"
    )
    asked = ["--grid", "1,4,1,1", "--global-batch-size", "1", "--seq-len", "64", "--sequence-ranks", "4"]
    for words, share in ((str(file), 2), (str(tmp_path), 4)):
        assert main(["dryrun", words, *(asked if share == 4 else []), "--json", str(out)]) == 0
        events = [e for e in json.loads(out.read_text())["events"] if e.get("purpose") == "keys-values"]
        gathers = [e for e in events if e["event"] == "start" and e["kind"] == "all_gather"]
        assert len(gathers) == 2 * small.num_hidden_layers
        assert {e["ranks"] for e in gathers} == {share}


def test_another_attention_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="attention='masked' with sequence_ranks=2"):
        on_gpus((1, 2, 1, 1), 2, attention="masked")
    with pytest.raises(ValueError, match="sequence_ranks=3 does not divide z=2"):
        on_gpus((1, 2, 1, 1), 3)
