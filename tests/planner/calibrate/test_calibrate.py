"""Calibration: fits recover injected values, the file is a cluster, and a slower link shows in it."""

import dataclasses
import os
import textwrap
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks.cluster import Cluster as Network
from benchmarks.cluster import why_not
from fourfold.cli.main import main
from fourfold.planner.calibrate.calibrate import Sizes, calibrate
from fourfold.planner.calibrate.fit import collective_deviations, fit_links
from fourfold.planner.calibrate.probe import KINDS, positions, slow_downs
from fourfold.planner.cost.collective import collective_s
from fourfold.planner.inputs.cluster import LIBRARIES, Links, load, preset
from fourfold.planner.inputs.measured import CollectiveTimes, Measured
from fourfold.planner.show.calibration import as_file

needs_network = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
SIZES = (2.0**10, 2.0**14, 2.0**20, 2.0**22)


def series_of(cluster, world):
    """What the formulas say, as if it had been measured."""
    return [
        CollectiveTimes(
            kind, ranks, inner, SIZES, tuple(collective_s(kind, s, ranks, inner, cluster) for s in SIZES)
        )
        for kind in KINDS
        for ranks, inner in positions(world)
    ]


def injected(node_gbps=0.05):
    library = dataclasses.replace(
        LIBRARIES["gloo"],
        device_share=1.0,
        node_share=1.0,
        reduce_scatter_factor=1.0,
        base_us=300.0,
        hop_us=80.0,
        net_hop_us=150.0,
        small_base_us=300.0,
        small_hop_us=80.0,
        small_net_hop_us=150.0,
    )
    return dataclasses.replace(preset("dgx-h100"), links=Links(2, 1.0, node_gbps), library=library)


def test_links_that_follow_the_formulas_are_recovered():
    cluster = injected()
    links, library, parameters = fit_links(series_of(cluster, 8), 2, LIBRARIES["gloo"])
    assert links.device_gbps == pytest.approx(1.0, rel=0.02)
    assert links.node_gbps == pytest.approx(0.05, rel=0.02)
    found = [library.base_us, library.hop_us, library.net_hop_us]
    assert found == pytest.approx([300, 80, 150], rel=0.1)
    assert {p.name: p.value for p in parameters}["node_gbps"] == links.node_gbps
    fitted = dataclasses.replace(
        cluster, links=links, library=library, measured=Measured(collectives=tuple(series_of(cluster, 8)))
    )
    assert all(abs(d.error) < 0.1 for d in collective_deviations(fitted))


@pytest.mark.parametrize(
    ("devices_per_node", "unknown"),
    [(8, ["node_gbps", "net_hop_us"]), (1, ["device_gbps", "hop_us"]), (2, [])],
)
def test_a_link_that_nothing_was_sent_over_is_not_measured(devices_per_node, unknown):
    *_, parameters = fit_links(series_of(injected(), 8), devices_per_node, LIBRARIES["gloo"])
    assert [p.name for p in parameters if not p.is_measured] == unknown


@pytest.mark.parametrize("disturbed", range(len(SIZES)))
def test_a_disturbed_payload_of_one_kind_does_not_change_the_rate(disturbed):
    """A fiftieth of a second goes to something else, in each position."""
    series = [
        dataclasses.replace(
            times, seconds=tuple(s + 0.02 * (i == disturbed) for i, s in enumerate(times.seconds))
        )
        if times.kind == "all_gather"
        else times
        for times in series_of(injected(), 8)
    ]
    links, _, _ = fit_links(series, 2, LIBRARIES["gloo"])
    assert links.device_gbps == pytest.approx(1.0, rel=0.02)
    assert links.node_gbps == pytest.approx(0.05, rel=0.02)


def test_a_measurement_far_from_the_formulas_is_reported():
    cluster = injected()
    series = series_of(cluster, 8)
    series[0] = dataclasses.replace(series[0], seconds=tuple(3 * s for s in series[0].seconds))
    told = collective_deviations(dataclasses.replace(cluster, measured=Measured(collectives=tuple(series))))
    assert sum(abs(d.error) > 0.5 for d in told) == len(SIZES)


def test_slow_downs_of_what_outlasts_the_other():
    assert slow_downs(2.0, 1.0, 2.5, 1.5) == pytest.approx((1.5, 1.5))
    assert slow_downs(1.0, 1.0, 1.0, 1.0) == (1.0, 1.0)  # undisturbed
    assert slow_downs(1.0, 1.0, 2.0, 2.0) == (2.0, 2.0)  # as if one after the other


SMALL = Sizes((2**10, 2**16, 2**20), 2**16, (32, 128), 2**16)


def calibrate_rank(sizes):
    dist.destroy_process_group()  # calibration joins a world of its own
    result = calibrate("pool", budget_s=60, sizes=sizes)
    return None if result is None else as_file(result)


@pytest.mark.nightly
def test_a_calibrated_world_is_a_cluster_that_loads(pool, tmp_path):
    text, other = pool.run(calibrate_rank, 2, SMALL)
    assert other is None
    path = tmp_path / "mine.toml"
    path.write_text(text)
    cluster = load(path)
    assert cluster.links.devices_per_node == 2
    assert len(cluster.measured.collectives) == len(KINDS)  # one position
    for times in cluster.measured.collectives:
        assert times.seconds[-1] > 0
        assert times.seconds == tuple(sorted(times.seconds))
        reckoned = collective_s(times.kind, times.payload_bytes[1], 2, 1, cluster)
        assert reckoned == pytest.approx(times.seconds[1])
    assert len(cluster.measured.matmuls) == 8
    assert [(t.ranks, t.inner_ranks) for t in cluster.measured.together] == [(2, 1)]


@pytest.mark.nightly
@needs_network
def test_a_link_of_half_the_rate_is_found_to_be_one(tmp_path: Path):
    script = tmp_path / "rank.py"
    script.write_text(
        textwrap.dedent("""
            import os, sys
            from pathlib import Path
            from fourfold.planner.calibrate.calibrate import Sizes, calibrate
            from fourfold.planner.show.calibration import as_file
            sizes = Sizes((2**10, 2**18, 2**20), 2**16, (32,), 2**16)
            result = calibrate("net", budget_s=60, sizes=sizes)
            if result is not None:
                Path(sys.argv[1]).write_text(as_file(result))
            os._exit(0)
        """)
    )
    found = {}
    for mbit in (120, 60):
        out = tmp_path / f"{mbit}.toml"
        with Network(hosts=2, mbit=mbit) as network:
            assert network.run([str(script), str(out)], ranks_per_host=1, timeout_s=120) == 0
        found[mbit] = load(out).links.node_gbps * 8000
    assert found[120] == pytest.approx(120, rel=0.25)
    assert found[120] / found[60] == pytest.approx(2, rel=0.25)


def test_the_command_needs_ranks(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert main(["calibrate", "--out", "cluster.toml"]) == 2
    assert "torchrun" in capsys.readouterr().err
    assert not Path("cluster.toml").exists()


def test_one_rank_is_not_a_cluster(monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    with pytest.raises(ValueError, match="at least 2 ranks"):
        calibrate("one")
