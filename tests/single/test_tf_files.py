"""Files of the face: `tf.io.gfile`, image files, `tf.summary`."""

import builtins
import struct
import sys
import types

import numpy as np
import pytest

import unison.tf as tf

gfile = tf.io.gfile


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path):
    """A new folder, on the disk or in memory."""
    path = str(tmp_path) if request.param == "local" else f"memory://{tmp_path.name}"
    gfile.makedirs(path)
    return path


def test_files_are_written_and_read(folder):
    path = gfile.join(folder, "a.txt")
    with gfile.GFile(path, "w") as file:
        file.write("one\n")
        file.write("two\n")
    with gfile.GFile(path, "a") as file:
        file.write("three\n")
    assert gfile.GFile(path).read() == "one\ntwo\nthree\n"
    assert [line.strip() for line in gfile.GFile(path)] == ["one", "two", "three"]
    with gfile.GFile(path, "rb") as file:
        assert (file.read(3), file.tell(), file.readline()) == (b"one", 3, b"\n")
        file.seek(4)
        assert file.readlines() == [b"two\n", b"three\n"]
    assert (gfile.stat(path).length, gfile.GFile(path).size()) == (14, 14)


def test_folders_are_listed_and_walked(folder):
    gfile.makedirs(gfile.join(folder, "x/y"))
    tf.io.write_file(gfile.join(folder, "x", "1.txt"), "1")
    tf.io.write_file(gfile.join(folder, "x/y/2.txt"), b"2")
    assert gfile.listdir(folder) == ["x"]
    assert gfile.isdir(gfile.join(folder, "x"))
    assert not gfile.isdir(gfile.join(folder, "x/1.txt"))
    assert [(len(folders), files) for _, folders, files in gfile.walk(folder)] == [
        (1, []),
        (1, ["1.txt"]),
        (0, ["2.txt"]),
    ]
    assert next(files for _, _, files in gfile.walk(folder, topdown=False)) == ["2.txt"]
    assert gfile.glob(gfile.join(folder, "x/*.txt")) == [gfile.join(folder, "x/1.txt")]
    assert tf.io.matching_files(gfile.join(folder, "x/y/*")).numpy().tolist() == [
        gfile.join(folder, "x/y/2.txt").encode()
    ]


def test_files_are_copied_moved_and_deleted(folder):
    a, b, c = (gfile.join(folder, name) for name in "abc")
    tf.io.write_file(a, "text")
    gfile.copy(a, b)
    with pytest.raises(tf.errors.AlreadyExistsError):
        gfile.copy(a, b)
    gfile.copy(a, b, overwrite=True)
    gfile.rename(b, c)
    assert (gfile.exists(b), tf.io.read_file(c).numpy()) == (False, b"text")
    with pytest.raises(tf.errors.AlreadyExistsError):
        gfile.rename(a, c)
    gfile.remove(a)
    with pytest.raises(FileNotFoundError):
        gfile.remove(a)
    with pytest.raises(tf.errors.FailedPreconditionError, match="rmtree"):
        gfile.remove(folder)
    gfile.rmtree(folder)
    assert not gfile.exists(c)


def test_a_file_goes_from_one_file_system_to_another(tmp_path):
    tf.io.write_file(str(tmp_path / "a"), "text")
    gfile.copy(tmp_path / "a", "memory://there/a")
    assert gfile.GFile("memory://there/a").read() == "text"


def test_a_folder_is_made_once(tmp_path):
    gfile.mkdir(str(tmp_path / "x"))
    with pytest.raises(tf.errors.AlreadyExistsError):
        gfile.mkdir(str(tmp_path / "x"))
    with pytest.raises(tf.errors.NotFoundError):
        gfile.mkdir(str(tmp_path / "y" / "z"))


def test_a_file_is_used_as_it_was_opened(tmp_path):
    path = str(tmp_path / "a")
    with pytest.raises(tf.errors.PermissionDeniedError, match="reading"):
        gfile.GFile(path, "w").read()
    with pytest.raises(tf.errors.PermissionDeniedError, match="writing"):
        gfile.GFile(path, "r").write("x")
    with pytest.raises(tf.errors.InvalidArgumentError, match="mode"):
        gfile.GFile(path, "x")


def test_paths_may_be_tensors(tmp_path):
    path = tf.strings.join([str(tmp_path), "a"], "/")
    tf.io.write_file(path, tf.constant("text"))
    assert tf.io.read_file(path) == "text"


def test_a_function_that_reads_files_runs_step_by_step(tmp_path):
    path = str(tmp_path / "a")

    @tf.function
    def contents():
        return tf.strings.length(tf.io.read_file(path))

    tf.io.write_file(path, "1")
    first = contents()
    tf.io.write_file(path, "22")
    assert (int(first), int(contents())) == (1, 2)


# -- images --------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_png_file_keeps_every_pixel(channels):
    pixels = np.arange(5 * 4 * channels, dtype=np.uint8).reshape(5, 4, channels)
    file = tf.io.encode_png(pixels)
    assert tf.io.decode_png(file).tolist() == pixels.tolist()
    assert tf.io.decode_image(file).tolist() == pixels.tolist()
    assert tf.io.decode_png(file, dtype=tf.uint16).numpy().max() == int(pixels.max()) * 257


