"""What the tutorial on parameter servers calls side-car evaluation: a process of its own evaluates.

It waits for checkpoints in the folder of the training, and ends with the last one.
"""

import sys

import unison.tf as tf

folder, last_checkpoint = sys.argv[1], int(sys.argv[2])

eval_model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
eval_model.compile(loss="mse")
x = tf.random.uniform((32, 4))
eval_dataset = tf.data.Dataset.from_tensor_slices((x, tf.reduce_sum(x, axis=1, keepdims=True)))

checkpoint = tf.train.Checkpoint(model=eval_model)
for latest_checkpoint in tf.train.checkpoints_iterator(
    folder, min_interval_secs=0.1, timeout=80, timeout_fn=lambda: True
):
    try:
        checkpoint.restore(latest_checkpoint).expect_partial()
    except tf.errors.OpError:
        continue  # deleted, or replaced, while it was read: the next one is there
    loss = eval_model.evaluate(eval_dataset.batch(16), verbose=0)
    print("evaluated %s, loss: %f" % (latest_checkpoint.rpartition("-")[2], loss))
    if latest_checkpoint.endswith(f"-{last_checkpoint}"):
        break
