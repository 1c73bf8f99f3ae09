"""Sets up everything in a clean clone with one command, then trains, tests or lints in it.

    python3 tools/bootstrap.py train configs/quickstart.toml     # install once, then `trm-jax train ...`
    python3 tools/bootstrap.py test -x tests/losses              # install once, then pytest (from the clone's root)

It needs Python 3.11 to 3.13 with the venv module, a package index, and nothing else: this file uses the standard
library alone. It makes a virtual environment, installs the pinned and hashed wheels of ``requirements/``, then this
package, editable and without dependencies. A second run finds its stamp (the hash of the lock file and of
``pyproject.toml``) and goes straight to the command.

No ``from __future__`` here, and quoted annotations: an older Python must get as far as the message about its age.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OLDEST, NEWEST = (3, 11), (3, 13)
STATE = "trm_jax-bootstrap.json"
LOG = "trm_jax-bootstrap.log"
FAILED = 69  # our own failures; pytest and trm-jax use small numbers
DISK_MB = {"all": 1600, "dev": 1900}  # peak need in the environment and the temporary folder together
# Published as source only. reasoning-gym imports all three; pycosat is C and needs a compiler and Python's headers.
SOURCE_ONLY = ("cellpylib", "pycosat", "zss")
NETWORK_SIGNS = (
    "Temporary failure in name resolution",
    "Name or service not known",
    "nodename nor servname",
    "NewConnectionError",
    "NameResolutionError",
    "Max retries exceeded",
    "ConnectTimeout",
    "ReadTimeout",
    "ProxyError",
    "SSLError",
    "Connection refused",
    "Network is unreachable",
)

DESCRIPTION = """\
Sets up trm_jax in a clean clone and runs it. Needs Python 3.11, 3.12 or 3.13 and a package index.

commands:
  setup [--dev]          only install (--dev: with the test and lint tools)
  train CONFIG [...]     install, then `trm-jax train CONFIG [...]`; a CONFIG that is not in the current folder
                         is looked for in the clone
  test [...]             install with the test tools, then `pytest [...]` in the clone's root, the default suite in
                         several processes when nothing is said; its exit code is ours
  lint                   install with the test tools, then ruff check, ruff format --check and mypy
