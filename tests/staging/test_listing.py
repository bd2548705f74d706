from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hpc_train.errors import UserError
from hpc_train.staging.listing import list_folders
from tests.programs import run


def folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


@pytest.mark.parametrize("spelled", ["source", "other name"])
def test_links_lead_to_the_same_thing_as_before(tmp_path, spelled):
    source = folder(tmp_path / "source")
    (tmp_path / "other name").symlink_to(source)
    (tmp_path / "other way").symlink_to(source / "a")
    inside = folder(source / "a/b")
    links = {
        "near": "../file",  # a/file
        "into itself": f"{source}/a",
        "by its other name": f"{tmp_path}/other name/a",
        "on another way": f"{tmp_path}/other way/file",
        "out and in": "../../../source/a/file",
        "out of it": "../../../elsewhere",
        "far away": "/usr/bin/python3",
        "nowhere": "missing",
    }
    for name, aim in links.items():
        (inside / name).symlink_to(aim)
    target = tmp_path / "target"
    found = list_folders({"name": tmp_path / spelled}, target)
    assert {Path(item.path).name: item.link for item in found.items if item.link} == {
        "near": "../file",
        "into itself": "..",
        "by its other name": "..",
        "on another way": "../file",
        "out and in": "../file",
        "out of it": f"{tmp_path}/elsewhere",
        "far away": "/usr/bin/python3",
        "nowhere": "missing",
    }
    assert found.leading_out == [
        str(tmp_path / spelled / "a/b" / name) for name in ("far away", "out of it")
    ]


def test_scripts_run_the_copys_python_and_other_files_stay(tmp_path):
    source = folder(tmp_path / "source")
    folder(source / "bin/more")
    (tmp_path / "other name").symlink_to(source)
    target = tmp_path / "target"
    texts = {
        "bin/tool": f"#!{source}/bin/python\nimport tool\n",
        "bin/long": f"#!/bin/sh\n'''exec' {tmp_path}/other name/bin/python \"$0\" \"$@\"\n' '''\n",
        "bin/activate": f"VIRTUAL_ENV={source}\n",
        "bin/neighbour": f"#!{source}-2/bin/python\n",
        "bin/below": f"#!/home/u{source}/bin/python\n",
        "bin/shell": "#!/bin/sh\n",
        "bin/program": f"\x7fELF {source}/lib",
        "bin/more/script": f"#!{source}/bin/python\n",
        "script": f"#!{source}/bin/python\n",
    }
    for name, text in texts.items():
        (source / name).write_text(text)
    os.link(source / "bin/tool", source / "bin/tool3")
    given = {"environment": tmp_path / "other name"}
    found = list_folders(given, target, moved="environment")
    copy = f"{target}/environment"
    made = {
        "environment/bin/tool": f"#!{copy}/bin/python\nimport tool\n",
        "environment/bin/long": f"#!/bin/sh\n'''exec' {copy}/bin/python \"$0\" \"$@\"\n' '''\n",
        "environment/bin/activate": f"VIRTUAL_ENV={copy}\n",
    }
    assert {name: text.decode() for name, text in found.rewritten.items()} == made
    sizes = {item.path: item.size for item in found.items}
    assert all(sizes[name] == len(text) for name, text in made.items())
    assert sizes["environment/bin/tool3"] == sizes["environment/bin/tool"]
    assert list_folders(given, target).rewritten == {}


@pytest.mark.parametrize("name", ["a b", "it's", "long" * 30])
@pytest.mark.parametrize("long", [False, True])
def test_scripts_run_wherever_the_copy_is(tmp_path, name, long):
    source = folder(tmp_path / "source")
    folder(source / "bin")
    python = f"{source}/bin/python3"
    begin = (
        f"#!/bin/sh\n'''exec' {python} -I \"$0\" \"$@\"\n' '''\n" if long else f"#!{python} -I\n"
    )
    body = "import sys\nprint(sys.argv[1:], sys.flags.isolated)\n"
    (source / "bin/tool").write_text(begin + body)
    copies = folder(tmp_path / name)
    found = list_folders({"environment": source}, copies, moved="environment")
    folder(copies / "environment/bin")
    (copies / "environment/bin/python3").symlink_to(sys.executable)
    tool = copies / "environment/bin/tool"
    tool.write_bytes(found.rewritten["environment/bin/tool"])
    tool.chmod(0o755)
    assert run(str(tool), "x y").stdout == "['x y'] 1\n"
    assert tool.read_text().endswith(f"\n{body}")
    assert len(tool.read_text().split("\n")[0]) < 128


def test_files_that_python_is_writing_are_left_out(tmp_path):
    source = folder(tmp_path / "source")
    for name in ("a.pyc", "a.pyc.140212", "b.pyc.txt"):
        (source / name).write_text("")
    found = list_folders({"name": source}, tmp_path / "target")
    assert [item.path for item in found.items] == ["name", "name/a.pyc", "name/b.pyc.txt"]


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    source = folder(tmp_path / "source")
    folder(source / "closed")
    scan = os.scandir

    def refusing(path):  # permissions do not stop root, who runs tests in containers
        if path == str(source / "closed"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(UserError, match="source/closed: Permission denied: make it readable"):
        list_folders({"name": source}, tmp_path / "target")
    with pytest.raises(UserError, match="gone: No such file"):
        list_folders({"name": tmp_path / "gone"}, tmp_path / "target")
