"""`tf.summary`: summaries for TensorBoard, written by the package tensorboardX.

In a replica program only the first replica writes. A compiled program writes when it runs, to the
writer that was the default when it was traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from unison.lifting import current_lift
from unison.profiling import Recording
from unison.profiling.events import event_writer
from unison.runtime.placement import REPLICA_AXIS
from unison.tf.missing import names_missing_from, namespace
from unison.tf.tensors import convert_to_tensor, is_variable
from unison.tf.text import StringTensor, text_of
from unison.thread_local import ThreadLocal

__getattr__ = names_missing_from(__name__)

_writer: ThreadLocal[SummaryWriter | None] = ThreadLocal(None)
_condition: ThreadLocal[Any] = ThreadLocal(True)
_recording: ThreadLocal[Recording | None] = ThreadLocal(None)
_step: Any = None


class SummaryWriter:
    """Writes into one folder; from `create_file_writer`.

    TF: `tf.summary.SummaryWriter`.
    """

    def __init__(self, events: Any):
        self._events = events

    @contextlib.contextmanager
    def as_default(self, step: Any = None) -> Iterator[SummaryWriter]:
        """Inside, summaries go to this writer, by default for this step."""
        before, step_before = _writer.value, experimental.get_step()
        self.set_as_default(step)
        try:
            yield self
        finally:
            self.flush()
            _writer.value = before
            _set_step(step_before)

    def set_as_default(self, step: Any = None) -> None:
        """Lets the thread's summaries go to this writer from now on."""
        _writer.value = self
        if step is not None:
            _set_step(step)

    def flush(self) -> None:
        """Puts everything on the disk."""
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        if self._events is not None:
            self._events.close()

    def init(self) -> None:
        """Has no effect: the writer is ready."""

    def __enter__(self) -> SummaryWriter:
        self._context = self.as_default()
        return self._context.__enter__()

    def __exit__(self, *failure: Any) -> None:
        self._context.__exit__(*failure)


def create_file_writer(
    logdir: Any,
    max_queue: int | None = None,
    flush_millis: int | None = None,
    filename_suffix: str | None = None,
    name: str | None = None,
    experimental_trackable: bool = False,
    experimental_mesh: Any = None,
) -> SummaryWriter:
    """Returns a writer into a folder.

    Raises:
        ImportError: tensorboardX is not installed.

    TF: `tf.summary.create_file_writer`.
    """
    return SummaryWriter(
        event_writer(
            text_of(logdir),
            max_queue=10 if max_queue is None else max_queue,
            flush_secs=120 if flush_millis is None else flush_millis / 1000,
            filename_suffix=filename_suffix or "",
        )
    )


def create_noop_writer() -> SummaryWriter:
    """Returns a writer that writes nothing. TF: `tf.summary.create_noop_writer`."""
    return SummaryWriter(None)


def scalar(name: str, data: Any, step: Any = None, description: str | None = None) -> bool:
    """Writes a number. Returns whether it was (or will be) written.

    Raises:
        ValueError: No step, neither here nor by `tf.summary.experimental.set_step`.

    TF: `tf.summary.scalar`.
    """
    return _write(
        name, data, step, lambda events, value, at: events.add_scalar(name, float(value), at)
    )


def histogram(
    name: str, data: Any, step: Any = None, buckets: int | None = None, description: Any = None
) -> bool:
    """Writes how numbers are distributed. TF: `tf.summary.histogram`."""
    bins = 30 if buckets is None else buckets
    return _write(
        name,
        data,
        step,
        lambda events, value, at: events.add_histogram(name, value.ravel(), at, bins=bins),
    )


def image(
    name: str, data: Any, step: Any = None, max_outputs: int = 3, description: Any = None
) -> bool:
    """Writes the first images of a batch `[k, height, width, channels]`. TF: `tf.summary.image`."""

    def write(events: Any, value: np.ndarray, at: int) -> None:
        for index, one in enumerate(value[:max_outputs]):
            tag = name if len(value) == 1 else f"{name}/{index}"
            events.add_image(tag, one, at, dataformats="HWC")

    return _write(name, data, step, write)


def text(name: str, data: Any, step: Any = None, description: str | None = None) -> bool:
    """Writes text, as Markdown. TF: `tf.summary.text`."""
    written = "\n\n".join(item.decode() for item in StringTensor(data).view(np.ndarray).flat)
    return _write(name, 0, step, lambda events, _, at: events.add_text(name, written, at))


def _write(name: str, data: Any, step: Any, write: Callable[[Any, np.ndarray, int], Any]) -> bool:
    writer = _writer.value
    if writer is None or writer._events is None or not should_record_summaries():
        return False
    step = experimental.get_step() if step is None else step
    if step is None:
        raise ValueError(
            f"No step set. Please specify one either through the `step` argument of the summary "
            f"{name!r} or through tf.summary.experimental.set_step()"
        )
    step = step.__jax_array__() if is_variable(step) else step
    events = writer._events

    def on_host(value: Any, step: Any, replica: Any) -> None:
        if replica == 0:
            write(events, np.asarray(value), int(step))

    lift = current_lift()
    several = lift is not None and lift.placement.num_replicas > 1
    operands = (convert_to_tensor(data), step, jax.lax.axis_index(REPLICA_AXIS) if several else 0)
    if any(isinstance(operand, jax.core.Tracer) for operand in operands):
        jax.debug.callback(on_host, *operands)
    else:
        on_host(*operands)
    return True


def flush(writer: SummaryWriter | None = None, name: str | None = None) -> None:
    """TF: `tf.summary.flush`."""
    chosen = _writer.value if writer is None else writer
    if chosen is not None:
        jax.effects_barrier()
        chosen.flush()


@contextlib.contextmanager
def record_if(condition: Any) -> Iterator[None]:
    """Inside, summaries are written if `condition` (or its result) is true.

    TF: `tf.summary.record_if`.
    """
    with _condition.bound_to(condition):
        yield


def should_record_summaries() -> bool:
    """Whether summaries are written. TF: `tf.summary.should_record_summaries`."""
    condition = _condition.value
    return _writer.value is not None and bool(condition() if callable(condition) else condition)


def trace_on(graph: bool = True, profiler: bool = False, profiler_outdir: Any = None) -> None:
    """Starts JAX's profiler, if requested; there are no graphs. TF: `tf.summary.trace_on`."""
    if profiler:
        recording = Recording(text_of(profiler_outdir))
        recording.start()
        _recording.value = recording


def trace_export(name: str, step: Any = None, profiler_outdir: Any = None) -> None:
    """Stops the profiler, which writes its trace. TF: `tf.summary.trace_export`."""
    trace_off()


def trace_off() -> None:
    """Stops the profiler. TF: `tf.summary.trace_off`."""
    recording = _recording.value
    if recording is not None:
        _recording.value = None
        recording.stop()


def _set_step(step: Any) -> None:
    """Sets the step of summaries that name none: a number or a variable.

    TF: `tf.summary.experimental.set_step`.
    """
    global _step
    _step = step


def _get_step() -> Any:
    """TF: `tf.summary.experimental.get_step`."""
    return _step


def _summary_scope(
    name: str, default_name: str = "summary", values: Any = None
) -> AbstractContextManager[tuple[str, str]]:
    """Gives the tag of a summary. TF: `tf.summary.experimental.summary_scope`."""
    tag = name or default_name
    return contextlib.nullcontext((tag, f"{tag}/"))


experimental = namespace(
    "unison.tf.summary.experimental",
    get_step=_get_step,
    set_step=_set_step,
    summary_scope=_summary_scope,
)
