"""`python -m benchmarks.accuracy`: what it trains, compares and prints."""

import re
from pathlib import Path

import numpy as np
import pytest

from unison.cli.demo_data import Images

ROOT = Path(__file__).parents[2]


@pytest.fixture
def accuracy(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    import benchmarks.accuracy

    return benchmarks.accuracy


def images():
    """Images that are dark on the left or on the right."""
    numbers = np.random.default_rng(0)
    parts = []
    for count in (240, 60):
        labels = numbers.integers(0, 2, count).astype("int32")
        pixels = numbers.random((count, 28, 28)).astype("float32")
        pixels[labels == 0, :, :14] = 0
        pixels[labels == 1, :, 14:] = 0
        parts += [pixels.reshape(count, 784), labels]
    return Images(*parts)


@pytest.mark.soak
def test_a_method_is_trained_with_each_seed_and_compared(accuracy):
    network = accuracy.NETWORKS["cnn"]._replace(epochs=6)
    plain = accuracy.measured("none", network, images(), 2, 2, None)
    sign = accuracy.measured("sign", network, images(), 2, 2, plain)
    assert len(plain.accuracies) == len(sign.accuracies) == 2
    assert min(plain.accuracies + sign.accuracies) > 90
    assert sign.difference == pytest.approx(sign.mean - plain.mean)
    # All of the gradients, once; signs, but of the small weights.
    assert plain.bytes_sent == 4 * sum(
        (5 * 5 * 1 * 8 + 8, 5 * 5 * 8 * 16 + 16, 256 * 128 + 128, 128 * 10 + 10)
    )
    assert plain.bytes_sent / sign.bytes_sent == pytest.approx(sign.ratio)
    assert 20 < sign.ratio < 32


def test_a_row_is_one_of_a_table_in_markdown(accuracy):
    row = accuracy.Row("sign", "SGD(0.1)", [97.5, 97.25], -0.125, 14152.0, 28.8)
    assert accuracy.as_markdown(row) == (
        "| `sign()` | `SGD(0.1)` | 97.50, 97.25 | 97.38 | -0.12 | 14,152 | 28.8 |"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--methods=sign,zip"], "--methods knows bfloat16, .* Received: zip"),
        (["--seeds=0"], "--seeds: expected 1 or more. Received: 0"),
        ([], "there is no file nowhere"),
    ],
)
def test_what_cannot_be_is_refused_at_once(accuracy, given, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        accuracy.main(["--data=nowhere", *given])
    assert re.search(message, capsys.readouterr().err)
