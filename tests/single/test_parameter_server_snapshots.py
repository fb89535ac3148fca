"""Snapshots of parameter servers: whatever is lost at whatever instant, updates count once."""

import dataclasses
import errno
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import unison
from parameter_server_threads import free_addresses
from unison.net.array_messages import Message
from unison.parameter_server import (
    ClusterCoordinator,
    ParameterServerStrategy,
    Server,
    VariableStore,
)
from unison.parameter_server.jobs import Jobs
from unison.parameter_server.servers import VariableServer
from unison.parameter_server.snapshots import Part, Snapshots
from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers import SimpleClusterResolver
from unison.storage import checksummed


def numbered(number):
    """The parts of a snapshot, with arrays of several forms."""
    arrays = {
        "many": np.full((2, 5), number, np.float32),
        "one": np.array(number, jnp.bfloat16),
        "none": np.zeros((0, 3), np.int64),
    }
    return {"shared": Part({"number": number}, arrays), "job a": Part({}, {})}


def kept(folder):
    """The number of the latest whole snapshot in a folder."""
    return Snapshots(folder, "ps-0").latest()["shared"].facts["number"]


def watch_writing(monkeypatch, look):
    """Has `look` called before and after each call by which a snapshot's files change."""

    def watched(change):
        def changed(*args, **options):
            look()
            change(*args, **options)
            look()

        return changed

    monkeypatch.setattr(os, "fsync", watched(os.fsync))
    monkeypatch.setattr(os, "replace", watched(os.replace))
    monkeypatch.setattr(pathlib.Path, "unlink", watched(pathlib.Path.unlink))


def test_arrays_and_facts_come_back_as_they_were(tmp_path):
    Snapshots(tmp_path, "ps-0").write(numbered(7))
    found = Snapshots(tmp_path, "ps-0").latest()
    assert found.keys() == numbered(7).keys()
    facts, arrays = found["shared"]
    assert facts == {"number": 7}
    for name, array in numbered(7)["shared"].arrays.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays[name], array)


def test_servers_that_share_a_folder_have_their_own_snapshots(tmp_path):
    for number, name in enumerate(["ps-1", "ps-11", "at-[::1]:4000"]):
        Snapshots(tmp_path, name).write(numbered(number))
    for number, name in enumerate(["ps-1", "ps-11", "at-[::1]:4000"]):
        assert Snapshots(tmp_path, name).latest()["shared"].facts["number"] == number
    assert Snapshots(tmp_path, "ps-2").latest() is None


def test_a_snapshot_is_there_as_a_whole_at_each_instant(tmp_path, monkeypatch):
    folder = tmp_path / "kept"
    snapshots = Snapshots(folder, "ps-0")
    for number in (1, 2):
        snapshots.write(numbered(number))
    found = []
    with monkeypatch.context() as patched:
        watch_writing(patched, lambda: found.append(kept(folder)))
        snapshots.write(numbered(3))
    assert len(found) >= 6
    assert found == sorted(found)
    assert set(found) == {2, 3}
    # The one before stays, and no more.
    assert sorted(os.listdir(folder)) == ["ps-0.2.snapshot", "ps-0.3.snapshot"]


def test_a_torn_or_flipped_snapshot_is_named_and_the_one_before_is_used(tmp_path, caplog):
    snapshots = Snapshots(tmp_path, "ps-0")
    for number in (1, 2):
        snapshots.write(numbered(number))
    path = tmp_path / "ps-0.2.snapshot"
    whole = path.read_bytes()
    torn = [whole[:size] for size in range(len(whole))]
    flipped = [
        whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]
        for place in range(len(whole))
    ]
    for damaged in (*torn, *flipped):
        caplog.clear()
        path.write_bytes(damaged)
        assert kept(tmp_path) == 1
        assert f"{path} is corrupt: checksum mismatch" in caplog.text
    # The next one is written beside the one that is whole.
    snapshots = Snapshots(tmp_path, "ps-0")
    snapshots.latest()
    snapshots.write(numbered(3))
    assert sorted(os.listdir(tmp_path)) == ["ps-0.1.snapshot", "ps-0.3.snapshot"]
    assert kept(tmp_path) == 3


