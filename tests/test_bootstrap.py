"""tools/bootstrap.py: what it refuses, when it does nothing, what it hands on. No network: pip is replaced."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tools" / "bootstrap.py"


@pytest.fixture
def bootstrap() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap_under_test", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pip_calls(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Records pip's arguments instead of running it; each requirement file's text takes the place of its name.

    Environments are made without pip too, which takes a moment instead of five seconds.
    """
    calls: list[list[str]] = []

    def make_venv(venv: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", str(venv)], capture_output=True, text=True
        )

    def run_pip(venv: Path, arguments: list[str], total: int = 0) -> None:
        calls.append([Path(a).read_text(encoding="utf-8") if a.endswith(".txt") else a for a in arguments])

    monkeypatch.setattr(bootstrap, "make_venv", make_venv)
    monkeypatch.setattr(bootstrap, "run_pip", run_pip)
    return calls


@pytest.fixture
def executed(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Programs that would have taken over the process; the test starts, and ends, in a folder of its own."""
    programs: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bootstrap.os, "execv", lambda path, argv: programs.append([str(path), *argv[1:]]))
    return programs


def test_only_the_standard_library_and_a_syntax_that_old_pythons_read() -> None:
    source = SCRIPT.read_text(encoding="utf-8")
    tree = ast.parse(source, feature_version=(3, 6))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in modules} <= set(sys.stdlib_module_names)
    assert "__future__" not in modules
    for node in ast.walk(tree):  # evaluated when the function is defined, so an old Python would stop there
        if isinstance(node, ast.FunctionDef):
            for annotation in [node.returns, *(argument.annotation for argument in node.args.args)]:
                assert not isinstance(annotation, ast.Subscript | ast.BinOp), f"quote it: line {node.lineno}"


@pytest.mark.parametrize(("version", "word"), [((2, 7), "too old"), ((3, 10), "too old"), ((3, 14), "newer")])
def test_another_python_is_refused_with_the_way_out(bootstrap: ModuleType, version: tuple[int, int], word: str) -> None:
    problem = bootstrap.python_problem(version)
    assert word in problem
    assert "3.11, 3.12 or 3.13" in problem
    assert f"{version[0]}.{version[1]}" in problem


@pytest.mark.parametrize("version", [(3, 11), (3, 12), (3, 13)])
def test_the_supported_pythons_pass(bootstrap: ModuleType, version: tuple[int, int]) -> None:
    assert bootstrap.python_problem(version) is None


def test_a_python_without_venv_says_what_to_install(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bootstrap.missing_module_problem() is None
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else object())
    problem = bootstrap.missing_module_problem()
    assert "ensurepip" in problem
    assert f"apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-venv" in problem


def test_first_run_installs_hashed_wheels_then_sources_then_the_package(
    bootstrap: ModuleType, pip_calls: list[list[str]], tmp_path: Path
) -> None:
    assert bootstrap.main(["--venv", str(tmp_path / "env"), "setup"]) == 0
    wheels, sources, package = pip_calls
    assert wheels[:4] == ["--require-hashes", "--no-deps", "--only-binary", ":all:"]
    assert "\njax==" in wheels[-1]
    assert "pycosat" not in wheels[-1]
    assert sources[:2] == ["--require-hashes", "--no-deps"]
    assert "pycosat==" in sources[-1]
    assert "--hash=sha256:" in sources[-1]
    assert "jax==" not in sources[-1]
    assert package[-2:] == ["--editable", str(ROOT)]
    assert {"--no-deps", "--no-index", "--no-build-isolation"} <= set(package)
    # Nothing of the lock is lost between the two halves.
    lock = (ROOT / "requirements" / "all.txt").read_text(encoding="utf-8")
    assert wheels[-1].count("==") + sources[-1].count("==") == lock.count("==")


def test_second_run_does_nothing_until_the_lock_changes(
    bootstrap: ModuleType, pip_calls: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--venv", str(tmp_path / "env"), "setup", "--dev"]
    assert bootstrap.main(arguments) == 0
    assert len(pip_calls) == 3
    assert bootstrap.main(arguments) == 0
    assert bootstrap.main(arguments[:-1]) == 0  # dev contains all
    assert len(pip_calls) == 3
    monkeypatch.setattr(bootstrap, "digest_of", lambda lock: "another")
    assert bootstrap.main(arguments) == 0
    assert len(pip_calls) == 6


def test_the_stamp_of_all_does_not_do_for_dev(
    bootstrap: ModuleType, pip_calls: list[list[str]], tmp_path: Path
) -> None:
    assert bootstrap.main(["setup", "--venv", str(tmp_path / "env")]) == 0
    assert bootstrap.main(["setup", "--venv", str(tmp_path / "env"), "--dev"]) == 0
    assert len(pip_calls) == 6
    assert "\nhypothesis==" not in pip_calls[0][-1]
    assert "\nhypothesis==" in pip_calls[3][-1]


def test_an_interrupted_install_is_taken_up_again(
    bootstrap: ModuleType, pip_calls: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = tmp_path / "env"
    with monkeypatch.context() as patch:
        patch.setattr(bootstrap, "install", lambda venv, lock: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            bootstrap.main(["--venv", str(venv), "setup"])
    (venv / "kept").touch()
    assert bootstrap.main(["--venv", str(venv), "setup"]) == 0
    assert (venv / "kept").exists()  # the environment is used, not made anew
    assert len(pip_calls) == 3


def test_an_environment_of_another_python_is_made_anew(
    bootstrap: ModuleType, pip_calls: list[list[str]], tmp_path: Path
) -> None:
    venv = tmp_path / "env"
    assert bootstrap.main(["--venv", str(venv), "setup"]) == 0
    state = json.loads((venv / bootstrap.STATE).read_text(encoding="utf-8"))
    (venv / bootstrap.STATE).write_text(json.dumps({**state, "python": "3.11.0b1"}), encoding="utf-8")
    (venv / "stale").touch()
    assert bootstrap.main(["--venv", str(venv), "setup"]) == 0
    assert not (venv / "stale").exists()
    assert len(pip_calls) == 6


def test_a_folder_that_is_not_ours_is_left_alone(
    bootstrap: ModuleType, pip_calls: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "letters.txt").write_text("dear", encoding="utf-8")
    assert bootstrap.main(["--venv", str(tmp_path), "setup"]) == bootstrap.FAILED
    assert "--venv PATH" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["letters.txt"]
    assert pip_calls == []


def test_a_failed_environment_shows_why(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = subprocess.CompletedProcess(["venv"], 1, "ensurepip is not available")
    monkeypatch.setattr(bootstrap, "make_venv", lambda venv: failed)
    assert bootstrap.main(["--venv", str(tmp_path / "env"), "setup"]) == bootstrap.FAILED
    message = capsys.readouterr().err
    assert "ensurepip is not available" in message
    assert "python3-venv" in message


def test_without_a_compiler_the_rest_is_installed_and_setup_tries_again(
    bootstrap: ModuleType,
    pip_calls: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    venv = tmp_path / "env"
    record = bootstrap.run_pip

    def run_pip(venv: Path, arguments: list[str], total: int = 0) -> None:
        record(venv, arguments, total)
        if "pycosat" in pip_calls[-1][-1]:
            raise bootstrap.BootstrapError("pip failed:\nFailed to build pycosat\n")

    with monkeypatch.context() as patch:
        patch.setattr(bootstrap, "run_pip", run_pip)
        assert bootstrap.main(["--venv", str(venv), "setup"]) == 0
    assert "C compiler" in capsys.readouterr().out
    assert pip_calls[-1][-2] == "--editable"
    bootstrap.ensure(venv, "all")
    assert len(pip_calls) == 3
    assert "left out: reasoning-gym" in capsys.readouterr().out
    assert bootstrap.main(["--venv", str(venv), "setup"]) == 0
    assert len(pip_calls) == 6
    bootstrap.ensure(venv, "all")
    assert "left out" not in capsys.readouterr().out.splitlines()[-1]


def test_test_hands_its_arguments_to_pytest_in_the_clone(
    bootstrap: ModuleType, pip_calls: list[list[str]], executed: list[list[str]], tmp_path: Path
) -> None:
    venv = tmp_path / "env"
    bootstrap.main(["--venv", str(venv), "test", "-x", "--venv", "tests/losses"])
    assert executed == [[str(venv / "bin" / "python"), "-m", "pytest", "-x", "--venv", "tests/losses"]]
    assert Path.cwd() == ROOT
    assert "\nhypothesis==" in pip_calls[0][-1]


def test_test_alone_runs_the_suite_in_a_process_more_than_there_are_cores(
    bootstrap: ModuleType,
    pip_calls: list[list[str]],
    executed: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for cores, processes in ((2, "3"), (64, "8"), (None, "2")):
        monkeypatch.setattr(bootstrap.os, "cpu_count", lambda cores=cores: cores)
        bootstrap.main(["--venv", str(tmp_path / "env"), "test"])
        assert executed.pop()[1:] == ["-m", "pytest", "-n", processes, "--dist", "loadfile"]


def test_train_hands_its_arguments_on_and_finds_the_clones_configuration(
    bootstrap: ModuleType, pip_calls: list[list[str]], executed: list[list[str]], tmp_path: Path
) -> None:
    venv = tmp_path / "env"
    program = [str(venv / "bin" / "trm-jax"), "train"]
    (tmp_path / "mine.toml").touch()
    bootstrap.main(["--venv", str(venv), "train", "mine.toml", "--steps", "3"])
    bootstrap.main(["--venv", str(venv), "train", "pyproject.toml"])  # not here, but in the clone
    bootstrap.main(["--venv", str(venv), "train", "nowhere.toml"])
    assert executed == [
        [*program, "mine.toml", "--steps", "3"],
        [*program, str(ROOT / "pyproject.toml")],
        [*program, "nowhere.toml"],
    ]
    assert Path.cwd() == tmp_path


def test_train_without_a_configuration_is_an_error_of_use(
    bootstrap: ModuleType, pip_calls: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        bootstrap.main(["train"])
    assert stopped.value.code == 2
    assert "train configs/" in capsys.readouterr().err
    assert pip_calls == []


@pytest.mark.parametrize(
    ("tail", "advice"),
    [
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", "cache purge"),
        (
            "Retrying ... NameResolutionError(...)\nERROR: No matching distribution found for jax",
            "could not be reached",
        ),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("ERROR: No matching distribution found for jaxlib==0.10.2", "no wheel of that package"),
        ("Segmentation fault", "run the same command again"),
    ],
)
def test_a_failure_of_pip_comes_with_advice(bootstrap: ModuleType, tail: str, advice: str) -> None:
    assert advice in bootstrap.explain(tail)


def test_pip_failing_for_real_shows_its_last_lines_and_keeps_a_log(bootstrap: ModuleType, tmp_path: Path) -> None:
    """The environment's Python is a script here that prints like pip and fails."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 'Ignoring x: markers'\necho \"asked: $PIP_USER $*\"\nexit 3\n", encoding="utf-8")
    python.chmod(0o755)
    with pytest.raises(bootstrap.BootstrapError, match="asked: 0 -I -m pip install --progress-bar off -r x") as failure:
        bootstrap.run_pip(tmp_path, ["-r", "x"], total=5)
    assert "Ignoring" not in str(failure.value)
    assert "Ignoring x" in (tmp_path / bootstrap.LOG).read_text(encoding="utf-8")


def test_help_names_commands_size_and_pythons_from_any_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"], cwd=tmp_path, capture_output=True, text=True, env={**os.environ}
    )
    assert done.returncode == 0
    for word in ("setup", "train CONFIG", "test [...]", "lint", "--venv PATH", "MB to download", "3.11, 3.12 or 3.13"):
        assert word in done.stdout
