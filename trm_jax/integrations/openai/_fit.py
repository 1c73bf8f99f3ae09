"""Whether a server and what is asked of it go together: its model, its log-probs, and how it is to sample."""

from __future__ import annotations

from typing import Any

from trm_jax.integrations.openai._http import Client
from trm_jax.integrations.openai._options import Cuts, LogpMode
from trm_jax.integrations.openai._samples import UnfitServer
from trm_jax.rollout import SamplingConfig

__all__ = ["check_claim", "find_model", "is_cut", "is_processed"]


def find_model(client: Client, wanted: str | None, *, vocab_size: int, needed: int) -> dict[str, Any]:
    """The model's entry in ``/v1/models``.

    Args:
      client: of the server.
      wanted: its name; None takes the only one.
      vocab_size: of this run's model, compared with the server's where it says one.
      needed: tokens that its context must hold.

    Raises:
      UnfitServer: there is no such model, or it differs.
    """
    listed = client.get("/v1/models")
    cards = {str(card["id"]): card for card in listed.get("data", [])} if isinstance(listed, dict) else {}
    name = wanted or (next(iter(cards)) if len(cards) == 1 else None)
    if name not in cards:
        raise UnfitServer(
            f"the server lists models {sorted(cards)}, this run expects {wanted!r}: set model to one of them, or start "
            "the server with another --served-model-name (llama-server: --alias)."
        )
    card: dict[str, Any] = cards[name]
    meta = card.get("meta") or {}
    if (vocab := meta.get("n_vocab", vocab_size)) != vocab_size:
        raise UnfitServer(f"the server's model has a vocabulary of {vocab}, this run's has {vocab_size}.")
    longest = card.get("max_model_len") or meta.get("n_ctx")
    if longest is not None and longest < needed:
        raise UnfitServer(
            f"the server's context holds {longest} tokens, prompt and response need {needed}: start it with a longer "
            "one (--max-model-len, --context-length or --ctx-size)."
        )
    return card


def check_claim(claimed: str | None, mode: LogpMode, hint: str) -> None:
    """Refuses a claim about log-probs that the measurement contradicts.

    >>> check_claim("processed", "tempered", "")  # apart from truncation they are
    >>> check_claim("processed", "raw", "Start vLLM with --logprobs-mode processed_logprobs.")
    Traceback (most recent call last):
      ...
    trm_jax.integrations.openai._samples.UnfitServer: logps='processed' is claimed and raw was measured. Start vLLM \
with --logprobs-mode processed_logprobs.
    """
    if claimed is not None and (claimed == "raw") != (mode == "raw"):
        said = hint if mode == "raw" else "Say logps='processed', or leave it out."
        raise UnfitServer(f"logps={claimed!r} is claimed and {mode} was measured. {said}")


def is_cut(sampling: SamplingConfig, cuts: Cuts, mode: LogpMode, hint: str) -> bool:
    """Whether the distribution is cut; refuses a cut that the server's log-probs do not show and a record must.

    >>> is_cut(SamplingConfig(top_p=0.9), Cuts(), "processed", "")
    True
    """
    if sampling.greedy or (sampling.top_p == 1 and not cuts.top_k and not cuts.min_p):
        return False
    if cuts.support_tokens and mode != "processed":
        raise ValueError(
            f"top_p={sampling.top_p}, top_k={cuts.top_k}, min_p={cuts.min_p} cut the distribution; the log-probs of "
            f"the server are {mode}: what was cut cannot be seen in them. {hint}"
        )
    if mode == "tempered" and sampling.temperature != 1:
        raise ValueError(
            f"top_p={sampling.top_p} at temperature={sampling.temperature}: the server's log-probs have the "
            f"temperature and not the cut, which no record can say. {hint}"
        )
    return True


def is_processed(sampling: SamplingConfig, mode: LogpMode, *, cut: bool) -> bool:
    """Whether log-probs of that mode are those of the distribution drawn from.

    >>> [is_processed(SamplingConfig(temperature=t), "raw", cut=False) for t in (1.0, 2.0)]
    [True, False]
    """
    if sampling.greedy or mode == "processed":
        return True
    return not cut and (mode == "tempered" or sampling.temperature == 1)
