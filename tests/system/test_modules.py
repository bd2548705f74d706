"""The modulefiles, loaded and unloaded by both module systems in real shells.

`tests/system/install_modules.sh` installs the systems and the shells; what is missing is skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import hpc_train

ROOT = Path(__file__).parents[2]
VERSION = hpc_train.__version__
SYSTEM_PATH = "/usr/bin:/bin"
LOAD = "module load hpc_train; echo code $?"
UNLOAD = "module unload hpc_train"
BOTH_OUTPUTS = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 60}
# What the systems note for themselves; they leave some of it behind, also for other modules.
NOTES = re.compile(r"LOADEDMODULES|_LMFILES_|__MODULES_\w+|_ModuleTable\w+|__LMOD_\w+")


@dataclass(frozen=True)
class System:
    """A module system and the modulefile of ours that it reads."""

    home: Path
    tree: str
    file: str

    def init(self, shell: str) -> Path:
        """The file that defines `module` in a shell; skips the test where it is not there."""
        path = self.home / "init" / shell
        if not path.is_file() or shutil.which(shell) is None:
            pytest.skip(f"no {path} or no {shell}: see tests/system/install_modules.sh")
        return path


LMOD_HOME = Path(os.environ.get("LMOD_PKG", "/opt/lmod/usr/share/lmod/lmod"))
TCL, LUA = ("modules/tcl", VERSION), ("modules/lua", f"{VERSION}.lua")
MODULES, LMOD = System(Path("/usr/share/modules"), *TCL), System(LMOD_HOME, *LUA)


class Site:
    """A module system and a checkout with an environment."""

    def __init__(self, system: System, folder: Path, checkout: str = "check out"):
        self.system = system
        self.folder = folder
        self.checkout = folder / checkout
        self.prefix = make_environment(self.checkout / ".venv")
        shutil.copytree(ROOT / "modules", self.checkout / "modules")
        self.tree = self.checkout / system.tree
        self.file = self.tree / "hpc_train" / system.file

    def run(self, *lines: str, shell: str = "bash", **environ: str) -> str:
        """What a script says on both outputs; `DUMP name` in it keeps the environment."""
        source = "source" if shell in ("tcsh", "fish") else "."
        script = "\n".join([f"{source} {self.system.init(shell)}", *lines, ""])
        (self.folder / "script").write_text(script.replace("DUMP ", "env -0 > dump-"))
        clean = {"HOME": str(self.folder), "PATH": SYSTEM_PATH, "MODULEPATH": str(self.tree)}
        where = {"cwd": self.folder, "env": clean | environ}
        return subprocess.run([shell, "script"], **where, **BOTH_OUTPUTS, check=False).stdout

    def dump(self, name: str) -> dict[str, str]:
        """The environment at `DUMP name`, without the systems' notes."""
        entries = os.fsdecode((self.folder / f"dump-{name}").read_bytes()).split("\0")[:-1]
        pairs = dict(entry.split("=", 1) for entry in entries)
        return {name: value for name, value in pairs.items() if not NOTES.fullmatch(name)}

    def check_loaded(self, dump: str) -> None:
        assert self.dump(dump)["PATH"] == f"{self.prefix}/bin:{SYSTEM_PATH}"
        assert self.dump(dump)["HPC_TRAIN_ROOT"] == str(self.prefix)

    def set_line(self, name: str, value: str) -> None:
        """Change one of the lines that a site may set."""
        line = f"local {name} = {value}" if self.system is LMOD else f"set {name} {value}"
        text, count = re.subn(rf"(?m)^(set|local) {name} .*", line, self.file.read_text(), count=1)
        assert count == 1
        self.file.write_text(text)


def make_environment(prefix: Path) -> Path:
    """An environment whose hpc-train is the one under test."""
    program = prefix / "bin" / "hpc-train"
    program.parent.mkdir(parents=True)
    start = f'PYTHONPATH="{ROOT}" exec "{sys.executable}" -m hpc_train "$@"'
    program.write_text(f"#!/bin/sh\n{start}\n")
    program.chmod(0o755)
    return prefix


@pytest.fixture(params=[MODULES, LMOD], ids=["modules", "lmod"])
def site(request, tmp_path: Path) -> Site:
    request.param.init("bash")
    return Site(request.param, tmp_path)


def test_the_files_have_the_version_of_the_package():
    files = {path.relative_to(ROOT) for path in (ROOT / "modules").rglob("*") if path.is_file()}
    assert files == {Path(system.tree, "hpc_train", system.file) for system in (MODULES, LMOD)}


