"""The coordinates of TPU cores in the mesh of their slice, and their assignment to replicas."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from unison.runtime.tpu.slices import description_of
from unison.unsupported import UnsupportedMember

#: The axes of a slice's mesh: three of chips, and the cores of a chip.
RANK = 4


class Topology:
    """The cores of a TPU slice, by their coordinates.

    Args:
        mesh_shape: The slice's size along x, y and z, and the cores of a chip.
        device_coordinates: The coordinates of every core, in an array of shape (machines, cores of
            a machine, 4).

    TF: `tf.tpu.experimental.Topology`.

    Examples:
        >>> pair = Topology([2, 1, 1, 1], [[[0, 0, 0, 0], [1, 0, 0, 0]]])
        >>> pair.num_tasks, pair.num_tpus_per_task
        (1, 2)
        >>> pair.tpu_device_name_at_coordinates([1, 0, 0, 0])
        '/task:0/device:TPU:1'
    """

    serialized = UnsupportedMember("pickle it, or its mesh_shape and device_coordinates")

    def __init__(self, mesh_shape: Sequence[int], device_coordinates: Any):
        self.mesh_shape = np.array(mesh_shape, np.int32)
        self.device_coordinates = np.array(device_coordinates, np.int32)
        if self.mesh_shape.shape != (RANK,) or min(self.mesh_shape) < 1:
            raise ValueError(
                f"`mesh_shape` must be {RANK} positive numbers: the sizes along x, y, z and the "
                f"cores of a chip. Received: {mesh_shape!r}"
            )
        if self.device_coordinates.ndim != 3 or self.device_coordinates.shape[-1] != RANK:
            raise ValueError(
                f"`device_coordinates` must have the shape (machines, cores of a machine, {RANK}). "
                f"Received: an array of shape {self.device_coordinates.shape}"
            )
        self._tasks = {
            tuple(coordinates): (task, ordinal)
            for task, cores in enumerate(self.device_coordinates.tolist())
            for ordinal, coordinates in enumerate(cores)
        }

    @property
    def mesh_rank(self) -> int:
        return RANK

    @property
    def num_tasks(self) -> int:
        """The number of machines."""
        return len(self.device_coordinates)

    @property
    def num_tpus_per_task(self) -> int:
        """The number of cores of a machine."""
        return self.device_coordinates.shape[1]

    @property
    def missing_devices(self) -> np.ndarray:
        """The coordinates in the mesh at which there is no core."""
        every = itertools.product(*map(range, self.mesh_shape.tolist()))
        missing = [place for place in every if place not in self._tasks]
        return np.array(missing, np.int32).reshape(-1, RANK)

    def task_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Returns the machine of a core."""
        return self._at(device_coordinates)[0]

    def tpu_device_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Returns a core's index on its machine."""
        return self._at(device_coordinates)[1]

    def tpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """Returns the name of a core."""
        task, ordinal = self._at(device_coordinates)
        return f"{_job(job)}/task:{task}/device:TPU:{ordinal}"

    def cpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """Returns the name of the CPU of a core's machine."""
        return f"{_job(job)}/task:{self._at(device_coordinates)[0]}/device:CPU:0"

    def _at(self, coordinates: Sequence[int]) -> tuple[int, int]:
        place = tuple(int(coordinate) for coordinate in coordinates)
        if place not in self._tasks:
            raise ValueError(
                f"Expected the coordinates of a core in a mesh of {self.mesh_shape.tolist()}. "
                f"Received: {list(place)}"
            )
        return self._tasks[place]

    def __repr__(self) -> str:
        return f"Topology(mesh_shape={self.mesh_shape.tolist()}, {self.num_tasks} machines)"


def _job(job: str | None) -> str:
    return f"/job:{job}" if job else ""


