"""The project's frame: metadata, locks, licence, and what no tracked file may hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
LOCKS = ("all", "dev")
# Optional on purpose: an accelerator's plugins, PyTorch for parity, and tools.
NOT_IN_ALL = {"all", "cuda12", "cuda13", "dev", "parity", "tpu"}
# Distribution → the module it is imported as, where that differs.
MODULES = {
    "google-jetstream": "jetstream",
    "grpcio": "grpc",
    "math-verify": "math_verify",
    "orbax-checkpoint": "orbax",
    "prometheus-client": "prometheus_client",
    "protobuf": "google",
    "reasoning-gym": "reasoning_gym",
    "tensorboardx": "tensorboardX",
}
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = (
    {"sys_platform": "linux", "platform_machine": "x86_64"},
    {"sys_platform": "darwin", "platform_machine": "arm64"},
)
# Joined here so that this file does not hold what it forbids.
INDEX_HOSTS = (
    "py" + "pi.org",
    "python" + "hosted.org",
    "anaconda" + ".org",
    "npm" + "js.org",
    "hugging" + "face.co/simple",
)
MACHINE_PATHS = re.compile(
    "(?<![\\w.:/~-])/(?:" + "|".join(("ho" + "me", "Us" + "ers", "ro" + "ot", "wo" + "rk")) + ")/"
)
UNFINISHED = re.compile("\\b(?:" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + ")\\b")
LARGEST = 1_000_000  # bytes


def _tracked() -> list[Path]:
    """Files of the commit and new ones that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip(f"not a git checkout, so there is no list of tracked files: {listed.stderr.strip()}")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def _texts() -> Iterator[tuple[str, str]]:
    for path in _tracked():
        data = path.read_bytes()
        if b"\0" not in data:
            yield path.relative_to(ROOT).as_posix(), data.decode("utf-8")


