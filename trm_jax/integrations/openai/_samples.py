"""What is asked of any server, what comes back, and the rules that an answer has to keep."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

__all__ = [
    "SENTINEL",
    "Sample",
    "SampleRequest",
    "UnfitServer",
    "check_prompt",
    "check_response",
    "row_fault",
    "two_logps",
]

SENTINEL = -9999.0
"""vLLM's stand-in for minus infinity, which JSON does not have."""

_ROUNDING = 1e-3  # above 0: float32 log-softmax stays below 1e-6, bfloat16 log-probs near 0 are 1e-3 apart or closer


class UnfitServer(ValueError):
    """The server answers, and what it answers cannot be trained on; the message says what to change there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """Samples of one prompt.

    Attributes:
      prompt: token ids.
      seeds: a seed a sample; what a dialect makes of them is its own matter.
      seeded: whether they are sent.
      max_tokens: longest response, the end token included.
      temperature: logits are divided by it; 0 takes the most likely token.
      top_p: nucleus mass.
      top_k: most likely tokens kept; 0 keeps all.
      min_p: least share of the largest probability.
      eos_ids: ids that end a response.
      top: top log-probs to return at every token.
    """

    prompt: Sequence[int]
    seeds: Sequence[int]
    seeded: bool
    max_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    eos_ids: Sequence[int]
    top: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One response, as the server tells it.

    Attributes:
      tokens: ids.
      logps: their log-probs; NaN where the server has none.
      finish: "stop", "length" or "abort".
      top: at every token, the log-probs of the most likely tokens by id; empty when not asked for.
      weights: the server's own name of the weights that it used, or None.
    """

    tokens: list[int]
    logps: list[float]
    finish: str
    top: list[dict[int, float]]
    weights: str | None = None


def check_prompt(sent: Sequence[int], *, counted: int | None, echoed: Sequence[int] | None, hint: str) -> None:
    """Refuses a server that ran another prompt than the one sent.

    >>> check_prompt([5, 6, 7], counted=2, echoed=None, hint="Raise --max-model-len.")
    Traceback (most recent call last):
      ...
    trm_jax.integrations.openai._samples.UnfitServer: the prompt has 3 tokens and the server counts 2: it truncates \
prompts or adds tokens of its own. Raise --max-model-len.
    """
    if counted is None:
        raise UnfitServer("the answer does not count the prompt's tokens (usage): a truncated prompt would go unseen.")
    if counted != len(sent):
        raise UnfitServer(
            f"the prompt has {len(sent)} tokens and the server counts {counted}: it truncates prompts or adds tokens "
            f"of its own. {hint}"
        )
    if echoed is not None and list(echoed) != list(sent):
        at = next(i for i, (a, b) in enumerate(zip(echoed, sent, strict=False)) if a != b)
        raise UnfitServer(
            f"the server ran another prompt: id {echoed[at]} at position {at}, {sent[at]} was sent. {hint}"
        )


def check_response(sample: Sample, request: SampleRequest, *, vocab_size: int, hint: str) -> None:
    """Refuses ids of another vocabulary, unknown ends, and responses longer than asked for or cut before."""
    if bad := [i for ids in (sample.tokens, *sample.top) for i in ids if not 0 <= i < vocab_size]:
        raise UnfitServer(
            f"the server knows id {bad[0]}, outside this model's vocabulary [0, {vocab_size}): it serves another "
            "model, or pads its vocabulary with rows that can be sampled."
        )
    if len(sample.tokens) > request.max_tokens:
        raise UnfitServer(f"the response has {len(sample.tokens)} tokens, {request.max_tokens} were asked for.")
    if sample.finish not in ("stop", "length"):
        raise UnfitServer(f"the response ended for a reason that is not known here: {sample.finish!r}.")
    if sample.finish == "length" and len(sample.tokens) < request.max_tokens:
        raise UnfitServer(
            f"the response was cut after {len(sample.tokens)} of {request.max_tokens} tokens: the server's context is "
            f"shorter than prompt and response. {hint}"
        )


def two_logps(token: int, logp: float, top: dict[int, float]) -> str:
    """What is wrong when a sampled token has another log-prob among the most likely ones; "" when nothing is.

    What the log-probs are of is measured by the most likely ones, and must hold for the sampled ones.

    >>> two_logps(7, -0.5, {7: -0.5, 8: -2.0}), two_logps(7, -0.5, {7: -0.9})
    ('', 'sampled token 7 has log-prob -0.5, and -0.9 among the most likely ones')
    """
    told = top.get(token, logp)
    return (
        f"sampled token {token} has log-prob {logp:g}, and {told:g} among the most likely ones"
        if abs(told - logp) > _ROUNDING
        else ""
    )


def row_fault(sample: Sample, request: SampleRequest) -> str:
    """What is wrong with the record of one response; "" when nothing is.

    >>> request = SampleRequest(
    ...     prompt=[5], seeds=[0], seeded=True, max_tokens=4, temperature=1.0, eos_ids=[2]
    ... )
    >>> row_fault(Sample(tokens=[7, 2], logps=[-0.5, -0.1], finish="stop", top=[]), request)
    ''
    >>> row_fault(Sample(tokens=[7], logps=[-9999.0], finish="length", top=[]), request)
    'token 0 (id 7) has log-prob -9999.0'
    """
    tokens, logps, ends = sample.tokens, sample.logps, set(request.eos_ids)
    if not tokens:
        return "the response has no token, not even the end token"
    if len(logps) != len(tokens):
        return f"{len(tokens)} tokens have {len(logps)} log-probs"
    for at, (token, logp) in enumerate(zip(tokens, logps, strict=True)):
        if not math.isfinite(logp) or not SENTINEL < logp <= _ROUNDING:
            return f"token {at} (id {token}) has log-prob {logp}"
    if early := [at for at, token in enumerate(tokens[:-1]) if token in ends]:
        return (
            f"end token {tokens[early[0]]} stands at position {early[0]} of {len(tokens)}: the server goes on after it "
            "(ignore_eos?)"
        )
    if sample.finish == "stop" and tokens[-1] not in ends:
        return (
            f"the response ended with 'stop' at id {tokens[-1]}, which is none of eos_ids={sorted(ends)}: the server "
            "drops the end token's id, or stops at ids or strings of its own (generation_config.json)"
        )
    return ""
