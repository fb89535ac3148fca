"""`tf.RaggedTensor`, `tf.ragged`, operations on ragged tensors, and datasets of them."""

from __future__ import annotations

import numpy as np

from parity.facts import attempt, fact, raises


def rows(tf):
    return tf.ragged.constant([[1, 2], [], [3]])


def numbers(tf):
    return tf.ragged.constant([[1.5, 2.0], [], [-3.0, 4.0, 0.5]])


def nested(tf):
    return tf.ragged.constant([[[1], [2, 3]], [], [[4, 5, 6], []]])


def with_inner(tf):
    """Rows of pairs."""
    return tf.ragged.constant([[[1, 2], [3, 4]], [], [[5, 6]]], ragged_rank=1)


def words(tf):
    return tf.ragged.constant([["a", "Bc"], [], ["d e"]])


def shown(value):
    """A tensor, or a ragged one as plain data."""
    if isinstance(value, tuple):
        return tuple(map(shown, value))
    if isinstance(value, list):
        return list(map(shown, value))
    if isinstance(value, dict):
        return {key: shown(item) for key, item in value.items()}
    if not hasattr(value, "to_list"):
        return value
    splits = [splits.numpy().tolist() for splits in value.nested_row_splits]
    return {
        "rows": value.to_list(),
        "dtype": value.dtype.name,
        "shape": list(value.shape),
        "splits": splits,
    }


# -- making them ---------------------------------------------------------------------------


@fact
def constants_of_nested_lists(tf):
    lists = [
        [[1, 2], []],
        [[1.5], [2.5, 3.5]],
        [["a"], ["b", "c"]],
        [[[1], []], []],
        [[], []],
        [[[]]],
        [1, 2],
        7,
    ]
    return [shown(tf.ragged.constant(value)) for value in lists]


@fact
def constants_with_inner_axes(tf):
    return [
        shown(tf.ragged.constant([[[1, 2]], []], ragged_rank=1)),
        shown(tf.ragged.constant([[[1, 2]], []], inner_shape=(2,))),
        shown(tf.ragged.constant([[1, 2], [3]], dtype=tf.float32, row_splits_dtype=tf.int32)),
    ]


@fact
def lists_that_are_no_ragged_constants(tf):
    return [
        attempt(lambda: tf.ragged.constant([[1], [[2]]])),
        attempt(lambda: tf.ragged.constant([[1, "a"]])),
        attempt(lambda: tf.ragged.constant([[1]], ragged_rank=-1)),
        attempt(lambda: tf.ragged.constant([[1]], ragged_rank=3)),
        attempt(lambda: tf.ragged.constant([[[1, 2]], [[3]]], ragged_rank=1)),
        attempt(lambda: tf.ragged.constant(5, ragged_rank=1)),
    ]


@fact
def rows_by_their_splits_lengths_starts_limits_and_ids(tf):
    make = tf.RaggedTensor
    values = [3, 1, 4, 1, 5, 9]
    return [
        shown(make.from_row_splits(values, [0, 4, 4, 6])),
        shown(make.from_row_lengths(values, [4, 0, 2])),
        shown(make.from_row_starts(values, [0, 4, 4])),
        shown(make.from_row_limits(values, [4, 4, 6])),
        shown(make.from_value_rowids(values, [0, 0, 0, 0, 2, 2])),
        shown(make.from_value_rowids(values, [0, 0, 0, 0, 2, 2], nrows=5)),
        shown(make.from_uniform_row_length(values, 2)),
        shown(make.from_uniform_row_length([], 0, nrows=3)),
    ]


@fact
def rows_that_are_nested(tf):
    make = tf.RaggedTensor
    values = [3, 1, 4, 1, 5]
    return [
        shown(make.from_nested_row_splits(values, [[0, 2, 3], [0, 1, 4, 5]])),
        shown(make.from_nested_row_lengths(values, [[2, 1], [1, 3, 1]])),
        shown(make.from_nested_value_rowids(values, [[0, 0, 1], [0, 1, 1, 1, 2]])),
    ]


@fact
def rows_that_are_not_valid(tf):
    make = tf.RaggedTensor
    return [
        attempt(lambda: make.from_row_splits([1, 2], [0, 3])),
        attempt(lambda: make.from_row_splits([1, 2], [1, 2])),
        attempt(lambda: make.from_row_splits([1, 2], [0, 2, 1, 2])),
        attempt(lambda: make.from_row_splits([1, 2], [])),
        attempt(lambda: make.from_row_lengths([1, 2], [1])),
        attempt(lambda: make.from_row_lengths([1, 2], [3, -1])),
        attempt(lambda: make.from_value_rowids([1, 2], [0, 3], nrows=2)),
        attempt(lambda: make.from_value_rowids([1, 2], [1, 0])),
        attempt(lambda: make.from_uniform_row_length([1, 2, 3], 2)),
        attempt(lambda: make.from_row_splits(5, [0])),
        attempt(lambda: make(1, 2)),
    ]


