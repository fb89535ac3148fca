"""What a step will take on machines that are not here: memory, arithmetic, communication."""

from unison.planning.collectives import Collective, collectives_of
from unison.planning.memory import DoesNotFitError, StepMemory
from unison.planning.step import (
    NothingToPlanError,
    StepPlan,
    plan_first_step,
    plan_fit,
    plan_run,
)

__all__ = [
    "Collective",
    "DoesNotFitError",
    "NothingToPlanError",
    "StepMemory",
    "StepPlan",
    "collectives_of",
    "plan_first_step",
    "plan_fit",
    "plan_run",
]
