"""The answers in plain sentences, each computed from the runs.

Four questions: did it learn, how large was the mismatch, what did the correction do, which source did the harm. A
sentence claims a difference only when the 95% interval of that difference excludes zero, and only complete runs are
compared.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from trm_jax.report import text
from trm_jax.report.estimates import difference
from trm_jax.report.runs import ReportData, Role
from trm_jax.report.summary import ArmSummary, summarise

__all__ = ["Finding", "conclude"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One question, its short answer, and the sentences behind it."""

    question: str
    answer: str
    details: tuple[str, ...]


def conclude(data: ReportData) -> tuple[Finding, ...]:
    """Answers the four questions from the arms of ``data``; what cannot be answered is said to be so."""
    arms = [summarise(arm) for arm in data.arms]
    return (_learned(arms), _mismatch(arms), _correction(arms), _sources(arms))


def _learned(arms: Sequence[ArmSummary]) -> Finding:
    kinds: dict[str, list[str]] = {"rose": [], "fell": [], "flat": []}
    details = []
    for arm in arms:
        name = _quoted(arm)
        if not arm.arm.runs:
            continue
        if not arm.comparable:
            value = arm.final.value
            last = "" if math.isnan(value) else f"; its last held-out accuracy was {text.percent(value)}"
            details.append(f"{name} did not finish: {arm.state}{last}. It does not enter the comparisons.")
            continue
        if math.isnan(arm.start.value):
            details.append(f"{name}: ended at {text.percent(arm.final.value)}; its start was not recorded.")
            continue
        gap = difference(arm.final, arm.start)
        ends = f"from {text.percent(arm.start.value)} to {text.percent(arm.final.value)}"
        many = f", mean of {arm.final.seeds} seeds" if arm.final.seeds > 1 else ""
        kind = "flat" if not gap.resolved else "rose" if gap.value > 0 else "fell"
        kinds[kind].append(_quoted(arm))
        verb = f"went {ends}, which cannot be told from no change" if kind == "flat" else f"{kind} {ends}"
        details.append(f"{name}: held-out accuracy {verb} ({text.interval(gap)}{many}).")
    said = [
        f"rose in {text.join(kinds['rose'])}" if kinds["rose"] else "",
        f"fell in {text.join(kinds['fell'])}" if kinds["fell"] else "",
        f"did not clearly change in {text.join(kinds['flat'])}" if kinds["flat"] else "",
    ]
    clauses = [clause for clause in said if clause]
    if clauses:
        answer = f"Held-out accuracy {'; '.join(clauses)}.{_caveat(arms)}"
    else:
        answer = "No complete arm recorded where it began and ended, so this cannot be said."
    return Finding(question="Did it learn?", answer=answer, details=tuple(details))


def _mismatch(arms: Sequence[ArmSummary]) -> Finding:
    details = [sentence for arm in arms if (sentence := _mismatch_sentence(arm))]
    measured = sorted((arm for arm in arms if not math.isnan(arm.token_kl_mean)), key=lambda arm: arm.token_kl_mean)
    if not measured:
        answer = "No token KL was recorded, so this cannot be said."
    elif len(measured) == 1:
        answer = f"Mean token KL was {text.number(measured[0].token_kl_mean)} nats in {_quoted(measured[0])}."
    else:
        low, high = measured[0], measured[-1]
        answer = (
            f"Mean token KL ranged from {text.number(low.token_kl_mean)} nats in {_quoted(low)} to "
            f"{text.number(high.token_kl_mean)} nats in {_quoted(high)}."
        )
    return Finding(question="How large was the mismatch?", answer=answer, details=tuple(details))


