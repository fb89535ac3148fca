"""`tf.keras` has Keras' names, those of Keras 2 that programs use, and advice for the others."""

import functools
import os
import subprocess
import sys

import keras
import numpy as np
import pytest

import unison.tf as tf

#: What is said about a name of which nothing is known.
GENERAL_ADVICE = "jax.numpy, jax or keras"

#: The public names of Keras 2 (tf_keras 2.21) that Keras 3.15 does not have, by module.
OF_KERAS_2 = {
    "applications": """
        RegNetX002 RegNetX004 RegNetX006 RegNetX008 RegNetX016 RegNetX032 RegNetX040
        RegNetX064 RegNetX080 RegNetX120 RegNetX160 RegNetX320 RegNetY002 RegNetY004
        RegNetY006 RegNetY008 RegNetY016 RegNetY032 RegNetY040 RegNetY064 RegNetY080
        RegNetY120 RegNetY160 RegNetY320 ResNetRS101 ResNetRS152 ResNetRS200 ResNetRS270
        ResNetRS350 ResNetRS420 ResNetRS50
    """,
    "applications.regnet": """
        RegNetX002 RegNetX004 RegNetX006 RegNetX008 RegNetX016 RegNetX032 RegNetX040
        RegNetX064 RegNetX080 RegNetX120 RegNetX160 RegNetX320 RegNetY002 RegNetY004
        RegNetY006 RegNetY008 RegNetY016 RegNetY032 RegNetY040 RegNetY064 RegNetY080
        RegNetY120 RegNetY160 RegNetY320 decode_predictions preprocess_input
    """,
    "applications.resnet_rs": """
        ResNetRS101 ResNetRS152 ResNetRS200 ResNetRS270 ResNetRS350 ResNetRS420 ResNetRS50
        decode_predictions preprocess_input
    """,
    "backend": """
        abs all any arange argmax argmin batch_dot batch_flatten batch_get_value
        batch_normalization batch_set_value bias_add binary_crossentropy
        binary_focal_crossentropy cast cast_to_floatx categorical_crossentropy
        categorical_focal_crossentropy clip concatenate constant conv1d conv2d
        conv2d_transpose conv3d cos count_params ctc_batch_cost ctc_decode
        ctc_label_dense_to_sparse cumprod cumsum depthwise_conv2d dot dropout dtype elu equal
        eval exp expand_dims eye flatten foldl foldr function gather get_value gradients
        greater greater_equal hard_sigmoid in_test_phase in_top_k in_train_phase int_shape
        is_sparse l2_normalize learning_phase learning_phase_scope less less_equal
        local_conv1d local_conv2d log manual_variable_initialization map_fn max maximum mean
        min minimum moving_average_update name_scope ndim normalize_batch_in_training
        not_equal one_hot ones ones_like permute_dimensions placeholder pool2d pool3d pow
        print_tensor prod random_bernoulli random_binomial random_normal
        random_normal_variable random_uniform random_uniform_variable relu repeat
        repeat_elements reset_uids reshape resize_images resize_volumes reverse rnn round
        separable_conv2d set_learning_phase set_value shape sigmoid sign sin softmax softplus
        softsign sparse_categorical_crossentropy spatial_2d_padding spatial_3d_padding sqrt
        square squeeze stack std stop_gradient sum switch tanh temporal_padding tile to_dense
        transpose truncated_normal update update_add update_sub var variable zeros zeros_like
    """,
    "backend.experimental": """
        disable_tf_random_generator enable_tf_random_generator is_tf_random_generator_enabled
    """,
    "callbacks": """
        BaseLogger SidecarEvaluatorModelExport
    """,
    "callbacks.experimental": """
        BackupAndRestore UpdateEmbeddingCallback
    """,
    "constraints": """
        RadialConstraint radial_constraint
    """,
    "dtensor.experimental": """
        LayoutMap
    """,
    "dtensor.experimental.optimizers": """
        Adadelta Adagrad Adam AdamW RMSprop SGD
    """,
    "estimator": """
        model_to_estimator
    """,
    "experimental": """
        CosineDecay CosineDecayRestarts LinearModel SequenceFeatures SidecarEvaluator
        WideDeepModel
    """,
    "layers": """
        AbstractRNNCell DenseFeatures LocallyConnected1D LocallyConnected2D RandomHeight
        RandomWidth ThresholdedReLU
    """,
    "layers.experimental": """
        DynamicEmbedding DynamicLookup EinsumDense RandomFourierFeatures
        SyncBatchNormalization
    """,
    "layers.experimental.preprocessing": """
        CategoryEncoding CenterCrop Discretization HashedCrossing Hashing IntegerLookup
        Normalization PreprocessingLayer RandomContrast RandomCrop RandomFlip RandomHeight
        RandomRotation RandomTranslation RandomWidth RandomZoom Rescaling Resizing
        StringLookup TextVectorization
    """,
    "losses": """
        KLD MAE MAPE MSE MSLE Reduction kld kullback_leibler_divergence logcosh mae mape mse
        msle
    """,
    "metrics": """
        KLD MAE MAPE MSE MSLE MeanRelativeError MeanTensor kld kullback_leibler_divergence
        logcosh mae mape mse msle
    """,
    "metrics.experimental": """
        PyMetric
    """,
    "models": """
        model_from_config model_from_yaml
    """,
    "models.experimental": """
        SharpnessAwareMinimization
    """,
    "optimizers.experimental": """
        Adadelta Adafactor Adagrad Adam AdamW Adamax Ftrl Nadam Optimizer RMSprop SGD
    """,
    "optimizers.legacy": """
        Adadelta Adamax Nadam
    """,
    "preprocessing.image": """
        DirectoryIterator ImageDataGenerator Iterator NumpyArrayIterator
        apply_affine_transform apply_brightness_shift apply_channel_shift random_brightness
        random_channel_shift random_rotation random_shear random_shift random_zoom
    """,
    "preprocessing.sequence": """
        TimeseriesGenerator make_sampling_table skipgrams
    """,
    "preprocessing.text": """
        Tokenizer hashing_trick one_hot text_to_word_sequence tokenizer_from_json
    """,
    "utils": """
        GeneratorEnqueuer OrderedEnqueuer SequenceEnqueuer SidecarEvaluator
        StepsPerExecutionTuner TimedThread to_ordinal warmstart_embedding_matrix
    """,
    "utils.experimental": """
        DatasetCreator
    """,
}


