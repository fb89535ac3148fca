"""Groups of workers that change while they train.

`register`, in the process that starts the workers, decides which workers compute together;
`membership` is the worker's side, and `protocol` defines their messages. `communicator` is the
transport of one view. `group` runs programs in the view, on the replicas of `placement`;
`persisted_state` is the state that a job saves for its next run.
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