@fact
def rows_of_tensors(tf):
    make = tf.RaggedTensor.from_tensor
    matrix = [[5, 7, 0], [0, 3, 0], [0, 0, 0]]
    deep = [[[5, 0], [7, 0]], [[0, 0], [3, 1]]]
    return [
        shown(make(matrix)),
        shown(make(matrix, lengths=[1, 0, 3])),
        shown(make(matrix, lengths=[9, -1, 2])),
        shown(make(matrix, padding=0)),
        shown(make(deep, padding=[0, 0])),
        shown(make(deep, ragged_rank=2)),
        shown(make(deep, lengths=([2, 1], [1, 2, 0]))),
        attempt(lambda: make([1, 2])),
        attempt(lambda: make(matrix, lengths=[1, 1, 1], padding=0)),
    ]


@fact
def ranges_and_stacks(tf):
    return [
        shown(tf.ragged.range([3, 0, 2])),
        shown(tf.ragged.range([0, 5], [3, 8], 2)),
        shown(tf.ragged.range([1.0], [2.0], 0.5)),
        shown(tf.ragged.stack([[1, 2], [3]])),
        shown(tf.ragged.stack([rows(tf), rows(tf)])),
        shown(tf.ragged.stack([rows(tf), rows(tf)], axis=1)),
        shown(tf.ragged.stack_dynamic_partitions([5, 6, 7], [1, 0, 1], 3)),
        shown(
            tf.ragged.cross(
                [tf.ragged.constant([["a"], ["b", "c"]]), tf.ragged.constant([[1, 2], [3]])]
            )
        ),
    ]


@fact
def segment_ids_and_splits(tf):
    return [
        tf.ragged.row_splits_to_segment_ids([0, 2, 2, 3]),
        tf.ragged.segment_ids_to_row_splits([0, 0, 2]),
        tf.ragged.segment_ids_to_row_splits([0, 0, 2], 5),
    ]


# -- their parts ---------------------------------------------------------------------------


@fact
def parts_of_rows(tf):
    ragged = rows(tf)
    return [
        ragged.values,
        ragged.flat_values,
        ragged.row_splits,
        ragged.row_lengths(),
        ragged.row_starts(),
        ragged.row_limits(),
        ragged.value_rowids(),
        ragged.nrows(),
        ragged.ragged_rank,
        ragged.shape,
        ragged.bounding_shape(),
        ragged.bounding_shape(axis=1),
        ragged.uniform_row_length,
    ]


@fact
def parts_of_nested_rows(tf):
    ragged = nested(tf)
    return [
        shown(ragged.values),
        ragged.flat_values,
        list(ragged.nested_row_splits),
        list(ragged.nested_row_lengths()),
        list(ragged.nested_value_rowids()),
        shown(ragged.row_lengths(axis=2)),
        ragged.bounding_shape(),
        with_inner(tf).shape,
        with_inner(tf).bounding_shape(),
        shown(with_inner(tf).row_lengths(axis=2)),
    ]


@fact
def the_same_rows_of_other_values(tf):
    return [
        shown(rows(tf).with_values([0.5, 1.5, 2.5])),
        shown(rows(tf).with_values([[1, 2], [3, 4], [5, 6]])),
        shown(nested(tf).with_flat_values(list("abcdef"))),
        attempt(lambda: rows(tf).with_values([1])),
        rows(tf).with_row_splits_dtype(tf.int32).row_splits,
    ]


@fact
def how_they_are_printed(tf):
    values = [rows(tf), numbers(tf), nested(tf), with_inner(tf), words(tf)]
    return [text(value) for value in values for text in (str, repr)]


@fact
def as_lists_and_arrays(tf):
    same = tf.ragged.constant([[1, 2], [3, 4]])
    return [
        [value.to_list() for value in (rows(tf), nested(tf), with_inner(tf), words(tf))],
        [row.tolist() for row in rows(tf).numpy()],
        same.numpy(),
        with_inner(tf)[:0].numpy().shape,
    ]


@fact
def what_they_are_not(tf):
    return [
        attempt(lambda: len(rows(tf))),
        attempt(lambda: bool(rows(tf))),
        attempt(lambda: hash(rows(tf))),
        attempt(lambda: tf.convert_to_tensor(rows(tf))),
        tf.is_tensor(rows(tf)),
        isinstance(rows(tf), tf.Tensor),
    ]


