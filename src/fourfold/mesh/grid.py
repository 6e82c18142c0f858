"""The grid: four named axes (data, z, y, x) over one DeviceMesh, x innermost."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# There is no public call that sets the timeout of an existing group (seen in torch 2.13.0).
from torch.distributed.distributed_c10d import _set_pg_timeout

from fourfold.mesh.axes import AXES, SEQUENCE, Z_AND_X, Axis, divisors, factorisations
from fourfold.mesh.collectives import Collectives
from fourfold.mesh.rendezvous import local_device, start_process_group


@dataclass(frozen=True)
class Grid:
    """The ranks of a run, arranged as data x z x y x x.

    Rank ``r = ((data * Gz + z) * Gy + y) * Gx + x``: neighbours along x have consecutive rank numbers, so that the
    axis with the most traffic stays inside a node.
    """

    data: int
    z: int
    y: int
    x: int
    mesh: DeviceMesh
    device: torch.device
    collectives: Collectives = field(repr=False)
    # The device type that decisions are made for: that of ``device``, but in a dry run that of the cluster.
    target: str
    # How many neighbours along z share sequences, each with a part of their tokens.
    sequence_ranks: int = 1

    @staticmethod
    def create(
        shape: tuple[int, int, int, int],
        *,
        sequence_ranks: int = 1,
        device_type: str | None = None,
        timeout_s: float = 600.0,
    ) -> Grid:
        """Arrange the running ranks as ``shape = (data, z, y, x)``.

        Works under torchrun and under Slurm's ``srun``. Starts ``torch.distributed`` if it is not initialized, with NCCL
        for CUDA devices and Gloo for CPUs. ``timeout_s`` is set on the group of each axis, because the groups of a mesh
        do not inherit the timeout that was given to ``init_process_group``.

        ``sequence_ranks`` neighbours along z share sequences (context parallelism): they read the same rows of the batch, and
        `cut_sequences` gives each its tokens.

        Example:
            >>> grid = Grid.create((1, 1, 1, 1))  # under torchrun: data * z * y * x = the number of ranks
            >>> print(grid)
            (data=1, z=1, y=1, x=1)
        """
        sizes = _check_sizes(shape)
        _check_sequence_ranks(sizes, sequence_ranks)
        device = local_device(device_type)
        if not dist.is_initialized():
            start_process_group(device, timeout_s)
        _check_world(sizes, dist.get_world_size())
        grid = _over(_mesh(device.type, sizes), device, device.type, sequence_ranks)
        grid.set_timeout(timeout_s)
        return grid

    @staticmethod
    def from_mesh(
        mesh: DeviceMesh, device: torch.device, *, target: str | None = None, sequence_ranks: int = 1
    ) -> Grid:
        """A grid over an existing mesh with the axes (data, z, y, x)."""
        if mesh.mesh_dim_names != AXES:
            raise ValueError(
                f"a grid needs a mesh with the axes {AXES}, this one has {mesh.mesh_dim_names}; "
                "pass mesh_dim_names=fourfold.mesh.axes.AXES to init_device_mesh, or use Grid.create"
            )
        _check_sequence_ranks((mesh.shape[0], mesh.shape[1], mesh.shape[2], mesh.shape[3]), sequence_ranks)
        return _over(mesh, device, target or device.type, sequence_ranks)

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout of the collectives of every axis, from now on."""
        self.collectives.timeout_s = seconds
        for axis in (*AXES, SEQUENCE, Z_AND_X):
            if self.collectives.has(axis):
                _set_pg_timeout(timedelta(seconds=seconds), self.collectives.group(axis))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.data, self.z, self.y, self.x)

    def size(self, axis: Axis | None) -> int:
        """The number of ranks along an axis; 1 if the axis is None."""
        if axis == SEQUENCE:
            return self.sequence_ranks
        if axis == Z_AND_X:
            return self.z * self.x
        return 1 if axis is None else self.shape[AXES.index(axis)]

    def coordinate(self, axis: Axis | None) -> int:
        """This rank's coordinate along an axis; 0 if the axis is None."""
        # Unlike `get_local_rank`, this is known without process groups: a dry run's are gone when its report is printed.
        if axis == SEQUENCE:
            return self.coordinate("z") % self.sequence_ranks
        if axis == Z_AND_X:
            return self.coordinate("z") * self.x + self.coordinate("x")
        place = self.mesh.get_coordinate()
        return 0 if axis is None or place is None else place[AXES.index(axis)]

    # -- the batch: split over data and z, the same on all x and y ranks ------------------------------------------

    @property
    def token_ranks(self) -> int:
        """The number of parts that the tokens of the global batch are split into."""
        return self.data * self.z

    @property
    def token_rank(self) -> int:
        """The index of the part of the tokens that this rank computes; x and y neighbours have the same part."""
        return self.coordinate("data") * self.z + self.coordinate("z")

    @property
    def batch_ranks(self) -> int:
        """The number of parts that the rows of the global batch are split into."""
        return self.token_ranks // self.sequence_ranks

    @property
    def batch_rank(self) -> int:
        """The index of the rows that this rank reads; x and y neighbours, and ranks that share sequences, read the same rows."""
        return self.token_rank // self.sequence_ranks

    def local_rows(self, global_batch: int) -> slice:
        """The rows of a global batch that this rank trains on.

        Example:
            >>> ids = ids[grid.local_rows(len(ids))]
        """
        if global_batch < 1 or global_batch % self.batch_ranks:
            share = self.sequence_ranks
            parts = (
                f"data*z = {self.data}*{self.z}"
                if share == 1
                else f"data*z/sequence_ranks = {self.data}*{self.z}/{share}"
            )
            way_out = "a grid with a smaller data*z" if share == 1 else "more sequence_ranks"
            raise ValueError(
                f"a global batch of {global_batch} sequences does not divide over {parts} = "
                f"{self.batch_ranks}; use a multiple of {self.batch_ranks}, or {way_out}"
            )
        rows = global_batch // self.batch_ranks
        return slice(self.batch_rank * rows, (self.batch_rank + 1) * rows)

    def __str__(self) -> str:
        return f"(data={self.data}, z={self.z}, y={self.y}, x={self.x})"


