"""Where files are written and read: links are followed, and nothing but a regular file is replaced or waited for."""

import errno
import fcntl
import gzip
import os
import socket
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from _campaigns import ToySuite
from test_decisions import decision
from typer.testing import CliRunner

import rlxjax as rx
from calibrate.cli import app
from calibrate.report.advice import read_advice
from calibrate.samples import Micro, SampleLog, read_samples
from rlxjax import _files
from rlxjax._files import LOCK_NAME, Strict, file_to_write, locked, read_json, set_aside, write_json_file
from rlxjax.calibration import read_calibration_file
from rlxjax.choices import Memory
from rlxjax.models import FFT


class Content(Strict):
    number: int


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


SPECIAL = {"named pipe": os.mkfifo, "socket": make_socket, "folder": os.mkdir}


def test_a_name_that_ends_in_gz_is_written_as_it_is_read(tmp_path):
    for name in ("c.json", "c.json.gz"):
        path = tmp_path / name
        rx.learned.save_learned_fft(rx.learned.LearnedFft.exact(16), path)
        assert rx.learned.load_learned_fft(path).n_fft == 16
        assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")


@pytest.mark.parametrize("exists", [True, False])
def test_writing_to_a_link_writes_its_target_and_keeps_the_link(tmp_path, exists):
    folder = tmp_path / "kept"
    folder.mkdir()
    target, middle, link = folder / "target.json", tmp_path / "middle.json", tmp_path / "link.json"
    middle.symlink_to("kept/target.json")
    link.symlink_to(middle)
    if exists:
        target.write_text("old")
    write_json_file(Content(number=7), link)
    assert [path.is_symlink() for path in (link, middle, target)] == [True, True, False]
    assert Content.model_validate_json(target.read_text()).number == 7
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["kept", "link.json", "middle.json", "target.json"]


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("by_link", [False, True])
def test_what_is_no_regular_file_is_left_alone(tmp_path, monkeypatch, kind, by_link):
    monkeypatch.chdir(tmp_path)  # the path of a socket may not be long
    SPECIAL[kind]("it")
    os.symlink("it", "link")
    path = "link" if by_link else "it"
    before = os.lstat("it")
    with pytest.raises(ValueError, match=f"expected a file to write, got the {kind} {path}"):
        write_json_file(Content(number=7), path)
    assert os.lstat("it").st_ino == before.st_ino
    assert sorted(os.listdir()) == ["it", "link"]


def test_a_path_that_leads_nowhere_or_to_a_device_is_refused_in_one_line(tmp_path):
    with pytest.raises(ValueError, match=f"got the device {os.devnull}"):
        file_to_write(os.devnull)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    (tmp_path / "file").touch()
    for path in (loop, tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=f"{path}: cannot be written") as refusal:
            write_json_file(Content(number=7), path)
        assert "\n" not in str(refusal.value)


def test_a_command_refuses_a_named_pipe_before_it_measures(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    result = CliRunner().invoke(app, ["calibrate", "--out", str(pipe)])
    assert result.exit_code == 2
    assert result.stderr.strip().splitlines() == [f"error: expected a file to write, got the named pipe {pipe}"]
    assert list(tmp_path.iterdir()) == [pipe]


READERS = {
    "calibration": read_calibration_file,
    "learned FFT": rx.learned.load_learned_fft,
    "timings": lambda path: rx.Timings.of(FFT, path),
    "samples": read_samples,
    "advice": read_advice,
}


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_or_too_large_is_refused_at_once_by_each_reader(reader, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind, make in SPECIAL.items():
        make(kind)
    places = {kind: Path(kind) for kind in SPECIAL} | {"device": Path("/dev/zero")}
    for kind, path in places.items():
        with pytest.raises(ValueError, match=f"{path}: expected a file, got a {kind}") as refusal:
            READERS[reader](path)
        assert "\n" not in str(refusal.value)
    monkeypatch.setattr(_files, "MOST_BYTES", 1000)
    for name, content in (("large", bytes(1001)), ("bomb.gz", gzip.compress(bytes(100_000)))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}: expected at most 1 kB, got more"):
            READERS[reader](tmp_path / name)


def test_a_key_that_comes_twice_is_refused_at_any_depth(tmp_path):
    path = tmp_path / "a.json"
    for text, key in (('{"a": 1, "a": 1}', "a"), ('{"a": [{"b": {"c": 1, "d": 2, "c": 1}}]}', "c")):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"the key '{key}' comes twice"):
            read_json(path, None, ValueError, "mend", "one")


def test_files_are_put_aside_at_once_by_many_and_none_is_lost(tmp_path):
    path, texts = tmp_path / "a", [str(number) for number in range(60)]
    gate = threading.Barrier(6)

    def put(own):
        for text in own:
            gate.wait()
            (tmp_path / f"new {text}").write_text(text)
            try:
                os.link(tmp_path / f"new {text}", path)  # only if there is none
            except FileExistsError:
                (tmp_path / f"kept {text}").write_text(text)
            set_aside(path)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(put, [texts[place::6] for place in range(6)]))
    found = [one.read_text() for name in ("a.*", "kept *") for one in tmp_path.glob(name)]
    assert sorted(found) == sorted(texts)
    assert not path.exists()


