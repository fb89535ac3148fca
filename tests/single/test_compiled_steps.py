"""Compiled steps of `fit` and `run`, beside those that an expert writes in plain JAX.

`python -m benchmarks.compiled_steps` prints the numbers.
"""

import collections
import functools
import re

import jax
import pytest
from benchmarks import by_hand
from benchmarks.compiled_steps import STEPS
from benchmarks.networks import NAMES, network

from gpu_compiling import compiler, needs_gpu_compiler  # noqa: F401

pytestmark = [pytest.mark.slow, needs_gpu_compiler, pytest.mark.usefixtures("compiler")]

#: Those that take minutes to compile: `make check` does so for one of them and one target, `make
#: soak` for all.
LARGE = ("resnet50", "gpt")


#: Steps of which XLA in JAX 0.12 puts a part of the sums at the end: for a tenth less memory.
MEMORY_FIRST = (("fit", "lstm", "h100:4x8"),)


def marks(name, target):
    if name in LARGE:
        is_checked = (name, target) == ("gpt", "h100:8")
        return [pytest.mark.timeout(1800), *([] if is_checked else [pytest.mark.soak])]
    return [pytest.mark.smoke] if (name, target) == ("mlp", "h100:8") else []


def networks_on(*targets):
    return pytest.mark.parametrize(
        ("name", "target"),
        [
            pytest.param(name, target, marks=marks(name, target))
            for target in targets
            for name in NAMES
        ],
    )


GPUS = networks_on("h100:8", "h100:4x8")


@functools.cache
def compiled(whose, name, target):
    return STEPS[whose](network(name), target)


@functools.cache
def gradients_of(name):
    return by_hand.bytes_of(network(name).parameters())


@pytest.mark.parametrize("whose", ["fit", "run"])
@GPUS
def test_a_step_takes_what_one_by_hand_takes(whose, name, target):
    step, expert = compiled(whose, name, target), compiled("by hand", name, target)
    assert step.temporaries <= 1.03 * expert.temporaries
    # Counting steps, and metrics: some kernels of one number.
    assert step.kernels <= 1.05 * expert.kernels + 6
    assert step.aliased >= gradients_of(name) - 1024  # without the results that are no state
    # Beside the gradients: the loss, whose sum fit also divides by the examples; and by hand, the
    # means of moving averages, which a strategy takes when they are read.
    # XLA does not sum the gradients that are known to be zero: of biases before a normalization.
    assert 0.999 * gradients_of(name) <= step.collectives <= expert.collectives + 64
    assert expert.collectives <= gradients_of(name) + 64 + by_hand.bytes_of(
        network(name).statistics()
    )


@pytest.mark.parametrize("whose", ["fit", "run"])
@GPUS
def test_gradients_are_summed_behind_the_backward_pass(whose, name, target):
    step = compiled(whose, name, target)
    if (whose, name, target) in MEMORY_FIRST and jax.__version_info__ >= (0, 12):
        assert step.hidden >= 0.55
        assert step.temporaries <= 0.9 * compiled("by hand", name, target).temporaries
    else:
        assert step.hidden >= 0.8


@pytest.mark.parametrize("whose", ["fit", "run"])
@GPUS
def test_products_have_the_dtypes_of_those_by_hand(whose, name, target):
    assert products_in(compiled(whose, name, target).hlo) == products_in(
        compiled("by hand", name, target).hlo
    )


@pytest.mark.parametrize("whose", ["fit", "run"])
@GPUS
def test_no_step_calls_the_host(whose, name, target):
    hlo = compiled(whose, name, target).hlo
    assert "callback" not in hlo
    assert not re.search(r" (infeed|outfeed|send|recv)\(", hlo)


@networks_on("v5e:2x4")
def test_a_step_for_tpus_takes_what_one_by_hand_takes(name, target):
    step, expert = compiled("fit", name, target), compiled("by hand", name, target)
    # XLA chooses which values stay in the 128 MiB of a core's VMEM, and those are not counted: for
    # programs with the same operations, it chooses differently.
    assert step.temporaries <= 1.15 * expert.temporaries
    assert step.kernels <= 1.05 * expert.kernels + 40  # with the copies to VMEM and back
    assert 0.999 * gradients_of(name) <= step.collectives <= expert.collectives + 64


def products_in(hlo):
    """Counts the products and convolutions of a program by the dtypes of their operands."""
    dtypes = dict(re.findall(r"%([\w.\-]+) = (\w+)\[", hlo))
    found = re.findall(r" (?:dot|convolution)\(%?([\w.\-]+), %?([\w.\-]+)\)", hlo)
    found += re.findall(r" custom-call\(%?([\w.\-]+), %?([\w.\-]+).*__cu(?:blas|dnn)", hlo)
    return collections.Counter(tuple(dtypes[operand] for operand in pair) for pair in found)
