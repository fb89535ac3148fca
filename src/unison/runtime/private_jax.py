"""The one file of Unison that touches JAX's private names.

Each name is listed with the public API that would replace it; `tests/single/test_private_jax.py`
fails loudly when JAX moves one. JAX 0.10.2 to 0.12 are supported; where they differ, a comment
states from which version on something holds.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Each with the public API that would replace it.
# `core`: the current trace of a thread. A gradient tape replaces it between two Python statements,
# whereas JAX's public transformations take a function. Needed: a trace that can be switched on and
# off. Also the abstract value of a type; see `dtypes`.
# `LinearizeTrace`, the other names from `ad`, and `DynamicJaxprTrace`: the traces with which
# `jax.linearize` and `jax.vjp` follow a function, and the transposition of what they record.
# Needed: the same for values, in two halves: record, and pull back.
# `api_util`: the debug information that these require for error messages.
# `dtypes`: the types of arguments of jitted functions. Public functions register a type as a tree
# of arrays, but not as an array: a variable would no longer be a leaf in `jax.tree`. Needed:
# `__jax_array__` for arguments of jitted functions.
# `compiler`: the function that writes compiled programs into the cache, which does so in the first
# process only. Needed: an option for folders that processes do not share.
# `hardware_utils`: whether the machine has TPUs, found without starting them.
# `distributed`: the client of the coordination service, through which processes exchange what no
# collective can, since one of them may be missing. Public functions only start and end the
# service. Needed: its key-value store and barriers.
# `xla_bridge`: whether XLA is running, which decides if devices and threads can still be chosen.
# Every public call that could tell (`jax.devices`, `jax.extend.backend.backends`) starts the
# backend. It also creates the CPU client, and `jaxlib._jax` its collectives, whose address no
# option of JAX sets: they listen at the address of the machine's host name. `config`: whether these
# collectives are enabled. Needed: a query that starts nothing, and the address.
# `export`: the custom calls that an exported program may contain, and its tables, which are checked
# before JAX decodes them. Needed: a `jax.export.deserialize` for untrusted files.
# `callback`, `debugging`: their loggers receive the error of a host callback before XLA converts it
# to text. `dispatch`: the tokens of programs that failed this way, whose error JAX would raise
# again at the end of the process. Needed: that error as the cause of XLA's.
# `xla_client`: a second CPU client, with as many devices as a plan needs; JAX's own has as many as
# the process was started with; and GPUs to compile for, by a plugin that JAX has not loaded at its
# start. Needed: CPU topologies to compile for, and plugins that are loaded when they are used.
# `jaxlib._jax` also counts the operations in a module: `cost_analysis` does so only where the
# module's own devices are. Needed: the same for any module.
# `array`: the class of arrays, which is not `jax.Array`: its methods are extended by `unison.tf`.
# Needed: a way to register what an array does with an index that JAX does not know.
# A jitted function's state is that of its pickle: it names the function that is called for unknown
# arguments. Needed: a hook around that.
# The parameters of a scan equation are not public either; they are read here because they changed
# between versions.
from jax._src import (
    api_util,
    callback,
    compiler,
    config,
    core,
    debugging,
    dispatch,
    distributed,
    dtypes,
    hardware_utils,
    xla_bridge,
)
from jax._src.array import ArrayImpl as ArrayImpl
from jax._src.interpreters.ad import (
    LinearizeTrace,
    LinearizeTracer,
    NullAccum,
    ValAccum,
    backward_pass3,
)
from jax._src.interpreters.partial_eval import DynamicJaxprTrace
from jax.core import ShapedArray, Tracer, eval_jaxpr
from jax.extend import source_info_util
from jax.extend.backend import register_backend_factory
from jax.extend.core import (
    ClosedJaxpr,
    Jaxpr,
    Literal,
    Primitive,
    Var,
    new_jaxpr_eqn,
    no_effects,
)
from jax.interpreters import ad, mlir
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import NamedSharding, PartitionSpec, get_abstract_mesh
from jaxlib import _jax, xla_client
from jaxlib.version import __version__ as jaxlib_version

from unison.interrupts import is_of_a_signal_handler
from unison.jaxprs import bound_variables, evaluate, value_of
from unison.tracebacks import is_running, more_ends

_FOLDER_OF_JAX = os.path.dirname(jax.__file__) + os.sep

#: Compiling a program ends the process (SIGSEGV, in Shardy) if a `shard_map` in it has an input
#: without elements and one with some. It does not with jaxlib 0.11.1 and 0.12.
_EMPTY_INPUTS_CRASH = jaxlib_version == "0.11.2"


def shard_map(
    function: Callable[..., Any], *, mesh: jax.sharding.Mesh, in_specs: Any, **options: Any
) -> Callable[..., Any]:
    """`jax.shard_map`; leaves out empty inputs if this jaxlib crashes when it compiles them.

    Args:
        function: What each device computes.
        mesh: The devices.
        in_specs: A spec for each argument, or a tree of them; or one for all arguments.
        **options: The other arguments of `jax.shard_map`.
    """
    if not _EMPTY_INPUTS_CRASH:
        return jax.shard_map(function, mesh=mesh, in_specs=in_specs, **options)

    @functools.wraps(function)
    def mapped(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        is_empty = [0 in jnp.shape(leaf) for leaf in leaves]
        if all(is_empty) or not any(is_empty):
            return jax.shard_map(function, mesh=mesh, in_specs=in_specs, **options)(*args)
        prefix = in_specs if isinstance(in_specs, PartitionSpec) else tuple(in_specs)
        specs = jax.tree.leaves(jax.tree.broadcast(prefix, args))
        axes = options.get("axis_names") or set(mesh.axis_names)

        def with_empty_ones(*others: Any) -> Any:
            remaining = iter(others)
            pieces = [
                _empty_piece(leaf, spec, mesh, axes) if empty else next(remaining)
                for leaf, spec, empty in zip(leaves, specs, is_empty, strict=True)
            ]
            return function(*jax.tree.unflatten(structure, pieces))

        def others(values: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(v for v, empty in zip(values, is_empty, strict=True) if not empty)

        of_others = jax.shard_map(with_empty_ones, mesh=mesh, in_specs=others(specs), **options)
        return of_others(*others(leaves))

    return mapped


def _empty_piece(array: Any, spec: PartitionSpec, mesh: Any, axes: set[str]) -> jax.Array:
    """Returns what a device has of an array without elements, which `axes` of a mesh divide."""
    shape = list(jnp.shape(array))
    for place, entry in enumerate(spec):
        for axis in jax.tree.leaves(entry):
            shape[place] //= mesh.shape[axis] if axis in axes else 1
    return jnp.zeros(shape, jnp.result_type(array))


def backend_is_started() -> bool:
    """Whether a JAX backend runs in this process. Does not start one."""
    return xla_bridge.backends_are_initialized()


#: The loggers to which JAX reports errors of functions on the host that a program calls.
CALLBACK_LOGGERS: tuple[logging.Logger, ...] = (callback.logger, debugging.logger)


def finish_effects() -> None:
    """Waits for the side effects of programs, and clears JAX's tokens of those that failed."""
    try:
        dispatch.runtime_tokens.block_until_ready()
    except jax.errors.JaxRuntimeError:
        dispatch.runtime_tokens.clear()