@pytest.mark.parametrize("shell", ["bash", "sh", "zsh", "tcsh", "fish"])
def test_unload_restores_every_byte(site, shell):
    lines = ("module load hpc_train", "DUMP loaded", "hpc-train --version", UNLOAD)
    said = site.run("DUMP before", *lines, "DUMP after", shell=shell)
    assert said == f"hpc-train {VERSION}\n"
    before, loaded = site.dump("before"), site.dump("loaded")
    changed = {"PATH", "HPC_TRAIN_ROOT", "PYTHONNOUSERSITE"}
    assert dict(loaded.items() - before.items()).keys() == changed
    assert before.keys() <= loaded.keys()
    site.check_loaded("loaded")
    assert site.dump("after") == before


def test_packages_of_the_user_do_not_replace_those_of_the_environment(site):
    """Python looks into ~/.local before a virtual environment's system packages."""
    asked = f'"{sys._base_executable}" -c "import site; print(site.ENABLE_USER_SITE)"'
    assert site.run(asked, LOAD, asked, UNLOAD, asked) == "True\ncode 0\nFalse\nTrue\n"


def test_a_user_who_has_chosen_so_already_keeps_it(site):
    own = {"PYTHONNOUSERSITE": "yes", "HPC_TRAIN_ROOT": "/my/own"}
    site.run("DUMP before", LOAD, "DUMP loaded", UNLOAD, "DUMP after", **own)
    site.check_loaded("loaded")
    assert site.dump("loaded")["PYTHONNOUSERSITE"] in ("1", "yes")
    assert site.dump("after") == site.dump("before")


def test_lmod_reads_the_tcl_file_too(tmp_path):
    site = Site(System(LMOD_HOME, *TCL), tmp_path, checkout="checkout")  # Lmod cannot with a space
    other = make_environment(tmp_path / "other")
    set_other = f"export HPC_TRAIN_PREFIX={other}"
    assert site.run(LOAD, "DUMP loaded", set_other, UNLOAD, "DUMP after") == "code 0\n"
    site.check_loaded("loaded")
    assert site.dump("after")["PATH"] == SYSTEM_PATH
    shutil.rmtree(site.prefix)
    assert f"no hpc-train in {site.prefix}/bin" in " ".join(site.run(LOAD).split())


def test_module_use_twice_and_load_twice(site):
    use = f"module use '{site.tree}'"
    said = site.run(use, use, "DUMP before", LOAD, LOAD, "DUMP twice", UNLOAD, "DUMP after")
    assert said == "code 0\n" * 2
    site.check_loaded("twice")
    assert site.dump("after") == site.dump("before")


@pytest.mark.parametrize("first", [True, False])
def test_a_path_that_holds_the_folder_already(site, first):
    folder = f"{site.prefix}/bin"
    path = f"{folder}:{SYSTEM_PATH}" if first else f"{SYSTEM_PATH}:{folder}"
    site.run("DUMP before", LOAD, "DUMP loaded", UNLOAD, "DUMP after", PATH=path)
    assert site.dump("loaded")["HPC_TRAIN_ROOT"] == str(site.prefix)
    if first or site.system is MODULES:  # which leaves the folder where it is
        assert site.dump("loaded")["PATH"] == path
        assert site.dump("after") == site.dump("before")
    else:  # Lmod moves it to the front, and not back
        assert site.dump("loaded")["PATH"] == f"{folder}:{SYSTEM_PATH}"
        assert site.dump("after")["PATH"] == f"{folder}:{SYSTEM_PATH}"


@pytest.mark.parametrize("given", ["{}", "{}/", "other one"])
def test_the_environment_that_a_variable_names(site, given):
    site.set_line("prefix", '"/nowhere"')  # the variable goes before
    site.prefix = make_environment(site.folder / "other one")
    there = f"export HPC_TRAIN_PREFIX='{given.format(site.prefix)}'"
    changed = "export HPC_TRAIN_PREFIX=/elsewhere"
    said = site.run(there, "DUMP before", LOAD, "DUMP loaded", changed, UNLOAD, there, "DUMP after")
    assert said == "code 0\n"
    site.check_loaded("loaded")
    assert site.dump("after") == site.dump("before")


def test_a_copy_for_a_site_has_the_line_set(site):
    site.prefix = make_environment(site.folder / "central")
    site.set_line("prefix", f'"{site.prefix}"')
    site.tree = site.tree.rename(site.folder / "modulefiles")
    shutil.rmtree(site.checkout)
    site.run(LOAD, "DUMP loaded", HPC_TRAIN_PREFIX="")
    site.check_loaded("loaded")