@fact
def padded_tensors(tf):
    return [
        rows(tf).to_tensor(),
        rows(tf).to_tensor(-1),
        rows(tf).to_tensor(-1, shape=[None, 3]),
        rows(tf).to_tensor(shape=[2, 1]),
        rows(tf).to_tensor(shape=[4, None]),
        nested(tf).to_tensor(),
        nested(tf).to_tensor(9, shape=[None, 1, 4]),
        with_inner(tf).to_tensor(),
        with_inner(tf).to_tensor([7, 8]),
        words(tf).to_tensor("-"),
        words(tf).to_tensor(),
        attempt(lambda: rows(tf).to_tensor(shape=[None])),
        attempt(lambda: rows(tf).to_tensor(1.5)),
    ]


@fact
def axes_that_are_merged(tf):
    return [
        shown(nested(tf).merge_dims(0, 1)),
        shown(nested(tf).merge_dims(1, 2)),
        shown(nested(tf).merge_dims(0, 2)),
        shown(with_inner(tf).merge_dims(1, 2)),
        shown(with_inner(tf).merge_dims(-2, -1)),
    ]


@fact
def sparse_tensors(tf):
    sparse = rows(tf).to_sparse()
    return [
        sparse.indices,
        sparse.values,
        sparse.dense_shape,
        shown(tf.RaggedTensor.from_sparse(sparse)),
        nested(tf).to_sparse().indices,
        attempt(lambda: tf.RaggedTensor.from_sparse(tf.sparse.from_dense([[0, 1]]))),
    ]


# -- indices -------------------------------------------------------------------------------


@fact
def rows_by_their_index(tf):
    ragged, deep = rows(tf), nested(tf)
    return [
        ragged[0],
        ragged[-1],
        shown(deep[0]),
        deep[0, 1],
        deep[2][0],
        deep[2, 0, 1],
        with_inner(tf)[0],
        with_inner(tf)[0, 1],
        words(tf)[0],
        attempt(lambda: ragged[5]),
        attempt(lambda: ragged[:, 0]),
        attempt(lambda: ragged["a"]),
    ]


@fact
def slices_of_rows(tf):
    ragged, deep = rows(tf), nested(tf)
    keys = np.s_[:2, 1:, -2:, ::2, ::-1, 5:, 1:1]
    return [shown(ragged[key]) for key in keys] + [shown(deep[key]) for key in keys]


@fact
def slices_inside_of_rows(tf):
    ragged, deep = numbers(tf), nested(tf)
    keys = np.s_[:1, 1:, -1:, :-1, ::2, ::-1, 2:0:-1, 5:]
    return [
        [shown(ragged[:, key]) for key in keys],
        [shown(deep[:, key]) for key in keys],
        [shown(deep[:, :, key]) for key in keys],
        [shown(ragged[..., :1]), shown(deep[..., :1]), shown(deep[1:, ..., :1])],
        [shown(with_inner(tf)[:, :, 0]), shown(with_inner(tf)[:, 1:, :1])],
    ]


@fact
def new_axes(tf):
    return [
        shown(rows(tf)[tf.newaxis]),
        shown(rows(tf)[:, tf.newaxis]),
        [shown(tf.expand_dims(rows(tf), axis)) for axis in (0, 1, 2, -1)],
        [shown(tf.expand_dims(nested(tf), axis)) for axis in (0, 1, 2, 3)],
        shown(tf.squeeze(tf.expand_dims(rows(tf), 0), 0)),
        shown(tf.squeeze(tf.expand_dims(rows(tf), 2), 2)),
        shown(tf.squeeze(tf.expand_dims(nested(tf), 1), 1)),
        attempt(lambda: tf.squeeze(rows(tf))),
        attempt(lambda: tf.squeeze(rows(tf), 0)),
    ]


@fact
def iteration_over_rows(tf):
    return [list(rows(tf)), [shown(row) for row in nested(tf)]]


# -- operations on values ------------------------------------------------------------------


@fact
def python_operators(tf):
    x, y = numbers(tf), tf.ragged.constant([[2.0, 4.0], [], [1.0, -1.0, 3.0]])
    truth = x > 1
    return [
        shown(value)
        for value in (
            x + y,
            x - 1,
            2 - x,
            x * y,
            x / 2,
            x // 2,
            x % 2,
            y**2,
            2.0**x,
            -x,
            abs(x),
            x < y,
            x <= 2,
            x > y,
            x >= 2,
            x == y,
            x != 2,
            truth & (x < 3),
            truth | (x < 0),
            ~truth,
            rows(tf) / 2,
            rows(tf) // 2,
        )
    ]


@fact
def dense_operands_are_broadcast(tf):
    return [
        shown(rows(tf) + tf.constant([[10], [20], [30]])),
        shown(tf.constant([[10], [20], [30]]) - rows(tf)),
        shown(rows(tf) * tf.constant(3)),
        shown(rows(tf) * [[7]]),
        shown(with_inner(tf) + tf.constant([10, 20])),
        shown(with_inner(tf) + tf.constant([[[1]], [[2]], [[3]]])),
        shown(nested(tf) + tf.constant([[[100]], [[200]], [[300]]])),
        attempt(lambda: rows(tf) + tf.constant([10, 20])),
        attempt(lambda: rows(tf) + tf.constant([[1], [2]])),
    ]


