"""Image files in pipelines: decoded in blocks before what is compiled, as one by one."""

import base64
import io
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import unison.tf as tf
from unison.errors import InvalidArgumentError, NotFoundError
from unison.tf import image, image_files, image_scaling, pending
from unison.tf.image_scaling import (
    PixelFunction,
    scaled_by_numpy,
    scaled_on_host,
    scaling_terms,
)

Image = pytest.importorskip("PIL.Image")

#: A JPEG file of 16 x 20 pixels, with colours of half the resolution.
FILE = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAYEBQYFBAYGBQYHBwYIChAKCgkJChQODwwQFxQYGBcUFhYaHSUfGhsjHBYW"
    "ICwgIyYnKSopGR8tMC0oMCUoKSj/2wBDAQcHBwoIChMKChMoGhYaKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgo"
    "KCgoKCgoKCgoKCgoKCgoKCgoKCj/wAARCAAQABQDASIAAhEBAxEB/8QAFwAAAwEAAAAAAAAAAAAAAAAAAAQFBv/EACEQ"
    "AAEDBAIDAQAAAAAAAAAAAAECAwQABQYREiETFCNB/8QAFgEBAQEAAAAAAAAAAAAAAAAABQIE/8QAJBEAAAUCBQUAAAAA"
    "AAAAAAAAAAECAxIEEQUGITFhFEFDUXH/2gAMAwEAAhEDEQA/AL1pvLNkhSG4qw/5EkHid6pPBL0Icia64NFZJ0am4XiT"
    "tiZkKlPqf5Drl3Samj7qg2eIKvys2YWah5zVEUl393BjaG6hCSS5A2/Jbe/A1kjMPsrTO+6Knt29BQCQN0UcWQJFKO/I"
    "nrMfLRKrl8If/9k="
)


@pytest.mark.parametrize(
    ("options", "shape", "total"),
    [
        ({}, (16, 20, 3), 121943),
        ({"dct_method": "INTEGER_FAST", "channels": 3}, (16, 20, 3), 121943),
        ({"dct_method": "INTEGER_ACCURATE"}, (16, 20, 3), 122742),
        ({"fancy_upscaling": False}, (16, 20, 3), 121906),
        ({"channels": 1}, (16, 20, 1), 43736),
    ],
)
def test_pixels_of_a_jpeg_file_are_those_of_tensorflow(options, shape, total):
    pytest.importorskip("simplejpeg")
    pixels = tf.io.decode_jpeg(FILE, **options).numpy()
    assert (pixels.shape, pixels.dtype) == (shape, np.uint8)
    assert pixels.astype(int).sum() == total  # TensorFlow 2.21


@pytest.mark.parametrize("decode", [tf.io.decode_image, tf.io.decode_png])
def test_other_operations_decode_jpeg_files_likewise(decode):
    pytest.importorskip("simplejpeg")
    assert decode(FILE).numpy().astype(int).sum() == 121943  # TensorFlow 2.21


def test_a_method_that_does_not_exist():
    with pytest.raises(InvalidArgumentError, match=r"'INTEGER_FAST'.*Received: 'FLOAT'"):
        tf.io.decode_jpeg(FILE, dct_method="FLOAT")


def files_of(sizes, kind="JPEG"):
    random = np.random.default_rng(1)
    files = []
    for height, width in sizes:
        coarse = Image.fromarray(random.integers(0, 256, (5, 4, 3), np.uint8))
        file = io.BytesIO()
        coarse.resize((width, height)).save(file, kind)
        files.append(file.getvalue())
    return files


SAME = files_of([(12, 10)] * 9)
SEVERAL = files_of([(12 + number, 30 - 2 * number) for number in range(9)])


class Counted:
    """A function, and how often Python has called it."""

    def __init__(self, function):
        self._function = function
        self.calls = 0

    def __call__(self, *args):
        self.calls += 1
        return self._function(*args)


def cut(file):
    image = tf.io.decode_jpeg(file, channels=3)
    return tf.cast(image[2:10, :8], tf.float32) / 255.0


def shrunk(file):
    image = tf.image.convert_image_dtype(tf.io.decode_jpeg(file, channels=3), tf.float32)
    return tf.image.resize(image, [8, 7])


def normalized(file):
    image = tf.cast(tf.image.decode_image(file, expand_animations=False), tf.float32)
    image.set_shape([None, None, 3])
    return tf.image.resize(1.0 - (image / 127.5 - 1.0) * 2.0, (9, 11), "nearest")


