"""Shared by the tests: the overlay on ``sys.path``, fake modules for the import hook, and probes for optional packages."""

import importlib
import sys
import tempfile
import types
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OVERLAY = Path(__file__).resolve().parent.parent / "overlay"
if str(OVERLAY) not in sys.path:
    sys.path.insert(0, str(OVERLAY))


def missing(*names: str) -> str:
    """Why these modules cannot be imported, or nothing."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 (any failure to import is a reason)
            return f"{name} cannot be imported: {type(error).__name__}: {error}"
    return ""


def needs(*names: str):
    """Skip a test or a class, with the reason, where a module cannot be imported."""
    reason = missing(*names)
    return unittest.skipIf(bool(reason), reason)


@contextmanager
def modules_on_disk(sources: dict[str, str]) -> Iterator[Path]:
    """Modules and packages with these sources (dotted name to text) importable inside the block, forgotten after it."""
    before = set(sys.modules)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        packages = {name[:at] for name in sources for at, char in enumerate(name) if char == "."}
        for name, text in sources.items():
            file = root.joinpath(*name.split("."))
            file = file / "__init__.py" if name in packages else file.with_suffix(".py")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        for package in packages - set(sources):
            folder_of = root.joinpath(*package.split("."))
            folder_of.mkdir(parents=True, exist_ok=True)
            (folder_of / "__init__.py").touch()
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            yield root
        finally:
            sys.path.remove(folder)
            for name in set(sys.modules) - before:
                del sys.modules[name]


def module_from(text: str, name: str = "fake") -> types.ModuleType:
    """A module with this source, not imported and not registered."""
    module = types.ModuleType(name)
    exec(compile(text, f"<{name}>", "exec"), module.__dict__)  # noqa: S102
    return module
