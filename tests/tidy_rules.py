"""The tree's rules. Each takes the root of a tree and says what breaks it, one line a fault."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Container, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PLANES = ("control_plane", "data_plane")
PACKAGES = ("kvplane", *PLANES, "engine", "integrations", "examples")
FOLDERS = (
    *PACKAGES,
    *("benchmarks", "csrc", "deploy", "models", "protos", "scripts", "tests", ".ci"),
)
CODE = {".py", ".cpp", ".h", ".cu", ".cuh", ".sh", ".proto"}
NOT_OURS = {"__pycache__", "build", "node_modules"}

MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 70
MAX_LINE_CHARACTERS = 100
MAX_README_LINES = 130
# Pages for readers together, and decisions together. The reference is generated.
MAX_PAGE_LINES = 2_000
MAX_DECISION_LINES = 450

# Who may not import whom, by folder; the folder named last that a module is in counts.
FORBIDDEN_IMPORTS = {
    "kvplane": {*PLANES, "engine", "examples", "torch", "transformers", "numpy"},
    "kvplane/models/config.py": {*PLANES, "engine", "examples", "torch", "numpy"},
    "kvplane/runtime": {"engine", "examples"},
    "kvplane/transformers": {*PLANES, "engine", "examples"},
    "control_plane": {"data_plane", "engine", "examples", "torch", "transformers", "numpy"},
    "data_plane": {"control_plane", "engine", "examples", "transformers"},
    "engine": {"control_plane", "examples"},
    "integrations": {"torch", "numpy"},
    "examples": set(PLANES),
}
# Modules of the planes of which an integration may import the names in ``__all__``.
PUBLIC = ("control_plane.server.election", "data_plane.blocks_from_outside")
# The one folder of a plane that may know gRPC.
GRPC_FOLDER = "server"
METRICS = ("Counter", "Gauge", "Histogram", "Summary", "Info", "Enum")


def code_files(root: Path, *suffixes: str) -> Iterator[Path]:
    """Hand-written code under ``root``, of these suffixes or of any, in order."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            parts = path.relative_to(root).parts
            if NOT_OURS & set(parts) or "_pb2" in path.name or not path.is_file():
                continue
            if path.suffix in (suffixes or CODE) or (not suffixes and path.parent.name == ".ci"):
                yield path


def modules(root: Path, *packages: str) -> Iterator[tuple[Path, ast.Module]]:
    """The parsed Python files of ``packages``, all imports with their whole names. The tests of an
    integration are part of ``tests``.
    """
    for path in code_files(root, ".py"):
        folders = path.relative_to(root).parent.parts
        if ("tests" if "tests" in folders else folders[0]) in (packages or FOLDERS):
            yield path, _parsed(path, folders)


@functools.cache
def _parsed(path: Path, folders: tuple[str, ...]) -> ast.Module:
    """Most rules read each file, which is parsed once."""
    tree = ast.parse(path.read_text(), str(path))
    for node in statements(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            parent = folders[: len(folders) + 1 - node.level]
            node.module = ".".join((*parent, *filter(None, [node.module])))
            node.level = 0
    return tree


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield every statement inside, at any depth. Most nodes of a tree are in expressions."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            if isinstance(child, ast.stmt):
                yield child
            yield from statements(child)


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a module imports, wherever in it."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def loads(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of what a module loads by ``importlib.import_module("NAME")``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (
                (node.lineno, str(n.value)) for n in node.args if isinstance(n, ast.Constant)
            )


def says(root: Path, path: Path, line: int, text: str) -> str:
    return f"{path.relative_to(root)}:{line}: {text}"


def files_are_short(root: Path) -> list[str]:
    return [
        says(root, path, lines, f"{lines} lines")
        for path in code_files(root, *(CODE - {".proto"}))
        if (lines := path.read_text().count("\n")) > MAX_FILE_LINES
    ]


