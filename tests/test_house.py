"""Rules of the house that no linter has: names, files and parameters that a stranger can keep."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import hpc_train

ROOT = Path(hpc_train.__file__).parent
MODULES = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}

# Names that several modules may have: each stands for the same thing everywhere.
SHARED = {
    "T": "a type variable",
    "logger": "each module's own",
    "main": "what `python -m` or an entry point runs",
    "options": "of a verb's module",
    "run": "of a verb's module; `hpc_train.run`",
    "submit": "`hpc-train submit`, and the same from Python",
    "PR_SET_PDEATHSIG": "a constant of Linux",
}
ROOT_FILES = 9
LINES = 460  # of a module; the goal is 400
PARAMETERS = 8
OF_TORCH = {"_Normalize.forward"}
# scikit-learn reads an estimator's parameters from this signature.
OF_SCIKIT_LEARN = {"Classifier.__init__", "Regressor.__init__"}
# Packages whose docstring lists some of their modules alone.
LISTS_A_PART = {"launch/schedulers/__init__.py"}
TESTS = Path(__file__).parent
# Folders of tests that belong to no module: whole programs, and the emulated cluster.
WHOLE = {"cluster", "system"}
PACKAGE_OF = {"mpi_layer": "mpi"}  # where a folder of tests has another name than the package


def defined(tree):
    """Public names that a module defines at its top."""
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def functions(tree, prefix=""):
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        inside = f"{node.name}." if isinstance(node, ast.ClassDef) else prefix
        yield from functions(node, inside)


def test_a_public_name_stands_for_one_thing():
    homes = defaultdict(list)
    for module, tree in MODULES.items():
        for name in set(defined(tree)):
            if not name.startswith("_") and name not in SHARED:
                homes[name].append(module)
    assert not {name: modules for name, modules in homes.items() if len(modules) > 1}


def test_the_package_has_few_files_beside_its_folders():
    assert len(list(ROOT.glob("*.py"))) <= ROOT_FILES


def test_modules_are_short():
    lengths = {module: len((ROOT / module).read_text().splitlines()) for module in MODULES}
    assert not {module: length for module, length in lengths.items() if length > LINES}


def test_a_list_of_modules_names_all_of_them():
    """Where the docstring of a package has a line "name.py  what it does", each module has one."""
    missing = {}
    for module, tree in MODULES.items():
        doc = ast.get_docstring(tree) or ""
        listed = set(re.findall(r"\w+(?=\.py\b)|^\w+(?=  )", doc, re.M))
        if module.endswith("__init__.py") and listed and module not in LISTS_A_PART:
            modules = {path.stem for path in (ROOT / module).parent.glob("[!_]*.py")}
            missing[module] = modules - listed
    assert not {module: names for module, names in missing.items() if names}


def test_functions_take_few_parameters():
    found = {}
    for tree in MODULES.values():
        for name, node in functions(tree):
            given = node.args
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            count = sum(arg is not None and arg.arg not in ("self", "cls") for arg in every)
            if count > PARAMETERS and name not in OF_TORCH | OF_SCIKIT_LEARN:
                found[name] = count
    assert not found


def test_tests_have_the_name_of_their_module():
    """`test_loop_mistakes.py` is a second file for loop.py; `cli/test_cli.py` tests all of cli."""
    strays = []
    for path in TESTS.glob("*/test_*.py"):
        folder = PACKAGE_OF.get(path.parent.name, path.parent.name)
        modules = {folder, *(module.stem for module in (ROOT / folder).glob("*"))}
        name = path.stem.removeprefix("test_")
        if path.parent.name not in WHOLE and not any(
            name == module or name.startswith(f"{module}_") for module in modules
        ):
            strays.append(str(path.relative_to(TESTS)))
    assert not strays


def _without_encoding(tree):
    """The lines that open text files in the encoding of the locale."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="files" | "os" | "writing"))):
                continue
            case ast.Call(func=ast.Attribute(attr="read_text" | "write_text")):
                pass
            case ast.Call(
                func=ast.Attribute(attr="open"), args=[ast.Constant(value=str(mode)), *_]
            ) if "b" not in mode:
                pass
            case _:
                continue
        if "encoding" not in (keyword.arg for keyword in node.keywords):
            yield node.lineno


def test_text_files_have_an_encoding():
    """ruff's PLW1514 takes only what it infers for a path: not `(folder / name).read_text()`."""
    found = {module: [*_without_encoding(tree)] for module, tree in MODULES.items()}
    assert not {module: lines for module, lines in found.items() if lines}
