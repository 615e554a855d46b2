"""Print how large and how tangled the house is, and fail where it is worse than the limits below: `make house`.

A limit is the goal where the goal is met, else the last value that was reached, with the goal beside it.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "specdecpp"
CODE = {".py", ".h", ".cpp", ".js"}
CORE = ("policies", "costs", "drafters", "head")
OUTER = ("lab", "serving", "training", "distillation", "bench", "report", "cli", "integrations", "replay")
BACKENDS = ("eager", "lean", "native", "graphs", "llama_cpp")
BAD_STARTS = ("Of", "Whether", "What", "As", "That", "The same")


@dataclass(frozen=True)
class Bar:
    """One figure: its value must not exceed `limit`; `goal` is what the project aims at."""

    name: str
    value: float
    limit: float
    goal: float

    @property
    def is_kept(self) -> bool:
        return self.value <= self.limit


def sources() -> list[Path]:
    """Source files, models and data left out."""
    return sorted(path for path in SRC.rglob("*") if path.suffix in CODE)


def lines(paths: list[Path]) -> list[str]:
    return [line for path in paths for line in path.read_text().splitlines()]


def room(path: Path) -> str:
    """The folder below `specdecpp` that a file lies in, or the file's own name at the top."""
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def is_core(path: Path) -> bool:
    return path.suffix == ".py" and ((path.parent == SRC and room(path) not in OUTER) or room(path) in CORE)


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sources():
        if path.suffix == ".py":
            yield path, ast.parse(path.read_text())


def imported(tree: ast.Module) -> set[str]:
    """Modules of the project that a file imports, by whatever form."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("specdecpp"):
            found |= {node.module} | {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name.startswith("specdecpp")}
    return found


def wrong_imports() -> list[str]:
    """Files outside lab that import lab, and files of the core that import a backend by name, serving, training and others."""
    wrong = []
    for path, tree in trees():
        if room(path) == "lab":
            continue
        names = imported(tree)
        forbidden = {"specdecpp.lab"}
        if is_core(path) and path.stem not in ("__main__", "__init__"):
            forbidden |= {f"specdecpp.{room}" for room in OUTER} | {f"specdecpp.backends.{backend}" for backend in BACKENDS}
        found = {one for one in forbidden for name in names if name == one or name.startswith(f"{one}.")}
        wrong += [f"{path.relative_to(SRC)} imports {name}" for name in sorted(found)]
    return wrong


def circles() -> list[str]:
    """Modules that import each other when they are loaded: what can be sorted no further."""
    modules = {module_of(path) for path in sources() if path.suffix == ".py"}
    needs = {}
    for path, tree in trees():
        at_load = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
        named = {(node.module, f"{node.module}.{name.name}") for node in at_load for name in node.names}
        needs[module_of(path)] = {full if full in modules else module for module, full in named if module in modules}
    while free := [name for name, needed in needs.items() if not needed & needs.keys()]:
        for name in free:
            del needs[name]
    return sorted(needs)


def module_of(path: Path) -> str:
    return ".".join(["specdecpp", *path.relative_to(SRC).with_suffix("").parts]).removesuffix(".__init__")


def docstrings() -> Iterator[str]:
    for _, tree in trees():
        for node in ast.walk(tree):
            has_one = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if has_one and (text := ast.get_docstring(node)):
                yield text


def doubled_classes() -> list[str]:
    files = defaultdict(list)
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(str(path.relative_to(SRC)))
    return [f"{name}: {', '.join(paths)}" for name, paths in sorted(files.items()) if len(paths) > 1]


def words(paths: list[Path]) -> int:
    return sum(len(path.read_text().split()) for path in paths)


def public_names() -> int:
    text = (SRC / "__init__.py").read_text()
    return len(re.findall(r'^    "\w+",', text[text.index("__all__") :], re.MULTILINE))


def bars() -> list[Bar]:
    files = sources()
    in_lab = [path for path in files if room(path) == "lab"]
    long_files = [path for path in files if len(lines([path])) > 400]
    return [
        Bar("lines of source", len(lines(files)), 33_010, 25_000),
        Bar("lines of lab", len(lines(in_lab)), 3_500, 3_500),
        Bar("lines of the core", len(lines([path for path in files if is_core(path)])), 6_160, 4_600),
        Bar("files over 400 lines", len(long_files), 0, 0),
        Bar("lines of tests", len(lines([path for path in (ROOT / "tests").rglob("*.py")])), 26_622, 20_000),
        Bar("words of docs", words(sorted((ROOT / "docs").glob("*.md"))), 12_000, 12_000),
        Bar("lines of CHANGELOG", len(lines([ROOT / "CHANGELOG.md"])), 80, 80),
        Bar("lines of LOG", len(lines([ROOT / "LOG.md"])), 300, 300),
        Bar("imports against the order of rooms", len(wrong_imports()), 0, 0),
        Bar("modules that import each other", len(circles()), 0, 0),
        Bar("class names that stand twice", len(doubled_classes()), 0, 0),
        Bar("public names", public_names(), 20, 20),
        Bar("docstrings that begin with no noun or verb", sum(text.startswith(BAD_STARTS) for text in docstrings()), 40, 40),
    ]


def main() -> int:
    code = [line for line in lines(sources()) if line.strip()]
    print(f"{'':44}{'now':>8}{'limit':>8}{'goal':>8}")
    found = bars()
    for bar in found:
        print(f"{bar.name:44}{bar.value:8.0f}{bar.limit:8.0f}{bar.goal:8.0f}{'' if bar.is_kept else '   too many'}")
    density = len(code) / len(lines(sources()))
    print(f"median line {median(map(len, code)):.0f} characters; lines that are not empty: {density:.0%}")
    if "-v" in sys.argv:
        print(*wrong_imports(), *circles(), *doubled_classes(), sep="\n")
        print(*(f"{path.relative_to(SRC)}: {len(lines([path]))}" for path in sources() if len(lines([path])) > 400), sep="\n")
    return 0 if all(bar.is_kept for bar in found) else 1


if __name__ == "__main__":
    sys.exit(main())
