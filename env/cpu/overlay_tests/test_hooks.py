"""The import hook: patches run after their module, failures are named, other processes are left alone."""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import unittest
from pathlib import Path
from tempfile import TemporaryDirectory

from support import OVERLAY, module_from, modules_on_disk

from kvcr_cpu import hooks, table
from kvcr_cpu.hooks import OverlayError, Patch, PatchFinder, ShapeError, expect


@contextlib.contextmanager
def finder(*patches: Patch):
    found = PatchFinder(patches)
    sys.meta_path.insert(0, found)
    try:
        yield found
    finally:
        sys.meta_path.remove(found)


def patch(module: str, function, name: str = "a-patch") -> Patch:
    return Patch(name, module, ("no-such-distribution",), "1.2.3", function)


class Finder(unittest.TestCase):
    def test_runs_after_the_module_and_before_its_importer_goes_on(self):
        def double(module):
            module.value *= 2

        with modules_on_disk({"ov_mod": "value = 21\nseen = 'original'", "ov_user": "from ov_mod import value"}):
            with finder(patch("ov_mod", double)):
                self.assertEqual(importlib.import_module("ov_user").value, 42)
                self.assertEqual(importlib.import_module("ov_mod").seen, "original")

    def test_submodule_of_a_package(self):
        with modules_on_disk({"ov_pkg.deep.mod": "x = 1"}):
            with finder(patch("ov_pkg.deep.mod", lambda m: setattr(m, "x", 2))):
                self.assertEqual(importlib.import_module("ov_pkg.deep.mod").x, 2)

    def test_several_patches_of_one_module_run_in_order(self):
        with modules_on_disk({"ov_mod": "order = []"}):
            with finder(patch("ov_mod", lambda m: m.order.append(1)), patch("ov_mod", lambda m: m.order.append(2))):
                self.assertEqual(importlib.import_module("ov_mod").order, [1, 2])

    def test_reload_patches_again(self):
        with modules_on_disk({"ov_mod": "x = 1"}):
            with finder(patch("ov_mod", lambda m: setattr(m, "x", m.x + 1))):
                module = importlib.import_module("ov_mod")
                self.assertEqual(importlib.reload(module).x, 2)

    def test_other_modules_and_missing_modules_are_not_touched(self):
        with modules_on_disk({"ov_other": "x = 1"}), finder(patch("ov_absent", lambda m: None)) as found:
            self.assertIsNone(found.find_spec("ov_other"))
            self.assertEqual(importlib.import_module("ov_other").x, 1)
            with self.assertRaises(ModuleNotFoundError):
                importlib.import_module("ov_absent")

    def test_loader_keeps_its_other_methods(self):
        with modules_on_disk({"ov_mod": "x = 1"}), finder(patch("ov_mod", lambda m: None)):
            spec = importlib.import_module("ov_mod").__spec__
            self.assertEqual(spec.loader.get_source("ov_mod"), "x = 1")
            self.assertTrue(spec.origin.endswith("ov_mod.py"))

    def test_wrong_shape_names_patch_release_and_module_and_stops_the_import(self):
        def wrong(module):
            expect(module, "gone")

        with modules_on_disk({"ov_mod": "x = 1"}), finder(patch("ov_mod", wrong, "needs-gone")):
            with self.assertRaises(OverlayError) as caught:
                importlib.import_module("ov_mod")
            self.assertNotIn("ov_mod", sys.modules)
        text = str(caught.exception)
        for part in ("needs-gone", "no-such-distribution", "1.2.3", "ov_mod.gone is missing"):
            self.assertIn(part, text)

    def test_installed_release_is_named(self):
        found = Patch("p", "m", ("no-such-distribution", "pip"), "1", lambda m: None)._found()
        try:
            from importlib.metadata import version

            self.assertEqual(found, f"pip {version('pip')}")
        except importlib.metadata.PackageNotFoundError:
            self.assertEqual(found, "an unknown release of no-such-distribution")

    def test_loader_that_cannot_be_hooked_is_refused(self):
        class Sealed:
            __slots__ = ()

            def exec_module(self, module):
                pass

        class Sealing:
            def find_spec(self, name, path=None, target=None):
                return importlib.machinery.ModuleSpec(name, Sealed()) if name == "ov_sealed" else None

        sealing = Sealing()
        sys.meta_path.append(sealing)
        try:
            with finder(patch("ov_sealed", lambda m: None)), self.assertRaisesRegex(OverlayError, "Sealed"):
                importlib.import_module("ov_sealed")
        finally:
            sys.meta_path.remove(sealing)


class Install(unittest.TestCase):
    def test_too_late_is_refused(self):
        before = list(sys.meta_path)
        with self.assertRaisesRegex(OverlayError, "already imported: json"):
            hooks.install([patch("json", lambda m: None)])
        self.assertEqual(sys.meta_path, before)

    def test_second_install_does_nothing(self):
        with finder():
            before = list(sys.meta_path)
            hooks.install([patch("ov_mod", lambda m: None)])
            self.assertEqual(sys.meta_path, before)


