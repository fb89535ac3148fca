"""What `unison bench` says of what it has measured, and how it compares two runs."""

import dataclasses
import json

import numpy as np
import pytest

from unison.benching import comparing, drawing, scaling, showing
from unison.benching.comparing import NotComparableError, compare, differences
from unison.benching.points import Point
from unison.benching.records import Record
from unison.benching.results import NoResultsError, Results
from unison.benching.scaling import Summary
from unison.cli import main

RECORD = Record(
    loop="step",
    replicas=2,
    device="cpu (cpu)",
    steps=130,
    examples=64,
    launches=[(1, 0.01)] * 98 + [(1, 0.02), (1, 0.1)],
    waited=0.11,
    single=[0.012, 0.010, 0.011],
    alone=0.0088,
    why_not=None,
    memory=2**20,
    device_memory=None,
    versions={"unison": "1", "jax": "0.10"},
)


TWO = Point(1, 2, 64, None)


def results_of(rates, point=TWO, target="train.py", **others):
    """Results of one point whose rounds had those rates."""
    records = [
        dataclasses.replace(RECORD, launches=[(1, 64 / rate)] * 10, **others) for rate in rates
    ]
    return Results(target, "a machine", [], {point: records})


NOISY = [100.0, 103.0, 98.0, 101.0, 99.0]


def test_a_summary_has_rate_percentiles_and_shares():
    summary = Summary.of(Point(1, 2, 64, None), [RECORD])
    assert summary.rate == pytest.approx(64 * 100 / 1.1)
    assert summary.percentiles[0] == 0.01
    assert summary.percentiles[2] > 0.02
    assert summary.computing == pytest.approx(0.8)
    assert summary.communication == pytest.approx(0.2)
    assert summary.waiting == pytest.approx(0.1)


def test_percentiles_count_every_step_of_a_launch():
    record = dataclasses.replace(RECORD, launches=[(9, 0.9), (1, 5.0)])
    assert Summary.of(Point(1, 2, 64, None), [record]).percentiles[0] == pytest.approx(0.1)


def test_one_replica_communicates_with_nobody():
    assert scaling.communication_of(dataclasses.replace(RECORD, replicas=1)) == 0


def test_shares_are_of_the_time_of_a_step_as_the_program_runs():
    record = dataclasses.replace(RECORD, launches=[(1, 0.022)], waited=0.011)
    summary = Summary.of(TWO, [record])
    assert (summary.computing, summary.communication) == pytest.approx((0.4, 0.1))
    assert drawing._parts_of_time([summary])["waiting for input"] == pytest.approx([0.5])


def test_the_parts_of_a_step_make_up_the_whole():
    overlapping = dataclasses.replace(RECORD, alone=0.5, waited=5.0)
    parts = drawing._parts_of_time([Summary.of(TWO, [record]) for record in (RECORD, overlapping)])
    assert [sum(sizes) for sizes in zip(*parts.values(), strict=True)] == pytest.approx([1, 1])
    assert all(size >= 0 for sizes in parts.values() for size in sizes)


def test_communication_is_unknown_where_nothing_was_computed_alone():
    assert scaling.communication_of(dataclasses.replace(RECORD, alone=None)) is None


def test_without_examples_steps_are_counted():
    record = dataclasses.replace(RECORD, examples=None)
    summary = Summary.of(Point(1, 2, None, None), [record])
    assert (summary.unit, summary.rate) == ("steps", pytest.approx(100 / 1.1))


def summaries_of(rates):
    """One summary a point, by its rate."""
    return [
        Summary.of(
            point,
            [dataclasses.replace(RECORD, examples=point.batch, launches=[(1, point.batch / rate)])],
        )
        for point, rate in rates.items()
    ]


def test_efficiency_is_relative_to_the_fewest_replicas():
    one, strong, weak = Point(1, 1, 64, 999), Point(1, 2, 64, 999), Point(1, 2, 128, 999)
    summaries = summaries_of({one: 100.0, strong: 150.0, weak: 190.0})
    (of_strong,), (of_weak,) = scaling.strong(summaries), scaling.weak(summaries)
    assert of_strong.efficiency(summaries[1]) == pytest.approx(0.75)
    assert of_weak.efficiency(summaries[2]) == pytest.approx(0.95)
    assert [line.name for line in scaling.by_batch(summaries)] == ["2 replicas"]


