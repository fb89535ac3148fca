"""Workers on one machine exchange through shared memory; those of several, within each first."""

import numpy as np
import pytest

from warm_workers import launch

SECONDS = 200


def exchange(implementation, machine_of_worker=None):
    """What every worker gets from all kinds of collective operations."""
    import json
    import os

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax

    import unison
    from unison.runtime.shared_memory import group, shared_memory_of

    task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    if machine_of_worker is not None:
        group.host_identity = lambda devices: f"machine {machine_of_worker[task]}"
    strategy = unison.MultiWorkerMirroredStrategy(
        communication_options=unison.CommunicationOptions(implementation=implementation)
    )
    count = strategy.num_replicas_in_sync

    def of_replica(context):
        return np.random.default_rng(context.replica_id_in_sync_group).standard_normal(40_000)

    x = strategy.experimental_distribute_values_from_function(
        lambda context: jnp.asarray(of_replica(context).astype("float32"))
    )

    def step(x):
        return {
            "sum": lax.psum([x, x[:7].astype(jnp.int32), x[:3] * 1j], "replica"),
            "max": lax.pmax(x, "replica"),
            "gathered": unison.all_gather(x[:5], 0),
            "scattered": lax.psum_scatter(x[: 7 * count], "replica", tiled=True),
            "rotated": lax.ppermute(x, "replica", [(i, (i + 1) % count) for i in range(count)]),
            "loop": lax.fori_loop(0, 3, lambda _, y: lax.psum(y, "replica") / count, x),
        }

    results = strategy.run(step, args=(x,))
    total = float(strategy.reduce("SUM", results["sum"][0], axis=None)[0])
    leaves = [np.asarray(v) for v in jax.tree.leaves(strategy.experimental_local_results(results))]
    own = shared_memory_of(strategy.placement.devices)
    with open("/proc/self/maps") as maps:
        # Its number, since all such files are named alike, and have no name in any folder.
        files = {line.split(None, 5)[4] for line in maps if "/memfd:unison (deleted)" in line}
    assert len(files) == (own is not None)
    return [] if own is None else own.hosts, [*leaves, np.float64(total)]


def exchanged(workers, devices, *args):
    quiet = {"on_line": lambda worker, line: None, "timeout": SECONDS}
    return launch(exchange, workers, args=args, devices_per_worker=devices, **quiet)


@pytest.mark.parametrize(
    ("workers", "devices", "machines", "hosts"),
    [
        (2, 2, None, [[0, 1, 2, 3]]),
        (4, 1, [0, 0, 1, 1], [[0, 1], [2, 3]]),
        (3, 1, [0, 0, 1], []),  # machines of different sizes
    ],
)
def test_memory_gives_what_the_network_gives(workers, devices, machines, hosts):
    through_memory = exchanged(workers, devices, "AUTO", machines)
    by_network = exchanged(workers, devices, "RING")
    for (own_hosts, own), (no_hosts, expected) in zip(through_memory, by_network, strict=True):
        assert [list(host) for host in own_hosts] == hosts
        assert no_hosts == []
        for mine, other in zip(own, expected, strict=True):
            # The network adds up in another order.
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)
