"""The plan of one worker: its share under static sharding, and its own random numbers."""

from __future__ import annotations

import copy

from unison.data.distribution.sharding import divided_by_files, divided_by_hint, file_names_in
from unison.data.functions import ElementFunction
from unison.data.passes import Passes
from unison.data.plan import Plan
from unison.data.service.configuration import ShardingPolicy
from unison.data.transformations.selection import Shard
from unison.errors import InvalidArgumentError, NotFoundError
from unison.runtime.agreement import Workers

#: The bits of a pass's number: those of the pass in an iteration, and those of the iteration.
_PASS_BITS, _ITERATION_BITS = 20, 24


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


def with_random_numbers_of(plan: Plan, iteration: int, worker: int) -> Plan:
    """Returns the plan with random numbers of its own: other orders, other keys of elements.

    What repeats itself in every pass (`reshuffle_each_iteration=False`) is the same everywhere.

    Args:
        plan: The plan.
        iteration: The number of the job's iteration.
        worker: The number of the worker; 0 for all where they must agree on the order.
    """
    begun = ((worker << _ITERATION_BITS) + iteration) << _PASS_BITS

    def rewrite(each: Plan) -> Plan:
        inputs = [rewrite(source) for source in each.inputs]
        is_same = all(new is old for new, old in zip(inputs, each.inputs, strict=True))
        own = {name: value for name, value in vars(each).items() if isinstance(value, Passes)}
        function = getattr(each, "function", None)
        if isinstance(function, ElementFunction):
            function.begin_passes_at(begun)
        if is_same and not own:
            return each
        made = copy.copy(each) if is_same else each.with_inputs(inputs)
        vars(made).update({name: Passes(begun) for name in own})
        return made

    return rewrite(plan)
