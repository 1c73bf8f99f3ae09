"""The section about sampling: what is sampled, where, how far ahead, and how the sampler differs from the trainer."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Literal

from trm_jax.rollout import RolloutNumerics
from trm_jax.train.config._rules import at_least, positive, require

__all__ = ["RolloutConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are sampled, and how the sampler differs from the trainer (``lag`` and ``numerics``).

    Attributes:
      prompts_per_step: prompts a step.
      samples_per_prompt: responses a prompt (the group of the advantage).
      temperature: logits are divided by it, on both sides.
      top_p: nucleus mass; below 1 the support is recorded and applied on both sides.
      max_prompt_length: longest prompt in tokens.
      max_response_length: longest response in tokens, the end token included.
      slots: sequences that decode together.
      prefill_rows: prompts in one prefill call.
      decode_chunk: decode steps between two looks at which slots are free.
      lag: updates by which the engine's weights are held back, where sampling and training take turns; what running
        ahead does, without its speed.
      record_hidden: return final hidden states, from which the full-vocabulary KL and TV are computed.
      max_staleness: updates by which the weights behind a token may be older than the policy that learns from it. 0:
        sampling and training take turns. Above 0 they overlap, and a prompt whose samples hold an older token is left
        out of its update, and counted.
      queue: batches sampled ahead of the one that is trained on, at most; 0 is as many as max_staleness allows,
        max_staleness // loss.minibatches.
      schedule: weights of a batch that is sampled ahead. "fixed": those that were there `queue` steps before it is
        trained on, however long anything takes, so that a run repeats and resumes to the same bits. "newest": the
        newest when it begins and, at an address or with engine="jetstream", in flight too; not to be repeated to the
        bit.
      finish_first: where weights change in flight, sequences end under the weights they began with, and new ones wait;
        otherwise they go on under the new weights, and their tokens' versions tell.
      engine: what samples in this process. "loop": one call after the other, in an order that repeats. "jetstream":
        JetStream's driver, which has a thread each for prefill, decoding and what becomes of tokens (needs
        trm-jax[jetstream]; a run repeats to the bit with numerics.batch_invariant). "auto": JetStream's driver on a TPU
        where google-jetstream is installed, else the loop. It is no part of a run, as address is not.
      address: host:port of a `trm-jax serve` that has this file; empty samples in this process. Where samples come from
        is no part of a run: it may be resumed at another address.
      weights: directory through which the server gets its weights, its --weights.
      certificate: PEM file of the authority that signed the server's certificate; empty talks without TLS.
      token_file: file with the bearer token that the server asks for; not readable by others.
      patience: seconds that the server may stay away, or its queue full.
    """

    prompts_per_step: int = 32
    samples_per_prompt: int = 8
    temperature: float = 1.0
    top_p: float = 1.0
    max_prompt_length: int = 32
    max_response_length: int = 34
    slots: int = 256
    prefill_rows: int = 32
    decode_chunk: int = 8
    lag: int = 0
    record_hidden: bool = True
    numerics: RolloutNumerics = RolloutNumerics()
    max_staleness: int = 0
    queue: int = 0
    schedule: Literal["fixed", "newest"] = "fixed"
    finish_first: bool = False
    engine: Literal["auto", "loop", "jetstream"] = "auto"
    address: str = ""
    weights: str = ""
    certificate: str = ""
    token_file: str = ""
    patience: float = 120.0

    def __post_init__(self) -> None:
        at_least(self, 1, "prompts_per_step", "max_prompt_length", "max_response_length", "slots", "prefill_rows")
        at_least(self, 1, "decode_chunk", "samples_per_prompt")
        at_least(self, 0, "lag", "max_staleness", "queue")
        positive(self, "temperature")
        require(0 < self.top_p <= 1, f"top_p={self.top_p}: must lie in (0, 1].")
        jitter = self.numerics.routing_jitter
        require(math.isfinite(jitter), f"numerics.routing_jitter={jitter}: must be finite.")
        self._check_overlap()
        self._check_address()

    def _check_overlap(self) -> None:
        require(
            not (self.lag and self.max_staleness),
            f"lag={self.lag} holds weights back where sampling and training take turns, and "
            f"max_staleness={self.max_staleness} lets them overlap: give one of the two.",
        )
        idle = [f"queue={self.queue}"] * (self.queue > 0) + [f"schedule={self.schedule!r}"] * (self.schedule != "fixed")
        require(
            self.max_staleness > 0 or not idle,
            f"{' and '.join(idle)}: nothing is sampled ahead while max_staleness=0; raise it, or leave this out.",
        )
        require(
            not self.finish_first or self.in_flight,
            "finish_first=true: weights change while sequences are in flight only with schedule='newest', at an "
            "address or with engine='jetstream'; leave it out.",
        )
        require(
            not (self.in_flight and self.record_hidden),
            "schedule='newest' at an address or with engine='jetstream': hidden states of one batch would come from "
            "several versions, and the head that goes with them is of one; set record_hidden=false (and a correction "
            "that needs none), or schedule='fixed'.",
        )

    def _check_address(self) -> None:
        require(0 <= self.patience < math.inf, f"patience={self.patience}: must be 0 or more, and finite.")
        if not self.address:
            given = [name for name in ("weights", "certificate", "token_file") if getattr(self, name)]
            require(
                not given, f"{', '.join(given)}: for a server, and no address is given; give it, or leave this out."
            )
            return
        require(
            self.engine == "auto",
            f"engine={self.engine!r}: what samples at address={self.address!r} is that server's driver; leave one out.",
        )
        match = re.fullmatch(r".*[^:]:(\d{1,5})", self.address)
        require(
            match is not None and 0 < int(match[1]) < 65536,
            f"address={self.address!r}: write host:port, as `trm-jax serve` prints it.",
        )
        require(
            bool(self.weights),
            f"weights='': with address={self.address!r}, name the directory that the server was given as --weights.",
        )

    @property
    def rows(self) -> int:
        """Sequences a step."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def in_flight(self) -> bool:
        """Whether weights may change while a sequence is being sampled."""
        return self.schedule == "newest" and (bool(self.address) or self.engine == "jetstream")

    @property
    def oldest_allowed(self) -> int:
        """Updates by which a token may be behind, by order (``lag``) or by leave (``max_staleness``)."""
        return max(self.lag, self.max_staleness)
