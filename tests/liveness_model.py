"""Everything that can happen in a small job with a fixed number of workers.

A `Job` is the workers' programs, the `Watch` of each, and the messages on their way between them,
which the first worker relays. `explore` visits every state that can be reached by any order of
moves and deliveries, breadth first, and from each in which nothing more happens it lets time pass.

The rules:

- While no worker is at fault, no finding is declared, and all programs end.
- A finding names a worker that is at fault. One that says that two workers run different programs
  names one that is at fault as either of the two.
- If a worker is at fault, every other program ends: successfully, or by a finding; by a finding, if
  a worker runs a different operation. It does so within four times the limit if a worker hangs or
  is stopped, and as soon as all messages are received otherwise.
- A process that was stopped, and resumes when the others have ended, ends, too.

A worker is at fault that crashes, raises an error, hangs, is stopped, runs fewer operations than
the others, or runs a different one. What a `Process` does is what `watcher.Liveness` does.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from unison.runtime.liveness.failure_detector import BEAT, Finding, Operation, Watch

#: What is received when a connection is closed.
EOF = None

#: The faults with which a process does not end by itself.
_CANNOT_END = ("stop", "hang")

Message = dict[str, Any]
Key = tuple[Any, ...]

#: What is on its way over a connection: the items of each message.
Link = tuple[Key | None, ...]


class BrokenRule(Exception):  # noqa: N818
    """A rule does not hold; the message says which."""


class Setting(NamedTuple):
    """What is explored.

    Attributes:
        workers: The number of workers.
        operations: How many operations their programs run; the first two are new to the job.
        faults: How many workers may be at fault, at any time, in one of `kinds`.
        kinds: "crash", "failure" (the program raises an error), "hang" (of the program) or "stop"
            (of the process).
        shorter: A worker whose program ends one operation before the others'.
        different: A worker whose last operation is different.
        beats: How many heartbeats are sent at any moment; once nothing else happens, all send
            theirs.
        pauses: How often all programs compute for a while at once, within the limit.
        limit: The timeout for a worker that is silent or behind, in seconds.
        watch: What is explored.
    """

    workers: int = 2
    operations: int = 2
    faults: int = 0
    kinds: tuple[str, ...] = ("crash", "failure", "hang", "stop")
    shorter: int | None = None
    different: int | None = None
    beats: int = 1
    pauses: int = 0
    limit: float = 4.0
    watch: type[Watch] = Watch

    def program(self, worker: int) -> tuple[Operation, ...]:
        """The operations of a worker's program."""
        names = [f"operation {min(number, 2)}" for number in range(self.operations)]
        if worker == self.different:
            names[-1] = "a different operation"
        return tuple(map(Operation, names[:-1] if worker == self.shorter else names))


