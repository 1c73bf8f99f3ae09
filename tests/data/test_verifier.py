"""math-verify in worker processes: right, wrong and hostile answers, and processes that hang, die or stay behind."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from trm_jax.data import MathVerifier, Problem, VerifierCounts, _verifier, score_batch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is an extra")

WORKER = _verifier.PROGRAM
LIMITS = WORKER.parents[1] / "process_limits.py"


def problem(reference: str) -> Problem:
    return Problem(prompt="?", reference=reference, source="made", index=0)


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    with MathVerifier(workers=1, time_limit=3.0) as one:
        yield one


@pytest.mark.parametrize(
    ("reference", "response", "reward"),
    [
        ("42", r"so \boxed{42}", 1.0),
        ("42", r"\boxed{41} \boxed{42}", 1.0),
        ("42", r"\boxed{42} \boxed{41}", 0.0),
        ("42", "7 of 10 are left. #### 42", 1.0),
        ("42", "#### 42\nThat was 40 more.", 1.0),
        ("42", "first 7, and then 42", 1.0),
        ("42", r"#### 41, no: \boxed{42}", 1.0),
        ("42", r"\boxed{41} #### 42", 1.0),
        ("1234", "#### 1,234", 1.0),
        ("-5", "#### -5", 1.0),
        (r"\frac{1}{2}", "it is 0.5", 1.0),
        (r"$\frac{1}{2}$", r"#### \frac{2}{4}", 1.0),
        ("42", "#### 41", 0.0),
        ("3", "3 then 4", 0.0),
        ("42", "", 0.0),
        ("42", "no number", 0.0),
        ("42", "\ud800 #### 42", 1.0),
        ("42", "Answer: 42", 1.0),
        ("42", "Answer: 41\nAnswer: $42$.", 1.0),
        ("42", "#### 42\nAnswer: 41", 0.0),
        ("42", "So the answer is: 42", 1.0),
        (r"4.5 \times 10^{33}", r"\boxed{4.5e33}", 1.0),
        (r"4.5 \times 10^{33}", r"\boxed{4.5e32}", 0.0),
        (r"2.88 \times 10^{-19}", r"\boxed{1.325 \times 10^{-27}}", 0.0),
        (r"2.88 \times 10^{-19}", r"\boxed{0}", 0.0),
        (r"2.88 \times 10^{-19}", r"\boxed{2.88e-19}", 1.0),
        (r"2.88 \times 10^{-19}", r"\boxed{2.881 \times 10^{-19}}", 1.0),
        ("0.0001", r"\boxed{\frac{1}{10000}}", 1.0),
        ("0", r"\boxed{0.0}", 1.0),
        (r"\frac{1}{3}", r"\boxed{0.333333}", 1.0),
        ("69,84", r"\boxed{84, 69}", 1.0),
        ("69,84", r"\boxed{69}", 0.0),
        ("69,84", "Answer: 84, 69", 1.0),
        ("69,84", "Answer: 69", 0.0),
        ("41352,42351", "#### 41352,42351", 1.0),
        ("(2,32), (8,18)", "The answer is: (2,32), (8,18).", 1.0),
        ("f(x)=x+22", "Answer: f(x)=x+22", 1.0),
        ("15x - 80", "Answer: 15x - 80", 1.0),
        ("1+2i", "#### 1+2i", 1.0),
        ("1+2i", "#### 1-2i", 0.0),
        ("12000", "Answer: 12,000 apples", 1.0),
        ("5", "Answer: 5 m/s", 1.0),
        ("5", "Answer: 5 (five)", 1.0),
        ("2n", "Answer: 2n", 1.0),
        ("2n", "#### 2", 0.0),
        ("x<5", "Answer: x<5", 1.0),
        ("x<5", "Answer: x<6", 0.0),
        ("MR=SRMC", "Answer: MR=SRMC", 1.0),
        (r"\text{even}", "The final answer is: even.", 1.0),
        (r"\text{even}", "The final answer is: odd.", 0.0),
        ("(1,2),(3,4)", r"\boxed{(3,4), (1,2)}", 1.0),
        ("(1,2),(3,4)", r"\boxed{(2,1), (3,4)}", 0.0),
    ],
)
def test_rewards(verifier: MathVerifier, reference: str, response: str, reward: float) -> None:
    before = verifier.counts.scored
    assert verifier(problem(reference), response) == reward
    assert verifier.counts.scored == before + 1


@pytest.mark.parametrize(
    "response",
    [
        "(" * 2_000_000 + "7" + ")" * 2_000_000,
        "$" + r"\sqrt{" * 600 + "42" + "}" * 600 + "$",
        r"\boxed{" * 600,
        "#### " + "1/" * 2000 + "1",
        "9" * 5_000_000,
    ],
)
def test_huge_and_deep_answers_are_wrong_and_leave_the_worker_usable(verifier: MathVerifier, response: str) -> None:
    assert verifier(problem("42"), response) == 0.0
    assert verifier(problem("42"), "#### 42") == 1.0


def test_only_the_end_of_a_long_response_is_read_and_that_is_counted(verifier: MathVerifier) -> None:
    before = verifier.counts.truncated
    assert verifier(problem("42"), "x" * 3_000_000 + " #### 42") == 1.0
    assert verifier.counts.truncated == before + 1


def test_a_tower_of_powers_costs_bounded_time_and_is_counted(verifier: MathVerifier) -> None:
    before = verifier.counts
    assert verifier(problem("9"), r"\boxed{9^{9^{9^9}}}") == 0.0
    after = verifier.counts
    assert after.timeouts + after.errors == before.timeouts + before.errors + 1
    assert verifier(problem("9"), "#### 9") == 1.0


def test_a_reference_that_is_no_mathematics_is_an_error_not_a_wrong_answer(verifier: MathVerifier) -> None:
    before = verifier.counts.errors
    assert verifier(problem(""), "#### 1") == 0.0
    assert verifier.counts.errors == before + 1


@pytest.mark.parametrize(("response", "reward"), [("4.3", 1.0), ("4.1", 1.0), ("4.31", 0.0), ("x", 0.0), ("", 0.0)])
def test_a_tolerance_admits_numbers_that_are_close(verifier: MathVerifier, response: str, reward: float) -> None:
    near = Problem(prompt="?", reference="4.2", source="made", index=0, metadata={"tolerance": 0.1})
    assert verifier(near, f"\\boxed{{{response}}}") == reward
    assert verifier(problem("4.2"), r"\boxed{4.3}") == 0.0


def test_a_batch_keeps_its_order(verifier: MathVerifier) -> None:
    rewards = score_batch(verifier, [problem(str(i)) for i in range(20)], [f"#### {i - i % 2}" for i in range(20)])
    assert rewards.dtype == np.float32
    np.testing.assert_array_equal(rewards, [1.0, 0.0] * 10)
    assert verifier.score_batch([], []).shape == (0,)
    with pytest.raises(ValueError, match="1 problems but 0 responses"):
        verifier.score_batch([problem("1")], [])


def test_the_worker_does_not_import_jax_or_this_package() -> None:
    code = (
        f"import runpy, sys, math_verify; runpy.run_path({str(WORKER)!r}); "
        "print([m for m in ('jax', 'trm_jax') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Stand-ins for the worker program, to meet at once what real ones do seldom.

READY = "import json, sys, time, os\nprint(json.dumps({'status': 'ready'}), flush=True)\n"
ANSWER = "print(json.dumps({'status': 'scored', 'correct': True}), flush=True)\n"
LOOP = "for line in sys.stdin:\n    gold = json.loads(line)['gold']\n"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "worker.py"
    monkeypatch.setattr(_verifier, "PROGRAM", path)
    return path


def test_a_worker_that_overruns_is_killed_and_replaced(program: Path) -> None:
    program.write_text(
        READY + LOOP + "    if gold == 'hang':\n        sum(iter(int, 1))\n    " + ANSWER, encoding="utf-8"
    )
    with MathVerifier(workers=2, time_limit=1.0) as verifier:
        before = set(verifier.process_ids)
        golds = ["1", "hang", "2", "3", "hang", "4"]
        rewards = verifier.score_batch([problem(gold) for gold in golds], ["#### 1"] * 6)
        np.testing.assert_array_equal(rewards, [1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
        assert verifier.counts == VerifierCounts(scored=4, timeouts=2)
        assert verifier(problem("5"), "#### 1") == 1.0
        gone = before - set(verifier.process_ids)
        assert gone
        assert not any(alive(pid) for pid in gone)


def test_a_worker_that_dies_costs_one_answer(program: Path) -> None:
    program.write_text(READY + LOOP + "    if gold == 'die':\n        os._exit(3)\n    " + ANSWER, encoding="utf-8")
    with MathVerifier(workers=1, time_limit=5.0) as verifier:
        rewards = verifier.score_batch([problem(gold) for gold in ("1", "die", "2")], ["#### 1"] * 3)
        np.testing.assert_array_equal(rewards, [1.0, 0.0, 1.0])
        assert verifier.counts == VerifierCounts(scored=2, errors=1)


def test_a_worker_that_died_while_idle_is_replaced(program: Path) -> None:
    program.write_text(READY + LOOP + "    " + ANSWER, encoding="utf-8")
    with MathVerifier(workers=1, time_limit=5.0) as verifier:
        assert verifier(problem("1"), "#### 1") == 1.0
        (pid,) = verifier.process_ids
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while not zombie(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert verifier(problem("1"), "#### 1") == 1.0
        assert verifier.process_ids != (pid,)
        # Killed at the very moment of the request: its pipe still takes it, and no answer comes.
        os.kill(verifier.process_ids[0], signal.SIGKILL)
        assert verifier(problem("1"), "#### 1") == 1.0
        assert verifier.counts == VerifierCounts(scored=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise SystemExit(7)", "ended with status 7 before it was ready"),
        ("import json\nprint(json.dumps({'status': 'failed', 'error': 'no sympy'}))", "cannot start: no sympy"),
    ],
)
def test_a_worker_that_cannot_start_is_an_error_and_closes_the_verifier(program: Path, text: str, message: str) -> None:
    program.write_text(text, encoding="utf-8")
    verifier = MathVerifier(workers=1)
    with pytest.raises(RuntimeError, match=message):
        verifier(problem("1"), "1")
    with pytest.raises(ValueError, match="closed"):
        verifier(problem("1"), "1")


def test_closing_leaves_no_process(program: Path) -> None:
    program.write_text(READY + LOOP + "    " + ANSWER, encoding="utf-8")
    verifier = MathVerifier(workers=3)
    pids = verifier.process_ids
    assert all(alive(pid) for pid in pids)
    verifier.close()
    verifier.close()
    assert not any(alive(pid) for pid in pids)


def test_workers_end_when_their_parent_is_killed() -> None:
    code = (
        "from trm_jax.data import MathVerifier, Problem\n"
        "verifier = MathVerifier(workers=2, time_limit=3.0)\n"
        "verifier(Problem(prompt='?', reference='1', source='', index=0), '1')\n"
        "print(*verifier.process_ids, flush=True)\n"
        "import time; time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    deadline = time.monotonic() + 20
    while any(running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(running(pid) for pid in pids)


@pytest.mark.skipif(sys.platform == "win32", reason="the kernel's limit on processor time is POSIX")
def test_the_kernel_ends_a_computation_that_no_python_signal_reaches() -> None:
    code = (
        f"import runpy; limits = runpy.run_path({str(LIMITS)!r})\n"
        "limits['limit_memory_and_core'](4); limits['limit_processor_time'](0)\n"
        "n = 9; n ** n ** n\n"  # one operation of minutes inside the interpreter
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGXCPU


def test_bad_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        MathVerifier(workers=0)
    with pytest.raises(ValueError, match=r"time_limit must be a finite number of seconds, at least 1, got 0\.5"):
        MathVerifier(time_limit=0.5)
    with pytest.raises(ValueError, match="max_response_chars must be at least 1"):
        MathVerifier(max_response_chars=0)


def alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def zombie(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    return False


def running(pid: int) -> bool:
    return alive(pid) and not zombie(pid)
