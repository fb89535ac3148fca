"""`tf.random`: the stream, in and around compiled programs, and generators."""

import numpy as np
import pytest

import unison.tf as tf


@pytest.fixture
def two():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def drawn(result):
    return [value.tolist() for value in result.values]


def test_every_step_and_every_replica_draws_its_own(two):
    def step():
        return tf.random.normal([3])

    tf.random.set_seed(1)
    first, second = drawn(two.run(step)), drawn(two.run(step))
    assert len({tuple(row) for row in (*first, *second)}) == 4
    assert two.trace_count == 1


def test_a_seed_starts_the_stream_of_programs_anew(two):
    def step():
        return tf.random.uniform([3]), tf.random.uniform([3])

    tf.random.set_seed(5)
    first = two.run(step)
    assert drawn(first[0]) != drawn(first[1])
    tf.random.set_seed(5)
    assert drawn(two.run(step)[1]) == drawn(first[1])
    tf.random.set_seed(6)
    assert drawn(two.run(step)[1]) != drawn(first[1])


def test_a_compiled_function_draws_anew_in_every_call():
    draw = tf.function(lambda: tf.random.normal([2]))
    assert draw().tolist() != draw().tolist()


def test_a_branch_may_draw(two):
    def step(x):
        return tf.cond(x > 0, lambda: tf.random.normal([1]), lambda: tf.zeros([1]))

    one, another = (drawn(two.run(step, args=(tf.constant(1.0),))) for _ in range(2))
    assert one != another
    assert one[0] != one[1]
    assert drawn(two.run(step, args=(tf.constant(-1.0),))) == [[0.0], [0.0]]


def test_an_operations_seed_sets_it_apart():
    tf.random.set_seed(1)
    plain = tf.random.normal([2]).tolist()
    tf.random.set_seed(1)
    assert tf.random.normal([2], seed=3).tolist() != plain


@pytest.mark.parametrize(
    ("sample", "mean", "deviation"),
    [
        (lambda n: tf.random.normal([n], 3.0, 2.0), 3.0, 2.0),
        (lambda n: tf.random.uniform([n], 2.0, 6.0), 4.0, 4 / 12**0.5),
        (lambda n: tf.random.truncated_normal([n], 1.0, 1.0), 1.0, 0.88),
        (lambda n: tf.random.gamma([n], 4.0, 2.0), 2.0, 1.0),
        (lambda n: tf.random.poisson([n], 9.0), 9.0, 3.0),
        (lambda n: tf.cast(tf.random.uniform([n], 0, 4, tf.int64), tf.float32), 1.5, 1.118),
        (lambda n: tf.cast(tf.random.categorical([[0.0, 0.0]], n), tf.float32), 0.5, 0.5),
        (
            lambda n: tf.cast(tf.random.stateless_binomial([n], [1, 2], 10.0, 0.5), tf.float32),
            5,
            1.58,
        ),
    ],
)
def test_distributions_have_their_moments(sample, mean, deviation):
    tf.random.set_seed(0)
    numbers = np.asarray(sample(20_000))
    assert numbers.mean() == pytest.approx(mean, abs=0.05)
    assert numbers.std() == pytest.approx(deviation, abs=0.05)


def test_truncated_numbers_stay_within_two_deviations():
    assert np.abs(np.asarray(tf.random.truncated_normal([10_000]))).max() <= 2.0


def test_stateless_draws_are_determined_by_their_seed():
    assert (
        tf.random.stateless_normal([2], [1, 2]).tolist()
        == tf.random.stateless_normal([2], tf.constant([1, 2])).tolist()
    )
    assert (
        tf.random.stateless_normal([2], [1, 2]).tolist()
        != tf.random.stateless_normal([2], [2, 1]).tolist()
    )


def test_seeds_are_split_and_folded():
    seeds = tf.random.split([1, 2], 3)
    assert seeds.shape == (3, 2)
    assert len({tuple(seed) for seed in seeds.tolist()}) == 3
    assert tf.random.fold_in([1, 2], 5).tolist() != tf.random.fold_in([1, 2], 6).tolist()


def test_a_generator_is_a_stream_of_its_own():
    one, same = tf.random.Generator.from_seed(7), tf.random.Generator.from_seed(7)
    first = one.normal([2]).tolist()
    assert first == same.normal([2]).tolist() != one.normal([2]).tolist()
    one.reset_from_seed(7)
    assert one.normal([2]).tolist() == first
    copy = tf.random.Generator(copy_from=one)
    assert copy.normal([2]).tolist() == one.normal([2]).tolist()


def test_generators_are_split():
    children = tf.random.Generator.from_seed(1).split(2)
    assert children[0].uniform([3]).tolist() != children[1].uniform([3]).tolist()


def test_a_generator_gives_every_replica_its_own_numbers(two):
    with two.scope():
        generator = tf.random.Generator.from_seed(3)

    def step():
        return generator.normal([2])

    first, second = drawn(two.run(step)), drawn(two.run(step))
    assert len({tuple(row) for row in (*first, *second)}) == 4


def test_generator_from_outside_of_scopes_goes_on_in_replicas_and_back(two):
    generator = tf.random.Generator.from_seed(3)
    compiled = tf.function(lambda: generator.uniform([]))

    def in_replicas():
        return drawn(two.run(lambda: generator.uniform([])))

    numbers = [float(compiled()), float(generator.uniform([]))]
    numbers += [*in_replicas(), *in_replicas()]
    numbers += [float(compiled()), float(generator.uniform([])), *in_replicas()]
    assert len(set(map(float, numbers))) == 10
    assert generator.state.tolist() == [3, 7]  # a draw of all replicas is one


def test_the_global_generator_can_be_set():
    mine = tf.random.Generator.from_seed(1)
    tf.random.set_global_generator(mine)
    assert tf.random.get_global_generator() is mine


def test_a_generator_needs_a_beginning():
    with pytest.raises(ValueError, match="from_seed"):
        tf.random.Generator()


def test_dropout_keeps_the_mean(two):
    tf.random.set_seed(0)
    dropped = two.run(lambda: tf.nn.dropout(tf.ones([10_000]), 0.4)).values
    assert [float(tf.reduce_mean(part)) for part in dropped] == pytest.approx([1.0, 1.0], abs=0.05)
    assert dropped[0].tolist() != dropped[1].tolist()
    assert set(np.unique(np.asarray(dropped[0]))) == {0.0, np.float32(1 / 0.6)}


def test_without_a_seed_the_stream_is_that_of_a_program_that_sets_none():
    tf.random.set_seed(0)
    expected = tf.random.normal((3,))
    tf.random.set_seed(None)
    assert (tf.random.normal((3,)) == expected).all()
