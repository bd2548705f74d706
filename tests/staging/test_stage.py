from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest

from hpc_train import files
from hpc_train.errors import UserError
from hpc_train.mpi.levels import Levels
from hpc_train.staging import copy
from hpc_train.staging.copy import lock
from hpc_train.staging.listing import list_folders
from hpc_train.staging.relay import WINDOW
from hpc_train.staging.stage import StageRequest, bring, copies_folder, list_request
from hpc_train.staging.stream import LEAST
from tests.staging.trees import seen

NODES = pytest.mark.ranks(1, 2, 3, 4)


@pytest.fixture
def source(group, together) -> Path:
    """A folder of more chunks than nodes hold at a time. Its path is the same on all ranks."""
    folder = together / "source"
    if group is not None and group.rank == 0:
        (folder / "small").mkdir(parents=True)
        for number in range(20):
            (folder / f"small/{number}").write_bytes(os.urandom(1000 * number))
        (folder / "large").write_bytes(os.urandom((WINDOW + 10) * LEAST))
        (folder / "empty").touch()
    return folder


def on_disk(source: Path, name: str) -> Path:
    """The folder of the copies on a disk."""
    disk = source.parent / name
    disk.mkdir(exist_ok=True)
    return disk / "copies"


def of_rank(group, source: Path) -> tuple[Levels, Path]:
    """Each rank as a node of its own, with a folder of its own."""
    return Levels.flat(group), on_disk(source, f"node {group.rank}")


def listed(group, source: Path):
    found = list_folders({"data/x": source}, Path("/copies")) if group.rank == 0 else None
    group.barrier()
    return found


@NODES
def test_every_node_gets_the_folder_and_keeps_it(group, source):
    levels, folder = of_rank(group, source)
    found = listed(group, source)
    assert bring(levels, found, folder)
    assert seen(folder / "data/x") == seen(source)
    (folder / "data/x/__pycache__").mkdir()  # what programs add does no harm
    group.barrier()
    assert not bring(levels, listed(group, source), folder)
    assert (folder / "data/x/__pycache__").exists()


@NODES
def test_what_a_killed_call_has_left_does_no_harm(group, source):
    levels, folder = of_rank(group, source)
    folder.mkdir()
    (folder / ".shared").touch()
    group.barrier()
    assert bring(levels, listed(group, source), folder)


@NODES
def test_a_copy_that_differs_on_one_node_is_made_again(group, source):
    levels, folder = of_rank(group, source)
    bring(levels, listed(group, source), folder)
    if group.rank == group.size - 1:
        (folder / "data/x/large").unlink()
    group.barrier()
    assert bring(levels, listed(group, source), folder)
    if group.rank == 0:
        (source / "empty").write_text("no more")
    group.barrier()
    assert bring(levels, listed(group, source), folder)
    assert seen(folder / "data/x") == seen(source)


@NODES
def test_copies_of_another_call_are_kept(group, source):
    levels, folder = of_rank(group, source)
    bring(levels, listed(group, source), folder)
    other = listed(group, source / "small")
    with pytest.raises(UserError, match=r"has copies of .*/source, which may be .*--clean"):
        bring(levels, other, folder)
    assert not bring(levels, listed(group, source), folder)
    shutil.rmtree(folder)
    assert bring(levels, other, folder)


@NODES
def test_a_call_is_refused_while_another_one_copies(group, source):
    levels, folder = of_rank(group, source)
    last = group.rank == group.size - 1
    folder.mkdir()
    held = lock(folder) if last else os.open("/", os.O_RDONLY)
    group.barrier()
    with pytest.raises(UserError, match="another `hpc-train stage` uses .*/copies now"):
        bring(levels, listed(group, source), folder)
    kept = folder.exists()
    os.close(held)
    group.barrier()
    assert bring(levels, listed(group, source), folder)
    assert kept


@NODES
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_that_ends_the_job_leaves_no_part(group, source, number, monkeypatch):
    levels, folder = of_rank(group, source)
    before = signal.getsignal(number)
    monkeypatch.setattr(copy, "check_room", lambda *_: os.kill(os.getpid(), number))
    with pytest.raises(SystemExit):
        bring(levels, listed(group, source), folder)
    assert not folder.exists()
    assert signal.getsignal(number) is before


