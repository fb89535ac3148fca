"""What programs ask and say about the machine: settings, devices, the profiler, printing."""

import collections
import io
import os
import pathlib

import jax
import numpy as np
import pytest

import unison
import unison.tf as tf
from subprocess_program import run_program
from unison.runtime.devices import BackendStartedError


def test_settings_are_remembered():
    assert tf.config.optimizer.get_jit() == ""
    tf.config.optimizer.set_jit(True)
    assert tf.config.optimizer.get_jit() == "autoclustering"
    tf.config.optimizer.set_jit(False)
    tf.config.optimizer.set_experimental_options({"layout_optimizer": True})
    assert tf.config.optimizer.get_experimental_options() == {"layout_optimizer": True}
    with pytest.raises(ValueError, match="autoclustering"):
        tf.config.optimizer.set_jit("sometimes")


def test_functions_run_eagerly_when_told():
    seen = []

    @tf.function
    def look(x):
        seen.append(isinstance(x, jax.core.Tracer))
        return x

    tf.config.run_functions_eagerly(True)
    try:
        look(tf.constant(1.0))
        assert tf.config.functions_run_eagerly()
    finally:
        tf.config.run_functions_eagerly(False)
    look(tf.constant(1.0))
    assert seen == [False, True]


def test_the_precision_of_products_can_be_chosen():
    before = jax.config.jax_default_matmul_precision
    try:
        tf.config.experimental.enable_tensor_float_32_execution(False)
        assert not tf.config.experimental.tensor_float_32_execution_enabled()
        assert jax.config.jax_default_matmul_precision == "highest"
        tf.config.experimental.enable_tensor_float_32_execution(True)
        assert tf.config.experimental.tensor_float_32_execution_enabled()
    finally:
        jax.config.update("jax_default_matmul_precision", before)


def test_determinism_is_asked_of_xla():
    program = """
import os
import unison.tf as tf
tf.config.experimental.enable_op_determinism()
tf.config.experimental.enable_op_determinism()
print(os.environ["XLA_FLAGS"].count("--xla_gpu_deterministic_ops=true"), float(tf.constant(1.0)))
"""
    finished = run_program(program, imported=("jax", "unison"))
    assert finished.stdout.split() == ["1", "1.0"], finished.stderr


def test_determinism_is_asked_for_without_tensorflows_names():
    program = """
import os
import unison
unison.enable_op_determinism()
print(os.environ["XLA_FLAGS"].count("--xla_gpu_deterministic_ops=true"))
"""
    finished = run_program(program, imported=("jax",))
    assert finished.stdout.split() == ["1"], finished.stderr


def test_determinism_is_too_late_once_a_gpu_is_started(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=folder")
    jax.devices()
    unison.enable_op_determinism()  # on CPUs nothing is missed
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(BackendStartedError, match="--xla_gpu_deterministic_ops"):
        unison.enable_op_determinism()
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to=folder"


def test_the_cpu_counts_no_memory():
    with pytest.raises(ValueError, match="the CPU has none"):
        tf.config.experimental.get_memory_info("CPU:0")


def test_there_is_no_gpu_here():
    assert not tf.test.is_gpu_available()
    assert tf.test.gpu_device_name() == ""
    assert tf.test.is_built_with_xla()
    assert not tf.test.is_built_with_rocm()


def test_without_a_tpu_there_is_none_to_set_up():
    with pytest.raises(RuntimeError, match="Expected a TPU on this machine"):
        tf.tpu.experimental.initialize_tpu_system(None)


def test_the_version_is_tensorflows():
    assert tf.version.VERSION == "2.21.0"
    assert tf.__version__.startswith("2.21.0")


def test_nothing_is_converted():
    @tf.autograph.experimental.do_not_convert
    def same(x):
        return x

    assert same(3) == tf.autograph.experimental.do_not_convert()(same)(3) == 3


def test_the_profiler_writes_a_trace(tmp_path):
    profiler = tf.profiler.experimental
    with profiler.Profile(str(tmp_path)), profiler.Trace("train", step_num=1):
        tf.ones([2]).block_until_ready()
    assert list(pathlib.Path(tmp_path).rglob("*.xplane.pb"))


def test_text_is_printed_as_tensorflow_prints_it():
    stream = io.StringIO()
    tf.print(tf.constant("a"), tf.constant(["b", "c"]), "d", output_stream=stream)
    assert stream.getvalue() == '"a" ["b" "c"] d\n'


def test_lines_can_be_appended_to_a_file(tmp_path):
    for number in (1, 2):
        tf.print("line", number, output_stream=f"file://{tmp_path}/log.txt")
    assert (tmp_path / "log.txt").read_text() == "line 1\nline 2\n"
    with pytest.raises(ValueError, match="file://"):
        tf.print("line", output_stream="log.txt")


Point = collections.namedtuple("Point", ["y", "x"])


@pytest.mark.parametrize(
    "structure",
    [
        [1, (2, 3)],
        {"b": 1, "a": [2]},
        collections.OrderedDict([("b", 1), ("a", 2)]),
        collections.defaultdict(list, {"a": 1}),
        Point(1, Point(2, 3)),
        5,
    ],
)
def test_a_structure_is_put_together_again(structure):
    leaves = tf.nest.flatten(structure)
    packed = tf.nest.pack_sequence_as(structure, leaves)
    assert packed == structure
    assert type(packed) is type(structure)
    if isinstance(structure, collections.OrderedDict):
        assert list(packed) == ["b", "a"]


def test_the_values_of_replicas_are_leaves_when_asked_for():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    value = strategy.run(lambda: tf.constant(1))
    assert len(tf.nest.flatten([value])) == 1
    assert len(tf.nest.flatten([value], expand_composites=True)) == 2
    doubled = tf.nest.map_structure(lambda x: x * 2, [value], expand_composites=True)
    assert [int(part) for part in doubled[0].values] == [2, 2]


def test_the_start_of_a_slice_may_be_computed_by_the_program():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        return tf.slice(x, tf.stack([index]), [2])

    parts = strategy.run(step, args=(tf.range(4),)).values
    assert [part.tolist() for part in parts] == [[0, 1], [1, 2]]


def test_an_index_out_of_range_gives_zeros_in_a_program():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    rows = strategy.run(lambda x: tf.gather(x, [0, 7]), args=(tf.constant([5.0, 6.0]),)).values
    assert rows[0].tolist() == [5.0, 0.0]


def test_random_crops_and_flips_work_in_programs():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    def augment(images):
        images = tf.image.random_flip_left_right(images)
        images = tf.image.random_brightness(images, 0.1)
        return tf.image.random_crop(images, [2, 4, 4, 3])

    image = np.arange(2 * 6 * 6 * 3, dtype=np.float32).reshape(2, 6, 6, 3)
    one, another = strategy.run(augment, args=(image,)).values
    assert one.shape == (2, 4, 4, 3)
    assert one.tolist() != another.tolist()
