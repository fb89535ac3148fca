"""`unison.profiling`: recordings, regions, clocks, and the trace of all workers."""

import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import unison
from peak_memory import peak_memory
from unison import profiling
from unison.profiling import clocks
from unison.profiling.merging import write_worker
from unison.profiling.recording import Slice
from unison.profiling.regions import Programs
from unison.runtime import process_group


def events_of(path):
    with gzip.open(path) as file:
        said = json.load(file)
    return said["traceEvents"], said["metadata"]


def names_by_track(events):
    tracks = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    found = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault(tracks[event["pid"], event["tid"]], []).append(event["name"])
    return found


def test_a_trace_of_runs_has_the_regions_of_every_device(tmp_path):
    strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        weight = unison.Variable(np.ones((64, 64), np.float32))

    def step(x):
        def loss(value):
            return jnp.tanh(x @ value).sum()

        gradient = jax.grad(loss)(weight.read_value())
        weight.assign_sub(0.1 * unison.aggregate(gradient))

    x = unison.PerReplica([np.ones((64, 64), np.float32)] * 2)
    strategy.run(step, (x,))  # compiles
    with profiling.trace(tmp_path):
        strategy.run(step, (x,))
        jax.block_until_ready(weight.read_value())
    events, about = events_of(tmp_path / "trace.json.gz")
    assert about == {"workers": [{"worker": 0, "clock_ahead_s": 0.0, "clock_error_s": 0.0}]}
    tracks = names_by_track(events)
    for device in (0, 1):
        for region in ("forward", "backward", "aggregate"):
            assert tracks[f"device {device}: {region}"]
    # JAX's own file, for TensorBoard's profile plugin.
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))


def test_a_second_trace_in_a_folder_has_nothing_of_the_first(tmp_path):
    for name in ("first", "second"):
        with profiling.trace(tmp_path), jax.profiler.TraceAnnotation(name):
            jnp.ones(3).block_until_ready()
    names = {event["name"] for event in events_of(tmp_path / "trace.json.gz")[0]}
    assert "second" in names
    assert "first" not in names


def test_a_trace_has_nothing_of_more_workers_that_have_used_its_folder_before(tmp_path):
    for worker in range(4):
        write_worker(tmp_path, worker, profiling.Clock(0.0, 0.0), [one("before", 100.0)])
    profiling.merge(tmp_path)
    with profiling.trace(tmp_path):
        pass
    events, about = events_of(tmp_path / "trace.json.gz")
    assert [worker["worker"] for worker in about["workers"]] == [0]
    assert "before" not in {event["name"] for event in events}
    assert [path.name for path in tmp_path.glob("worker-*")] == ["worker-0.trace.json.gz"]


def test_a_worker_that_has_written_elsewhere_is_missed_also_where_there_is_an_older_trace(
    tmp_path, monkeypatch, caplog
):
    write_worker(tmp_path, 1, profiling.Clock(0.0, 0.0), [one("before", 100.0)])
    monkeypatch.setattr(process_group, "count", lambda: 2)
    monkeypatch.setattr(process_group, "all_gather_json", lambda value, what: [value, value])
    with profiling.trace(tmp_path):
        pass
    assert "is without workers [1]: they have written theirs on other machines" in caplog.text


def test_a_trace_ends_when_its_block_raises(tmp_path):
    with pytest.raises(ZeroDivisionError), profiling.trace(tmp_path):
        1 / 0  # noqa: B018
    assert not (tmp_path / "trace.json.gz").exists()
    with profiling.trace(tmp_path):
        pass
    assert (tmp_path / "trace.json.gz").exists()


def test_two_traces_at_once_are_refused(tmp_path):
    with profiling.trace(tmp_path / "a"), pytest.raises(RuntimeError):
        profiling.Recording(tmp_path / "b").start()


