"""`Server`: a worker or parameter server of a cluster, in this process.

`python -m unison.parameter_server` serves the task of `TF_CONFIG`; `unison run --ps` starts it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import jax

from unison.errors import OpError, UnavailableError
from unison.monitoring import start_if_asked
from unison.monitoring.reporting import gathered
from unison.net.acceptor import AcceptingThread, Acceptor
from unison.net.array_messages import Connection, Message
from unison.net.handshake import Accepted, server_handshake
from unison.net.listening import listen_with_local
from unison.net.secret import key
from unison.parameter_server.jobs import Jobs
from unison.parameter_server.messages import CHANNEL, accept
from unison.parameter_server.programs import traced_worker_index
from unison.parameter_server.servers import VariableServer
from unison.parameter_server.snapshots import Snapshots
from unison.parameter_server.store import Store
from unison.parameter_server.workers import ClosureWorker
from unison.runtime import logs
from unison.runtime.cluster import ClusterSpec
from unison.runtime.exit_codes import LOST_ANOTHER
from unison.runtime.memory import keep_freed_memory
from unison.thread_local import ThreadLocal
from unison.unsupported import UnsupportedMember

logger = logging.getLogger("unison")

#: The environment variables with the folder for servers' snapshots, and the seconds between two.
CHECKPOINTS_VARIABLE = "UNISON_PS_CHECKPOINTS"
CHECKPOINT_SECONDS_VARIABLE = "UNISON_PS_CHECKPOINT_SECONDS"

#: The index of the worker whose functions the thread runs.
_worker: ThreadLocal[int | None] = ThreadLocal(None)


def current_worker_index() -> Any:
    """Returns the index of the worker that runs a scheduled function, or a dataset function.

    In a scheduled function it is a traced array; outside of both it is None.

    TF: `tf.distribute.coordinator.experimental_get_current_worker_index`.
    """
    traced = traced_worker_index()
    return _worker.value if traced is None else traced


class Server:
    """Serves a task of a cluster: keeps variables (`ps`), or runs functions (`worker`).

    It serves in threads of this process, at the task's address only, from its creation on. Clients
    must know this user's key (see `unison.net.secret.key`).

    Args:
        server_or_cluster_def: The cluster: a `ClusterSpec`, or a dictionary as for its constructor.
        job_name: The job of the task. Default: that of `TF_CONFIG`.
        task_index: Its index.
        protocol: Accepted for compatibility with TensorFlow.
        config: Likewise.
        start: Whether it starts serving immediately.
        is_lasting: Whether a server of variables outlives the job: it serves several jobs,
            concurrently and successively, which may share variables (`VariableStore`).

    Raises:
        OSError: It cannot listen at its address.
        ValueError: There is no such task.

    TF: `tf.distribute.Server`.
    """

    create_local_server = UnsupportedMember(
        'pass a cluster of one task: Server({"worker": ["localhost:PORT"]}, "worker", 0)'
    )

    def __init__(
        self,
        server_or_cluster_def: Any,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: Any = None,
        start: bool = True,
        is_lasting: bool = False,
    ):
        del protocol, config
        self._cluster = ClusterSpec(server_or_cluster_def)
        task = _task_in_environment()
        self.job_name = job_name or task.get("type", "worker")
        self.task_index = int(task.get("index", 0) if task_index is None else task_index)
        self._address = self._cluster.task_address(self.job_name, self.task_index)
        self._ended = threading.Event()
        self._failure: UnavailableError | None = None
        folder = os.environ.get(CHECKPOINTS_VARIABLE)
        self._is_lasting = is_lasting
        snapshots = None
        if folder and self.job_name == "ps":
            name = f"at-{self._address}" if is_lasting else f"ps-{self.task_index}"
            snapshots = Snapshots(pathlib.Path(folder), name)
        self._jobs = Jobs(snapshots, is_lasting)
        self._accepting: AcceptingThread[Accepted] | None = None
        if start:
            self.start()

    @property
    def target(self) -> str:
        """Its address, in TensorFlow's format."""
        return f"grpc://{self._address}"

    @property
    def server_def(self) -> dict[str, Any]:
        """The cluster and the task that it serves."""
        return {
            "cluster": self._cluster.as_dict(),
            "job_name": self.job_name,
            "task_index": self.task_index,
        }

    def start(self) -> None:
        """Starts serving."""
        if self._accepting is not None or self.job_name not in ("ps", "worker"):
            return
        secret = key()
        try:
            listening = listen_with_local(self._address)
        except OSError as error:
            raise OSError(
                f"{self.job_name} {self.task_index} cannot listen at {self._address}: {error}. The "
                "port is in use, or the address does not belong to this machine."
            ) from error
        acceptor = Acceptor(listening, lambda own: server_handshake(own, secret, [CHANNEL]))
        self._accepting = AcceptingThread(
            acceptor, listening, self._begin, f"unison-{self.job_name}"
        )
        if self._jobs.writes_snapshots:
            threading.Thread(target=self._keep, name="unison-snapshots", daemon=True).start()

    def _keep(self) -> None:
        """Writes snapshots periodically."""
        every = float(os.environ.get(CHECKPOINT_SECONDS_VARIABLE) or 10.0)
        while not self._ended.is_set():
            self._jobs.wants_snapshot.wait(every)
            self._jobs.wants_snapshot.clear()
            try:
                self._jobs.write_snapshot()
            except (OSError, MemoryError) as error:
                logger.warning("ps %d cannot write its snapshot: %s", self.task_index, error)

    def join(self) -> None:
        """Serves until the coordinator has ended.

        Raises:
            UnavailableError: The coordinator has disconnected without a goodbye message.
        """
        self._ended.wait()
        self.stop()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Stops serving."""
        self._ended.set()
        if self._accepting is not None:
            self._accepting.close()

    def _begin(self, accepted: Accepted) -> None:
        connection = Connection(accepted.stream)
        thread = threading.Thread(
            target=self._serve, args=(connection,), name=f"unison-{self.job_name}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # no more threads can be started
            connection.close()
            raise

    def _serve(self, connection: Connection) -> None:
        hello: Message | None = None
        said_goodbye = False
        try:
            hello = accept(connection)
            if hello["role"] == "pulse":
                while True:
                    wants_report = connection.receive().fields.get("wants_report")
                    connection.send("alive", report=gathered() if wants_report else None)
            if self.job_name == "ps":
                said_goodbye = self._serve_variables(connection)
            else:
                self._serve_functions(connection, hello)
                said_goodbye = True
        except UnavailableError:
            pass  # the peer has disconnected; handled below
        except (OpError, PermissionError, RuntimeError) as error:
            if not self._ended.is_set():  # else the others have been stopped, too
                logger.warning("%s %d: %s", self.job_name, self.task_index, error)
        except Exception as error:  # a peer's message must not end this thread
            logger.warning(
                "%s %d: a connection has ended by an invalid message (%s: %s)",
                self.job_name,
                self.task_index,
                type(error).__name__,
                error,
                exc_info=logger.isEnabledFor(logging.DEBUG),
            )
        finally:
            connection.close()
        if hello is not None and hello["role"] == "coordinator":
            if self._is_lasting:
                self._jobs.leave(hello["job"])
                return
            if not said_goodbye:
                self._failure = UnavailableError(
                    message="The connection to the coordinator is closed, so "
                    f"{self.job_name} {self.task_index} exits."
                )
            self._ended.set()

    def _serve_variables(self, connection: Connection) -> bool:
        """Answers requests until the peer disconnects; returns whether it sent a goodbye."""
        variables: VariableServer | None = None
        while True:
            try:
                message = connection.receive()
                if message.kind == "goodbye":
                    return True
                if variables is None:
                    variables, (kind, arrays, fields) = self._jobs.begin(message)
                    variables.connections.append(connection)
                else:
                    kind, arrays, fields = variables.answer(message)
            except UnavailableError:
                raise
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                kind = (
                    "ResourceExhaustedError"
                    if isinstance(error, MemoryError)
                    else (type(error).__name__)
                )
                connection.send("error", text=text, kind_of_error=kind)
            else:
                del message  # its shared memory can be used for the next message
                connection.send(kind, arrays, **fields)

    def _serve_functions(self, connection: Connection, hello: Message) -> None:
        _worker.value = hello["worker"]
        store = Store(hello["servers"], hello["patience"], "worker", hello["job"])
        with contextlib.closing(store):
            ClosureWorker(connection, store, hello["worker"], batches_of).serve()


def batches_of(pickled: bytes) -> Any:
    """Returns an iterator over the batches of the dataset that a pickled function creates.

    Args:
        pickled: Bytes whose signature has been checked.
    """
    return iter(dataset_of(cloudpickle.loads(pickled)))


def dataset_of(maker: Any) -> Any:
    """Returns the dataset that a function creates; a dataset is returned as is."""
    # A `tf.function` would be traced; datasets are created by the Python function.
    maker = getattr(maker, "python_function", maker)
    return maker() if callable(maker) and not hasattr(maker, "__iter__") else maker


def _task_in_environment() -> Mapping[str, Any]:
    found = json.loads(os.environ.get("TF_CONFIG") or "{}")
    task: Mapping[str, Any] = found.get("task", {})
    return task


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves the task of `TF_CONFIG` until the coordinator has ended, or jobs until terminated.

    Args:
        arguments: `--serve HOST:PORT`: the address of a server that outlives jobs; `--checkpoints
            FOLDER`: the folder to which it writes its variables. Default: this process's arguments.
    """
    parser = argparse.ArgumentParser(prog="python -m unison.parameter_server")
    parser.add_argument("--serve", metavar="HOST:PORT", help="keep variables of several jobs")
    parser.add_argument("--checkpoints", metavar="FOLDER", help="where to write them")
    options = parser.parse_args(arguments)
    logs.show_what_is_asked_for()
    start_if_asked()
    keep_freed_memory()  # every update and every gradient creates an array
    try:
        if options.serve is None:
            config = json.loads(os.environ["TF_CONFIG"])
            task = config["task"]
            logs.say_who(f"{task['type']} {task['index']}")
            Server(config["cluster"], task["type"], task["index"]).join()
        else:
            if options.checkpoints is not None:
                os.environ[CHECKPOINTS_VARIABLE] = options.checkpoints
            if not os.environ.get("JAX_PLATFORMS"):
                jax.config.update("jax_platforms", "cpu")  # the host has the most memory
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            Server({"ps": [options.serve]}, "ps", 0, is_lasting=True).join()
    except KeyboardInterrupt:
        sys.exit(130)
    except OpError as error:
        # `unison run` recognizes this as a process that has only lost another one.
        print(f"UnavailableError: {error}", file=sys.stderr)
        sys.exit(LOST_ANOTHER)