class DeviceAssignment:
    """The assignment of cores to replicas; the cores of a replica divide its work.

    Args:
        topology: The topology of the cores.
        core_assignment: The coordinates of every replica's cores, in an array of shape (replicas,
            cores of a replica, 4).

    Raises:
        ValueError: The array has another shape, a core does not exist, or one occurs twice.

    TF: `tf.tpu.experimental.DeviceAssignment`.

    Examples:
        >>> cores = [[0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]]
        >>> square = Topology([2, 2, 1, 1], [cores])
        >>> pairs = DeviceAssignment.build(square, [1, 2, 1, 1], num_replicas=2)
        >>> pairs.num_replicas, pairs.num_cores_per_replica, pairs.tpu_device(1, 1)
        (2, 2, '/task:0/device:TPU:3')
    """

    def __init__(self, topology: Topology, core_assignment: Any):
        if not isinstance(topology, Topology):
            raise TypeError(
                "topology must be a Topology, as initialize_tpu_system() returns it. "
                f"Received: {topology!r}"
            )
        cores = np.array(core_assignment, np.int32)
        if cores.ndim != 3 or cores.shape[-1] != RANK:
            raise ValueError(
                f"`core_assignment` must have the shape (replicas, cores of a replica, {RANK}). "
                f"Received: an array of shape {cores.shape}"
            )
        places = [tuple(place) for place in cores.reshape(-1, RANK).tolist()]
        for place in places:
            topology.task_ordinal_at_coordinates(place)
        if twice := sorted({place for place in places if places.count(place) > 1}):
            raise ValueError(
                f"Expected every core once. Received: {twice} several times in `core_assignment`."
            )
        self.topology = topology
        self.core_assignment = cores

    @staticmethod
    def build(
        topology: Topology,
        computation_shape: Sequence[int] | None = None,
        computation_stride: Sequence[int] | None = None,
        num_replicas: int = 1,
    ) -> DeviceAssignment:
        """Returns an assignment in which every replica has a block of cores.

        Args:
            topology: The topology of the cores.
            computation_shape: The block's size along x, y, z and the cores of a chip. Default:
                one core.
            computation_stride: The distance between the cores of a block. Default: adjacent cores.
            num_replicas: The number of replicas.

        Raises:
            ValueError: So many blocks of this shape do not fit.
        """
        shape = _four_numbers("computation_shape", computation_shape)
        stride = _four_numbers("computation_stride", computation_stride)
        footprint = shape * stride
        if any(footprint > topology.mesh_shape):
            raise ValueError(
                f"computation footprint {footprint.tolist()} does not fit in TPU topology shape "
                f"{topology.mesh_shape.tolist()}"
            )
        blocks = topology.mesh_shape // footprint
        corners = itertools.product(
            *(range(count * stride[axis]) for axis, count in enumerate(blocks.tolist()))
        )
        fitting = int(np.prod(blocks * stride))
        if num_replicas > fitting:
            raise ValueError(
                f"requested {num_replicas} replicas but only {fitting} replicas with shape "
                f"{shape.tolist()} and computation_stride {stride.tolist()} fit in a TPU mesh of "
                f"shape {topology.mesh_shape.tolist()}"
            )
        offsets = np.array(list(np.ndindex(*shape))) * stride
        starts = [
            np.array(corner) // stride * footprint + np.array(corner) % stride
            for corner in itertools.islice(corners, num_replicas)
        ]
        return DeviceAssignment(topology, [start + offsets for start in starts])

    @property
    def num_replicas(self) -> int:
        return len(self.core_assignment)

    @property
    def num_cores_per_replica(self) -> int:
        return self.core_assignment.shape[1]

    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """Returns the coordinates of a replica's core."""
        return tuple(self.core_assignment[replica, logical_core].tolist())

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """Returns the index of a replica's core on its machine."""
        return self.topology.tpu_device_ordinal_at_coordinates(
            self.coordinates(replica, logical_core)
        )

    def tpu_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Returns the name of a replica's core."""
        return self.topology.tpu_device_name_at_coordinates(
            self.coordinates(replica, logical_core), job
        )

    def host_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Returns the name of the CPU of the machine of a replica's core."""
        return self.topology.cpu_device_name_at_coordinates(
            self.coordinates(replica, logical_core), job
        )

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """Returns the replicas whose core `logical_core` is on a machine.

        Raises:
            ValueError: There is no such replica.
        """
        task_of = self.topology.task_ordinal_at_coordinates
        there = [
            replica
            for replica in range(self.num_replicas)
            if task_of(self.coordinates(replica, logical_core)) == task_id
        ]
        if not there:
            raise ValueError(f"Can not find any replica in task: {task_id}")
        return there


def _four_numbers(name: str, given: Sequence[int] | None) -> np.ndarray:
    numbers = np.ones(RANK, np.int32) if given is None else np.array(given, np.int32)
    if numbers.shape != (RANK,) or min(numbers) < 1:
        raise ValueError(
            f"`{name}` must be {RANK} positive numbers, along x, y, z and the cores of a chip. "
            f"Received: {given!r}"
        )
    return numbers


def topology_of(devices: Sequence[jax.Device]) -> Topology:
    """Returns the topology of TPU devices, grouped by machine.

    Other devices, for which a TPU program is planned, are lined up along x.
    """
    tasks: dict[int, list[list[int]]] = {}
    for device in devices:
        tasks.setdefault(device.process_index, []).append(list(coordinates_of(device)))
    coordinates = [tasks[task] for task in sorted(tasks)]
    sizes = np.array([place for cores in coordinates for place in cores]).max(axis=0) + 1
    return Topology(sizes.tolist(), coordinates)


def coordinates_of(device: Any) -> tuple[int, int, int, int]:
    """Returns the coordinates of a TPU core in its slice: x, y, z and its index on the chip."""
    described = description_of(device)
    if described is not None and described.platform != "tpu":
        return (device.id, 0, 0, 0)
    x, y, z = device.coords
    return (x, y, z, device.core_on_chip)