def what_is_said_about(module, name):
    """The advice for a missing name; None for a name that is there."""
    try:
        functools.reduce(getattr, f"{module}.{name}".strip(".").split("."), tf.keras)
    except AttributeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("module", OF_KERAS_2)
def test_a_name_of_keras_2_is_there_or_has_advice_of_its_own(module):
    said = {name: what_is_said_about(module, name) for name in OF_KERAS_2[module].split()}
    assert [name for name, advice in said.items() if advice and GENERAL_ADVICE in advice] == []


def test_modules_can_be_imported_by_every_spelling():
    import unison.tf.keras.backend as backend
    import unison.tf.keras.layers.experimental.preprocessing as preprocessing
    from unison.tf import keras as face
    from unison.tf.keras import layers
    from unison.tf.keras.applications.resnet50 import ResNet50
    from unison.tf.keras.layers import Dense
    from unison.tf.keras.optimizers.legacy import Adam
    from unison.tf.keras.preprocessing.text import Tokenizer

    assert layers.Dense is Dense is face.layers.Dense
    assert preprocessing.Rescaling is layers.Rescaling
    assert ResNet50 is face.applications.ResNet50
    assert Adam is face.optimizers.legacy.Adam
    assert Tokenizer is face.preprocessing.text.Tokenizer
    assert backend.epsilon() == 1e-7


def test_keras_imported_by_itself_runs_on_jax_too():
    program = "import os, unison.tf; print(os.environ['KERAS_BACKEND'])"
    environment = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert finished.stdout.strip() == "jax", finished.stderr


def test_classes_are_keras_own():
    assert tf.keras.Model is keras.Model
    assert tf.keras.layers.Dense is keras.layers.Dense
    assert tf.keras.optimizers.experimental.Adam is keras.optimizers.Adam
    assert tf.keras.layers.experimental.preprocessing.Rescaling is keras.layers.Rescaling
    assert tf.keras.__version__ == keras.__version__


def test_a_module_lists_its_names():
    assert {"Dense", "StringLookup", "experimental"} <= set(dir(tf.keras.layers))
    assert "MeanSquaredError" in dir(tf.keras.losses)


def test_a_misspelt_name_is_guessed():
    with pytest.raises(AttributeError, match="did you mean 'GlorotUniform'"):
        tf.keras.initializers.GlorotUnifrom  # noqa: B018


# -- losses ---------------------------------------------------------------------------------


