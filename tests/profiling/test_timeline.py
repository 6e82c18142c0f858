"""A trace contains every collective with axis, module and bytes, every wait, and the operators, on one clock."""

import json
from pathlib import Path
from typing import Any

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid
from tests.models import batch, build

SHAPE = (1, 2, 1, 2)


def trace_a_step(path: str) -> tuple[int, float, int]:
    grid, model = Grid.create(SHAPE), build("llama")
    ff.parallelize(model, grid, weights="streamed", overlap=ff.Overlap(bundle_bytes=1024))
    ids, labels = (t[grid.local_rows(4)] for t in batch(4))
    model(input_ids=ids, labels=labels).loss.backward()
    with grid.collectives.counting() as entries, ff.timeline(path, grid):
        model(input_ids=ids, labels=labels).loss.backward()
    calls = sum(e.calls for e in entries)
    return calls, sum(e.exposed_s for e in entries), sum(e.payload_bytes for e in entries)


def load(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["traceEvents"]


def test_every_collective_and_every_wait_is_in_the_trace(pool: RankPool, tmp_path: Path) -> None:
    totals = pool.run(trace_a_step, 4, str(tmp_path / "rank{rank}.json"))
    assert len(list(tmp_path.iterdir())) == 4
    for rank, (calls, exposed_s, payload_bytes) in enumerate(totals):
        events = load(tmp_path / f"rank{rank}.json")
        starts = [e for e in events if e.get("cat") == "collective" and e["ph"] == "b"]
        ends = {e["id"]: e for e in events if e.get("cat") == "collective" and e["ph"] == "e"}
        waits = [e for e in events if e.get("cat") == "wait"]
        assert len(starts) == len(ends) == len(waits) == calls
        assert sum(e["args"]["bytes"] for e in starts) == payload_bytes
        # Waits are rounded to a nanosecond.
        assert abs(sum(e["dur"] for e in waits) / 1e6 - exposed_s) < 1e-6
        assert all(e["ts"] <= ends[e["id"]]["ts"] for e in starts)
        names = {e["name"] for e in starts}
        assert "z all_gather model.layers.1.mlp.down_proj.weight" in names
        assert "x all_gather model.layers.0.self_attn.q_proj+k_proj+v_proj" in names
        assert "z reduce_scatter lm_head.weight" in names
        # The profiler's operators are on the same clock: the first and the last of them surround the waits.
        operators = [e for e in events if e.get("cat") == "cpu_op"]
        assert min(e["ts"] for e in operators) < min(e["ts"] for e in waits)
        assert max(e["ts"] + e["dur"] for e in operators) > max(e["ts"] for e in waits)


def test_only_rank_0_writes_unless_the_path_contains_the_rank(pool: RankPool, tmp_path: Path) -> None:
    pool.run(trace_a_step, 4, str(tmp_path / "step.json"))
    assert [p.name for p in tmp_path.iterdir()] == ["step.json"]
