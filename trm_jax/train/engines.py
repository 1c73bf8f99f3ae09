"""The engine that a run samples with: in this process, or a server's at an address."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trm_jax.models import TransformerConfig
from trm_jax.rollout import Engine, EngineConfig, InProcessEngine, Recording, RolloutNumerics, SamplingConfig
from trm_jax.train.config import RolloutConfig

if TYPE_CHECKING:
    from trm_jax.train.experiment import Experiment

__all__ = [
    "SamplingError",
    "check_address",
    "close_engine",
    "interrupt_engine",
    "make_engine",
    "open_engine",
    "served",
]


class SamplingError(RuntimeError):
    """The server at the run's address failed, or stayed away for longer than ``rollout.patience``."""


def make_engine(
    experiment: Experiment,
    config: RolloutConfig,
    *,
    numerics: RolloutNumerics,
    sampling: SamplingConfig,
    slots: int,
    record_hidden: bool,
    record_routes: bool = False,
) -> InProcessEngine:
    """An engine in this process, of the run's lengths; numerics and sampling are its caller's."""
    return InProcessEngine(
        experiment.model,
        _sizes(config, slots),
        numerics=numerics,
        sampling=sampling,
        eos_ids=experiment.tokenizer.eos_ids,
        record_hidden=record_hidden,
        record_routes=record_routes,
    )


def open_engine(experiment: Experiment, config: RolloutConfig, *, record_routes: bool) -> Engine:
    """The engine of a run: the server's when ``config.address`` names one. Close it with ``close_engine``.

    Raises:
      ValueError: the server is made for something else, naming the difference.
      SamplingError: there is no server within ``config.patience``.
    """
    sampling = SamplingConfig(temperature=config.temperature, top_p=config.top_p)
    if not config.address:
        return make_engine(
            experiment,
            config,
            numerics=config.numerics,
            sampling=sampling,
            slots=config.slots,
            record_hidden=config.record_hidden,
            record_routes=record_routes,
        )
    with served(config):
        from trm_jax.serve import RemoteEngine

        return RemoteEngine(
            experiment.model,
            _sizes(config, config.slots),
            numerics=config.numerics,
            sampling=sampling,
            eos_ids=experiment.tokenizer.eos_ids,
            connection=_connection(config),
            weights=Path(config.weights),
            record_hidden=config.record_hidden,
            record_routes=record_routes,
            finish_first=config.finish_first,
            in_flight=config.in_flight,
        )


def interrupt_engine(engine: Engine) -> None:
    """What is being asked of a server ends with an error; an engine in this process ends by itself, and soon."""
    if not isinstance(engine, InProcessEngine):
        engine.interrupt()  # type: ignore[attr-defined]  # a RemoteEngine, imported only where there is an address


def close_engine(engine: Engine) -> None:
    """Ends a connection, and whatever is being asked over it; an engine in this process holds none."""
    if not isinstance(engine, InProcessEngine):
        engine.close()  # type: ignore[attr-defined]  # as above


def check_address(
    config: RolloutConfig, shape: TransformerConfig, eos_ids: Collection[int], *, record_routes: bool
) -> None:
    """Compares the server at the run's address, if it has one, with what the run expects of it.

    Raises:
      ValueError: the server is made for something else, naming the difference.
      SamplingError: there is no server within ``config.patience``.
    """
    if not config.address:
        return
    with served(config):
        from trm_jax.serve import check_server

        check_server(
            _connection(config),
            _sizes(config, config.slots),
            vocab_size=shape.vocab_size,
            numerics=config.numerics,
            eos_ids=eos_ids,
            recording=Recording(hidden=config.record_hidden, routes=record_routes),
        )


@contextlib.contextmanager
def served(config: RolloutConfig) -> Iterator[None]:
    """Errors of serving as this room's, so that it can be told from others without gRPC."""
    if not config.address:
        yield
        return
    try:
        from trm_jax.serve import ServingError
    except ModuleNotFoundError as error:
        raise ImportError(
            f"rollout.address={config.address!r} needs {error.name!r}: pip install 'trm-jax[jetstream]'"
        ) from error
    try:
        yield
    except ServingError as error:
        raise SamplingError(f"rollout.address={config.address!r}: {error}") from error


def _connection(config: RolloutConfig) -> Any:
    from trm_jax.serve import Connection, read_token

    return Connection(
        target=config.address,
        certificate=Path(config.certificate) if config.certificate else None,
        token=read_token(Path(config.token_file)) if config.token_file else None,
        patience=config.patience,
    )


def _sizes(config: RolloutConfig, slots: int) -> EngineConfig:
    return EngineConfig(
        slots=slots,
        max_prompt_length=config.max_prompt_length,
        max_response_length=config.max_response_length,
        prefill_rows=config.prefill_rows,
        decode_chunk=config.decode_chunk,
    )
