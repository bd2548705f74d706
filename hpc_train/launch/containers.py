"""The words that run each rank's command in a container image.

The launcher runs on the host and starts a container for each rank. So it needs nothing in the
image, and reaches other hosts. The ranks have the image's Python and MPI.

Apptainer's words were run. Those of the others are from their sources and documentation: podman-hpc
01b02d6 with podman-run(1), Shifter 84b7d34 (src/shifter.c), Enroot 8ea147d (doc/cmd/start.md).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.errors import HpcTrainError, SetupError, UserError
from hpc_train.launch import IMAGE_TOOLS
from hpc_train.mpi.environment import RANKS

PYTHON = "python3"  # the image's
START_SECONDS = 300.0  # seconds in which a tool must start Python; some unpack the image first
REGISTRY_ONLY = ("podman-hpc", "shifter")  # they take the name of an image, and no file
# Beginnings of variables that ranks need, for tools that pass nothing of the host by themselves.
PASSED = (
    *("HPC_TRAIN_", "OMP", "PMI", "PALS_", "SLURM_", "FLUX_", "MPI", "HOROVOD_", "NCCL_", "TORCH_"),
    *("FI_", "UCX_", "CUDA_VISIBLE", "HIP_VISIBLE", "ROCR_VISIBLE", "ZE_", "PYTHONUNBUFFERED"),
)
# Each rank starts with a few lines of shell, for what only its own host and launcher know.
#
# Open MPI's mpirun says where it is installed on the host. An Open MPI in the image would look for
# its own files there.
_UNSET = "unset OPAL_PREFIX PMIX_INSTALL_PREFIX PMIX_PREFIX"
# In these folders a rank meets its launcher, and Open MPI's ranks meet each other.
_FOLDERS = """for d in "$TMPDIR" "$PMIX_SERVER_TMPDIR"; do
[ ! -d "$d" ] || set -- {words} "$@"; done"""
_GPUS = """case " $* " in *" --nv "* | *" --nvccli "* | *" --rocm "*) ;;
*) if [ -e /dev/nvidiactl ]; then set -- --nv "$@";
elif [ -e /dev/kfd ]; then set -- --rocm "$@"; fi ;; esac"""
_NAMES = f"""for n in $(env | sed -nE "s/^(({"|".join(PASSED)})[A-Za-z0-9_]*)=.*/\\1/p"); do
set -- --env "$n" "$@"; done"""


def _shell(*lines: str) -> list[str]:
    """The words that run lines of shell before a tool, whose name is $0."""
    return ["sh", "-c", "; ".join([_UNSET, *lines]).replace("\n", " ")]


@dataclass(frozen=True)
class Container:
    """How each rank's command is run in an image.

    Args:
        tool: one of IMAGE_TOOLS.
        image: the image's absolute path, or its name.
        options: further words for the tool.
        binds: paths of the host that are seen in the container.
        directory: the directory in which the command runs.
    """

    tool: str
    image: str
    options: Sequence[str] = ()
    binds: Sequence[str] = ()
    directory: str = "/"

    def command(self, words: Sequence[str], ranks: int) -> list[str]:
        """The words that run a command in a container.

        Args:
            words: the command.
            ranks: number of ranks of the job. Each rank is told it, to notice that it is alone.
        """
        told = f"{RANKS}={ranks}"
        seen = [*self.options, *self.bind_words(self.binds)]
        match self.tool:
            case "podman-hpc":
                folders = _FOLDERS.format(words='--volume "$d:$d"')
                start = _shell(folders, 'exec "$0" run --rm "$@"')
                passed = _each("--env", [f"{name}*" for name in PASSED])
                given = [*seen, "--workdir", self.directory, *passed, "--env", told, self.image]
            case "shifter":  # takes the value of an option that may lack one after = only
                start = _shell('exec "$0" "$@"')
                given = [f"--image={self.image}", *seen]
                given += [f"--workdir={self.directory}", f"--env={told}"]
            case "enroot":  # has no option for the directory
                folders = _FOLDERS.format(words='--mount "$d:$d:none:x-create=dir,bind"')
                start = _shell(folders, _NAMES, 'exec "$0" start "$@"')
                given = [*seen, "--env", told, self.image]
                given += ["sh", "-c", 'cd "$0" && exec "$@"', self.directory]
            case _:
                folders = _FOLDERS.format(words='--bind "$d"')
                start = _shell(folders, _GPUS, 'exec "$0" exec "$@"')
                given = [*seen, "--pwd", self.directory, "--env", told, self.image]
        return [*start, self.tool, *given, *words]

    def bind_words(self, paths: Iterable[str]) -> list[str]:
        """The words by which paths of the host are seen in the container, as the same paths.

        There are none for Shifter. It has the site's file systems by itself, and ends with an error
        if the image lacks the place for another path.

        Raises:
            UserError: a path has a character that separates paths to the tools.
        """
        paths = list(paths)
        if wrong := [path for path in paths if ":" in path or "," in path]:
            raise UserError(
                f"{wrong[0]} cannot be seen in a container", "use paths without colons and commas"
            )
        match self.tool:
            case "podman-hpc":
                return _each("--volume", [f"{path}:{path}" for path in paths])
            case "shifter":
                return []
            case "enroot":
                fields = "none:x-create=auto,bind"
                return _each("--mount", [f"{path}:{path}:{fields}" for path in paths])
            case _:
                return _each("--bind", paths)

    @property
    def as_options(self) -> list[str]:
        """The options of `hpc-train launch` that run its ranks in this image."""
        words = ["--image", self.image, "--image_tool", self.tool]
        return [*words, *([f"--image_options={shlex.join(self.options)}"] if self.options else [])]


def container_for(
    image: str, tool: str | None, options: Iterable[str], seen: Iterable[str]
) -> Container:
    """How this host runs commands in an image.

    Args:
        image: the image, as the user names it.
        tool: the tool that the user has named, or None.
        options: texts with further words for the tool, quoted as for a shell.
        seen: paths to bind.

    Raises:
        UserError: there is no such image, or the tool cannot read it; or a text is not quoted well.
        SetupError: there is no tool.
    """
    if not (found := find_tool(tool, image)):
        raise SetupError(
            f"no program that runs images is here: looked for {tool or ', '.join(IMAGE_TOOLS)}",
            "load its module, or run this on a compute node if only these have it",
        )
    return made_container(image, found, options, seen)


def made_container(image: str, tool: str, options: Iterable[str], seen: Iterable[str]) -> Container:
    """Like `container_for`, for a tool that need not be on this host.

    Raises:
        UserError: there is no such image, or the tool cannot read it; or a text is not quoted well.
    """
    # Other tools than Apptainer and Shifter have a /tmp of their own in each container.
    shared = ["/tmp"] if tool in ("podman-hpc", "enroot") else []
    binds = seen_paths(map(Path, [*seen, *shared]))
    words = split_options(options)
    return Container(tool, find_image(image, tool), words, binds, str(Path.cwd()))


def check_package(container: Container) -> None:
    """Check that the image's Python has hpc_train.

    Raises:
        UserError: it has not.
        HpcTrainError: the tool does not run the image.
    """
    words = container.command([PYTHON, "-c", "import hpc_train"], 1)
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=START_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise HpcTrainError(
            f"{container.tool} has not started {PYTHON} within {START_SECONDS:.0f} s",
            f"try `{shlex.join(words)}`",
        ) from None
    if "No module named 'hpc_train'" in done.stderr:
        raise UserError(
            f"hpc_train is not in the image {container.image}",
            "install it there for the image's python3: `pip install hpc_train`",
        )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise HpcTrainError(
            f"{container.tool} does not run {PYTHON} in {container.image}: {said[-1]}",
            f"`hpc-train doctor --image {container.image}` checks the image",
        )


def _each(option: str, values: Iterable[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def find_tool(wanted: str | None, image: str) -> str | None:
    """The tool that runs images here: the wanted one, or the first of IMAGE_TOOLS on the PATH.

    Args:
        wanted: the tool that the user or a site's profile has named.
        image: the image. A file is nothing for tools that take names only.

    Returns:
        Its name; None if there is none.
    """
    if wanted:
        return wanted if shutil.which(wanted) else None
    names = [name for name in IMAGE_TOOLS if name not in REGISTRY_ONLY or not Path(image).exists()]
    return next(filter(shutil.which, names), None)


def find_image(image: str, tool: str) -> str:
    """The image as the tool has to be told it: an absolute path, or a name.

    Raises:
        UserError: there is no such image, or the tool cannot read it.
    """
    path = Path(image).expanduser()
    if "://" in image:
        return image
    if tool in REGISTRY_ONLY or (tool == "enroot" and "/" not in image):
        if not path.exists():
            return image
        if tool != "enroot":
            raise UserError(
                f"{image} is a file, and {tool} takes an image's name",
                f"give the name under which {tool} knows it, or --image_tool apptainer",
            )
    if not path.exists():
        raise UserError(f"there is no image {image}", "give the path of its file")
    kind = kind_of_image(path)
    if kind is None:
        raise UserError(f"the image {image} cannot be read", "ask its owner, or copy it")
    if not kind or (tool == "enroot" and kind != "SquashFS"):
        wanted = (
            "a SquashFS file" if tool == "enroot" else "a SIF file, a SquashFS file or a folder"
        )
        raise UserError(f"{image} is no image that {tool} runs", f"give {wanted}")
    return str(path.absolute())


def kind_of_image(path: Path) -> str | None:
    """SIF, SquashFS or folder, by its first bytes; "" is another file, None an unreadable one."""
    if not os.access(path, os.R_OK):
        return None
    if path.is_dir():
        return "folder"
    with path.open("rb") as file:
        head = file.read(64)
    if head[32:41] == b"SIF_MAGIC":  # behind a line that lets the file be run
        return "SIF"
    return "SquashFS" if head[:4] == b"hsqs" else ""


def seen_paths(folders: Iterable[Path], others: Iterable[str] = ()) -> list[str]:
    """The paths to bind, so that each of these is seen: each one once, and where links lead to.

    Args:
        folders: the working directory and the like, whether or not they are there already.
        others: values that may be paths; those that name nothing are left out.
    """
    wanted = [*folders, *(path for text in others if (path := Path(text)).exists())]
    every = {real for path in wanted for real in (path.absolute(), path.resolve())} - {Path("/")}
    return sorted(str(path) for path in every if every.isdisjoint(path.parents))


def split_options(texts: Iterable[str]) -> list[str]:
    """The words of several --image_options.

    Raises:
        UserError: a quote is not closed.
    """
    try:
        return [word for text in texts for word in shlex.split(text)]
    except ValueError as error:
        raise UserError(f"--image_options: {error}", "close its quotes") from None