@fact
def rows_that_differ_are_not_combined(tf):
    return [
        attempt(lambda: rows(tf) + tf.ragged.constant([[1], [], [3, 4]])),
        attempt(lambda: rows(tf) + tf.ragged.constant([[1, 2], []])),
        attempt(lambda: rows(tf) + rows(tf).with_row_splits_dtype(tf.int32)),
        attempt(
            lambda: tf.ragged.map_flat_values(
                tf.add, rows(tf), tf.ragged.constant([[1], [], [2, 3]])
            )
        ),
        attempt(lambda: tf.ragged.map_flat_values(tf.reduce_sum, rows(tf))),
    ]


@fact
def elementwise_functions(tf):
    x = numbers(tf)
    functions = [tf.abs, tf.square, tf.exp, tf.sign, tf.floor, tf.sigmoid, tf.tanh, tf.nn.relu]
    results = [function(x) for function in functions]
    results += [
        tf.cast(x, tf.int32),
        tf.zeros_like(x),
        tf.ones_like(x),
        tf.identity(x),
        tf.stop_gradient(x),
        tf.maximum(x, 1.0),
        tf.minimum(x, -x),
        tf.pow(tf.abs(x), 2.0),
        tf.equal(x, x),
        tf.logical_not(x > 1),
        tf.clip_by_value(x, -1.0, 1.0),
        tf.add_n([x, x, x]),
        tf.where(x > 1, x, -x),
        tf.where(x > 1, x, 0.0),
        tf.one_hot(rows(tf), 4),
        tf.math.squared_difference(x, 1.0),
        tf.math.is_nan(x),
        tf.round(x),
    ]
    return [shown(result) for result in results]


@fact
def functions_of_the_flat_values(tf):
    return [
        shown(tf.ragged.map_flat_values(lambda x: 2 * x, nested(tf))),
        shown(tf.ragged.map_flat_values(tf.add, rows(tf), 1)),
        shown(tf.ragged.map_flat_values(lambda x, y: x + y, x=rows(tf), y=rows(tf))),
        shown(tf.ragged.map_flat_values(lambda x: tf.stack([x, -x], 1), rows(tf))),
        tf.ragged.map_flat_values(tf.add, 1, 2),
    ]


@fact
def embeddings_of_ids(tf):
    table = np.arange(14.0, dtype=np.float32).reshape(7, 2)
    return [
        shown(tf.nn.embedding_lookup(table, rows(tf))),
        shown(tf.nn.embedding_lookup(table, nested(tf))),
        shown(tf.gather(table, rows(tf))),
    ]


# -- reductions ----------------------------------------------------------------------------


@fact
def sums(tf):
    return [
        [tf.reduce_sum(rows(tf)), tf.reduce_sum(rows(tf), 0), tf.reduce_sum(rows(tf), 1)],
        [shown(tf.reduce_sum(nested(tf), axis)) for axis in (0, 1, 2, -1, [0, 1], [1, 2], None)],
        [shown(tf.reduce_sum(with_inner(tf), axis)) for axis in (0, 1, 2, [1, 2], None)],
        tf.reduce_sum(rows(tf), 1, keepdims=True),
        tf.reduce_sum(rows(tf), keepdims=True),
        shown(tf.reduce_sum(nested(tf), 1, keepdims=True)),
        attempt(lambda: tf.reduce_sum(rows(tf), 2)),
    ]


@fact
def means(tf):
    x = numbers(tf)
    return [
        [tf.reduce_mean(x), tf.reduce_mean(x, 0), tf.reduce_mean(x, 1)],
        [tf.reduce_mean(rows(tf)), tf.reduce_mean(rows(tf), 1)],
        [shown(tf.reduce_mean(tf.cast(nested(tf), tf.float32), axis)) for axis in (1, 2, [1, 2])],
    ]


@fact
def other_reductions(tf):
    x, truth = numbers(tf), numbers(tf) > 1
    return [
        [function(x, axis) for function in (tf.reduce_max, tf.reduce_min, tf.reduce_prod)]
        + [function(truth, axis) for function in (tf.reduce_any, tf.reduce_all)]
        + [tf.math.reduce_variance(x, axis), tf.math.reduce_std(x, axis)]
        for axis in (None, 0, 1)
    ] + [tf.reduce_max(rows(tf), 1), tf.reduce_min(rows(tf), 1)]


@fact
def running_sums_and_softmax_of_rows(tf):
    x = numbers(tf)
    return [
        shown(tf.cumsum(x, axis=1)),
        shown(tf.cumsum(x, axis=1, exclusive=True)),
        shown(tf.cumsum(x, axis=1, reverse=True)),
        shown(tf.cumsum(x, axis=1, exclusive=True, reverse=True)),
        shown(tf.nn.softmax(x)),
        shown(tf.nn.softmax(x, axis=1)),
    ]


