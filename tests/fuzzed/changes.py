"""What formats have in common: comparable values, and changes behind right checksums."""

from __future__ import annotations

import io
import json
import zipfile

import numpy as np

from fuzzed.mutations import LENGTHS, changed_bytes, changed_value
from unison.storage import checksummed


def outside_of(folder):
    """The folder beside the one that readers are given."""
    return str(folder.parent / "outside")


def link_in(name):
    """Puts a link to the outside in place of something in a folder, or in what lies in it."""

    def link(folder, chance):
        path = chance.choice(sorted((folder / name).rglob("*")))
        if path.is_dir():
            for inner in sorted(path.rglob("*"), reverse=True):
                inner.unlink() if inner.is_file() else inner.rmdir()
            path.rmdir()
        else:
            path.unlink()
        path.symlink_to(outside_of(folder))
        return path.name

    return link


def comparable(value):
    """Arrays, and what is made of them, as what can be compared."""
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(item) for item in value]
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        array = np.asarray(value)
        is_large = array.size > 100_000 and not array.dtype.hasobject  # an image, say
        values = array.tobytes() if is_large else repr(array.tolist())
        return [str(value.dtype), array.shape, values]
    return value


def change_headed(path, folder, chance):
    """Changes the header of a file of `unison.storage.checksummed`."""
    header, data = checksummed.read_headed(str(path))
    changed, how = changed_value(header, chance, outside_of(folder))
    with path.open("wb") as file:
        checksummed.write(file, [checksummed.header_line(changed), data])
    return how


def json_of(name):
    def values(folder, chance):
        (path,) = folder.rglob(name)
        value, how = changed_value(json.loads(path.read_text()), chance, outside_of(folder))
        path.write_text(json.dumps(value))
        return how

    return values


# -- archives of checkpoints ---------------------------------------------------------------------


def change_members(path, change):
    """Changes the members of a ZIP archive, whose checksums are right again."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    result = change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return result


def archive_graph(where):
    def graph(folder, chance):
        def change(members):
            index, how = changed_value(
                json.loads(members["checkpoint.json"]), chance, outside_of(folder)
            )
            members["checkpoint.json"] = json.dumps(index)
            return how

        return change_members(folder / where, change)

    return graph


def archive_member(where):
    def member(folder, chance):
        def change(members):
            name = chance.choice([*members])
            members[name], how = changed_bytes(members[name], chance)
            return f"{how} {name}"

        return change_members(folder / where, change)

    return member


def archive_array(where):
    """An array whose header asks for something else."""

    def array(folder, chance):
        def change(members):
            name = chance.choice([name for name in members if name.endswith(".npy")])
            header = io.BytesIO()
            shape = tuple(chance.choice([*LENGTHS, 3, -1]) for _ in range(chance.randint(0, 3)))
            kind = chance.choice(["<f4", "<i8", "|O", "<U3", "|V9", "<M8[s]"])
            about = {"descr": kind, "fortran_order": chance.random() < 0.5, "shape": shape}
            np.lib.format.write_array_header_1_0(header, about)
            members[name] = header.getvalue() + bytes(chance.randint(0, 99))
            return f"{kind} {shape}"

        return change_members(folder / where, change)

    return array


def archive_structures(where):
    return archive_graph(where), archive_member(where), archive_array(where)
