"""Steps per second on parameter servers, beside TensorFlow.

Every contestant is a job of its own on this machine: a coordinator, workers and servers, each a
process. The contestants take turns, so that all meet the same noise. Each reports the time of
rounds of steps, after a warm-up round.

    python -m benchmarks.parameter_servers --tf PEER/bin/python --json results.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

#: The loads: name, batch, and steps in a round.
LOADS = {"mlp": (64, 300), "mlp-256": (256, 200), "embedding": (64, 150)}

UNISON = """
import json, sys, time
import jax, jax.numpy as jnp, numpy as np
import unison
from unison.parameter_server import ClusterCoordinator, ParameterServerStrategy

load, batch, steps, rounds = sys.argv[1], *map(int, sys.argv[2:5])
strategy = ParameterServerStrategy()
coordinator = ClusterCoordinator(strategy)
rng = np.random.default_rng(0)
ROWS, LOOKUPS = 1_000_000, 100

if load.startswith("mlp"):
    with strategy.scope():
        variables = [
            unison.Variable(rng.normal(size=shape).astype("f4") * 0.05)
            for shape in [(784, 512), (512,), (512, 10), (10,)]
        ]

    def loss_of(weights, x, y):
        hidden = jax.nn.relu(x @ weights[0] + weights[1])
        logits = hidden @ weights[2] + weights[3]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()

    def batches(batch=batch):
        import numpy as np
        rng = np.random.default_rng(0)
        x = rng.normal(size=(8, batch, 784)).astype("f4")
        y = rng.integers(0, 10, (8, batch)).astype("i4")
        while True:
            yield from zip(x, y)
else:
    with strategy.scope():
        variables = [
            unison.Variable(rng.normal(size=(ROWS, 32)).astype("f4")),
            unison.Variable(rng.normal(size=(32, 1)).astype("f4") * 0.1),
        ]

    def loss_of(weights, x, y):
        return ((weights[0][x].mean(axis=1) @ weights[1] - y) ** 2).mean()

    def batches(batch=batch, rows=ROWS, lookups=LOOKUPS):
        import numpy as np
        rng = np.random.default_rng(0)
        x = rng.integers(0, rows, (8, batch, lookups)).astype("i4")
        y = rng.normal(size=(8, batch, 1)).astype("f4")
        while True:
            yield from zip(x, y)


def replica(x, y):
    weights = [variable.value() for variable in variables]
    loss, gradients = jax.value_and_grad(loss_of)(weights, x, y)
    for variable, gradient in zip(variables, gradients):
        variable.assign_sub(0.01 * gradient)
    return loss


def step(iterator):
    return strategy.run(replica, args=next(iterator))


iterator = iter(coordinator.create_per_worker_dataset(batches))
for round in range(rounds + 1):
    begin = time.perf_counter()
    for _ in range(steps):
        value = coordinator.schedule(step, args=(iterator,))
    coordinator.join()
    if round:
        print("SECONDS", time.perf_counter() - begin, flush=True)
print("LOSS", float(value.fetch()), flush=True)
"""

TENSORFLOW = """
import json, os, sys, time
import numpy as np
import tensorflow as tf

load, batch, steps, rounds = sys.argv[1], *map(int, sys.argv[2:5])
config = json.loads(os.environ["TF_CONFIG"])
cluster, task = tf.train.ClusterSpec(config["cluster"]), config["task"]
if task["type"] != "chief":
    tf.distribute.Server(
        cluster, job_name=task["type"], task_index=task["index"], protocol="grpc", start=True
    ).join()
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
rng = np.random.default_rng(0)
ROWS, LOOKUPS = 1_000_000, 100

if load.startswith("mlp"):
    with strategy.scope():
        variables = [
            tf.Variable(rng.normal(size=shape).astype("f4") * 0.05)
            for shape in [(784, 512), (512,), (512, 10), (10,)]
        ]

    def loss_of(x, y):
        hidden = tf.nn.relu(x @ variables[0] + variables[1])
        logits = hidden @ variables[2] + variables[3]
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        return tf.reduce_mean(losses)

    x = rng.normal(size=(8 * batch, 784)).astype("f4")
    y = rng.integers(0, 10, (8 * batch)).astype("i4")
else:
    with strategy.scope():
        table = tf.Variable(tf.random.normal((ROWS, 32)))
        top = tf.Variable(rng.normal(size=(32, 1)).astype("f4") * 0.1)
    variables = [table, top]

    def loss_of(x, y):
        found = tf.nn.embedding_lookup(table, x)
        return tf.reduce_mean((tf.reduce_mean(found, axis=1) @ top - y) ** 2)

    x = rng.integers(0, ROWS, (8 * batch, LOOKUPS)).astype("i4")
    y = rng.normal(size=(8 * batch, 1)).astype("f4")


