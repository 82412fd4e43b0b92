"""What the packages promise about each other: walls, names, sizes, and that errors survive a
process border.
"""

import ast
import importlib
import inspect
import pickle
import pkgutil

import pytest

from tests.architecture.sources import PACKAGES, ROOT


def source_files():
    return [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]


def test_no_module_is_a_drawer_for_anything():
    vague = {"utils", "helpers", "common", "misc", "util"}
    assert [str(path) for path in source_files() if path.stem in vague] == []


def test_only_the_driver_imports_ray():
    wrong = [
        str(path.relative_to(ROOT))
        for path in source_files()
        if "autohet/driver" not in str(path)
        and path.name not in ("ray_train.py", "ray_train_baseline.py")  # measure Ray Train
        and any(
            line.strip().startswith(("import ray", "from ray"))
            for line in path.read_text().splitlines()
        )
    ]
    assert wrong == []


def error_classes():
    """Every exception class that the three packages define."""
    found = []
    for name in (
        "planner.errors",
        "recovery.errors",
        "recovery.storage.errors",
        "recovery.checkpoint.errors",
        "autohet.runtime.groups.errors",
    ):
        module = importlib.import_module(name)
        found += [
            c
            for _, c in inspect.getmembers(module, inspect.isclass)
            if issubclass(c, Exception) and c.__module__ == name
        ]
    return found


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__name__)
def test_an_error_crosses_a_process_border_with_its_message(kind):
    required = [
        p
        for p in inspect.signature(kind.__init__).parameters.values()
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ][1:]
    if kind.__init__ in (Exception.__init__, ValueError.__init__):
        error = kind("what went wrong")
    else:
        error = kind(*(example(p) for p in required))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)


def example(parameter):
    """A value of a parameter's annotated kind."""
    text = str(parameter.annotation)
    if "tuple" in text:
        return ("a", "b")
    if "float" in text:
        return 1.5
    return 3 if "int" in text else "thing"


def test_every_module_says_what_it_is_for():
    silent = [
        str(path.relative_to(ROOT))
        for path in source_files()
        if not path.read_text().lstrip().startswith('"""')
    ]
    assert silent == []


def test_walk_finds_the_packages():
    assert {
        name for package in PACKAGES for _, name, _ in pkgutil.iter_modules([str(ROOT / package)])
    } >= {
        "plans",
        "state",
        "driver",
    }


def test_scripts_without_a_suffix_import_names_that_exist() -> None:
    """No type checker reads them: a function that is renamed is found missing by its user."""
    missing = []
    for path in sorted((ROOT / "scripts").rglob("*")):
        if path.suffix or not path.is_file() or "python" not in path.read_text().partition("\n")[0]:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            ours = isinstance(node, ast.ImportFrom) and node.module is not None
            if ours and node.module.partition(".")[0] in PACKAGES:
                module = importlib.import_module(node.module)
                missing += [name.name for name in node.names if not hasattr(module, name.name)]
    assert not missing