@dataclasses.dataclass
class Process:
    """A worker's process.

    Attributes:
        index: The worker.
        program: The operations that it runs.
        watch: Its knowledge of the others.
        begun: The number of operations that it has begun.
        is_comparing: Whether it waits for what the others run under the number of its latest one.
        finding: Why it cannot continue; None if it can.
        place: Where it is: "running", "left" (the first worker waits for the others) or "ended".
        fault: The fault that has happened to it.
        announced: What its last heartbeat said.
        answered: The numbers of the operations that it has described to the others.
        outbox: The messages that it has not sent yet.
        key: What is equal for equal states, once it is computed.
    """

    index: int
    program: tuple[Operation, ...]
    watch: Watch
    begun: int = 0
    is_comparing: bool = False
    finding: Finding | None = None
    place: str = "running"
    fault: str = ""
    announced: Key = ()
    answered: set[int] = dataclasses.field(default_factory=set)
    outbox: list[Message] = dataclasses.field(default_factory=list)
    key: Key = ()

    def copy(self) -> Process:
        """Returns a copy that can be changed."""
        new = copy.copy(self)
        new.watch = copy.copy(self.watch)
        vars(new.watch).update({name: _copy(own) for name, own in vars(self.watch).items()})
        new.answered, new.outbox, new.key = set(self.answered), [], ()
        return new

    @property
    def acts(self) -> bool:
        """Whether its threads run."""
        return self.place != "ended" and self.fault != "stop"

    @property
    def runs(self) -> bool:
        """Whether its program can go on."""
        return self.place == "running" and self.fault not in ("stop", "hang")

    @property
    def latest(self) -> Operation | None:
        """The operation that it has begun last."""
        return self.program[self.begun - 1] if self.begun else None

    def doing(self) -> str:
        """What a message says that it does."""
        before = ", before its first run" if self.is_comparing else ""
        return f"operation {self.begun}{before}" if self.begun else "no operation yet"

    # What its program does

    def begin(self, now: float) -> None:
        """Begins the next operation; all workers compare one that is new."""
        self.begun += 1
        assert self.latest is not None
        if self.latest not in self.program[: self.begun - 1]:
            self.is_comparing = True
            self._describe(self.begun)
            self._resume()

    def leave(self) -> None:
        """Ends successfully."""
        self.outbox.append({"is": "left"} | self._progress())
        self.place = "left"

    def fail(self) -> None:
        """Ends with an error of its own."""
        if self.finding is None:
            self.outbox.append({"is": "failed", "error": "an error"})

    # What its thread does

    def beat(self, now: float) -> None:
        """Sends a heartbeat."""
        self.announced = (self.begun, self.doing())
        beat = {"is": "beat", "doing": self.doing(), "seconds": 0.0}
        self.outbox.append(beat | self._progress())

    def receive(self, worker: int, message: Message | None, now: float) -> None:
        """Handles a message, or the end of a connection."""
        self._declare(self.watch.hear(worker, message, now))
        for number in self.watch.asked():
            if 0 < number <= self.begun:
                if number not in self.answered:
                    self._describe(number)
                self._declare(self.watch.compare(number, self.program[number - 1]))
        if message is EOF or message["is"] != "beat":
            self.look(now)
        self._declare(self.watch.compare_latest(self._operation))
        self._resume()

    def look(self, now: float) -> None:
        """Looks for workers that are lost."""
        self._declare(self.watch.look(self.begun, self.doing(), now))
        self._resume()

    def _resume(self) -> None:
        """Ends the comparison of an operation, if all workers have described theirs."""
        if not self.is_comparing:
            return
        if self.finding is not None or not self.watch.unheard_of(self.begun):
            assert self.latest is not None
            self._declare(self.watch.compare(self.begun, self.latest))
            self.is_comparing = False

    def _operation(self, number: int) -> Operation | None:
        return self.program[number - 1] if 0 < number <= self.begun else None

    def _progress(self) -> Message:
        return {"count": self.begun, "mark": "" if self.latest is None else self.latest.mark}

    def _describe(self, number: int) -> None:
        self.answered.add(number)
        text = str(self.program[number - 1])
        self.outbox.append({"is": "operation", "number": number, "text": text})

    def _declare(self, finding: Finding | None) -> None:
        if finding is not None and self.finding is None and self.place != "ended":
            self.finding = finding
            self.outbox.append({"is": "finding"} | dataclasses.asdict(finding))