def enlarged(file):
    image = tf.ensure_shape(tf.io.decode_jpeg(file), [None, None, 3])
    return tf.image.resize(image, [33, 40], "bicubic") * 0.5


def averaged(file):
    return tf.image.resize(tf.io.decode_jpeg(file, channels=1), [5, 4], antialias=True)


@pytest.mark.parametrize("threads", [None, 2])
@pytest.mark.parametrize(
    ("function", "files"),
    [
        (cut, SAME),
        (shrunk, SAME),
        (shrunk, SEVERAL),
        (normalized, SEVERAL),
        (enlarged, SEVERAL),
        (averaged, SEVERAL),
    ],
)
def test_blocks_of_images_are_what_the_function_makes_of_each(function, files, threads):
    counted = Counted(function)
    dataset = tf.data.Dataset.from_tensor_slices(files).map(counted, num_parallel_calls=threads)
    batches = [batch.numpy() for batch in dataset.batch(4)]
    # What a program computes of a block is rounded otherwise than operations one by one.
    expected = np.stack([function(file).numpy() for file in files])
    np.testing.assert_allclose(np.concatenate(batches), expected, rtol=2e-6, atol=2e-4)
    assert counted.calls < len(files)


def test_images_of_several_sizes_are_elements_of_several_shapes():
    dataset = tf.data.Dataset.from_tensor_slices(SEVERAL).map(tf.io.decode_jpeg)
    shapes = [image.shape for image in dataset]
    assert shapes == [(12 + number, 30 - 2 * number, 3) for number in range(9)]


def test_labels_and_random_changes_beside_images():
    def changed(file, label):
        image = tf.image.resize(tf.io.decode_jpeg(file, channels=3), [6, 6])
        return tf.image.random_flip_left_right(image), label + 1

    tf.random.set_seed(3)
    dataset = tf.data.Dataset.from_tensor_slices((SEVERAL, np.arange(9))).map(changed)
    (batch,) = dataset.batch(9)
    assert batch[1].numpy().tolist() == list(range(1, 10))
    plain = np.stack([tf.image.resize(tf.io.decode_jpeg(file), [6, 6]) for file in SEVERAL])
    flipped = plain[:, :, ::-1]
    are = [np.allclose(ours, one, atol=1e-3) for ours, one in zip(batch[0], plain, strict=True)]
    turned = [np.allclose(a, b, atol=1e-3) for a, b in zip(batch[0], flipped, strict=True)]
    assert all(a != b for a, b in zip(are, turned, strict=True))
    assert len({*are}) == 2


def test_files_are_read_and_their_paths_kept(tmp_path):
    for number, file in enumerate(SEVERAL):
        (tmp_path / f"{number}.jpg").write_bytes(file)
    counted = Counted(lambda path: (shrunk(tf.io.read_file(path)), path))
    dataset = tf.data.Dataset.list_files(f"{tmp_path}/*.jpg", shuffle=False).map(counted)
    ((images, paths),) = dataset.batch(9)
    expected = np.stack([shrunk(file) for file in SEVERAL])
    np.testing.assert_allclose(images.numpy(), expected, atol=1e-6)
    assert paths.numpy()[0].endswith(b"/0.jpg")
    assert counted.calls < len(SEVERAL)


def test_images_in_records():
    pytest.importorskip("google.protobuf")
    examples = [
        tf.train.Example(
            features=tf.train.Features(
                feature={
                    "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[file])),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
                }
            )
        ).SerializeToString()
        for number, file in enumerate(SEVERAL)
    ]
    features = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }

    def parsed(record):
        example = tf.io.parse_single_example(record, features)
        return shrunk(example["image"]), example["label"]

    counted = Counted(parsed)
    ((images, labels),) = tf.data.Dataset.from_tensor_slices(examples).map(counted).batch(9)
    np.testing.assert_allclose(images, np.stack([shrunk(f) for f in SEVERAL]), atol=1e-6)
    assert labels.numpy().tolist() == list(range(9))
    assert counted.calls < len(SEVERAL)


def test_a_corrupt_file_is_named_by_its_element():
    files = [*SEVERAL[:5], b"no image", *SEVERAL[5:]]
    dataset = tf.data.Dataset.from_tensor_slices(files).map(shrunk).batch(4)
    with pytest.raises(InvalidArgumentError, match="element 5") as caught:
        list(dataset)
    assert "They begin with b'no image'" in f"{caught.value} {caught.value.__notes__}"


