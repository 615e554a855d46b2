"""The public names, what importing them costs, which room may import which, and the exception tree."""

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import specdecpp
from specdecpp import errors

PACKAGE = Path(specdecpp.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
# Everything else is online. Testing is neither: it serves both and the tests.
FLOORS = (("replay",), ("training",), ("bench",), ("report",), ("distillation", "serving", "integrations"), ("cli",), ("lab",))
"""Of what is offline: a door leads down, or to the same room."""
OFFLINE = tuple(room for floor in FLOORS for room in floor)
# Those of pyproject.toml's dependencies, by the names they are imported by; extras are everything else.
BASE = {
    "torch",
    "transformers",
    "safetensors",
    "numpy",
    "pyarrow",
    "typer",
    "rich",
    "yaml",
    "jaxtyping",
    "gguf",
    "jinja2",
    "pydantic",
}
# Nor is the package's own face, which names a door into another engine and opens it when it is asked for.
ONLINE = [m for m in MODULES if m != "specdecpp" and m.split(".")[1] not in (*OFFLINE, "testing", "__main__")]


def python(code: str) -> str:
    """What a new interpreter prints, warnings being errors."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def imports_of(module: str) -> Iterator[str]:
    """Modules of ours that a module imports anywhere, also inside functions and for type checking only."""
    path = MODULES[module]
    here = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            names = [source, *(f"{source}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "specdecpp")


def imported_at_once(body: list[ast.stmt]) -> Iterator[str]:
    """Packages of others that a module imports as soon as it is imported itself: outside functions and type checking."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).split(".")[0]
        elif isinstance(node, ast.Try) or (isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING"):
            yield from imported_at_once(node.body)


def is_within(module: str, room: str) -> bool:
    return module == f"specdecpp.{room}" or module.startswith(f"specdecpp.{room}.")


def test_public_names_are_those_that_load_and_that_type_checkers_see() -> None:
    """Catches a name that its module no longer has, one that is listed twice, that can be loaded but is not public, or that is
    missing under TYPE_CHECKING, where editors and pyright look; and a package that imports its own before it is asked."""
    assert len(specdecpp.__all__) == len(set(specdecpp.__all__)) == sum(map(len, specdecpp._HOMES.values()))
    assert set(specdecpp.__all__) == set(specdecpp._HOME_OF)
    for name in specdecpp.__all__:
        value = getattr(specdecpp, name)
        assert getattr(value, "__name__", name) == name
        assert value.__doc__, f"{name} has no docstring"
    body = ast.parse(Path(specdecpp.__file__).read_text(encoding="utf-8")).body
    (block,) = (n for n in body if isinstance(n, ast.If))
    seen = {a.name: n.module for n in ast.walk(block) if isinstance(n, ast.ImportFrom) for a in n.names}
    assert seen == specdecpp._HOME_OF
    at_once = [ast.unparse(n) for n in body if isinstance(n, ast.Import | ast.ImportFrom)]
    assert at_once == ["from importlib import import_module", "from typing import TYPE_CHECKING"]


def test_a_new_interpreter_lists_and_imports_them() -> None:
    """Catches completion that shows no names until they are used, and a name that fails only when all are asked for."""
    first, second = python("import specdecpp as s; print(*dir(s)); from specdecpp import *; print(Fixed(k=2).k)").splitlines()
    assert set(specdecpp.__all__) <= set(first.split())
    assert (len(first.split()), second) == (len(set(first.split())), "2")


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    """Catches a module __getattr__ that raises KeyError, which breaks hasattr and the import statement's message."""
    assert not hasattr(specdecpp, "Speculator")
    with pytest.raises(ImportError, match="Speculator"):
        exec("from specdecpp import Speculator")


@pytest.mark.parametrize("then", ["", "import specdecpp.errors", "specdecpp.__version__; specdecpp.SpecdecError"])
def test_importing_the_package_imports_neither_torch_nor_transformers(then: str) -> None:
    """Catches what makes `specdecpp --help` take seconds, and a lazy name that drags torch in for an except clause."""
    code = f"import sys, specdecpp; {then}\nprint(*(m for m in ('torch', 'transformers', 'numpy') if m in sys.modules))"
    assert python(code).split() == []


@pytest.mark.parametrize("module", ONLINE)
def test_online_modules_import_no_offline_room(module: str) -> None:
    """Catches decoding that needs training, the bench, a server, an integration or the command line to import."""
    assert not [name for name in imports_of(module) if any(is_within(name, room) for room in OFFLINE)]


@pytest.mark.parametrize("room", OFFLINE)
def test_a_door_leads_down(room: str) -> None:
    """Catches a bench that knows how it is reported, and two rooms that cannot be read one after the other."""
    lower = [other for floor in FLOORS[: next(i for i, floor in enumerate(FLOORS) if room in floor)] for other in floor]
    open_to = {*lower, room}
    found = {name for module in MODULES if is_within(module, room) for name in imports_of(module)}
    assert not [name for name in found for other in OFFLINE if is_within(name, other) and other not in open_to]


def test_a_replay_needs_the_policies_and_numpy() -> None:
    """Catches a replay that needs torch, a model, or another room but that of costs, to be imported."""
    theory = [module for module in MODULES if is_within(module, "replay")]
    needed = {name for module in theory for name in imports_of(module) if not is_within(name, "replay")}
    assert needed
    assert all(is_within(name, "policies") or is_within(name, "costs") for name in needed), needed
    assert not [name for name in needed if is_within(name, "costs.measuring")]
    assert python(f"import sys, {', '.join(theory)}; print(*({{'torch', 'transformers'}} & {{*sys.modules}}))").split() == []


@pytest.mark.parametrize("module", MODULES)
def test_extras_are_imported_where_they_are_used(module: str) -> None:
    """Catches an optional dependency at the top of a file: all that imports it fails without it, with no kind error."""
    found = imported_at_once(ast.parse(MODULES[module].read_text(encoding="utf-8")).body)
    extras = {name for name in found if name not in BASE and name not in sys.stdlib_module_names and name != "specdecpp"}
    # The inside of a server, of a plugin that vLLM loads, and kernels are made of them; their doors check first.
    is_inside = any(is_within(module, room) and module != f"specdecpp.{room}" for room in ("serving", "integrations.vllm"))
    is_kernel = is_within(module, "backends.graphs.kernels")
    assert not extras or is_inside or (is_kernel and extras == {"triton"}), extras


def test_the_scans_see_what_they_are_about() -> None:
    """Catches vacuous rules: the scans find modules and imports that are there, and the package's own dependencies."""
    assert {"specdecpp.session", "specdecpp.backends.eager", "specdecpp.policies", "specdecpp.loading.pair"} <= set(ONLINE)
    assert "specdecpp.head" in imports_of("specdecpp.policies.head"), "imports for type checking count"
    app = ast.parse(MODULES["specdecpp.serving.app"].read_text(encoding="utf-8"))
    assert "fastapi" in set(imported_at_once(app.body))
    named = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    assert {re.split(r"[>=<]", name)[0] for name in named} == BASE - {"yaml"} | {"pyyaml"}


def test_every_error_is_one_of_ours_and_public() -> None:
    """Catches an error that `except SpecdecError` misses."""
    found = {name: e for name, e in vars(errors).items() if inspect.isclass(e) and e.__module__ == errors.__name__}
    assert "SpecdecError" in found
    for name, error in found.items():
        assert issubclass(error, errors.SpecdecError)
        assert name in specdecpp.__all__ or name == "MissingExtraError"
