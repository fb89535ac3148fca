"""The present group as a cluster, for programs that query a strategy for their worker's index."""

from __future__ import annotations

from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers import ClusterResolver
from unison.runtime.elastic.group import ElasticGroup


class GroupClusterResolver(ClusterResolver):
    """The workers of an elastic job that compute together: the results change with the group.

    While the next group is formed, they describe the previous one.

    Args:
        group: The group of this process.

    Attributes:
        task_type: Always "worker".
        task_id: This worker's index in the group; None until it has joined the others. Until then
            it is not the chief, and the cluster is empty.
    """

    task_type = "worker"

    def __init__(self, group: ElasticGroup):
        self._group = group

    @property
    def task_id(self) -> int | None:  # type: ignore[override]
        view = self._group.latest_view
        return None if view is None else view.own

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the first of the group, which does what only one should do."""
        return self.task_id == 0

    def cluster_spec(self) -> ClusterSpec:
        """Returns the addresses at which the members listen for each other."""
        view = self._group.latest_view
        members = () if view is None else view.members
        return ClusterSpec({"worker": [member.address for member in members]})
