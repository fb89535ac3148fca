"""Layers that take text: they compute what TensorFlow's do, in pipelines and in front of models."""

import json

import keras
import numpy as np
import pytest

import unison.keras
import unison.tf as tf
from unison.fingerprint import fingerprint64

WORDS = np.array([["a", "b"], ["zz", "a"], ["", "c"]], dtype=object)
VOCABULARY = ["a", "b", "c"]
TEXTS = ["The quick brown, fox!", "jumped over the DOG", "", "ünïcode Über it's"]


def lookup(**arguments):
    return tf.keras.layers.StringLookup(vocabulary=VOCABULARY, **arguments)


# -- StringLookup: expected values are what TensorFlow 2.21 returns -------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, [[1, 2], [0, 1], [0, 3]]),
        ({"mask_token": ""}, [[2, 3], [1, 2], [0, 4]]),
        ({"num_oov_indices": 2}, [[2, 3], [0, 2], [1, 4]]),
        ({"num_oov_indices": 3}, [[3, 4], [1, 3], [2, 5]]),
        ({"num_oov_indices": 3, "mask_token": ""}, [[4, 5], [2, 4], [0, 6]]),
        ({"output_mode": "multi_hot"}, [[0, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 1]]),
        (
            {"output_mode": "count", "mask_token": ""},
            [[0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 1]],
        ),
        (
            {"output_mode": "one_hot", "mask_token": ""},
            [
                [[0, 1, 0, 0], [0, 0, 1, 0]],
                [[1, 0, 0, 0], [0, 1, 0, 0]],
                [[0, 0, 0, 0], [0, 0, 0, 1]],
            ],
        ),
        (
            {"output_mode": "tf_idf", "idf_weights": [0.1, 0.2, 0.3]},
            [[0, 0.1, 0.2, 0], [0.2, 0.1, 0, 0], [0.2, 0, 0, 0.3]],
        ),
    ],
)
def test_strings_become_tensorflows_indices(arguments, expected):
    np.testing.assert_allclose(lookup(**arguments)(WORDS), expected, rtol=1e-6)


def test_indices_are_of_64_bits_as_in_tensorflow():
    assert lookup()(WORDS).dtype == tf.int64


@pytest.mark.parametrize(
    "words",
    [
        ["b", "?"],
        np.array(["b", "?"]),
        np.array([b"b", b"?"]),
        np.array(["b", "?"], dtype=object),
        tf.constant(["b", "?"]),
    ],
    ids=["list", "str array", "bytes array", "object array", "string tensor"],
)
def test_text_comes_in_every_form(words):
    assert lookup()(words).numpy().tolist() == [2, 0]


def test_a_scalar_has_one_index():
    assert int(lookup()(tf.constant("b"))) == 2


def test_the_inverse_returns_a_string_tensor():
    inverse = lookup(invert=True, mask_token="", num_oov_indices=2)
    words = inverse(np.array([0, 1, 3, 5, 9]))
    assert words.dtype == tf.string
    assert words.numpy().tolist() == [b"", b"[UNK]", b"a", b"c", b"[UNK]"]


def test_a_word_out_of_a_closed_vocabulary_is_an_error():
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"must be in the vocabulary.*'zz'"):
        lookup(num_oov_indices=0)(WORDS[1:2])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, ["[UNK]", "a", "b", "c"]),
        ({"mask_token": ""}, ["", "[UNK]", "a", "b", "c"]),
        ({"mask_token": "", "output_mode": "count"}, ["[UNK]", "a", "b", "c"]),
        ({"num_oov_indices": 2}, ["[UNK]", "[UNK]", "a", "b", "c"]),
    ],
)
def test_the_vocabulary_lists_special_tokens_first(arguments, expected):
    layer = lookup(**arguments)
    assert layer.get_vocabulary() == expected
    assert layer.get_vocabulary(include_special_tokens=False) == VOCABULARY
    assert layer.vocabulary_size() == len(expected)


def test_adapting_puts_the_most_frequent_first_and_ties_in_descending_order():
    layer = tf.keras.layers.StringLookup(max_tokens=4)
    layer.adapt(["x", "y", "x", "z", "w", "z", "x"])
    assert layer.get_vocabulary() == ["[UNK]", "x", "z", "y"]


def test_adapting_on_batches_equals_adapting_on_an_array():
    on_batches, on_array = tf.keras.layers.StringLookup(), tf.keras.layers.StringLookup()
    words = np.array(["x", "y", "x", "z"])
    on_batches.adapt(tf.data.Dataset.from_tensor_slices(words).batch(3))
    on_array.adapt(words)
    assert on_batches.get_vocabulary() == on_array.get_vocabulary() == ["[UNK]", "x", "z", "y"]


