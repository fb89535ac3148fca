"""The members that TensorFlow's dtypes, shapes and specifications have for its tracing."""

from __future__ import annotations

from unison.unsupported import UnsupportedMember

_PROTO = "there are no protocol buffers of it: pickle it"
_TENSORS = "there are no graphs: jax.tree.flatten gives the tensors of a value"


class TraceTypeMembers:
    """Base of what describes the arguments of a function.

    TF: `tf.types.experimental.TraceType`.
    """

    __slots__ = ()

    cast = UnsupportedMember("use tf.cast, or tf.convert_to_tensor(value, dtype)")
    experimental_as_proto = UnsupportedMember(_PROTO)
    experimental_from_proto = UnsupportedMember(_PROTO)
    experimental_type_proto = UnsupportedMember(_PROTO)
    flatten = UnsupportedMember("use tf.nest.flatten")
    from_tensors = UnsupportedMember(_TENSORS)
    is_subtype_of = UnsupportedMember("use is_compatible_with")
    most_specific_common_supertype = UnsupportedMember("use most_specific_compatible_type")
    placeholder_value = UnsupportedMember("there are no graphs: use jax.ShapeDtypeStruct")
    to_tensors = UnsupportedMember(_TENSORS)