def in_scopes_of(equation: Any) -> AbstractContextManager[Any]:
    """Returns a context in which operations also get the named scopes of an equation."""
    info = equation.source_info
    scopes = source_info_util.current_name_stack() + info.name_stack
    return source_info_util.user_context(info.traceback, name_stack=scopes)


def scopes_of(equation: Any) -> str:
    """Returns the named scopes in which an equation was traced, and what has transformed it."""
    return str(equation.source_info.name_stack)


def added_as_traced(equation: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    """Returns the results of an operation on `inputs`, which have the types of its operands.

    The operation is added to the current trace as it is. To trace it again takes several times as
    long; this is done only for operations with effects, and outside of a trace.
    """
    trace, mesh = core.trace_ctx.trace, get_abstract_mesh()
    types: list[Any] = [None]
    if type(trace) is DynamicJaxprTrace and not equation.effects:
        types = [_type_in_mesh(variable.aval, mesh) for variable in equation.outvars]
    if None in types:
        with in_scopes_of(equation), equation.ctx.manager:
            return evaluate(equation, inputs)
    info = equation.source_info
    info = info.replace(name_stack=source_info_util.current_name_stack() + info.name_stack)
    operands = [trace.to_jaxpr_tracer(x, info) for x in inputs]
    primitive, params, context = equation.primitive, equation.params, equation.ctx
    return trace.emit_eqn(operands, types, primitive, params, no_effects, info, context)


@functools.lru_cache(4096)
def _type_in_mesh(aval: Any, mesh: Any) -> Any:
    """Returns the type of a result, traced elsewhere, where each device has its part of `mesh`.

    None if only tracing again tells it.
    """
    if type(aval) is not ShapedArray:
        return None
    if aval.sharding.mesh == mesh:
        return aval
    if not mesh.are_all_axes_manual:
        return None
    spec = PartitionSpec(*(None for _ in aval.shape))
    return aval.update(sharding=NamedSharding(mesh, spec))


def evaluated_as_traced(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Returns the results of a traced function on arguments of the types that it was traced for.

    In a trace, it adds the operations as they are.
    """
    values = bound_variables(closed, args)
    for equation in closed.jaxpr.eqns:
        inputs = [value_of(atom, values) for atom in equation.invars]
        values |= zip(equation.outvars, added_as_traced(equation, inputs), strict=True)
    return [value_of(atom, values) for atom in closed.jaxpr.outvars]


def traceback_of(equation: Any) -> TracebackType | None:
    """Returns where the program that was traced calls the operation."""
    trace = equation.source_info.traceback
    return None if trace is None else trace.as_python_traceback()


def coordination_client() -> Any:
    """Returns the client of the coordination service; None if this process has joined none."""
    return distributed.global_state.client


def initialized_processes() -> tuple[int, int] | None:
    """Returns how many processes `jax.distributed` has initialized, and which of them this is.

    None: it has not been initialized here. Unlike `jax.process_count`, this starts no backend.
    """
    state = distributed.global_state
    if state.client is None or state.num_processes is None or state.process_id is None:
        return None
    return int(state.num_processes), int(state.process_id)


def coordinator_address() -> str | None:
    """Returns the address of the coordination service, as `jax.distributed` was initialized."""
    address = distributed.global_state.coordinator_address
    return None if address is None else str(address)


def has_tpu_chips() -> bool:
    """Returns whether this machine has TPUs; neither starts them nor imports their library."""
    chips, _ = hardware_utils.num_available_tpu_chips_and_device_id()
    return bool(chips)


def forget_coordination() -> None:
    """Makes JAX forget its `jax.distributed` job without shutting it down or waiting for others.

    At the end of a process, JAX would wait for all others, and end those that come later.
    """
    state = distributed.global_state
    for ended in (state.client, state.service):
        if ended is not None:  # its destructor contacts processes that may be gone
            _never_destroy(ended)
    state.client = state.service = None


def never_destroy_backends() -> None:
    """Keeps JAX's backends as they are to the end of the process, whatever they are computing.

    Their destructors wait for what runs: without an end, if that waits for a lost process.
    """
    if backend_is_started():
        for client in xla_bridge.backends().values():
            _never_destroy(client)


def _never_destroy(value: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def cache_programs_of_each_process() -> None:
    """Makes this process write what it compiles into the compilation cache, whichever it is.

    JAX has only the first process write, since processes may share the folder. Where each has a
    folder of its own, the others would otherwise compile all again when they are started again.
    """
    first: Any = types.SimpleNamespace(process_id=0)
    as_first = {"distributed": types.SimpleNamespace(global_state=first)}
    write = compiler._cache_write
    in_any = types.FunctionType(write.__code__, vars(compiler) | as_first, write.__name__)
    vars(compiler)["_cache_write"] = in_any


class _CpuStart:
    """The start of JAX's CPU devices, which this module changes as it is asked to.

    Attributes:
        address: Where this process listens when CPUs of several processes exchange data.
        within: Returns the context of the start; it yields the number of devices, None for JAX's.
    """

    def __init__(self) -> None:
        self.address: str | None = None
        self.within: Callable[[], contextlib.AbstractContextManager[int | None]] = (
            contextlib.nullcontext
        )

    def change(self) -> None:
        """Has JAX call this; it holds for backends that start later."""
        register_backend_factory("cpu", self._make_client, priority=0, fail_quietly=False)

    def _make_client(self) -> Any:
        with self.within() as count:
            make = xla_bridge.make_cpu_client
            if count is not None:  # JAX's option cannot be set while another backend runs
                option: Any = types.SimpleNamespace(value=count)
                with_option = vars(xla_bridge) | {"num_cpu_devices": option}
                make = types.FunctionType(make.__code__, with_option, make.__name__)
            return make(self._collectives())

    def _collectives(self) -> Any:
        """Returns the collectives that listen at the address; None for JAX's own."""
        connected = distributed.global_state.client
        is_gloo = config.cpu_collectives_implementation.value == "gloo"
        if self.address is None or connected is None or not is_gloo:
            return None
        return _jax.make_gloo_tcp_collectives(connected, hostname=self.address)


_cpu_start = _CpuStart()


def listen_for_collectives_at(address: str) -> None:
    """Makes this process listen at an address when CPUs of several processes exchange data.

    It holds for backends that start later. Without several processes, it changes nothing.

    Args:
        address: One of this machine's.
    """
    _cpu_start.address = address
    _cpu_start.change()


def start_cpus_within(
    context: Callable[[], contextlib.AbstractContextManager[int | None]],
) -> None:
    """Makes JAX start its CPU devices inside a context, whoever is the first to use them.

    Args:
        context: Returns the context, which yields the number of devices; None: as configured.
    """
    _cpu_start.within = context
    _cpu_start.change()


def described_cpus(count: int) -> list[jax.Device]:
    """Returns `count` CPU devices that are not in `jax.devices()`: to compile for, not to run on.

    Args:
        count: The number of devices.
    """
    client: Any = xla_client.make_cpu_client(num_devices=count)
    return list(client.devices())


def described_gpus(library: str, target: str, machines: int, per_machine: int) -> list[jax.Device]:
    """Returns GPUs to compile for, on a machine that needs neither a GPU nor its driver.

    `jax.experimental.topologies.get_topology_desc` makes them, too, but only of a plugin that JAX
    has loaded when it started, which takes a second in every process of the environment.

    Args:
        library: The path of JAX's plugin for CUDA, which has XLA's GPU compiler.
        target: The GPU, as a `stream_executor.GpuTargetConfigProto` in text.
        machines: The number of machines.
        per_machine: The number of GPUs of each.
    """
    # A plugin in the environment is JAX's to load: loading it before would make JAX's fail.
    xla_bridge._discover_and_register_pjrt_plugins()
    if not xla_client.pjrt_plugin_loaded("cuda"):
        xla_client.load_pjrt_plugin_dynamically("cuda", library)
    if not xla_client.pjrt_plugin_initialized("cuda"):
        xla_client.initialize_pjrt_plugin("cuda")
    topology = _jax.get_default_c_api_topology(
        "cuda", "", {"target_config": target, "topology": f"1x{machines}x{per_machine}"}
    )
    return list(topology._make_compile_only_devices())


def counted_costs(module: Any) -> Mapping[str, float]:
    """Returns what XLA counts in a module: `"flops"`, `"bytes accessed"`, ...

    `cost_analysis` of a lowered or compiled program does so only on its own platform's devices.

    Args:
        module: An `HloModule`, of any platform.
    """
    client = jax.local_devices(backend="cpu")[0].client
    return _jax.hlo_module_cost_analysis(client, module)


def tables_of_exported(data: bytes) -> Iterator[Any]:
    """Yields the tables of an exported function and of its derivatives, before they are decoded.

    `jax.export.deserialize` follows whatever they refer to, as often as they do.

    Args:
        data: What `jax.export` has serialized.
    """
    from jax._src.export import serialization_generated

    table = serialization_generated.Exported.GetRootAs(bytearray(data), 0)
    while table is not None:
        yield table
        table = table.Vjp()


def modules_of_exported(data: bytes) -> Iterator[bytes]:
    """Yields the modules of an exported function and of its derivatives, before they are decoded.

    Args:
        data: What `jax.export` has serialized.
    """
    for table in tables_of_exported(data):
        if not table.MlirModuleSerializedIsNone():
            yield table.MlirModuleSerializedAsNumpy().tobytes()


def targets_of_stable_calls() -> frozenset[str]:
    """Returns the custom calls that `jax.export` writes: JAX keeps them as they are."""
    from jax._src.export import _export

    return frozenset(_export._CUSTOM_CALL_TARGETS_GUARANTEED_STABLE)


@contextlib.contextmanager
def module_of_exported(exported: Any) -> Iterator[Any]:
    """Inside, there is the MLIR module of an exported function, in StableHLO, as JAX reads it.

    Raises:
        ValueError: It names a size that no memory has.
    """
    with mlir.make_ir_context():
        try:
            module = exported.mlir_module(serialized=False)
        except MemoryError as error:
            raise ValueError("a size in the program is larger than the memory") from error
        yield module


def operands_of_scan(params: dict[str, Any]) -> tuple[int, int]:
    """Returns how many operands of an equation of `jax.lax.scan` are constants, and are carried.

    Args:
        params: The parameters of the equation. From JAX 0.11 on, a tree has the numbers.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carried, _ = params["ft_in"].unpack()
    return len(consts), len(carried)


def scan_with(
    step: Callable[[Any, list[Any]], tuple[Any, Sequence[Any]]],
    params: dict[str, Any],
    inputs: Sequence[Any],
    extra: Any = None,
) -> tuple[Any, list[Any]]:
    """Runs the loop of an equation of `jax.lax.scan` with another step.

    Args:
        step: Maps the extra carry, and the inputs of the equation's step, to the new extra carry
            and the results of that step.
        params: The parameters of the equation.
        inputs: The inputs of the equation.
        extra: The initial extra carry: what is carried in addition to the loop's own values.

    Returns:
        The final extra carry, and the results of the equation.
    """
    num_consts, num_carry = operands_of_scan(params)
    consts, start = inputs[:num_consts], list(inputs[num_consts : num_consts + num_carry])

    def body(carry: tuple[Any, list[Any]], slices: list[Any]) -> tuple[Any, list[Any]]:
        extra, values = carry
        extra, outputs = step(extra, [*consts, *values, *slices])
        return (extra, list(outputs[:num_carry])), list(outputs[num_carry:])

    (extra, values), stacked = jax.lax.scan(
        body,
        (extra, start),
        list(inputs[num_consts + num_carry :]),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return extra, [*values, *stacked]


def with_cache_misses(
    jitted: Any, around: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Any:
    """Returns a jitted function like `jitted`, for which `around` wraps the function in Python that
    it calls where its compiled code does not know the arguments.
    """
    if isinstance(jitted, types.FunctionType):  # which is Python itself: a test's
        return around(jitted)
    state = jitted.__getstate__()
    kind: Any = type(jitted)
    made = kind.__new__(kind)
    made.__setstate__({**state, "cache_miss": around(state["cache_miss"])})
    vars(made).update(vars(jitted))
    return made


def nothing_is_traced() -> bool:
    """Returns whether this thread computes eagerly, outside all functions that JAX traces."""
    return core.trace_state_clean() or _leave_ended_trace()


def _leave_ended_trace() -> bool:
    """Makes this thread compute eagerly again if it is in the trace of a function that has ended.

    A signal handler that raises just as JAX's trace is about to end leaves the thread in it.

    Returns:
        Whether it was.
    """
    trace: Any = core.trace_ctx.trace
    while isinstance(trace, _Following):
        trace = trace.parent_trace
    if trace is core.eval_trace or is_running(_FOLDER_OF_JAX):
        return False
    core.trace_ctx.set_trace(core.eval_trace)
    return True


# As soon as a public function has ended: the next computation may not ask.
more_ends.append(nothing_is_traced)


class TraceLevel:
    """The function that JAX traces in this thread now, or none.

    JAX adds an operation to the innermost function that it traces. This class adds one to an outer
    function; inner functions close over its result.
    """

    def __init__(self) -> None:
        self._trace = core.trace_ctx.trace

    def copied(self, value: jax.Array) -> jax.Array:
        """Returns a copy that is computed at this level."""
        with core.set_current_trace(self._trace):
            return jnp.copy(value)

    def has(self, value: Any) -> bool:
        """Whether `value` was computed at this level."""
        return getattr(value, "_trace", core.eval_trace) is self._trace


def let_jax_take(kind: type, value_of: Callable[[Any], jax.Array]) -> None:
    """Lets all functions of JAX take an instance of `kind` for the array that `value_of` gives.

    In `jax.tree` the instance is a leaf.
    """
    core.pytype_aval_mappings[kind] = lambda instance: jax.typeof(value_of(instance))
    # Where operations run at once.
    dtypes.register_canonicalize_value_handler(kind, value_of)
    # Where they are traced: JAX asks its symbolic sizes by this name for their values.
    kind.dimension_as_value = value_of  # type: ignore[attr-defined]


def dtype_before_cast(array: Any) -> Any:
    """Returns the dtype that a traced array had before the cast that made it; None if none did.

    Jitted functions between the two are looked through.
    """
    equation = getattr(array, "parent", None)
    if equation is None:
        return None
    place = equation.outvars.index(array.val)
    return _dtype_before_cast(equation, place)


def _dtype_before_cast(equation: Any, place: int) -> Any:
    if equation.primitive.name == "convert_element_type":
        (operand,) = getattr(equation, "in_tracers", None) or equation.invars
        return operand.aval.dtype
    if equation.primitive.name not in ("jit", "pjit"):
        return None
    program = equation.params["jaxpr"].jaxpr
    result = program.outvars[place]
    for inner in program.eqns:
        if result in inner.outvars:
            return _dtype_before_cast(inner, inner.outvars.index(result))
    return None


def constant_value(array: Any, input_value: Callable[[Any], Any] = lambda tracer: None) -> Any:
    """Returns the value of a traced array that is computed from constants alone.

    Of an array that depends on an input of the traced program, on a side effect or on the
    replica, returns None.

    Args:
        array: The array.
        input_value: Gives the values of inputs that are constants, too, and None for others.
    """
    results: dict[int, Sequence[Any]] = {}

    def value_of(value: Any) -> Any:
        value = core.full_lower(value)
        if not isinstance(value, Tracer):
            return value
        equation = getattr(value, "parent", None)
        if equation is None and (known := input_value(value)) is not None:
            return known
        if equation is None or equation.effects:
            raise _NotConstantError
        if id(equation) not in results:
            inputs = [value_of(tracer) for tracer in equation.in_tracers]
            params = equation.primitive.get_bind_params(equation.params)
            outputs = equation.primitive.bind(*inputs, **params)
            results[id(equation)] = outputs if equation.primitive.multiple_results else [outputs]
        return results[id(equation)][equation.outvars.index(value.val)]

    try:
        with jax.ensure_compile_time_eval():
            return value_of(array)
    # An axis of the mesh, and a chain of equations that is too long to follow.
    except (_NotConstantError, NameError, RecursionError):
        return None


def constant_difference(end: Any, start: Any) -> int | None:
    """Returns `end - start` of two integers, also traced ones, if no input can change it.

    Examples:
        >>> def lengths(i):
        ...     print(constant_difference(2 * i + 3, i + i), constant_difference(i, 2 * i))
        >>> _ = jax.make_jaxpr(lengths)(1)
        3 None
    """
    total = 0
    #: Multiples of variables of the program, whose sum and `total` the difference is.
    factors: dict[Any, int] = {}
    tracers: dict[Any, Tracer] = {}

    def add(value: Any, factor: int) -> None:
        nonlocal total
        value = core.full_lower(value)
        if isinstance(value, Tracer):
            variable = _variable_of(value)
            factors[variable] = factors.get(variable, 0) + factor
            tracers[variable] = value
        else:
            total += factor * int(value)

    add(end, 1)
    add(start, -1)
    for tracer, terms in _linear_equations([*tracers.values()][::-1]):  # from the end's on
        factor = factors.pop(_variable_of(tracer), 0)
        for operand, times in terms:
            add(operand, factor * times)
    for variable, factor in factors.items():
        if factor:
            known = constant_value(tracers[variable])
            if known is None:
                return None
            total += factor * int(known)
    return total


#: The most equations that `constant_difference` looks into; bounds are computed by a few.
_MOST_EQUATIONS = 64


def _linear_equations(
    tracers: Sequence[Tracer],
) -> list[tuple[Tracer, list[tuple[Any, int]]]]:
    """Returns what tracers are computed from, as sums of multiples; operands after results."""
    found: list[tuple[Tracer, list[tuple[Any, int]]]] = []
    seen: set[Any] = set()
    waiting: list[tuple[Any, list[tuple[Any, int]] | None]] = [(tracer, None) for tracer in tracers]
    while waiting:
        tracer, terms = waiting.pop()
        if terms is not None:
            found.append((tracer, terms))
            continue
        tracer = core.full_lower(tracer)
        if not isinstance(tracer, Tracer) or _variable_of(tracer) in seen:
            continue
        seen.add(_variable_of(tracer))
        terms = _terms_of(tracer) if len(seen) <= _MOST_EQUATIONS else None
        if terms is not None:
            waiting.append((tracer, terms))
            waiting.extend((operand, None) for operand, _ in terms)
    return found[::-1]


def _terms_of(tracer: Tracer) -> list[tuple[Any, int]] | None:
    """Returns the operands, with their factors, whose sum a traced integer is."""
    equation = getattr(tracer, "parent", None)
    operands: Sequence[Any] = equation.in_tracers if equation else ()
    match equation and equation.primitive.name:
        case "add":
            return [(operands[0], 1), (operands[1], 1)]
        case "sub":
            return [(operands[0], 1), (operands[1], -1)]
        case "neg":
            return [(operands[0], -1)]
        case "convert_element_type" if np.can_cast(operands[0].dtype, tracer.dtype):
            return [(operands[0], 1)]
        case "mul":
            for operand, other in (operands, operands[::-1]):
                times = constant_value(other)
                if times is not None:
                    return [(operand, int(times))]
    return None


def _variable_of(tracer: Tracer) -> Any:
    """Returns the same key for tracers of the same variable of a program that is being made."""
    return tracer.val if hasattr(tracer, "parent") else id(tracer)


class _NotConstantError(Exception):
    """An array depends on an input of its program."""


class _Following:
    """A trace that records how values depend on each other without wrapping them in tracers.

    JAX's own traces wrap each value in a tracer that carries its tangent. Here the tangents are in
    a table keyed by the value's identity: JAX's rules look up the operands there, and the results
    of an operation are unwrapped. So values may leave the trace, be branched on and be stored, like
    those of TensorFlow's tapes, which identify tensors by their ids.
    """

    parent_trace: Any
    tracer_type: Any

    def __init__(self, *args: Any):
        super().__init__(*args)
        # By a weak reference: when a value dies its id is free for others, and what only it
        # needed goes with it, as in JAX's own linearization.
        self._tangents: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def follow(self, value: Any, tangent: Any) -> None:
        """Gives `value` a tangent."""
        # Not a function in Python: what a signal handler raises in one is lost.
        forget = functools.partial(self._tangents.pop, id(value))
        self._tangents[id(value)] = (weakref.ref(value, forget), tangent)

    def tangent_of(self, value: Any) -> Any:
        """Returns the tangent of `value`, or None."""
        return self._tangents.get(id(value), (None, None))[1]

    def to_primal_tangent_pair(self, value: Any) -> tuple[Any, Any]:
        """The requirements of JAX's rules for an operand."""
        tangent = self.tangent_of(value)
        return value, ad.Zero(jax.typeof(value).to_tangent_aval()) if tangent is None else tangent

    def process_primitive(self, primitive: Any, values: Any, params: Any, /) -> Any:
        if self._closes_over_followed(params):
            return self._inlined(primitive, values, params)
        results = self._differentiated(primitive, values, params)
        if primitive.multiple_results:
            return [self._plain(result, values) for result in results]
        return self._plain(results, values)

    def _differentiated(self, primitive: Any, values: Any, params: Any) -> Any:
        return super().process_primitive(primitive, values, params)  # type: ignore[misc]

    def process_custom_jvp_call(
        self, primitive: Any, fun: Any, jvp: Any, values: Any, /, **params: Any
    ) -> Any:
        results = super().process_custom_jvp_call(primitive, fun, jvp, values, **params)  # type: ignore[misc]
        return [self._plain(result, values) for result in results]

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, values: Any, /, **params: Any
    ) -> Any:
        results = super().process_custom_vjp_call(primitive, fun, fwd, bwd, values, **params)  # type: ignore[misc]
        return [self._plain(result, values) for result in results]

    def process_call(self, primitive: Any, fun: Any, values: Any, params: Any, /) -> Any:
        with core.set_current_trace(self):
            return fun.call_wrapped(*values)

    def stage_value(self, value: Any) -> Any:
        return self._plain(super().stage_value(value), [value])  # type: ignore[misc]

    def process_shard_map(self, primitive: Any, fun: Any, values: Any, /, **params: Any) -> Any:
        structure: Any = None

        def stage(*operands: Any) -> list[Any]:
            nonlocal structure
            structure = primitive.bind(*operands, subfuns=(fun,), **params)
            return list(structure)

        # Staged, an operation has what its function closes over as operands.
        program = jax.make_jaxpr(stage)(*values)
        if any(self.tangent_of(constant) is not None for constant in program.consts):
            with core.set_current_trace(self):
                results = eval_jaxpr(program.jaxpr, program.consts, *values)
            return structure.update(results)
        results = super().process_shard_map(primitive, fun, values, **params)  # type: ignore[misc]
        return results.map(lambda result: self._plain(result, values))

    def _closes_over_followed(self, params: dict[str, Any]) -> bool:
        """Whether a followed value is a constant of a program among the parameters.

        A jitted function that closes over an array has it in its program, and not as an operand.
        """
        return any(
            id(constant) in self._tangents
            for program in _programs_in(params)
            for constant in _constants_of(program)
        )

    def _inlined(self, primitive: Any, values: Any, params: dict[str, Any]) -> Any:
        if primitive.name != "jit":
            raise NotImplementedError(
                f"A jitted function inside {primitive.name!r} closes over a value that a gradient "
                "tape follows. Give it the value as an argument."
            )
        program = params["jaxpr"]
        with core.set_current_trace(self):
            return eval_jaxpr(program.jaxpr, program.consts, *values)

    def _plain(self, result: Any, operands: Any) -> Any:
        """Returns what an operation results in as an ordinary value, and follows it."""
        if not isinstance(result, self.tracer_type):
            # A stopped gradient may be the very operand: it needs an identity of its own.
            return self.copied(result) if id(result) in self._tangents else result
        value = result.primal
        if id(value) in self._tangents or any(value is operand for operand in operands):
            value = self.copied(value)
        self.follow(value, result.tangent)
        return value

    def copied(self, value: Any) -> Any:
        """Returns a copy that is not followed."""
        with core.set_current_trace(self.parent_trace):
            return jnp.copy(value)


def _programs_in(params: dict[str, Any]) -> Iterator[Any]:
    for parameter in params.values():
        for item in parameter if isinstance(parameter, tuple | list) else (parameter,):
            if isinstance(item, Jaxpr | ClosedJaxpr):
                yield item


_constants: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def _constants_of(program: Any) -> list[Any]:
    """Returns the arrays that are constants of a program, or of one inside it."""
    if program not in _constants:
        is_closed = isinstance(program, ClosedJaxpr)
        found = list(program.consts) if is_closed else []
        for equation in (program.jaxpr if is_closed else program).eqns:
            for inner in _programs_in(equation.params):
                found += _constants_of(inner)
        _constants[program] = [item for item in found if isinstance(item, jax.Array)]
    return _constants[program]


class _LinearizingTrace(_Following, LinearizeTrace):
    """Records a linear program that maps the tangents of sources to those of values."""

    tracer_type = LinearizeTracer
    #: Makes a source of a value that is not followed; None: it is a constant.
    new_source: Callable[[Any], Any] | None = None

    def to_primal_tangent_pair(self, value: Any) -> tuple[Any, Any]:
        if self.new_source is not None and isinstance(value, jax.Array):
            is_new = self.tangent_of(value) is None
            if is_new and jnp.issubdtype(value.dtype, jnp.inexact):
                self.follow(value, self.new_source(value))
        return super().to_primal_tangent_pair(value)

    def _differentiated(self, primitive: Any, values: Any, params: Any) -> Any:
        try:
            return super()._differentiated(primitive, values, params)
        except (NotImplementedError, ValueError) as error:
            # No derivative: of interest only where a gradient goes through here.
            tangents = [self.tangent_of(value) for value in values]
            tangents = [tangent for tangent in tangents if tangent is not None]
            try:
                types = tuple(map(jax.typeof, values))
                results = primitive.bind_with_trace(self.parent_trace, values, types, params)
            except Exception as other:
                if is_of_a_signal_handler(other):
                    raise
                raise error from None
            several = results if primitive.multiple_results else [results]
            taken = [self._without_derivative(result, tangents, str(error)) for result in several]
            return taken if primitive.multiple_results else taken[0]

    def _without_derivative(self, value: Any, tangents: Sequence[Any], why: str) -> Any:
        if not tangents or not jnp.issubdtype(value.dtype, jnp.inexact):
            return value
        with core.set_current_trace(self.tangent_trace):
            tangent_type = jax.typeof(value).to_tangent_aval()
            tangent = _no_derivative.bind(*tangents, tangent_type=tangent_type, why=why)
        return LinearizeTracer(self, value, tangent)

    def follow_by(self, pull: Callable[..., Any], values: Any, results: Any) -> None:
        """Records `results`, whose cotangents `pull` maps to those of `values`."""
        tangents = [self.to_primal_tangent_pair(value)[1] for value in values]
        are_zero = [isinstance(tangent, ad.Zero) for tangent in tangents]
        if all(are_zero):
            return
        with core.set_current_trace(self.tangent_trace):
            followed = _custom_gradient.bind(
                *(tangent for tangent in tangents if not isinstance(tangent, ad.Zero)),
                pull=pull,
                are_zero=tuple(are_zero),
                tangent_types=tuple(jax.typeof(result).to_tangent_aval() for result in results),
            )
        for result, tangent in zip(results, followed, strict=True):
            self.follow(result, tangent)


_no_derivative = Primitive("no_derivative")
_no_derivative.def_abstract_eval(lambda *tangents, tangent_type, why: tangent_type)


def _refuse_derivative(cotangent: Any, *tangents: Any, tangent_type: Any, why: str) -> Any:
    raise LookupError(why)


ad.primitive_transposes[_no_derivative] = _refuse_derivative

#: The map from the tangents of values to those of results, of which only the transpose is known.
_custom_gradient = Primitive("custom_gradient")
_custom_gradient.multiple_results = True
_custom_gradient.def_abstract_eval(lambda *tangents, tangent_types, **params: tangent_types)


def _pull_custom_gradient(
    cotangents: Sequence[Any],
    *tangents: Any,
    pull: Callable[..., Any],
    are_zero: Sequence[bool],
    tangent_types: Any,
) -> list[Any]:
    pulled = pull(*map(ad.instantiate_zeros, cotangents))
    return [each for each, is_zero in zip(pulled, are_zero, strict=True) if not is_zero]


ad.primitive_transposes[_custom_gradient] = _pull_custom_gradient


class _PushingTrace(_Following, ad.JVPTrace):
    """Follows values by their tangents themselves."""

    tracer_type = ad.JVPTracer


def is_recording() -> bool:
    """Whether what this thread computes is recorded, by a `Recording` or `Pushing`."""
    return isinstance(core.trace_ctx.trace, _Following)


def with_gradient(
    pull: Callable[..., Any], values: Sequence[Any], results: Sequence[Any]
) -> list[Any]:
    """Returns copies of `results` whose gradient for `values` is `pull`, in all recordings.

    Args:
        pull: Maps the cotangents of `results` to a list of those of `values`, with None for a
            value that the results do not depend on.
        values: Arrays.
        results: Arrays of floating-point numbers.
    """
    trace: Any = core.trace_ctx.trace
    traces: list[Any] = []
    while isinstance(trace, _Following):
        traces.append(trace)
        trace = trace.parent_trace
    with core.set_current_trace(trace):
        copies = [jnp.copy(result) for result in results]
    for trace in traces:
        if isinstance(trace, _LinearizingTrace):
            trace.follow_by(pull, values, copies)
            continue
        for result, copied in zip(results, copies, strict=True):
            if trace.tangent_of(result) is not None:
                trace.follow(copied, trace.tangent_of(result))
    return copies


class _TraceSwitch:
    """Inserts a trace into the thread's stack of traces, and removes it."""

    _trace: Any
    _thread: int | None = None

    def switch_on(self) -> None:
        """Pushes the trace onto the stack."""
        self._trace.parent_trace = core.trace_ctx.trace
        core.trace_ctx.set_trace(self._trace)
        self._thread = threading.get_ident()

    def switch_off(self) -> None:
        """Removes the trace from the stack.

        Raises:
            RuntimeError: The trace was switched on in another thread, or JAX has begun to trace a
                function since, and still does.
        """
        if self._thread == threading.get_ident() and not _is_on_the_stack(self._trace):
            return  # a signal handler has interrupted JAX as it was about to put it back
        _replace(self._trace, self._trace.parent_trace)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Switches the trace off inside the context, and back on at its place."""
        below = self._trace.parent_trace
        _replace(self._trace, below)
        try:
            yield
        finally:
            _replace(below, self._trace)


def _is_on_the_stack(trace: Any) -> bool:
    """Whether a trace is among those of this thread; or perhaps, where JAX traces a function."""
    above: Any = core.trace_ctx.trace
    while above is not trace:
        if isinstance(above, DynamicJaxprTrace):
            return True
        above = getattr(above, "parent_trace", None)
        if above is None:
            return False
    return True


def _replace(trace: Any, other: Any) -> None:
    """Replaces `trace` by `other` in the thread's stack of traces."""
    if core.trace_ctx.trace is trace:
        core.trace_ctx.set_trace(other)
        return
    above: Any = core.trace_ctx.trace
    while above is not None and not isinstance(above, DynamicJaxprTrace):
        below = getattr(above, "parent_trace", None)
        if below is trace:
            above.parent_trace = other
            return
        above = below
    raise RuntimeError(
        "A recording ends in the thread in which it began, and outside functions that JAX has "
        "begun to trace since."
    )


class Recording(_TraceSwitch):
    """Records how values depend on sources, for gradients; it implements gradient tapes.

    It is switched off at first.

    Args:
        follows_all: Whether every array that is computed with becomes a source of its own.
    """

    def __init__(self, follows_all: bool = False) -> None:
        self._debug_info = api_util.debug_info("gradient tape", lambda x: x, (0.0,), {})
        self._source_info = source_info_util.current()
        self._tangent_trace = DynamicJaxprTrace(self._debug_info, auto_dce=True)
        self._tangent_trace.tag = core.TraceTag()
        trace = _LinearizingTrace(core.trace_ctx.trace, self._tangent_trace, True)
        trace.new_source = self.new_source if follows_all else None
        self._trace = trace
        self._unknown: set[Any] = set()

    def new_source(self, like: Any) -> Any:
        """Returns a source of values of the type of `like`."""
        tangent_type = jax.typeof(like).to_tangent_aval()
        return self._tangent_trace.new_arg(tangent_type, self._source_info)

    def follow(self, value: Any, source: Any) -> Any:
        """Associates `value` with `source`; None: the value is not followed.

        Returns:
            The value to use instead: a copy, if `value` was computed in the recording.
        """
        known = self._trace.tangent_of(value)
        if known is source:
            return value
        if known is not None:
            value = self._trace.copied(value)
        if source is not None:
            self._trace.follow(value, source)
        return value

    def follow_unknown(self, value: Any) -> None:
        """Notes that `value` may depend on sources in a way that is not recorded."""
        source = self.new_source(value)
        self._unknown.add(source.val)
        self._trace.follow(value, source)

    def source_of(self, value: Any) -> Any:
        """Returns what stands for the recorded `value` as a source or target; None if it is not
        recorded.
        """
        return self._trace.tangent_of(value)

    def pullback(
        self, targets: Sequence[Any], sources: Sequence[Any], constants: Sequence[Any] = ()
    ) -> Callable[..., Any] | None:
        """Returns the function from the cotangents of `targets` to those of `sources`.

        Where no target depends on a source, its cotangent is None. What depends on `constants`
        does not depend on what these were computed from. The function raises a LookupError where
        JAX has no derivative of an operation between the two.

        Returns:
            None if a target depends on a value that was passed to `follow_unknown`.
        """
        outputs = [
            self._tangent_trace.to_jaxpr_tracer(target, self._source_info) for target in targets
        ]
        program, residuals = self._tangent_trace.to_jaxpr(
            outputs, self._debug_info.with_unknown_names(), self._source_info
        )
        program = _with_constants(program, residuals)
        cut = {constant.val for constant in constants}
        program, inputs = _with_inputs_at(program, [source.val for source in sources], cut)
        program, _ = dce_jaxpr(program, [True] * len(program.outvars))
        if self._unknown.intersection(program.invars):
            return None
        wanted = set(inputs)
        program = _between(program, wanted)
        types = {variable: variable.aval.to_ct_aval() for variable in program.invars}
        # JAX leaves out what flows through operations on no examples (the gradient of a
        # convolution's kernel): there it is zeros, on which replicas with examples rely.
        is_empty = any(
            0 in getattr(variable.aval, "shape", ())
            for equation in program.eqns
            for variable in equation.outvars
        )

        def absent(total: ad.Zero) -> Any:
            return total.instantiate() if is_empty else None

        def pull(cotangents: Sequence[Any]) -> list[Any]:
            sums = {
                variable: (ValAccum if variable in wanted else NullAccum)(kind)
                for variable, kind in types.items()
            }
            backward_pass3(program, True, residuals, list(sums.values()), list(cotangents))
            totals = [sums[variable].freeze() if variable in sums else None for variable in inputs]
            return [absent(total) if isinstance(total, ad.Zero) else total for total in totals]

        return pull


class Pushing(_TraceSwitch):
    """Follows values with their tangents, for directional derivatives."""

    def __init__(self) -> None:
        self._trace = _PushingTrace(core.trace_ctx.trace, core.TraceTag())

    def follow(self, value: Any, tangent: Any) -> Any:
        """Gives `value` a tangent, or none.

        Returns:
            What to use for it: a copy, if `value` has another one.
        """
        known = self._trace.tangent_of(value)
        if known is not None and known is not tangent:
            value = self._trace.copied(value)
        if tangent is not None:
            self._trace.follow(value, tangent)
        return value

    def tangent_of(self, value: Any) -> Any:
        """Returns the tangent of `value`; None if there is none."""
        return self._trace.tangent_of(value)


def _with_constants(program: Any, constants: Sequence[Any]) -> Any:
    """Returns a traced program with its constants separated from its inputs.

    From JAX 0.11 on, constants are the program's first inputs until their values are attached.
    """
    return program.with_consts(constants) if hasattr(program, "with_consts") else program


def _between(program: Any, sources: set[Any]) -> Any:
    """Returns a linear `program` without the equations that do not depend on `sources`.

    Other variables that are still used become inputs.
    """
    linear, dependent = set(program.invars), set(sources)
    equations = []
    for equation in program.eqns:
        variables = {atom for atom in equation.invars if not isinstance(atom, Literal)}
        is_linear = not linear.isdisjoint(variables)
        if is_linear:
            linear.update(equation.outvars)
        if not is_linear or not dependent.isdisjoint(variables):
            equations.append(equation)
            dependent.update(equation.outvars if is_linear else ())
    atoms = [*program.outvars, *(atom for equation in equations for atom in equation.invars)]
    used = dict.fromkeys(atom for atom in atoms if not isinstance(atom, Literal))
    inputs = [v for v in used if v in linear and (v in sources or v not in dependent)]
    debug_info = program.debug_info.with_unknown_names()
    return program.replace(invars=inputs, eqns=equations, debug_info=debug_info)


def _with_inputs_at(program: Any, variables: Sequence[Any], cut: set[Any]) -> tuple[Any, list[int]]:
    """Makes an input of every one of `variables` that `program` computes.

    The input is added to the computed value, so that the input's cotangent is the full cotangent
    of the variable, which still propagates to what the variable is computed from. Variables in
    `cut` are replaced by their inputs.

    Returns:
        The new program, and for every variable its input.
    """
    inputs = list(program.invars)
    equations = []
    renamed: dict[Any, Any] = {}

    def now(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else renamed.get(atom, atom)

    wanted = (set(variables) | cut) - set(inputs)
    input_of = dict(zip(inputs, inputs, strict=True))
    for equation in program.eqns:
        equations.append(equation.replace(invars=[now(atom) for atom in equation.invars]))
        for variable in equation.outvars:
            if variable in wanted:
                incoming, total = Var(variable.aval), Var(variable.aval)
                input_of[variable] = incoming
                renamed[variable] = incoming if variable in cut else total
                if variable in cut:
                    continue
                equations.append(
                    new_jaxpr_eqn([variable, incoming], [total], ad.add_jaxvals_p, {}, no_effects)
                )
    for variable in wanted - set(input_of):  # not computed any more: nothing depends on it
        input_of[variable] = Var(variable.aval)
    outputs = [now(atom) for atom in program.outvars]
    debug_info = program.debug_info.with_unknown_names()
    inputs += [incoming for incoming in input_of.values() if incoming not in input_of]
    made = program.replace(invars=inputs, outvars=outputs, eqns=equations, debug_info=debug_info)
    return made, [input_of[variable] for variable in variables]