@pytest.mark.parametrize(
    "arrays",
    [
        [["a", "float32", [2**62, 4]]],
        [["a", "float32", [-1]]],
        [["a", "float32", [3]]],  # there are bytes for two
        [["a", "float32", [1]]],
        [["a", "object", [1]]],
        [["a", "float32"]],
        [["a", "float32", [1e999]]],
        [[7, "float32", [2]]],
        {"a": 1},
    ],
    ids=str,
)
def test_a_snapshot_of_right_checksum_and_wrong_arrays_is_corrupt(tmp_path, caplog, arrays):
    Snapshots(tmp_path, "ps-0").write(numbered(1))
    header = checksummed.header_line({"shared": {"facts": {}, "arrays": arrays}})
    with (tmp_path / "ps-0.2.snapshot").open("wb") as file:
        checksummed.write(file, [header, bytes(8)])
    assert kept(tmp_path) == 1
    assert "ps-0.2.snapshot is corrupt" in caplog.text


def facts_of_job(**others):
    return {"rights": {}, "programs": {}, "done": [], "settled": 0, "applied": 0} | others


def calling_back():
    """A program that calls whatever address it finds in an attribute."""
    target = "xla_ffi_python_cpu_callback"
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((3,), np.float32))
    checks = [jax.export.DisabledSafetyCheck.custom_call(target)]
    exported = jax.export.export(jax.jit(call), disabled_checks=checks)
    data = exported(jax.ShapeDtypeStruct((3,), np.float32)).serialize()
    return {"program 1": np.frombuffer(bytes(data), np.uint8)}


INSTALLED = {"1": {"inputs": [], "outputs": [], "whole_inputs": []}}


@pytest.mark.parametrize(
    "parts",
    [
        {"shared": Part({}, {})},
        {"shared": Part({"entries": [["a", "b", [[-1], "f4", [], None]]], "places": {}}, {})},
        {"shared": Part({"entries": [], "places": {"a": [1]}}, {})},
        {"job a": Part(facts_of_job(rights=["read"]), {})},
        {"job a": Part(facts_of_job(done=[1e999]), {})},
        {"job a": Part(facts_of_job(applied=-1), {})},
        {"job a": Part({}, {})},
        {"elsewhere": Part(facts_of_job(), {})},
        {"job a": Part(facts_of_job(), {"program 1": np.zeros(9, np.uint8)})},
        {"job a": Part(facts_of_job(programs=INSTALLED), {"program x": np.zeros(9, np.uint8)})},
        {"job a": Part(facts_of_job(programs=INSTALLED), {"program 1": np.zeros(9, np.uint8)})},
    ],
    ids=lambda parts: str(parts)[:60],
)
def test_a_server_takes_the_snapshot_before_one_of_wrong_facts(tmp_path, caplog, parts):
    assert jobs_of_the_snapshot_before(tmp_path, parts) == {"b"}
    assert "Skipping a snapshot for the one before it" in caplog.text


def test_a_server_runs_no_program_of_a_snapshot_that_calls_back(tmp_path, caplog):
    parts = {"job a": Part(facts_of_job(programs=INSTALLED), calling_back())}
    assert jobs_of_the_snapshot_before(tmp_path, parts) == {"b"}
    assert "calls 'xla_ffi_python_cpu_callback'" in caplog.text


def jobs_of_the_snapshot_before(folder, parts):
    """Writes a good snapshot, and one of these parts; returns the jobs of a server there."""
    snapshots = Snapshots(folder, "ps-0")
    shared = {"shared": Part({"entries": [], "places": {}}, {})}
    snapshots.write({**shared, "job b": Part(facts_of_job(), {})})
    snapshots.write(shared | parts)
    return Jobs(Snapshots(folder, "ps-0"), is_lasting=True)._jobs.keys()


def test_where_none_is_whole_the_server_begins_anew(tmp_path, caplog):
    (tmp_path / "ps-0.1.snapshot").write_bytes(b"nothing")
    assert Snapshots(tmp_path, "ps-0").latest() is None
    assert "ps-0.1.snapshot is corrupt" in caplog.text


def test_a_full_disk_leaves_the_last_snapshot_and_the_next_try_succeeds(tmp_path, monkeypatch):
    jobs = Jobs(Snapshots(tmp_path, "ps-0"), is_lasting=False)
    begin = Message("begin", {"job": "a", "is_new": True}, [])
    variables, _ = jobs.begin(begin)
    for number in range(2):
        kind = "assign" if number else "create"
        variables.answer(Message(kind, {"keys": ["0/0"]}, [np.full(3, number)]))
        if number:
            with monkeypatch.context() as patched:
                patched.setattr(os, "fsync", full_disk)
                with pytest.raises(OSError, match="No space"):
                    jobs.write_snapshot()
            assert os.listdir(tmp_path) == ["ps-0.1.snapshot"]
        jobs.write_snapshot()
    again, (_, _, about) = Jobs(Snapshots(tmp_path, "ps-0"), False).begin(
        Message("begin", {"job": "a", "is_new": False}, [])
    )
    assert about["has_state"]
    assert values(again, ["0/0"])[0].tolist() == [1, 1, 1]