"""
EPILOG = """\
First run: 288 MB to download and 1.2 GB on disk (333 MB and 1.4 GB for test and lint), about a minute.
Later runs start at once until requirements/ or pyproject.toml change.
Own failures exit with 69. pip's settings (PIP_INDEX_URL, PIP_CERT, pip.conf, proxies) are honoured.
"""


class BootstrapError(Exception):
    """What went wrong and what to do about it, for the person at the terminal."""


def say(text: str) -> None:
    print(f"[bootstrap] {text}", flush=True)


def python_problem(version: "tuple[int, int]") -> "str | None":
    """Why ``version`` cannot be used, or None."""
    if OLDEST <= version <= NEWEST:
        return None
    age = "too old" if version < OLDEST else "newer than tested"
    return (
        f"Python {version[0]}.{version[1]} is {age}: trm_jax needs 3.11, 3.12 or 3.13. "
        "Run this file with one of them, for example: python3.11 tools/bootstrap.py ..."
    )


def missing_module_problem() -> "str | None":
    """What to install when this Python cannot make virtual environments, or None."""
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return (
        f"{sys.executable} lacks the standard module {' and '.join(missing)}. On Debian and Ubuntu: "
        f"apt-get install {name}-venv. Elsewhere install the full Python package, then run the same command again."
    )


def python_of(venv: Path) -> Path:
    return venv / "bin" / "python"


def lock_file(lock: str) -> Path:
    return ROOT / "requirements" / f"{lock}.txt"


def digest_of(lock: str) -> str:
    """What an installation depends on: the lock, the package's metadata, where the clone lies."""
    parts = (lock_file(lock).read_bytes(), (ROOT / "pyproject.toml").read_bytes(), str(ROOT).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def read_state(venv: Path) -> "dict[str, Any] | None":
    """The stamp that an earlier run left in ``venv``; None when there is none, ``{}`` when it cannot be read."""
    try:
        state = json.loads((venv / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def write_state(venv: Path, state: "dict[str, Any]") -> None:
    target = venv / STATE
    part = target.with_suffix(".part")
    part.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    os.replace(part, target)


def installed(state: "dict[str, Any] | None", venv: Path, lock: str) -> bool:
    """True when ``venv`` holds at least ``lock``, as it is now, for this very Python."""
    if not state or state.get("python") != platform.python_version() or not python_of(venv).exists():
        return False
    digests = state.get("installed")
    if not isinstance(digests, dict):
        return False
    enough = ("dev",) if lock == "dev" else (lock, "dev")  # dev contains all
    return any(digests.get(name) == digest_of(name) for name in enough)


def split_lock(text: str) -> "tuple[str, str]":
    """The blocks of a lock file that have wheels, and those of ``SOURCE_ONLY``."""
    wheels: list[str] = []
    sources: list[str] = []
    for block in re.split(r"(?m)^(?=[A-Za-z0-9])", text):
        name = re.split(r"[=\s]", block, maxsplit=1)[0]
        (sources if name in SOURCE_ONLY else wheels).append(block)
    return "".join(wheels), "".join(sources)


def explain(tail: str) -> str:
    """What to do after pip failed, from the end of what it printed."""
    if "DO NOT MATCH THE HASHES" in tail:
        return (
            "a package differs from the one that was locked. A mirror or a damaged cache may have served it: "
            "try `python3 -m pip cache purge` and another index. Do not install it without the hash."
        )
    if any(sign in tail for sign in NETWORK_SIGNS):
        return (
            "the package index could not be reached. Check the network, the proxy (HTTPS_PROXY) and pip's settings "
            "(PIP_INDEX_URL, PIP_CERT), then run the same command again: finished downloads are kept in pip's cache."
        )
    if "No space left" in tail:
        return "the disk is full. Free some space or choose another place with --venv (and TMPDIR for pip's files)."
    if "No matching distribution" in tail or "Could not find a version" in tail:
        return (
            f"the index has no wheel of that package for {platform.system()} {platform.machine()}, Python "
            f"{platform.python_version()}. Linux and macOS on arm64 have them all; or the index lacks that release."
        )
    return "run the same command again; if it fails the same way, the log has the whole of what pip printed."


def run_pip(venv: Path, arguments: "list[str]", total: int = 0) -> None:
    """Runs pip in ``venv``, showing a line now and then; raises with the end of its output and with advice."""
    environ = {k: v for k, v in os.environ.items() if k not in {"PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_HASHES"}}
    environ.update(PIP_USER="0", PIP_NO_INPUT="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
    command = [str(python_of(venv)), "-I", "-m", "pip", "install", "--progress-bar", "off", *arguments]
    started = spoken = time.monotonic()
    seen, progress, lines = 0, total > 0, []
    with (venv / LOG).open("a", encoding="utf-8") as log:
        log.write(f"$ {' '.join(command)}\n")
        with subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process:
            assert process.stdout is not None  # as asked for on the line above
            for line in process.stdout:
                log.write(line)
                seen += line.startswith(("Collecting ", "Processing "))  # from the index, from a local folder
                if line.startswith("Ignoring "):  # pinned for another platform or Python
                    total -= 1
                    continue
                lines.append(line if len(line) < 240 else line[:239] + "\n")
                now = time.monotonic()
                if progress and line.startswith("Installing collected packages"):
                    say(f"  {seen} packages fetched after {now - started:.0f} s; unpacking")
                elif progress and now - spoken > 5 and line.startswith("Collecting "):
                    spoken = now
                    say(f"  {seen} of {total} packages after {now - started:.0f} s: {line.split()[1]}")
    if process.returncode:
        tail = "".join(lines[-12:])
        raise BootstrapError(f"pip failed:\n{tail}\n{explain(tail)}\nLog: {venv / LOG}")


def make_venv(venv: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-I", "-m", "venv", str(venv)]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def create(venv: Path) -> None:
    """Makes the virtual environment, replacing one that an earlier run of this file made; never another's folder."""
    state = read_state(venv)
    if venv.exists() and not venv.is_dir():
        raise BootstrapError(f"{venv} is a file. Give a folder: --venv PATH.")
    if venv.is_dir() and state is None and any(venv.iterdir()):
        raise BootstrapError(
            f"{venv} exists and was not made by this program, which will not touch it. "
            "Remove it yourself or choose another place: --venv PATH."
        )
    if state is not None:
        say(f"the environment in {venv} is of another Python or unfinished: making it anew")
        shutil.rmtree(venv)
    try:
        venv.mkdir(parents=True, exist_ok=True)
        write_state(venv, {})  # marks the folder as ours before anything can be interrupted
    except OSError as error:
        raise BootstrapError(f"cannot write to {venv}: {error}. Choose another place: --venv PATH.") from error
    made = make_venv(venv)
    if made.returncode:
        raise BootstrapError(
            f"could not make a virtual environment in {venv}:\n{made.stdout}\n"
            "On Debian and Ubuntu install the package python3-venv of this Python, then run the same command again."
        )


def build_source_only(venv: Path, sources: str, folder: Path) -> "list[str]":
    """Builds what has no wheel, with the locked setuptools; without a compiler, says what is left out."""
    requirements = folder / "source.txt"
    requirements.write_text(sources, encoding="utf-8")
    try:
        run_pip(venv, ["--require-hashes", "--no-deps", "--no-build-isolation", "-r", str(requirements)])
    except BootstrapError as error:
        if "Failed to build" not in str(error):
            raise
        say(f"WARNING: could not build what is published as source only (log: {venv / LOG}).")
        say("  The reasoning-gym tasks are left out; all else works. They need a C compiler and Python's headers")
        say("  (Debian, Ubuntu: apt-get install gcc python3-dev); then: python3 tools/bootstrap.py setup")
        return ["reasoning-gym"]
    return []


def install(venv: Path, lock: str) -> "list[str]":
    """Installs ``lock``, then this package, into an environment made by ``create``; what had to be left out."""
    wheels, sources = split_lock(lock_file(lock).read_text(encoding="utf-8"))
    say(f"installing the packages of requirements/{lock}.txt, each checked against its hash")
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "wheels.txt"
        requirements.write_text(wheels, encoding="utf-8")
        options = ["--require-hashes", "--no-deps", "--only-binary", ":all:", "-r", str(requirements)]
        run_pip(venv, options, total=wheels.count("=="))
        left_out = build_source_only(venv, sources, Path(folder)) if sources else []
    say("installing trm_jax itself (editable, without dependencies)")
    run_pip(venv, ["--no-deps", "--no-build-isolation", "--no-index", "--editable", str(ROOT)])
    return left_out


def ensure(venv: Path, lock: str, *, retry_left_out: bool = False) -> None:
    """Leaves ``venv`` with everything of ``lock`` and this package in it; returns at once when it is so already."""
    if not lock_file(lock).is_file():
        raise BootstrapError(f"{lock_file(lock)} is missing: this is not a whole clone.")
    state = read_state(venv) or {}
    left_out = state.get("left_out") or []
    if installed(state, venv, lock) and not (left_out and retry_left_out):
        say(f"environment ready: {venv}" + (f" (left out: {', '.join(left_out)})" if left_out else ""))
        return
    problem = missing_module_problem()
    if problem:
        raise BootstrapError(problem)
    started = time.monotonic()
    current = platform.python_version()
    if state.get("python") != current or not python_of(venv).exists():
        say(f"Python {current}: making a virtual environment in {venv}")
        create(venv)
        free = shutil.disk_usage(venv).free // 2**20
        if free < DISK_MB[lock]:
            raise BootstrapError(f"{free} MB free at {venv}, {DISK_MB[lock]} MB needed. Choose another: --venv PATH.")
    write_state(venv, {"python": current})
    left_out = install(venv, lock)
    write_state(venv, {"python": current, "installed": {lock: digest_of(lock)}, "left_out": left_out})
    say(f"environment ready after {time.monotonic() - started:.0f} s: {venv}")


def in_clone(argument: str) -> str:
    """A configuration that is not in the current folder but in the clone is given with its full path."""
    if argument.endswith(".toml") and not Path(argument).exists() and (ROOT / argument).exists():
        return str(ROOT / argument)
    return argument


def lint(venv: Path) -> int:
    """Runs the three checkers, all of them even when the first complains; the largest exit code."""
    codes = []
    for line in ("ruff check .", "ruff format --check .", "mypy"):
        say(line)
        codes.append(subprocess.run([str(python_of(venv)), "-m", *line.split()], cwd=ROOT).returncode)
    return max(codes)


def parse(arguments: "list[str]") -> argparse.Namespace:
    """Options before the command are ours; what follows ``train`` or ``test`` goes to trm-jax or pytest untouched."""
    parser = argparse.ArgumentParser(
        prog="bootstrap.py", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawTextHelpFormatter
    )
    venv_help = f"where the environment lies (default: {ROOT / '.venv'})"
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", metavar="PATH", help=venv_help)
    parser.add_argument("command", choices=["setup", "train", "test", "lint"], metavar="{setup,train,test,lint}")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="passed on by train and test")
    options = parser.parse_args(arguments)
    options.dev = options.command in ("test", "lint")
    if options.command in ("setup", "lint"):
        own = argparse.ArgumentParser(prog=f"bootstrap.py {options.command}")
        own.add_argument("--venv", type=Path, default=options.venv, metavar="PATH", help=venv_help)
        own.add_argument("--dev", action="store_true", default=options.dev, help="with the test and lint tools")
        own.parse_args(options.rest, namespace=options)
    elif options.command == "train" and not options.rest:
        parser.error("train needs a configuration, for example: train configs/quickstart.toml")
    return options


def whole_suite() -> "list[str]":
    """pytest's arguments: one process more than cores, because some tests wait for others, and at most 8, because each
    grows to 5 GB; a file's tests in one process, because they share what they compile."""
    return ["-n", str(min((os.cpu_count() or 1) + 1, 8)), "--dist", "loadfile"]


def main(arguments: "list[str]") -> int:
    options = parse(arguments)
    problem = python_problem(sys.version_info[:2])
    if sys.platform == "win32":
        problem = "Windows has no wheels of array-record and grain. Use the Windows Subsystem for Linux."
    try:
        if problem:
            raise BootstrapError(problem)
        venv = Path(os.path.abspath(options.venv))
        ensure(venv, "dev" if options.dev else "all", retry_left_out=options.command == "setup")
    except BootstrapError as error:
        print(f"[bootstrap] ERROR: {error}", file=sys.stderr, flush=True)
        return FAILED
    if options.command == "setup":
        say(f"next: {venv / 'bin' / 'trm-jax'} --help")
        return 0
    if options.command == "lint":
        return lint(venv)
    if options.command == "test":
        os.chdir(ROOT)
        program = [str(python_of(venv)), "-m", "pytest", *(options.rest or whole_suite())]
    else:
        program = [str(venv / "bin" / "trm-jax"), "train", *map(in_clone, options.rest)]
    say("running " + " ".join(program))
    sys.stdout.flush()
    os.execv(program[0], program)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
    sys.exit(130)
