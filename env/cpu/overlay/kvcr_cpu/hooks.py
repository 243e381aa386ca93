"""Import hook: run a patch right after the module it belongs to has been executed.

Imported by ``sitecustomize`` in every Python process of the stack, so it imports nothing that is not already loaded at that point.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

LOG_VARIABLE = "KVCR_PHASE1_OVERLAY_LOG"


class OverlayError(ImportError):
    """A patch met an upstream module of another shape than the one it was written for."""


class Patch:
    """One change to one upstream module.

    ``function`` names a function of ``kvcr_cpu.patches`` (loaded only when needed) that gets the freshly executed module. It returns
    False when upstream no longer needs the change, and raises ``ShapeError`` when the module does not look as the patch assumes.
    """

    __slots__ = ("distribution", "function", "module", "name", "written_for")

    def __init__(
        self,
        name: str,
        module: str,
        distribution: "tuple[str, ...]",
        written_for: str,
        function: "str | Callable[[ModuleType], bool | None]",
    ) -> None:
        self.name = name
        self.module = module
        self.distribution = distribution
        self.written_for = written_for
        self.function = function

    def run(self, module: "ModuleType") -> None:
        apply = self.function
        if isinstance(apply, str):
            from . import patches

            apply = getattr(patches, apply)
        try:
            needed = apply(module)
        except ShapeError as error:
            raise OverlayError(
                f"overlay patch '{self.name}' does not fit {self._found()}: {error}; it was written for "
                f"{self.distribution[0]} {self.written_for} (file: {getattr(module, '__file__', '?')})",
                name=self.module,
            ) from None
        log("not needed" if needed is False else "applied", self.name)

    def _found(self) -> str:
        from importlib.metadata import PackageNotFoundError, version

        for distribution in self.distribution:
            try:
                return f"{distribution} {version(distribution)}"
            except PackageNotFoundError:
                continue
        return f"an unknown release of {self.distribution[0]}"


class ShapeError(Exception):
    """Raised by ``expect``; ``Patch.run`` turns it into an ``OverlayError`` that names the release."""


def expect(module: "ModuleType", path: str, parameters: "Sequence[str] | None" = None) -> object:
    """Return ``module.path``; if ``parameters`` is given it must be a function whose positional parameters are exactly these."""
    found: object = module
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ShapeError(f"{module.__name__}.{path} is missing") from None
    if parameters is not None:
        code = getattr(found, "__code__", None)
        if code is None:
            raise ShapeError(f"{module.__name__}.{path} is not a Python function")
        actual = code.co_varnames[: code.co_argcount]
        if actual != tuple(parameters):
            raise ShapeError(f"{module.__name__}.{path} takes ({', '.join(actual)}), expected ({', '.join(parameters)})")
    return found


def log(what: str, name: str) -> None:
    """Say on stderr, in one write and past any redirected ``sys.stderr``, that a patch was dealt with (only when asked to)."""
    if os.environ.get(LOG_VARIABLE) == "1":
        try:
            os.write(2, f"overlay: {what} {name}\n".encode())
        except OSError:
            pass


class PatchFinder:
    """Meta path finder that lets the other finders find a module and hooks its patches to the end of its execution."""

    def __init__(self, patches: "Iterable[Patch]") -> None:
        self._patches: dict[str, list[Patch]] = {}
        for patch in patches:
            self._patches.setdefault(patch.module, []).append(patch)

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        patches = self._patches.get(name)
        if patches is None:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._hook(spec, patches)
                return spec
        return None

    @staticmethod
    def _hook(spec: "ModuleSpec", patches: "list[Patch]") -> None:
        """Shadow ``exec_module`` on this spec's own loader, so that its other methods stay what tools expect."""
        loader = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            raise OverlayError(f"overlay cannot hook the loader of {spec.name}: {type(loader).__name__}", name=spec.name)

        def exec_module(module: "ModuleType") -> None:
            execute(module)
            for patch in patches:
                patch.run(module)

        try:
            loader.exec_module = exec_module  # type: ignore[method-assign, union-attr]
        except AttributeError:
            raise OverlayError(
                f"overlay cannot hook the loader of {spec.name}: {type(loader).__name__}", name=spec.name
            ) from None


def install(patches: "Iterable[Patch]") -> None:
    """Register the patches, once. A module imported before this call is refused: its patches could only be half applied."""
    patches = list(patches)
    if any(isinstance(finder, PatchFinder) for finder in sys.meta_path):
        return
    late = sorted({patch.module for patch in patches} & set(sys.modules))
    if late:
        raise OverlayError(f"overlay installed too late, already imported: {', '.join(late)}")
    sys.meta_path.insert(0, PatchFinder(patches))