@NODES
@pytest.mark.parametrize("part", ["small/10", "large"])
def test_a_full_disk_of_one_node_is_named_and_no_node_keeps_a_part(
    group, source, part, monkeypatch
):
    levels, folder = of_rank(group, source)
    bad = group.size // 2
    write_at = files.write_at

    def full(descriptor, data, offset):
        if Path(f"/proc/self/fd/{descriptor}").readlink() == folder / "data/x" / part:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_at(descriptor, data, offset)

    if group.rank == bad:
        monkeypatch.setattr(files, "write_at", full)
    where = rf"^rank {bad} \(.*\): " if group.comm else "^"
    with pytest.raises(UserError, match=where + ".*copies: No space left on device: give another"):
        bring(levels, listed(group, source), folder)
    assert not folder.exists()


@NODES
@pytest.mark.parametrize("what", ["changed", "gone"])
def test_files_that_change_after_they_were_listed_are_named(group, source, what):
    levels, folder = of_rank(group, source)
    found = listed(group, source)
    if group.rank == 0:
        path = source / "small/10"
        path.unlink() if what == "gone" else path.write_bytes(b"new")
    says = "No such file" if what == "gone" else "has changed while it was copied"
    with pytest.raises(UserError, match=f"source/small/10:? {says}"):
        bring(levels, found, folder)
    assert not folder.exists()


@pytest.mark.ranks(2, 3, 4)
def test_a_folder_that_nodes_share_is_refused_and_left_as_it_was(group, source):
    folder = on_disk(source, "shared")
    with pytest.raises(UserError, match=r"rank 1 .*shared is the same folder as on .*give --to"):
        bring(Levels.flat(group), listed(group, source), folder)
    group.barrier()
    assert not folder.exists()


@NODES
def test_a_disk_that_removes_no_file_is_named_on_all_nodes(group, source, monkeypatch):
    levels, folder = of_rank(group, source)

    def refused(path, missing_ok=False):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    if group.rank == 0:
        monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(UserError, match=r"shared-\w+\): Permission denied: give another folder"):
        bring(levels, listed(group, source), folder)


@pytest.mark.ranks(4)
def test_one_rank_of_a_node_works(group, source):
    """Two nodes with two ranks each."""
    node, cross = group.split(group.rank // 2, 0), group.split(group.rank % 2, 0)
    folder = on_disk(source, f"node {group.rank // 2}")
    levels = Levels.join(group, node, cross)
    assert bring(levels, listed(group, source), folder)
    assert seen(folder / "data/x") == seen(source)
    levels.close()


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"SLURM_JOB_ID": "12", "SLURM_CLUSTER_NAME": "a"}, "hpc_train-12"),
        ({"PBS_JOBID": "12[3].server"}, "hpc_train-12[3].server"),
        ({"LSB_JOBID": "12", "LSB_JOBINDEX": "3"}, "hpc_train-12[3]"),
        ({"FLUX_ENCLOSING_ID": "f1"}, "hpc_train-f1"),
        ({"FLUX_ENCLOSING_ID": "f1", "FLUX_JOB_ID": "f2"}, "hpc_train-f1"),
        ({}, f"hpc_train-user-{os.getuid()}"),
    ],
)
def test_the_copies_are_in_a_folder_of_the_job(environ, name):
    assert copies_folder(None, environ) == Path("/tmp") / name
    assert copies_folder(None, environ | {"TMPDIR": "/local"}) == Path("/local") / name
    assert copies_folder(Path("/disk"), environ) == Path("/disk") / name


def test_requests_that_make_no_sense_are_refused(tmp_path):
    for path in ("a/text", "b/text", "c"):
        (tmp_path / path).mkdir(parents=True)
    for request, says in (
        (StageRequest(), "nothing to copy"),
        (StageRequest(environment=tmp_path), "is not a Python environment"),
        (StageRequest(data=(tmp_path / "gone",)), "gone is not a folder"),
        (StageRequest(data=(tmp_path / "a/text", tmp_path / "b/text")), "have the same name"),
        (StageRequest(data=(tmp_path,)), "the folder of the copies, is inside .*: give --to"),
    ):
        with pytest.raises(UserError, match=says):
            list_request(request, tmp_path / "copies")


def test_a_data_set_has_the_name_that_it_is_given_by(tmp_path, monkeypatch):
    real = tmp_path / "real/v2"
    (real / "part").mkdir(parents=True)
    (tmp_path / "text").symlink_to(real)
    monkeypatch.chdir(real)
    for given, name in ((tmp_path / "text", "text"), (Path(), "v2"), (Path("part/.."), "v2")):
        found = list_request(StageRequest(data=(given,)), tmp_path / "copies")
        assert found.folders == {f"data/{name}": real}