def test_programs_of_one_name_are_told_apart_by_their_operations():
    def named(region):
        def program(x):
            with jax.named_scope(region):
                return jnp.tanh(x @ x) if region == "update" else jnp.sort(x)

        return jax.jit(program)

    x = jnp.ones((8, 8))
    programs = [named("update"), named("aggregate")]
    for program in programs:
        program(x).block_until_ready()
    known = Programs(jax.local_devices())
    for program, region in zip(programs, ("update", "aggregate"), strict=True):
        text = program.lower(x).compile().as_text()
        operations = [
            line.split(" = ")[0].split()[-1].lstrip("%")
            for line in text.splitlines()
            if f"/{region}/" in line
        ]
        assert region in known.regions("jit_program", operations).values()


# -- several workers -------------------------------------------------------------------------------


def one(name, begin, **of_operation):
    return Slice("a thread", name, begin, 0.5, **of_operation)


def test_workers_are_processes_of_one_trace_on_one_clock(tmp_path):
    write_worker(tmp_path, 0, profiling.Clock(0.0, 0.0), [one("here", 100.0)])
    write_worker(tmp_path, 1, profiling.Clock(7.0, 0.001), [one("there", 108.0)])
    events, about = events_of(profiling.merge(tmp_path))
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "worker 0", 1: "worker 1"}
    times = {(e["pid"], e["name"]): e["ts"] for e in events if e["ph"] == "X"}
    assert times == {(0, "here"): 100e6, (1, "there"): 101e6}
    assert [worker["clock_error_s"] for worker in about["workers"]] == [0.0, 0.001]


def test_merging_needs_traces_of_workers(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"worker-N\.trace\.json\.gz"):
        profiling.merge(tmp_path)
    (tmp_path / "worker-0.trace.json.gz").write_bytes(b"text")
    with pytest.raises(ValueError, match=r"Expected the trace of a worker in .*worker-0"):
        profiling.merge(tmp_path)


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (f'"{" " * 30_000_000}"', "expected at most .* deflated ones, which hold more"),
        ("[]," * 2_000_000 + "[]", "expected at most .* values in .* bytes, received 40000"),
    ],
    ids=["a text", "many values"],
)
def test_a_small_file_of_a_large_trace_is_refused_in_little_memory(tmp_path, events, said):
    text = f'{{"metadata": {{"workers": []}}, "traceEvents": [{events}]}}'
    (tmp_path / "worker-0.trace.json.gz").write_bytes(gzip.compress(text.encode(), 5))
    del text
    with peak_memory() as peak, pytest.raises(ValueError, match=said):
        profiling.merge(tmp_path)
    assert peak.bytes < 40_000_000


@pytest.mark.parametrize(
    "change", [lambda data: data[:-9], lambda data: data + b"more"], ids=["cut", "longer"]
)
def test_an_incomplete_trace_is_refused(tmp_path, change):
    content = gzip.compress(b'{"metadata": {"workers": []}, "traceEvents": []}')
    (tmp_path / "worker-0.trace.json.gz").write_bytes(change(content))
    with pytest.raises(ValueError, match=r"expected one stream of .* which is incomplete"):
        profiling.merge(tmp_path)


@pytest.mark.parametrize("seed", range(20))
def test_the_clocks_that_are_found_are_as_exact_as_they_say(seed):
    rng = np.random.default_rng(seed)
    ahead = [0.0, *rng.normal(scale=100, size=2)]
    rounds = [[] for _ in ahead]
    now = 1000.0
    for _ in range(12):
        sent = now + rng.exponential(0.01, size=3)
        delays = rng.exponential(0.003, size=(3, 3))
        had_all = (sent[:, None] + delays).max(axis=0)
        now = had_all.max()
        for own, begin, end, off in zip(rounds, sent, had_all, ahead, strict=True):
            own.append((begin + off, end + off))
    for found, true in zip(clocks.clocks_of(rounds), ahead, strict=True):
        assert abs(found.ahead - true) <= found.error + 1e-9
        assert found.error < 0.05
