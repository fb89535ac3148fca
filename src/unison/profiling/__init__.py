"""Profiles of a step: JAX's profiler, and one trace of all workers, on one clock."""

from unison.profiling.clocks import Clock
from unison.profiling.merging import merge
from unison.profiling.recording import Recording
from unison.profiling.tracing import trace

__all__ = ["Clock", "Recording", "merge", "trace"]
