"""Threads of pools end with the interpreter, whatever a signal handler has raised."""

from subprocess_program import run_program

#: A signal arrives at each line that starts a thread, in turn; then the interpreter exits.
INTERRUPTED = """
import concurrent.futures.thread, signal, sys, threading
from unison.thread_pool import ThreadPool

FILES = {concurrent.futures.thread.__file__, threading.__file__}

class AlarmError(Exception):
    pass

def handler(number, frame):
    raise AlarmError

signal.signal(signal.SIGUSR1, handler)
kept, count, lines = [], 0, 0
while lines >= count:  # until a signal would come behind the last line
    pool, lines = ThreadPool(1), 0

    def trace(frame, event, argument):
        global lines
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            lines += 1
            if lines == count + 1:
                signal.raise_signal(signal.SIGUSR1)
        return trace

    sys.settrace(trace)
    try:
        kept.append(pool.submit(abs, -1))
    except Exception as error:
        kept.append(error)
    finally:
        sys.settrace(None)
    kept.append(pool)
    count += 1
print(count, "lines")
"""


def test_the_interpreter_exits_wherever_a_signal_handler_interrupts_submit():
    done = run_program(INTERRUPTED, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 20