@fact
def running_sums_over_rows(tf):
    return [
        shown(tf.cumsum(x(tf), axis, exclusive, reverse))
        for x, axes in ((numbers, [0]), (nested, [0, 1]), (with_inner, [0]))
        for axis in axes
        for exclusive in (False, True)
        for reverse in (False, True)
    ]


@fact
def assertions_about_two_tensors(tf):
    x = rows(tf)
    check = tf.debugging
    return [
        attempt(assertion)
        for assertion in (
            lambda: check.assert_equal(x, x),
            lambda: check.assert_equal(x, x + 1),
            lambda: check.assert_equal(x, x[:-1]),
            lambda: check.assert_none_equal(x, x + 1),
            lambda: check.assert_none_equal(x, x),
            lambda: check.assert_less(x, x + 1),
            lambda: check.assert_less(x, x),
            lambda: check.assert_less_equal(x, 100),
            lambda: check.assert_greater(x, -100),
            lambda: check.assert_greater(x + 1, y=x),
            lambda: check.assert_greater_equal(x, 100),
        )
    ]


# -- joining and selecting -----------------------------------------------------------------


@fact
def concatenations(tf):
    ragged, deep = rows(tf), nested(tf)
    return [
        [shown(tf.concat([ragged, ragged[1:]], 0)), shown(tf.concat([ragged, ragged], 1))],
        [shown(tf.concat([deep, deep], axis)) for axis in (0, 1, 2)],
        [shown(tf.concat([with_inner(tf)] * 2, axis)) for axis in (0, 1, 2)],
        shown(tf.concat([ragged, [[9], [8], [7]]], 1)),
        shown(tf.concat([[[9, 8]], ragged], 0)),
        shown(tf.concat([words(tf), words(tf)], 1)),
        shown(tf.concat([ragged], -1)),
        attempt(lambda: tf.concat([ragged, ragged[1:]], 1)),
        attempt(lambda: tf.concat([ragged, deep], 0)),
    ]


@fact
def stacks(tf):
    ragged = rows(tf)
    return [
        [shown(tf.stack([ragged, ragged], axis)) for axis in (0, 1, 2)],
        [shown(tf.stack([nested(tf), nested(tf)], axis)) for axis in (0, 1)],
    ]


@fact
def gathered_rows(tf):
    return [
        shown(tf.gather(rows(tf), [2, 0, 2])),
        shown(tf.gather(rows(tf), [[2], [0]])),
        shown(tf.gather(rows(tf), tf.ragged.constant([[0], [], [2, 0]]))),
        shown(tf.gather(nested(tf), [2, 2])),
        tf.gather(rows(tf), 0),
        shown(tf.gather([10, 20, 30, 40], rows(tf))),
        shown(tf.gather(["a", "b", "c", "d"], rows(tf))),
        shown(tf.gather(numbers(tf), tf.ragged.constant([[1], [], [0, 2]]), batch_dims=1)),
        tf.gather(numbers(tf)[::2], [[0, 1], [2, 0]], batch_dims=1),
        tf.gather(numbers(tf)[::2], [1, 0], axis=1),
        tf.gather_nd(rows(tf), [[0, 1], [2, 0]]),
        shown(tf.gather_nd(nested(tf), [[0], [2]])),
        attempt(lambda: tf.gather(rows(tf), [3])),
    ]


@fact(
    ours=raises("ValueError"),
    because="an index beyond the end of its row is refused; TensorFlow takes the next row's value",
)
def an_index_beyond_its_row(tf):
    return attempt(lambda: tf.gather(rows(tf)[:1], [[3]], batch_dims=1)) and attempt(
        lambda: tf.gather(rows(tf), [[0], [0], [0]], batch_dims=1)
    )


@fact
def masked_elements(tf):
    mask = tf.ragged.boolean_mask
    return [
        shown(mask(rows(tf), rows(tf) > 1)),
        shown(mask([[1, 2], [3, 4]], [[True, False], [True, True]])),
        shown(mask([1, 2, 3], [True, False, True])),
        shown(mask(rows(tf), [True, False, True])),
        shown(mask(nested(tf), nested(tf) > 2)),
        shown(mask(nested(tf), tf.ragged.constant([[True, False], [], [False, True]]))),
        shown(mask(words(tf), tf.ragged.constant([[True, False], [], [True]]))),
        tf.where(rows(tf) > 1),
        attempt(lambda: mask(rows(tf), rows(tf))),
        attempt(lambda: tf.boolean_mask(rows(tf), [True, False, True])),
    ]


