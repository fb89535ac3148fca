"""What compression still has to send, where the group of workers changes."""

import json

import pytest

from elastic_training import ENVIRONMENT, SECONDS
from unison.testing import Fault, run

pytestmark = pytest.mark.timeout(SECONDS + 60)

#: Trains the weights of a linear function, whose gradients are the examples whatever the weights
#: are. So the weights, and what is still to be sent, tell what has been sent: all gradients.
#: Of the second example of each batch one element is not zero: its replica has nothing to keep.
PROGRAM = """
import json, os, sys, time
os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np
import unison
import unison.train
from unison import compression

STEPS, LOST_AT, WAITS_FOR = 60, 10, int(sys.argv[1])
strategy = unison.MultiWorkerMirroredStrategy()
x = np.random.default_rng(0).normal(size=(STEPS, 2, 40, 40)).astype("float32")
x[:, 1] = 0
x[:, 1, 3, 5] = 1


class Weighted(keras.layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=shape[1:], initializer="zeros", name="kernel")

    def call(self, inputs):
        return keras.ops.sum(inputs * self.kernel, axis=(1, 2))[:, None]


class Patience(keras.callbacks.Callback):
    seconds = 40.0

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)
        while batch > LOST_AT and strategy.num_replicas_in_sync < WAITS_FOR and self.seconds > 0:
            time.sleep(0.02)
            self.seconds -= 0.02


with strategy.scope():
    layer = Weighted()
    model = keras.Sequential([keras.Input((40, 40)), layer])
    sgd = unison.train.with_compression(
        keras.optimizers.SGD(1.0), compression.topk(0.05, momentum=0)
    )
    model.compile(sgd, lambda labels, outputs: outputs[:, 0])
model.fit(
    x.reshape(-1, 40, 40),
    np.zeros(2 * STEPS),
    batch_size=2,
    shuffle=False,
    verbose=0,
    callbacks=[Patience()],
)
(residual,) = (v for v in sgd.variables if "residual" in v.name)
owed = residual.numpy()
lost = -layer.kernel.numpy() + owed - x.mean(axis=1).sum(axis=0)
told = {
    "owed": float(np.abs(owed).max()),
    "lost": float(np.abs(lost).max()),
    "replicas": strategy.num_replicas_in_sync,
}
print("REPORT", json.dumps(told), flush=True)
"""


@pytest.mark.parametrize(
    "replicas",
    [pytest.param(1, id="lost"), pytest.param(2, id="back again", marks=pytest.mark.soak)],
)
def test_what_is_still_to_be_sent_outlives_a_lost_worker(replicas, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    outcome = run(
        program,
        replicas,
        workers=2,
        faults=[Fault("kill", 1, 10, "exchange")],
        restarts=replicas - 1,
        environment=ENVIRONMENT,
        timeout=SECONDS,
    )
    outcome.assert_fired()
    outcome.assert_ended(0)
    lines = [line for _, line in outcome.lines if line.startswith("REPORT ")]
    assert len(lines) == replicas
    for line in lines:
        told = json.loads(line[7:])
        assert told["replicas"] == replicas
        assert told["lost"] < 1e-4
        assert told["owed"] > 0.1 if replicas > 1 else told["owed"] == 0