def dataset_fn(context):
    return tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(batch).prefetch(2)



@tf.function
def step(iterator):
    def replica(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(x, y)
        for variable, gradient in zip(variables, tape.gradient(loss, variables)):
            if isinstance(gradient, tf.IndexedSlices):
                variable.scatter_sub(tf.IndexedSlices(0.01 * gradient.values, gradient.indices))
            else:
                variable.assign_sub(0.01 * gradient)
        return loss

    return strategy.run(replica, args=next(iterator))


@tf.function
def per_worker():
    return strategy.distribute_datasets_from_function(dataset_fn)


iterator = iter(coordinator.create_per_worker_dataset(per_worker))
for round in range(rounds + 1):
    begin = time.perf_counter()
    for _ in range(steps):
        value = coordinator.schedule(step, args=(iterator,))
    coordinator.join()
    if round:
        print("SECONDS", time.perf_counter() - begin, flush=True)
print("LOSS", float(value.fetch()), flush=True)
os._exit(0)
"""


def environments(workers: int, servers: int) -> list[dict[str, str]]:
    """Returns the environments of a job's processes; the coordinator's is the first."""
    from unison.parameter_server.messages import new_key
    from unison.runtime.cluster import ClusterSpec
    from unison.runtime.launching import cluster_on_this_machine
    from unison.runtime.launching.server_jobs import task_environment, tasks_of

    there = cluster_on_this_machine(workers + servers + 1)
    addresses = [there.task_address("worker", index) for index in range(workers + servers + 1)]
    cluster = ClusterSpec({"worker": addresses[:workers], "ps": addresses[workers:-1]})
    of_tf = {**cluster.as_dict(), "chief": addresses[-1:]}
    key = new_key()
    made = []
    for task in tasks_of(cluster):
        environment = {**os.environ, **task_environment(cluster, task, key, 1)}
        config = json.loads(environment["TF_CONFIG"])
        config["cluster"] = of_tf
        made.append(environment | {"TF_CONFIG": json.dumps(config), "JAX_PLATFORMS": "cpu"})
    return made


def measure(
    name: str, python: str, load: str, workers: int, servers: int, rounds: int
) -> list[float]:
    """Runs one job; returns the steps per second of its rounds."""
    batch, steps = LOADS[load]
    program = TENSORFLOW if name == "tensorflow" else UNISON
    arguments = [load, str(batch), str(steps), str(rounds)]
    started = []
    try:
        first, *others = environments(workers, servers)
        for environment in others:
            command = [python, "-c", program, *arguments]
            if name == "unison":
                command = [python, "-m", "unison.parameter_server"]
            started.append(
                subprocess.Popen(command, env=_quiet(environment), stderr=subprocess.DEVNULL)
            )
        finished = subprocess.run(
            [python, "-c", program, *arguments],
            env=_quiet(first),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    finally:
        for process in started:
            process.kill()
            process.wait()
    if finished.returncode:
        raise RuntimeError(f"{name} failed on {load}:\n{finished.stderr[-3000:]}")
    lines = finished.stdout.splitlines()
    return [steps / float(line.split()[1]) for line in lines if line.startswith("SECONDS")]


def _quiet(environment: dict[str, str]) -> dict[str, str]:
    return environment | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tf", metavar="PYTHON", help="the Python of an environment with TensorFlow"
    )
    parser.add_argument("--loads", default=",".join(LOADS), help=f"of {', '.join(LOADS)}")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--turns", type=int, default=2, help="how often each contestant runs")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds in a run")
    parser.add_argument("--json", metavar="FILE", help="where to write the results")
    options = parser.parse_args()
    contestants = {"unison": sys.executable}
    if options.tf:
        contestants["tensorflow"] = options.tf
    results: dict[str, dict[str, list[float]]] = {}
    for load in options.loads.split(","):
        own = results[load] = {name: [] for name in contestants}
        for _ in range(options.turns):
            for name, python in contestants.items():
                own[name] += measure(
                    name, python, load, options.workers, options.servers, options.rounds
                )
        medians = {name: statistics.median(values) for name, values in own.items()}
        shown = ", ".join(
            f"{name} {median:.0f} steps/s ({min(own[name]):.0f} to {max(own[name]):.0f})"
            for name, median in medians.items()
        )
        ratio = medians["unison"] / medians.get("tensorflow", medians["unison"])
        print(f"{load}: {shown}; {ratio:.2f} x", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"workers": options.workers, "servers": options.servers, **results}, file)


if __name__ == "__main__":
    main()