def test_adapting_learns_the_weights_of_documents():
    layer = tf.keras.layers.StringLookup(output_mode="tf_idf")
    layer.adapt(np.array([["x", "y"], ["x", "x"], ["z", "[UNK]"]]))
    assert layer.get_vocabulary() == ["[UNK]", "x", "z", "y"]
    expected = [[0.8419096, 0.6931472, 0, 0]]  # TensorFlow's
    np.testing.assert_allclose(layer(np.array([["x", "q"]])), expected, rtol=1e-6)


def test_a_given_vocabulary_is_not_adapted():
    with pytest.raises(ValueError, match="was given its vocabulary"):
        lookup().adapt(["x"])


@pytest.mark.parametrize(
    ("vocabulary", "complaint"),
    [
        ([], "must not be empty"),
        (["a", "a"], r"more than once: \['a'\]"),
        (["a", "", "b"], "special token ''"),
        (["a", "b", "c"], "at most max_tokens=3"),
    ],
)
def test_a_wrong_vocabulary_is_an_error(vocabulary, complaint):
    with pytest.raises(ValueError, match=complaint):
        tf.keras.layers.StringLookup(vocabulary=vocabulary, mask_token="", max_tokens=3)


def test_a_vocabulary_is_read_from_a_file(tmp_path):
    (tmp_path / "words.txt").write_text("a\nb\n")
    layer = tf.keras.layers.StringLookup(vocabulary=str(tmp_path / "words.txt"))
    assert layer.get_vocabulary() == ["[UNK]", "a", "b"]


def test_a_saved_configuration_may_not_read_files(tmp_path):
    (tmp_path / "words.txt").write_text("secret\n")
    config = {"vocabulary": str(tmp_path / "words.txt")}
    saved = {"module": "keras.layers", "class_name": "StringLookup", "config": config}
    with pytest.raises(TypeError, match="outside the model"):
        tf.keras.saving.deserialize_keras_object(saved, safe_mode=True)


# -- IntegerLookup, Hashing, and the others -------------------------------------------------

INTEGERS = np.array([[12, 1138], [42, 12], [0, -7]])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, [[1, 3], [0, 1], [0, 0]]),
        ({"mask_token": 0}, [[2, 4], [1, 2], [0, 1]]),
        ({"num_oov_indices": 3}, [[3, 5], [0, 3], [0, 2]]),
        (
            {"output_mode": "multi_hot", "mask_token": 0},
            [[0, 1, 0, 1], [1, 1, 0, 0], [1, 0, 0, 0]],
        ),
    ],
)
def test_integers_become_tensorflows_indices_also_in_a_compiled_program(arguments, expected):
    layer = tf.keras.layers.IntegerLookup(vocabulary=[12, 36, 1138], **arguments)
    assert layer(INTEGERS).numpy().tolist() == expected
    assert tf.function(layer)(tf.constant(INTEGERS)).numpy().tolist() == expected


def test_integers_are_found_again_also_in_a_compiled_program():
    inverse = tf.keras.layers.IntegerLookup(vocabulary=[12, 36], invert=True)
    indices = np.array([[0, 1], [2, 3]])
    assert inverse(indices).numpy().tolist() == [[-1, 12], [36, -1]]
    assert tf.function(inverse)(tf.constant(indices)).numpy().tolist() == [[-1, 12], [36, -1]]


def test_integers_are_adapted():
    layer = tf.keras.layers.IntegerLookup(max_tokens=3)
    layer.adapt(np.array([1, 1, 2, 3, 3, 3]))
    assert layer.get_vocabulary() == [-1, 3, 1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, [[1], [0], [1], [1], [2]]),
        ({"mask_value": "B"}, [[1], [0], [2], [2], [1]]),
        (
            {"output_mode": "one_hot"},
            [[0, 1, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1]],
        ),
    ],
)
def test_hashing_is_tensorflows(arguments, expected):
    layer = tf.keras.layers.Hashing(num_bins=3, **arguments)
    assert layer([["A"], ["B"], ["C"], ["D"], ["E"]]).numpy().tolist() == expected


