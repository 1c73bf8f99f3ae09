"""``trm-jax serve``."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import tyro

from trm_jax.cli._signals import FAILED, StopOnSignal

__all__ = ["Serve"]


@dataclasses.dataclass(frozen=True)
class Serve:
    """Serve rollouts of the policy that a configuration file describes, over gRPC.

    The server speaks JetStream's protocol and our own, with complete records. It starts with the file's initial
    weights; a trainer with the same file gives it later ones through --weights. It listens on this machine alone unless
    it has TLS and a token. Needs pip install 'trm-jax[jetstream]'.
    """

    config: Annotated[Path, tyro.conf.Positional]
    """TOML file, the one that the trainer has."""
    overrides: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """section.key=value, values as TOML writes them."""
    arm: str = ""
    """The arm whose numerics are served; may be left out when the file has one."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """0 takes a free port, which is printed."""
    weights: Path | None = None
    """Directory from which the trainer may have weights loaded; without it the server keeps its own."""
    certificate: Path | None = None
    """PEM file of the TLS certificate chain."""
    key: Path | None = None
    """PEM file of its private key."""
    token_file: Path | None = None
    """File with the bearer token that clients must send."""
    insecure: bool = False
    """Listen on an address that others can reach without TLS or token."""
    queue_limit: int = 1024
    """Requests that may wait before clients are told to come again."""
    max_samples: int = 256
    """Most samples of one prompt in a request."""
    metrics_port: int | None = None
    """Port of a Prometheus endpoint on loopback."""
    stall_seconds: float = 300.0
    """The server gives up when a decode call takes longer."""

    def run(self) -> int:
        try:
            from trm_jax.integrations.jetstream import RolloutServer, ServerOptions
            from trm_jax.serve import Access
        except ModuleNotFoundError as error:
            raise ImportError(f"serving needs {error.name!r}: pip install 'trm-jax[jetstream]'") from error
        from trm_jax.rollout import EngineConfig, SamplingConfig, SlotEngine
        from trm_jax.train import load_config, open_experiment

        access = Access(
            host=self.host,
            port=self.port,
            certificate=self.certificate,
            key=self.key,
            token_file=self.token_file,
            insecure=self.insecure,
        )
        options = ServerOptions(
            queue_limit=self.queue_limit,
            max_samples=self.max_samples,
            metrics_port=self.metrics_port,
            stall_seconds=self.stall_seconds,
        )
        arms = {arm.slug: arm.train for arm in load_config(self.config, self.overrides).arms}
        if not self.arm and len(arms) > 1:
            raise ValueError(f"the file has several arms; choose one with --arm: {', '.join(arms)}.")
        if self.arm and self.arm not in arms:
            raise ValueError(f"--arm {self.arm}: no such arm; the file has {', '.join(arms)}.")
        config = arms[self.arm or next(iter(arms))]
        rollout = config.rollout
        sizes = EngineConfig(
            slots=rollout.slots,
            max_prompt_length=rollout.max_prompt_length,
            max_response_length=rollout.max_response_length,
            prefill_rows=rollout.prefill_rows,
            decode_chunk=rollout.decode_chunk,
        )
        with (
            open_experiment(config) as experiment,
            RolloutServer(
                SlotEngine(
                    experiment.model,
                    sizes,
                    numerics=rollout.numerics,
                    eos_ids=experiment.tokenizer.eos_ids,
                    record_hidden=rollout.record_hidden,
                    record_routes=config.model.replay_routes,
                ),
                experiment.model,
                sampling=SamplingConfig(temperature=rollout.temperature, top_p=rollout.top_p),
                access=access,
                options=options,
                tokenizer=experiment.tokenizer,
                weights=self.weights,
            ) as server,
            StopOnSignal("stopping; requests in flight are ended") as stop,
        ):
            print(f"serving on {server.target}", flush=True)
            while not stop():
                if not server.wait(0.2):
                    print(f"trm-jax: the server gave up: {server.failure}", file=sys.stderr, flush=True)
                    time.sleep(1.0)  # for the replies that tell clients so
                    os._exit(FAILED)  # an orderly end would wait for the thread that does not answer
        return 0
