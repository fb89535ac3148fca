"""`unison data-service`: the dispatcher and the workers of an input service, as processes."""

from __future__ import annotations

import argparse
import signal
from typing import Any

from unison.cli.errors import CommandError
from unison.cli.numbers import seconds
from unison.data.service.configuration import (
    HOST_VARIABLE,
    DispatcherConfig,
    WorkerConfig,
    address_of_service,
)
from unison.errors import OpError
from unison.net.secret import KEY_VARIABLE
from unison.runtime import logs
from unison.runtime.memory import keep_freed_memory


def add_command(commands: Any) -> None:
    """Adds `data-service` to the subcommands of a parser."""
    parser = commands.add_parser(
        "data-service",
        help="serve input to training programs",
        description="Processes that compute datasets for training programs: one dispatcher, and "
        "workers, on any machines. Programs read from them through unison.data.service."
        f"distribute. Processes of several machines share {KEY_VARIABLE}.",
    )
    roles = parser.add_subparsers(title="roles", dest="role", metavar="ROLE", required=True)
    _add_dispatcher(roles)
    _add_worker(roles)


def _add_dispatcher(roles: Any) -> None:
    parser = roles.add_parser("dispatcher", help="the process that the others connect to")
    parser.add_argument("--port", type=int, default=0, help="the port (default: a free one)")
    parser.add_argument(
        "--host",
        help=f"the address of this machine to listen at (default: {HOST_VARIABLE}, or loopback)",
    )
    parser.add_argument(
        "--work-dir",
        metavar="FOLDER",
        help="write datasets and jobs there, so that a dispatcher that is started again at the "
        "same port resumes (default: it forgets)",
    )
    parser.add_argument(
        "--workers",
        metavar="HOST:PORT,...",
        help="the workers of static sharding, in order; %%port%% stands for any port",
    )
    parser.add_argument(
        "--worker-timeout",
        type=seconds,
        default=60.0,
        metavar="SECONDS",
        help="after how long without a heartbeat a worker is lost (default: 60)",
    )
    parser.set_defaults(run=_run_dispatcher)


def _add_worker(roles: Any) -> None:
    parser = roles.add_parser("worker", help="a process that computes datasets")
    parser.add_argument("dispatcher", metavar="HOST:PORT", help="the dispatcher's address")
    parser.add_argument(
        "--address",
        metavar="HOST[:PORT]",
        help="where training programs reach it; %%port%% stands for the port that it listens at "
        f"(default: {HOST_VARIABLE}, or loopback)",
    )
    parser.add_argument("--port", type=int, default=0, help="the port (default: a free one)")
    parser.set_defaults(run=_run_worker)


def _run_dispatcher(options: argparse.Namespace) -> int:
    # Here, since every command of `unison` loads this file.
    from unison.data.service.dispatcher import DispatchServer

    listed = options.workers.split(",") if options.workers else ()
    config = DispatcherConfig(
        port=options.port,
        host=options.host,
        work_dir=options.work_dir,
        fault_tolerant_mode=options.work_dir is not None,
        worker_addresses=tuple(listed),
        worker_timeout=options.worker_timeout,
    )
    try:
        server = DispatchServer(config)
    except (OpError, OSError) as error:
        raise CommandError(str(error)) from error
    try:
        _begin(f"The dispatcher listens at {server.target}.")
        server.join()
    except KeyboardInterrupt:
        pass
    finally:
        server.stop()
    return 0


def _run_worker(options: argparse.Namespace) -> int:
    from unison.data.service.worker import InputWorker

    keep_freed_memory()  # every element and every batch creates an array
    try:
        dispatcher = address_of_service(options.dispatcher)
        worker = InputWorker(WorkerConfig(dispatcher, options.address, options.port))
    except (OpError, OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    try:
        _begin(f"The input worker listens at {worker.address}.")
        worker.join()
    except KeyboardInterrupt:
        pass
    except OpError as error:
        raise CommandError(str(error)) from error
    finally:
        worker.stop()
    return 0


def _begin(text: str) -> None:
    """Announces a process, and lets SIGTERM end it as Ctrl-C does."""
    logs.show_what_is_asked_for()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(text, flush=True)
