"""Files behind real servers: S3 (moto), web servers that are sound, and some that are not."""

import functools
import http.server
import threading
import time

import fsspec
import pytest

from unison.data import Dataset, TextLineDataset, TFRecordDataset
from unison.data.files import PATIENCE, TFRecordWriter, matching_files, open_file
from unison.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)

LARGE = bytes(range(251)) * 15_000  # several of the pieces that are read at once


@pytest.fixture(autouse=True)
def little_patience(monkeypatch):
    for name, value in {"tries": 4, "first_wait": 0.01, "seconds": 2.0}.items():
        monkeypatch.setattr(PATIENCE, name, value)


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; `answers` says how the next requests are answered, and then the others."""

    protocol_version = "HTTP/1.1"
    gives_parts = True

    def do_GET(self):
        server = self.server
        server.requests.append((self.command, self.path, self.headers.get("Range")))
        answer = server.answers.pop(0) if server.answers else server.then
        if isinstance(answer, int):
            self.send_error(answer)
        elif answer == "hang up":
            self.close_connection = True
        elif answer == "hang":
            server.released.wait(20)
            self.close_connection = True
        elif self.gives_parts and (wanted := self.headers.get("Range")):
            self.send_part(*wanted.removeprefix("bytes=").split("-"))
        elif self.command == "HEAD":
            super().do_HEAD()
        else:
            super().do_GET()

    def do_HEAD(self):
        self.do_GET()

    def send_part(self, first, last):
        with open(self.translate_path(self.path), "rb") as file:
            contents = file.read()
        part = contents[int(first) : int(last) + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(contents)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(part)

    def log_message(self, *args):
        pass


class WholeFilesHandler(Handler):
    gives_parts = False


@pytest.fixture(params=[Handler], ids=["server"])
def server(request, tmp_path):
    """A web server over `tmp_path`, which is sound as long as nobody says otherwise."""
    handler = functools.partial(request.param, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as made:
        made.daemon_threads = True
        made.answers, made.then, made.requests = [], None, []
        made.released = threading.Event()
        made.url = f"http://127.0.0.1:{made.server_port}"
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield made
        made.released.set()
        made.shutdown()
        thread.join(10)


both_servers = pytest.mark.parametrize(
    "server", [Handler, WholeFilesHandler], ids=["parts", "whole"], indirect=True
)


def records_at(path, count=500, options=None):
    records = [b"%06d" % number * 50 for number in range(count)]
    with TFRecordWriter(path, options) as writer:
        for record in records:
            writer.write(record)
    return records


# -- web servers ------------------------------------------------------------------------------


@both_servers
def test_a_large_file_is_read_from_a_web_server(server, tmp_path):
    (tmp_path / "large").write_bytes(LARGE)
    with open_file(f"{server.url}/large") as file:
        assert file.read(1000) == LARGE[:1000]
        assert file.read() == LARGE[1000:]
        file.seek(2_000_000)
        assert file.read(100) == LARGE[2_000_000:2_000_100]
        file.seek(-7, 2)
        assert file.read() == LARGE[-7:]


@both_servers
def test_records_and_lines_are_read_from_a_web_server(server, tmp_path):
    records = records_at(str(tmp_path / "records"), options="GZIP")
    (tmp_path / "lines").write_bytes(b"a\nb\n")
    assert list(TFRecordDataset(f"{server.url}/records", "GZIP")) == records
    assert list(TextLineDataset(f"{server.url}/lines")) == [b"a", b"b"]


def test_a_web_servers_folder_is_searched_by_pattern(server, tmp_path):
    for name in ("b.txt", "a.txt", "c.csv"):
        (tmp_path / name).write_bytes(name.encode())
    found = matching_files(f"{server.url}/*.txt")
    assert found == [f"{server.url}/{name}".encode() for name in ("a.txt", "b.txt")]
    lines = Dataset.list_files(f"{server.url}/*.txt", shuffle=False).flat_map(TextLineDataset)
    assert list(lines) == [b"a.txt", b"b.txt"]
    with pytest.raises(InvalidArgumentError, match="No files matched pattern"):
        matching_files(f"{server.url}/*.png")


def test_several_files_are_read_at_a_time(server, tmp_path):
    records = [records_at(str(tmp_path / name), 40) for name in "abc"]
    names = [f"{server.url}/{name}" for name in "abc"]
    in_turn = [record for together in zip(*records, strict=True) for record in together]
    assert list(TFRecordDataset(names, num_parallel_reads=3)) == in_turn


def test_reading_goes_on_from_the_byte_where_it_was(server, tmp_path):
    records = records_at(str(tmp_path / "records"), 12_000)
    stream = TFRecordDataset(f"{server.url}/records").plan.stream()
    stream.skip(11_000)
    state = stream.state()
    del server.requests[:]
    restored = TFRecordDataset(f"{server.url}/records").plan.stream()
    restored.restore(state)
    assert [leaves[0] for leaves in iter(restored.next, None)] == records[11_000:]
    starts = [int(part.split("=")[1].split("-")[0]) for _, _, part in server.requests if part]
    assert min(starts) > 3_000_000


# -- servers that fail ------------------------------------------------------------------------


@both_servers
@pytest.mark.parametrize("answer", [500, 503, 429, "hang up"])
def test_what_fails_twice_is_asked_again(answer, server, tmp_path):
    records = records_at(str(tmp_path / "records"))
    # Asking for the size counts as well: a failure is one of both requests.
    server.answers = [answer] * 4
    assert list(TFRecordDataset(f"{server.url}/records")) == records
    assert not server.answers


@both_servers
def test_a_connection_that_breaks_in_the_middle_is_taken_up_again(server, tmp_path):
    (tmp_path / "large").write_bytes(LARGE)
    with open_file(f"{server.url}/large") as file:
        assert file.read(1_200_000) == LARGE[:1_200_000]
        server.answers = ["hang up", 503]
        assert file.read() == LARGE[1_200_000:]


@pytest.mark.parametrize("answer", [503, "hang up"])
def test_a_server_that_always_fails_is_asked_a_few_times(answer, server):
    server.then = answer
    url = f"{server.url}/records"
    with pytest.raises(UnavailableError, match=rf"{url} cannot be read: 4 attempts in .* seconds"):
        list(TFRecordDataset(url))
    # Each attempt asks for the size in two ways; the client may repeat what found nobody.
    assert 4 <= len(server.requests) <= 16


def test_a_server_that_is_not_there_is_asked_a_few_times(server, tmp_path):
    server.shutdown()
    server.server_close()
    with pytest.raises(UnavailableError, match="4 attempts"):
        open_file(f"{server.url}/file")


def test_a_server_that_hangs_is_given_up_in_time(server, monkeypatch):
    monkeypatch.setattr(PATIENCE, "seconds", 0.3)
    monkeypatch.setattr(PATIENCE, "tries", 2)
    server.then = "hang"
    begin = time.monotonic()
    with pytest.raises(DeadlineExceededError, match="2 attempts"):
        list(TextLineDataset(f"{server.url}/file"))
    assert time.monotonic() - begin < 15


def test_a_server_that_hangs_in_the_middle_is_asked_again(server, tmp_path, monkeypatch):
    (tmp_path / "large").write_bytes(LARGE)
    monkeypatch.setattr(PATIENCE, "seconds", 0.5)
    with open_file(f"{server.url}/large") as file:
        file.read(10)
        server.answers = ["hang"]
        assert file.read() == LARGE[10:]


@pytest.mark.parametrize(
    ("answer", "error"),
    [(404, NotFoundError), (403, PermissionDeniedError), (401, PermissionDeniedError)],
)
def test_what_asking_again_does_not_change_is_not_asked_again(answer, error, server):
    server.then = answer
    with pytest.raises(error, match=server.url):
        open_file(f"{server.url}/file")
    assert len(server.requests) <= 2


def test_no_thread_stays_behind(server, tmp_path):
    before = set(threading.enumerate())
    (tmp_path / "large").write_bytes(LARGE)
    iterator = iter(TextLineDataset([f"{server.url}/large"] * 3, num_parallel_reads=3))
    next(iterator)
    del iterator
    deadline = time.monotonic() + 30
    ours = []
    while time.monotonic() < deadline:
        ours = [
            thread
            for thread in set(threading.enumerate()) - before
            if thread.name.startswith("unison")
        ]
        if not ours:
            break
        time.sleep(0.05)
    assert not ours


# -- S3 ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bucket():
    """A bucket of an S3 server."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    patch = pytest.MonkeyPatch()
    patch.setenv("AWS_ACCESS_KEY_ID", "testing")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    fsspec.filesystem("s3").mkdir("examples")
    yield "s3://examples"
    patch.undo()
    server.stop()


