"""Monitoring of running jobs, for `unison top`, a browser and Prometheus.

In each worker, a `Meter` counts steps and a thread reports the counts once per second
(`reporting`); both start with the first strategy. The process that has started the job receives the
reports (`launcher`), or its first worker if it was not started by Unison (`first_worker`). It
derives the state of the job from them (`job`), and serves the state on the loopback address
(`collector`) as JSON, as text for Prometheus (`prometheus`) and as a page (`page`). `running_jobs`
finds the jobs of this user.
"""

from unison.monitoring.reporting import report, start_if_asked

__all__ = ["report", "start_if_asked"]
