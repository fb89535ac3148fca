"""Keras' loops on several workers: each reads its own rows of every batch, or its own files.

The programs are in `own_rows_programs.py`.
"""

import functools
import itertools

import numpy as np
import pytest

import unison
from keras_forms import IMPORTED, forms
from parallel import own_rows_programs
from unison.data import Shares
from warm_workers import launch

SECONDS = 100

#: The sizes of the batches of the loops of `decoded_examples`. `fit` takes one to build the model.
SIZES = {
    "fit": [12, *[12, 12, 12, 11, 6, 6] * 2],
    "evaluate": [12, 12, 12, 11],
    "predict": [5, 5],
}


def on_workers(name, form, *args, workers=2, devices=1, **kwargs):
    """What every worker's program returns, in a form in which Keras comes to it."""
    return launch(
        functools.partial(own_rows_programs.on_workers, **kwargs),
        workers,
        args=(name, *args, form),
        imported=IMPORTED[form],
        devices_per_worker=devices,
        timeout=SECONDS,
        on_line=lambda worker, line: None,
    )


@functools.cache
def results_of(name, workers, devices, form):
    return on_workers(name, form, workers=workers, devices=devices)


@functools.cache
def expected(name, replicas):
    """What the program returns in this process."""
    strategy = unison.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])
    return getattr(own_rows_programs, name)(strategy)


@forms("tf", soaked=["keras"])
@pytest.mark.parametrize(("workers", "devices"), [(2, 1), (3, 1), (2, 2)])
def test_each_example_is_decoded_on_one_worker(workers, devices, form):
    results = results_of("decoded_examples", workers, devices, form)
    alone = expected("decoded_examples", workers * devices)
    for loop, sizes in SIZES.items():
        of_all = sorted(itertools.chain(*(result[loop] for result in results)))
        assert of_all == alone[loop]
        for worker, result in enumerate(results):
            own = slice(worker * devices, (worker + 1) * devices)
            counts = [sum(Shares(size, workers * devices).counts[own]) for size in sizes]
            assert len(result[loop]) == sum(counts)
    for result in results:
        for own, of_alone in zip(result["numbers"], alone["numbers"], strict=True):
            np.testing.assert_allclose(own, of_alone, rtol=1e-5, atol=1e-6)


@forms("tf", soaked=["keras"])
@pytest.mark.parametrize("source", ["files", "function"])
@pytest.mark.parametrize(("workers", "devices"), [(2, 1), (2, 2)])
def test_fit_on_inputs_of_each_workers_own_is_fit_on_all_of_them(workers, devices, source, form):
    for result in results_of("fitted_on_own_inputs", workers, devices, form):
        result = result[source]
        pairs = [("weights", "of whole batches"), ("evaluate", "of all examples")]
        for part, same in [*pairs, ("predict", "of each")]:
            for own, of_all in zip(result[part], result[same], strict=True):
                np.testing.assert_allclose(own, of_all, rtol=1e-5, atol=1e-6)


