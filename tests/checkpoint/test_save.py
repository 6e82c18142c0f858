"""Checkpoints: saved state is restored exactly, on every grid, from disks and from object stores."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from benchmarks import reshard
from benchmarks.ranks import RankPool
from fourfold.checkpoint import Checkpoints, SaveError
from fourfold.checkpoint.commit import steps
from fourfold.checkpoint.folder import LocalFolder, open_folder
from fourfold.checkpoint.local_shards import LocalShard
from fourfold.checkpoint.manifest import find_damage
from fourfold.checkpoint.storage import Reader
from fourfold.cli.main import main
from fourfold.parallel.dropout import seed_ranks
from tests.checkpoints import Shape, advance, assert_same, numbers, save_steps, start
from tests.models import batch, build, local_parameters, part

# -- on every grid -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "grids", [((1, 3, 1, 1), (1, 2, 1, 2)), pytest.param(reshard.SMALL, marks=pytest.mark.nightly)]
)
def test_every_grid_loads_what_any_grid_saved_and_trains_on(
    pool: RankPool, tmp_path: Path, grids: tuple[Shape, ...]
) -> None:
    verdicts = reshard.reshard(pool, grids, tmp_path)
    assert len(verdicts) == len(grids) ** 2
    assert {pair: verdict for pair, verdict in verdicts.items() if not verdict.holds()} == {}


@pytest.mark.parametrize("fault", reshard.FAULTS)
def test_a_fault_injected_into_loaded_tensors_is_detected(pool: RankPool, tmp_path: Path, fault: str) -> None:
    (verdict,) = reshard.reshard(pool, reshard.SMALL[:1], tmp_path, fault).values()
    assert not verdict.holds()
    assert bool(verdict.different) == (fault != "schedule")


def save_small(folder: str, shape: Shape, kind: str, changes: dict[str, int]) -> int:
    training = start(shape, kind, **changes)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(training)
    return min(tensor.numel() for tensor in local_parameters(training.model).values())


def load_small(folder: str, shape: Shape, kind: str, changes: dict[str, int]) -> None:
    training = start(shape, kind, **changes)
    for tensor in local_parameters(training.model).values():
        tensor.fill_(torch.nan)
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.load(training) == 0
    whole = dict(build(kind, **changes).named_parameters())
    for name, tensor in local_parameters(training.model).items():
        assert torch.equal(tensor, part(whole, training.report, training.report.grid, name)), name


@pytest.mark.parametrize(
    ("shape", "kind", "changes"),
    [
        ((1, 4, 1, 1), "llama", {"vocab_size": 5}),  # rows 2, 2, 1 and 0
        ((1, 4, 1, 2), "llama", {"vocab_size": 6}),  # rows 1, 1, 1 and 0 of each half
        # Gate and up of experts are two pieces of one tensor. No shard is empty.
        ((1, 2, 1, 2), "qwen3_moe", {}),
        # Where a bias of q ends, that of k begins.
        ((1, 4, 1, 2), "gpt2", {"hidden_size": 4, "num_attention_heads": 2, "n_inner": 8}),
    ],
)
def test_uneven_and_empty_shards_are_saved_and_loaded(
    pool: RankPool, tmp_path: Path, shape: Shape, kind: str, changes: dict[str, int]
) -> None:
    ranks, one = shape[1] * shape[3], (1, 1, 1, 1)
    many_folder, one_folder = str(tmp_path / "many"), str(tmp_path / "one")
    smallest = min(pool.run(save_small, ranks, many_folder, shape, kind, changes))
    assert (smallest == 0) == (kind != "qwen3_moe")
    pool.run(save_small, 1, one_folder, one, kind, changes)
    pool.run(load_small, 1, many_folder, one, kind, changes)
    pool.run(load_small, ranks, one_folder, shape, kind, changes)
    pool.run(load_small, ranks, many_folder, shape, kind, changes)


# -- a run goes on -----------------------------------------------------------------------------------------------------


def resume(folder: str, shape: Shape) -> None:
    training = start(shape)
    with Checkpoints(folder, keep_last=2) as checkpoints:
        assert checkpoints.load(training) is None
        for _ in range(3):
            advance(training)
            checkpoints.save(training)
        expected = numbers(training)
        losses = [advance(training) for _ in range(2)]
        rates = [group["lr"] for group in training.optimizer.param_groups]

        again = start(shape)
        assert checkpoints.load(again) == 3
        assert (again.step, again.data) == (3, {"sequences": 24})
        assert_same(numbers(again), expected)
        assert [advance(again) for _ in range(2)] == losses
        assert [group["lr"] for group in again.optimizer.param_groups] == rates

        # An optimizer that has gone on is set back, too.
        assert checkpoints.load(again, step=2) == 2
        assert again.step == 2
        with pytest.raises(ValueError, match=r"no step-1 .*step-2, step-3"):
            checkpoints.load(again, step=1)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 1, 2)])
def test_a_resumed_run_equals_an_uninterrupted_run(pool: RankPool, tmp_path: Path, shape: Shape) -> None:
    pool.run(resume, shape[1] * shape[3], str(tmp_path), shape)
    assert steps(open_folder(tmp_path)) == [2, 3]


def save_slowly(folder: str) -> None:
    training = start((1, 2, 1, 1))
    advance(training)
    expected = numbers(training)
    may_write, write = threading.Event(), LocalFolder.write

    def slow(self: LocalFolder, *arguments: Any) -> Any:
        assert may_write.wait(60)
        return write(self, *arguments)

    LocalFolder.write = slow  # type: ignore[method-assign]
    try:
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(training)
            advance(training)  # while it is being saved
            assert not torch.equal(numbers(training)["lm_head.weight"], expected["lm_head.weight"])
            assert not Path(folder, "step-1").exists()
            may_write.set()
            checkpoints.wait()
            again = start((1, 2, 1, 1))
            checkpoints.load(again)
            assert_same(numbers(again), expected)
    finally:
        LocalFolder.write = write  # type: ignore[method-assign]


def test_training_during_a_save_does_not_change_the_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    pool.run(save_slowly, 2, str(tmp_path))


def draw(seed: int, step: int) -> float:
    seed_ranks(start().report.grid, seed, step)
    return torch.rand(()).item()


def test_random_numbers_follow_from_seed_and_step(pool: RankPool) -> None:
    drawn = {(seed, step): pool.run(draw, 1, seed, step)[0] for seed in range(2) for step in range(3)}
    assert len(set(drawn.values())) == len(drawn)
    assert drawn[1, 2] == pool.run(draw, 1, 1, 2)[0]


def refusals(folder: str) -> list[str]:
    training = start()
    with Checkpoints(folder) as checkpoints:
        advance(training)
        checkpoints.save(training)
        checkpoints.wait()
        messages = []
        wider, more = start(intermediate_size=96), start(num_hidden_layers=3)
        other = start()
        del other.optimizer._pairs[-1], other.optimizer.param_groups[0]["params"][-1]  # type: ignore[attr-defined]
        low = start()
        low.model.model.norm._buffers["extra"] = torch.zeros(2)
        for wrong in (wider, more, other, low):
            with pytest.raises(ValueError, match="checkpoint") as caught:
                checkpoints.load(wrong)
            messages.append(str(caught.value))
        training.step, training.data = 2, {"where": object()}
        with pytest.raises(ValueError, match="JSON") as caught:
            checkpoints.save(training)
        messages.append(str(caught.value))
    return messages


def test_mismatches_are_rejected_by_name(pool: RankPool, tmp_path: Path) -> None:
    (messages,) = pool.run(refusals, 1, str(tmp_path))
    wider, more, order, buffer, value = messages
    assert all(word in wider for word in ("mlp", "64", "96"))
    assert "layers.2" in more
    assert all(word in order for word in ("group 0", "20", "21", "lm_head"))
    assert "norm.extra" in buffer
    assert value.startswith("data ")


def test_a_checkpoint_is_plain_safetensors_each_byte_written_once(pool: RankPool, tmp_path: Path) -> None:
    pool.run(save_steps, 4, str(tmp_path), (2, 2, 1, 1), 1)
    folder = tmp_path / "step-1"
    pieces = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    assert len(pieces) == 4  # replicas share the work
    stored = sum(t.numel() for piece in pieces for n, t in piece.items() if n.startswith("model."))
    assert stored == sum(p.numel() for p in build("llama").parameters())
    assert not [f for f in folder.iterdir() if f.suffix not in (".json", ".safetensors")]


def read_a_part(folder: str) -> tuple[int, int]:
    training = start((1, 1, 1, 2))
    reader = Reader(open_folder(folder), 1)
    reader.folder.worthwhile_bytes = 1  # type: ignore[misc]
    local = 0
    for name, parameter in training.model.named_parameters():
        assert isinstance(parameter, DTensor)
        (piece,) = LocalShard.of(parameter)
        (chunk,) = reader.metadata.state_dict_metadata[f"model.{name}"].chunks
        target = torch.full_like(piece.local, torch.nan)
        reader.read_into(target, MetadataIndex(f"model.{name}", chunk.offsets), piece.offset)
        assert torch.equal(target, piece.local)
        local += target.numel() * target.element_size()
    return local, reader.bytes_read


def save_untrained(folder: str) -> None:
    training = start()
    training.step = 1
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(training)


def test_a_rank_reads_no_byte_that_it_does_not_need(pool: RankPool, tmp_path: Path) -> None:
    pool.run(save_untrained, 1, str(tmp_path))
    for local, read in pool.run(read_a_part, 2, str(tmp_path)):
        assert read == local


def evaluate_and_save(folder: str) -> None:
    training = start((1, 2, 1, 1), weights="fsdp2")
    advance(training)
    expected = numbers(training)
    ids, labels = batch(8)
    with torch.no_grad():  # FSDP2 leaves the head gathered
        training.model(input_ids=ids[:4], labels=labels[:4])
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(training)
        checkpoints.wait()
        again = start((1, 2, 1, 1), weights="streamed")
        assert checkpoints.load(again) == 1
    assert_same(numbers(again), expected)


def test_an_evaluation_before_a_save_is_supported(pool: RankPool, tmp_path: Path) -> None:
    pool.run(evaluate_and_save, 2, str(tmp_path))


# -- what stays --------------------------------------------------------------------------------------------------------


def overwrite(folder: str) -> str:
    training = start((1, 2, 1, 1))
    advance(training)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(training)
        advance(training)
        training.step = 1
        checkpoints.save(training)
        with pytest.raises(SaveError) as caught:
            checkpoints.wait()
        training.step = 2
        checkpoints.save(training)  # an error is told once
    return str(caught.value)


def test_a_checkpoint_is_never_overwritten(pool: RankPool, tmp_path: Path) -> None:
    for message in pool.run(overwrite, 2, str(tmp_path)):
        assert "step-1 exists" in message
    assert steps(open_folder(tmp_path)) == [1, 2]
    assert find_damage(open_folder(tmp_path / "step-1"), 1) == []


def test_the_newest_checkpoints_are_kept(pool: RankPool, tmp_path: Path) -> None:
    pool.run(save_steps, 2, str(tmp_path), (1, 2, 1, 1), 4, keep_last=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-3", "step-4"]


# -- object stores -----------------------------------------------------------------------------------------------------


def on_a_store(url: str, shape: Shape) -> None:
    training = start(shape)
    with Checkpoints(url, keep_last=2) as checkpoints:
        for _ in range(3):
            advance(training)
            checkpoints.save(training)
        expected = numbers(training)
        again = start(shape)
        assert checkpoints.load(again) == 3
        assert_same(numbers(again), expected)
        assert steps(checkpoints.root) == [2, 3]
        # Never overwritten.
        checkpoints.save(training)
        with pytest.raises(SaveError, match="step-3 exists"):
            checkpoints.wait()
        # Without its manifest it is no checkpoint, and its name is free.
        if training.report.grid.mesh.get_rank() == 0:
            checkpoints.root.child("step-3").remove("manifest.json")
        torch.distributed.barrier()
        assert checkpoints.load(again) == 2
        checkpoints.save(training)
        checkpoints.wait()
        # Damage is found, and set aside.
        if training.report.grid.mesh.get_rank() == 0:
            checkpoints.root.child("step-3").write("state.json", [b"{}"])
        torch.distributed.barrier()
        assert checkpoints.load(again) == 2
        assert "step-3.damaged-0" in checkpoints.root.names()


def test_checkpoints_in_fsspec_memory(pool: RankPool) -> None:
    pool.run(on_a_store, 1, "memory://runs/one", (1, 1, 1, 1))


@pytest.mark.nightly
def test_checkpoints_in_an_s3_bucket(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install fourfold[s3-test]")
    server_of = pytest.importorskip(
        "moto.server", reason="moto[server] is not installed: pip install fourfold[s3-test]"
    ).ThreadedMotoServer
    server = server_of(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        pool.run(on_s3, 2, f"http://{host}:{port}")
    finally:
        server.stop()


def on_s3(endpoint: str) -> None:
    import s3fs
    from fsspec.config import conf

    os.environ |= {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    conf["s3"] = {"endpoint_url": endpoint}
    if torch.distributed.get_rank() == 0:
        s3fs.S3FileSystem().mkdir("bucket")
    torch.distributed.barrier()
    on_a_store("s3://bucket/run", (1, 2, 1, 1))


# -- the command -------------------------------------------------------------------------------------------------------


def save_gpt2(folder: str) -> None:
    training = start((1, 2, 1, 2), "gpt2")
    training.step = 7
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(training)


def test_the_command_lists_verifies_and_shows(
    pool: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    pool.run(save_gpt2, 4, run)
    assert main(["checkpoint", "ls", run]) == 0
    assert "the newest is step-7" in capsys.readouterr().out
    assert main(["checkpoint", "verify", run]) == 0
    assert "step-7 valid, 6 files" in capsys.readouterr().out
    assert main(["checkpoint", "info", run, "--tensors"]) == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("z=2", "a test", "transformer.wte.weight [131, 32]", "step: 7"))

    file = tmp_path / "run" / "step-7" / "rank-1.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    capsys.readouterr()
    assert main(["checkpoint", "verify", run]) == 1
    assert "rank-1.safetensors" in capsys.readouterr().out
    assert main(["checkpoint", "ls", run]) == 0
    assert "DAMAGED" in capsys.readouterr().out
    assert main(["checkpoint", "info", run, "--step", "9"]) == 2
