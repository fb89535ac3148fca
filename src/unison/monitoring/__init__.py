"""What a running job does, for `unison top`, a browser and Prometheus.

In each worker, a `Meter` counts steps and a thread tells once a second what it has counted
(`reporting`); both begin with the first strategy. The process that has started the job hears it
(`launcher`), or its first worker where something else than Unison has started it (`first_worker`);
makes of it what is known of the job (`job`), and serves that on the loopback address (`collector`)
as JSON, as text for Prometheus (`prometheus`) and as a page (`page`). `running_jobs` finds the jobs
of this user.
"""

from unison.monitoring.reporting import report, start_if_asked

__all__ = ["report", "start_if_asked"]