@forms("tf", soaked=["keras"])
def test_files_are_read_by_one_worker_each(form):
    results = results_of("fitted_on_own_inputs", 2, 1, form)
    first, second = (result["files"]["read"] for result in results)
    assert {number // 100 for number in first} == {0, 2, 4}
    assert {number // 100 for number in second} == {1, 3}


@forms("tf", soaked=["keras"])
def test_a_resumed_epoch_goes_on_in_each_workers_own_rows(tmp_path, form):
    results = on_workers("resumed_fit", form, str(tmp_path))
    for kind in ("data", "files", "function", "turns", "turns in order"):
        for result in results:
            for resumed, whole in zip(result[kind]["resumed"], result[kind]["whole"], strict=True):
                np.testing.assert_allclose(resumed, whole, rtol=1e-5)
    # A batch builds the model. The one that was done is not decoded, four and five are.
    assert [len(result["data"]["read"]) for result in results] == [10 * 4, 10 * 4]


@forms("tf", soaked=["keras"])
def test_pytorch_loaders_load_own_examples(form):
    pytest.importorskip("torch")
    results = results_of("torch_loaders", 2, 1, form)
    alone = expected("torch_loaders", 2)
    for kind in ("shuffled", "whole", "doubled"):
        for result in results:
            for part in ("loss", "weights", "evaluate"):
                for own, of_alone in zip(result[kind][part], alone[kind][part], strict=True):
                    np.testing.assert_allclose(own, of_alone, rtol=1e-5, atol=1e-6)
    for kind in ("shuffled", "drawing"):
        for epoch in zip(*(result[kind]["loaded"] for result in results), strict=True):
            assert [len(own) for own in epoch] == [15, 15]
            assert sorted(epoch[0] + epoch[1]) == list(range(30))
    # Augmentations differ between the workers.
    assert not set(results[0]["drawn"]) & set(results[1]["drawn"])
    # All of these examples are loaded in a loader's own process.
    assert all(result["with processes"]["loaded"] == [[]] * 3 for result in results)
    for worker, result in enumerate(results):
        assert result["sampled"]["loaded"] == [list(range(worker, 30, 2))] * 3
        assert result["in batches"] == result["sampled"]
        assert "of workers 0 and 1 give other indices" in result["refused"]
    for kind in ("with processes", "drawing", "sampled"):
        assert results[0][kind]["weights"] == results[1][kind]["weights"]


@forms("tf", soaked=["keras"])
@pytest.mark.parametrize(("workers", "devices"), [(2, 1), (2, 2)])
def test_grain_pipelines_read_own_examples(workers, devices, form):
    pytest.importorskip("grain")
    results = results_of("grain_pipelines", workers, devices, form)
    alone = expected("grain_pipelines", workers * devices)
    for kind, said in alone.items():
        for result in results:
            for own, of_alone in zip(result[kind]["numbers"], said["numbers"], strict=True):
                np.testing.assert_allclose(own, of_alone, rtol=1e-5, atol=1e-6, err_msg=kind)
    for kind in ("iterated", "batches iterated", "loaded"):
        together = sorted(itertools.chain(*(result[kind]["read"] for result in results)))
        assert together == sorted(set(together)), kind
        assert len(together) == (24 if kind == "batches iterated" else 30), kind
    for worker, result in enumerate(results):
        own = slice(worker * devices, (worker + 1) * devices)
        counts = [sum(Shares(size, workers * devices).counts[own]) for size in (8, 8, 8, 6)]
        assert len(result["loaded"]["read"]) == sum(counts)
        assert len(result["sharded"]["read"]) == 15
        _, evaluated, *_ = result["sharded"]["numbers"]
        np.testing.assert_allclose(evaluated, result["sharded"]["whole"], rtol=1e-5)
        sharded, shorter, sliced = result["refused"]
        assert "Pass shard_options=grain.sharding.NoSharding()" in sharded
        assert "worker 1 has 29 examples in batches of 8" in shorter
        assert "of SliceMapDataset[1:30:2]" in sliced


@forms("tf", soaked=["keras"])
@pytest.mark.parametrize(("workers", "devices"), [(2, 1), (2, 2)])
def test_batches_of_a_py_dataset_are_computed_in_turn(tmp_path, workers, devices, form):
    results = on_workers("py_datasets", form, str(tmp_path), workers=workers, devices=devices)
    strategy = unison.MirroredStrategy([f"CPU:{index}" for index in range(workers * devices)])
    alone = own_rows_programs.py_datasets(strategy, str(tmp_path))
    for kind in ("in order", "shuffled", "shuffled by itself", "others"):
        for result in results:
            own, of_alone = (np.hstack(each[kind]["numbers"]) for each in (result, alone))
            np.testing.assert_allclose(own, of_alone, 2e-5, 1e-6, err_msg=kind)
    for worker, result in enumerate(results):
        indices, drawn, pids, _ = zip(*result["in order"]["computed"], strict=True)
        assert sorted(indices) == list(range(worker, 5, workers))
        assert len(set(drawn)) == len(drawn)
        assert result["in order"]["pid"] not in pids
        assert result["in order"]["calls"] < 3  # each epoch has a copy of its own
        assert "no such file" in result["failed"]
        assert "Worker 0 has 5 batches, worker 1 has 4" in result["longer"]
        assert result["unpicklable"]["computed"] == result["without processes"]["computed"] == 5
        assert result["without processes"]["warned"] == []
        np.testing.assert_allclose(result["level"], alone["level"], rtol=1e-5)
    (warned,) = results[0]["unpicklable"]["warned"]
    assert "The PyDataset cannot be sent to processes: cannot pickle" in warned
    assert [result["failed"].split(":")[0] for result in results] == ["OSError", "UnknownError"]


@forms("tf", soaked=["keras"])
def test_workers_with_different_data_are_warned_of(form):
    first, second = on_workers("differing_data", form)
    for kind in ("same arrays", "same batches"):
        assert first[kind] == second[kind] == []
    for kind in ("other arrays", "validation", "other batches"):
        (warning,) = first[kind]
        assert "Workers 0 and 1 were given different data" in warning
        assert second[kind] == []
    for result in (first, second):
        assert "worker 1 has [[[7, 1], 'float32']" in result["other lengths"]


@pytest.mark.soak
def test_grains_processes_read_own_examples():
    pytest.importorskip("grain")
    alone = own_rows_programs.grain_pipelines(unison.MirroredStrategy(["CPU:0"]), in_processes=True)
    for result in on_workers("grain_pipelines", "keras", in_processes=True):
        np.testing.assert_allclose(result["numbers"], alone["numbers"], rtol=1e-5)


@forms("tf", soaked=["keras"])
@pytest.mark.parametrize(
    ("workers", "devices"), [(2, 1), pytest.param(3, 1, marks=pytest.mark.soak)]
)
def test_loops_of_every_kind_give_what_one_process_gives(workers, devices, form):
    alone = expected("loops_of_every_kind", workers * devices)
    for result in results_of("loops_of_every_kind", workers, devices, form):
        assert result.keys() == alone.keys()
        for kind, parts in result.items():
            for own, of_alone in zip(parts, alone[kind], strict=True):
                np.testing.assert_allclose(own, of_alone, rtol=1e-5, atol=1e-6, err_msg=kind)


@forms("keras", "tf")
def test_predictions_for_files_are_in_the_order_of_the_files(tmp_path, form):
    for number, count in enumerate([3, 5, 2]):
        lines = [f"{10 * number + line}\n" for line in range(count)]
        (tmp_path / f"{number}.txt").write_text("".join(lines))
    results = on_workers("predicted_from_files", form, str(tmp_path))
    assert results == [[0.0, 1.0, 2.0, 10.0, 11.0, 12.0, 13.0, 14.0, 20.0, 21.0]] * 2


@forms("keras", "tf")
def test_a_dataset_creator_makes_a_dataset_for_each_worker(form):
    for worker, result in enumerate(results_of("dataset_creator", 2, 1, form)):
        assert result["made"] == [[2, worker]]
        for created, whole in zip(*result["weights"], strict=True):
            np.testing.assert_allclose(created, whole, rtol=1e-5)
