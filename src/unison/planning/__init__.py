"""Plans of a step on devices that are not available: memory, arithmetic, communication, time."""

from unison.planning.calibration import Calibration, calibrate, read_calibration
from unison.planning.clusters import Cluster, cluster_named, cluster_of_slice
from unison.planning.collectives import Collective, collectives_of
from unison.planning.communication import all_reduce_seconds
from unison.planning.division import Division
from unison.planning.hardware import Device, Link, UnknownHardwareError
from unison.planning.memory import DoesNotFitError, StepMemory
from unison.planning.options import Choice, preferred
from unison.planning.scaling import Exchange, StepTime, Workload, scaling, step_time
from unison.planning.step import (
    NothingToPlanError,
    StepPlan,
    plan_first_step,
    plan_fit,
    plan_run,
    target,
)

__all__ = [
    "Calibration",
    "Choice",
    "Cluster",
    "Collective",
    "Device",
    "Division",
    "DoesNotFitError",
    "Exchange",
    "Link",
    "NothingToPlanError",
    "StepMemory",
    "StepPlan",
    "StepTime",
    "UnknownHardwareError",
    "Workload",
    "all_reduce_seconds",
    "calibrate",
    "cluster_named",
    "cluster_of_slice",
    "collectives_of",
    "plan_first_step",
    "plan_fit",
    "plan_run",
    "preferred",
    "read_calibration",
    "scaling",
    "step_time",
    "target",
]