def test_a_missing_file_is_not_found(tmp_path):
    paths = [f"{tmp_path}/none.jpg"]
    with pytest.raises(NotFoundError, match=r"none\.jpg"):
        list(tf.data.Dataset.from_tensor_slices(paths).map(tf.io.read_file))


def test_large_rows_are_not_computed_far_ahead():
    calls = []

    def large(file):
        image = tf.image.resize(tf.io.decode_jpeg(file, channels=3), [900, 900])
        calls.append(file)
        return image

    files = files_of([(4, 4)] * 40)
    dataset = tf.data.Dataset.from_tensor_slices(files).map(large)
    taken = iter(dataset)
    sizes = [next(taken).nbytes for _ in range(3)]
    assert sizes == [900 * 900 * 3 * 4] * 3


def test_blocks_are_not_tried_for_ever_where_sizes_differ(monkeypatch):
    counted = Counted(lambda file: tf.image.flip_left_right(tf.io.decode_jpeg(file, channels=3)))
    dataset = tf.data.Dataset.from_tensor_slices(SEVERAL * 4).map(counted).padded_batch(3)
    assert sum(len(batch) for batch in dataset) == 36
    blocks = []
    stack = pending._Stack
    monkeypatch.setattr(pending, "_Stack", lambda count: blocks.append(1) or stack(count))
    assert sum(len(batch) for batch in dataset) == 36
    assert not blocks


@pytest.mark.parametrize(
    "function",
    [
        lambda image: tf.cast(image == 255, tf.int32),
        lambda image: -(tf.cast(image, tf.float32) ** 2),
        lambda image: tf.cast(image > 3, tf.int32) + tf.shape(image)[0],
        lambda image: 7.0 / (tf.cast(image, tf.float32) + 1.0) % 2.0,
        lambda image: tf.stack(list(tf.cast(image, tf.float32))),
        lambda image: jnp.sum(image, axis=(0, 1)),
        lambda image: image if tf.reduce_sum(tf.cast(image, tf.int32)) > 90_000 else 255 - image,
        lambda image: tf.cast(image, tf.float16) / 255 + tf.constant(1.0, tf.float16),
    ],
)
def test_pixels_are_what_any_operation_takes(function):
    dataset = tf.data.Dataset.from_tensor_slices(SAME)
    (batch,) = dataset.map(lambda file: function(tf.io.decode_jpeg(file))).batch(9)
    expected = np.stack([function(tf.io.decode_jpeg(file)) for file in SAME])
    np.testing.assert_allclose(batch, expected, rtol=1e-3, atol=1e-6)
    assert batch.dtype == expected.dtype


def test_a_file_is_decoded_once(monkeypatch):
    decoded = []
    pixels = image_files._jpeg_pixels
    monkeypatch.setattr(
        image_files, "_jpeg_pixels", lambda *args: decoded.append(1) or pixels(*args)
    )

    def function(file):
        image = tf.cast(tf.io.decode_jpeg(file), tf.float32)
        return image[:3] + image[3:6], tf.shape(image), image / 255.0

    list(tf.data.Dataset.from_tensor_slices(SAME).map(function).batch(9))
    traces = 3  # with a sample, to know what comes out of it
    assert len(SAME) <= len(decoded) <= len(SAME) + traces


@pytest.mark.parametrize("method", ["bilinear", "bicubic", "lanczos3", "area", "nearest"])
@pytest.mark.parametrize("size", [(40, 33), (7, 9), (29, 64), (2, 3)])
@pytest.mark.parametrize("antialias", [False, True])
def test_every_way_to_resize_gives_the_same(monkeypatch, method, size, antialias):
    images = np.random.default_rng(2).random((2, 29, 64, 3), np.float32)

    def resized(given):
        return np.asarray(image._resized(given, *size, tf.image.ResizeMethod(method), antialias))

    by_terms = resized(jnp.asarray(images))
    on_host = np.stack([resized(each) for each in images])
    monkeypatch.setattr(image, "_is_for_cpu", lambda: False)
    by_products = resized(jnp.asarray(images))
    np.testing.assert_allclose(by_terms, by_products, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(on_host, by_products, rtol=1e-5, atol=1e-6)


def test_the_frames_of_an_animation_are_resized_each():
    random = np.random.default_rng(4)
    frames = [Image.fromarray(random.integers(0, 256, (8, 16, 3), np.uint8)) for _ in range(9)]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])

    def resized(content):
        return tf.image.resize(tf.io.decode_image(content), [40, 5])

    (batch,) = tf.data.Dataset.from_tensor_slices([file.getvalue()] * 2).map(resized).batch(2)
    expected = np.stack([resized(file.getvalue())] * 2)
    assert expected.shape == (2, 9, 40, 5, 3)
    np.testing.assert_allclose(batch, expected, rtol=1e-5, atol=1e-3)