def test_sizes_of_data_are_a_line_of_their_own():
    summaries = summaries_of({Point(1, 1, 64, 100): 90.0, Point(1, 1, 64, 1000): 100.0})
    (line,) = scaling.by_examples(summaries)
    assert line.name == "1 device, batch 64"
    assert not scaling.strong(summaries)


def test_results_come_back_from_their_file(tmp_path):
    results = Results("mlp", "a machine", ["a note"], {Point(2, 1, 64, 100): [RECORD, RECORD]})
    results.write(tmp_path / "results.json")
    assert Results.read(tmp_path / "results.json") == results


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not valid JSON"),
        ("[]", "does not hold what unison bench writes"),
        ('{"what": "unison bench", "format": 99}', "is of format 99; this version reads format 1"),
        ('{"what": "unison bench"}', "is of format None"),
        ('{"what": "unison bench", "format": 1}', "is corrupt: KeyError"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path, text, words):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(NoResultsError, match=words):
        Results.read(tmp_path / "a.json")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(NoResultsError, match=r"Cannot read .*none\.json: No such file"):
        Results.read(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.2, "faster"), (0.8, "slower"), (1.0, "no difference")]
)
def test_runs_differ_where_they_do_so_beyond_the_noise(factor, verdict):
    (found,) = compare(results_of(NOISY), results_of([factor * rate for rate in NOISY[::-1]]))
    assert found.verdict == verdict
    assert found.ratio == pytest.approx(factor)
    assert found.interval[0] < found.ratio < found.interval[1]


def test_a_difference_within_the_noise_is_none():
    noisy = [100.0, 150.0, 70.0, 120.0, 90.0]
    (found,) = compare(results_of(noisy), results_of([1.1 * rate for rate in noisy]))
    assert found.verdict == "no difference"


def test_a_difference_too_small_to_matter_is_none():
    still = [100.0, 100.01, 99.99, 100.0, 100.0]
    faster = [1.01 * rate for rate in still]
    assert compare(results_of(still), results_of(faster))[0].verdict == "no difference"
    (found,) = compare(results_of(still), results_of(faster), least=0.005)
    assert found.verdict == "faster"


def test_equal_programs_seldom_seem_to_differ():
    generator = np.random.default_rng(1)
    seeming = 0
    for _ in range(100):
        one, other = np.exp(generator.normal(0, 0.1, (2, 5)))
        low, high = comparing.interval_of_ratio(one, other, 0.95)
        seeming += not low < 1 < high
    assert seeming <= 10


def test_only_runs_of_the_same_program_are_compared():
    with pytest.raises(NotComparableError, match=r"different programs: train.py and other.py"):
        compare(results_of(NOISY), results_of(NOISY, target="other.py"))


def test_runs_need_a_size_in_common():
    other = results_of(NOISY, Point(1, 4, 64, None))
    with pytest.raises(NotComparableError, match="no point in common"):
        compare(results_of(NOISY), other)


def test_too_few_rounds_are_refused():
    with pytest.raises(NotComparableError, match="measured in 5 and 2 rounds"):
        compare(results_of(NOISY), results_of(NOISY[:2]))


def test_other_versions_are_said():
    newer = results_of(NOISY, versions={"unison": "2", "jax": "0.10"})
    assert differences(results_of(NOISY), newer) == ["unison 1 and 2"]


def compared(tmp_path, factor, *options):
    results_of(NOISY).write(tmp_path / "a.json")
    results_of([factor * rate for rate in NOISY]).write(tmp_path / "b.json")
    return main(["bench", "compare", *options, str(tmp_path / "a.json"), str(tmp_path / "b.json")])


def test_the_command_fails_if_slower_when_that_is_asked_for(tmp_path, capsys):
    assert compared(tmp_path, 0.5) == 0
    assert compared(tmp_path, 0.5, "--fail-if-slower") == 1
    assert compared(tmp_path, 2, "--fail-if-slower") == 0
    assert "slower" in capsys.readouterr().out