def test_reductions_of_keras_2_are_those_of_keras_3():
    reduction = tf.keras.losses.Reduction
    y, p = np.ones((4, 2), "float32"), np.zeros((4, 2), "float32")

    def loss(reduction):
        return np.asarray(tf.keras.losses.MeanSquaredError(reduction=reduction)(y, p))

    assert loss(reduction.NONE).tolist() == [1, 1, 1, 1]
    assert loss(reduction.SUM) == 4
    assert loss(reduction.AUTO) == loss(reduction.SUM_OVER_BATCH_SIZE) == 1


def test_short_names_of_losses_are_functions():
    y, p = np.array([[1.0, 3.0]]), np.array([[2.0, 1.0]])
    assert float(tf.keras.losses.mse(y, p)[0]) == float(tf.keras.metrics.MSE(y, p)[0]) == 2.5


# -- backend --------------------------------------------------------------------------------

K = tf.keras.backend


def test_backend_reads_and_sets_variables():
    optimizer = tf.keras.optimizers.SGD(0.5)
    K.set_value(optimizer.lr, 0.25)
    assert isinstance(K.get_value(optimizer.lr), np.float32)
    assert K.get_value(optimizer.lr) == 0.25
    assert K.batch_get_value([optimizer.lr]) == [0.25]


def test_backend_updates_variables():
    variable = K.variable([1.0, 2.0])
    K.update_add(variable, [1.0, 1.0])
    K.moving_average_update(variable, np.array([0.0, 0.0]), 0.5)
    assert variable.numpy().tolist() == [1.0, 1.5]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        # What Keras 2 (tf_keras 2.21) returns.
        (lambda x: K.sum(x, axis=1), [3, 7]),
        (lambda x: K.mean(x), 2.5),
        (lambda x: K.argmax(x), [1, 1]),
        (lambda x: K.cumsum(x), [[1, 2], [4, 6]]),
        (lambda x: K.clip(x, 2, 3), [[2, 2], [3, 3]]),
        (lambda x: K.clip(x, 3, 2), [[3, 3], [3, 3]]),
        (lambda x: K.concatenate([x, x]), [[1, 2, 1, 2], [3, 4, 3, 4]]),
        (lambda x: K.flatten(x), [1, 2, 3, 4]),
        (lambda x: K.batch_flatten(K.expand_dims(x)), [[1, 2], [3, 4]]),
        (lambda x: K.permute_dimensions(x, (1, 0)), [[1, 3], [2, 4]]),
        (lambda x: K.repeat_elements(x, 2, axis=1), [[1, 1, 2, 2], [3, 3, 4, 4]]),
        (lambda x: K.repeat(x, 2), [[[1, 2], [1, 2]], [[3, 4], [3, 4]]]),
        (lambda x: K.reverse(x, 1), [[2, 1], [4, 3]]),
        (lambda x: K.dot(x, x), [[7, 10], [15, 22]]),
        (lambda x: K.batch_dot(x, x), [[5], [25]]),
        (lambda x: K.switch(K.greater(x, 2), x, K.zeros_like(x)), [[0, 0], [3, 4]]),
        (lambda x: K.switch(K.greater(K.sum(x, 1), 5), x, -x), [[-1, -2], [3, 4]]),
        (lambda x: K.relu(x - 3, alpha=0.5), [[-1, -0.5], [0, 1]]),
        (lambda x: K.hard_sigmoid(x), [[0.7, 0.9], [1, 1]]),
        (lambda x: K.bias_add(x, np.array([1.0, 2.0])), [[2, 4], [4, 6]]),
        (lambda x: K.l2_normalize(K.constant([3.0, 4.0])), [0.6, 0.8]),
        (lambda x: K.map_fn(lambda row: row * 2, x), [[2, 4], [6, 8]]),
        (lambda x: K.in_top_k(K.constant([[0.1, 0.9]]), np.array([1]), 1), [True]),
        (lambda x: K.any(x - 1, axis=1), [True, True]),
        (lambda x: K.all(x - 1, axis=1), [False, True]),
        (lambda x: K.gather(x, np.array([1])), [[3, 4]]),
        (lambda x: K.constant(2, shape=(2,)), [2, 2]),
        (
            lambda x: K.categorical_crossentropy(
                K.constant([[0.0, 1.0]]), K.constant([[0.5, 0.5]])
            ),
            [0.6931472],
        ),
    ],
)
def test_backend_functions_compute_what_keras_2s_do(result, expected):
    x = K.constant([[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_allclose(np.asarray(result(x)), expected, rtol=1e-6)


def test_backend_says_what_tensors_are():
    x = K.zeros((2, 3))
    assert (K.int_shape(x), K.ndim(x), K.dtype(x), K.count_params(x)) == ((2, 3), 2, "float32", 6)
    assert K.image_data_format() == "channels_last"


def test_graph_mode_has_advice():
    with pytest.raises(AttributeError, match="pass training=True"):
        K.learning_phase()
    with pytest.raises(AttributeError, match=r"use tf\.GradientTape"):
        K.gradients  # noqa: B018


# -- preprocessing, utils, datasets ---------------------------------------------------------


def test_tokenizer_and_image_generator_are_there():
    tokenizer = tf.keras.preprocessing.text.Tokenizer()
    tokenizer.fit_on_texts(["a b", "a"])
    assert tokenizer.texts_to_sequences(["b a"]) == [[2, 1]]
    padded = tf.keras.preprocessing.sequence.pad_sequences([[1], [2, 3]])
    assert padded.tolist() == [[0, 1], [2, 3]]
    batches = tf.keras.preprocessing.image.ImageDataGenerator().flow(np.ones((3, 4, 4, 1)))
    assert next(batches).shape == (3, 4, 4, 1)


def test_a_file_that_cannot_be_downloaded_says_where_to_put_it(monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    address = "http://127.0.0.1:9/data.npz"  # nobody listens there
    with pytest.raises(ConnectionError, match="KERAS_HOME") as raised:
        tf.keras.utils.get_file(origin=address, cache_dir=str(tmp_path))
    assert str(tmp_path / "datasets" / "data.npz") in str(raised.value)
    (tmp_path / "datasets" / "data.npz").write_text("here")
    assert tf.keras.utils.get_file(origin=address, cache_dir=str(tmp_path)).endswith("data.npz")


def test_datasets_download_by_that_function():
    from keras.src.datasets import cifar10, mnist

    assert mnist.get_file is cifar10.get_file is tf.keras.utils.get_file


def test_one_seed_is_for_keras_and_for_tf_random():
    def draw():
        tf.keras.utils.set_random_seed(3)
        return float(tf.random.normal(())), float(keras.random.normal(()))

    assert draw() == draw()


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"left_size": 0.3}, ([0, 1, 2], [3, 4, 5, 6, 7, 8, 9])),
        ({"right_size": 4}, ([0, 1, 2, 3, 4, 5], [6, 7, 8, 9])),
        ({"left_size": 2, "right_size": 0.2}, ([0, 1], [8, 9])),
    ],
)
def test_a_dataset_is_divided_in_two(sizes, expected):
    left, right = tf.keras.utils.split_dataset(np.arange(10), **sizes)
    assert ([int(x) for x in left], [int(x) for x in right]) == expected


