"""The benchmarks run, measure who takes part, and leave nobody behind.

Those that take longest are in `tests/soak`.
"""

import dataclasses
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks import workloads

import unison.tf  # noqa: F401 (sets an option of JAX, as the first program of it would)
from benchmark_runs import ROOT, command, run_benchmarks


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    import benchmarks.driver
    import benchmarks.peers
    import benchmarks.results
    import benchmarks.scaling
    import benchmarks.tables

    return benchmarks


def worker_processes(driver):
    """The contestants that `driver` has started: each leads a session, `platform`'s `uname` not."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        process = int(status.parent.name)
        parent, session = int(fields[1]), int(fields[3])
        if parent == driver and session == process:
            found.append(process)
    return found


@pytest.mark.parametrize(
    ("stored", "now", "more_is_better", "change"),
    [
        (1.0, 0.9, True, "slower: 0.90 x"),
        (1.0, 1.1, True, "faster: 1.10 x"),
        (1.0, 1.25, False, "slower: 0.80 x"),
        (1.3, 1.31, False, ""),
        (None, 1.31, False, "new"),
    ],
)
def test_a_ratio_that_has_moved_is_marked(monkeypatch, stored, now, more_is_better, change):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import perf

    row = perf.row("fit", stored, now, more_is_better)
    assert [cell.strip() for cell in row.split("|")][4] == change


def test_fit_is_measured_beside_a_hand_written_loop(benchmarks, tmp_path):
    written = tmp_path / "deep" / "fit.json"
    finished = run_benchmarks(
        "fit",
        "--quick",
        "--model=mlp",
        "--batch=64",
        "--contestants=unison,hand",
        "--json",
        written,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "x as fast as hand" in finished.stdout
    [workload] = json.loads(written.read_text())["workloads"]
    assert {name: len(rounds) for name, rounds in workload["rounds"].items()} == {
        "unison": 2,
        "hand": 2,
    }
    for rounds in workload["rounds"].values():
        assert all(done["value"] > 0 and done["peak_rss"] > 0 for done in rounds)
        assert rounds[-1]["facts"]["loss"] < 3
    page, plot = benchmarks.results.write(written.parent)
    assert plot.read_text().startswith("<?xml")
    text = page.read_text()
    assert "## fit" in text
    assert "![How many times as fast Unison is](deep/fit.svg)" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| hand |")]
    ratio = workload["unison_times_as_fast_as"]["hand"]
    assert row.split("|")[4].startswith(f" {ratio:.2f} (")


@pytest.mark.parametrize("name", workloads.ARCHITECTURES)
def test_the_networks_by_hand_have_the_parameters_of_keras(name):
    import jax
    from benchmarks.contestants import hand_written_models, keras_models

    [work] = workloads.architecture_workloads([name], "cpu", quick=True)
    by_hand = jax.eval_shape(hand_written_models.model_of(work).initial, jax.random.key(0))
    shapes = [weight.shape for weight in keras_models.compiled(name).trainable_variables]
    assert sum(leaf.size for leaf in jax.tree.leaves(by_hand)) == sum(map(math.prod, shapes))


def test_networks_of_today_are_measured():
    finished = run_benchmarks(
        "architectures", "--quick", "--rounds=1", "--model=graph", "--contestants=unison,hand"
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "x as fast as hand" in finished.stdout


def test_an_environment_of_a_peer_counts_once_all_of_it_is_installed(benchmarks, tmp_path):
    assert benchmarks.peers.python_of(tmp_path, "grain") is None
    (tmp_path / "grain").mkdir()
    stamp = tmp_path / "grain" / "installed-packages.txt"
    stamp.write_text("grain==0.0.1\n")
    assert benchmarks.peers.python_of(tmp_path, "grain") is None
    stamp.write_text("\n".join(benchmarks.peers.PACKAGES["grain"]))
    assert benchmarks.peers.python_of(tmp_path, "grain") == tmp_path / "grain" / "bin" / "python"


def test_peers_for_gpus_are_other_environments(benchmarks, tmp_path):
    (tmp_path / "tf").mkdir()
    stamp = tmp_path / "tf" / "installed-packages.txt"
    stamp.write_text("\n".join(benchmarks.peers.PACKAGES["tf"]))
    assert benchmarks.peers.python_of(tmp_path, "tf", "cpu") is not None
    assert benchmarks.peers.python_of(tmp_path, "tf", "gpu") is None
    stamp.write_text("\n".join(benchmarks.peers.PACKAGES_ON_GPUS["tf"]))
    assert benchmarks.peers.python_of(tmp_path, "tf", "gpu") is not None
    assert benchmarks.peers.python_of(tmp_path, "torch", "gpu") is None


def test_without_a_gpu_nothing_is_measured_in_its_name(tmp_path):
    finished = run_benchmarks(
        "run", "--quick", "--rounds=1", "--contestants=unison,hand", "--device=gpu"
    )
    assert finished.returncode == 1
    assert "unison is out" in finished.stdout
    assert "hand is out" in finished.stdout
    refused = run_benchmarks("workers", "--device=gpu")
    assert refused.returncode == 2
    assert "--device gpu: for fit, run, memory. Received: workers" in refused.stderr


def test_run_is_measured_with_one_variable_and_with_twenty(tmp_path):
    written = tmp_path / "run.json"
    finished = run_benchmarks(
        "run", "--quick", "--rounds=1", "--contestants=unison,hand", "--json", written
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    workloads = json.loads(written.read_text())["workloads"]
    assert [workload["work"]["variables"] for workload in workloads] == [1, 20]
    assert all(set(workload["rounds"]) == {"unison", "hand"} for workload in workloads)


@pytest.mark.soak
def test_training_in_two_processes_is_measured_and_all_train_the_same(tmp_path):
    written = tmp_path / "workers.json"
    finished = run_benchmarks(
        "workers", "--quick", "--rounds=1", "--model=mlp", "--batch=64", "--json", written
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "torch is left out" in finished.stdout
    [workload] = json.loads(written.read_text())["workloads"]
    assert set(workload["rounds"]) == {"unison", "unison fit", "unison tuned", "hand"}
    norms = [done["facts"]["norm"] for [done] in workload["rounds"].values()]
    assert max(norms) - min(norms) < 1e-3


@pytest.mark.soak
def test_the_memory_of_divided_state_is_measured(tmp_path):
    written = tmp_path / "fsdp.json"
    finished = run_benchmarks("fsdp", "--quick", "--rounds=1", "--json", written)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "torch is left out" in finished.stdout
    [workload] = json.loads(written.read_text())["workloads"]
    state = {name: done["facts"]["state_bytes"] for name, [done] in workload["rounds"].items()}
    assert set(state) == {"unison zero3", "unison zero2"}
    assert state["unison zero3"] < state["unison zero2"]


def test_sums_over_processes_are_measured_beside_what_limits_them(tmp_path):
    written = tmp_path / "all_reduce.json"
    finished = run_benchmarks("all_reduce", "--quick", "--rounds=1", "--json", written)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    workloads = json.loads(written.read_text())["workloads"]
    assert [workload["work"]["kibibytes"] for workload in workloads] == [4, 64]
    for workload in workloads:
        assert set(workload["rounds"]) == {"unison", "hand", "loopback TCP", "memcpy"}


def test_the_model_of_costs_finds_latency_and_bandwidth(benchmarks):
    def seconds(processes, size):
        turns = max(1, processes / 2)
        return turns * (50e-6 * 2 * (processes - 1) + 2 * (1 - 1 / processes) * size / 3e9)

    points = [(n, size, seconds(n, size)) for n in (2, 4, 8) for size in (4096, 2**20, 2**24)]
    cost = benchmarks.scaling.fitted(points, cores=2)
    assert cost.messages == "2 (n - 1)"
    assert cost.latency == pytest.approx(50e-6)
    assert cost.seconds_a_byte == pytest.approx(1 / 3e9)
    assert cost.error < 1e-6
    assert cost.seconds(1, 2**20) == 0


def test_a_round_of_several_processes_ends_with_the_last_of_them(benchmarks):
    own = benchmarks.protocol.Round(5.0, 0.5, 100, 200, {"norm": 1.0})
    other = benchmarks.protocol.Round(4.0, 0.75, 10, 20, {"norm": 2.0})
    together = benchmarks.protocol.of_all_processes([own, other], slowest=min)
    assert together == benchmarks.protocol.Round(4.0, 1.25, 110, 220, {"norm": 1.0})


def test_the_steps_over_links_are_a_table(benchmarks):
    def result(link, steps_a_second):
        work = benchmarks.workloads.TrainingWork("network", "mlp", 2, 64, 3, link)
        done = benchmarks.protocol.Round(steps_a_second, 1.0, None, 1, {})
        return benchmarks.driver.Result(work, {"unison": [done]})

    results = [result("unshaped", 400.0), result("100 Mbit/s", 8.0)]
    assert benchmarks.tables.by_link(results).splitlines() == [
        "mlp, batch 64: ms/step",
        "              unison",
        "  unshaped      2.50",
        "  100 Mbit/s  125.00",
    ]


def test_datasets_are_measured_beside_numpy_and_missing_peers_are_named(tmp_path):
    written = tmp_path / "data.json"
    finished = run_benchmarks(
        "data",
        "--quick",
        "--rounds=1",
        "--task=arrays,lines",
        "--contestants=unison,numpy,tf",
        "--json",
        written,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "tf is left out" in finished.stdout
    assert "x as fast as numpy take" in finished.stdout
    arrays, lines = json.loads(written.read_text())["workloads"]
    assert set(arrays["rounds"]) == {"unison", "unison prefetch", "numpy", "numpy take"}
    assert set(lines["rounds"]) == {"unison"}
    for [measured] in (*arrays["rounds"].values(), *lines["rounds"].values()):
        assert measured["value"] > 0
    assert not Path(lines["work"]["folder"]).exists()


@pytest.mark.parametrize(
    "task",
    [
        "arrays",
        "map",
        "map_batches",
        "records",
        "records_batched",
        "jpeg",
        "jpeg_resized",
        "augment",
        "generator",
        "lines",
        "padded_batch",
        "bucketing",
    ],
)
def test_every_program_of_ours_reads_every_example_once(benchmarks, tmp_path, task):
    from benchmarks import examples

    work = benchmarks.workloads.DataWork(task, 131, 16, 0.0, str(tmp_path))
    examples.write_files(tmp_path, [work])
    entries = [entry for entry in benchmarks.contestants.ENTRIES if entry.takes_part_in(work)]
    ours = [entry for entry in entries if entry.family in ("unison", "numpy")]
    assert any(entry.family == "unison" for entry in ours)
    for entry in ours:
        module = importlib.import_module(f"benchmarks.contestants.{entry.module}")
        contestant = getattr(module, entry.function)(work)  # counts the examples of a pass
        assert contestant.round() > 0


def test_the_ways_to_augment_give_the_same_images(benchmarks):
    import numpy as np
    from benchmarks import augmentation, examples

    images, labels = examples.colours(9)
    keys = np.random.default_rng(0).integers(0, 2**32, (9, 2), np.uint32)
    together, _ = augmentation.of_block(images, labels, keys)
    alone = [augmentation.of_element(*each)[0] for each in zip(images, labels, keys, strict=True)]
    np.testing.assert_array_equal(together, np.stack(alone))
    jitted, _ = augmentation.jitted()(images, labels, keys[0])
    assert jitted.shape == together.shape
    assert jitted.dtype == together.dtype


def test_the_fastest_of_ours_is_compared_with_the_fastest_peer(benchmarks):
    def rounds(*values):
        return [benchmarks.protocol.Round(value, 1.0, None, 1, {}) for value in values]

    result = benchmarks.driver.Result(benchmarks.workloads.DataWork("map", 9, 3, 0.0, ""))
    result.rounds = {
        "unison": rounds(10, 10),
        "unison 2 processes": rounds(30, 50),
        "numpy": rounds(99, 99),
        "tf": rounds(5, 5),
        "torch": rounds(20, 20),
    }
    last = benchmarks.tables.table(result).splitlines()[-1]
    assert last == (
        "  the fastest, unison 2 processes, is 2.00 (1.50 to 2.50) x as fast as the fastest peer, "
        "torch"
    )


def test_a_contestant_that_fails_is_named_and_the_others_go_on(benchmarks):
    entry = benchmarks.contestants.Entry("broken", "broken", "there_is_none", (), {})
    work = benchmarks.workloads.RunWork(1, seconds=0.01)
    said = []
    result = benchmarks.driver.measure(
        work, [(entry, sys.executable)], 1, benchmarks.driver.Limits(), said.append
    )
    assert "No module named" in result.failures["broken"]
    assert any("broken is out" in line for line in said)
    assert "broken: no result" in benchmarks.tables.table(result)


def test_the_process_that_failed_is_named_and_its_peers_are_not_waited_for(benchmarks, tmp_path):
    interpreter = tmp_path / "python"
    interpreter.write_text(
        '#!/bin/sh\ncase "$TF_CONFIG" in *\'"index": 1\'*) echo unwell >&2; exit 7;; esac\n'
        "exec sleep 60\n"
    )
    interpreter.chmod(0o755)
    entry = benchmarks.contestants.Entry("mixed", "mixed", "any", (), {})
    work = benchmarks.workloads.AllReduceWork("all_reduce", 2, 4, 1)
    limits = benchmarks.driver.Limits(start=50)
    begin = time.monotonic()
    result = benchmarks.driver.measure(work, [(entry, str(interpreter))], 1, limits, print)
    assert result.failures["mixed"] == "process 1 of 2: ended with status 7\n    unwell"
    (stored,) = benchmarks.tables.to_dictionary([result], {})["workloads"]
    assert stored["failures"] == {"mixed": "process 1 of 2: ended with status 7"}
    assert time.monotonic() - begin < 40


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_where_a_process_cannot_start_its_peers_are_ended(benchmarks):
    driver = benchmarks.driver
    here = driver.THIS_MACHINE
    nowhere = driver.Host("127.0.0.1", command=("/there/is/none",))
    entry = next(e for e in benchmarks.contestants.ENTRIES if e.module == "hand_written_run")
    entry = dataclasses.replace(entry, most_processes=None)
    work = benchmarks.workloads.AllReduceWork("all_reduce", 2, 4, 1)
    before = worker_processes(os.getpid())
    with pytest.raises(FileNotFoundError):
        driver.measure(work, [(entry, sys.executable)], 1, driver.Limits(), print, [here, nowhere])
    assert worker_processes(os.getpid()) == before


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_contestant_that_closes_its_output_is_not_waited_for(benchmarks, monkeypatch, tmp_path):
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\nexec 1>&-\nexec sleep 60\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(benchmarks.processes, "_SECONDS_TO_END", 0.2)
    entry = benchmarks.contestants.Entry("silent", "silent", "any", (), {})
    work = benchmarks.workloads.RunWork(1, seconds=0.01)
    contestants, limits = [(entry, str(interpreter))], benchmarks.driver.Limits(start=50)
    result = benchmarks.driver.measure(work, contestants, 1, limits, print)
    assert result.failures["silent"] == "has closed its output, and runs on"


def test_what_has_been_measured_is_kept_when_the_time_is_over(benchmarks):
    entry = next(e for e in benchmarks.contestants.ENTRIES if e.module == "hand_written_run")
    work = benchmarks.workloads.RunWork(1, seconds=0.2)
    limits = benchmarks.driver.Limits(all=0.1)
    said = []
    result = benchmarks.driver.measure(work, [(entry, sys.executable)], 50, limits, said.append)
    assert len(result.rounds["hand"]) == 1
    assert said[-1] == "  no time for more than 1 of 50 rounds"


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_contestant_that_is_late_is_ended(benchmarks):
    entry = next(e for e in benchmarks.contestants.ENTRIES if e.module == "hand_written_run")
    work = benchmarks.workloads.RunWork(1, seconds=0.01)
    limits = benchmarks.driver.Limits(start=0.1)
    before = worker_processes(os.getpid())
    result = benchmarks.driver.measure(work, [(entry, sys.executable)], 1, limits, print)
    assert result.failures["hand"].startswith("no answer")
    assert worker_processes(os.getpid()) == before


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_no_contestant_outlives_a_driver_that_is_told_to_end(signal_number):
    driver = subprocess.Popen(
        command("run", "--contestants=hand"),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 30
        while not (workers := worker_processes(driver.pid)):
            assert time.monotonic() < deadline, "No contestant was started."
            time.sleep(0.05)
        driver.send_signal(signal_number)
        assert driver.wait(timeout=30) == 128 + signal_number
    finally:
        driver.kill()
        driver.wait()
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


def test_ratios_are_of_the_same_round_and_more_is_faster(benchmarks):
    def rounds(*values):
        return [benchmarks.protocol.Round(value, 1.0, None, 1, {}) for value in values]

    by_images = benchmarks.driver.Result(benchmarks.workloads.FitWork("mlp", 64, 1))
    by_images.rounds = {"unison": rounds(10, 30), "hand": rounds(20, 30)}
    by_time = benchmarks.driver.Result(benchmarks.workloads.RunWork(1, 1.0))
    by_time.rounds = dict(by_images.rounds)
    assert benchmarks.tables.speed_ratios(by_images) == {"hand": [0.5, 1.0]}
    assert benchmarks.tables.speed_ratios(by_time) == {"hand": [2.0, 1.0]}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--batch=63"],
        ["--contestants=who"],
        ["--data=nowhere"],
        ["--task=what"],
        ["fit", "--model=large_mlp"],
        ["workers", "--model=cnn"],
        ["fit", "--megabits=100"],
        ["network", "--megabits=0"],
        ["run", "--scaling"],
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    benchmarks, arguments, capsys, monkeypatch
):
    from benchmarks.__main__ import main

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(benchmarks.driver, "measure", None)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "error" in capsys.readouterr().err


def test_what_a_lost_worker_costs_is_told_from_the_steps_that_were_done(benchmarks):
    from benchmarks.contestants.recovery import outcome
    from benchmarks.steps_done import Step

    work = benchmarks.workloads.RecoveryWork(workers=2, seconds_before=0.0)
    killed = Step(1, 7, 10.0)
    before = [Step(worker, number, 3.0 + number) for number in (5, 6) for worker in (0, 1)]
    # The survivor is a little later with the step that the lost one did last.
    last = [Step(1, 7, 9.9), Step(0, 7, 10.1)]
    goes_on = [Step(0, 8, 11.5), Step(0, 9, 11.6), Step(1, 10, 14.0)]
    value, facts = outcome(work, killed, [*before, *last, *goes_on])
    assert value == pytest.approx(1500)
    assert facts == pytest.approx(
        {"done again": 0, "new step s": 1.5, "all back s": 4.0, "ms/step": 1000}
    )
    again = [Step(worker, number, 8.0 + number) for number in (6, 7, 8) for worker in (0, 1)]
    value, facts = outcome(work, killed, [*before, *last, *again])
    assert value == pytest.approx(4000)
    assert facts == pytest.approx(
        {"done again": 2, "new step s": 6.0, "all back s": 4.0, "ms/step": 1000}
    )


def test_the_model_of_servers_finds_what_a_step_is_made_of(benchmarks):
    from benchmarks import server_scaling
    from benchmarks.workloads import server_scaling_workloads

    time = server_scaling.Price(1e-3, 2e-4, 1e-11, 5e-10)
    true = server_scaling.Model(time, server_scaling.Price(2e-3, 1e-4, 2e-11, 4e-10), cores=2)
    works = server_scaling_workloads(quick=False)
    results = [benchmarks.driver.Result(work) for work in works]
    for result in results:
        value = true.steps_a_second(result.work)
        facts = {"CPU ms": true.processor.of(result.work) * 1e3}
        result.rounds = {"unison": [benchmarks.protocol.Round(value, 1.0, None, 1, facts)]}
    said = server_scaling.summary(results, cores=2)
    assert "alone: 1.00 ms + 0.20 ms a server + operations at 100 GFLOP/s + bytes at 2.0 GB" in said
    assert "step: 2.00 ms + 0.10 ms a server + operations at 50 GFLOP/s + bytes at 2.5 GB/s" in said
    assert said.count("+0%") + said.count("-0%") == len(works)
    assert server_scaling.summary([], cores=2) == ""
