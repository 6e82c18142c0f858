"""Replicas that are lost and join again; what a peer sends is copied bit for bit, or rejected."""

import io
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.faults import torchft_replicas
from benchmarks.ranks import RankPool
from fourfold.checkpoint import state
from fourfold.config.run_file import ConfigError
from fourfold.mesh.grid import Grid
from fourfold.train.loop.trainer import Trainer
from fourfold.train.recovery import peer_copy
from fourfold.train.recovery.peer_copy import CopyError
from fourfold.train.recovery.torchft_manager import rank_rows, replica_rows
from tests.training import on, write_run

HEAD = "http://head:29510"


@pytest.mark.nightly
def test_a_lost_replica_costs_the_other_no_step() -> None:
    pytest.importorskip("torchft", reason="torchft is not installed: pip install 'fourfold[torchft]'")
    found = torchft_replicas.measure(kills=1)
    assert found.kills == 1
    assert found.alone > 0
    assert found.lost == 0
    assert found.stall_s < 10.0, "it waited for the timeout of 20 s, or half of it"
    assert found.is_equal
    # The values are those of the plain grid, up to the order of sums: for a norm's gradient, a single replica sums the halves
    # of its batch before its x ranks, and two replicas their x ranks before each other.
    assert found.loss_apart < 1e-6


def test_the_lighthouse_command_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reliability.md").read_text()
    assert f"torchft_lighthouse --bind [::]:29510 {torchft_replicas.LIGHTHOUSE}\n" in page


@given(st.integers(1, 50), st.integers(1, 200))
def test_replicas_split_all_rows_evenly(replicas: int, more: int) -> None:
    sequences = replicas + more
    shares = [replica_rows(sequences, 1, replicas, index) for index in range(replicas)]
    assert [row for share in shares for row in range(share.start, share.stop)] == list(range(sequences))
    sizes = [share.stop - share.start for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_more_replicas_than_rows_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"5 replicas .* 8 sequences .* z=2 ranks of only 4"):
        replica_rows(8, 2, 5, 0)


def two_trainers(run: Any) -> tuple[Trainer, Trainer]:
    """One that has trained, and one that has not."""
    grid = Grid.create(run.shape)
    ahead, behind = Trainer(run, grid), Trainer(run, grid)
    ahead.train()
    return ahead, behind


def sent_by(trainer: Trainer) -> bytearray:
    """What a peer sends, through a socket of its own."""
    sender = peer_copy.PeerCopy(trainer.training, "127.0.0.1", 5.0)
    manager = {"step": trainer.step, "batches_committed": 0}
    offered = {"user": {"default": state.capture(trainer.training)}, "torchft": manager}
    sender.send_checkpoint([1], trainer.step, offered, timedelta(seconds=5))
    with peer_copy.socket.create_connection(("127.0.0.1", int(sender.metadata().split(":")[1])), 5.0) as peer:
        peer.sendall(trainer.step.to_bytes(8, "little"))
        with peer.makefile("rb") as stream:
            sent = stream.read()
    sender.disallow_checkpoint()
    sender.shutdown()
    return bytearray(sent)


