"""No module imports itself through others: imports for types and inside functions count.

A reader who opens one module of a circle needs all of them.
"""

import ast
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from tests.architecture.sources import ROOT, all_statements, paths, trees

MOST_MODULES = 20  # of one folder
Imports = Mapping[str, Iterable[str]]


def imports_of(module: str) -> set[str]:
    """Return the modules of ours that a module names in its imports."""
    known = paths()
    found = set()
    for node in all_statements(trees()[known[module].relative_to(ROOT)]):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import, which this test does not read"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else str(node.module))
    return found.intersection(known) - {module}


@functools.cache
def graph() -> Imports:
    return {module: sorted(imports_of(module)) for module in paths()}


def circles(imports: Imports) -> Iterator[set[str]]:
    """Yield the strongly connected components of two modules or more (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    open_names: list[str] = []

    def visit(name: str) -> Iterator[set[str]]:
        index[name] = low[name] = len(index)
        open_names.append(name)
        for other in imports[name]:
            if other not in index:
                yield from visit(other)
                low[name] = min(low[name], low[other])
            elif other in open_names:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            begin = open_names.index(name)
            component = set(open_names[begin:])
            del open_names[begin:]
            if len(component) > 1:
                yield component

    for name in imports:
        if name not in index:
            yield from visit(name)


def test_circles_are_found():
    imports = {"a": ["b"], "b": ["c", "d"], "c": ["a"], "d": ["e"], "e": ["d"], "f": ["a"]}
    assert sorted(map(sorted, circles(imports))) == [["a", "b", "c"], ["d", "e"]]


def test_no_module_imports_itself_through_others():
    assert list(map(sorted, circles(graph()))) == []


def test_folders_of_the_planner_import_one_way():
    folders: dict[str, set[str]] = {}
    for module, imported in graph().items():
        for each in (module, *imported):
            folders.setdefault(folder(each), set())
        folders[folder(module)].update(folder(each) for each in imported)
    assert folders.keys() >= {"planner.inputs", "planner.plans", "planner.cost", "planner.spmd"}
    mine = {name: others - {name} for name, others in folders.items() if "planner" in name}
    assert list(circles(mine)) == []


def folder(module: str) -> str:
    """Return planner.cost of planner.cost.links.sync."""
    return ".".join(module.split(".")[:2])


def test_no_folder_is_a_heap_of_modules():
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in paths().values())
    large = {name for name, count in counts.items() if count - 1 > MOST_MODULES}
    assert large == set(), "sort its modules into folders by subject"
