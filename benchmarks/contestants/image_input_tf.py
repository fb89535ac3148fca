"""TensorFlow: `experimental_distribute_dataset` under a `MultiWorkerMirroredStrategy`, own loop."""

from __future__ import annotations

from typing import Any

import tensorflow as tf  # noqa: TID251 -- a peer, in a process of its own

from benchmarks import cluster, jpegs
from benchmarks.protocol import Contestant
from benchmarks.workloads import ImageInputWork


def build(work: ImageInputWork) -> Contestant:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    # A collective takes one; with a single thread nothing would run beside it.
    tf.config.threading.set_inter_op_parallelism_threads(2)
    is_alone = cluster.from_environment().size == 1
    strategy = (
        tf.distribute.OneDeviceStrategy("/cpu:0")
        if is_alone
        else tf.distribute.MultiWorkerMirroredStrategy()
    )
    with strategy.scope():
        weights = tf.Variable(tf.random.normal((jpegs.PIXELS * 3, jpegs.CLASSES)) / jpegs.CROP)
        bias = tf.Variable(tf.zeros(jpegs.CLASSES))
    files, labels = jpegs.files_of(work)

    def decode(file: Any, label: Any) -> Any:
        image = tf.io.decode_jpeg(file, channels=3)
        part = tf.image.random_crop(image, (jpegs.CROP, jpegs.CROP, 3))
        return tf.image.convert_image_dtype(
            tf.image.random_flip_left_right(part), tf.float32
        ), label

    examples = tf.data.Dataset.from_tensor_slices((files, labels)).shuffle(work.images)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    batches = strategy.experimental_distribute_dataset(
        examples.map(decode).batch(work.batch).with_options(options)
    )

    def step(images: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            inside = images[:, jpegs.BORDER : -jpegs.BORDER, jpegs.BORDER : -jpegs.BORDER]
            scores = tf.reshape(inside, (-1, jpegs.PIXELS * 3)) @ weights + bias
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
            loss = tf.reduce_sum(losses) / work.batch
        gradients = tape.gradient(loss, [weights, bias])
        context = tf.distribute.get_replica_context()
        summed = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        for variable, gradient in zip((weights, bias), summed, strict=True):
            variable.assign_sub(jpegs.RATE * gradient)

    @tf.function
    def on_replicas(images: Any, labels: Any) -> None:
        strategy.run(step, args=(images, labels))

    def train() -> None:
        for images, labels in batches:
            on_replicas(images, labels)

    return jpegs.ImageTraining(work, train, {"tensorflow": tf.__version__})
