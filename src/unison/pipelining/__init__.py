"""Pipeline parallelism: devices compute one stage each, on one micro-batch after the other."""

from unison.pipelining.packing import PACKED, pack_stages, unpack_stage
from unison.pipelining.schedules import SCHEDULES, STAGE_AXIS, bubble, check_schedule
from unison.pipelining.stages import pipeline, pipeline_loss

__all__ = [
    "PACKED",
    "SCHEDULES",
    "STAGE_AXIS",
    "bubble",
    "check_schedule",
    "pack_stages",
    "pipeline",
    "pipeline_loss",
    "unpack_stage",
]