def test_features_are_crossed_as_in_tensorflow(tmp_path):
    letters, numbers = (
        tf.constant(["A", "B", "A", "C", "A"]),
        tf.constant([101, 101, 101, 102, 102]),
    )
    layer = tf.keras.layers.HashedCrossing(num_bins=5)
    assert layer((letters, numbers)).numpy().tolist() == [1, 4, 1, 2, 3]
    assert layer([letters[:, None], numbers[:, None]]).numpy().ravel().tolist() == [1, 4, 1, 2, 3]
    assert layer(("A", 101)).numpy() == 1
    hot = tf.keras.layers.HashedCrossing.from_config(
        {**layer.get_config(), "output_mode": "one_hot"}
    )
    np.testing.assert_array_equal(hot((letters, numbers)), np.eye(5)[[1, 4, 1, 2, 3]])
    pairs = tf.data.Dataset.from_tensor_slices((["a", "b"], [1, 2]))
    ten = tf.keras.layers.HashedCrossing(10)
    assert [int(bucket) for bucket in pairs.map(lambda a, b: ten((a, b)))] == [5, 7]


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([["A"]], "two or more"),
        ([["A"], [1, 2]], "one shape"),
        ([[1.5], [1]], "text and integers"),
    ],
)
def test_features_that_cannot_be_crossed_are_an_error(features, message):
    with pytest.raises(ValueError, match=message):
        tf.keras.layers.HashedCrossing(5)([np.array(each) for each in features])


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        # `tf.strings.to_hash_bucket_fast` of size bytes "a", modulo 2**62.
        (0, 1936946117179621455),
        (1, 3694432073954588131),
        (3, 3360065502999313129),
        (4, 1373008272375474036),
        (7, 3005736497893877398),
        (8, 1507030721935717893),
        (9, 1010243743929222519),
        (16, 3481940567716887985),
        (17, 3756752071939108419),
        (32, 3058527438150226200),
        (33, 3476057946412062037),
        (64, 1281596039326491513),
        (65, 3166372076517071988),
        (128, 4475744069048419318),
        (200, 886273374978001185),
    ],
)
def test_fingerprints_are_farmhash_for_every_length(size, expected):
    assert fingerprint64(b"a" * size) % 2**62 == expected


def test_the_other_preprocessing_layers_are_keras_own():
    layers = tf.keras.layers
    buckets = layers.Discretization(bin_boundaries=[0.0, 1.0])(np.array([-1.0, 0.5, 2.0]))
    assert np.asarray(buckets).tolist() == [0, 1, 2]
    categories = layers.CategoryEncoding(num_tokens=3, output_mode="multi_hot")
    assert np.asarray(categories(np.array([[0, 1], [2, 2]]))).tolist() == [[1, 1, 0], [0, 0, 1]]
    normalization = layers.Normalization()
    normalization.adapt(np.array([[1.0], [3.0]]))
    assert np.asarray(normalization(np.array([[3.0]]))).tolist() == [[1.0]]


# -- TextVectorization ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # What TensorFlow 2.21 returns of `TEXTS`, adapted on them.
        ({}, [[2, 5, 11, 9], [7, 6, 2, 10], [0, 0, 0, 0], [3, 4, 8, 0]]),
        ({"output_sequence_length": 3}, [[2, 5, 11], [7, 6, 2], [0, 0, 0], [3, 4, 8]]),
        ({"standardize": None}, [[11, 5, 10, 9], [7, 6, 4, 12], [0, 0, 0, 0], [2, 3, 8, 0]]),
        ({"standardize": "lower"}, [[2, 5, 11, 9], [7, 6, 2, 10], [0, 0, 0, 0], [3, 4, 8, 0]]),
        (
            {"standardize": "strip_punctuation"},
            [[11, 5, 10, 9], [7, 6, 4, 12], [0, 0, 0, 0], [2, 3, 8, 0]],
        ),
        (
            {"split": "character", "max_tokens": 9, "output_sequence_length": 8},
            [
                [5, 1, 3, 2, 1, 8, 1, 1],
                [1, 8, 1, 1, 3, 7, 2, 4],
                [0, 0, 0, 0, 0, 0, 0, 0],
                [1, 1, 1, 1, 4, 7, 3, 2],
            ],
        ),
        ({"split": None}, [3, 4, 0, 2]),
        (
            {"ngrams": 2, "max_tokens": 7},
            [
                [2, 1, 1, 1, 1, 1, 1],
                [1, 1, 2, 1, 1, 1, 1],
                [0, 0, 0, 0, 0, 0, 0],
                [4, 6, 1, 3, 5, 0, 0],
            ],
        ),
        ({"ngrams": (2,)}, [[4, 6, 9], [8, 7, 5], [0, 0, 0], [2, 3, 0]]),
        (
            {"output_mode": "multi_hot", "max_tokens": 6, "pad_to_max_tokens": True},
            [[1, 1, 0, 0, 1, 0], [1, 1, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0], [1, 0, 1, 1, 0, 0]],
        ),
        (
            {"output_mode": "count"},
            [
                [0, 1, 0, 0, 1, 0, 0, 0, 1, 0, 1],
                [0, 1, 0, 0, 0, 1, 1, 0, 0, 1, 0],
                [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
                [0, 0, 1, 1, 0, 0, 0, 1, 0, 0, 0],
            ],
        ),
        (
            {"output_mode": "tf_idf", "max_tokens": 4},
            [
                [3.044523, 0.847298, 0.0, 0.0],
                [3.044523, 0.847298, 0.0, 0.0],
                [0.0, 0.0, 0.0, 0.0],
                [1.014841, 0.0, 1.098612, 1.098612],
            ],
        ),
        ({"max_tokens": 5}, [[2, 1, 1, 1], [1, 1, 2, 1], [0, 0, 0, 0], [3, 4, 1, 0]]),
    ],
)
def test_texts_become_tensorflows_indices(arguments, expected):
    layer = tf.keras.layers.TextVectorization(**arguments)
    layer.adapt(TEXTS)
    np.testing.assert_allclose(layer(TEXTS), expected, rtol=1e-6)
    np.testing.assert_allclose(
        layer(np.array(TEXTS)[:, None]),
        np.reshape(expected, -1).reshape(layer(np.array(TEXTS)[:, None]).shape),
        rtol=1e-6,
    )