def test_grey_pixels_of_16_bits_become_colours():
    pixels = np.array([[0, 256, 65535], [40000, 5, 300]], np.uint16)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    colours = tf.io.decode_png(file.getvalue(), channels=3).numpy()
    assert (colours == (pixels >> 8)[..., None]).all()  # as in TensorFlow
    deep = tf.io.decode_png(file.getvalue(), channels=4, dtype=tf.uint16).numpy()
    assert (deep[..., :3] == pixels[..., None]).all()
    assert (deep[..., 3] == 65535).all()


def test_pixels_as_floats_are_those_of_the_bytes():
    pytest.importorskip("simplejpeg")
    floats = tf.io.decode_image(FILE, dtype=tf.float32).numpy()
    np.testing.assert_array_equal(floats, tf.io.decode_image(FILE).numpy().astype("f4") / 255)


def test_draws_do_not_depend_on_the_batches_that_images_are_in():
    def drawn(size, files, function):
        tf.random.set_seed(3)
        dataset = tf.data.Dataset.from_tensor_slices(files).map(function)
        return np.concatenate([*dataset.batch(size)]).tolist()

    def of_any(file):
        image = tf.cast(tf.io.decode_jpeg(file), tf.float32)
        return tf.random.uniform([]) + 0.0 * tf.reduce_mean(image)

    def of_one(file):
        image = tf.io.decode_jpeg(file)
        image.set_shape([12, 10, 3])
        return tf.random.uniform([]) + 0.0 * tf.reduce_mean(tf.cast(image, tf.float32))

    for files, function in ((SAME[:4] + SEVERAL[:4], of_any), (SAME, of_one)):
        assert drawn(1, files, function) == drawn(3, files, function)
    # An element's draws depend on its number only.
    assert drawn(2, SAME[:4] + SEVERAL[:4], of_any) == drawn(4, SEVERAL[:8], of_any)
    counted = Counted(of_any)
    drawn(3, SAME, counted)
    assert counted.calls < len(SAME)


def test_an_image_that_may_have_frames_has_no_known_shape():
    ranks = []

    def function(file):
        ranks.append(tf.io.decode_image(file).shape.rank)
        ranks.append(tf.io.decode_image(file, expand_animations=False).shape.rank)
        return tf.image.resize(tf.io.decode_image(file), [4, 4])

    (batch,) = tf.data.Dataset.from_tensor_slices(SAME).map(function).batch(9)
    assert batch.shape == (9, 4, 4, 3)
    assert ranks[:2] == [None, 3]


def test_resized_images_are_float32():
    images = np.ones((1, 64, 64, 3))
    for size in ([8, 8], [64, 64], [63, 2]):
        assert tf.image.resize(tf.constant(images, tf.float64), size).dtype == np.float32
    with jax.default_device("cpu"):
        assert tf.image.resize(images, [8, 8]).shape == (1, 8, 8, 3)


def test_threads_of_a_map_end_with_the_block():
    dataset = tf.data.Dataset.from_tensor_slices(SEVERAL).map(shrunk, num_parallel_calls=4)
    assert sum(len(batch) for batch in dataset.batch(4)) == 9
    assert not [t for t in threading.enumerate() if t.name.startswith("unison-data-map")]


def test_an_image_that_is_much_smaller_is_a_product_of_matrices():
    few = scaling_terms(4000, 100, "bilinear", False)
    assert few.places.shape == (100, 2)
    assert scaling_terms(4000, 100, "lanczos5", True) is None
    image = np.random.default_rng(5).random((400, 300, 3), np.float32)
    resized = tf.image.resize(image, [4, 5], "lanczos5", antialias=True)
    text = jax.jit(lambda x: tf.image.resize(x, [4, 5], "lanczos5", antialias=True)).lower(image)
    assert text.as_text().count("stablehlo.dot_general") == 2
    assert resized.shape == (4, 5, 3)


