"""The names of Keras 2 that Keras 3 dropped, and their replacements."""

from __future__ import annotations


def _each(names: str, advice: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), advice)


_NETWORKS = "Keras 3 dropped this network: use ConvNeXt, EfficientNetV2 or ResNetV2"
_REGNETS = " ".join(
    f"RegNet{kind}{size}"
    for kind in "XY"
    for size in "002 004 006 008 016 032 040 064 080 120 160 320".split()
)
_RESNETS = " ".join(f"ResNetRS{depth}" for depth in (50, 101, 152, 200, 270, 350, 420))
_RADIAL = "write a keras.constraints.Constraint"
_RANDOM_SIZE = "use RandomZoom, or resize in the input pipeline"
_SIDECAR = "evaluate in the process that trains (fit's validation_data), or in one that you start"
_QUEUES = "give fit a keras.utils.PyDataset: it has workers, and use_multiprocessing"
_DTENSOR = "use keras.distribution.ModelParallel and LayoutMap"

#: By module under `tf.keras` (the empty name is `tf.keras` itself): advice for its missing names.
INSTEAD: dict[str, dict[str, str]] = {
    "applications": _each(f"{_REGNETS} {_RESNETS} regnet resnet_rs", _NETWORKS),
    "backend": {
        **_each(
            "learning_phase learning_phase_scope set_learning_phase in_train_phase in_test_phase",
            "pass training=True or training=False when you call the model or layer",
        ),
        **_each(
            "function placeholder manual_variable_initialization reset_uids to_dense",
            "there are no graphs to build: compute with arrays, and compile with tf.function",
        ),
        **_each(
            "conv1d conv2d conv2d_transpose conv3d depthwise_conv2d local_conv1d local_conv2d "
            "separable_conv2d",
            "use keras.ops.conv, keras.ops.depthwise_conv or keras.ops.conv_transpose",
        ),
        **_each("pool2d pool3d", "use keras.ops.max_pool or keras.ops.average_pool"),
        **_each("spatial_2d_padding spatial_3d_padding temporal_padding", "use keras.ops.pad"),
        **_each(
            "ctc_batch_cost ctc_decode ctc_label_dense_to_sparse",
            "use keras.ops.ctc_loss or keras.ops.ctc_decode",
        ),
        **_each(
            "batch_normalization normalize_batch_in_training", "use keras.ops.batch_normalization"
        ),
        **_each("foldl foldr rnn", "use keras.ops.scan"),
        **_each("resize_images resize_volumes", "use keras.ops.image.resize"),
        **_each(
            "random_binomial random_normal_variable random_uniform_variable",
            "use keras.random and keras.Variable",
        ),
        **_each("binary_focal_crossentropy categorical_focal_crossentropy", "use tf.keras.losses"),
        "gradients": "use tf.GradientTape",
        "experimental": "random numbers follow keras.utils.set_random_seed",
    },
    "callbacks": {
        "BaseLogger": "metrics are averaged over an epoch by themselves: read them from the logs",
        "SidecarEvaluatorModelExport": _SIDECAR,
    },
    "callbacks.experimental": {
        "UpdateEmbeddingCallback": "use Embedding with a fixed vocabulary",
    },
    "constraints": _each("RadialConstraint radial_constraint", _RADIAL),
    "dtensor": {"experimental": _DTENSOR},
    "estimator": {
        "model_to_estimator": "estimators are gone: train the model with fit, in strategy.scope()"
    },
    "experimental": {
        "LinearModel": "use a Dense layer on the concatenated features",
        "SequenceFeatures": "use StringLookup, Embedding and keras.ops",
        "SidecarEvaluator": _SIDECAR,
        "WideDeepModel": "add the outputs of a Dense layer and of a deep model",
    },
    "layers": {
        "AbstractRNNCell": "derive from keras.layers.Layer: call(inputs, states) and state_size",
        "DenseFeatures": "use StringLookup, CategoryEncoding, Normalization and Embedding",
        **_each(
            "LocallyConnected1D LocallyConnected2D",
            "use Conv1D or Conv2D, or keras.ops with weights of your own",
        ),
        **_each("RandomHeight RandomWidth", _RANDOM_SIZE),
    },
    "layers.experimental": {
        "DynamicEmbedding": "use Embedding with a fixed vocabulary",
        "DynamicLookup": "use StringLookup or IntegerLookup with a fixed vocabulary",
        "RandomFourierFeatures": "write a keras.layers.Layer: cos(x @ w + b), w and b random",
    },
    "layers.experimental.preprocessing": {
        "PreprocessingLayer": "derive from keras.layers.Layer",
        **_each("RandomHeight RandomWidth", _RANDOM_SIZE),
    },
    "metrics": {
        "MeanRelativeError": "use keras.metrics.Mean of abs(y_true - y_pred) / normalizer",
        "MeanTensor": "write a keras.metrics.Metric with self.add_variable(shape, ...)",
    },
    "metrics.experimental": {
        "PyMetric": "compute it with NumPy in a callback, or write a keras.metrics.Metric"
    },
    "models": {"model_from_yaml": "use model.to_json() and model_from_json(): YAML runs code"},
    "models.experimental": {
        "SharpnessAwareMinimization": "override train_step and take two gradients a step"
    },
    "utils": {
        **_each("GeneratorEnqueuer OrderedEnqueuer SequenceEnqueuer TimedThread", _QUEUES),
        "SidecarEvaluator": _SIDECAR,
        "StepsPerExecutionTuner": "small steps run together by themselves",
        "to_ordinal": "use keras.ops.arange(num_classes - 1) < labels[:, None]",
        "warmstart_embedding_matrix": "copy the rows of the words that both vocabularies have",
    },
    "wrappers": {
        "scikit_learn": "use tf.keras.wrappers.SKLearnClassifier or SKLearnRegressor",
    },
}
