"""Where files are written: links are followed, and nothing but a regular file is replaced."""

import os
import socket

import pytest
from typer.testing import CliRunner

from calibrate.cli import app
from rlxjax._files import Strict, file_to_write, write_json_file


class Content(Strict):
    number: int


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


SPECIAL = {"named pipe": os.mkfifo, "socket": make_socket, "folder": os.mkdir}


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
    assert link.is_symlink()
    assert middle.is_symlink()
    assert not target.is_symlink()
    assert Content.model_validate_json(target.read_text()).number == 7
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "kept",
        "link.json",
        "middle.json",
        "target.json",
    ]


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


def test_a_device_is_refused():
    with pytest.raises(ValueError, match=f"got the device {os.devnull}"):
        file_to_write(os.devnull)


def test_a_path_that_leads_nowhere_is_refused_in_one_line(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    (tmp_path / "file").touch()
    for path in (loop, tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=f"{path}: cannot be written") as refusal:
            write_json_file(Content(number=7), path)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("command", [("calibrate",), ("bench", "--batch", "4", "--contender", "naive")])
def test_a_command_refuses_a_named_pipe_before_it_measures(tmp_path, command):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    result = CliRunner().invoke(app, [*command, "--out", str(pipe)])
    assert result.exit_code == 2
    assert result.stderr.strip().splitlines() == [f"error: expected a file to write, got the named pipe {pipe}"]
    assert list(tmp_path.iterdir()) == [pipe]