class Job:
    """A job, at one moment.

    Attributes:
        setting: What is explored.
        processes: Its processes; the first one relays the messages.
        up: What is on its way from each process to the first one.
        down: What is on its way from the first process to each.
        now: The time, in seconds.
        faults: How many faults may still happen.
        beats: How many heartbeats are still sent at any moment.
        pauses: How often all programs may still compute for a while.
    """

    def __init__(self, setting: Setting):
        self.setting = setting
        names = [f"worker {index}" for index in range(setting.workers)]
        self.processes = [
            Process(index, setting.program(index), setting.watch(names, index, setting.limit, 0.0))
            for index in range(setting.workers)
        ]
        self.up: list[Link] = [() for _ in names]
        self.down: list[Link] = [() for _ in names]
        self.now = 0.0
        self.faults = setting.faults
        self.beats = setting.beats
        self.pauses = setting.pauses

    def copy(self) -> Job:
        """Returns a copy; `make` and `own` copy the processes, which both share until then."""
        new = copy.copy(self)
        new.processes, new.up, new.down = [*self.processes], [*self.up], [*self.down]
        return new

    def own(self) -> Job:
        """Copies all processes, so that they can be changed, and returns this job."""
        self.processes = [process.copy() for process in self.processes]
        return self

    def key(self) -> Key:
        """What is equal for equal states."""
        for process in self.processes:
            process.key = process.key or _frozen(vars(process))
        processes = tuple(process.key for process in self.processes)
        return processes, *self.up, *self.down, self.faults, self.beats, self.pauses, self.now

    # Moves

    def moves(self) -> Iterator[Key]:
        """What can happen next, but for faults and the passing of time."""
        for process in self.processes:
            index = process.index
            if process.acts:
                if self._incoming(process) is not None:
                    yield "receive", index, self._incoming(process)
                if self.beats and process.announced != (process.begun, process.doing()):
                    yield "beat", index
            if process.runs and process.finding is not None:
                yield "end", index
            elif process.runs and not process.is_comparing:
                if process.begun < len(process.program):
                    yield "begin", index
                elif self._is_complete(process):
                    yield "leave", index
            elif process.place == "left" and process.acts and self._are_gone():
                yield "end", index

    def other_moves(self) -> Iterator[Key]:
        """The faults that can happen now, and whether the programs can compute for a while."""
        if self.pauses and not self.is_over():
            yield "pause", 0
        for process in self.processes if self.faults else ():
            if process.place == "running" and not process.fault and process.finding is None:
                for kind in self.setting.kinds:
                    yield kind, process.index

    def make(self, move: Key) -> None:
        """Lets one thing happen."""
        what, index, *rest = move
        if what == "pause":
            self.pauses -= 1
            self.own().pass_time(0.5 * self.setting.limit, is_computing=True)
            return
        process = self.processes[index] = self.processes[index].copy()
        if what == "receive":
            self.deliver(process, rest[0])
        elif what == "beat":
            self.beats -= 1
            process.beat(self.now)
        elif what == "begin":
            process.begin(self.now)
            process.look(self.now)
        elif what == "leave":
            process.leave()
            self.send(process)
            if index:
                self.close(process)
        elif what == "end":
            self.close(process)
        else:
            self.faults -= 1
            process.fault = what
            if what == "failure":
                process.fail()
                self.send(process)
            if what in ("crash", "failure"):
                self.close(process)
        self.send(process)

    def deliver(self, process: Process, source: int) -> None:
        """Delivers what has been on its way to a process for longest."""
        if process.index:
            items, *left = self.down[process.index]
            self.down[process.index] = tuple(left)
        else:
            items, *left = self.up[source]
            self.up[source] = tuple(left)
            passed_on = {"is": "gone"} if items is EOF else dict(items)
            self._send_down({**passed_on, "from": source}, but=source)
        message = EOF if items is EOF else dict(items)
        sender = source if message is EOF or process.index == 0 else message["from"]
        process.receive(sender, message, self.now)

    def send(self, process: Process) -> None:
        """Sends what a process has to say."""
        for message in process.outbox:
            if process.index:
                self.up[process.index] += (tuple(message.items()),)
            else:
                self._send_down({**message, "from": 0})
        process.outbox.clear()

    def _send_down(self, message: Message, but: int = 0) -> None:
        for other in range(1, len(self.processes)):
            if other != but:
                self.down[other] += (tuple(message.items()),)

    def close(self, process: Process) -> None:
        """Ends a process, whose connections are closed."""
        process.place = "ended"
        if process.index:
            self.up[process.index] += (EOF,)
        else:
            self.down[1:] = [(*link, EOF) for link in self.down[1:]]

    def _incoming(self, process: Process) -> int | None:
        """From whom a process receives next; None if nothing is on its way to it."""
        if process.index:
            return 0 if self.down[process.index] else None
        # Which of several connections is read first makes a difference; `explore` tries them all.
        return next((index for index, link in enumerate(self.up) if link), None)

    def _is_complete(self, process: Process) -> bool:
        """Whether the last operation of a process is complete: all workers have begun it."""
        return all(each.begun >= process.begun for each in self.processes)

    def _are_gone(self) -> bool:
        """Whether the first worker has seen all others leave."""
        return all(each.place == "ended" for each in self.processes[1:]) and not any(self.up)

    # Time, and rules

    def pass_time(self, seconds: float, is_computing: bool = False) -> None:
        """Lets time pass, in which everything happens that can happen.

        Args:
            seconds: How much.
            is_computing: Whether the programs compute all the time.
        """
        begin = self.now
        while self.now < begin + seconds and not self.is_over():
            self.now += BEAT
            for what in (Process.beat, Process.look):
                for process in self.processes:
                    if process.acts:
                        what(process, self.now)
                        self.send(process)
                self.settle(is_computing)
            for process in self.processes:
                is_stuck = process.fault == "hang" and process.finding is not None
                waits = process.place == "left" and self.now - begin < self.setting.limit
                if process.acts and (is_stuck or (process.place == "left" and not waits)):
                    self.close(process)

    def settle(self, is_computing: bool = False) -> None:
        """Makes all moves that are possible, in some order; programs that compute make none."""
        kinds = ("receive",) if is_computing else ("receive", "begin", "leave", "end")
        while move := next((move for move in self.moves() if move[0] in kinds), None):
            self.make(move)
            self.check()

    def at_fault(self) -> set[int]:
        """The workers that are at fault."""
        wrong = {self.setting.shorter, self.setting.different} - {None}
        return wrong | {each.index for each in self.processes if each.fault}

    def is_over(self) -> bool:
        """Whether all processes have ended but for those that cannot end by themselves."""
        return all(each.place == "ended" or each.fault in _CANNOT_END for each in self.processes)

    def check(self) -> None:
        """Raises `BrokenRule` if a finding names nobody who is at fault."""
        at_fault = self.at_fault()
        for process in self.processes:
            finding = process.finding
            if finding is None:
                continue
            named = {finding.worker} | ({finding.by} if finding.kind == "differs" else set())
            if not named & at_fault:
                raise BrokenRule(
                    f"worker {process.index} declares {finding}, and at fault is "
                    f"{sorted(at_fault) or 'none'}"
                )

    def check_end(self) -> None:
        """Raises `BrokenRule` if a program does not end."""
        if not any(each.fault in _CANNOT_END for each in self.processes):
            self._check_over()
        self.pass_time(4 * self.setting.limit)
        self._check_over()
        if any(each.fault == "stop" for each in self.processes):
            for process in self.processes:
                process.fault = "has been stopped" if process.fault == "stop" else process.fault
            self.pass_time(4 * self.setting.limit)
            self._check_over()
        successful = [each.index for each in self.processes if each.finding is None]
        if self.setting.different is not None and successful:
            raise BrokenRule(f"{successful} have not found that a program is different")

    def _check_over(self) -> None:
        self.check()
        if not self.is_over():
            waiting = [each.index for each in self.processes if each.place != "ended"]
            raise BrokenRule(f"after {self.now:g} s, the programs of {waiting} have not ended")