def test_functions_of_the_program_get_string_tensors():
    def standardize(texts):
        return tf.strings.regex_replace(tf.strings.lower(texts), "<br>", " ")

    layer = tf.keras.layers.TextVectorization(
        standardize=standardize, split=lambda texts: [text.split() for text in texts.numpy()]
    )
    layer.adapt(["So<br>good", "so BAD"])
    assert layer.get_vocabulary() == ["", "[UNK]", "so", "good", "bad"]


def test_one_text_has_one_row():
    layer = tf.keras.layers.TextVectorization(vocabulary=["the", "fox"])
    assert layer("The fox ran").numpy().tolist() == [2, 3, 1]


# -- in pipelines ---------------------------------------------------------------------------


def test_a_lookup_works_in_a_pipeline():
    layer = lookup()
    words = tf.data.Dataset.from_tensor_slices(["a", "c", "?"]).batch(2)
    assert [x.numpy().tolist() for x in words.map(layer)] == [[1, 3], [0]]


def test_a_model_of_lookups_works_in_a_pipeline():
    # As in TensorFlow's tutorial on parameter servers.
    features = tf.keras.layers.Input(shape=(2,), dtype="string", name="features")
    stage = tf.keras.Model({"features": features}, lookup(mask_token=None)(features))
    examples = tf.data.Dataset.from_tensor_slices({"features": [["a", "b"], ["c", "?"]]})
    indices = examples.map(lambda x: stage({"features": tf.expand_dims(x["features"], 0)}))
    assert [x.numpy().tolist() for x in indices] == [[[1, 2]], [[3, 0]]]


# -- in front of a model --------------------------------------------------------------------

REVIEWS = np.array(["good movie", "bad film", "good film", "really bad", "bad bad movie"])
LABELS = np.array([[1.0], [0.0], [1.0], [0.0], [0.0]], "float32")


