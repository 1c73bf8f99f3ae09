"""An ``Engine`` whose sampling an OpenAI-compatible server does: vLLM, SGLang or llama.cpp."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from trm_jax.integrations.openai._dialects import DIALECTS, Dialect, dialect_of
from trm_jax.integrations.openai._fit import check_claim, find_model, is_cut, is_processed
from trm_jax.integrations.openai._http import Client
from trm_jax.integrations.openai._measure import measure_mode
from trm_jax.integrations.openai._options import Cuts, DialectName, LogpMode, ServerOptions
from trm_jax.integrations.openai._rows import Group, groups_of, support_fault, to_rollout
from trm_jax.integrations.openai._samples import Sample, SampleRequest, UnfitServer, check_response, row_fault
from trm_jax.integrations.openai._weights import Publish, WeightExports, sglang_publish
from trm_jax.models import Transformer
from trm_jax.rollout import EngineConfig, SamplingConfig
from trm_jax.types import PromptBatch, RolloutBatch

__all__ = ["OpenAIEngine", "open_engine"]


class OpenAIEngine:
    """A server of another project as a rollout engine, with complete and checked records of what it sampled.

    Prompts go as token ids and responses come back as token ids; text is never tokenised. What the server's log-probs
    are log-probs of is measured when the engine is made and after the server was away. What is wrong with an answer is
    an error that names what to change at the server (see ``docs/engines.md``).

    Every token has the version of the last ``update_weights``, which waits for a ``generate`` under way. A server
    whose weights are fixed keeps the version that it is given here.

    Args:
      model: the architecture (its parameters are not used).
      config: lengths; the server's context must hold ``P + T`` tokens.
      server: where and what the server is.
      sampling: default options.
      eos_ids: token ids that end a response.
      cuts: truncation beside top-p, and the record of the support.
      version: of a fixed server's weights.
      weights: directory, shared with the server, for exports of new weights; None for a fixed server.
      publish: has the server load an export. SGLang needs none; see ``Publish``.
      like: directory whose configuration and tokenizer files go along with an export.
      export: type of the exported weights.

    Raises:
      ValueError: options that do not go together, or a server that is unfit, naming what differs.
      ServerFailed: there is no server within the patience.
    """

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        *,
        server: ServerOptions,
        sampling: SamplingConfig,
        eos_ids: Iterable[int],
        cuts: Cuts = Cuts(),  # noqa: B008 - frozen
        version: int = 0,
        weights: Path | None = None,
        publish: Publish | None = None,
        like: Path | None = None,
        export: str = "bfloat16",
    ) -> None:
        self._config, self._server, self._sampling, self._cuts = config, server, sampling, cuts
        self._vocab: int = model.config.vocab_size
        self._eos = tuple(sorted(int(i) for i in eos_ids))
        if not self._eos or not all(0 <= i < self._vocab for i in self._eos):
            raise ValueError(f"eos_ids={list(self._eos)}: give at least one, each in [0, vocab_size={self._vocab}).")
        if publish is not None and weights is None:
            raise ValueError("publish needs weights, the directory that exports are written to.")
        self._client = Client(server, self._returned)
        card = find_model(self._client, server.model, vocab_size=self._vocab, needed=config.sequence_length)
        self._name = str(card["id"])
        self._kind: DialectName = server.dialect or dialect_of(card)
        self._dialect: Dialect = DIALECTS[self._kind]()
        if weights is not None and publish is None:
            if self._kind != "sglang":
                raise ValueError(
                    f"{self._kind} has no call that loads weights from a directory: give publish, or no weights."
                )
            publish = sglang_publish(self._client)
        self._named_weights = self._kind == "sglang" and weights is not None
        self._publish = publish
        self._exports = (
            None if weights is None else WeightExports(weights, nnx.graphdef(model), dtype=export, like=like)
        )
        self._version = int(version) if weights is None else -1
        self._published: Path | None = None
        self._turn = threading.Lock()
        self._mode = self._measured()

    @property
    def version(self) -> int:
        """Policy version of the weights in use; -1 before the first ``update_weights`` of a server that takes some."""
        return self._version

    @property
    def logp_mode(self) -> LogpMode:
        """What the server's log-probs were measured to be."""
        return self._mode

    @property
    def dialect(self) -> DialectName:
        """What the server speaks."""
        return self._kind

    def update_weights(self, version: int, params: nnx.State[Any, Any]) -> None:
        """Exports the parameters and returns when the server samples from them.

        Raises:
          NotImplementedError: the engine was made for a server with fixed weights.
          ServerFailed: the server did not take them.
        """
        if self._exports is None or self._publish is None:
            raise NotImplementedError(
                "this engine's server has fixed weights: give weights (a directory that both see) and, unless it is "
                "SGLang, publish (a function that has the server load an export)."
            )
        with self._turn:
            directory = self._exports.write(version, params)
            self._publish(version, directory)
            self._version, self._published = int(version), directory

    def head_matrix(self) -> Float[Array, "V D"]:
        """Refused: without hidden states there is nothing to multiply the head with.

        Raises:
          NotImplementedError: always.
        """
        raise NotImplementedError(
            "an OpenAI-compatible server returns no hidden states, so its head has no use: set record_hidden=false "
            "(corrections then use the sampled tokens' log-probs alone)."
        )

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig | None = None) -> RolloutBatch:
        """Answers every row of ``prompts``.

        Args:
          prompts: rows of at most ``max_prompt_length`` tokens, left-aligned.
          sampling: overrides the engine's own options for this call.

        Returns:
          A ``RolloutBatch`` with ``T = max_response_length``; ``processed_logps`` says what was measured. Where nothing
          but temperature 1 is asked for, raw log-probs are those of the distribution drawn from.

        Raises:
          ValueError: a prompt or sampling that cannot be had, or an answer that cannot be trained on.
          RuntimeError: before the first ``update_weights``.
          ServerFailed: the server failed, or stayed away longer than the patience.
        """
        if self._version < 0:
            raise RuntimeError("the engine has no weights yet: call update_weights(version, params) first.")
        sampling = self._sampling if sampling is None else sampling
        cut = is_cut(sampling, self._cuts, self._mode, self._dialect.processed)
        support = self._cuts.support_tokens if cut else 0
        groups = groups_of(
            prompts,
            limit=self._config.max_prompt_length,
            vocab_size=self._vocab,
            together=self._server.group_samples,
        )
        with self._turn:
            requests = [self._request(group, sampling, support) for group in groups]
            asked = [
                (self._dialect.body(request, self._name), functools.partial(self._read, request))
                for request in requests
            ]
            answers = self._client.ask_all(self._dialect.path, asked)
            version = self._version
        rows: dict[int, Sample] = {}
        faults: dict[int, str] = {}
        for group, request, samples in zip(groups, requests, answers, strict=True):
            for row, sample in zip(group.rows, samples, strict=True):
                rows[row] = sample if not sampling.greedy else _certain(sample)
                if fault := row_fault(sample, request) or (support_fault(sample, support) if support else ""):
                    faults[row] = fault
        self._settle(rows, faults)
        return to_rollout(
            prompts,
            [rows[row] for row in range(len(rows))],
            self._config,
            version=version,
            eos_ids=self._eos,
            support_size=self._vocab if support else None,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            processed_logps=is_processed(sampling, self._mode, cut=cut),
        )

    def _request(self, group: Group, sampling: SamplingConfig, support: int) -> SampleRequest:
        greedy = sampling.greedy
        return SampleRequest(
            prompt=group.prompt,
            seeds=group.seeds,
            seeded=self._server.seeded and not greedy,
            max_tokens=self._config.max_response_length,
            temperature=0.0 if greedy else sampling.temperature,
            top_p=1.0 if greedy else sampling.top_p,
            top_k=0 if greedy else self._cuts.top_k,
            min_p=0.0 if greedy else self._cuts.min_p,
            eos_ids=self._eos,
            top=support,
        )

    def _read(self, request: SampleRequest, answer: Any) -> list[Sample]:
        """The samples of an answer that has what was asked for."""
        try:
            samples = self._dialect.samples(answer, request, self._name)
            for sample in samples:
                check_response(sample, request, vocab_size=self._vocab, hint=self._dialect.context)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise UnfitServer(
                f"the answer is not of the form that {self._kind} has ({type(error).__name__}: {error})."
            ) from error
        wanted = str(self._version)
        if self._named_weights and (wrong := [s.weights for s in samples if s.weights != wanted]):
            raise UnfitServer(
                f"the server sampled from weights {wrong[0]!r}, policy version {wanted} was published: is somebody "
                "else updating it?"
            )
        return samples

    def _settle(self, rows: dict[int, Sample], faults: dict[int, str]) -> None:
        """Raises for faulty rows, or has every correction reject them."""
        if not faults:
            return
        first = min(faults)
        if self._server.faulty_rows == "raise" or 2 * len(faults) > len(rows):
            raise UnfitServer(
                f"row {first}: {faults[first]} ({len(faults)} of {len(rows)} rows are faulty). Single rows like this "
                'are rejected and counted with faulty_rows="drop".'
            )
        for row in faults:
            tokens = rows[row].tokens
            rows[row] = dataclasses.replace(rows[row], logps=[float("nan")] * len(tokens), top=[])

    def _measured(self) -> LogpMode:
        def ask(request: SampleRequest) -> Sample:
            read = functools.partial(self._dialect.samples, request=request, model=self._name)
            return self._client.ask(self._dialect.path, self._dialect.body(request, self._name), read)[0]

        mode = measure_mode(ask, vocab_size=self._vocab, top_hint=self._dialect.top)
        check_claim(self._server.logps, mode, self._dialect.processed)
        return mode

    def _returned(self) -> None:
        """After the server was away: it may be a new process, with its first weights and other flags."""
        if self._published is not None and self._publish is not None:
            self._publish(self._version, self._published)
        if (mode := self._measured()) != self._mode:
            raise UnfitServer(f"the server came back with {mode} log-probs, {self._mode} before: start it as it was.")


