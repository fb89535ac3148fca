"""What jobs leave on the disk: snapshots, states, folders, calibrations, results, traces."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import zlib

import numpy as np

import unison
from fuzzed.changes import (
    archive_structures,
    change_headed,
    comparable,
    json_of,
    outside_of,
)
from fuzzed.format import Format, is_anything
from fuzzed.mutations import changed_bytes, changed_value
from input_registry import DYNAMIC, registry
from unison.benching.points import Point
from unison.benching.records import Record
from unison.benching.results import NoResultsError, Results
from unison.collectives.communication import CommunicationOptions
from unison.data import Dataset, service
from unison.data.state import decode, encode
from unison.monitoring.running_jobs import RunningJob, published, running_jobs
from unison.net import secret
from unison.parameter_server.jobs import Jobs
from unison.parameter_server.snapshots import Part, Snapshots
from unison.planning.calibration import Calibration, read_calibration
from unison.planning.hardware import Device, Link
from unison.profiling.merging import merge
from unison.runtime.elastic import persisted_state
from unison.runtime.elastic.group import _unpacked_state
from unison.runtime.launching import JobFolder
from unison.storage import checksummed
from unison.storage.inflating import GZIP
from unison.storage.journal import Journal
from unison.train.handover import Handover

# -- parameter servers ---------------------------------------------------------------------------


def write_snapshot(folder):
    facts = {"rights": {"s": "update"}, "programs": {}, "done": [1, 3], "settled": 1, "applied": 2}
    arrays = {"variable 0/0": np.arange(6, dtype=np.float32).reshape(2, 3)}
    entry = ["s", "v", [[2, 3], "float32", [[0, 0, 2]], None]]
    shared = Part({"entries": [entry], "places": {"s": [1, 0]}}, {"@s/v/0": np.ones(4)})
    Snapshots(folder, "ps-0").write({"shared": shared, "job a": Part(facts, arrays)})


def read_snapshot(folder):
    parts = Jobs(Snapshots(folder, "ps-0"), is_lasting=True)._parts()
    return comparable({name: [part.facts, part.arrays] for name, part in parts.items()})


def is_whole_or_nothing(found, right):
    return found in (right, {"shared": [{"entries": [], "places": {}}, {}]})


def snapshot_header(folder, chance):
    return change_headed(folder / "ps-0.1.snapshot", folder, chance)


def write_key(folder):
    os.environ["XDG_CONFIG_HOME"] = str(folder)
    os.environ.pop(secret.KEY_VARIABLE, None)
    secret.key()


def read_key(folder):
    os.environ["XDG_CONFIG_HOME"] = str(folder)
    return secret.key().hex()


# -- elastic jobs --------------------------------------------------------------------------------


def state_of(fill):
    return Handover(a=unison.Variable(np.full((3, 4), fill, np.float32)))


ORIGIN = persisted_state.Origin(1, 2, 30, "abc")


def write_state(folder):
    held = json.dumps([1, 1, [2, "abc"]]).encode() + b"\n" + state_of(2.5).pack()
    persisted_state.keep_state(str(folder), ORIGIN, lambda: held)
    persisted_state.keep_part(str(folder), ORIGIN, 0, b"")


def read_state(folder):
    kept = persisted_state.kept_state(str(folder))
    if kept is None:
        return None
    loops, run, computed_in, packed = _unpacked_state(kept.held)
    parts = persisted_state.kept_parts(str(folder), kept.origin)
    state = state_of(0.0)
    state.resume(packed, [part for part in parts.values() if part])
    return comparable([kept.origin, loops, run, computed_in, sorted(parts), state.a.numpy()])


def state_header(folder, chance):
    return change_headed(folder / "state", folder, chance)


def state_of_the_job(folder, chance):
    """Changes what is behind the header: where the state is from, and the archive."""
    header, held = checksummed.read_headed(str(folder / "state"))
    about, packed = checksummed.header_and_data(held)
    if chance.random() < 0.5:
        about, how = changed_value(about, chance, outside_of(folder))
    else:
        packed, how = changed_bytes(packed, chance)
    with (folder / "state").open("wb") as file:
        pieces = [checksummed.header_line(header), checksummed.header_line(about), packed]
        checksummed.write(file, pieces)
    return how


def state_archive(folder, chance):
    header, held = checksummed.read_headed(str(folder / "state"))
    about, packed = checksummed.header_and_data(held)
    (folder / "archive").write_bytes(packed)
    how = chance.choice(archive_structures("archive"))(folder, chance)
    pieces = [checksummed.header_line(header), checksummed.header_line(about)]
    with (folder / "state").open("wb") as file:
        checksummed.write(file, [*pieces, (folder / "archive").read_bytes()])
    return how


def write_job(folder):
    with JobFolder(str(folder / "job")) as job:
        job.token()
        job.publish("127.0.0.1:80")
        job.note({"event": "started"})


def read_job(folder):
    with JobFolder(str(folder / "job")) as job:
        token = job.token()
        job.publish("127.0.0.1:80")
        job.forget_state()
        return token


# -- running jobs --------------------------------------------------------------------------------


def write_running(folder):
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    with published(RunningJob(7, "train.py", "127.0.0.1:5000", "token")):
        (path,) = (folder / "unison").glob("*.json")
        content = path.read_bytes()
    path.write_bytes(content)


def read_running(folder):
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    with open(next((folder / "unison").glob("*.json")), "rb") as file:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)  # as the launcher that runs
        return comparable(running_jobs())


# -- plans, options, results, traces -------------------------------------------------------------


def write_calibration(folder):
    device = Device("cpu", 1e9, 1e10, 1e11, 1e11, 1.0, True, ((1e6, 1e10), (1e7, 1e9)))
    link = Link("measured", 1e9, 1e-5)
    Calibration(device, link, 2, link).write(str(folder / "calibration.json"))


def read_calibrations(folder):
    found = read_calibration(str(folder / "calibration.json"))
    found.device.compute_seconds(1e9, 1e8)
    found.device.compute_seconds(1e9, 1e8, bytes_in_use=5e6)
    return comparable(found)


def write_options(folder):
    options = CommunicationOptions(1 << 20, 30.0, method="TREE")
    options.save(folder / "options.json")


def read_options(folder):
    return repr(CommunicationOptions.from_file(folder / "options.json"))


def write_results(folder):
    fields = Record.__dataclass_fields__
    record = dict.fromkeys(fields) | {"launches": [(1, 0.5)]}
    point = dict.fromkeys(Point.__dataclass_fields__, 1)
    described = {
        "what": "unison bench", "format": 1, "target": "x", "machine": "m", "notes": [],
        "points": [point | {"rounds": [record]}],
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(described))


def read_results(folder):
    return repr(Results.read(folder / "results.json"))


def write_trace(folder):
    for number in range(2):
        told = {
            "metadata": {"workers": [{"worker": number}]},
            "traceEvents": [{"ph": "X", "ts": 1.0, "pid": number}] * 20,
        }
        content = gzip.compress(json.dumps(told).encode(), mtime=0)
        (folder / f"worker-{number}.trace.json.gz").write_bytes(content)


def read_trace(folder):
    with gzip.open(merge(folder)) as file:
        return json.load(file)


def trace_values(folder, chance):
    path = chance.choice(sorted(folder.glob("worker-*")))
    value, how = changed_value(json.loads(gzip.decompress(path.read_bytes())), chance, "/x")
    path.write_bytes(gzip.compress(json.dumps(value).encode()))
    return how


#: What a file that is a thousand times smaller may have any number of.
REPEATED = (" ", "9", "1e9,", "[],", '{"a":"b"},', r'"\ud83d\ude00",', "[", '{"a":')


def trace_bomb(folder, chance):
    """A small file of a trace that is large: as text, as values, or as one value."""
    piece, count = chance.choice(REPEATED), 10 ** chance.randint(3, 7)
    value = chance.choice([f"{piece * count}0", rf'"\ud83d\ude00{"a" * 10 * count}"'])
    text = f'{{"metadata": {{"workers": []}}, "traceEvents": [{value}]}}'
    packer = zlib.compressobj(wbits=GZIP)
    content = packer.compress(text.encode()) + packer.flush()
    chance.choice(sorted(folder.glob("worker-*"))).write_bytes(content)
    return f"{len(text)} characters in {len(content)} bytes: {value[:20]}"


# -- the position of an iterator -----------------------------------------------------------------


def positions():
    return Dataset.range(50).shuffle(20, seed=3).map(lambda x: (x, x * 2)).batch(4)


def write_position(folder):
    iterator = iter(positions())
    for _ in range(5):
        next(iterator)
    text, data = encode(iterator.get_state())
    (folder / "position.json").write_text(text)
    (folder / "position").write_bytes(data.tobytes())


def read_position(folder):
    text = (folder / "position.json").read_bytes().decode(errors="replace")
    data = np.frombuffer((folder / "position").read_bytes(), np.uint8)
    position = decode(text, data)
    iterator = iter(positions())
    iterator.set_state(position)
    return comparable([position, list(itertools.islice(iterator, 40))])


def inner_position(folder, chance):
    """Changes what the position itself says, which is text in the state of the iterator."""
    path = folder / "position.json"
    state = json.loads(path.read_text())
    inner, how = changed_value(json.loads(state["position"]), chance, outside_of(folder))
    path.write_text(json.dumps(state | {"position": json.dumps(inner)}))
    return how


# -- input services ------------------------------------------------------------------------


def write_journal(folder):
    events = []
    made = registry(events=events)
    worker = made.hear_worker("w", "127.0.0.1:1", None, 0.0)
    number = made.join("c", "j", 0, DYNAMIC, 0.0).number
    made.hand_out(number, 0, 0, 4, "w", 1)
    made.end_tasks(worker, [number])
    _append(folder, events)


def _append(folder, records):
    with contextlib.closing(Journal(str(folder / "dispatcher.journal"))) as journal:
        for event, payload in records:
            journal.append(event, payload)


def _records(folder):
    with contextlib.closing(Journal(str(folder / "dispatcher.journal"))) as journal:
        return journal.records


def read_journal(folder):
    service.DispatchServer(
        service.DispatcherConfig(work_dir=str(folder), fault_tolerant_mode=True)
    ).stop()
    return [[event, payload.decode(errors="replace")] for event, payload in _records(folder)]


def is_beginning(found, right):
    """A record that was not written completely is the last one, and does not count."""
    return found == right[: len(found)]


def journal_record(folder, chance):
    records = _records(folder)
    place = chance.randrange(len(records))
    event, payload = records[place]
    changed, how = changed_value(event, chance, outside_of(folder))
    records[place] = changed, payload
    os.remove(folder / "dispatcher.journal")
    _append(folder, records)
    return f"{place} {how}"


FORMATS = {
    "input-journal": Format(write_journal, read_journal, [journal_record], (), is_beginning),
    "snapshot": Format(
        write_snapshot, read_snapshot, [snapshot_header], is_right=is_whole_or_nothing
    ),
    "key": Format(write_key, read_key, (), (ValueError, PermissionError), is_anything),
    "elastic-state": Format(
        # A ValueError: a variable has another shape.
        write_state,
        read_state,
        [state_header, state_of_the_job, state_archive],
        (ValueError,),
    ),
    "job-folder": Format(write_job, read_job, is_right=is_anything),
    "running-jobs": Format(write_running, read_running, [json_of("*.json")], is_right=is_anything),
    "calibration": Format(
        write_calibration, read_calibrations, [json_of("*.json")], (ValueError,), is_anything
    ),
    "options": Format(write_options, read_options, [json_of("*.json")], (ValueError,), is_anything),
    "bench-results": Format(
        write_results, read_results, [json_of("*.json")], (NoResultsError,), is_anything
    ),
    "trace": Format(
        write_trace, read_trace, [trace_values, trace_bomb], (ValueError,), is_anything
    ),
    "position": Format(
        write_position,
        read_position,
        [json_of("*.json"), inner_position, inner_position],
        (ValueError,),
        is_anything,
    ),
}
