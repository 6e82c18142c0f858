"""The nodes and ranks of a job, checked against the grid before the job waits in a queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fourfold.config.schema import GridSection


@dataclass(frozen=True)
class World:
    """The ranks of a job. Without GPUs they run on CPUs."""

    nodes: int
    ranks_per_node: int
    gpus_per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def world_of(
    grid: GridSection, nodes: int, *, ranks_per_node: int | None = None, gpus_per_node: int | None = None
) -> World:
    """The world of a grid on N nodes; raises if the sizes do not match.

    By default a node has an equal share of the grid, and a GPU for each rank. Without GPUs, ranks run on CPUs.

    Example:
        >>> world_of(GridSection(data=2, z=4), nodes=4)
        World(nodes=4, ranks_per_node=2, gpus_per_node=2)
        >>> world_of(GridSection(data=2, z=4), nodes=4, gpus_per_node=4)
        Traceback (most recent call last):
        ValueError: the grid data=2 z=4 y=1 x=1 has 8 ranks, but 4 nodes of 4 ranks have 16; use --nodes 2 or --set grid.z=8
    """
    size = grid.size
    if ranks_per_node is None and gpus_per_node is None:
        ranks_per_node = gpus_per_node = _share(grid, size, nodes)
    elif ranks_per_node is None:
        ranks_per_node = gpus_per_node
    assert ranks_per_node is not None
    if gpus_per_node is not None and gpus_per_node < ranks_per_node:
        raise ValueError(
            f"{ranks_per_node} ranks per node need a GPU each, but a node has {gpus_per_node}; "
            f"use --ranks-per-node {gpus_per_node}, or leave out --gpus-per-node for ranks on CPUs"
        )
    world = World(nodes, ranks_per_node, gpus_per_node or 0)
    if not grid.auto and world.ranks != size:
        raise ValueError(
            f"the grid {_axes(grid)} has {size} ranks, but {nodes} nodes of {ranks_per_node} ranks have "
            f"{world.ranks}; use {_remedy(grid, size, world)}"
        )
    return world


def train_command(run: Path, changes: Sequence[str]) -> list[str]:
    """The command of each rank, as torchrun's arguments."""
    return ["-m", "fourfold", "train", str(run), *(f"--set={change}" for change in changes)]


def _share(grid: GridSection, size: int, nodes: int) -> int:
    if grid.auto:
        raise ValueError(
            f"the run config sets no grid, so the number of ranks on {nodes} nodes is not known; give --gpus-per-node (a rank on "
            "each), or --ranks-per-node for ranks on CPUs"
        )
    if size % nodes:
        fitting = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        raise ValueError(
            f"the grid {_axes(grid)} has {size} ranks, which do not divide over {nodes} nodes; "
            f"use --nodes {fitting}, or another grid"
        )
    return size // nodes


def _remedy(grid: GridSection, size: int, world: World) -> str:
    remedies = []
    if size % world.ranks_per_node == 0:
        remedies.append(f"--nodes {size // world.ranks_per_node}")
    rest = grid.data * grid.y * grid.x
    if world.ranks % rest == 0:  # z, because it needs the least memory
        remedies.append(f"--set grid.z={world.ranks // rest}")
    return " or ".join(remedies) or f"a grid of {world.ranks} ranks"


def _axes(grid: GridSection) -> str:
    return f"data={grid.data} z={grid.z} y={grid.y} x={grid.x}"
