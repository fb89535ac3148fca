"""`tf.io.TFRecordWriter`; the work is `unison.data.files`'."""

from __future__ import annotations

from typing import Any

from unison.data.files import TFRecordOptions as CoreOptions
from unison.data.files import TFRecordWriter as CoreWriter
from unison.tf.text import as_bytes, text_of
from unison.unsupported import UnsupportedMember


class TFRecordOptions:
    """Options for writing a TFRecord file.

    Args:
        compression_type: "", "GZIP", "ZLIB", or the options to copy it from.
        flush_mode: Without effect, as the arguments that are not named here.
        input_buffer_size: Without effect.
        output_buffer_size: Without effect.
        window_bits: Without effect.
        compression_level: From 0, none, to 9, the best.
        compression_method: Without effect.
        mem_level: Without effect.
        compression_strategy: Without effect.

    Raises:
        ValueError: Unknown compression.

    TF: `tf.io.TFRecordOptions`.
    """

    compression_type_map = UnsupportedMember('use the names of compressions: "", "GZIP", "ZLIB"')

    def __init__(
        self,
        compression_type: Any = None,
        flush_mode: int | None = None,
        input_buffer_size: int | None = None,
        output_buffer_size: int | None = None,
        window_bits: int | None = None,
        compression_level: int | None = None,
        compression_method: int | None = None,
        mem_level: int | None = None,
        compression_strategy: int | None = None,
    ):
        self.compression_type = self.get_compression_type_string(compression_type)
        self.compression_level = compression_level

    @classmethod
    def get_compression_type_string(cls, options: Any) -> str:
        """Returns the name of the compression, given options or a name."""
        name = options.compression_type if isinstance(options, TFRecordOptions) else options or ""
        if name not in ("", "GZIP", "ZLIB"):
            raise ValueError(f'Not a valid compression_type: "{name}"')
        return name


class TFRecordWriter(CoreWriter):
    """Writes a TFRecord file; see `unison.data.files.TFRecordWriter`.

    Args:
        path: Its path.
        options: A `TFRecordOptions`, or the name of a compression.

    TF: `tf.io.TFRecordWriter`.
    """

    def __init__(self, path: Any, options: Any = None):
        if not isinstance(options, TFRecordOptions):
            options = TFRecordOptions(options)
        level = -1 if options.compression_level is None else options.compression_level
        super().__init__(text_of(path), CoreOptions(options.compression_type, level))

    def write(self, record: Any) -> None:
        """Adds a record: `bytes`, text, or a scalar string tensor."""
        super().write(as_bytes(record.item() if hasattr(record, "item") else record))