def _check_sizes(shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    if len(shape) != 4:
        raise ValueError(
            f"a grid has the 4 axes (data, z, y, x), got {len(shape)} sizes: {tuple(shape)}; "
            "use 1 for an axis that should not be sharded"
        )
    for axis, size in zip(AXES, shape, strict=True):
        if not isinstance(size, int) or size < 1:
            raise ValueError(
                f"axis {axis} of grid {tuple(shape)} has size {size!r}; use a whole number of at least 1"
            )
    return shape


def _check_world(sizes: tuple[int, int, int, int], world: int) -> None:
    data, z, y, x = sizes
    ranks = data * z * y * x
    if ranks == world:
        return
    nearest = min(factorisations(world), key=lambda f: sum(abs(a - b) for a, b in zip(f, sizes, strict=True)))
    raise ValueError(
        f"grid data={data} * z={z} * y={y} * x={x} needs {ranks} ranks, but {world} are running; "
        f"start {ranks} ranks, or use a grid of {world} such as {nearest}"
    )


def _check_sequence_ranks(sizes: tuple[int, int, int, int], share: int) -> None:
    z = sizes[1]
    if not isinstance(share, int) or share < 1 or z % share:
        fit = ", ".join(map(str, divisors(z)))
        raise ValueError(
            f"sequence_ranks={share!r} does not divide z={z}: neighbours along z share sequences; use one of {fit}"
        )


def _over(mesh: DeviceMesh, device: torch.device, target: str, sequence_ranks: int) -> Grid:
    data, z, y, x = mesh.shape
    group = _sequence_group(mesh, sequence_ranks)
    return Grid(data, z, y, x, mesh, device, Collectives(mesh, target, group), target, sequence_ranks)


def _sequence_group(mesh: DeviceMesh, ranks: int) -> dist.ProcessGroup | None:
    """The group of this rank's neighbours along z that share its sequences. All ranks of the mesh call it."""
    if ranks == 1:
        return None
    if ranks == mesh.size(AXES.index("z")):
        return mesh.get_group("z")
    places = mesh.mesh.movedim(AXES.index("z"), -1).reshape(-1, ranks)
    return _group(mesh, SEQUENCE, places.tolist())


def join_z_and_x(grid: Grid) -> None:
    """Make the group of this rank's neighbours along z and x together, the axis "zx", if both have several. All ranks call it."""
    if min(grid.z, grid.x) == 1 or grid.collectives.has(Z_AND_X):
        return
    places = grid.mesh.mesh.movedim(AXES.index("z"), -2).reshape(-1, grid.z * grid.x)
    grid.collectives.join(Z_AND_X, _group(grid.mesh, Z_AND_X, places.tolist()))
    if grid.collectives.timeout_s is not None:
        grid.set_timeout(grid.collectives.timeout_s)


_groups: dict[tuple[int, Axis, int], tuple[DeviceMesh, dist.ProcessGroup]] = {}


def _group(mesh: DeviceMesh, axis: Axis, places: list[list[int]]) -> dist.ProcessGroup:
    """This rank's of groups that ``places`` list, the same at each call: a mesh is that of several grids."""
    key = (id(mesh), axis, len(places[0]))
    known = _groups.get(key)
    if known is None or known[0] is not mesh:
        group, _ = dist.new_subgroups_by_enumeration(places)
        assert group is not None
        known = _groups[key] = (mesh, group)
    return known[1]


_meshes: dict[tuple[str, tuple[int, ...]], tuple[object, DeviceMesh]] = {}


def _mesh(device_type: str, sizes: tuple[int, int, int, int]) -> DeviceMesh:
    """The one mesh of these sizes in this world.

    DTensor's caches treat equal meshes as the same object, and FSDP2 requires the identical object. So a second grid of
    the same shape shares the mesh and the process groups of the first.
    """
    world, mesh = _meshes.get((device_type, sizes), (None, None))
    if mesh is None or world is not dist.group.WORLD:
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
        _meshes[device_type, sizes] = (dist.group.WORLD, mesh)
    return mesh
