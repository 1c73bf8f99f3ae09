"""What a server's log-probs are log-probs of, found out by asking: no server says so, and claims have been wrong.

One prompt is asked for one token three times, with the log-probs of the most likely tokens. At temperature 2, log-prob
differences between tokens halve, unless they are the model's own ("raw"). With the two most likely tokens kept, these
two have mass 1, unless truncation is left out ("tempered").
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from trm_jax.integrations.openai._options import LogpMode
from trm_jax.integrations.openai._samples import Sample, SampleRequest, UnfitServer, two_logps

__all__ = ["TOP", "measure_mode"]

TOP = 5
"""Top log-probs that the measurement asks for."""

_TEMPERATURE = 2.0
_PROMPTS, _LENGTH = 6, 4
_SPREAD = 1.0  # sum of squared differences, nats^2; bfloat16 noise of 0.03 a log-prob is then 0.04 in the slope
_SLOPE, _MASS = 0.1, 0.02


def measure_mode(ask: Callable[[SampleRequest], Sample], *, vocab_size: int, top_hint: str) -> LogpMode:
    """Asks a server about prompts of random ids until the answer is clear.

    Args:
      ask: sends a request for one sample.
      vocab_size: ids lie below it.
      top_hint: how to have the server return top log-probs.

    Raises:
      UnfitServer: no top log-probs, or log-probs of neither kind.
    """
    rng = np.random.default_rng(0)
    products = squares = 0.0
    told = False
    for _ in range(_PROMPTS):
        prompt = [int(i) for i in rng.integers(0, vocab_size, _LENGTH)]
        plain, warm = _top(ask, prompt, 1.0, 0), _top(ask, prompt, _TEMPERATURE, 0)
        common = sorted(plain.keys() & warm.keys())
        if len(common) < 2:
            continue
        told = True
        a, b = (np.array([top[i] for i in common]) for top in (plain, warm))
        products += float(np.sum((a - a.mean()) * (b - b.mean())))
        squares += float(np.sum((a - a.mean()) ** 2))
        if squares < _SPREAD:
            continue
        slope = products / squares
        if abs(slope - 1) < _SLOPE:
            return "raw"
        if abs(slope - 1 / _TEMPERATURE) > _SLOPE:
            raise UnfitServer(
                f"at temperature {_TEMPERATURE:g} differences of log-probs are {slope:.3f} times those at 1; that is "
                "neither raw (1) nor processed (0.5): the server, or something between, changes temperature or logits."
            )
        whole = _mass(warm)
        if whole > 1 - 4 * _MASS:
            continue  # two tokens hold nearly all mass: cutting the others would not show
        kept = _mass(_top(ask, prompt, _TEMPERATURE, 2))
        if abs(kept - 1) < _MASS:
            return "processed"
        if abs(kept - whole) < _MASS:
            return "tempered"
        raise UnfitServer(
            f"the two most likely tokens have mass {whole:.3f}, and {kept:.3f} with top_k=2; 1 or the same is expected."
        )
    if not told:
        raise UnfitServer(f"the server returns no top log-probs, by which raw and processed are told apart. {top_hint}")
    raise UnfitServer(
        f"the log-probs of {_PROMPTS} prompts are too close to uniform, or to certainty, to tell raw from processed: "
        "is this a trained model?"
    )


def _top(ask: Callable[[SampleRequest], Sample], prompt: list[int], temperature: float, top_k: int) -> dict[int, float]:
    """The most likely first tokens and their log-probs; empty where the server has none."""
    sample = ask(
        SampleRequest(
            prompt=prompt,
            seeds=[0],
            seeded=False,
            max_tokens=1,
            temperature=temperature,
            top_k=top_k,
            eos_ids=(),
            top=TOP,
        )
    )
    if not sample.top:
        return {}
    if fault := two_logps(sample.tokens[0], sample.logps[0], sample.top[0]):
        raise UnfitServer(f"{fault}: the server, or something between, has two kinds of log-probs.")
    return sample.top[0]


def _mass(top: dict[int, float]) -> float:
    """Of the two most likely tokens."""
    return sum(math.exp(logp) for logp in sorted(top.values())[-2:])
