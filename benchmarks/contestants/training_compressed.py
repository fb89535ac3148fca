"""Unison's loop with compressed gradients: a function for each compression."""

from __future__ import annotations

import functools

import unison.train
from benchmarks.contestants.training_keras import optimizer
from benchmarks.contestants.training_unison import custom_loop
from benchmarks.protocol import Contestant
from benchmarks.workloads import TrainingWork
from unison import compression


def _train(
    work: TrainingWork, compressed_by: compression.Compression | compression.LocalTraining
) -> Contestant:
    return custom_loop(work, lambda: unison.train.with_compression(optimizer(), compressed_by))


bfloat16 = functools.partial(_train, compressed_by=compression.bfloat16())
float16 = functools.partial(_train, compressed_by=compression.float16())
int8 = functools.partial(_train, compressed_by=compression.int8())
int4 = functools.partial(_train, compressed_by=compression.int4())
# Adam has a momentum of its own.
sign = functools.partial(_train, compressed_by=compression.sign(momentum=0))
topk = functools.partial(_train, compressed_by=compression.topk(momentum=0))
powersgd = functools.partial(_train, compressed_by=compression.powersgd())
local_sgd = functools.partial(_train, compressed_by=compression.local_sgd())