def test_a_folder_is_locked_for_one_writer_at_a_time_who_may_lock_it_again(tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "LOCK_WAIT_S", 0.1)
    (tmp_path / LOCK_NAME).write_text("1\nhere\n")  # of one that was killed

    def other():
        with locked(tmp_path / "b.json"):
            raise AssertionError("two at once")

    def job():
        return CliRunner().invoke(app, ["calibrate", "--budget", "60", "--out", str(tmp_path / "a.json")])

    with ThreadPoolExecutor(1) as pool:
        with locked(tmp_path / "a.json"), locked(tmp_path / "b.json"):
            with pytest.raises(
                ValueError, match=f"{tmp_path}: process {os.getpid()} of .* measures for this folder or"
            ):
                pool.submit(other).result()
            refused = pool.submit(job).result()
            assert refused.exit_code == 2
            assert f"process {os.getpid()} of {socket.gethostname()} measures for this folder" in refused.stderr
            with locked(tmp_path / "other" / "a.json"):
                pass
        with pytest.raises(AssertionError, match="two at once"):
            pool.submit(other).result()
    assert list(tmp_path.iterdir()) == [tmp_path / "other"]
    monkeypatch.undo()
    counts = []

    def count():
        with locked(tmp_path / "a.json"):
            counts.append(len(counts) + 1)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: count(), range(20)))
    assert counts == list(range(1, 21))


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_where_a_file_system_has_no_locks_a_file_says_who_holds_it(code, tmp_path, monkeypatch):
    def none(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", none)
    monkeypatch.setattr(_files, "LOCK_WAIT_S", 0.1)
    held = tmp_path / f"{LOCK_NAME}.held"

    def refused(holder):
        with pytest.raises(ValueError, match=f"{holder} measures .* if that process was killed, remove {held}$"):
            locked(tmp_path / "b.json").__enter__()

    with ThreadPoolExecutor(1) as pool, locked(tmp_path / "a.json"), locked(tmp_path / "b.json"):
        pool.submit(refused, f"process {os.getpid()} of {socket.gethostname()}").result()
    assert list(tmp_path.iterdir()) == []
    ended = subprocess.Popen(["true"])
    ended.wait()
    held.write_text(f"{ended.pid}\n{socket.gethostname()}\n")  # of one that was killed here
    with locked(tmp_path / "a.json"):
        pass
    for text, holder in ((f"{ended.pid}\nelsewhere\n", f"process {ended.pid} of elsewhere"), ("", "another process")):
        held.write_text(text)
        refused(holder)


def test_a_lock_is_free_once_its_process_is_killed(tmp_path):
    hold = "import sys, rlxjax._files as f\nwith f.locked(sys.argv[1]): print(flush=True), input()"
    command = [sys.executable, "-c", hold, tmp_path / "a.json"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        holder.kill()
    with locked(tmp_path / "a.json"):
        pass


def test_a_new_file_has_the_permissions_that_the_umask_leaves_and_a_replaced_one_keeps_its_own(tmp_path):
    def table(path):
        rx.Timings.checked(FFT, variant="fft", batch=[8], n_fft=[64], time_ns=[1e5]).to_parquet(path)

    def samples(path):
        with SampleLog.new(ToySuite(), "toy").kept_in(path, append=False):
            pass

    writers = {
        "a.json": lambda path: write_json_file(Content(number=7), path),
        "model.json": lambda path: rx.learned.save_learned_fft(rx.learned.LearnedFft.exact(16), path),
        "timings.parquet": table,
        "samples.jsonl": samples,
        "memory.json": lambda path: Memory(path.parent).keep(decision(key="memory")),
    }
    for umask in (0o077, 0o002, 0o027):
        before = os.umask(umask)
        try:
            for name, write in writers.items():
                path = tmp_path / f"{umask:o}" / name
                write(path)
                assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask, name
                for mode in (0o600, 0o640, 0o666):
                    path.chmod(mode)
                    write(path)
                    aside = set_aside(path)
                    assert stat.S_IMODE(aside.stat().st_mode) == (0o666 & ~umask if name == "samples.jsonl" else mode)
                    aside.rename(path)
        finally:
            os.umask(before)


def test_a_file_of_any_name_that_the_system_takes_is_written(tmp_path):
    for name in ("n" * 255, "é" * 127, "-", " ", ".hidden", "a\nb", "%s"):
        write_json_file(Content(number=7), tmp_path / name)
        assert Content.model_validate_json((tmp_path / name).read_text()).number == 7
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize("existed", [True, False])
def test_a_write_that_fails_names_the_file_and_leaves_the_old_one_whole_and_nothing_else(
    existed, tmp_path, monkeypatch
):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "a.json"
    for step in ("replace", "fsync"):
        if existed:
            path.write_text("the old file")
        with monkeypatch.context() as patched:
            patched.setattr(os, step, full)
            with pytest.raises(OSError, match=f"{path}: cannot be written .No space left on device.$"):
                write_json_file(Content(number=7), path)
        assert [*tmp_path.iterdir()] == [path] * existed
        assert not existed or path.read_text() == "the old file"
    log = SampleLog.new(ToySuite(), "toy")
    full = pytest.raises(OSError, match="^/dev/full: cannot be written .No space left on device.$")
    with log.kept_in(Path("/dev/full"), append=True), full:
        log.keep(Micro(name="launch", time_ns=1.0))
