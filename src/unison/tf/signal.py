"""`tf.signal`: Fourier and cosine transforms, frames and windows of signals, and mel spectrograms.

Lengths and steps must be known when a program is compiled, as shapes are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import i0e

from unison.tf import dtypes
from unison.tf.missing import names_missing_from
from unison.tf.tensors import convert_to_tensor, full_width, size_of, sizes, tensor_dtype

__all__ = [
    "dct",
    "fft",
    "fft2d",
    "fft3d",
    "fftshift",
    "frame",
    "hamming_window",
    "hann_window",
    "idct",
    "ifft",
    "ifft2d",
    "ifft3d",
    "ifftshift",
    "inverse_mdct",
    "inverse_stft",
    "inverse_stft_window_fn",
    "irfft",
    "irfft2d",
    "irfft3d",
    "kaiser_bessel_derived_window",
    "kaiser_window",
    "linear_to_mel_weight_matrix",
    "mdct",
    "mfccs_from_log_mel_spectrograms",
    "overlap_and_add",
    "rfft",
    "rfft2d",
    "rfft3d",
    "stft",
    "vorbis_window",
]

_ANY_AXES = "use jax.numpy.fft, which transforms any axes"

__getattr__ = names_missing_from(
    __name__, dict.fromkeys(("fftnd", "ifftnd", "rfftnd", "irfftnd"), _ANY_AXES)
)

#: A window's samples, of a number and a dtype.
_Window = Callable[..., jax.Array]

# -- Fourier transforms ----------------------------------------------------------------------


def _complex(name: str, function: Callable[..., jax.Array], rank: int) -> Callable[..., jax.Array]:
    def transform(input: Any, name: str | None = None) -> jax.Array:
        tensor = convert_to_tensor(input, dtype_hint=dtypes.complex64)
        if not jnp.iscomplexobj(tensor):
            raise TypeError(f"{transform.__qualname__} takes complex numbers. Received: {tensor}")
        with full_width(tensor.dtype):
            return function(tensor, axes=range(-rank, 0))

    return _documented(transform, name)


def _real(name: str, function: Callable[..., jax.Array], rank: int) -> Callable[..., jax.Array]:
    hint = dtypes.complex64 if name.startswith("i") else dtypes.float32

    def transform(input_tensor: Any, fft_length: Any = None, name: str | None = None) -> jax.Array:
        tensor = convert_to_tensor(input_tensor, dtype_hint=hint)
        if jnp.issubdtype(tensor.dtype, jnp.integer):
            raise ValueError(f"{transform.__qualname__} takes floats. Received: {tensor}")
        lengths = None if fft_length is None else sizes(fft_length)
        with full_width(tensor.dtype):
            return function(tensor, lengths, axes=range(-rank, 0))

    return _documented(transform, name)


def _documented(transform: Callable[..., jax.Array], name: str) -> Callable[..., jax.Array]:
    transform.__name__ = name
    transform.__qualname__ = f"tf.signal.{name}"
    transform.__doc__ = f"Transforms the innermost axes. TF: `tf.signal.{name}`."
    return transform


fft = _complex("fft", jnp.fft.fftn, 1)
fft2d = _complex("fft2d", jnp.fft.fftn, 2)
fft3d = _complex("fft3d", jnp.fft.fftn, 3)
ifft = _complex("ifft", jnp.fft.ifftn, 1)
ifft2d = _complex("ifft2d", jnp.fft.ifftn, 2)
ifft3d = _complex("ifft3d", jnp.fft.ifftn, 3)
rfft = _real("rfft", jnp.fft.rfftn, 1)
rfft2d = _real("rfft2d", jnp.fft.rfftn, 2)
rfft3d = _real("rfft3d", jnp.fft.rfftn, 3)
irfft = _real("irfft", jnp.fft.irfftn, 1)
irfft2d = _real("irfft2d", jnp.fft.irfftn, 2)
irfft3d = _real("irfft3d", jnp.fft.irfftn, 3)


def fftshift(x: Any, axes: Any = None, name: str | None = None) -> jax.Array:
    """Moves the frequency 0 to the middle. TF: `tf.signal.fftshift`."""
    return jnp.fft.fftshift(convert_to_tensor(x), None if axes is None else _axes(axes))


def ifftshift(x: Any, axes: Any = None, name: str | None = None) -> jax.Array:
    """Undoes `fftshift`. TF: `tf.signal.ifftshift`."""
    return jnp.fft.ifftshift(convert_to_tensor(x), None if axes is None else _axes(axes))


def _axes(axes: Any) -> Any:
    return size_of(axes) if np.ndim(axes) == 0 else sizes(axes)


# -- cosine transforms -----------------------------------------------------------------------


def dct(
    input: Any,
    type: int = 2,
    n: int | None = None,
    axis: int = -1,
    norm: str | None = None,
    name: str | None = None,
) -> jax.Array:
    """Returns the discrete cosine transform of the innermost axis.

    Args:
        input: The signals.
        type: 1, 2, 3 or 4.
        n: The length to which the signals are cut or padded with zeros.
        axis: -1.
        norm: "ortho" makes the transform orthonormal (not of type 1).
        name: Without effect.

    Raises:
        NotImplementedError: Another axis.
        ValueError: Another argument is not one of these.

    TF: `tf.signal.dct`.
    """
    signal = convert_to_tensor(input)
    if axis != -1:
        raise NotImplementedError(f"axis must be -1. Got: {axis}")
    if n is not None and n < 1:
        raise ValueError(f"n should be a positive integer or None. Received: {n}")
    if type not in (1, 2, 3, 4):
        raise ValueError(f"Types 1 to 4 of the cosine transform are supported. Received: {type}")
    if norm not in (None, "ortho"):
        raise ValueError(f"Unknown normalization. Expected None or 'ortho', got: {norm}")
    if type == 1 and (norm is not None or signal.shape[-1] < 2):
        raise ValueError(
            "The transform of type 1 has no normalization, and needs two samples at least. "
            f"Received: norm={norm}, {signal.shape[-1]} samples"
        )
    if n is not None:
        signal = _of_length(signal, n)
    with full_width(signal.dtype):
        return _cosines(signal, type, norm is not None)


def idct(
    input: Any,
    type: int = 2,
    n: int | None = None,
    axis: int = -1,
    norm: str | None = None,
    name: str | None = None,
) -> jax.Array:
    """Returns the inverse of `dct`, but for a factor where `norm` is None.

    TF: `tf.signal.idct`.
    """
    return dct(input, {2: 3, 3: 2}.get(type, type), n, axis, norm)


def _cosines(signal: jax.Array, type: int, is_orthonormal: bool) -> jax.Array:
    count, dtype = signal.shape[-1], signal.dtype
    if type == 1:
        return jnp.fft.rfft(jnp.concatenate([signal, signal[..., -2:0:-1]], -1)).real
    if type == 4:
        odd = _cosines(_of_length(signal, 2 * count), 2, False)[..., 1::2]
        return odd * dtype.type(np.sqrt(0.5 / count)) if is_orthonormal else odd
    angles = np.arange(count) * (np.pi / 2 / count)
    turns = jnp.asarray(2 * np.exp(1j * angles), jnp.result_type(dtype, jnp.complex64))
    #: Weights with which the rows of the transform of type 2 are orthonormal.
    weights = np.full(count, np.sqrt(0.5 / count))
    weights[0] = np.sqrt(0.25 / count)
    if type == 2:
        turned = (jnp.fft.rfft(signal, 2 * count)[..., :count] * turns.conj()).real
        return turned * jnp.asarray(weights, dtype) if is_orthonormal else turned
    scale = 0.5 / weights if is_orthonormal else count
    return jnp.fft.irfft(signal * jnp.asarray(scale, dtype) * turns, 2 * count)[..., :count]


def _of_length(signal: jax.Array, length: int) -> jax.Array:
    """Returns the innermost axis cut, or padded with zeros, to a length."""
    missing = max(0, length - signal.shape[-1])
    return jnp.pad(signal, [(0, 0)] * (signal.ndim - 1) + [(0, missing)])[..., :length]


# -- windows ---------------------------------------------------------------------------------


def hann_window(
    window_length: Any,
    periodic: bool = True,
    dtype: Any = dtypes.float32,
    name: str | None = None,
) -> jax.Array:
    """TF: `tf.signal.hann_window`."""
    return _raised_cosine(window_length, periodic, dtype, 0.5)


def hamming_window(
    window_length: Any,
    periodic: bool = True,
    dtype: Any = dtypes.float32,
    name: str | None = None,
) -> jax.Array:
    """TF: `tf.signal.hamming_window`."""
    return _raised_cosine(window_length, periodic, dtype, 0.54)


def _raised_cosine(window_length: Any, periodic: bool, dtype: Any, middle: float) -> jax.Array:
    length = size_of(window_length)
    if length == 1:
        return _samples([1.0], dtype)
    period = length if periodic and length % 2 == 0 else length - 1
    return _samples(middle - (1 - middle) * np.cos(2 * np.pi * np.arange(length) / period), dtype)


def vorbis_window(
    window_length: Any, dtype: Any = dtypes.float32, name: str | None = None
) -> jax.Array:
    """TF: `tf.signal.vorbis_window`."""
    length = size_of(window_length)
    sines = np.sin(np.pi / length * (np.arange(length) + 0.5))
    return _samples(np.sin(np.pi / 2 * sines**2), dtype)


def kaiser_window(
    window_length: Any,
    beta: float = 12.0,
    dtype: Any = dtypes.float32,
    name: str | None = None,
) -> jax.Array:
    """TF: `tf.signal.kaiser_window`."""
    length = size_of(window_length)
    if length == 1:
        return _samples([1.0], dtype)
    half = (length - 1) / 2
    places = np.arange(length) - half
    widths = beta * np.sqrt(np.maximum(1 - (places / half) ** 2, 0.0))
    bessel = i0e(_samples(widths, dtype)) / i0e(_samples(beta, dtype))
    return _samples(np.exp(widths - beta), dtype) * bessel


def kaiser_bessel_derived_window(
    window_length: Any,
    beta: float = 12.0,
    dtype: Any = dtypes.float32,
    name: str | None = None,
) -> jax.Array:
    """TF: `tf.signal.kaiser_bessel_derived_window`."""
    sums = jnp.cumsum(kaiser_window(size_of(window_length) // 2 + 1, beta, dtype))
    half = jnp.sqrt(sums[:-1] / sums[-1])
    return jnp.concatenate([half, half[::-1]])


def _samples(values: Any, dtype: Any) -> jax.Array:
    wanted = dtypes.as_dtype(dtype)
    if not wanted.is_floating:
        raise ValueError(f"dtype must be a floating point type. Found {wanted}")
    return convert_to_tensor(np.asarray(values, tensor_dtype(wanted)))


# -- frames ----------------------------------------------------------------------------------


def frame(
    signal: Any,
    frame_length: Any,
    frame_step: Any,
    pad_end: bool = False,
    pad_value: Any = 0,
    axis: int = -1,
    name: str | None = None,
) -> jax.Array:
    """Returns an axis as overlapping frames: two axes, `[frames, frame_length]`, in its place.

    Args:
        signal: The signals.
        frame_length: Samples of a frame.
        frame_step: Samples from the start of a frame to that of the next one.
        pad_end: Whether frames that begin near the end are filled up, rather than left out.
        pad_value: The value with which.
        axis: The axis.
        name: Without effect.

    Examples:
        >>> frame([1, 2, 3, 4, 5], 3, 2).tolist()
        [[1, 2, 3], [3, 4, 5]]

    TF: `tf.signal.frame`.
    """
    tensor = convert_to_tensor(signal)
    length, step, axis = size_of(frame_length), size_of(frame_step), int(axis) % tensor.ndim
    samples = tensor.shape[axis]
    if pad_end:
        frames = -(-samples // step)
        widths = [(0, 0)] * tensor.ndim
        widths[axis] = (0, max(0, length + step * (frames - 1) - samples))
        tensor = jnp.pad(tensor, widths, constant_values=pad_value)
    else:
        frames = max(0, 1 + (samples - length) // step)
    places = np.arange(frames)[:, None] * step + np.arange(length)
    return jnp.take(tensor, places, axis)


def overlap_and_add(signal: Any, frame_step: Any, name: str | None = None) -> jax.Array:
    """Returns signals, as the sums of overlapping frames.

    Args:
        signal: The frames, `[..., frames, frame_length]`.
        frame_step: Samples from the start of a frame to that of the next one.
        name: Without effect.

    Examples:
        >>> overlap_and_add([[1, 2, 3], [10, 20, 30]], 2).tolist()
        [1, 2, 13, 20, 30]

    TF: `tf.signal.overlap_and_add`.
    """
    tensor = convert_to_tensor(signal)
    *outer, frames, length = tensor.shape
    step = size_of(frame_step)
    places = np.arange(frames)[:, None] * step + np.arange(length)
    zeros = jnp.zeros((*outer, max(0, length + step * (frames - 1))), tensor.dtype)
    return zeros.at[..., places].add(tensor)


def stft(
    signals: Any,
    frame_length: Any,
    frame_step: Any,
    fft_length: Any = None,
    window_fn: _Window | None = hann_window,
    pad_end: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Returns the short-time Fourier transform: `[..., frames, fft_length // 2 + 1]`.

    Args:
        signals: The signals, `[..., samples]`.
        frame_length: Samples of a frame.
        frame_step: Samples from the start of a frame to that of the next one.
        fft_length: Samples of a transform. Default: the power of two that holds a frame.
        window_fn: Returns a window of a length and a `dtype`; None: none.
        pad_end: Whether frames near the end are filled up with zeros.
        name: Without effect.

    TF: `tf.signal.stft`.
    """
    length = size_of(frame_length)
    frames = frame(signals, length, frame_step, pad_end)
    if window_fn is not None:
        frames = frames * window_fn(length, dtype=frames.dtype)
    return rfft(frames, [_power_of_two(length) if fft_length is None else size_of(fft_length)])


