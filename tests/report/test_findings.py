from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from trm_jax.report import Finding, collect, conclude

Job = Callable[..., Path]
ONE_SEED = "(One seed: the spread between seeds is not covered.)"


def _change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _answers(root: Path) -> tuple[Finding, ...]:
    return conclude(collect(root))


def test_the_four_questions_in_order(job: Job):
    assert [finding.question for finding in _answers(job())] == [
        "Did it learn?",
        "How large was the mismatch?",
        "What did the correction do?",
        "Which source of mismatch did the harm?",
    ]


def test_rose_fell_and_flat_are_told_apart(job: Job):
    # 1,000 problems: the interval of a difference is about ± 4 points. .25 → .44 rises, → .26 is noise, → .10 falls.
    learned = _answers(job({"none": 0.10, "lag": 0.26, "numerics": 0.44}))[0]
    assert learned.answer == (
        "Held-out accuracy rose in “zero mismatch”, “numerics only”, “mismatched, TRM” and “mismatched, CIS”; fell in "
        f"“mismatched, uncorrected”; did not clearly change in “lag only”. {ONE_SEED}"
    )
    assert "“mismatched, uncorrected”: held-out accuracy fell from 25.0% to 10.0% (−15.0 points" in learned.details[3]
    assert "went from 25.0% to 26.0%, which cannot be told from no change" in learned.details[1]


def test_several_seeds_are_averaged_and_the_caveat_goes(job: Job):
    learned = _answers(job(seeds=3))[0]
    assert "One seed" not in learned.answer
    assert "rose from 25.0% to 84.0% (+59.0 points" in learned.details[0]
    assert "mean of 3 seeds" in learned.details[0]


def test_equality_to_the_bit_and_its_absence_with_the_cause(job: Job):
    mismatch = _answers(job())[1]
    zero, lag, numerics, both = mismatch.details[:4]
    assert zero.startswith(
        "“zero mismatch”: rollout and recomputed log-probs were equal to the bit on 100% of the 4,000 sampled tokens."
    )
    # log_ratio_max_abs is 30 times the KL: .08 · 30 = 2.4.
    assert "on 6.2% of the 4,000 sampled tokens; they differed by at most 2.4 nats, because the sampling weights" in lag
    assert "were on average 4 updates old." in lag
    assert "because engine and training model compute differently from weights of the same version" in numerics
    assert "Mean token KL 0.011 nats, largest token KL 0.4 nats, PPL gap −0.02 nats a token." in numerics
    assert ", where the sampling weights were on average 4 updates old" in both
    assert mismatch.answer == (
        "Mean token KL ranged from 0 nats in “zero mismatch” to 0.066 nats in “mismatched, uncorrected”."
    )


def test_a_single_unequal_token_is_not_rounded_to_equality(job: Job):
    root = job()
    path = root / "arms" / "zero" / "seed0" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[3]["mismatch/bitwise_equal_fraction"] = 0.9999
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "equal to the bit on >99.9% of the" in _answers(root)[1].details[0]


def test_the_correction_what_it_did_and_what_it_brought(job: Job):
    correction = _answers(job())[2]
    assert correction.answer == (
        f"“mismatched, TRM” and “mismatched, CIS” ended above “mismatched, uncorrected”. {ONE_SEED}"
    )
    trm, cis, trm_gain, cis_gain, best = correction.details
    assert trm == "“mismatched, TRM” kept 90.0% of the sequences."
    assert cis == (
        "“mismatched, CIS” kept 100% of the sequences, weighed tokens by 0.97 on average and 3 at most and capped the "
        "weight of 2.0% of the tokens."
    )
    # (.78 − .26) / (.84 − .26) = .897; (.79 − .26) / .58 = .914.
    assert "ended at 78.0%, above “mismatched, uncorrected” (+52.0 points" in trm_gain
    assert trm_gain.endswith(": 90% of what was lost against “zero mismatch”.")
    assert cis_gain.endswith(": 91% of what was lost against “zero mismatch”.")
    assert best == (
        "“mismatched, CIS” ended highest of the corrected arms, but cannot be told apart from “mismatched, TRM”."
    )