@pytest.mark.skipif(shutil.which("c++") is None, reason="the library needs a C++ compiler")
def test_the_compiled_library_is_used():
    assert image_scaling.library() is not None


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "float64", "float16"])
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
def test_images_are_scaled_alike_with_and_without_a_compiler(channels, dtype):
    rng = np.random.default_rng(channels)
    for method in ("bilinear", "bicubic", "lanczos3", "area", "gaussian"):
        for (height, width), (rows, columns), antialias in [
            ((97, 64), (40, 150), False),
            ((64, 131), (70, 30), True),
            ((80, 80), (1, 81), False),
        ]:
            # A part of a larger image: neither its rows nor its values lie side by side.
            image = rng.integers(0, 255, (height + 2, 2 * width, channels)).astype(dtype)[1:-1, ::2]
            down = scaling_terms(height, rows, method, antialias)
            across = scaling_terms(width, columns, method, antialias)
            if down is not None and across is not None:
                found = scaled_on_host(image, down, across)
                assert found.dtype == np.float32
                np.testing.assert_array_equal(found, scaled_by_numpy(image, down, across))


def test_functions_of_pixels_are_computed_alike_with_and_without_a_compiler():
    functions = [
        PixelFunction("multiply", 1 / 255),
        PixelFunction("subtract", 0.4, is_first=True),
        PixelFunction("divide", 0.3),
        PixelFunction("subtract", 1e-3),
        PixelFunction("add", 0.7, is_first=True),
    ]
    rng = np.random.default_rng(0)
    down, across = scaling_terms(90, 40, "bilinear", False), scaling_terms(64, 70, "area", False)
    for dtype in ("uint8", "uint16", "float32"):
        image = rng.integers(0, 255, (90, 64, 3)).astype(dtype)
        before = image.copy()
        expected = scaled_by_numpy(image, down, across, functions)
        np.testing.assert_array_equal(scaled_on_host(image, down, across, functions), expected)
        np.testing.assert_array_equal(image, before)


@pytest.mark.parametrize("size", [[20, 24], [16, 20]], ids=["another size", "the file's"])
@pytest.mark.parametrize("method", ["bilinear", "nearest", "lanczos5"])
@pytest.mark.parametrize(
    "change",
    [
        lambda pixels: tf.cast(pixels, tf.float32) / 127.5 - 1,
        lambda pixels: 3 - 2 * tf.cast(pixels, tf.float32),
        lambda pixels: tf.cast(tf.cast(pixels, tf.float16) * 0.1, tf.float32) + 1,
        lambda pixels: tf.cast(pixels, tf.float16) + 1,
        lambda pixels: tf.cast(tf.cast(pixels, tf.float32) * 0.1, tf.float16),
        lambda pixels: tf.image.convert_image_dtype(pixels, tf.float32),
        lambda pixels: pixels,
    ],
    ids=["scaled", "from a number", "after half", "half", "to half", "converted", "bytes"],
)
def test_pixels_that_are_changed_before_they_are_resized(change, method, size):
    def function(file):
        return tf.image.resize(change(tf.io.decode_jpeg(file)), size, method)

    (found,) = tf.data.Dataset.from_tensor_slices([FILE]).map(function)
    expected = function(tf.constant(FILE))
    assert found.dtype == expected.dtype
    found, expected = np.asarray(found), np.asarray(expected)
    # A pixel is a sum of some with weights of both signs: round-off is that of the largest.
    largest = max(1, float(np.abs(expected).max()))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * largest)


@pytest.mark.parametrize("number", [0.0, -0.0, np.float64(1 / 255), 7, True, float("nan")])
def test_a_number_is_computed_with_as_numpy_does(number):
    image, terms = np.ones((40, 40, 3), np.uint8), scaling_terms(40, 20, "bilinear", False)
    for first in (False, True):
        functions = [PixelFunction("subtract", 0.5), PixelFunction("multiply", number, first)]
        functions += [] if first else [PixelFunction("divide", number)]
        expected = scaled_by_numpy(image, terms, terms, functions)
        np.testing.assert_allclose(
            scaled_on_host(image, terms, terms, functions), expected, rtol=2e-7
        )


def test_what_is_not_finite_is_scaled_alike_with_and_without_a_compiler():
    image = np.zeros((40, 40, 3), np.float32)
    image[3, 5], image[20, 7], image[30] = np.nan, np.inf, -0.0
    down, across = scaling_terms(40, 17, "bilinear", False), scaling_terms(40, 61, "bicubic", False)
    with np.errstate(invalid="ignore"):
        expected = scaled_by_numpy(image, down, across)
    np.testing.assert_array_equal(scaled_on_host(image, down, across), expected)
