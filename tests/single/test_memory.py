"""Freed memory stays with the process, where the C library can be told so."""

from __future__ import annotations

import os

import pytest

from subprocess_program import run_program
from unison.runtime.cluster import ClusterSpec
from unison.runtime.launching.environments import worker_environments

PROGRAM = """
from unison.runtime import memory
print(memory.keep_freed_memory())
"""


def kept(**env: str) -> str:
    return run_program(PROGRAM, env=env, imported=("jax", "unison")).stdout.strip()


def test_glibc_is_told_to_keep_freed_memory():
    assert kept() == "True"


def test_users_can_turn_it_off():
    assert kept(UNISON_KEEP_MEMORY="0") == "False"


def test_a_process_whose_user_tuned_malloc_is_left_alone():
    assert kept(MALLOC_ARENA_MAX="2") == "False"


@pytest.mark.parametrize("name", ["UNISON_KEEP_MEMORY", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_workers_get_huge_pages_unless_the_user_has_decided(monkeypatch, name):
    for each in list(os.environ):
        if each.startswith(("MALLOC_", "GLIBC_")):
            monkeypatch.delenv(each)
    cluster = ClusterSpec({"worker": ["127.0.0.1:1", "127.0.0.1:2"]})
    for environment in worker_environments(cluster):
        assert environment["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    monkeypatch.setenv(name, "0")
    for environment in worker_environments(cluster):
        assert "GLIBC_TUNABLES" not in environment


def test_pages_of_a_freed_buffer_are_used_again():
    done = run_program(
        """
import resource, unison
from concurrent.futures import ThreadPoolExecutor
import numpy as np

def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(50_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

unison.set_logical_cpu_devices(2)
unison.MirroredStrategy()
with ThreadPoolExecutor(1) as thread:  # as XLA's: glibc's heaps of threads end at 64 MiB
    for call in (page_faults, lambda: thread.submit(page_faults).result()):
        call()
        print(call())
"""
    )
    # With pages of 2 MiB 190 otherwise, with pages of 4 KiB 97,656.
    assert max(map(int, done.stdout.split())) < 50