def reviewer():
    keras.utils.set_random_seed(0)
    vectorize = tf.keras.layers.TextVectorization(max_tokens=20, output_sequence_length=3)
    vectorize.adapt(REVIEWS)
    layers = [tf.keras.layers.Embedding(20, 4), tf.keras.layers.GlobalAveragePooling1D()]
    model = tf.keras.Sequential([vectorize, *layers, tf.keras.layers.Dense(1)])
    model.compile(
        "adam", tf.keras.losses.BinaryCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    return model


def train(model, x, y=LABELS):
    history = model.fit(x, y, batch_size=2, epochs=2, shuffle=False, verbose=0).history
    return history, model.get_weights()


@pytest.fixture(scope="module")
def on_indices():
    """What training a model on indices, made before, gives."""
    model = reviewer()
    indices = np.asarray(model.layers[0](REVIEWS))
    rest = tf.keras.Sequential(model.layers[1:])
    rest.compile("adam", tf.keras.losses.BinaryCrossentropy(from_logits=True), metrics=["accuracy"])
    return train(rest, indices)


def assert_same(one, other):
    for name, values in one[0].items():
        np.testing.assert_allclose(other[0][name], values, rtol=1e-4, err_msg=name)
    for expected, weight in zip(one[1], other[1], strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-4, atol=1e-5)


def test_a_model_trains_on_text_as_on_indices(on_indices):
    assert_same(on_indices, train(reviewer(), REVIEWS))


def test_a_model_trains_on_text_on_several_replicas(on_indices, four_replicas):
    with four_replicas.scope():
        model = reviewer()
    assert_same(on_indices, train(model, REVIEWS))  # the last batch leaves three replicas idle
    logits = model.predict(list(REVIEWS), verbose=0)
    np.testing.assert_allclose(logits, model(tf.constant(REVIEWS)), rtol=1e-4, atol=1e-5)
    assert model.evaluate(REVIEWS, LABELS, verbose=0)[1] == pytest.approx(
        np.mean((logits > 0.5) == LABELS)
    )


def test_a_model_trains_on_a_dataset_of_text(on_indices, two_replicas):
    with two_replicas.scope():
        model = reviewer()
    dataset = tf.data.Dataset.from_tensor_slices((REVIEWS, LABELS)).batch(2)
    history = model.fit(dataset, epochs=2, verbose=0).history
    assert_same(on_indices, (history, model.get_weights()))
    assert model.predict(dataset.map(lambda text, label: text), verbose=0).shape == (5, 1)


def test_a_step_with_a_tape_trains_on_text(two_replicas):
    class Taped(tf.keras.Sequential):
        def train_step(self, data):
            text, labels = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=labels, y_pred=self(text, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    def build(cls):
        model = cls(reviewer().layers)
        model.compile("adam", tf.keras.losses.BinaryCrossentropy(from_logits=True))
        return model

    _, expected = train(build(tf.keras.Sequential), REVIEWS)
    _, alone = train(build(Taped), REVIEWS)
    with two_replicas.scope():
        model = build(Taped)
    _, together = train(model, REVIEWS)
    for one, other, another in zip(expected, alone, together, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(another, one, rtol=1e-4, atol=1e-5)


def test_text_is_one_of_several_inputs(two_replicas):
    def build():
        keras.utils.set_random_seed(0)
        color = tf.keras.Input((1,), dtype=tf.string, name="color")
        size = tf.keras.Input((1,), name="size")
        one_hot = lookup(output_mode="one_hot")(color)
        embedded = tf.keras.layers.Embedding(5, 2)(lookup()(color))  # a second layer of that text
        parts = [one_hot, size, tf.keras.layers.Flatten()(embedded)]
        outputs = tf.keras.layers.Dense(1)(tf.keras.layers.Concatenate()(parts))
        model = tf.keras.Model({"color": color, "size": size}, outputs)
        model.compile("sgd", "mse")
        return model

    data = {"color": np.array(list("abzca")), "size": np.arange(5, dtype="float32")}
    with two_replicas.scope():
        together = build()
    assert_same(train(build(), data), train(together, data))


def test_a_model_on_text_is_saved_and_loaded(tmp_path):
    model = reviewer()
    before = model.predict(REVIEWS, verbose=0)
    model.save(tmp_path / "reviewer.keras")
    again = tf.keras.models.load_model(tmp_path / "reviewer.keras")
    assert again.layers[0].get_vocabulary() == model.layers[0].get_vocabulary()
    np.testing.assert_allclose(again.predict(REVIEWS, verbose=0), before, rtol=1e-5)


def test_a_saved_model_names_keras_layers(tmp_path):
    import zipfile

    reviewer().save(tmp_path / "reviewer.keras")
    config = zipfile.ZipFile(tmp_path / "reviewer.keras").read("config.json")
    layer = json.loads(config)["config"]["layers"][0]
    assert (layer["module"], layer["class_name"]) == ("keras.layers", "TextVectorization")
    assert layer["registered_name"] is None


def test_text_that_no_layer_takes_is_an_error():
    text = tf.keras.Input((1,), dtype="string")
    spare = tf.keras.Input((1,), dtype="string")
    indices = tf.keras.layers.Flatten()(tf.keras.layers.Embedding(5, 2)(lookup()(text)))
    model = tf.keras.Model([text, spare], tf.keras.layers.Dense(1)(indices))
    model.compile("sgd", "mse")
    words = np.array([["a"], ["b"]])
    with pytest.raises(ValueError, match=r"text .* that no layer converts to numbers"):
        model.fit([words, words], np.ones((2, 1)), verbose=0)


def test_the_core_layer_needs_no_face():
    layer = unison.keras.StringLookup(vocabulary=["a"])
    saved = keras.saving.serialize_keras_object(layer)
    again = keras.saving.deserialize_keras_object(saved)
    assert type(again) is unison.keras.StringLookup
    assert again(np.array(["a", "b"])).tolist() == [1, 0]
