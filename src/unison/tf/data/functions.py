"""The functions of `tf.data` pipelines: of tensors, compiled where that makes no difference.

A function that only computes with arrays is traced once for each signature, compiled, and called
for whole blocks of elements where a plan asks for blocks. Where it draws random numbers
(`tf.random`, Keras' layers), it is compiled, too: what an element gets is determined by the pass
over the dataset and the element's number, in whatever order and thread it is computed.

A function of text (a record, say) is compiled where it makes numbers of it by operations that take
columns of text: `tf.io.parse_single_example`, `tf.io.decode_raw`. These are computed before what
is compiled.

Everything else is called in Python, once an element, with tensors that have values: other functions
of text, functions of datasets, functions with Python control flow on tensors or with effects
(`tf.print`, `tf.py_function`), and those that use variables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from unison.cells import Cell, Layout
from unison.data.functions import BlockFunction, ElementFunction, as_tuple, note_place
from unison.data.leaves import count_rows, dtype_of, is_text, shape_of, stack
from unison.data.passes import Passes
from unison.data.ragged import OtherLeaf
from unison.data.specs import ArraySpec, Signature
from unison.data.state import State
from unison.data.structure import Leaves, Structure, flatten
from unison.eager_fallback import NeedsPythonError, on_trial
from unison.interrupts import is_of_a_signal_handler
from unison.lifting import Lift
from unison.program.control_flow import raising_caught
from unison.program.tracing import traced
from unison.runtime.precision import array_type, device_array
from unison.runtime.private_jax import nothing_is_traced
from unison.strategies.default import default_strategy
from unison.tf.pending import DifferentSizesError, HostOperations, PendingText
from unison.tf.tensors import convert_to_tensor, start_devices
from unison.thread_local import ThreadLocal

logger = logging.getLogger("unison")

#: The number of block sizes that are compiled as they are; others are padded to the next power of
#: 2.
_EXACT_SIZES = 4

#: The number of blocks that are tried if the sizes of elements differ.
_MOST_FAILURES = 2

#: Sizes that stand for one that is not known while shapes are inferred.
_STAND_INS = (2, 3)

#: The maximum number of streams from which a function draws. A function that creates a stream in
#: every call would need one more each time.
_MOST_STREAMS = 16

#: The number of remembered functions of the datasets that a function returns.
_MOST_INNER_FUNCTIONS = 16

#: The bits of a stream's counter that count the draws for one element; the others number elements.
_DRAWS_BITS = 10

#: Distinguishes the seeds of elements whose numbers do not fit into the counter.
_SEED_STRIDE = 0x9E3779B1

_debug = False


def enable_debug_mode() -> None:
    """Lets all functions of pipelines be called in Python, for every element.

    TF: `tf.data.experimental.enable_debug_mode`.
    """
    global _debug
    _debug = True


@dataclasses.dataclass
class _Traces:
    """The results of analysing a user's function.

    Attributes:
        programs: It as programs, by the kinds of the leaves; None where it is called in Python.
        text_programs: Likewise, where some of the leaves are text.
        is_stateful: Whether its calls depend on those before.
    """

    programs: dict[Any, _Program | None] = dataclasses.field(default_factory=dict)
    text_programs: dict[Any, _TextProgram | None] = dataclasses.field(default_factory=dict)
    is_stateful: bool = False


#: Analysed functions, by their key; each with the function, so that its references stay valid.
_Known = dict[Any, tuple[Callable[..., Any], _Traces]]


#: Those in the function that the thread calls, if it is one that makes datasets: `interleave`'s,
#: say. It makes the same dataset for every file, and they are traced for the first one.
_known_here: ThreadLocal[_Known | None] = ThreadLocal(None)


def _traces_of(function: Callable[..., Any]) -> _Traces:
    """Returns the results of analysing a function, or an equal one."""
    known = _known_here.value
    identity = None if known is None else _identity(function)
    if known is None or identity is None:
        return _Traces()
    if identity not in known and len(known) >= _MOST_INNER_FUNCTIONS:
        return _Traces()
    return known.setdefault(identity, (function, _Traces()))[1]


def _identity(function: Any) -> Any:
    """Returns a key that is equal for functions with equal results; None if it is unknown."""
    if not isinstance(function, types.FunctionType):
        return None
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # one has no value yet
        return None
    parts = (*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return (function.__code__, *map(id, parts))


class TensorFunction(ElementFunction):
    """A user's function of tensors; see the module."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._traces = _traces_of(self.user_function)
        self._inner: _Known = {}
        self._seeds = _Seeds()

    @property
    def is_stateful(self) -> bool:  # type: ignore[override]
        return self._traces.is_stateful

    def __getstate__(self) -> dict[str, Any]:
        # Another process analyses the function itself: programs cannot be pickled.
        own = {**vars(self), "_traces": None, "_inner": None}
        return {**own, "_seeds": self._seeds.state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        seeds = _Seeds()
        seeds.restore(state["_seeds"])
        vars(self).update(state, _inner={}, _seeds=seeds)
        self._traces = _traces_of(self.user_function)

    def begin_passes_at(self, number: int) -> None:
        self._seeds.passes.resume(number - 1)

    def begin(self) -> Epoch:
        return Epoch(self._seeds)

    def state(self) -> State:
        return self._seeds.state()

    def restore(self, state: State) -> None:
        self._seeds.restore(state)

    def __call__(
        self, leaves: Leaves, structure: Structure, epoch: Any = None, index: int = 0
    ) -> Leaves:
        if not any(isinstance(leaf, OtherLeaf) or is_text(leaf) for leaf in leaves):
            kinds = tuple((shape_of(leaf), dtype_of(leaf)) for leaf in leaves)
            program = self._program(kinds, structure)
            if program is not None:
                return program(leaves, epoch or self.begin(), index)
        elif self._holds_batches_of_text(leaves):
            text_program = self._text_program(leaves, structure, False)
            if text_program is not None:
                try:
                    return text_program.on_element(epoch or self.begin(), leaves, index)
                except Exception as error:
                    if is_of_a_signal_handler(error):
                        raise
                    # It is called once more in Python, where the error is the user's.
                    logger.debug("The function of %s is called in Python: %s", self.stage, error)
        with _at_once(), _known_here.bound_to(self._inner):
            return super().__call__(leaves, structure)

    def _holds_batches_of_text(self, leaves: Leaves) -> bool:
        """Whether the function is worth compiling for leaves that include text."""
        return all(shape_of(leaf) and not isinstance(leaf, OtherLeaf) for leaf in leaves)

    def for_rows(self, structure: Structure, epoch: Any) -> Callable[[Leaves, int], Leaves]:
        return lambda leaves, index: self(leaves, structure, epoch, index)

    def as_leaves(self, results: Leaves) -> Leaves:
        return results

    def signature_of(self, inputs: Signature) -> Signature | None:
        if any(not isinstance(spec, ArraySpec) or spec.dtype.kind == "O" for spec in inputs.specs):
            return None
        if any(spec.shape is None for spec in inputs.specs):
            return None
        found = []
        for size in _STAND_INS[:1] if inputs.is_static else _STAND_INS:
            kinds = tuple((_known(spec.shape, size), spec.dtype) for spec in inputs.specs)
            program = self._program(kinds, inputs.structure)
            if program is None:
                return None
            found.append(program.signature)
        return functools.reduce(Signature.widened, found)

    def on_blocks(self, inputs: Signature) -> BlockFunction | None:
        kinds = tuple((spec.shape, spec.dtype) for spec in inputs.specs)
        program = self._program(kinds, inputs.structure)
        if program is None or not program.takes_blocks:
            return None
        return functools.partial(program.on_block, self.begin())

    def on_text_blocks(
        self, sample: Leaves, structure: Structure, most_callers: int
    ) -> BlockFunction | None:
        program = self._text_program(sample, structure, True, most_callers)
        if program is None or not program.takes_blocks:
            return None
        return functools.partial(self._on_text_block, program, structure, self.begin())

    def _text_program(
        self, sample: Leaves, structure: Structure, is_block: bool, most_callers: int = 1
    ) -> _TextProgram | None:
        """Returns the compiled function of leaves like an element's, if it has one.

        Args:
            sample: The leaves of an element, including text.
            structure: What is around them.
            is_block: Whether it will be called for blocks of elements.
            most_callers: The number of threads that may compute the elements of a block.
        """
        kinds = tuple((shape_of(leaf), dtype_of(leaf)) for leaf in sample)
        key = (kinds, structure, is_block)
        programs = self._traces.text_programs
        if key not in programs and len(programs) < _EXACT_SIZES:
            rows = stack([sample]) if is_block else sample
            texts = [leaf for leaf in rows if is_text(leaf)]
            host = HostOperations(texts, is_block, most_callers)
            traced = None if _debug else self._trace(kinds, structure, host)
            programs[key] = None if traced is None else _TextProgram(traced, host)
        found = programs.get(key)
        if found is not None:
            self.structure = found.program.structure
        return found

    def _on_text_block(
        self,
        program: _TextProgram,
        structure: Structure,
        epoch: Epoch,
        block: Leaves,
        indices: np.ndarray,
    ) -> Leaves:
        if program.failures < _MOST_FAILURES:
            try:
                return program.on_block(epoch, block, indices)
            except Exception as error:
                if is_of_a_signal_handler(error):
                    raise
                # One by one it is known which element it is, if any: they may only differ in size.
                logger.debug("A block of the dataset is computed one by one: %s", error)
                program.failures += isinstance(error, DifferentSizesError)
        results = []
        for row, index in enumerate(indices.tolist()):
            try:
                leaves = tuple(leaf[row] for leaf in block)
                results.append(self._on_text_element(program, structure, epoch, leaves, index))
            except Exception as error:
                note_place(error, self.stage, index)
                raise
        return stack(results)

    def _on_text_element(
        self,
        program: _TextProgram,
        structure: Structure,
        epoch: Epoch,
        leaves: Leaves,
        index: int,
    ) -> Leaves:
        """Calls the function in Python, with the random numbers that the program would draw."""
        streams = program.program.streams
        if not streams:
            return self(leaves, structure, epoch, index)
        trial = _Trial(streams)
        trial.given([*map(jnp.asarray, epoch.states(streams, index))])
        try:
            with _at_once(), _known_here.bound_to(self._inner), trial.instead_of_variables():
                return super().__call__(leaves, structure)
        except NeedsPythonError as error:
            logger.debug("Element %d draws other random numbers: %s", index, error)
            return self(leaves, structure, epoch, index)

    def _program(self, kinds: Any, structure: Structure) -> _Program | None:
        """Returns the compiled function of leaves of these shapes and dtypes, if it has one."""
        key = (kinds, structure)
        programs = self._traces.programs
        if key not in programs:
            programs[key] = None if _debug else self._trace(kinds, structure)
        found = programs[key]
        if found is not None:
            self.structure = found.structure
        return found

    def _trace(
        self, kinds: Any, structure: Structure, host: HostOperations | None = None
    ) -> _Program | None:
        """Returns the function as a program; None if it has to be called in Python."""
        streams: list[Any] = []
        while len(streams) <= _MOST_STREAMS:
            trial = _Trial(streams)
            try:
                return self._traced(trial, kinds, structure, host)
            except Exception as error:
                if is_of_a_signal_handler(error):
                    raise
                if host is not None and host.has_grown:
                    continue
                if trial.wanted is None:
                    self._traces.is_stateful |= trial.was_refused
                    logger.debug("The function of %s is called in Python: %s", self.stage, error)
                    return None
            # Once more, with the state of that stream as an input.
            streams.append(trial.wanted)
        self._traces.is_stateful = True
        return None

    def _traced(
        self, trial: _Trial, kinds: Any, structure: Structure, host: HostOperations | None
    ) -> _Program:
        """Returns the function as a program that draws from the streams of `trial`.

        Args:
            trial: What stands between it and all variables.
            kinds: The shapes and dtypes of the leaves of an element.
            structure: What is around them.
            host: The operations on those that are text.

        Raises:
            Exception: It is not one, for any reason.
        """
        results: list[Structure] = []
        places: list[int | None] = []
        numbers = [kind for kind in kinds if kind[1].kind != "O"]
        are_text = [kind[1].kind == "O" for kind in kinds]

        def function(*values: jax.Array) -> list[jax.Array]:
            given: Sequence[Any] = trial.given(values)
            if host is not None:
                texts = iter(host.begin(given[len(numbers) :]))
                rest = iter(given)
                given = [next(texts) if is_one else next(rest) for is_one in are_text]
            result = self.call_with(structure.pack(given))
            leaves, result_structure = flatten(as_tuple(result))
            results.append(result_structure)
            places.extend(leaf.place if isinstance(leaf, PendingText) else None for leaf in leaves)
            return [_as_array(leaf) for leaf in leaves if not isinstance(leaf, PendingText)]

        inputs = numbers if host is None else [*numbers, *host.kinds]
        avals = [array_type(shape, dtype) for shape, dtype in inputs]
        states = [array_type((2,), np.dtype(np.uint32)) for _ in trial.streams]
        with _at_once(), trial.tracing():
            jaxpr = raising_caught(lambda: traced(function, *avals, *states))
        if not jaxpr.jaxpr.outvars or _has_effects(jaxpr.jaxpr):
            raise NeedsPythonError("It has effects, or returns nothing.")
        if self.structure not in (None, results[0]):
            raise NeedsPythonError("It has returned another structure before.")
        self.structure = results[0]
        dtypes = [dtype for _, dtype in inputs]
        return _Program(jaxpr, results[0], dtypes, trial.streams, places)


def _known(shape: Any, stand_in: int) -> tuple[int, ...]:
    return tuple(stand_in if size is None else size for size in shape)


def _as_array(value: Any) -> jax.Array:
    tensor = convert_to_tensor(value)
    if isinstance(tensor, jax.Array):
        return tensor
    if isinstance(tensor, np.ndarray) and tensor.dtype != np.dtype(object):
        return jnp.asarray(tensor, dtype=tensor.dtype)
    raise TypeError(f"The function returns what no array is: {value!r}")


class _Trial(Lift):
    """The scope between a function that is traced and all variables.

    The states of random streams are inputs of the function; other variables it may not use.

    Args:
        streams: The cells and Keras variables of the streams that are known to be used.
    """

    def __init__(self, streams: list[Any]):
        super().__init__(default_strategy().placement, {})
        #: The streams.
        self.streams = streams
        self._states: dict[int, Any] = {}
        #: A stream that it has used and that is not known yet.
        self.wanted: Any = None
        #: Whether it has used another variable.
        self.was_refused = False

    def given(self, values: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Takes the states from the function's inputs, and returns the others."""
        count = len(values) - len(self.streams)
        states = zip(self.streams, values[count:], strict=True)
        self._states = {id(stream): state for stream, state in states}
        return values[:count]

    def state_of(self, stream: Any) -> Any:
        if id(stream) not in self._states:
            self.wanted = stream
            raise NeedsPythonError("The function draws from a stream that is not an input yet.")
        return self._states[id(stream)]

    def set_state(self, stream: Any, value: Any) -> None:
        self._states[id(stream)] = value

    def refuse(self) -> NoReturn:
        """Ends the trial."""
        self.was_refused = True
        raise NeedsPythonError("A function that uses variables is called for every element.")

    def read(self, cell: Cell) -> Any:
        return self.state_of(cell) if _is_stream(cell) else self.refuse()

    def assign(self, cell: Cell, value: Any) -> None:
        self.set_state(cell, value) if _is_stream(cell) else self.refuse()

    def add(self, cell: Cell, delta: Any) -> NoReturn:
        self.refuse()

    def update(self, cell: Cell, function: Any) -> NoReturn:
        self.refuse()

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Inside, the thread traces the function."""
        with on_trial(), self.instead_of_variables():
            yield

    @contextlib.contextmanager
    def instead_of_variables(self) -> Iterator[None]:
        """Inside, the thread uses this in the place of variables."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.active())
            if "keras" in sys.modules:
                stack.enter_context(_keras_scope_of(self))
            yield


def _is_stream(cell: Cell) -> bool:
    return cell.layout is Layout.STREAM


def _keras_scope_of(trial: _Trial) -> Any:
    """Returns the scope between the function and Keras' variables."""
    import keras

    class TrialScope(keras.StatelessScope):
        def get_current_value(self, variable: Any) -> Any:
            is_stream = variable.name == "seed_generator_state"
            return trial.state_of(variable) if is_stream else trial.refuse()

        def add_update(self, update: Any) -> None:
            variable, value = update
            if variable.name != "seed_generator_state":
                trial.refuse()
            trial.set_state(variable, value)

    return TrialScope()


class _Seeds:
    """A function's draws from random streams: one from each.

    Keeping it, and the number of passes, keeps all numbers that later calls get.
    """

    def __init__(self) -> None:
        self.passes = Passes()
        #: The draws, in the order in which the streams were first used.
        self._drawn: list[int] = []
        self._places: dict[int, int] = {}
        self._lock = threading.Lock()

    def of(self, stream: Any) -> int:
        """Returns the draw from a stream."""
        with self._lock:
            place = self._places.setdefault(id(stream), len(self._places))
            if place == len(self._drawn):
                self._drawn.append(_drawn_from(stream))
            return self._drawn[place]

    def state(self) -> State:
        with self._lock:
            return {"drawn": list(self._drawn), "passes": self.passes.state()}

    def restore(self, state: State) -> None:
        with self._lock:
            self._drawn = list(state["drawn"])
            self.passes.restore(state["passes"])


class Epoch:
    """One pass over the elements, for functions that draw random numbers.

    What was drawn from a stream, the number of the pass and that of the element determine what the
    function draws from the stream for the element. A pass begins with the first draw.
    """

    def __init__(self, seeds: _Seeds):
        self._drawn = seeds
        self._number = seeds.passes.state()

    def states(self, streams: Sequence[Any], indices: Any) -> list[np.ndarray]:
        """Returns a state of each stream for every element."""
        return [_states_from(self._seed(stream), np.asarray(indices)) for stream in streams]

    def _seed(self, stream: Any) -> int:
        self._drawn.passes.resume(self._number)
        entropy = [self._drawn.of(stream), self._number]
        return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def _drawn_from(stream: Any) -> int:
    """Returns a number drawn from a stream, which advances."""
    with _at_once():
        state = np.asarray(stream.read() if isinstance(stream, Cell) else stream.value)
        stream.assign(state + np.array([0, 1], state.dtype))
    return int(np.random.SeedSequence(state.tolist()).generate_state(1)[0])


def _states_from(seed: int, indices: np.ndarray) -> np.ndarray:
    """Returns states `(seed, counter)` that are far from each other."""
    high, low = np.divmod(indices, 1 << (32 - _DRAWS_BITS))
    states = np.stack([seed + high * _SEED_STRIDE, low << _DRAWS_BITS], axis=-1)
    return (states & 0xFFFFFFFF).astype(np.uint32)


def _has_effects(jaxpr: Jaxpr) -> bool:
    """Whether calling the program has effects beside returning arrays."""
    if jaxpr.effects:
        return True
    for equation in jaxpr.eqns:
        if "callback" in equation.primitive.name:
            return True
        for parameter in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(parameter, "jaxpr", parameter)
            if isinstance(inner, Jaxpr) and _has_effects(inner):
                return True
    return False


@dataclasses.dataclass
class _Program:
    """A traced function of leaves of certain shapes and dtypes.

    Attributes:
        jaxpr: What it computes of the leaves and the states of the streams.
        structure: What is around its results.
        dtypes: Those of the leaves that it takes.
        streams: The random streams that it draws from.
        places: For each leaf of its results the column of text that it is; None for what is
            computed.
    """

    jaxpr: ClosedJaxpr
    structure: Structure
    dtypes: list[np.dtype]
    streams: list[Any]
    places: list[int | None]
    _sizes: set[int] = dataclasses.field(default_factory=set)

    def __call__(self, leaves: Leaves, epoch: Epoch, index: int) -> Leaves:
        """Returns the results for the element with this number."""
        states = epoch.states(self.streams, index)
        with _at_once():
            results = self._of_one(*self._placed(leaves), *states)
            return tuple(np.asarray(leaf)[()] for leaf in results)

    def on_block(self, epoch: Epoch, block: Leaves, indices: np.ndarray) -> Leaves:
        """Returns the stacked results for stacked elements with these numbers."""
        count = count_rows(block)
        inputs = (*block, *epoch.states(self.streams, indices))
        size = self._size_for(count)
        if size > count:
            inputs = tuple(np.concatenate([x, x[:1].repeat(size - count, 0)]) for x in inputs)
        with _at_once():
            results = self._of_block(*self._placed(inputs[: len(block)]), *inputs[len(block) :])
            return tuple(np.asarray(leaf)[:count] for leaf in results)

    @functools.cached_property
    def takes_blocks(self) -> bool:
        """Whether elements can be computed side by side."""
        try:
            avals = [array_type((1, *aval.shape), aval.dtype) for aval in self.jaxpr.in_avals]
            jax.make_jaxpr(jax.vmap(jaxpr_as_fun(self.jaxpr)))(*avals)
        except Exception as error:
            if is_of_a_signal_handler(error):
                raise
            logger.debug("A function takes one element at a time: %s", error)
            return False
        return True

    @property
    def signature(self) -> Signature:
        """The signature of the results."""
        avals = self.jaxpr.out_avals
        return Signature(
            self.structure, tuple(ArraySpec(aval.shape, np.dtype(aval.dtype)) for aval in avals)
        )

    @functools.cached_property
    def _of_one(self) -> Callable[..., list[jax.Array]]:
        return jax.jit(jaxpr_as_fun(self.jaxpr))

    @functools.cached_property
    def _of_block(self) -> Callable[..., list[jax.Array]]:
        return jax.jit(jax.vmap(jaxpr_as_fun(self.jaxpr)))

    def _placed(self, leaves: Leaves) -> list[Any]:
        """Returns the leaves as a program takes them: of NumPy's, 64 bits would be cut."""
        return [
            device_array(np.asarray(leaf)) if dtype.itemsize == 8 else leaf
            for leaf, dtype in zip(leaves, self.dtypes, strict=True)
        ]

    def _size_for(self, count: int) -> int:
        """Returns the size of block to compile for `count` elements."""
        if count not in self._sizes and len(self._sizes) >= _EXACT_SIZES:
            return 1 << (count - 1).bit_length()
        self._sizes.add(count)
        return count


@dataclasses.dataclass
class _TextProgram:
    """A traced function of elements that hold text.

    Attributes:
        program: What it computes of numbers: those of the element, and those out of its text.
        host: What makes numbers of text.
        failures: The number of blocks whose elements did not fit together.
    """

    program: _Program
    host: HostOperations
    failures: int = 0

    @property
    def takes_blocks(self) -> bool:
        """Whether elements can be computed side by side."""
        return self.program.takes_blocks

    def on_block(self, epoch: Epoch, block: Leaves, indices: np.ndarray) -> Leaves:
        """Returns the stacked results for stacked elements with these numbers.

        Raises:
            Exception: One of them has other sizes than the sample had, or the function fails.
        """
        numbers, texts = self._split(block)
        return self._joined(self.program.on_block(epoch, numbers, indices), texts)

    def on_element(self, epoch: Epoch, leaves: Leaves, index: int) -> Leaves:
        """Returns the results for an element.

        Raises:
            Exception: It has other sizes than the sample had, or the function fails.
        """
        numbers, texts = self._split(leaves)
        return self._joined(self.program(numbers, epoch, index), texts)

    def _split(self, leaves: Leaves) -> tuple[Leaves, list[np.ndarray]]:
        """Returns the numbers that the program gets, and all texts."""
        made, texts = self.host.run([leaf for leaf in leaves if is_text(leaf)])
        return (*(leaf for leaf in leaves if not is_text(leaf)), *made), texts

    def _joined(self, computed: Leaves, texts: list[np.ndarray]) -> Leaves:
        """Returns the results: computed arrays, and texts unchanged."""
        numbers = iter(computed)
        return tuple(
            next(numbers) if place is None else texts[place] for place in self.program.places
        )


@contextlib.contextmanager
def _at_once() -> Iterator[None]:
    """Inside, the thread computes at once, on the CPU, whatever it traces or records outside."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_on_cpu())
        if not nothing_is_traced():
            stack.enter_context(jax.ensure_compile_time_eval())
        yield


def _on_cpu() -> Any:
    """Returns a context in which arrays are made on the host's CPU."""
    device = _cpu()
    return contextlib.nullcontext() if device is None else jax.default_device(device)


@functools.cache
def _cpu() -> jax.Device | None:
    """Returns the CPU device; None if it is the default device, or there is none."""
    start_devices()
    if jax.default_backend() == "cpu":
        return None
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None
