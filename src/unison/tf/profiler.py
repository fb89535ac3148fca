"""`tf.profiler`: JAX's profiler, whose traces TensorBoard and Perfetto show."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax

from unison.profiling import Recording
from unison.tf.missing import names_missing_from, namespace
from unison.tf.text import text_of

__getattr__ = names_missing_from(__name__)


class ProfilerOptions(NamedTuple):
    """The level of detail. TF: `tf.profiler.experimental.ProfilerOptions`.

    JAX's profiler always records the activity of accelerators: `device_tracer_level` is ignored.
    """

    host_tracer_level: int = 2
    python_tracer_level: int = 0
    device_tracer_level: int = 1
    delay_ms: int | None = None


_recording: Recording | None = None


def _start(logdir: Any, options: ProfilerOptions | None = None) -> None:
    """Starts recording into a folder. TF: `tf.profiler.experimental.start`."""
    global _recording
    wanted = options or ProfilerOptions()
    recording = Recording(
        text_of(logdir),
        host_level=wanted.host_tracer_level,
        python_level=wanted.python_tracer_level,
    )
    recording.start()
    _recording = recording


def _stop(save: bool = True) -> None:
    """Stops recording; the trace is always written. TF: `tf.profiler.experimental.stop`."""
    global _recording
    recording, _recording = _recording, None
    if recording is None:
        raise RuntimeError("The profiler has not been started.")
    recording.stop()


@contextlib.contextmanager
def _profile(logdir: Any, options: ProfilerOptions | None = None) -> Iterator[None]:
    """Records a profile of the block. TF: `tf.profiler.experimental.Profile`."""
    _start(logdir, options)
    try:
        yield
    finally:
        _stop()


def _trace(name: str, **kwargs: Any) -> AbstractContextManager[Any]:
    """Names the block in the trace; with `step_num`, as a step of training.

    TF: `tf.profiler.experimental.Trace`.
    """
    if "step_num" in kwargs:
        return jax.profiler.StepTraceAnnotation(name, **kwargs)
    return jax.profiler.TraceAnnotation(name, **kwargs)


experimental = namespace(
    "unison.tf.profiler.experimental",
    Profile=_profile,
    ProfilerOptions=ProfilerOptions,
    Trace=_trace,
    start=_start,
    stop=_stop,
)