class Explored(NamedTuple):
    """What `explore` has found.

    Attributes:
        states: The number of states.
        broken: The rule that is broken; None if all hold.
        way: The moves that lead there.
    """

    states: int
    broken: str | None = None
    way: tuple[Key, ...] = ()


def explore(setting: Setting) -> Explored:
    """Visits all states of a job, until a rule is broken."""
    first = Job(setting)
    seen = {first.key()}
    queue: collections.deque[tuple[Job, Any]] = collections.deque([(first, None)])
    while queue:
        job, way = queue.popleft()
        try:
            job.check()
            moves = [*_all_orders(job)]
            if not moves:
                job.copy().own().check_end()
        except BrokenRule as broken:
            return Explored(len(seen), str(broken), _listed(way))
        for move in [*moves, *job.other_moves()]:
            then = job.copy()
            then.make(move)
            if (key := then.key()) not in seen:
                seen.add(key)
                queue.append((then, (way, move)))
    return Explored(len(seen))


def _all_orders(job: Job) -> Iterator[Key]:
    """All that can happen next: the first worker may read any of its connections first."""
    for move in job.moves():
        if move[:2] == ("receive", 0):
            for source, link in enumerate(job.up):
                if link:
                    yield "receive", 0, source
        else:
            yield move


def _listed(way: Any) -> tuple[Key, ...]:
    moves: list[Key] = []
    while way is not None:
        way, move = way
        moves.append(move)
    return tuple(reversed(moves))


def _copy(value: Any) -> Any:
    """Copies what a `Watch` changes: tables, also of tables and of objects, and sets."""
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    return copy.copy(value) if isinstance(value, set) or hasattr(value, "__dict__") else value


def _frozen(value: Any) -> Any:
    """Returns a hashable value that is equal for equal states."""
    if isinstance(value, dict):
        return frozenset([(key, _frozen(each)) for key, each in value.items() if key != "key"])
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, set):
        return frozenset(value)
    if isinstance(value, Operation | Finding) or not hasattr(value, "__dict__"):
        return value
    return _frozen(vars(value))
