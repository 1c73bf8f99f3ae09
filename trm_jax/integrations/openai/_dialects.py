"""Three servers' requests and answers: one mapping each, and how to tell which it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from trm_jax.integrations.openai._http import Aborted
from trm_jax.integrations.openai._options import DialectName
from trm_jax.integrations.openai._samples import SENTINEL, Sample, SampleRequest, UnfitServer, check_prompt

__all__ = ["DIALECTS", "Dialect", "dialect_of"]


class Dialect(Protocol):
    """One kind of server.

    Attributes:
      path: where requests go.
      context: how to make its context longer.
      processed: how to have it return log-probs of the distribution drawn from.
      top: how to have it return more top log-probs.
    """

    path: str
    context: str
    processed: str
    top: str

    def body(self, request: SampleRequest, model: str) -> dict[str, Any]:
        """The JSON of a request."""

    def samples(self, answer: Any, request: SampleRequest, model: str) -> list[Sample]:
        """The samples in an answer, in the order of the seeds.

        Raises:
          UnfitServer: the answer has no ids, or is of another model, prompt or number of samples.
          Aborted: the server gave up.
        """


class VLLM:
    """vLLM's ``/v1/completions``, on GPU and TPU."""

    path = "/v1/completions"
    context = "Raise --max-model-len, and send no truncate_prompt_tokens."
    processed = "Start vLLM with --logprobs-mode processed_logprobs."
    top = "Start vLLM with a larger --max-logprobs."

    def body(self, request: SampleRequest, model: str) -> dict[str, Any]:
        body = {
            "model": model,
            "prompt": list(request.prompt),
            "n": len(request.seeds),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
            "min_p": request.min_p,
            "repetition_penalty": 1.0,  # what is not sent comes from the model's generation_config.json
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "min_tokens": 0,
            "ignore_eos": False,
            "stop_token_ids": list(request.eos_ids),
            "add_special_tokens": False,
            "skip_special_tokens": False,
            "logprobs": request.top,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        return body | ({"seed": int(request.seeds[0])} if request.seeded else {})

    def samples(self, answer: Any, request: SampleRequest, model: str) -> list[Sample]:
        _check_model(answer.get("model"), model)
        choices = sorted(_choices(answer.get("choices"), len(request.seeds)), key=lambda choice: choice["index"])
        if [choice["index"] for choice in choices] != list(range(len(choices))):
            raise UnfitServer(f"choices have indices {[choice['index'] for choice in choices]}: one each is needed.")
        for choice in choices:
            check_prompt(
                request.prompt,
                counted=(answer.get("usage") or {}).get("prompt_tokens"),
                echoed=choice.get("prompt_token_ids"),
                hint=self.context,
            )
        return [self._sample(choice) for choice in choices]

    def _sample(self, choice: Any) -> Sample:
        if choice["finish_reason"] == "abort":
            raise Aborted("vLLM aborted the request.")
        record = choice.get("logprobs")
        if not record:
            raise UnfitServer("the answer has no log-probs although they were asked for (logprobs).")
        named = [_id_of(token) for token in record["tokens"]]
        tokens = choice.get("token_ids")
        if tokens is None:
            if None in named:
                raise UnfitServer(
                    "the server returns no token ids, and text is not tokenised again: use a vLLM that knows "
                    "return_token_ids, or start it with --return-tokens-as-token-ids."
                )
            tokens = named
        elif None not in named and named != tokens:
            raise UnfitServer(f"token_ids {tokens[:8]} and the tokens of logprobs {named[:8]} differ.")
        tops = record.get("top_logprobs") or []
        return Sample(
            tokens=list(tokens),
            logps=[_number(logp) for logp in record["token_logprobs"]],
            finish=choice["finish_reason"],
            top=[
                {i: _number(logp) for name, logp in (top or {}).items() if (i := _id_of(name)) is not None}
                for top in tops
            ],
        )


class SGLang:
    """SGLang's ``/generate``; ids and log-probs come in pairs there, and every sample has its own seed."""

    path = "/generate"
    context = "Raise --context-length, and do not set --allow-auto-truncate."
    processed = "Unset SGLANG_RETURN_ORIGINAL_LOGPROB; sample without top-p, top-k and min-p, which it leaves out."
    top = "SGLang returns any number: is a proxy between?"

    def body(self, request: SampleRequest, model: str) -> dict[str, Any]:
        params = {
            "max_new_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
            "min_p": request.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "min_new_tokens": 0,
            "ignore_eos": False,
            "stop_token_ids": list(request.eos_ids),
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        return {
            "input_ids": [list(request.prompt) for _ in request.seeds],
            "sampling_params": [
                params | ({"sampling_seed": int(seed)} if request.seeded else {}) for seed in request.seeds
            ],
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": request.top,
            "stream": False,
        }

    def samples(self, answer: Any, request: SampleRequest, model: str) -> list[Sample]:
        return [self._sample(item, request) for item in _choices(answer, len(request.seeds))]

    def _sample(self, item: Any, request: SampleRequest) -> Sample:
        meta = item["meta_info"]
        finish = str((meta.get("finish_reason") or {}).get("type"))
        if finish == "abort":
            raise Aborted(f"SGLang aborted the request: {meta['finish_reason'].get('message', 'no reason given')}.")
        check_prompt(request.prompt, counted=meta.get("prompt_tokens"), echoed=None, hint=self.context)
        if "output_token_logprobs" not in meta:
            raise UnfitServer("the answer has no log-probs although they were asked for (return_logprob).")
        pairs = meta["output_token_logprobs"]
        if len(pairs) != meta.get("completion_tokens", len(pairs)):
            raise UnfitServer(
                f"{meta['completion_tokens']} tokens were sampled and {len(pairs)} have log-probs and ids."
            )
        tops = meta.get("output_top_logprobs") or []
        return Sample(
            tokens=[pair[1] for pair in pairs],
            logps=[_number(pair[0]) for pair in pairs],
            finish=finish,
            top=[{entry[1]: _number(entry[0]) for entry in top or []} for top in tops],
            weights=meta.get("weight_version"),
        )


class LlamaCpp:
    """llama.cpp's ``/completion``, which has ids and probabilities after the sampling chain (not in ``/v1``)."""

    path = "/completion"
    context = "Raise --ctx-size (it is shared out among the --parallel slots)."
    processed = "Use a llama-server that knows post_sampling_probs."
    top = "llama-server returns any number: is a proxy between?"

    def body(self, request: SampleRequest, model: str) -> dict[str, Any]:
        body = {
            "model": model,
            "prompt": list(request.prompt),
            "n_cmpl": len(request.seeds),
            "n_predict": request.max_tokens,
            "samplers": ["temperature", "top_k", "top_p", "min_p"],  # its own order cuts first, and has penalties
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "min_p": request.min_p,
            "ignore_eos": False,
            "stream": False,
            "cache_prompt": True,
            "return_tokens": True,
            "n_probs": max(request.top, 1),
            "post_sampling_probs": True,
        }
        # 2^32 - 1 asks for a random seed there.
        return body | ({"seed": int(request.seeds[0]) & 0x7FFF_FFFF} if request.seeded else {})

    def samples(self, answer: Any, request: SampleRequest, model: str) -> list[Sample]:
        items = _choices(answer if isinstance(answer, list) else [answer], len(request.seeds))
        return [self._sample(item, request, model) for item in sorted(items, key=lambda item: item.get("index", 0))]

    def _sample(self, item: Any, request: SampleRequest, model: str) -> Sample:
        _check_model(item.get("model"), model)
        for name, used in item.get("generation_settings", {}).items():
            if name in _SETTINGS and abs(used - getattr(request, name)) > 1e-6:
                raise UnfitServer(f"the server sampled with {name}={used}, {getattr(request, name)} was asked for.")
        check_prompt(request.prompt, counted=item.get("tokens_evaluated"), echoed=None, hint=self.context)
        tokens, probs = item.get("tokens"), item.get("completion_probabilities")
        if not tokens:
            raise UnfitServer("the server returns no token ids: use a llama-server that knows return_tokens.")
        if probs is None or any("prob" not in entry for entry in probs):
            raise UnfitServer(f"the server returns no probabilities after sampling. {self.processed}")
        logps = [_log(entry["prob"]) for entry in probs]
        if len(probs) == len(tokens) and [entry["id"] for entry in probs] != tokens:
            raise UnfitServer("the ids of tokens and of completion_probabilities differ.")
        finish = {"eos": "stop", "limit": "length"}.get(item.get("stop_type"), str(item.get("stop_type")))
        most = request.max_tokens
        if len(tokens) > most:  # it goes on to the end of a character; the first tokens are a sample all the same
            tokens, logps, finish = tokens[:most], logps[:most], "length"
        return Sample(
            tokens=tokens,
            logps=logps,
            finish=finish,
            top=[{top["id"]: _log(top["prob"]) for top in entry.get("top_probs", [])} for entry in probs[:most]],
        )


DIALECTS: dict[DialectName, Callable[[], Dialect]] = {"vllm": VLLM, "sglang": SGLang, "llama.cpp": LlamaCpp}

_SETTINGS = ("temperature", "top_p", "top_k", "min_p")

_OWNERS: dict[str, DialectName] = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}


def dialect_of(card: dict[str, Any]) -> DialectName:
    """The dialect of the server that lists a model.

    >>> dialect_of({"id": "policy", "owned_by": "llamacpp"})
    'llama.cpp'
    """
    owner = card.get("owned_by")
    if owner not in _OWNERS:
        raise UnfitServer(f"/v1/models says owned_by={owner!r}, which is none of {sorted(_OWNERS)}: set dialect.")
    return _OWNERS[owner]


def _choices(found: Any, wanted: int) -> Sequence[Any]:
    if not isinstance(found, list) or len(found) != wanted:
        count = len(found) if isinstance(found, list) else "no"
        raise UnfitServer(f"{wanted} samples were asked for, {count} came: set group_samples=False.")
    return found


def _check_model(found: Any, wanted: str) -> None:
    if found != wanted:
        raise UnfitServer(f"the answer is of model {found!r}, {wanted!r} was asked for.")


def _id_of(token: str) -> int | None:
    name, _, number = token.rpartition(":")
    return int(number) if name == "token_id" and number.isdecimal() else None


def _number(value: Any) -> float:
    """A log-prob; NaN for null, minus infinity for vLLM's stand-in among the top ones stays what it is."""
    return math.nan if value is None else float(value)


def _log(prob: float) -> float:
    return math.log(prob) if prob > 0 else SENTINEL