def inverse_stft(
    stfts: Any,
    frame_length: Any,
    frame_step: Any,
    fft_length: Any = None,
    window_fn: _Window | None = hann_window,
    name: str | None = None,
) -> jax.Array:
    """Returns the signals of short-time Fourier transforms.

    They are those that were transformed if `window_fn` is `inverse_stft_window_fn(frame_step)`.

    TF: `tf.signal.inverse_stft`.
    """
    length = size_of(frame_length)
    count = _power_of_two(length) if fft_length is None else size_of(fft_length)
    frames = _of_length(irfft(stfts, [count]), length)
    if window_fn is not None:
        frames = frames * window_fn(length, dtype=frames.dtype)
    return overlap_and_add(frames, frame_step)


def inverse_stft_window_fn(
    frame_step: Any, forward_window_fn: _Window = hann_window, name: str | None = None
) -> _Window:
    """Returns the window function with which `inverse_stft` undoes `stft`.

    TF: `tf.signal.inverse_stft_window_fn`.
    """
    step = size_of(frame_step)

    def inverse_window(frame_length: Any, dtype: Any) -> jax.Array:
        length = size_of(frame_length)
        window = forward_window_fn(length, dtype=dtype)
        overlaps = -(-length // step)
        squares = _of_length(jnp.square(window), overlaps * step).reshape(overlaps, step)
        total = jnp.tile(squares.sum(0), overlaps)[:length]
        return jnp.where(total == 0, 0, window / jnp.where(total == 0, 1, total))

    return inverse_window


def _power_of_two(length: int) -> int:
    return 1 << max(0, length - 1).bit_length()


def mdct(
    signals: Any,
    frame_length: Any,
    window_fn: _Window | None = vorbis_window,
    pad_end: bool = False,
    norm: str | None = None,
    name: str | None = None,
) -> jax.Array:
    """Returns the modified cosine transform of half-overlapping frames, a multiple of 4 long.

    TF: `tf.signal.mdct`.
    """
    length = size_of(frame_length)
    if length % 4:
        raise ValueError(f"The frame length must be a multiple of 4. Received: {length}")
    frames = frame(signals, length, length // 2, pad_end)
    first, second, third, fourth = jnp.split(_windowed(frames, window_fn), 4, -1)
    halves = [-third[..., ::-1] - fourth, first - second[..., ::-1]]
    return dct(jnp.concatenate(halves, -1), 4, norm=norm)


def inverse_mdct(
    mdcts: Any,
    window_fn: _Window | None = vorbis_window,
    norm: str | None = None,
    name: str | None = None,
) -> jax.Array:
    """Returns the signals of `mdct`. TF: `tf.signal.inverse_mdct`."""
    tensor = convert_to_tensor(mdcts)
    half = tensor.shape[-1]
    turned = dct(tensor, 4, norm=norm) * (0.5 / half if norm is None else 1)
    first, second = jnp.split(turned, 2, -1)
    frames = jnp.concatenate([second, -second[..., ::-1], -first[..., ::-1], -first], -1)
    return overlap_and_add(_windowed(frames, window_fn), half)


def _windowed(frames: jax.Array, window_fn: _Window | None) -> jax.Array:
    if window_fn is None:
        return frames * frames.dtype.type(np.sqrt(0.5))
    return frames * window_fn(frames.shape[-1], dtype=frames.dtype)


# -- mel spectrograms ------------------------------------------------------------------------


def linear_to_mel_weight_matrix(
    num_mel_bins: int = 20,
    num_spectrogram_bins: int = 129,
    sample_rate: Any = 8000,
    lower_edge_hertz: float = 125.0,
    upper_edge_hertz: float = 3800.0,
    dtype: Any = dtypes.float32,
    name: str | None = None,
) -> jax.Array:
    """Returns the matrix, `[num_spectrogram_bins, num_mel_bins]`, that makes mel spectrograms.

    Args:
        num_mel_bins: Bands of the mel spectrum.
        num_spectrogram_bins: Bins of the spectrogram, from frequency 0 to half the rate.
        sample_rate: Samples of the signal per second.
        lower_edge_hertz: The lower edge of the lowest band.
        upper_edge_hertz: The upper edge of the highest band.
        dtype: A dtype of floats.
        name: Without effect.

    Raises:
        ValueError: The edges are not in order, or above half the rate.

    TF: `tf.signal.linear_to_mel_weight_matrix`.
    """
    rate = float(np.asarray(sample_rate))
    if num_mel_bins <= 0 or rate <= 0:
        raise ValueError(
            f"num_mel_bins and sample_rate must be positive. Got: {num_mel_bins}, {rate}"
        )
    if not 0 <= lower_edge_hertz < upper_edge_hertz <= rate / 2:
        raise ValueError(
            "Expected 0 <= lower_edge_hertz < upper_edge_hertz <= sample_rate / 2. Received: "
            f"{lower_edge_hertz}, {upper_edge_hertz}, sample_rate={rate}"
        )
    bins = _mel(np.linspace(0.0, rate / 2, num_spectrogram_bins)[1:])[:, None]
    edges = np.linspace(_mel(lower_edge_hertz), _mel(upper_edge_hertz), num_mel_bins + 2)
    lower, center, upper = edges[:-2], edges[1:-1], edges[2:]
    slopes = np.minimum((bins - lower) / (center - lower), (upper - bins) / (upper - center))
    return _samples(np.pad(np.maximum(slopes, 0.0), [(1, 0), (0, 0)]), dtype)


def _mel(hertz: Any) -> Any:
    return 1127.0 * np.log(1.0 + hertz / 700.0)


def mfccs_from_log_mel_spectrograms(
    log_mel_spectrograms: Any, name: str | None = None
) -> jax.Array:
    """Returns the mel-frequency cepstral coefficients of logarithms of mel spectrograms.

    TF: `tf.signal.mfccs_from_log_mel_spectrograms`.
    """
    tensor = convert_to_tensor(log_mel_spectrograms)
    if not tensor.shape[-1]:
        raise ValueError(f"num_mel_bins must be positive. Got: {tensor.shape}")
    return dct(tensor, 2) * tensor.dtype.type(np.sqrt(0.5 / tensor.shape[-1]))
