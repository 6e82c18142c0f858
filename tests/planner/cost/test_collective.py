"""Collectives: the ring's bytes, laws that hold for any of them, and what was measured."""

import dataclasses
import json
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.published import with_library
from fourfold.planner.cost.collective import collective_s, place
from fourfold.planner.inputs.cluster import Cluster, Library, preset

MEASURED = json.loads((Path(__file__).parent / "collectives.json").read_text())
RING_ALONE = Library(
    base_us=0.0, hop_us=0.0, net_hop_us=0.0, device_share=1.0, node_share=1.0, small_base_us=0.0, small_hop_us=0.0,
    small_net_hop_us=0.0, algorithms=("ring",),
)  # fmt: skip


def bare(devices_per_node: int = 1) -> Cluster:
    """Links and nothing else: 1 GB/s a node, no latency."""
    cluster = preset("dgx-a100")
    links = dataclasses.replace(
        cluster.links, devices_per_node=devices_per_node, device_gbps=1e6, node_gbps=1.0, measured_gbps=()
    )
    return dataclasses.replace(cluster, links=links, library=RING_ALONE)


@pytest.mark.parametrize(("kind", "passes"), [("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)])
@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_a_ring_without_latency_takes_the_bytes_of_the_table(kind, passes, ranks):
    # The table of the 4D algorithm: (G-1)/G of the tensor past every link, an all-reduce twice.
    seconds = collective_s(kind, 1e9, ranks, 1, bare())
    assert seconds == pytest.approx(passes * (ranks - 1) / ranks)


def test_groups_side_by_side_share_their_node():
    alone = collective_s("all_gather", 1e9, 16, 1, bare(4))  # four ranks in each node, one group
    beside = collective_s("all_gather", 1e9, 16, 4, bare(4))  # one rank in each node, four groups
    assert beside == pytest.approx(4 * alone)
    assert collective_s("all_gather", 1e9, 16, 64, bare(4)) == pytest.approx(
        beside
    )  # a node has no more than four


@pytest.mark.parametrize(
    ("ranks", "inner", "per_node", "nodes"),
    [(8, 1, 8, 1), (16, 1, 8, 2), (4, 2, 4, 1), (8, 4, 2, 4), (8, 16, 1, 8)],
)
def test_where_the_ranks_of_a_group_are(ranks, inner, per_node, nodes):
    assert place(ranks, inner, 8) == (ranks, per_node, nodes)


kinds = st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"])
names = st.sampled_from(["dgx-a100", "dgx-h100", "frontier", "perlmutter-40g", "alps-gh200", "gb200-nvl72"])
powers = st.integers(0, 10).map(lambda e: 2**e)


@given(kinds, names, st.floats(0, 1e10), st.floats(1, 10), powers, powers)
def test_more_bytes_never_take_less(kind, name, payload, factor, ranks, inner):
    cluster = preset(name)
    assert collective_s(kind, payload, ranks, inner, cluster) <= collective_s(
        kind, payload * factor, ranks, inner, cluster
    ) * (1 + 1e-12)


@given(names, st.floats(1e3, 1e10), powers, powers)
def test_an_all_reduce_is_no_longer_than_its_two_halves(name, payload, ranks, inner):
    cluster = preset(name)
    halves = [collective_s(kind, payload, ranks, inner, cluster) for kind in ("reduce_scatter", "all_gather")]
    assert collective_s("all_reduce", payload, ranks, inner, cluster) <= sum(halves) * (1 + 1e-12)


@given(kinds, names, st.floats(1e3, 1e10), powers, powers)
def test_another_algorithm_never_makes_it_longer(kind, name, payload, ranks, inner):
    cluster = preset(name)
    more = with_library(cluster, algorithms=("ring", "tree", "hierarchical"))
    ring = with_library(cluster, algorithms=("ring",))
    assert collective_s(kind, payload, ranks, inner, more) <= collective_s(kind, payload, ranks, inner, ring)


def test_a_hierarchical_library_wins_where_rings_are_long():
    # PCCL against RCCL on 2,048 GCDs: many times faster for messages of megabytes.
    frontier = preset("frontier")
    figures = Library("pccl", algorithms=("ring", "hierarchical"), node_share=frontier.library.node_share)
    pccl = dataclasses.replace(frontier, library=figures)
    ratio = collective_s("all_gather", 2**24, 2048, 1, frontier) / collective_s(
        "all_gather", 2**24, 2048, 1, pccl
    )
    assert ratio > 5


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="0 ranks"):
        collective_s("all_gather", 1e6, 0, 1, preset("dgx-a100"))


# -- against measurements ---------------------------------------------------------------------------------------------
# `Library.base_us` was fitted on the even rows of vTrain's tables; all else here was not looked at for any figure, but
# NCCL's latencies and 0.967 of the network, which are those of 16, 64, 256 and 1,024 ranks in SimAI's table.


def errors_of(points) -> list[float]:
    return [abs(predicted / measured - 1) for predicted, measured in points]


def test_nvlink_all_reduces_held_out():
    cluster = preset("dgx-a100")
    points = []
    for ranks in (2, 4, 8):
        for i, (size, ns) in enumerate(MEASURED[f"a100_nvlink_ar_{ranks}"]["rows"].items()):
            if i % 2:
                points.append((collective_s("all_reduce", int(size), ranks, 1, cluster), ns * 1e-9))
    assert statistics.median(errors_of(points)) < 0.06
    assert max(errors_of(points)) < 0.20


def test_rings_over_many_nodes_held_out():
    table = MEASURED["simai_nic_ratio"]
    node_gbps = table["our_fit"]["assumed_node_bw_gbps"]
    cluster = preset("dgx-h100")
    cluster = dataclasses.replace(cluster, links=dataclasses.replace(cluster.links, node_gbps=node_gbps))
    points = []
    for size, ratios in table["rows"].items():
        for ranks, ratio in zip(table["ranks"], ratios, strict=True):
            if ranks in (32, 128, 512):
                measured_s = int(size) * (ranks - 1) / ranks / (ratio * node_gbps * 1e9)
                points.append((collective_s("all_gather", int(size), ranks, 1, cluster), measured_s))
    assert statistics.median(errors_of(points)) < 0.10
    assert max(errors_of(points)) < 0.35


def test_all_reduces_between_two_nodes_of_alps_held_out():
    # Nothing is fitted on these: large messages have the hops of Perlmutter, the same network, small ones NCCL's own.
    rows = MEASURED["alps_gh200_2x4_allreduce_us"]["rows"]
    cluster = preset("alps-gh200")
    points = [(collective_s("all_reduce", int(s), 8, 1, cluster), us * 1e-6) for s, us in rows.items()]
    assert max(errors_of(points[-2:])) < 0.20  # from 64 MiB on
    assert (
        max(errors_of(points)) < 0.40
    )  # between 16 KiB and 16 MiB the model says too little, by up to a third


@pytest.mark.parametrize(
    ("name", "node_share", "tables", "median", "most"),
    [
        (
            "frontier",
            0.77,  # the most that was seen in these tables; the preset has 0.4, which AxoNN's authors reckoned with
            {
                "all_gather": "frontier_rccl_all_gather_ms",
                "reduce_scatter": "frontier_rccl_reduce_scatter_ms",
            },
            0.15,
            0.90,
        ),
        ("perlmutter-40g", 0.66, {"all_gather": "perlmutter_nccl_all_gather_ms"}, 0.12, 0.35),
    ],
)
def test_long_rings_on_slingshot_held_out(name, node_share, tables, median, most):
    """The hops of the preset are fitted on 4, 16, 64, 256 and 1,024 MiB; the sizes between are held out.

    With NCCL's own constants the median error was 59 % on Frontier and 34 % on Perlmutter.
    """
    cluster = with_library(preset(name), node_share=node_share)
    points = []
    for kind, table in tables.items():
        for ranks, sizes in MEASURED[table]["rows"].items():
            for mib, ms in sizes.items():
                if mib in ("2", "8", "32", "128", "512"):
                    points.append((collective_s(kind, int(mib) * 2**20, int(ranks), 1, cluster), ms * 1e-3))
    assert statistics.median(errors_of(points)) < median
    assert max(errors_of(points)) < most


def hopping(hop_us: float, algorithm: str) -> Cluster:
    """A DGX H100 under NCCL's own constants for Simple, one algorithm at a time, small messages not treated apart."""
    return with_library(
        preset("dgx-h100"), base_us=8.4, hop_us=hop_us, net_hop_us=14.0, node_share=0.96, in_switch_gain=1.0, algorithms=(algorithm,),
        small_base_us=8.4, small_hop_us=hop_us, small_net_hop_us=14.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("table", "kind", "algorithm", "hop_us"),
    [
        ("h100_nccl2275_agrs_ring", "all_gather", "ring", 3.4),
        ("h100_nccl2275_agrs_ring", "reduce_scatter", "ring", 3.4),
        ("h100_nccl2275_ar_ring", "all_reduce", "ring", 3.4),
        ("h100_nccl2275_ar_tree", "all_reduce", "tree", 4.0),
    ],
)
def test_latencies_are_those_of_nccls_own_tuning(table, kind, algorithm, hop_us):
    for key, protocols in MEASURED[table]["table"].items():
        nodes, per_node = map(int, key.split(","))
        expected_us = protocols[2][0]
        found_s = collective_s(kind, 0, nodes * per_node, 8 // per_node, hopping(hop_us, algorithm))
        assert found_s * 1e6 == pytest.approx(expected_us, abs=0.06), key


def test_bandwidths_by_stride_are_those_of_nccls_own_tuning():
    for key, protocols in MEASURED["h100_nccl2275_agrs_ring"]["table"].items():
        nodes, per_node = map(int, key.split(","))
        cluster = with_library(hopping(0.0, "ring"), base_us=0.0, net_hop_us=0.0, device_share=1.0)
        seconds = collective_s("all_gather", 1e12, nodes * per_node, 8 // per_node, cluster)
        assert 1e12 / seconds / 1e9 == pytest.approx(protocols[2][1], rel=0.01), key


def test_the_form_of_the_cost_holds_on_another_vendors_devices():
    # A latency and a bandwidth from the smallest and the largest message; the ten sizes between are held out.
    points = []
    for ranks in (2, 4, 8, 16):
        for kind, name in (
            ("all_gather", "all gather"),
            ("all_reduce", "all reduce"),
            ("reduce_scatter", "reduce scatter"),
        ):
            sizes_mb, seconds = MEASURED[f"mi200_{ranks}"]["rows"][name]
            passes = 2 if kind == "all_reduce" else 1
            moved_gb = passes * (ranks - 1) / ranks * (sizes_mb[-1] - sizes_mb[0]) * 1e-3
            gbps = moved_gb / (seconds[-1] - seconds[0])
            base_us = 1e6 * (seconds[0] - passes * (ranks - 1) / ranks * sizes_mb[0] * 1e-3 / gbps)
            cluster = with_library(
                preset("frontier"),
                base_us=base_us,
                hop_us=0.0,
                small_base_us=base_us,
                small_hop_us=0.0,
                algorithms=("ring",),
            )
            links = dataclasses.replace(cluster.links, devices_per_node=16, measured_gbps=((1, ranks, gbps),))
            cluster = dataclasses.replace(cluster, links=links)
            for size_mb, measured_s in list(zip(sizes_mb, seconds, strict=True))[1:-1]:
                points.append((collective_s(kind, size_mb * 1e6, ranks, 1, cluster), measured_s))
    errors = errors_of(points)
    assert statistics.median(errors) < 0.05
    assert sum(e > 0.25 for e in errors) < 0.1 * len(errors)
