"""The structural similarity, beside a calculation by NumPy, window by window."""

import numpy as np
import pytest

import unison.tf as tf

RNG = np.random.default_rng(2)
A = RNG.uniform(size=(2, 9, 8, 3)).astype(np.float32)
B = np.clip(A + RNG.normal(0, 0.2, A.shape), 0, 1).astype(np.float32)
SIZE, SIGMA = 5, 1.5


def by_windows(a, b):
    """The mean of the similarities of all windows and channels."""
    distances = np.arange(SIZE) - SIZE // 2
    weights = np.exp(-(distances**2) / (2 * SIGMA**2))
    weights = np.outer(weights, weights)[..., None] / np.outer(weights, weights).sum()
    found = []
    for row in range(a.shape[0] - SIZE + 1):
        for column in range(a.shape[1] - SIZE + 1):
            x, y = (each[row : row + SIZE, column : column + SIZE].astype(float) for each in (a, b))
            mean_x, mean_y = ((weights * each).sum((0, 1)) for each in (x, y))
            variances = (weights * (x**2 + y**2)).sum((0, 1)) - mean_x**2 - mean_y**2
            covariance = (weights * x * y).sum((0, 1)) - mean_x * mean_y
            luminance = (2 * mean_x * mean_y + 1e-4) / (mean_x**2 + mean_y**2 + 1e-4)
            found.append(luminance * (2 * covariance + 9e-4) / (variances + 9e-4))
    return np.mean(found)


def test_of_a_batch():
    expected = [by_windows(a, b) for a, b in zip(A, B, strict=True)]
    found = tf.image.ssim(A, B, 1.0, filter_size=SIZE)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_of_integers_is_that_of_their_range():
    a, b = (np.round(each * 255).astype(np.uint8) for each in (A, B))
    of_floats = tf.image.ssim(a / np.float32(255), b / np.float32(255), 1.0, filter_size=SIZE)
    np.testing.assert_allclose(tf.image.ssim(a, b, 255, filter_size=SIZE), of_floats, rtol=1e-4)


def test_an_image_is_like_itself_at_all_scales():
    similarity = tf.image.ssim_multiscale(A, A, 1.0, power_factors=(0.5, 0.5), filter_size=4)
    np.testing.assert_allclose(similarity, [1.0, 1.0], rtol=1e-5)


def test_one_scale_with_all_the_weight_is_the_similarity_of_each_channel():
    maps = tf.image.ssim(A[..., :1], B[..., :1], 1.0, filter_size=SIZE)
    several = tf.image.ssim_multiscale(
        A[..., :1], B[..., :1], 1.0, power_factors=(1.0,), filter_size=SIZE
    )
    np.testing.assert_allclose(several, maps, rtol=1e-5)


def test_images_that_are_smaller_than_the_filter_are_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match="not smaller than the filter"):
        tf.image.ssim(A, B, 1.0)