@fact
def tiled_reversed_and_split(tf):
    return [
        [shown(tf.tile(rows(tf), multiples)) for multiples in ([2, 1], [1, 2], [1, 0], [0, 1])],
        [shown(tf.reverse(rows(tf), [axis])) for axis in (0, 1)],
        shown(tf.reverse(nested(tf), [0, 2])),
        [shown(part) for part in tf.split(rows(tf), 3)],
        [shown(part) for part in tf.split(rows(tf), [1, 2])],
        tf.reshape(nested(tf), [-1]),
    ]


@fact
def sizes(tf):
    shape = tf.shape(rows(tf))
    return [
        tf.size(nested(tf)),
        tf.rank(nested(tf)),
        shape[0],
        repr(shape),
        shape.rank,
        attempt(lambda: shape[1]),
        [list(value.shape) for value in (rows(tf), nested(tf), with_inner(tf))],
    ]


@fact
def a_function_of_every_row(tf):
    ragged_rows = tf.RaggedTensorSpec([None], tf.int32)
    return [
        tf.map_fn(tf.reduce_sum, rows(tf), fn_output_signature=tf.int32),
        shown(tf.map_fn(lambda row: 2 * row, rows(tf), fn_output_signature=ragged_rows)),
        shown(tf.map_fn(tf.range, tf.constant([2, 0, 1]), fn_output_signature=ragged_rows)),
    ]


@fact
def operations_that_take_none(tf):
    return [
        attempt(lambda: tf.transpose(rows(tf))),
        attempt(lambda: tf.sort(rows(tf))),
        attempt(lambda: tf.argmax(numbers(tf), 1)),
        attempt(lambda: tf.unstack(rows(tf))),
    ]


# -- text ----------------------------------------------------------------------------------


@fact
def strings_that_are_cut(tf):
    return [
        tf.strings.split("a b"),
        shown(tf.strings.split(["a b", "", "c"])),
        shown(tf.strings.split([["a b"], ["c d e"]])),
        shown(tf.strings.split(["a,b", "c"], sep=",")),
        shown(tf.strings.split(words(tf))),
        shown(tf.strings.bytes_split(["ab", "c"])),
        shown(tf.strings.unicode_split(["ab", "é"], "UTF-8")),
        shown(tf.strings.unicode_decode(["ab", "é"], "UTF-8")),
    ]


@fact
def operations_on_ragged_strings(tf):
    return [
        shown(tf.strings.lower(words(tf))),
        shown(tf.strings.length(words(tf))),
        shown(tf.strings.join([words(tf), "!"])),
        shown(tf.strings.join([words(tf), words(tf)], separator="-")),
        tf.strings.reduce_join(words(tf), axis=-1, separator=" "),
        shown(tf.strings.ngrams(tf.ragged.constant([["a", "b", "c"], ["d"]]), 2)),
        shown(tf.strings.regex_replace(words(tf), "[a-z]", "x")),
        shown(tf.strings.to_number(tf.ragged.constant([["1"], ["2", "3.5"]]))),
        shown(tf.strings.to_hash_bucket_fast(words(tf), 10)),
        shown(tf.strings.as_string(rows(tf))),
        tf.strings.unicode_encode(tf.ragged.constant([[97, 98], [99]]), "UTF-8"),
        shown(words(tf) == "a"),
        shown(words(tf) + "x"),
    ]


# -- specs, nests, gradients ---------------------------------------------------------------


@fact
def specs(tf):
    spec = tf.RaggedTensorSpec
    return [
        repr(spec([None, None], tf.int32)),
        repr(spec([None, None, 2], tf.float32, ragged_rank=1, row_splits_dtype=tf.int32)),
        repr(tf.type_spec_from_value(nested(tf))),
        repr(spec.from_value(rows(tf))),
        spec([None, None], tf.int32).is_compatible_with(rows(tf)),
        spec([3, None], tf.int32).is_compatible_with(rows(tf)),
        spec([2, None], tf.int32).is_compatible_with(rows(tf)),
        spec([None, None], tf.float32).is_compatible_with(rows(tf)),
        spec([None], tf.int32, ragged_rank=0).is_compatible_with(tf.constant([1])),
        spec([None, None], tf.int32) == spec([None, None], tf.int32, 1),
        attempt(lambda: spec(None, tf.int32)),
        attempt(lambda: spec([None], tf.int32, ragged_rank=1)),
    ]


@fact
def nests(tf):
    return [
        len(tf.nest.flatten({"a": rows(tf), "b": 1})),
        tf.nest.flatten(nested(tf), expand_composites=True),
        shown(tf.nest.map_structure(lambda x: x + 1, {"a": rows(tf)})["a"]),
        shown(
            tf.nest.pack_sequence_as(
                rows(tf),
                [tf.constant([7, 8]), tf.constant([0, 2, 2, 2], tf.int64)],
                expand_composites=True,
            )
        ),
    ]


