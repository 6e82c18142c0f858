"""Estimates of single layouts."""

from fourfold.planner.cost.step import Estimate, Prices, estimate_with
from fourfold.planner.inputs.cluster import Cluster
from fourfold.planner.inputs.layout import FOURFOLD, Layout, Schedule
from fourfold.planner.inputs.workload import Workload


def estimate(
    workload: Workload,
    layout: Layout,
    cluster: Cluster,
    sequences: int,
    length: int,
    schedule: Schedule = FOURFOLD,
) -> Estimate:
    return estimate_with(Prices(workload, cluster, length, schedule), layout, sequences)