def test_a_dataset_is_not_divided_beyond_its_size():
    with pytest.raises(ValueError, match="must fit into the dataset of 3 elements"):
        tf.keras.utils.split_dataset(np.arange(3), left_size=4)


def test_images_of_a_directory_are_a_dataset(tmp_path):
    from PIL import Image

    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        for index in range(3):
            Image.new("RGB", (8, 8)).save(tmp_path / label / f"{index}.png")
    dataset = tf.keras.utils.image_dataset_from_directory(
        tmp_path, image_size=(4, 4), batch_size=4, verbose=False
    )
    assert isinstance(dataset, tf.data.Dataset)
    assert dataset.class_names == ["cat", "dog"]
    assert [images.shape for images, _ in dataset] == [(4, 4, 4, 3), (2, 4, 4, 3)]


def test_texts_of_a_directory_are_a_dataset_of_strings(tmp_path):
    for label in ("bad", "good"):
        (tmp_path / label).mkdir()
        (tmp_path / label / "0.txt").write_text(f"a {label} film")
    dataset = tf.keras.utils.text_dataset_from_directory(tmp_path, shuffle=False, verbose=False)
    texts, labels = next(iter(dataset))
    assert texts.numpy().tolist() == [b"a bad film", b"a good film"]
    assert np.asarray(labels).tolist() == [0, 1]


def test_windows_of_a_series_are_a_dataset_by_both_names():
    for module in (tf.keras.utils, tf.keras.preprocessing):
        dataset = module.timeseries_dataset_from_array(
            np.arange(6.0), np.arange(2.0, 6.0), sequence_length=3, batch_size=2
        )
        windows, targets = next(iter(dataset))
        assert np.asarray(windows).tolist() == [[0, 1, 2], [1, 2, 3]]
        assert np.asarray(targets).tolist() == [2, 3]
