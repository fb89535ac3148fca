"""The protocol buffers of `tf.train.Example` and of tensors, defined without generated code.

They are compatible with TensorFlow's to the byte: the same names, fields and packing.
"""

from __future__ import annotations

import functools
from typing import Any

#: The messages: for each field its name, number, type, and whether it is repeated.
_MESSAGES = {
    "BytesList": [("value", 1, "bytes", True)],
    "FloatList": [("value", 1, "float", True)],
    "Int64List": [("value", 1, "int64", True)],
    "Feature": [
        ("bytes_list", 1, "BytesList", False),
        ("float_list", 2, "FloatList", False),
        ("int64_list", 3, "Int64List", False),
    ],
    "Features": [("feature", 1, "Features.FeatureEntry", True)],
    "FeatureList": [("feature", 1, "Feature", True)],
    "FeatureLists": [("feature_list", 1, "FeatureLists.FeatureListEntry", True)],
    "Example": [("features", 1, "Features", False)],
    "SequenceExample": [
        ("context", 1, "Features", False),
        ("feature_lists", 2, "FeatureLists", False),
    ],
    "TensorDimension": [("size", 1, "int64", False), ("name", 2, "string", False)],
    "TensorShape": [("dim", 2, "TensorDimension", True), ("unknown_rank", 3, "bool", False)],
    "TensorProto": [
        ("dtype", 1, "int32", False),
        ("tensor_shape", 2, "TensorShape", False),
        ("version_number", 3, "int32", False),
        ("tensor_content", 4, "bytes", False),
        ("float_val", 5, "float", True),
        ("double_val", 6, "double", True),
        ("int_val", 7, "int32", True),
        ("string_val", 8, "bytes", True),
        ("scomplex_val", 9, "float", True),
        ("int64_val", 10, "int64", True),
        ("bool_val", 11, "bool", True),
        ("dcomplex_val", 12, "double", True),
        ("half_val", 13, "int32", True),
        ("uint32_val", 16, "uint32", True),
        ("uint64_val", 17, "uint64", True),
    ],
}

#: The types of fields that are not messages; repeated numbers are packed.
_NUMBERS = {"bool", "double", "float", "int32", "int64", "uint32", "uint64"}
_TEXT = {"bytes", "string"}

#: The entries of the maps: their message, their name, and the type of the values.
_MAPS = [
    ("Features", "FeatureEntry", "Feature"),
    ("FeatureLists", "FeatureListEntry", "FeatureList"),
]


def message(name: str) -> type[Any]:
    """Returns the class of a message.

    Args:
        name: "Example", "Feature", "Int64List", ...

    Raises:
        ImportError: protobuf is not installed.

    TF: `tf.train.Example` and its parts.
    """
    return _classes()[name]


@functools.cache
def _classes() -> dict[str, type[Any]]:
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        raise ImportError(
            "tf.train.Example is a protocol buffer, and protobuf is not installed: "
            "pip install 'unison[records]'"
        ) from error
    file = descriptor_pb2.FileDescriptorProto(
        name="tensorflow/core/example/example.proto", package="tensorflow", syntax="proto3"
    )
    types = descriptor_pb2.FieldDescriptorProto
    for name, fields in _MESSAGES.items():
        described = file.message_type.add(name=name)
        for field in fields:
            _add_field(described, types, *field)
    by_name = {described.name: described for described in file.message_type}
    by_name["Feature"].oneof_decl.add(name="kind")
    for field in by_name["Feature"].field:
        field.oneof_index = 0
    for owner, entry, values in _MAPS:
        nested = by_name[owner].nested_type.add(name=entry)
        nested.options.map_entry = True
        _add_field(nested, types, "key", 1, "string", False)
        _add_field(nested, types, "value", 2, values, False)
    # A separate pool: TensorFlow, if it is also imported, has these names in the default pool.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tensorflow.{name}"))
        for name in _MESSAGES
    }


def _add_field(
    described: Any, types: Any, name: str, number: int, kind: str, is_repeated: bool
) -> None:
    label = types.LABEL_REPEATED if is_repeated else types.LABEL_OPTIONAL
    field = described.field.add(name=name, number=number, label=label)
    if kind in _NUMBERS | _TEXT:
        field.type = getattr(types, f"TYPE_{kind.upper()}")
        if is_repeated and kind in _NUMBERS:
            field.options.packed = True
    else:
        field.type = types.TYPE_MESSAGE
        field.type_name = f".tensorflow.{kind}"