def _mismatch_sentence(arm: ArmSummary) -> str:
    name = _quoted(arm)
    sizes = [
        f"{label} {text.number(value)} {unit}"
        for label, value, unit in (
            ("mean token KL", arm.token_kl_mean, "nats"),
            ("largest token KL", arm.token_kl_max, "nats"),
            ("PPL gap", arm.ppl_gap, "nats a token"),
        )
        if not math.isnan(value)
    ]
    listed = ", ".join(sizes)
    kl = f" {listed[0].upper()}{listed[1:]}." if sizes else ""
    if math.isnan(arm.bitwise_equal):
        return f"{name}:{kl}" if sizes else ""
    tokens = "sampled tokens" if arm.tokens is None else f"{arm.tokens:,} sampled tokens"
    said = f"{name}: rollout and recomputed log-probs were equal to the bit on {{}} of the {tokens}"
    if arm.bitwise_equal_min == 1:
        return f"{said.format('100%')}.{kl}"
    largest = arm.log_ratio_max_abs
    most = "" if math.isnan(largest) else f"; they differed by at most {text.number(largest)} nats"
    return f"{said.format(text.percent(arm.bitwise_equal))}{most}{_cause(arm)}.{kl}"


def _cause(arm: ArmSummary) -> str:
    """Why they differ, as far as the records tell: at age 0 only the computation is left."""
    if math.isnan(arm.staleness):
        return ""
    if arm.staleness == 0:
        return ", because engine and training model compute differently from weights of the same version"
    age = f"the sampling weights were on average {text.number(arm.staleness)} updates old"
    if arm.arm.role == "lag_only":
        return f", because {age}"
    return f", where {age} and any difference in how the two compute adds to that"


def _correction(arms: Sequence[ArmSummary]) -> Finding:
    corrected = _of("corrected", arms)
    question = "What did the correction do?"
    if not corrected:
        return Finding(question=question, answer="No arm has the role corrected, so this cannot be said.", details=())
    details = [_action(arm) for arm in corrected]
    base = next((arm for arm in _of("uncorrected", arms) if arm.comparable), None)
    able = [arm for arm in corrected if arm.comparable]
    if base is None or not able:
        missing = "corrected" if base else "uncorrected"
        answer = f"No {missing} arm is complete, so there is nothing to compare."
        return Finding(question=question, answer=answer, details=tuple(details))
    groups: dict[str, list[ArmSummary]] = {"above": [], "below": [], "not clearly apart from": []}
    for arm in able:
        gap = difference(arm.final, base.final)
        groups["not clearly apart from" if not gap.resolved else "above" if gap.value > 0 else "below"].append(arm)
        details.append(_against(arm, base, _of("reference", arms)))
    if len(able) > 1:
        details.append(_best(able))
    clauses = [f"{text.join([*map(_quoted, group)])} ended {word}" for word, group in groups.items() if group]
    answer = f"{'; '.join(clauses)} {_quoted(base)}.{_caveat([base, *able])}"
    return Finding(question=question, answer=answer, details=tuple(details))


def _best(able: Sequence[ArmSummary]) -> str:
    best = max(able, key=lambda arm: arm.final.value)
    rest = [arm for arm in able if arm is not best]
    close = [_quoted(arm) for arm in rest if not difference(best.final, arm.final).resolved]
    if not close:
        return f"{_quoted(best)} ended highest of the corrected arms, beyond noise."
    return f"{_quoted(best)} ended highest of the corrected arms, but cannot be told apart from {text.join(close)}."


def _action(arm: ArmSummary) -> str:
    name = _quoted(arm)
    if not arm.steps:
        return f"{name} left no records of its steps."
    said = []
    if not math.isnan(arm.sequences_kept):
        said.append(f"kept {text.percent(arm.sequences_kept)} of the sequences")
    if not math.isnan(arm.tokens_kept) and arm.tokens_kept < 1:
        said.append(f"trained on {text.percent(arm.tokens_kept)} of the tokens")
    if not math.isnan(arm.weight_mean) and (arm.weight_mean, arm.weight_max) != (1, 1):
        said.append(
            f"weighed tokens by {text.number(arm.weight_mean)} on average and {text.number(arm.weight_max)} at most"
        )
    if arm.weights_capped > 0:
        said.append(f"capped the weight of {text.percent(arm.weights_capped)} of the tokens")
    if arm.dropped:
        said.append(f"left out {arm.dropped:,} prompts whose samples were too old")
    if arm.skipped:
        said.append(f"skipped {arm.skipped} of {arm.steps} updates with nothing to train on")
    if not said:
        return f"{name}: nothing was recorded of what its correction did."
    idle = "" if arm.acted else "; it never acted: no threshold was reached"
    return f"{name} {text.join(said)}{idle}."


