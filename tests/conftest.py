"""Four logical CPU devices in one process for every test.

JAX and Keras read these variables when they are first imported, so they are set here, before
pytest imports a test or, for the doctests, a module of the package.
"""

import os

os.environ["UNISON_CPU_DEVICES"] = "4"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["KERAS_BACKEND"] = "jax"