def test_the_command_says_what_cannot_be_compared(tmp_path, capsys):
    (tmp_path / "a.json").write_text("{}")
    path = str(tmp_path / "a.json")
    assert main(["bench", "compare", path, path]) == 2
    assert main(["bench", "compare", path]) == 2
    assert main(["bench", "compare", "--least", "7", path, path]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.startswith("unison bench: ") for line in said] == [True] * 3
    assert "expected a number from 0 up to, not including, 1; received '7'" in said[2]


POINTS = {
    Point(1, 1, 64, 999): [dataclasses.replace(RECORD, replicas=1)] * 2,
    Point(1, 2, 64, 999): [RECORD, dataclasses.replace(RECORD, waited=0.2)],
    Point(1, 2, 128, 999): [RECORD],
}


def test_the_page_holds_plots_and_numbers_and_needs_no_other_file():
    html = drawing.html(Results("<mlp>", "a machine", ["a note"], POINTS))
    for words in ("Strong scaling", "Weak scaling", "Batch size", "a note", "&lt;mlp&gt;"):
        assert words in html
    assert "<mlp>" not in html
    assert "src=" not in html
    assert "href=" not in html
    assert "http" not in html


def test_the_picture_is_a_png(tmp_path):
    drawing.write_png(Results("mlp", "a machine", [], POINTS), tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'unison\[bench\]'"):
        drawing.write_png(Results("mlp", "a machine", [], POINTS), tmp_path / "scaling.png")


def test_columns_that_say_nothing_are_left_out():
    one = {Point(1, 1, 64, 999): [RECORD]}
    header, rows = showing.numbers(showing.summaries_of(Results("mlp", "m", [], one)))
    assert "strong" not in header
    assert "data" not in header
    assert len(rows[0]) == len(header)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.py"], "Expected a model (mlp, cnn, loop) or the file of a program. Received:"),
        (["--devices", "1", "mlp", "--batch", "64"], "The model mlp takes no arguments"),
        (["--devices", "1,4", "--batch", "2", "--scaling", "strong", "mlp"], "too few examples"),
        (["--batch", "512", "--examples", "100", "mlp"], "is larger than the data"),
        (["--output", __file__, "mlp"], "Expected a folder for --output. Received: "),
        (["--batch", "64", __file__], "The program does not receive --batch"),
        ([__file__, "--batch", "{batch}"], "--batch does not say what it is"),
        (["-m", "mlp", "--batch", "{batch}"], "--batch does not say what it is"),
        (["--scaling", "weak", __file__], "--scaling is about batches"),
        (["--devices", "2", "--workers", "2", "mlp"], "Give either --devices, of one process"),
        (["--devices-per-worker", "2", "mlp"], "--devices-per-worker is for several processes"),
        (["--address", "auto", "mlp"], "--address is for several processes"),
        (["--cpus-per-worker", "2", "mlp"], "--cpus-per-worker is for Ray clusters"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(arguments, words, capsys):
    assert main(["bench", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("unison bench: ")
    assert words in line


@pytest.mark.parametrize("option", ["--devices", "--workers", "--batch", "--rounds"])
@pytest.mark.parametrize("value", ["0", "-1", "two"])
def test_numbers_are_at_least_one(option, value, capsys):
    with pytest.raises(SystemExit) as end:
        main(["bench", f"{option}={value}", "mlp"])
    assert end.value.code == 2
    assert f"expected a number of at least 1, received '{value}'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["bench", "run"])
@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1", "soon"])
def test_nothing_is_waited_for_without_end(command, value, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, f"--timeout={value}", __file__])
    assert end.value.code == 2
    assert f"expected seconds, more than 0, received '{value}'" in capsys.readouterr().err


def test_the_file_is_json_that_others_can_read(tmp_path):
    Results("mlp", "m", [], POINTS).write(tmp_path / "results.json")
    said = json.loads((tmp_path / "results.json").read_text())
    assert said["points"][1]["rounds"][0]["examples"] == 64