def functions_are_short(root: Path) -> list[str]:
    return [
        says(root, path, node.lineno, f"{node.name} has {lines} lines")
        for path, tree in modules(root)
        for node in statements(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]


def lines_are_short(root: Path) -> list[str]:
    return [
        says(root, path, number, f"{len(line)} characters")
        for path in code_files(root, *(CODE - {".proto"}))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > MAX_LINE_CHARACTERS
    ]


def imports_go_one_way(root: Path) -> list[str]:
    return [
        says(root, path, line, f"imports {name}")
        for path, tree in modules(root, *PACKAGES)
        for line, name in imports(tree)
        if name.split(".")[0] in _forbidden_imports(path.relative_to(root))
    ]


def integrations_stand_on_public_interfaces(root: Path) -> list[str]:
    """Integrations import from the planes and the engine only what the modules in ``PUBLIC``
    export, and from ``kvplane`` neither ``runtime``, which re-exports the planes, nor a name with
    a leading underscore. No other code of the product imports an integration.
    """
    exported = {f"{module}.{name}" for module in PUBLIC for name in _exported(root, module)}
    return [
        says(root, path, line, f"imports {name}")
        for path, tree in modules(root, *PACKAGES)
        for line, name in (*imports(tree), *loads(tree))
        if not _is_public(path.relative_to(root).parts[0] == "integrations", name, exported)
    ]


def _exported(root: Path, module: str) -> set[str]:
    """The names in ``__all__`` of a module."""
    base = root / module.replace(".", "/")
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    for node in ast.parse(path.read_text()).body if path.is_file() else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def _is_public(to_integrations: bool, name: str, exported: set[str]) -> bool:
    if not to_integrations:
        return not name.startswith(("integrations", "kvplane.integrations"))
    if name.startswith(("control_plane", "data_plane", "engine", "kvplane.runtime")):
        return name in exported
    is_ours = name.startswith(("kvplane", "integrations"))
    return not (is_ours and any(part.startswith("_") for part in name.split(".")))


def _forbidden_imports(path: Path) -> set[str]:
    folders = [folder for folder in FORBIDDEN_IMPORTS if path.is_relative_to(folder)]
    return FORBIDDEN_IMPORTS[folders[-1]]


def what_is_installed_in_kvplane_imports_itself_by_relative_names(root: Path) -> list[str]:
    """In the wheel it has another name than in the tree."""
    absolute = re.compile(r"\s*(?:from|import) (?:engine|(?:kvplane\.)?integrations)\b")
    return [
        says(root, path, number, line.strip())
        for path in code_files(root, ".py")
        if path.relative_to(root).parts[0] in ("engine", "integrations")
        and "tests" not in path.parts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if absolute.match(line)
    ]


def only_the_server_of_a_plane_knows_grpc(root: Path) -> list[str]:
    return [
        says(root, path, line, f"imports {name}")
        for path, tree in modules(root, *PLANES)
        for line, name in imports(tree)
        if name.split(".")[0].startswith("grpc") and path.relative_to(root).parts[1] != GRPC_FOLDER
    ]


def no_module_imports_itself_by_way_of_others(root: Path) -> list[str]:
    """Imports for type checkers count too: they show who knows whom."""
    files = {module_name(root, path): (path, tree) for path, tree in modules(root, *PACKAGES)}
    graph = {
        name: {found for _, imported in imports(tree) if (found := _module_of(imported, files))}
        for name, (_, tree) in files.items()
    }
    return list(_circles({n: found - {n} for n, found in graph.items()}))


def _circles(graph: dict[str, set[str]]) -> Iterator[str]:
    """The first circle in a graph, if there is one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield "circle: " + " -> ".join(reversed(error.args[1]))


def module_name(root: Path, path: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _module_of(imported: str, files: Container[str]) -> str | None:
    """The module that an imported name is, or is in; a package counts for its __init__ alone."""
    parent = imported.rpartition(".")[0]
    return imported if imported in files else parent if parent in files else None


# What only puts parts together is tested through the programs, and servers over the wire.
ASSEMBLY = {"__init__", "__main__"}
# Folders and modules of which each file has tests of its own.
CORES = (
    *(f"control_plane/{each}" for each in ("admission", "pools", "sessions", "steps")),
    "control_plane/registration",
    "data_plane/execution/counters.py",
    "data_plane/execution/executor.py",
    "data_plane/execution/plan_runner.py",
    "data_plane/execution/shards",
    "data_plane/kernels",
    "data_plane/memory",
    "data_plane/plans",
)


def modules_of_the_core_are_named_by_a_test(root: Path) -> list[str]:
    """By a file of tests: helpers and planted faults do not count."""
    named = {
        name
        for path, tree in modules(root, "tests")
        if path.name.startswith("test_")
        for _, name in imports(tree)
    }
    named |= {name.rpartition(".")[0] for name in named}
    return [
        f"{path.relative_to(root)}: no test imports it"
        for path, _ in modules(root, *PLANES)
        if any(path.is_relative_to(root / core) for core in CORES)
        and path.stem not in ASSEMBLY
        and module_name(root, path) not in named
    ]


def folders_form_no_circle(root: Path) -> list[str]:
    """Sibling folders do not import each other in a circle. An import counts as one between the
    two siblings at which the files' paths diverge. Imports made by ``kvplane/runtime`` are
    ignored, because it puts the planes together.
    """
    files = {module_name(root, path): (path, tree) for path, tree in modules(root, *PACKAGES)}
    graph: dict[str, set[str]] = {}
    for path, tree in files.values():
        own = path.parent.relative_to(root).parts
        if own[:2] == ("kvplane", "runtime"):
            continue
        for _, imported in imports(tree):
            if found := _module_of(imported, files):
                other = files[found][0].parent.relative_to(root).parts
                depths = range(1, min(len(own), len(other)) + 1)
                if depth := next((i for i in depths if own[:i] != other[:i]), 0):
                    graph.setdefault("/".join(own[:depth]), set()).add("/".join(other[:depth]))
    return list(_circles(graph))


def folders_of_the_block_store_form_no_circle(root: Path) -> list[str]:
    """The folders directly in ``csrc/blocks`` do not include each other's files in a circle."""
    store = root / "csrc" / "blocks"
    graph: dict[str, set[str]] = {}
    for path in code_files(root, ".cpp", ".h"):
        if path.is_relative_to(store):
            own = path.relative_to(store).parts[0]
            included = re.findall(r'^#\s*include\s*"(\w+)/', path.read_text(), re.MULTILINE)
            graph.setdefault(own, set()).update(set(included) - {own})
    return list(_circles(graph))


def the_block_store_knows_nothing_above_it(root: Path) -> list[str]:
    """It is ints and bytes: only its bindings know Python, and eviction knows only types of it."""
    python = re.compile(r'#\s*include\s*[<"](Python\.h|pybind11/|bindings/)')
    others = re.compile(r'#\s*include\s*"(?!eviction/|core/types\.h)')
    return [
        says(root, path, number, line.strip())
        for path in code_files(root, ".cpp", ".h")
        if path.relative_to(root).parts[:2] == ("csrc", "blocks")
        and (folder := path.relative_to(root).parts[2]) not in ("bindings", "tests", "build")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if python.match(line) or (folder == "eviction" and others.match(line))
    ]


def metrics_are_made_in_metrics_files(root: Path) -> list[str]:
    faults = []
    for path, tree in modules(root, *PACKAGES):
        imported = {name for _, name in imports(tree)}
        if not any(name.startswith("prometheus_client") for name in imported):
            continue
        makers = {f"prometheus_client.{name}" for name in METRICS}
        makers |= {name for name in METRICS if f"prometheus_client.{name}" in imported}
        faults += [
            says(root, path, node.lineno, f"makes a {ast.unparse(node.func)}")
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and ast.unparse(node.func) in makers
            and path.name != "metrics.py"
        ]
    return faults


SUFFIXES = "py|md|proto|sh|toml|yml|yaml|json|txt|cpp|h|cu|cuh"
TOP = "|".join(re.escape(folder) for folder in (*FOLDERS, "docs", "requirements"))
NAMED_PATH = re.compile(
    rf"(?<![\w./*{{<-])((?:{TOP})/[\w./*-]*|(?:\.{{0,2}}/)?[\w.*/-]+\.(?:{SUFFIXES}))(?![\w*{{<])"
)
# A project, and files that a reader makes.
NAMED_LIKE_A_FILE = {"llama.cpp", "access.toml", "layout.json"}


def documents(root: Path) -> list[Path]:
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]


