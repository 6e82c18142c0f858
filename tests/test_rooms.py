"""The packages of src form layers: imports go only downward, without a circle, and each idea has one name."""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"

# From the top down: a package imports from itself and from packages further down.
ROOMS = [
    "cli",
    "selftest",
    "launch",
    "drill",
    "integrations",
    "export",
    "bench",
    "train",
    "train.resilience",
    "train.resilience.hang",
    "train.observe",
    "train.loop",
    "train.recovery",
    "config",
    "planner.show",
    "planner.calibrate",
    "planner",
    "planner.cost",
    "planner.inputs",
    "dry_run",
    "checkpoint",
    "optim",
    "profiling",
    "parallel",
    "weights",
    "hf",
    "data",
    "mesh",
    "errors",
    "untrusted_input",
    "processes",
    "text_tables",
    "files",
]
# The public names and `python -m fourfold`: they import from anywhere, and nothing in src imports them.
FRONT_DOOR = ("fourfold", "fourfold.__main__")
MOST_FILES = 16  # in one folder, besides __init__.py


@cache
def modules() -> dict[str, ast.Module]:
    """The syntax tree of every module of src, by its dotted name."""
    return {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text()
        )
        for path in sorted(SOURCE.rglob("*.py"))
    }


def imports_of(tree: ast.Module, known: set[str]) -> Iterator[str]:
    """The modules of `known` that a module imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in known else node.module


@cache
def graph() -> dict[str, list[str]]:
    """The modules of src that each module imports."""
    return {name: sorted(set(imports_of(tree, set(modules())))) for name, tree in modules().items()}


def room_of(module: str) -> str:
    """The longest declared package that holds the module, or is the module."""
    name = module.removeprefix("fourfold.")
    while name not in ROOMS:
        assert "." in name, f"{module} is in no declared package: add it to ROOMS, at its place in the order"
        name = name.rpartition(".")[0]
    return name


def test_imports_go_only_downward() -> None:
    upward = [
        f"{module} imports {imported}"
        for module, imports in graph().items()
        if module not in FRONT_DOOR
        for imported in imports
        if imported in FRONT_DOOR or ROOMS.index(room_of(imported)) < ROOMS.index(room_of(module))
    ]
    assert upward == []


def circles(edges: dict[str, list[str]]) -> list[str]:
    """One line for each circle that a depth-first search meets."""
    found: list[str] = []
    finished: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in finished:
            for imported in edges[module]:
                visit(imported, [*path, module])
            finished.add(module)

    for module in edges:
        visit(module, [])
    return found


def test_no_file_imports_itself_through_others() -> None:
    assert circles(graph()) == []


def test_a_circle_is_found() -> None:
    assert circles({"a": ["b"], "b": ["c"], "c": ["b"], "d": ["a"]}) == ["b -> c -> b"]


def test_no_folder_has_too_many_files() -> None:
    files = Counter(path.parent for path in SOURCE.rglob("*.py") if path.name != "__init__.py")
    assert {str(folder.relative_to(SOURCE)): n for folder, n in files.items() if n > MOST_FILES} == {}


def assignments(name: str) -> list[str]:
    """The modules that define `name` at their top level."""
    found = []
    for module, tree in modules().items():
        for node in tree.body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            found += [module for target in targets if isinstance(target, ast.Name) and target.id == name]
    return found


def test_axes_are_defined_once() -> None:
    assert assignments("AXES") == ["fourfold.mesh.axes"]


def test_no_two_classes_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for module, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
