"""Whole programs in the manner of Keras' examples and TensorFlow's tutorials, with tiny data.

Each file is one program: `train(strategy, epochs=...)` builds, trains and returns numbers. Under
TensorFlow it is the same file with `tensorflow` where it imports `unison.tf`, which is the one line
that a user changes. `parity.whole_programs` loads and runs them.
"""
