"""The folder of an elastic job: who may use it, what is secret, and what remains."""

import json
import re
import shutil
import stat

import pytest

from unison.errors import UnavailableError
from unison.runtime.launching import Guard, JobFolder, ProcessWorker, Program


def test_one_job_is_run_by_one_process(tmp_path):
    with (
        JobFolder(str(tmp_path)),
        pytest.raises(UnavailableError, match="Another `unison run` runs the job"),
        JobFolder(str(tmp_path)),
    ):
        pass
    with JobFolder(str(tmp_path)):
        pass


def test_the_workers_of_an_earlier_run_are_awaited(tmp_path):
    waited = []
    with JobFolder(str(tmp_path)) as folder, Guard(60.0, [folder.workers_lock]) as guard:
        sleeping = Program(["-c", "import time; time.sleep(600)"], {})
        worker = ProcessWorker(0, sleeping, lambda *line: None, guard)
    try:
        late = JobFolder(str(tmp_path), patience=0.3, on_wait=lambda: waited.append(1))
        with pytest.raises(UnavailableError, match=r"have not ended within 0.3 s"), late:
            pass
    finally:
        worker.signal(9)
        worker.close()
    with JobFolder(str(tmp_path), patience=10.0):
        pass
    assert waited == [1]


def test_the_secret_is_its_owners_and_stays(tmp_path):
    with JobFolder(str(tmp_path / "job")) as folder:
        token = folder.token()
        assert re.fullmatch("[0-9a-f]{32}", token)
        assert stat.S_IMODE((folder.path / "token").stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    with JobFolder(str(tmp_path / "job")) as folder:
        assert folder.token() == token


@pytest.mark.parametrize(
    ("mode", "content", "said"),
    [(0o644, "x", "0644"), (0o600, "", "empty"), (0o600, "../x", "hexadecimal digits")],
)
def test_a_secret_that_is_none_is_refused(tmp_path, mode, content, said):
    (tmp_path / "token").write_text(content)
    (tmp_path / "token").chmod(mode)
    with (
        JobFolder(str(tmp_path)) as folder,
        pytest.raises(UnavailableError, match=f"{said}.*Remove it"),
    ):
        folder.token()


def test_what_happens_is_written_down_a_line_each(tmp_path):
    for worker in range(2):
        with JobFolder(str(tmp_path)) as folder:
            folder.note({"event": "started", "worker": worker})
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["worker"] for line in lines] == [0, 1]


def test_a_folder_that_nobody_gave_goes_unless_the_job_can_go_on():
    with JobFolder(None) as folder:
        folder.token()
    assert not folder.path.exists()
    with JobFolder(None) as kept:
        (kept.path / "state").write_text("of step 3")
    assert kept.has_state
    shutil.rmtree(kept.path)


def test_a_job_that_is_done_begins_anew(tmp_path):
    with JobFolder(str(tmp_path)) as folder:
        (tmp_path / "state").write_text("of step 3")
        (tmp_path / "state-1-2-abc-0").write_text("a worker's part of it")
        assert folder.has_state
        folder.forget_state()
        folder.forget_state()
        assert not folder.has_state
        assert not list(tmp_path.glob("state*"))


def test_what_the_job_has_not_written_stays_when_it_is_done(tmp_path):
    for name in ("statement.pdf", "state-of-the-art.md", "state-1-2"):
        (tmp_path / name).write_text("somebody's")
    with JobFolder(str(tmp_path)) as folder:
        folder.forget_state()
    assert len(list(tmp_path.glob("state*"))) == 3


def test_a_folder_that_cannot_be_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UnavailableError, match=r"Cannot keep a job in .*Give another --folder"),
        JobFolder(str(tmp_path / "file" / "job")),
    ):
        pass
