"""The state that supervisors hold in memory: its slots, records on their way, and holdings."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import zlib

import numpy as np

import unison
from fuzzed.changes import comparable, json_of, outside_of
from fuzzed.format import Format, is_anything
from fuzzed.mutations import LENGTHS, changed_value
from unison.runtime.host_memory import WorkerMemory
from unison.runtime.launching import record_transfer
from unison.runtime.launching.holdings import (
    Holding,
    are_records_held,
    newest_common_step,
    parsed_holding,
)
from unison.runtime.launching.record_transfer import RecordConnection, parsed_offer
from unison.storage.memory_slots import MemorySlots
from unison.train.in_memory import InMemoryCheckpoints
from unison.train.loop_state import LoopState
from unison.train.memory_record import RecordWriter

#: A slot's page: its magic bytes, the step, the sizes of data and header, and their checksum.
_FIELDS = struct.Struct("<8sqqq")
_PAGE = 4096
_SLOTS = ("first", "second")


class _Position:
    def __init__(self, value):
        self.value = value

    def get_state(self):
        return self.value

    def set_state(self, state):
        self.value = state


def state_of(fill, position):
    strategy = unison.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        weights = unison.Variable(np.full((3, 4), fill, np.float32))
        own = unison.Variable(
            fill,
            synchronization=unison.VariableSynchronization.ON_READ,
            aggregation=unison.VariableAggregation.SUM,
        )
    place = _Position(position)
    return LoopState(strategy.placement, weights=weights, own=own, position=place), weights, place


def record(slots, step):
    state, *_ = state_of(float(step), {"epoch": step, "order": np.arange(step)})
    about = {"workers": 1, "worker": 0, "first": 0, "loop": 0, "position": [step], "process": "{}"}
    RecordWriter(state, slots, is_first=True).finish(step, about | {"step": step})


def restored(slots):
    """What a worker that starts again has of the records."""
    state, weights, place = state_of(0.0, {"epoch": 0, "order": np.arange(0)})
    checkpoints = InMemoryCheckpoints(WorkerMemory([slots], 0))
    entry = checkpoints.enter(state)
    return comparable([entry.name, checkpoints.steps, weights.numpy(), place.value, slots.copied])


# -- slots ---------------------------------------------------------------------------------------


def write_slots(folder):
    with contextlib.closing(MemorySlots.create("fuzzed")) as slots:
        for step in (5, 6):
            record(slots, step)
        slots.mark_copied(5)
        for name, descriptor in zip(_SLOTS, slots.descriptors, strict=True):
            size = os.fstat(descriptor).st_size
            (folder / name).write_bytes(os.pread(descriptor, size, 0))


def read_slots(folder):
    with contextlib.closing(MemorySlots.create("fuzzed")) as slots:
        for name, descriptor in zip(_SLOTS, slots.descriptors, strict=True):
            os.pwrite(descriptor, (folder / name).read_bytes(), 0)
        return restored(slots)


def _parts(content):
    """The fields, the data and the header of a slot's record."""
    magic, step, size, length = _FIELDS.unpack_from(content)
    data = content[_PAGE : _PAGE + size]
    return [magic, step, size, length], data, content[_PAGE + size : _PAGE + size + length]


def _write_record(path, fields, data, line):
    """Writes a record whose checksum is right, whatever its fields say."""
    described = _FIELDS.pack(*fields)
    seen = (data + line)[fields[2] : fields[2] + fields[3]] if fields[2] >= 0 else b""
    checksum = zlib.crc32(seen, zlib.crc32(described)).to_bytes(4, "little")
    path.write_bytes((described + checksum).ljust(_PAGE, b"\0") + data + line)


def slot_fields(folder, chance):
    path = folder / chance.choice(_SLOTS)
    fields, data, line = _parts(path.read_bytes())
    place = chance.randrange(1, 4)
    most = (1 << 63) - 1
    sizes = [len(data), len(line), len(data) + len(line), len(data) + len(line) + _PAGE]
    fields[place] = chance.choice([*(min(each, most) for each in LENGTHS), -1, *sizes])
    _write_record(path, fields, data, line)
    return f"{place} is {fields[place]}"


def slot_header(folder, chance):
    path = folder / chance.choice(_SLOTS)
    fields, data, line = _parts(path.read_bytes())
    header, how = changed_value(json.loads(line), chance, outside_of(folder))
    line = json.dumps(header).encode()
    fields[3] = len(line)
    _write_record(path, fields, data, line)
    return how


