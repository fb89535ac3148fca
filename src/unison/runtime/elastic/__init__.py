"""Groups of workers that change while they train.

`register` decides, in the process that starts the workers, who computes together; `membership` is a
worker's side of it; `protocol` has what they say. `communicator` carries the exchanges of one view.
`group` runs programs in it, on the replicas of `placement`; `keeping` is what a job leaves for its
next run.
"""

from unison.runtime.elastic.environment import is_elastic_worker
from unison.runtime.elastic.group import ElasticGroup, Entry, GroupChanged, Regrouped, elastic_group
from unison.runtime.elastic.membership import Membership
from unison.runtime.elastic.options import ElasticOptions
from unison.runtime.elastic.placement import ElasticPlacement, ElasticProgram
from unison.runtime.elastic.protocol import Ended, Interrupted, Member, View, Welcome
from unison.runtime.elastic.resolver import GroupClusterResolver

__all__ = [
    "ElasticGroup",
    "ElasticOptions",
    "ElasticPlacement",
    "ElasticProgram",
    "Ended",
    "Entry",
    "GroupChanged",
    "GroupClusterResolver",
    "Interrupted",
    "Member",
    "Membership",
    "Regrouped",
    "View",
    "Welcome",
    "elastic_group",
    "is_elastic_worker",
]