class Expect(unittest.TestCase):
    MODULE = module_from("class C:\n def f(self, a, *, k=1): pass\nvalue = 3")

    def test_found(self):
        self.assertEqual(expect(self.MODULE, "value"), 3)
        self.assertIs(expect(self.MODULE, "C.f", ("self", "a")), self.MODULE.C.f)

    def test_missing(self):
        with self.assertRaisesRegex(ShapeError, r"fake\.C\.g is missing"):
            expect(self.MODULE, "C.g")

    def test_other_parameters(self):
        with self.assertRaisesRegex(ShapeError, r"takes \(self, a\), expected \(self\)"):
            expect(self.MODULE, "C.f", ("self",))

    def test_not_a_function(self):
        with self.assertRaisesRegex(ShapeError, "not a Python function"):
            expect(self.MODULE, "value", ())


class Process(unittest.TestCase):
    """The overlay as an interpreter meets it: only ``PYTHONPATH`` is set. Bytecode beside it (hence ``-B``) would be embedded anew."""

    def python(self, code: str, *path: Path, **env: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(map(str, (OVERLAY, *path))), **env}
        return subprocess.run([sys.executable, "-B", "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False)

    def test_unrelated_process_sees_nothing(self):
        done = self.python("import sys; print(sorted(m for m in sys.modules if m.startswith('kvcr_cpu')))", KVCR_PHASE1_OVERLAY_LOG="1")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(done.stdout.strip(), "['kvcr_cpu', 'kvcr_cpu.hooks', 'kvcr_cpu.table']")

    def test_start_up_imports_nothing_heavy(self):
        done = self.python("import sys; print([m for m in ('inspect', 'queue', 'typing', 'ctypes', 'numpy', 'torch') if m in sys.modules])")
        without = subprocess.run(
            [sys.executable, "-c", "import sys; print([m for m in ('inspect', 'queue', 'typing', 'ctypes', 'numpy', 'torch') if m in sys.modules])"],
            env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=60, check=False,
        )
        self.assertEqual(done.stdout, without.stdout)

    def test_hidden_sitecustomize_runs(self):
        with TemporaryDirectory() as folder:
            Path(folder, "sitecustomize.py").write_text("import sys; sys.hidden_ran = __file__")
            done = self.python("import sys; print(sys.hidden_ran)", Path(folder))
            self.assertEqual(done.stdout.strip(), str(Path(folder, "sitecustomize.py")), done.stderr)

    def test_failing_hidden_sitecustomize_does_not_take_the_patches_with_it(self):
        with TemporaryDirectory() as folder:
            Path(folder, "sitecustomize.py").write_text("raise RuntimeError('hidden')")
            done = self.python("import sys; print(type(sys.meta_path[0]).__name__)", Path(folder))
            self.assertEqual((done.returncode, done.stdout.strip()), (0, "PatchFinder"))
            self.assertIn("RuntimeError: hidden", done.stderr)

    def test_overlay_twice_on_the_path_is_installed_once(self):
        done = self.python("import sys; print(sum(type(f).__name__ == 'PatchFinder' for f in sys.meta_path))", OVERLAY)
        self.assertEqual((done.stdout.strip(), done.stderr), ("1", ""))

    def test_alias_is_applied_and_logged_in_a_process_that_imports_a_look_alike(self):
        with modules_on_disk({"vllm.v1.engine.utils": "def get_engine_zmq_bind_addresses(): return 'addresses'"}) as root:
            code = "from vllm.v1.engine.utils import get_engine_zmq_addresses as f; print(f())"
            done = self.python(code, root, KVCR_PHASE1_OVERLAY_LOG="1")
            self.assertEqual((done.stdout.strip(), done.stderr.strip()), ("addresses", "overlay: applied zmq-address-alias"))
            self.assertEqual(self.python(code, root).stderr, "")

    def test_wrong_shape_ends_the_process_with_the_reason(self):
        with modules_on_disk({"vllm.v1.engine.utils": ""}) as root:
            done = self.python("import vllm.v1.engine.utils", root)
            self.assertEqual(done.returncode, 1)
            self.assertRegex(done.stderr, r"OverlayError: overlay patch 'zmq-address-alias' does not fit .*get_engine_zmq_bind_addresses is missing")


class Log(unittest.TestCase):
    def test_a_closed_stderr_is_survived(self):
        code = "import os; os.close(2); from kvcr_cpu.hooks import log; log('applied', 'x'); print('alive')"
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(OVERLAY), "KVCR_PHASE1_OVERLAY_LOG": "1"}
        done = subprocess.run([sys.executable, "-B", "-c", code], env=env, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
        self.assertEqual(done.stdout.strip(), "alive")


class Declared(unittest.TestCase):
    def test_provides_names_what_the_alias_adds(self):
        provides = json.loads((OVERLAY / "provides.json").read_text())
        self.assertEqual(provides, {"vllm.v1.engine.utils": ["get_engine_zmq_addresses"]})
        self.assertLessEqual(set(provides), {p.module for p in table.PATCHES})

    def test_every_row_of_the_table_names_a_function(self):
        from kvcr_cpu import patches

        for row in table.PATCHES:
            with self.subTest(row.name):
                self.assertTrue(callable(getattr(patches, row.function)))
                self.assertTrue(getattr(patches, row.function).__doc__)


if __name__ == "__main__":
    unittest.main()