# -- records on their way to another machine -----------------------------------------------------


def write_transfer(folder):
    with contextlib.closing(MemorySlots.create("fuzzed")) as slots:
        record(slots, 6)
        with slots.records() as (found,):
            data, header = bytes(found.data), found.header
    _write_transfer(folder, {"worker": 0, "step": 6}, data, header)


def _write_transfer(folder, offered, data, header):
    line = json.dumps(header).encode()
    offer = {"is": "record", "size": len(data), "header": len(line)} | offered
    end = {"is": "end", "checksum": zlib.crc32(data, zlib.crc32(line))}
    length = struct.pack("<I", len(data))
    pieces = [_message(offer), line, length, data, struct.pack("<I", 0), _message(end)]
    (folder / "record").write_bytes(b"".join(pieces))
    parts = {"offer": offer, "header": header, "data": data.hex()}
    (folder.parent / "parts.json").write_text(json.dumps(parts))


def _message(value):
    line = json.dumps(value).encode() + b"\n"
    return struct.pack("<I", len(line)) + line


def read_transfer(folder):
    # A size by chance is refused from here on, as where there is little memory.
    record_transfer.memory_left = lambda: (1 << 24, "the test")
    own, other = socket.socketpair()
    content = (folder / "record").read_bytes()
    sending = threading.Thread(target=_send, args=(other, content), daemon=True)
    with contextlib.closing(MemorySlots.create("fuzzed")) as slots, own:
        connection = RecordConnection(own)
        sending.start()
        try:
            offer = parsed_offer(connection.receive())
            reason = connection.receive_record(offer, slots, None, lambda: True)
            return [reason, offer.worker, *([] if reason else restored(slots))]
        finally:
            own.close()
            sending.join()


def _send(connection, content):
    with connection, contextlib.suppress(OSError):
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass


def _parts_of_transfer(folder):
    """The parts of the right transfer, its data, and what its offer says of it."""
    parts = json.loads((folder.parent / "parts.json").read_text())
    offered = {name: parts["offer"][name] for name in ("worker", "step")}
    return parts, bytes.fromhex(parts["data"]), offered


def transfer_offer(folder, chance):
    parts, data, _ = _parts_of_transfer(folder)
    offer, how = changed_value(parts["offer"], chance, outside_of(folder))
    if not isinstance(offer, dict):
        offer = {"is": offer}
    _rewrite(folder, parts, offer, data, parts["header"])
    return how


def transfer_header(folder, chance):
    parts, data, offered = _parts_of_transfer(folder)
    header, how = changed_value(parts["header"], chance, outside_of(folder))
    _rewrite(folder, parts, offered, data, header)
    return how


def transfer_data(folder, chance):
    """Data of another size, whose checksum is right."""
    parts, data, offered = _parts_of_transfer(folder)
    data = data[: chance.randrange(len(data) + 1)] if chance.random() < 0.5 else data * 2
    _rewrite(folder, parts, offered, data, parts["header"])
    return f"{len(data)} bytes"


def _rewrite(folder, parts, offered, data, header):
    """Writes a changed transfer, and keeps the parts of the right one."""
    _write_transfer(folder, offered, data, header)
    (folder.parent / "parts.json").write_text(json.dumps(parts))


# -- what a machine says that it holds -----------------------------------------------------------


def write_holding(folder):
    holding = Holding("127.0.0.1:4000", 1, 2, {0: [7], 1: [7, 6]})
    (folder / "holding.json").write_text(json.dumps(holding.message()))


def read_holding(folder):
    holding = parsed_holding(json.loads((folder / "holding.json").read_bytes()))
    if holding is None:
        return None
    rank, step = holding.rank, newest_common_step([holding], 2)
    return repr([rank, step, are_records_held([holding]), holding.message()])


FORMATS = {
    "in-memory-slots": Format(
        # A ValueError: it is the state of another program.
        write_slots,
        read_slots,
        [slot_fields, slot_header],
        (ValueError,),
        is_anything,
    ),
    "in-memory-transfer": Format(
        write_transfer,
        read_transfer,
        [transfer_offer, transfer_header, transfer_data],
        # Messages that are not JSON are ValueErrors, too.
        (ValueError, json.JSONDecodeError, UnicodeDecodeError, ConnectionResetError),
        is_anything,
    ),
    "in-memory-holding": Format(
        write_holding,
        read_holding,
        [json_of("*.json")],
        (json.JSONDecodeError, UnicodeDecodeError),
        is_anything,
    ),
}