def open_engine(
    address: str,
    model: Transformer,
    config: EngineConfig,
    *,
    sampling: SamplingConfig,
    eos_ids: Iterable[int],
    weights: Path | None = None,
    publish: Publish | None = None,
    **options: Any,
) -> OpenAIEngine:
    """The engine at an ``http`` address, everything else as it comes.

    Args:
      address: ``http://host:port``.
      model: the architecture.
      config: lengths.
      sampling: default options.
      eos_ids: token ids that end a response.
      weights: see ``OpenAIEngine``.
      publish: see ``OpenAIEngine``.
      options: other fields of ``ServerOptions``.

    Raises:
      ValueError: as ``OpenAIEngine`` and ``ServerOptions`` do.

    >>> open_engine("127.0.0.1:8000", None, None, sampling=SamplingConfig(), eos_ids=[2])
    Traceback (most recent call last):
      ...
    ValueError: address='127.0.0.1:8000': must be http://host:port or https://host:port, without a path.
    """
    return OpenAIEngine(
        model,
        config,
        server=ServerOptions(address=address, **options),
        sampling=sampling,
        eos_ids=eos_ids,
        weights=weights,
        publish=publish,
    )


def _certain(sample: Sample) -> Sample:
    """A greedy choice: the log-probs of a point mass, whatever the server calls them."""
    return dataclasses.replace(sample, logps=[0.0] * len(sample.tokens))