@fact
def gradients_through_values(tf):
    table = tf.Variable(np.arange(8.0, dtype=np.float32).reshape(4, 2))
    x = numbers(tf)
    with tf.GradientTape() as tape:
        tape.watch(x.flat_values)
        looked_up = tf.nn.embedding_lookup(table, rows(tf))
        total = tf.reduce_sum(tf.reduce_mean(tf.square(x)[::2], axis=1))
        total += tf.reduce_sum(tf.square(looked_up.to_tensor())) + tf.reduce_sum(
            tf.reduce_max(looked_up[::2], axis=1)
        )
    by_values, by_table = tape.gradient(total, [x.flat_values, table])
    return [total, by_values, tf.convert_to_tensor(by_table)]


@fact
def a_ragged_tensor_as_the_source_of_gradients(tf):
    x = numbers(tf)
    with tf.GradientTape() as tape:
        tape.watch(x)
        total = tf.reduce_sum(x * x)
    return shown(tape.gradient(total, x))


@fact
def functions_take_and_return_them(tf):
    @tf.function
    def doubled(x):
        return 2 * x, tf.reduce_sum(x, axis=1), x.row_lengths()

    return [shown(doubled(rows(tf))), shown(doubled(nested(tf)))]


@fact
def padding_in_a_function(tf):
    @tf.function
    def padded(x):
        return x.to_tensor(), x.to_tensor(-1, shape=[None, 4]), x[:, :1].to_tensor(shape=[None, 1])

    return list(padded(rows(tf)))


# -- datasets ------------------------------------------------------------------------------


def elements(dataset):
    return [shown(element) for element in dataset]


@fact
def datasets_of_rows(tf):
    return [
        elements(tf.data.Dataset.from_tensor_slices(rows(tf))),
        elements(tf.data.Dataset.from_tensor_slices(nested(tf))),
        elements(tf.data.Dataset.from_tensor_slices({"x": rows(tf), "y": [1, 2, 3]})),
        elements(tf.data.Dataset.from_tensors(rows(tf))),
        elements(tf.data.Dataset.from_tensor_slices(words(tf))),
        attempt(lambda: tf.data.Dataset.from_tensor_slices((rows(tf), [1, 2]))),
    ]


@fact
def specs_of_datasets(tf):
    made = tf.data.Dataset.from_tensor_slices
    return [
        repr(made(rows(tf)).element_spec),
        repr(made(nested(tf)).element_spec),
        repr(made(rows(tf)).batch(2).element_spec),
        repr(made(nested(tf)).batch(2, drop_remainder=True).element_spec),
        repr(tf.data.Dataset.from_tensors(rows(tf)).element_spec),
        repr(tf.data.Dataset.from_tensors(rows(tf)).unbatch().element_spec),
        repr(made([1, 2]).map(tf.range).ragged_batch(2).element_spec),
    ]


@fact
def batches_of_rows(tf):
    made = tf.data.Dataset.from_tensor_slices
    return [
        elements(made(rows(tf)).batch(2)),
        elements(made(rows(tf)).batch(2, drop_remainder=True)),
        elements(made(nested(tf)).batch(2)),
        elements(made(with_inner(tf)).batch(3)),
        elements(made(words(tf)).batch(2)),
        elements(made(rows(tf)).batch(2).unbatch().batch(3)),
        elements(made((rows(tf), [1, 2, 3])).repeat(2).skip(1).batch(4)),
        elements(tf.data.Dataset.from_tensors(rows(tf)).unbatch()),
        attempt(lambda: elements(made(rows(tf)).padded_batch(2))),
    ]


@fact
def ragged_batches_of_tensors(tf):
    ranges = tf.data.Dataset.range(4).map(tf.range)
    named = tf.data.Dataset.range(3).map(lambda n: {"a": tf.fill([n], n), "b": n})
    older = tf.data.experimental.dense_to_ragged_batch
    return [
        elements(ranges.ragged_batch(3)),
        elements(ranges.ragged_batch(3, drop_remainder=True)),
        elements(ranges.ragged_batch(3, row_splits_dtype=tf.int32)),
        elements(named.ragged_batch(2)),
        elements(ranges.apply(older(2))),
        elements(tf.data.Dataset.range(3).ragged_batch(2)),
    ]


@fact(
    ours=[{"splits": [[0, 0, 1], [0, 2]], "rows": [[], [[1, 1]]], "shape": [2, None, None]}],
    because="a function whose result's size depends on a value is called in Python, and which of "
    "its sizes are the same for all elements is not known: every axis becomes ragged",
)
def ragged_batches_of_matrices(tf):
    matrices = tf.data.Dataset.range(2).map(lambda n: tf.fill([n, 2], n))
    batches = [shown(batch) for batch in matrices.ragged_batch(2)]
    return [{key: batch[key] for key in ("splits", "rows", "shape")} for batch in batches]