def test_records_are_written_to_s3_and_read_from_it(bucket):
    records = records_at(f"{bucket}/records", 12_000)
    dataset = TFRecordDataset(f"{bucket}/records")
    assert list(dataset) == records
    stream = dataset.plan.stream()
    stream.skip(11_990)
    restored = dataset.plan.stream()
    restored.restore(stream.state())
    assert [leaves[0] for leaves in iter(restored.next, None)] == records[11_990:]


def test_a_bucket_is_searched_by_pattern(bucket):
    for name in ("b.txt", "a.txt", "deep/c.txt"):
        with open_file(f"{bucket}/texts/{name}", "wb") as file:
            file.write(name.encode() + b"\n")
    found = matching_files(f"{bucket}/texts/*.txt")
    assert found == [f"{bucket}/texts/{name}".encode() for name in ("a.txt", "b.txt")]
    names = Dataset.list_files(f"{bucket}/texts/**/*.txt", shuffle=False)
    lines = names.interleave(TextLineDataset, cycle_length=3)
    assert list(lines) == [b"a.txt", b"b.txt", b"deep/c.txt"]


def test_an_object_that_is_missing_is_not_found(bucket):
    for path in (f"{bucket}/nothing", "s3://no-such-bucket/file"):
        with pytest.raises(NotFoundError, match=path):
            list(TFRecordDataset(path))
