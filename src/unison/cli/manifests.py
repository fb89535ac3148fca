"""Kubernetes' manifests of a job: a plain Job, JobSet, Kubeflow Trainer and KubeRay.

Each pod is a worker, with all of its GPUs.
"""

from __future__ import annotations

import json
import pathlib
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from unison.cli.asked import Asked
from unison.cli.errors import CommandError
from unison.net.secret import KEY_VARIABLE
from unison.runtime.exit_codes import LOST_ANOTHER, OF_SIGNALS, PREEMPTED

#: The port of the first worker; each pod has its own address.
_PORT = 8470

#: The resources of a pod until the user sets them.
_CPUS, _MEMORY = 8, "32Gi"

#: The variables with a worker's number of threads.
_THREADS = ("NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")

_WORKER = "worker"

#: The annotation of a pod with its index in an indexed Job.
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"

#: A JobSet's rule: a program that fails ends it.
_ENDS_WITH_ITS_JOB = {
    "name": "theProgramFails",
    "action": "FailJobSet",
    "onJobFailureReasons": ["PodFailurePolicy"],
}

#: Texts that YAML takes for text without quotes, and those that it does not.
_PLAIN = re.compile(r"[A-Za-z_][\w./-]*")
_NOT_TEXT = ("true", "false", "yes", "no", "on", "off", "y", "n", "null")

#: The exit codes of workers that can be started again: a program that fails would fail again.
_LOSSES = [PREEMPTED, LOST_ANOTHER, *OF_SIGNALS]


def kubernetes(asked: Asked) -> str:
    """Returns an indexed Job and its headless Service, for `kubectl apply`."""
    name, workers = _name(asked.program), _workers(asked)
    addresses = [f"{name}-{index}.{name}:{_PORT}" for index in range(workers)]
    task = {"type": "worker", "index": "$(INDEX)"}
    config = json.dumps({"cluster": {"worker": addresses}, "task": task})
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": name},
        },
    }
    environment = [_of_field("INDEX", _INDEX), *_environment(asked, name)]
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": _indexed_job(
            asked,
            # Of all pods together. When one is lost the others end, too.
            workers * asked.restarts,
            {"subdomain": name} | _pod(asked, [*environment, _variable("TF_CONFIG", config)]),
            is_repeated=asked.restarts > 0,
        ),
    }
    return _about(name, "The pods find each other by the names that the service gives them.") + (
        "---\n".join(map(_yaml, (service, job)))
    )


def jobset(asked: Asked) -> str:
    """Returns a JobSet, which starts all pods again when one is lost."""
    name, workers = _name(asked.program), _workers(asked)
    environment = [
        _variable("JAX_COORDINATOR_ADDRESS", f"{name}-{_WORKER}-0-0.{name}:{_PORT}"),
        _variable("JAX_NUM_PROCESSES", str(workers)),
        _of_field("JAX_PROCESS_ID", _INDEX),
        *_environment(asked, name),
    ]
    pod = _pod(asked, environment)
    made = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": asked.restarts,
                **({} if asked.restarts_on_error else {"rules": [_ENDS_WITH_ITS_JOB]}),
            },
            "replicatedJobs": [
                {
                    "name": _WORKER,
                    "replicas": 1,
                    "template": {"spec": _indexed_job(asked, 0, pod, is_repeated=True)},
                }
            ],
        },
    }
    return _about(name, "It needs the JobSet controller.") + _yaml(made)


def kubeflow(asked: Asked) -> str:
    """Returns a TrainJob of Kubeflow Trainer, with its runtime for JAX."""
    if asked.restarts:
        raise CommandError(
            "A TrainJob has no number of restarts: its runtime has. Leave --restarts out, and set "
            "spec.template.spec.failurePolicy.maxRestarts in a TrainingRuntime of your own."
        )
    name = _name(asked.program)
    trainer = {
        "image": "IMAGE",
        "command": _command(asked),
        "numNodes": _workers(asked),
        "resourcesPerNode": {"limits": _limits(asked)},
        "env": _environment(asked, name, has_limits=False),
    }
    made = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {"runtimeRef": {"name": "jax-distributed"}, "trainer": trainer},
    }
    return _about(name, "It needs Kubeflow Trainer 2.") + _yaml(made)


def kuberay(asked: Asked) -> str:
    """Returns a RayJob of KubeRay, whose cluster has a node for each worker."""
    name, workers = _name(asked.program), _workers(asked)
    command = ["unison", "run", "-n", str(workers), "--address", "auto", *asked.options_on_ray]

    def group(resources: Mapping[str, Any], container: str) -> dict[str, Any]:
        pod = {"containers": [{"name": container, "image": "IMAGE", "resources": resources}]}
        return {"template": {"spec": pod}}

    head = {"limits": {"cpu": 2, "memory": "8Gi"}}
    made = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": shlex.join([*command, *asked.program]),
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                # Without CPUs for work, so that all workers are on the nodes below.
                "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, **group(head, "ray-head")},
                "workerGroupSpecs": [
                    {
                        "groupName": "workers",
                        "replicas": workers,
                        "minReplicas": workers,
                        "maxReplicas": workers,
                        "rayStartParams": {},
                        **group({"limits": _limits(asked)}, "ray-worker"),
                    }
                ],
            },
        },
    }
    return (
        "# Set image and resources. It needs KubeRay, and an image with Ray and the program.\n"
        + _yaml(made)
    )