@fact
def functions_of_ragged_elements(tf):
    batches = tf.data.Dataset.from_tensor_slices(numbers(tf)).batch(2)
    return [
        elements(batches.map(lambda x: x.to_tensor())),
        elements(batches.map(lambda x: 2 * x)),
        elements(batches.map(lambda x: tf.reduce_sum(x, axis=1))),
        elements(batches.map(lambda x: (x.row_lengths(), x[:, :1]))),
        elements(batches.unbatch().filter(lambda row: tf.size(row) > 0)),
        elements(tf.data.Dataset.from_tensor_slices(["a b", "c"]).batch(2).map(tf.strings.split)),
        attempt(lambda: elements(batches.unbatch().map(lambda row: row + 1).batch(3))),
    ]


@fact
def ragged_elements_of_a_generator(tf):
    spec = tf.RaggedTensorSpec([None, None], tf.int32)
    made = tf.data.Dataset.from_generator
    return [
        elements(made(lambda: iter([rows(tf), rows(tf)[:1]]), output_signature=spec)),
        attempt(
            lambda: elements(
                made(
                    lambda: iter([rows(tf)]),
                    output_signature=tf.RaggedTensorSpec([None, None, None], tf.int32),
                )
            )
        ),
    ]


@fact
def ragged_elements_as_numpy(tf):
    batches = tf.data.Dataset.from_tensor_slices(rows(tf)).batch(3)
    (batch,) = batches.as_numpy_iterator()
    return [[row.tolist() for row in batch], list(batches.unbatch().as_numpy_iterator())]


@fact
def other_transformations_of_ragged_elements(tf):
    ragged = tf.data.Dataset.from_tensor_slices(nested(tf))
    return [
        elements(ragged.cache()),
        elements(ragged.shuffle(1)),
        elements(ragged.prefetch(2)),
        elements(ragged.concatenate(ragged).take(4)),
        elements(tf.data.Dataset.zip((ragged, tf.data.Dataset.range(3)))),
        elements(ragged.enumerate()),
        elements(ragged.window(2).flat_map(lambda window: window.batch(2))),
    ]


def example(tf, **features):
    kinds = tf.train
    return kinds.Example(
        features=kinds.Features(
            feature={
                key: kinds.Feature(int64_list=kinds.Int64List(value=values))
                for key, values in features.items()
            }
        )
    ).SerializeToString()


@fact
def ragged_features_of_examples(tf):
    first = example(tf, v=[3, 1, 4], s=[0, 2, 3], n=[1, 1], i=[0, 0, 1])
    second = example(tf, v=[1, 5], s=[0, 0, 2], n=[0, 2], i=[1, 1])
    feature = tf.io.RaggedFeature
    wanted = {
        "v": feature(tf.int64),
        "splits": feature(tf.int64, "v", [feature.RowSplits("s")]),
        "ids": feature(tf.int64, "v", [feature.ValueRowIds("i")]),
        "missing": feature(tf.float32),
    }
    nested = {
        "two": feature(tf.int64, "v", [feature.RowLengths("n"), feature.RowSplits("s")]),
        "even": feature(tf.int64, "v", [feature.UniformRowLength(1)]),
        "label": tf.io.VarLenFeature(tf.int64),
    }
    batch = tf.io.parse_example([first, second], wanted)
    deep = tf.io.parse_example([first, second], nested)
    one = tf.io.parse_single_example(first, wanted)
    return [
        shown(batch),
        shown({key: deep[key] for key in ("two", "even")}),
        shown(one),
        attempt(
            lambda: tf.io.parse_example(
                [first], {"x": feature(tf.int64, "v", [feature.RowSplits("n")], validate=True)}
            )
        ),
    ]


# -- replicas ------------------------------------------------------------------------------


def batches(strategy, distributed):
    return [shown(strategy.experimental_local_results(batch)) for batch in distributed]


def distributed(tf, strategy, size=2, ragged=rows):
    dataset = tf.data.Dataset.from_tensor_slices(ragged(tf)).batch(size)
    return strategy.experimental_distribute_dataset(dataset)


@fact
def ragged_batches_on_one_replica(tf, one):
    return batches(one, distributed(tf, one))


@fact
def ragged_batches_on_two_replicas(tf, two):
    return [batches(two, distributed(tf, two, size)) for size in (2, 3)]


@fact
def nested_ragged_batches_on_two_replicas(tf, two):
    return batches(two, distributed(tf, two, 3, nested))


@fact
def ragged_text_on_two_replicas(tf, two):
    return batches(two, distributed(tf, two, 3, words))


@fact
def replicas_compute_with_ragged_batches(tf, two):
    def step(x):
        return tf.reduce_sum(x, axis=1), 2 * x, tf.reduce_sum(x), x.row_lengths()

    results = [two.run(step, args=(batch,)) for batch in distributed(tf, two, 3, numbers)]
    totals = [two.reduce("SUM", result[2], axis=None) for result in results]
    return [
        [shown(two.experimental_local_results(part)) for part in result] for result in results
    ] + [totals]