def named_files_exist(root: Path) -> list[str]:
    names = {path.name for path in code_files(root)} | {path.name for path in root.iterdir()}
    faults = []
    for document in documents(root):
        for number, line in enumerate(document.read_text().splitlines(), 1):
            for name in NAMED_PATH.findall(re.sub(r"https?://\S+", "", line)):
                path = name.rstrip(".")
                found = (
                    any(root.glob(path.rstrip("/")))
                    or (document.parent / path).exists()
                    or ("/" not in path and path in names | NAMED_LIKE_A_FILE)
                )
                if not found:
                    faults.append(says(root, document, number, f"names {path}"))
    return faults


LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([\w-]+))?\)")


def links_lead_somewhere(root: Path) -> list[str]:
    """In documents and in the pages of folders: to a file, and to a heading of it."""
    faults = []
    of_folders = (root.glob(f"{folder}/{at}README.md") for folder in FOLDERS for at in ("", "*/"))
    for document in [*documents(root), *(page for pages in of_folders for page in sorted(pages))]:
        for number, line in enumerate(document.read_text().splitlines(), 1):
            for path, anchor in LINK.findall(line):
                page = document.parent / path if path else document
                if not page.exists() or (anchor and anchor not in _anchors(page)):
                    faults.append(says(root, document, number, f"links to {path}#{anchor}"))
    return faults


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    kept = (re.sub(r"[^\w -]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


SYMBOL = re.compile(r"`([\w./]+\.(?:py|cpp|h))::([\w.]+)`")
INVARIANTS = "## What always holds"


def named_symbols_exist(root: Path) -> list[str]:
    """Documents name a function, class or test as `folder/file.py::Name` or `::Class.method`, also
    in C++.
    """
    return [
        says(root, document, number, f"names {path}::{symbol}")
        for document in documents(root)
        for number, line in enumerate(document.read_text().splitlines(), 1)
        for path, symbol in SYMBOL.findall(line)
        if symbol not in _symbols(root / path)
    ]


def _symbols(path: Path) -> set[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    if not path.is_file():
        return set()
    if path.suffix != ".py":
        return _cpp_symbols(path.read_text())
    top = [node for node in ast.parse(path.read_text()).body if isinstance(node, kinds)]
    members = {f"{n.name}.{m.name}" for n in top for m in n.body if isinstance(m, kinds)}
    return members | {node.name for node in top}


def _cpp_symbols(text: str) -> set[str]:
    """Classes, their functions, and those outside of any, as clang-format indents them."""
    found, current = set(), ""
    for line in text.splitlines():
        if match := re.match(r"(?:class|struct) (\w+)[^;]*$", line):
            current = match[1]
            found.add(current)
        elif line.startswith("};"):
            current = ""
        elif (match := re.match(r"(  )?(?=\w)[^(]*?\b(?:(\w+)::)?(\w+)\(", line)) and bool(
            match[1]
        ) == bool(current):
            owner = match[2] or current
            found.add(f"{owner}.{match[3]}" if owner else match[3])
    return found


def each_invariant_names_its_code_and_its_test(root: Path) -> list[str]:
    """Rows of the table of invariants begin with their number."""
    document = root / "docs" / "internals.md"
    section = document.read_text().partition(INVARIANTS)[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \|(.*)$", section, re.MULTILINE)
    faults = [] if rows else ["docs/internals.md: no invariants"]
    for number, row in rows:
        paths = [path for path, _ in SYMBOL.findall(row)]
        if not any(not path.startswith("tests/") for path in paths):
            faults.append(f"invariant {number}: names no code")
        if not any(path.startswith("tests/") for path in paths):
            faults.append(f"invariant {number}: names no test")
    return faults


def the_readme_is_short(root: Path) -> list[str]:
    readme = root / "README.md"
    num_lines = readme.read_text().count("\n")
    return [f"README.md: {num_lines} lines"] if num_lines > MAX_README_LINES else []


def the_documents_are_short(root: Path) -> list[str]:
    bounds = {"docs": MAX_PAGE_LINES, "docs/adr": MAX_DECISION_LINES}
    lines = {
        folder: sum(page.read_text().count("\n") for page in (root / folder).glob("*.md"))
        for folder in bounds
    }
    return [f"{name}: {lines[name]} lines" for name, most in bounds.items() if lines[name] > most]


def kernels_include_no_torch(root: Path) -> list[str]:
    pattern = re.compile(r'#\s*include\s*[<"](torch|ATen|c10)[/.]')
    return [
        says(root, path, number, line.strip())
        for path in code_files(root, ".cpp", ".h", ".cu", ".cuh")
        if path.relative_to(root).parts[0] == "csrc"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]


def test_folders_are_no_packages(root: Path) -> list[str]:
    """One of them, named like a plane, would hide the plane from pytest."""
    return [str(p.relative_to(root)) for p in sorted((root / "tests").rglob("__init__.py"))]


def test_files_have_names_of_their_own(root: Path) -> list[str]:
    """Without packages, two files of one name are one module to pytest."""
    names = Counter(path.name for path in (root / "tests").rglob("test_*.py"))
    return [f"tests: {num} files named {name}" for name, num in sorted(names.items()) if num > 1]


def nothing_is_left_unfinished(root: Path) -> list[str]:
    words = ("TO" + "DO", "FIX" + "ME", "X" * 3)
    marks = tuple(f"pytest.{mark}" for mark in ("mark.skip", "mark.xfail", "skip(", "xfail("))
    pattern = re.compile(rf"\b(?:{'|'.join(words)})\b|{'|'.join(map(re.escape, marks))}")
    return [
        says(root, path, number, match.group())
        for path in code_files(root)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := pattern.search(line)) and path.name != "tidy_rules.py"
    ]
