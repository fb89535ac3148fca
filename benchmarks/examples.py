"""The examples of the workloads of data, made from a seed; the same for all contestants."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Iterator

import numpy as np

from benchmarks.workloads import DataWork, Work

_SIZE = 28
_SEED = 21

#: What a decoder does behind the bytes: mean and deviation of MNIST's pixels.
MEAN, DEVIATION = np.float32(0.1307), np.float32(0.3081)

#: Where the lengths of sequences are divided into buckets.
BUCKETS = [20, 40, 60, 80]


def images(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns images, uint8[count, 28, 28], and labels, uint8[count]."""
    generator = np.random.default_rng(_SEED)
    pixels = generator.integers(0, 256, (count, _SIZE, _SIZE), dtype=np.uint8)
    return pixels, generator.integers(0, 10, count, dtype=np.uint8)


def colours(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns images with three colours, uint8[count, 32, 32, 3], and labels, uint8[count]."""
    generator = np.random.default_rng(_SEED)
    pixels = generator.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    return pixels, generator.integers(0, 10, count, dtype=np.uint8)


def lengths(count: int) -> np.ndarray:
    """Returns the lengths of sequences, int64[count]."""
    return np.random.default_rng(_SEED).integers(5, 101, count)


def total_of_sequences(count: int) -> int:
    """Returns the sum of the numbers 0, 1, ... in sequences of these lengths."""
    found = lengths(count)
    return int((found * (found - 1) // 2).sum())


def normalised(image: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The function of the workload `map`: takes an image, or a batch of them."""
    pixels = image.astype(np.float32) / np.float32(255)
    return (pixels - MEAN) / DEVIATION, label.astype(np.int32)


def write_files(folder: pathlib.Path, works: Iterable[Work]) -> None:
    """Writes the files that workloads read."""
    counts = {work.task: work.examples for work in works if isinstance(work, DataWork)}
    if "lines" in counts:
        write_lines(folder, counts["lines"])
    if records := counts.get("records") or counts.get("records_batched"):
        write_records(folder, records, files=8)


def write_lines(folder: pathlib.Path, count: int) -> None:
    """Writes `lines.txt`: lines of 8 words."""
    words = np.array("to be or not that is the question whether tis nobler in mind".split())
    drawn = np.random.default_rng(_SEED).choice(words, (count, 8))
    text = "\n".join(" ".join(line) for line in drawn)
    (folder / "lines.txt").write_text(f"{text}\n")


def write_records(folder: pathlib.Path, count: int, files: int) -> None:
    """Writes `images-*.tfrecord`: `tf.train.Example`s of an image's bytes and an int64 label."""
    pixels, labels = images(count)
    for index in range(files):
        part = slice(index * count // files, (index + 1) * count // files)
        records = _framed(_examples(pixels[part].reshape(-1, _SIZE * _SIZE), labels[part]))
        (folder / f"images-{index}.tfrecord").write_bytes(records.tobytes())


def _examples(pixels: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns the messages, which all have one length, as uint8[count, length]."""
    image = _field(1, _field(1, b"\0" * pixels.shape[1]))  # Feature.bytes_list.value
    label = _field(3, _field(1, b"\0"))  # Feature.int64_list.value, packed
    features = [(b"image", image), (b"label", label)]
    entries = [_field(1, _field(1, key) + _field(2, feature)) for key, feature in features]
    template = np.frombuffer(_field(1, b"".join(entries)), np.uint8)
    messages = np.tile(template, (len(pixels), 1))
    ends = len(template) - len(entries[1]), len(template)
    messages[:, ends[0] - pixels.shape[1] : ends[0]] = pixels
    messages[:, ends[1] - 1] = labels
    return messages


def _field(number: int, content: bytes) -> bytes:
    """Returns a field of a protocol buffer that holds bytes, or another message."""
    return bytes([number << 3 | 2, *_varint(len(content))]) + content


def _varint(number: int) -> Iterator[int]:
    while number > 127:
        yield number & 127 | 128
        number >>= 7
    yield number


def _framed(messages: np.ndarray) -> np.ndarray:
    """Returns TFRecords: length, its checksum, the message, its checksum."""
    count, length = messages.shape
    records = np.empty((count, length + 16), np.uint8)
    records[:, :8] = np.frombuffer(np.uint64(length).tobytes(), np.uint8)
    records[:, 8:12] = _checksums(records[:, :8])
    records[:, 12:-4] = messages
    records[:, -4:] = _checksums(messages)
    return records


def _checksums(rows: np.ndarray) -> np.ndarray:
    """Returns the masked CRC-32C of every row, as little-endian bytes, uint8[count, 4]."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ np.uint32(0x82F63B78), table >> 1)
    crc = np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for column in rows.T:
        crc = table[(crc ^ column) & 0xFF] ^ crc >> 8
    crc = ~crc
    masked = (crc >> 15 | crc << 17) + np.uint32(0xA282EAD8)
    return masked.astype("<u4").view(np.uint8).reshape(-1, 4)