def _lock(name: str) -> list[tuple[Requirement, list[str]]]:
    """Each requirement of a lock with its hashes; anything else that pip would read fails."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    pins = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        requirement, *hashes = re.split(r"\s+--hash=", line.strip())
        pins.append((Requirement(requirement), hashes))
    return pins


def _direct(lock: str) -> list[Requirement]:
    """What the project itself asks for in this lock."""
    extras = [name for name in EXTRAS if name not in NOT_IN_ALL] + (["dev"] if lock == "dev" else [])
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]
    return [Requirement(line) for line in [*lines, *PYPROJECT["dependency-groups"]["build"]]]


def _environment(python: str, platform: dict[str, str]) -> dict[str, str]:
    return {
        **platform,
        "python_version": python,
        "python_full_version": f"{python}.5",
        "implementation_name": "cpython",
    }


def test_all_covers_each_extra_but_the_optional_ones() -> None:
    (line,) = EXTRAS["all"]
    covered = Requirement(line)
    assert canonicalize_name(covered.name) == PROJECT["name"]
    assert covered.extras == set(EXTRAS) - NOT_IN_ALL


def test_metadata_points_at_what_exists() -> None:
    assert (ROOT / PROJECT["readme"]).is_file()
    assert (ROOT / "trm_jax" / "py.typed").is_file()
    assert PROJECT["scripts"] == {"trm-jax": "trm_jax.cli:main"}
    assert PROJECT["requires-python"] == ">=3.11,<3.14"
    assert sys.version_info[:2] in {(3, 11), (3, 12), (3, 13)}


def test_license_is_the_whole_apache_text() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert PROJECT["license"] == "Apache-2.0"
    for part in ("Version 2.0, January 2004", "3. Grant of Patent License.", "END OF TERMS AND CONDITIONS"):
        assert part in text
    assert re.search(r"^ +Copyright 20\d\d The trm_jax authors$", text, re.MULTILINE)
    assert "[yyyy]" not in text


def test_changelog_has_an_entry_for_what_is_not_released() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased = text.split("## [Unreleased]")[1].split("\n## ")[0]
    assert re.search(r"^### (Added|Changed|Deprecated|Removed|Fixed|Security)$", unreleased, re.MULTILINE)
    assert re.search(r"^- \S", unreleased, re.MULTILINE)


@pytest.mark.parametrize("lock", LOCKS)
def test_every_pin_is_exact_and_hashed(lock: str) -> None:
    pins = _lock(lock)
    assert len(pins) > len(_direct(lock))
    for requirement, hashes in pins:
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", requirement
        assert "*" not in specifier.version, requirement
        assert requirement.url is None, requirement
        assert hashes, f"{requirement} has no hash"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", value) for value in hashes), requirement


@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda platform: platform["sys_platform"])
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("lock", LOCKS)
def test_lock_satisfies_the_project_on_every_python(lock: str, python: str, platform: dict[str, str]) -> None:
    environment = _environment(python, platform)
    versions: dict[str, Version] = {}
    for requirement, _ in _lock(lock):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            name = canonicalize_name(requirement.name)
            assert name not in versions, f"{name} is pinned twice for Python {python}"
            (specifier,) = requirement.specifier
            versions[name] = Version(specifier.version)
    for requirement in _direct(lock):
        name = canonicalize_name(requirement.name)
        assert name in versions, f"requirements/{lock}.txt lacks {name}: run python3 tools/lock.py"
        assert requirement.specifier.contains(versions[name], prereleases=True), (requirement, versions[name])
    assert versions["jax"] == versions["jaxlib"]
    assert not {"torch", "transformers", "tensorflow", "libtpu", "trm-jax"} & versions.keys()


def test_the_tpu_compiler_comes_hashed_beside_the_same_jax() -> None:
    everything = {str(requirement) for requirement, _ in _lock("all")}
    pins = {str(requirement): hashes for requirement, hashes in _lock("tpu")}
    assert all(pins.values())
    assert {pin for pin in pins if pin.startswith("jax")} <= everything
    assert [pin for pin in pins if pin.startswith("libtpu==")]


def test_dev_holds_every_pin_of_all() -> None:
    dev = {(str(requirement), tuple(hashes)) for requirement, hashes in _lock("dev")}
    missing = [str(requirement) for requirement, hashes in _lock("all") if (str(requirement), tuple(hashes)) not in dev]
    assert not missing


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_names_no_index_and_no_path(lock: str) -> None:
    text = (ROOT / "requirements" / f"{lock}.txt").read_text(encoding="utf-8")
    for forbidden in ("://", "--index-url", "--extra-index-url", "--find-links", "--trusted-host", " @ ", "file:"):
        assert forbidden not in text
    assert "python3 tools/lock.py" in text


def test_every_dependency_is_used_and_every_import_is_declared() -> None:
    """Extras that only a command needs (accelerators, parity, dev) are not imported by the package."""
    extras = [line for extra in EXTRAS if extra not in NOT_IN_ALL for line in EXTRAS[extra]]
    names = [canonicalize_name(Requirement(line).name) for line in [*PROJECT["dependencies"], *extras]]
    declared = {MODULES.get(name, name) for name in names}
    imported: set[str] = set()
    for path in (ROOT / "trm_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                imported.add(node.module.split(".")[0])
            elif isinstance(node, ast.Call) and node.args:
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                argument = node.args[0]
                if name in ("import_module", "import_extra") and isinstance(argument, ast.Constant):
                    imported.add(str(argument.value).split(".")[0])
    others = imported - set(sys.stdlib_module_names) - {"trm_jax"}
    assert others - declared == set(), "imported but in no extra of pyproject.toml"
    assert declared - others == set(), "declared but imported nowhere in trm_jax"


def test_a_client_of_the_server_needs_one_small_extra_and_nothing_of_jetstream() -> None:
    """In a process without what the server's extra brings (TensorFlow along with it), or what training does."""
    needed, of_server = ({Requirement(line).name for line in EXTRAS[extra]} for extra in ("serve", "jetstream"))
    absent = {MODULES[name] for name in of_server - needed} - {"prometheus_client"}  # which Orbax brings
    assert absent == {"jetstream"}
    absent |= {"seqio", "tensorflow", "tiktoken", "cattrs", "grain", "tyro"}
    program = (
        f"import sys; sys.modules |= dict.fromkeys({sorted(absent)!r}); "
        "from trm_jax.serve import Connection, RemoteEngine, RolloutClient; "
        "RolloutClient(Connection(target='127.0.0.1:1')).close()"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_no_tracked_file_names_an_index_or_a_place_on_one_machine() -> None:
    found = []
    for name, text in _texts():
        for number, line in enumerate(text.splitlines(), 1):
            if any(host in line for host in INDEX_HOSTS) or MACHINE_PATHS.search(line):
                found.append(f"{name}:{number}: {line.strip()[:100]}")
    assert not found, "\n" + "\n".join(found)


def test_no_tracked_file_is_large() -> None:
    large = {path.relative_to(ROOT).as_posix(): size for path in _tracked() if (size := path.stat().st_size) > LARGEST}
    assert not large, f"over {LARGEST} bytes: {large}"


def test_nothing_is_left_unfinished() -> None:
    found = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in _texts()
        if not name.startswith("requirements/")
        for number, line in enumerate(text.splitlines(), 1)
        if UNFINISHED.search(line)
    ]
    assert not found, "\n" + "\n".join(found)


def reasonless_skips(source: str) -> list[int]:
    """Lines of ``skip``, ``skipif`` and ``xfail`` that give no reason."""
    lines = []
    called = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called.add(node.func)
            name, words = node.func.attr, {keyword.arg for keyword in node.keywords}
            of_pytest = ast.unparse(node.func).startswith("pytest.")
            positional = name in ("skip", "xfail") and bool(node.args) and ast.unparse(node.func).count(".") == 1
            if of_pytest and name in ("skip", "skipif", "xfail") and "reason" not in words and not positional:
                lines.append(node.lineno)
        elif (
            isinstance(node, ast.Attribute)
            and node not in called
            and re.fullmatch(r"pytest\.mark\.(skip|xfail)", ast.unparse(node))
        ):
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import pytest\n@pytest.mark.skip\ndef f(): pass", [2]),
        ("@pytest.mark.skipif(x)\ndef f(): pass", [1]),
        ("pytest.importorskip('torch')", []),
        ("pytest.skip()", [1]),
        ("pytest.skip('no git')", []),
        ("@pytest.mark.xfail(reason='see the paper')\ndef f(): pass", []),
        ("rows.skip(3)\nx = pytest.mark.slow", []),
    ],
)
def test_a_skip_without_a_reason_is_caught(source: str, lines: list[int]) -> None:
    assert reasonless_skips(source) == lines


def test_every_skip_has_a_reason() -> None:
    found = [f"{name}:{line}" for name, text in _texts() if name.endswith(".py") for line in reasonless_skips(text)]
    assert not found, found