@pytest.mark.parametrize("level", ["file", "folder"])
def test_a_link_leads_to_the_checkout(site, level):
    site.tree = site.folder / "modulefiles"
    link = site.tree / "hpc_train" / (site.file.name if level == "file" else "")
    link.parent.mkdir(parents=True)
    link.symlink_to(site.file if level == "file" else site.file.parent)
    site.run(LOAD, "DUMP loaded")
    site.check_loaded("loaded")


def test_no_environment(site):
    loaded = (LOAD, f"rm -r '{site.prefix}'", UNLOAD, "DUMP unloaded")
    said = site.run("DUMP before", *loaded, LOAD, "DUMP after")
    line = f"no hpc-train in {site.prefix}/bin: install it there, or set HPC_TRAIN_PREFIX"
    assert line in " ".join(said.split())  # the systems wrap it
    assert re.findall("code .", said) == ["code 0", "code 1"]
    assert site.dump("unloaded") == site.dump("before")
    assert site.dump("after") == site.dump("before")


def test_a_program_that_may_not_be_executed_is_none(site):
    (site.prefix / "bin/hpc-train").chmod(0o644)
    assert "code 1" in site.run("DUMP before", LOAD, "DUMP after")
    assert site.dump("after") == site.dump("before")


def test_required_modules_are_loaded_and_unloaded_with_it(site):
    lua = site.system is LMOD
    site.set_line("requires", '{"one", "two"}' if lua else "{one two}")
    other = 'setenv("OTHER", "1")' if lua else "#%Module1.0\nsetenv OTHER 1"
    (site.tree / f"one{site.file.suffix if lua else ''}").write_text(f"{other}\n")
    said = site.run("DUMP before", LOAD, "DUMP after")
    assert "two" in said
    assert "code 1" in said
    assert site.dump("after") == site.dump("before")
    (site.tree / f"two{site.file.suffix if lua else ''}").write_text(f"{other}\n")
    said = site.run("DUMP before", LOAD, "DUMP loaded", UNLOAD, "DUMP after")
    assert "code 0" in said
    assert site.dump("loaded")["OTHER"] == "1"  # both load what it stands on
    assert site.dump("after") == site.dump("before")


def test_two_versions_exclude_each_other(site):
    text = site.file.read_text()
    site.set_line("prefix", f'"{make_environment(site.folder / "other")}"')
    site.file.rename(site.file.with_name(site.file.name.replace(VERSION, "99.0")))
    site.file.write_text(text)
    no_swap = {"LMOD_DISABLE_SAME_NAME_AUTOSWAP": "yes"}  # else Lmod swaps by itself
    other, one = "module load hpc_train/99.0", f"hpc_train/{VERSION}"
    refused = (f"module load {one}; echo code $?", "DUMP refused")
    assert "code 1" in site.run("DUMP before", other, "DUMP other", *refused, **no_swap)
    assert site.dump("refused") == site.dump("other")
    swap = f"module swap hpc_train/99.0 {one}"
    said = site.run(other, swap, "module -t list", "DUMP swapped", UNLOAD, "DUMP after", **no_swap)
    assert f"\n{one}\n" in f"\n{said}"
    site.check_loaded("swapped")
    assert site.dump("after") == site.dump("before")


def test_the_modulefile_describes_itself_without_an_environment(site):
    shutil.rmtree(site.prefix)
    verbs = ("avail", "whatis", "help", "show")
    said = site.run(*[f"module {verb} hpc_train; echo code $?" for verb in verbs])
    avail, whatis, help_, show, _ = said.split("code 0\n")
    assert f"hpc_train/{VERSION}" in avail
    assert "Description: trains PyTorch models on HPC clusters" in whatis
    assert "hpc-train doctor" in help_
    assert f"HPC_TRAIN_ROOT is {site.prefix}" in help_
    assert f"{site.prefix}/bin" in show


@pytest.mark.parametrize("fault", ["", "no environment", "other version", "typing error"])
def test_module_test(site, fault):
    if fault == "no environment":
        shutil.rmtree(site.prefix)
    if fault == "other version":
        site.file.rename(site.file.with_name("99.0" + site.file.suffix))
    if fault == "typing error":
        site.file.write_text(site.file.read_text() + "no such command\n")
    verb = "--checkSyntax load" if site.system is LMOD else "test"  # all that Lmod has
    said = site.run(f"module {verb} hpc_train; echo code $?", "DUMP after")
    passes = fault != "typing error" if site.system is LMOD else not fault
    assert ("code 0" in said) == passes, said
    assert site.dump("after")["PATH"] == SYSTEM_PATH