def copies(run: Any) -> bool:
    """Does a copy equal its original: weights, optimizer, step and samples? And is each change of its bytes rejected?"""
    ahead, behind = two_trainers(run)
    sent = sent_by(ahead)
    copied, manager = peer_copy.fetch(io.BytesIO(sent), behind.training)
    peer_copy.apply(copied, behind.training)
    assert manager["step"] == ahead.step == behind.step
    original, copy = state.capture(ahead.training), state.capture(behind.training)
    keys = ("step", "seed", "data", "optimizer")
    is_same = all(original.values[key] == copy.values[key] for key in keys)
    for name, held in original.tensors.items():
        pairs = zip(held.shards, copy.tensors[name].shards, strict=True)
        is_same &= all(torch.equal(a.local, b.local) for a, b in pairs)
    length = int.from_bytes(sent[:8], "little")
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(8 + length, len(sent), (20,), generator=generator).tolist()
    for position in (3, 8 + length // 2, len(sent) - 1, *positions):
        corrupted = bytearray(sent)
        corrupted[position] ^= 1 << position % 8
        with pytest.raises(CopyError):
            peer_copy.fetch(io.BytesIO(corrupted), behind.training)
    with pytest.raises(CopyError, match="bytes"):
        peer_copy.fetch(io.BytesIO(sent[:-100]), behind.training)
    return is_same and len(copy.tensors) == len(original.tensors)


def errors_of_wrong_tables(run: Any) -> list[str]:
    """The errors for tables that claim what this rank does not have."""
    grid = Grid.create(run.shape)
    trainer = Trainer(run, grid)
    name, shape = "model.model.norm.weight", [1 << 50]
    messages = []
    tensors: list[Any] = [
        {name: {"dtype": "F32", "whole": shape, "pieces": [shape]}},
        {"model.nowhere": {"dtype": "F32", "whole": [1], "pieces": [[1]]}},
        {name: {"dtype": "pickle", "whole": [16], "pieces": [[16]]}},
        [],
    ]
    for claimed in tensors:
        table = {"values": {}, "manager": {"step": 1, "batches_committed": 0}, "tensors": claimed}
        raw = json.dumps(table).encode()
        with pytest.raises(CopyError) as error:
            peer_copy.fetch(io.BytesIO(len(raw).to_bytes(8, "little") + raw), trainer.training)
        messages.append(str(error.value))
    with pytest.raises(CopyError) as error:
        peer_copy.fetch(io.BytesIO((1 << 60).to_bytes(8, "little")), trainer.training)
    return [*messages, str(error.value)]


def test_a_rank_copies_tensors_of_which_it_holds_nothing(pool: RankPool, tmp_path: Path) -> None:
    """With 6 rows over z=4, two a rank, the last rank holds none."""
    values = write_run(tmp_path, intermediate_size=6)
    run = on(values, (1, 4, 1, 1), schedule={"steps": 2, "warmup_steps": 1})
    assert pool.run(holds_nothing_of_a_tensor, 4, run) == [False, False, False, True]
    assert all(pool.run(copies, 4, run))


def holds_nothing_of_a_tensor(run: Any) -> bool:
    trainer = Trainer(run, Grid.create(run.shape))
    return not all(held.shards for held in state.capture(trainer.training).tensors.values())


@pytest.mark.parametrize(("shape", "optimizer"), [((1, 2, 1, 1), "adamw"), ((1, 1, 1, 2), "muon")])
def test_a_copy_equals_its_original(
    pool: RankPool, tmp_path: Path, shape: tuple[int, int, int, int], optimizer: str
) -> None:
    schedule = {"steps": 2, "warmup_steps": 1}
    run = on(write_run(tmp_path), shape, schedule=schedule, optimizer={"name": optimizer})
    assert all(pool.run(copies, 2, run))


def test_claims_of_a_peer_allocate_no_memory(pool: RankPool, tmp_path: Path) -> None:
    ((too_large, unknown, *_, too_long),) = pool.run(
        errors_of_wrong_tables, 1, on(write_run(tmp_path), (1, 1, 1, 1))
    )
    assert "model.norm.weight" in too_large
    assert "nowhere" in unknown
    assert str(1 << 60) in too_long


def without_torchft(run: Any) -> str:
    sys.modules["torchft"] = None  # type: ignore[assignment]
    try:
        with pytest.raises(ValueError, match="pip install") as error:
            Trainer(run, Grid.create(run.shape))
    finally:
        del sys.modules["torchft"]
    return str(error.value)


def test_without_torchft_the_error_says_what_to_install(pool: RankPool, tmp_path: Path) -> None:
    run = on(write_run(tmp_path), (2, 1, 1, 1), reliability={"torchft_lighthouse": HEAD})
    (message,) = pool.run(without_torchft, 1, run)
    assert "fourfold[torchft]" in message


@pytest.mark.parametrize(("replicas", "z"), [(1, 1), (2, 2), (3, 2), (4, 2)])
def test_every_rank_has_rows_of_its_own(replicas: int, z: int) -> None:
    """Of 8 sequences; with 2 replicas and z=2 they are those of the plain grid (2,2,1,1)."""
    taken = []
    for index in range(replicas):
        for z_index in range(z):
            rows = rank_rows(8, z, z_index, replicas, index)
            taken.append(list(range(rows.start, rows.stop)))
    assert sorted(row for rows in taken for row in rows) == list(range(8))
    assert all(taken)
    if (replicas, z) == (2, 2):
        assert taken == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("reliability", "more", "words"),
    [
        ({"torchft_lighthouse": HEAD, "replica": 2}, {}, r"replica=2 .* data=2"),
        ({"torchft_lighthouse": "head:29510"}, {}, "http://"),
        ({"torchft_lighthouse": HEAD}, {"checkpoints": {"resume": False}}, "resume"),
        ({"torchft_lighthouse": HEAD}, {"batch": {"tokens": 16}}, "too few for .* use 32"),
    ],
)
def test_invalid_configs_are_rejected(tmp_path: Path, reliability: Any, more: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        on(write_run(tmp_path), (2, 1, 1, 1), reliability=reliability, **more)