def test_a_correction_that_did_nothing_or_harm_is_said_to(job: Job):
    root = job({"trm": 0.27, "cis": 0.10})
    path = root / "arms" / "trm" / "seed0" / "metrics.jsonl"
    rows = [json.loads(line) | {"correction/sequence_keep_fraction": 1.0} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    correction = _answers(root)[2]
    assert correction.answer == (
        "“mismatched, CIS” ended below; “mismatched, TRM” ended not clearly apart from “mismatched, uncorrected”. "
        + ONE_SEED
    )
    assert correction.details[0] == (
        "“mismatched, TRM” kept 100% of the sequences; it never acted: no threshold was reached."
    )
    assert not any("of what was lost" in line for line in correction.details)


def test_prompts_that_were_left_out_for_their_age_are_counted(job: Job):
    root = job()
    path = root / "arms" / "trm" / "seed0" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["rollout/dropped_groups"], rows[4]["rollout/dropped_groups"] = 3, 2.0
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    details = _answers(root)[2].details
    assert details[0].endswith("kept 90.0% of the sequences and left out 5 prompts whose samples were too old.")


def test_skipped_updates_are_counted(job: Job):
    root = job()
    path = root / "arms" / "trm" / "seed0" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[:3]:
        row["optim/skipped"] = 1
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (
        _answers(root)[2]
        .details[0]
        .endswith("kept 90.0% of the sequences and skipped 3 of 10 updates with nothing to train on.")
    )


@pytest.mark.parametrize(
    ("lag", "numerics", "both", "verdict"),
    [
        (0.44, 0.83, 0.26, "Lag alone lowered the final accuracy; no drop beyond noise was seen with numerics alone."),
        (0.83, 0.44, 0.26, "Numerics alone lowered the final accuracy; no drop beyond noise was seen with lag alone."),
        (0.44, 0.45, 0.26, "Lag alone and numerics alone lowered the final accuracy."),
        (
            *(0.83, 0.84, 0.26),
            "Lag and numerics together lowered the final accuracy; neither alone showed a drop beyond noise.",
        ),
        (0.84, 0.84, 0.84, "No harm beyond noise from lag alone, numerics alone and both together, uncorrected."),
    ],
)
def test_the_sources_of_harm(job: Job, lag: float, numerics: float, both: float, verdict: str):
    sources = _answers(job({"lag": lag, "numerics": numerics, "none": both}))[3]
    assert sources.answer == f"{verdict} {ONE_SEED}"
    assert len(sources.details) == 3


def test_a_source_that_was_not_measured_is_not_acquitted(job: Job):
    root = job()
    shutil.rmtree(root / "arms" / "numerics")
    _change(root / "arms" / "lag" / "seed0" / "result.json", status="stopped", reason="time limit")
    sources = _answers(root)[3]
    assert sources.answer == (
        f"The mismatch lowered the final accuracy; the sources were not all measured apart. {ONE_SEED}"
    )
    assert sources.details[-1] == "Not measured by a complete arm: lag alone and numerics alone."


def test_an_incomplete_arm_is_named_and_compared_with_nothing(job: Job):
    root = job()
    _change(
        root / "arms" / "none" / "seed0" / "result.json", status="failed", reason="loss is NaN", accuracy_final=0.02
    )
    learned, _, correction, sources = _answers(root)
    assert learned.details[3] == (
        "“mismatched, uncorrected” did not finish: seed 0 failed at step 10 (loss is NaN); its last held-out accuracy "
        "was 2.0%. It does not enter the comparisons."
    )
    assert "uncorrected" not in learned.answer
    assert correction.answer == "No uncorrected arm is complete, so there is nothing to compare."
    assert not any("mismatched, uncorrected" in line for line in sources.details)


def test_without_items_nothing_is_claimed(job: Job):
    root = job()
    for path in root.glob("arms/*/seed0/result.json"):
        _change(path, evaluation_items=0)
    learned = _answers(root)[0]
    assert learned.answer.startswith("Held-out accuracy did not clearly change in")
    assert "interval unknown" in learned.details[0]


def test_an_arm_without_a_start_is_not_compared_with_it(job: Job):
    root = job()
    _change(root / "arms" / "zero" / "seed0" / "result.json", accuracy_start=None)
    learned = _answers(root)[0]
    assert learned.details[0] == "“zero mismatch”: ended at 84.0%; its start was not recorded."
    assert "zero mismatch" not in learned.answer


def test_no_arms_means_no_claims(tmp_path: Path):
    (tmp_path / "run.json").write_text('{"arms": []}')
    findings = _answers(tmp_path)
    assert all("cannot be said" in finding.answer for finding in findings)
    assert all(finding.details == () for finding in findings)