def test_a_jpeg_file_is_close():
    pixels = np.full((16, 16, 3), [200, 100, 50], np.uint8)
    file = tf.io.encode_jpeg(pixels)
    assert bool(tf.io.is_jpeg(file))
    assert tf.io.extract_jpeg_shape(file).tolist() == [16, 16, 3]
    np.testing.assert_allclose(tf.io.decode_jpeg(file), pixels, atol=4)
    assert tf.io.decode_jpeg(file, channels=1).shape == (16, 16, 1)
    assert tf.io.decode_and_crop_jpeg(file, [2, 3, 4, 5]).shape == (4, 5, 3)
    floats = tf.io.decode_image(file, dtype=tf.float32)
    assert 0.0 <= float(tf.reduce_min(floats)) <= float(tf.reduce_max(floats)) <= 1.0


def test_the_size_of_a_gif_file_is_plausible():
    frame = b"," + struct.pack("<HHHH", 0, 0, 1, 1) + b"\0\x02\x02\x44\x01\0"
    head = b"GIF89a" + struct.pack("<HH", 9000, 9000) + b"\x80\0\0\0\0\0\xff\xff\xff"
    with pytest.raises(tf.errors.InvalidArgumentError, match="cannot hold the pixels of its size"):
        tf.io.decode_gif(head + frame + b";")


def test_a_gif_file_has_frames():
    import io

    from PIL import Image

    frames = [Image.new("RGB", (3, 2), colour) for colour in ("red", "blue")]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    assert tf.io.decode_gif(file.getvalue()).shape == (2, 2, 3, 3)
    assert tf.io.decode_image(file.getvalue()).shape == (2, 2, 3, 3)
    assert tf.io.decode_image(file.getvalue(), expand_animations=False).shape == (2, 3, 3)


def test_what_is_no_image_is_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match="They begin with b'text'"):
        tf.io.decode_image(b"text")


def hide(monkeypatch, package):
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == package:
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(builtins, "__import__", without)


def test_without_pillow_the_error_says_what_to_install(monkeypatch):
    hide(monkeypatch, "PIL")
    with pytest.raises(ImportError, match=r"unison\[image\]"):
        tf.io.decode_png(b"")


# -- summaries -----------------------------------------------------------------------------


class Events:
    """Stands for tensorboardX's writer."""

    def __init__(self, folder, **options):
        self.written = []

    def add_scalar(self, tag, value, step):
        self.written.append((tag, value, step))

    def add_histogram(self, tag, values, step, bins):
        self.written.append((tag, len(values), step))

    def add_image(self, tag, image, step, dataformats):
        self.written.append((tag, image.shape, step))

    def add_text(self, tag, text, step):
        self.written.append((tag, text, step))

    def flush(self):
        pass

    def close(self):
        pass


@pytest.fixture
def writer(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=Events))
    return tf.summary.create_file_writer(str(tmp_path))


def test_summaries_go_to_the_default_writer(writer):
    assert tf.summary.scalar("nowhere", 1.0, step=1) is False
    with writer.as_default():
        tf.summary.scalar("loss", tf.constant(0.5), step=tf.Variable(3))
        tf.summary.histogram("weights", [1.0, 2.0], step=3)
        tf.summary.image("images", np.zeros((2, 4, 5, 3)), step=3, max_outputs=1)
        tf.summary.text("note", "text", step=3)
    assert writer._events.written == [
        ("loss", 0.5, 3),
        ("weights", 2, 3),
        ("images/0", (4, 5, 3), 3),
        ("note", "text", 3),
    ]


def test_a_step_may_be_set_for_all(writer):
    with writer.as_default(step=7):
        tf.summary.scalar("loss", 1.0)
    assert writer._events.written == [("loss", 1.0, 7)]
    with writer.as_default(), pytest.raises(ValueError, match="No step set"):
        tf.summary.scalar("loss", 1.0)


def test_summaries_may_be_left_out(writer):
    with writer.as_default(step=1), tf.summary.record_if(False):
        assert tf.summary.scalar("loss", 1.0) is False
    assert writer._events.written == []


def test_the_first_replica_writes_when_the_program_runs(writer):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        tf.summary.scalar("loss", x * 2, step=x)

    with writer.as_default():
        for x in (1, 2):
            strategy.run(step, args=(tf.constant(x),))
        tf.summary.flush()
    assert sorted(writer._events.written) == [("loss", 2.0, 1), ("loss", 4.0, 2)]


def test_without_tensorboardx_the_error_says_what_to_install(monkeypatch, tmp_path):
    hide(monkeypatch, "tensorboardX")
    with pytest.raises(ImportError, match=r"unison\[tensorboard\]"):
        tf.summary.create_file_writer(str(tmp_path))


# -- tables --------------------------------------------------------------------------------


def test_integers_are_looked_up_inside_programs():
    keys = tf.constant([30, 10], tf.int64)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, [3.0, 1.0]), -1.0)
    find = tf.function(table.lookup)
    assert find(tf.constant([10, 20, 30], tf.int64)).tolist() == [1.0, -1.0, 3.0]


def test_a_table_that_changes():
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    table.insert(["a", "b"], [1, 2])
    table.remove(["a"])
    assert table.lookup(["a", "b"]).tolist() == [-1, 2]
    assert int(table.size()) == 1
    assert table.export()[0].numpy().tolist() == [b"b"]


def test_a_key_has_one_value():
    with pytest.raises(tf.errors.FailedPreconditionError, match="different value"):
        tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a", "a"], [1, 2]), 0)
