"""TensorFlow's names for dtypes: plain NumPy dtypes, which JAX and Keras take as well.

What is put on a device follows JAX's rule: 64-bit types become their 32-bit kin unless
`jax_enable_x64` is set, so `tf.cast(x, tf.int64).dtype` is `tf.int32`.
"""

import jax.numpy as jnp
import numpy as np

bfloat16 = jnp.dtype("bfloat16")
bool = np.dtype("bool")
complex64 = np.dtype("complex64")
complex128 = np.dtype("complex128")
double = np.dtype("float64")
float16 = np.dtype("float16")
float32 = np.dtype("float32")
float64 = np.dtype("float64")
half = np.dtype("float16")
int8 = np.dtype("int8")
int16 = np.dtype("int16")
int32 = np.dtype("int32")
int64 = np.dtype("int64")
string = np.dtype("object")
uint8 = np.dtype("uint8")
uint16 = np.dtype("uint16")
uint32 = np.dtype("uint32")
uint64 = np.dtype("uint64")