def _about(name: str, note: str) -> str:
    return (
        f"# Set image and resources. {note}\n"
        "# What the workers prove to each other is a secret, made once:\n"
        f"#   kubectl create secret generic {name}-key --from-literal=key=$(openssl rand -hex 32)\n"
    )


def _workers(asked: Asked) -> int:
    return asked.workers or 2


def _name(program: Sequence[str]) -> str:
    """Returns a name that is valid in Kubernetes, derived from the program's."""
    script = program[1] if program[0] == "-m" else pathlib.Path(program[0]).stem
    return re.sub(r"[^a-z0-9]+", "-", script.lower())[:40].strip("-") or "train"


def _command(asked: Asked) -> list[str]:
    return ["python", "-u", *asked.program]


def _limits(asked: Asked) -> dict[str, Any]:
    gpus = {"nvidia.com/gpu": asked.gpus} if asked.gpus else {}
    return {"cpu": _CPUS, "memory": _MEMORY, **gpus}


def _variable(name: str, value: str) -> dict[str, Any]:
    return {"name": name, "value": value}


def _of_field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _environment(asked: Asked, name: str, has_limits: bool = True) -> list[dict[str, Any]]:
    """Returns the variables of a worker's container: threads, its key, and what is configured."""
    threads = {"resourceFieldRef": {"resource": "limits.cpu"}}
    key = {"secretKeyRef": {"name": f"{name}-key", "key": "key"}}
    return [
        *({"name": each, "valueFrom": threads} for each in _THREADS if has_limits),
        {"name": KEY_VARIABLE, "valueFrom": key},
        *(_variable(each, value) for each, value in asked.environment.items()),
    ]


def _pod(asked: Asked, environment: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the spec of a worker's pod."""
    container: dict[str, Any] = {
        "name": _WORKER,
        "image": "IMAGE",
        "command": _command(asked),
        "ports": [{"containerPort": _PORT}],
        "resources": {"limits": _limits(asked)},
        "env": list(environment),
    }
    volumes = {}
    if asked.gpus:  # NCCL's, between the GPUs of a pod; by default, it has 64 MiB
        container["volumeMounts"] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
        volumes = {"volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 120,
        "containers": [container],
        **volumes,
    }


def _indexed_job(
    asked: Asked, backoff_limit: int, pod: Mapping[str, Any], is_repeated: bool
) -> dict[str, Any]:
    """Returns the spec of an indexed Job.

    Args:
        asked: The job's options.
        backoff_limit: How many pods may fail.
        pod: The pods' spec.
        is_repeated: Whether lost workers are started again. Then a program that fails ends the Job,
            unless it should start again, too; and pods that Kubernetes ends by itself (it drains a
            node, another pod needs the place) are not counted.
    """
    drained = {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    codes = {"containerName": _WORKER, "operator": "NotIn", "values": _LOSSES}
    failed = {"action": "FailJob", "onExitCodes": codes}
    rules = [drained] if asked.restarts_on_error else [drained, failed]
    policy = {"podFailurePolicy": {"rules": rules}} if is_repeated else {}
    workers = _workers(asked)
    return {
        "completionMode": "Indexed",
        "completions": workers,
        "parallelism": workers,
        "backoffLimit": backoff_limit,
        **policy,
        "template": {"spec": dict(pod)},
    }


def _yaml(value: Mapping[str, Any]) -> str:
    r"""Returns a mapping as YAML, whose texts are quoted as in JSON where they need it.

    Examples:
        >>> print(_yaml({"a": {"b": [{"c": "x y", "d": 1}]}, "e": ["f", 2]}), end="")
        a:
          b:
            - c: "x y"
              d: 1
        e: ["f", 2]
    """
    return "".join(f"{line}\n" for line in _lines(value))


def _lines(value: Mapping[str, Any]) -> list[str]:
    lines = []
    for key, item in value.items():
        name = key if re.fullmatch(r"[\w./-]+", key) else json.dumps(key)
        if isinstance(item, Mapping) and item:
            lines += [f"{name}:", *(f"  {line}" for line in _lines(item))]
        elif isinstance(item, list) and any(isinstance(each, Mapping) for each in item):
            lines.append(f"{name}:")
            for each in item:
                first, *rest = _lines(each)
                lines += [f"  - {first}", *(f"    {line}" for line in rest)]
        else:
            lines.append(f"{name}: {_scalar(item)}")
    return lines


def _scalar(value: Any) -> str:
    """Returns a text, a number, or a list of them."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT:
        return value
    return json.dumps(value)