def full_disk(file):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def values(variables, keys):
    _, arrays, _ = variables.answer(Message("read", {"keys": keys}, []))
    return arrays


@pytest.fixture
def updated(monkeypatch, tmp_path):
    """A server with a job, one update that is pushed, and the keys of what that adds 1 to."""
    monkeypatch.setenv("UNISON_PS_CHECKPOINTS", str(tmp_path / "kept"))
    monkeypatch.setattr(Server, "_keep", lambda self: None)
    pushed = []

    class Listening(VariableServer):
        def _on_push(self, message):
            arrays = [np.array(array) for array in message.arrays]  # they lie in shared memory
            pushed.append(dataclasses.replace(message, arrays=arrays))
            return super()._on_push(message)

    monkeypatch.setattr("unison.parameter_server.jobs.VariableServer", Listening)
    worker, ps = free_addresses(2)
    cluster = ClusterSpec({"worker": [worker], "ps": [ps]})
    servers = Server(cluster, "worker", 0), Server(cluster, "ps", 0, is_lasting=True)
    strategy = ParameterServerStrategy(SimpleClusterResolver(cluster), timeout_seconds=30)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        own = unison.Variable(np.zeros(3, np.float32))
        with VariableStore("store"):
            shared = unison.Variable(np.zeros(3, np.float32), name="shared")
            table = unison.Variable(np.zeros((4, 2), np.float32), name="table")

    def add(ids):
        own.assign_add(jnp.ones(3))
        shared.assign_add(jnp.ones(3))
        table.assign_add(jax.grad(lambda rows: rows[ids].sum())(table.value()))  # by rows

    coordinator.schedule(add, args=(np.array([2]),))
    coordinator.join()
    (push,) = pushed
    assert any(update["has_rows"] for update in push["updates"])
    keys = [variable.cell.shards[0].key for variable in (own, shared, table)]
    yield servers[1]._jobs, strategy.store.job, f"at-{ps}", push, keys
    coordinator.end()
    for server in servers:
        server.stop()


def test_an_update_counts_once_at_whatever_instant_the_server_is_lost(
    updated, tmp_path, monkeypatch
):
    jobs, job, name, push, keys = updated
    moments = []

    def push_and_copy():
        """An update comes while the snapshot is written, and then the server may be killed."""
        apply(jobs._jobs[job], push, len(moments) + 2)
        moments.append(tmp_path / str(len(moments)))
        shutil.copytree(tmp_path / "kept", moments[-1])

    jobs.write_snapshot()
    with monkeypatch.context() as patched:
        watch_writing(patched, push_and_copy)
        for _ in range(2):
            push_and_copy()
            jobs.write_snapshot()
    assert len(moments) > 12
    found = set()
    for sent, moment in enumerate(moments, start=2):
        restored = Jobs(Snapshots(moment, name), is_lasting=True)
        variables, (_, _, about) = restored.begin(
            Message("begin", {"job": job, "is_new": False}, [])
        )
        assert about["has_state"]
        found.add(about["restored"])
        assert counts(variables, keys) == [about["restored"]] * 3
        for closure in range(1, sent + 1):  # whoever had no answer asks again
            apply(variables, push, closure)
        assert counts(variables, keys) == [sent] * 3
    assert len(found) == 3


def apply(variables, push, closure):
    fields = {**push.fields, "closure": closure, "settled": 0}
    variables.answer(dataclasses.replace(push, fields=fields))


def counts(variables, keys):
    """How many updates each variable has, of which one adds 1 to it."""
    own, shared, table = values(variables, keys)
    return [int(own[0]), int(shared[0]), int(table[2, 0])]


def test_a_job_that_has_ended_is_in_no_later_snapshot(updated, tmp_path):
    jobs, job, name, _, keys = updated
    jobs.write_snapshot()
    jobs.wants_snapshot.clear()
    jobs.leave(job)
    assert jobs.wants_snapshot.is_set()
    jobs.write_snapshot()
    restored = Jobs(Snapshots(tmp_path / "kept", name), is_lasting=True)
    _, (_, _, about) = restored.begin(Message("begin", {"job": job, "is_new": False}, []))
    assert not about["has_state"]
    assert restored._shared.values[keys[1]].tolist() == [1, 1, 1]