def _against(arm: ArmSummary, base: ArmSummary, references: Sequence[ArmSummary]) -> str:
    gap = difference(arm.final, base.final)
    verdict = "not clearly apart from" if not gap.resolved else "above" if gap.value > 0 else "below"
    ended = f"{_quoted(arm)} ended at {text.percent(arm.final.value)}, {verdict} {_quoted(base)} ({text.interval(gap)})"
    reference = next((arm for arm in references if arm.comparable), None)
    if reference is None or not gap.resolved or gap.value < 0:
        return f"{ended}."
    lost = difference(reference.final, base.final)
    if not lost.resolved or lost.value < 0:
        return f"{ended}."
    return f"{ended}: {gap.value / lost.value:.0%} of what was lost against {_quoted(reference)}."


def _sources(arms: Sequence[ArmSummary]) -> Finding:
    question = "Which source of mismatch did the harm?"
    references = [arm for arm in _of("reference", arms) if arm.comparable]
    if not references:
        return Finding(question=question, answer="No reference arm is complete, so this cannot be said.", details=())
    reference = references[0]
    details: list[str] = []
    harmful: set[str] = set()
    harmless: set[str] = set()
    absent = []
    compared: list[ArmSummary] = []
    roles: tuple[tuple[Role, str], ...] = (
        ("lag_only", "lag alone"),
        ("numerics_only", "numerics alone"),
        ("uncorrected", "both together, uncorrected"),
    )
    for role, words in roles:
        able = [arm for arm in _of(role, arms) if arm.comparable]
        if not able:
            absent.append(words)
        compared += able
        for arm in able:
            gap = difference(arm.final, reference.final)
            harm = gap.resolved and gap.value < 0
            (harmful if harm else harmless).add(words)
            effect = "harm" if harm else "gain" if gap.resolved else "no harm that can be told from noise"
            details.append(
                f"{words.capitalize()} ({_quoted(arm)}): {effect}; {text.percent(arm.final.value)} against "
                f"{text.percent(reference.final.value)} of {_quoted(reference)} ({text.interval(gap)})."
            )
    if absent:
        details.append(f"Not measured by a complete arm: {text.join(absent)}.")
    answer = _verdict(harmful, harmless)
    caveat = _caveat([reference, *compared]) if compared else ""
    return Finding(question=question, answer=f"{answer}{caveat}", details=tuple(details))


def _verdict(harmful: set[str], harmless: set[str]) -> str:
    single = [words for words in ("lag alone", "numerics alone") if words in harmful]
    quiet = [words for words in ("lag alone", "numerics alone") if words in harmless and words not in harmful]
    both = "both together, uncorrected"
    if single:
        answer = f"{text.join(single).capitalize()} lowered the final accuracy"
        return answer + (f"; no drop beyond noise was seen with {text.join(quiet)}." if quiet else ".")
    if both in harmful and len(quiet) == 2:
        return "Lag and numerics together lowered the final accuracy; neither alone showed a drop beyond noise."
    if both in harmful:
        known = f"; no drop beyond noise was seen with {text.join(quiet)}" if quiet else ""
        return f"The mismatch lowered the final accuracy{known}; the sources were not all measured apart."
    if harmless:
        named = [words for words in ("lag alone", "numerics alone", both) if words in harmless]
        return f"No harm beyond noise from {text.join(named)}."
    return "No arm with a mismatch is complete, so this cannot be said."


def _of(role: Role, arms: Sequence[ArmSummary]) -> list[ArmSummary]:
    return [arm for arm in arms if arm.arm.role == role]


def _caveat(arms: Sequence[ArmSummary]) -> str:
    """What the intervals leave out when a compared arm has one complete seed."""
    if any(arm.comparable and arm.final.seeds == 1 for arm in arms):
        return " (One seed: the spread between seeds is not covered.)"
    return ""


def _quoted(arm: ArmSummary) -> str:
    return f"“{arm.arm.name}”"
