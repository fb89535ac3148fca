"""The regions of a step: what profiles call the parts of a program."""

from __future__ import annotations

import collections
import re
from collections.abc import Collection, Mapping, Sequence

import jax

FORWARD = "forward"
BACKWARD = "backward"
AGGREGATE = "aggregate"
UPDATE = "update"

#: In the order of a step.
REGIONS = (FORWARD, BACKWARD, AGGREGATE, UPDATE)

#: An instruction of a compiled program as text, with the scopes in which it was traced.
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?op_name=\"([^\"]*)\"", re.MULTILINE)


def region_of(scopes: str) -> str | None:
    """Returns the region of an operation; None for one outside all of them.

    Aggregation inside an optimizer's update counts as aggregation. JAX itself marks the operations
    of the backward pass.

    Args:
        scopes: The names of the scopes in which it was traced, as JAX writes them.

    Examples:
        >>> region_of("jit(step)/update/aggregate/psum"), region_of("jit(step)/update/mul")
        ('aggregate', 'update')
        >>> region_of("jit(step)/transpose(jvp(forward))/dot"), region_of("jit(step)/jvp(f)/dot")
        ('backward', 'forward')
        >>> region_of("jit(step)/jvp(forward)/transpose")  # the operation
        'forward'
    """
    names = set(re.split(r"[/()]", scopes))
    for region in (AGGREGATE, UPDATE):
        if region in names:
            return region
    if "transpose(" in scopes:  # the transformation
        return BACKWARD
    return FORWARD if names & {FORWARD, "jvp"} else None


class Programs:
    """The compiled programs of this process, and the regions of their operations.

    Args:
        devices: Where the programs run.
    """

    def __init__(self, devices: Sequence[jax.Device]):
        #: For each name, which several programs may share: their regions by operation.
        self._of_name: dict[str, list[dict[str, str | None]]] = collections.defaultdict(list)
        for client in {id(device.client): device.client for device in devices}.values():
            for executable in client.live_executables():
                for module in executable.hlo_modules():
                    scopes = _INSTRUCTION.findall(module.to_string())
                    regions = {operation: region_of(of_it) for operation, of_it in scopes}
                    self._of_name[module.name].append(regions)

    def regions(self, name: str, operations: Collection[str]) -> Mapping[str, str | None]:
        """Returns the regions of the program that contains most of `operations`.

        Args:
            name: The program's name.
            operations: Names of operations that it has executed.
        """
        return max(
            self._of_name.get(name, [{}]),
            key=lambda regions: sum(operation in regions for operation in operations),
        )
