"""`tf.version`: the release of TensorFlow whose names and rules the face has, and our own."""

from __future__ import annotations

from unison.tf.missing import names_missing_from

VERSION = "2.21.0"
#: TF: the revision of the sources; here, whose they are.
GIT_VERSION = "unison"
COMPILER_VERSION = "XLA"
GRAPH_DEF_VERSION = 0
GRAPH_DEF_VERSION_MIN_CONSUMER = 0
GRAPH_DEF_VERSION_MIN_PRODUCER = 0

__getattr__ = names_missing_from(__name__)
