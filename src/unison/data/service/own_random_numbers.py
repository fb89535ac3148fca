"""The plan of one worker: its own random numbers."""

from __future__ import annotations

import copy

from unison.data.functions import ElementFunction
from unison.data.passes import Passes
from unison.data.plan import Plan

#: The bits of a pass's number: those of the pass in an iteration, and those of the iteration.
_PASS_BITS, _ITERATION_BITS = 20, 24


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
