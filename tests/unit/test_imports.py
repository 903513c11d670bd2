"""The direction of dependencies: each package may import only what stands before it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "petra"
HELPERS = {"formatting"}
ENGINE = {"schedule", "reversible", "optim", "methods", "corrections", "pipeline"}
ALLOWED = {
    "schedule": set(),
    "reversible": set(),
    "kernels": set(),
    "optim": set(),
    "data": {"reversible"},
    "conversion": {"reversible"},
    "models": {"reversible", "kernels", "conversion"},
    "simulation": {"schedule"},
    "methods": {"schedule", "reversible"},
    "corrections": {"schedule", "reversible", "optim"},
    "pipeline": ENGINE - {"pipeline"},
    "distributed": ENGINE,
    "cudagraph": ENGINE,
    "memory": {"reversible", "cudagraph"},
    "measure": ENGINE | {"distributed", "simulation"},
    "trainer": ENGINE | {"conversion", "distributed", "cudagraph", "data"},
    "runs": ENGINE | {"conversion", "distributed", "cudagraph", "models", "data", "measure", "memory", "trainer"},
    "integrations": ENGINE | {"conversion", "distributed", "models", "data", "measure", "trainer", "runs"},
    "report": {"schedule", "methods", "measure", "trainer", "runs"},
    "cli": ENGINE
    | {
        "conversion",
        "distributed",
        "cudagraph",
        "models",
        "data",
        "measure",
        "memory",
        "simulation",
        "trainer",
        "runs",
        "report",
        "integrations",
    },
}


def imported(path):
    """The packages of ours that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "petra" else [module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("petra."))


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_what_stands_before_them(package):
    # the first four stand alone: they may not even use the helpers
    allowed = ALLOWED[package] | {package} | (HELPERS if ALLOWED[package] else set())
    for path in (ROOT / package).rglob("*.py"):
        assert set(imported(path)) <= allowed, path


def test_every_package_is_listed():
    assert {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(ALLOWED)


def test_schedule_knows_no_torch():
    for path in (ROOT / "schedule").rglob("*.py"):
        assert "torch" not in path.read_text()
