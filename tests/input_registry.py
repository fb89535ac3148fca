"""A registry of an input service with one dataset, for tests of its decisions."""

from unison.data.service.configuration import ShardingPolicy
from unison.data.service.iterations import JobSpec
from unison.data.service.registry import Registry

ABOUT = {
    "description": "Range",
    "signature": {},
    "cardinality": 10,
    "split_sizes": [10],
    "split_error": "",
}
OFF = JobSpec("d", "Range", ShardingPolicy.OFF)
DYNAMIC = JobSpec("d", "Range", ShardingPolicy.DYNAMIC)
DATA = JobSpec("d", "Range", ShardingPolicy.DATA)


def registry(*listed, events=None, **options):
    """A registry with a dataset, whose events are recorded."""
    kept = [] if events is None else events
    made = Registry(listed, 0.0, lambda event, payload: kept.append((event, payload)), **options)
    made.register_dataset(ABOUT, b"payload", "d")
    return made
