"""The plan of one worker: its share under static sharding."""

from __future__ import annotations

from unison.data.distribution.sharding import divided_by_files, divided_by_hint, file_names_in
from unison.data.plan import Plan
from unison.data.service.configuration import ShardingPolicy
from unison.data.transformations.selection import Shard
from unison.errors import InvalidArgumentError, NotFoundError
from unison.runtime.agreement import Workers


class _Share(Workers):
    """One of several shares."""

    def __init__(self, num_workers: int, index: int):
        super().__init__()
        self.num_workers = num_workers
        self.index = index


def share_of(plan: Plan, policy: ShardingPolicy, count: int, index: int) -> Plan:
    """Returns the plan of one of `count` shares under a static policy.

    Raises:
        NotFoundError: `FILE`, and the elements do not come from files.
        InvalidArgumentError: `FILE`, and there are fewer files than workers.
    """
    share = _Share(count, index)
    if policy is ShardingPolicy.HINT:
        return divided_by_hint(plan, share)
    if policy is ShardingPolicy.DATA:
        return Shard(plan, count, index)
    try:
        divided = divided_by_files(plan, share)
    except NotFoundError:
        if policy is ShardingPolicy.FILE:
            raise
        return Shard(plan, count, index)
    numbers = [names.inputs[0].cardinality() for names in file_names_in(divided)]
    if all(number < 0 or number >= count for number in numbers):
        return divided
    if policy is ShardingPolicy.FILE_OR_DATA:
        return Shard(plan, count, index)
    raise InvalidArgumentError(
        message=f"ShardingPolicy.FILE needs at least as many files as workers ({count}). Received: "
        f"{min(numbers)} files. Use ShardingPolicy.DATA or FILE_OR_DATA, or more and smaller files."
    )
