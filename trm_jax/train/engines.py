"""The engine that a run samples with: a loop or JetStream's driver in this process, or a server's at an address."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax

from trm_jax.models import TransformerConfig
from trm_jax.rollout import Engine, EngineConfig, InProcessEngine, Recording, RolloutNumerics, SamplingConfig
from trm_jax.train.config import RolloutConfig

if TYPE_CHECKING:
    from trm_jax.train.experiment import Experiment

__all__ = [
    "SamplingError",
    "check_engine",
    "close_engine",
    "describe_engine",
    "engine_of",
    "interrupt_engine",
    "make_engine",
    "open_engine",
    "served",
]


class SamplingError(RuntimeError):
    """JetStream's driver or the server at the address failed, or it was away longer than ``rollout.patience``."""


def engine_of(config: RolloutConfig) -> Literal["loop", "jetstream", "address"]:
    """What a run samples with on this machine; "auto" is decided here."""
    if config.address:
        return "address"
    if config.engine != "auto":
        return config.engine
    return "jetstream" if jax.default_backend() == "tpu" and not _jetstream_lacks() else "loop"


def describe_engine(config: RolloutConfig) -> str:
    """The same in words, with the reason where "auto" could not have JetStream."""
    if config.address:
        return f"the server at {config.address}"
    if engine_of(config) == "jetstream":
        return "JetStream's driver in this process"
    lacks = _jetstream_lacks() if config.engine == "auto" and jax.default_backend() == "tpu" else ""
    return "a loop in this process" + (f", for JetStream's driver cannot be had: {lacks}" if lacks else "")


@functools.cache
def _jetstream_lacks() -> str:
    """Why JetStream's driver cannot run here, or nothing."""
    try:
        from trm_jax.integrations import jetstream  # noqa: F401 - whether it can be
    except ImportError as error:
        return str(error)
    return ""


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
    """The engine of a run, ``engine_of(config)``. Close it with ``close_engine``.

    Raises:
      ImportError: what it needs is not installed.
      ValueError: the server is made for something else, naming the difference.
      SamplingError: there is no server within ``config.patience``.
    """
    kind: dict[str, Any] = {
        "numerics": config.numerics,
        "sampling": SamplingConfig(temperature=config.temperature, top_p=config.top_p),
        "record_hidden": config.record_hidden,
        "record_routes": record_routes,
    }
    name = engine_of(config)
    if name == "loop":
        return make_engine(experiment, config, slots=config.slots, **kind)
    kind |= {"eos_ids": experiment.tokenizer.eos_ids, "finish_first": config.finish_first}
    with served(config):
        if name == "jetstream":
            from trm_jax.integrations.jetstream import JetStreamEngine

            return JetStreamEngine(experiment.model, _sizes(config, config.slots), **kind)
        from trm_jax.serve import RemoteEngine

        return RemoteEngine(
            experiment.model,
            _sizes(config, config.slots),
            connection=_connection(config),
            weights=Path(config.weights),
            in_flight=config.in_flight,
            **kind,
        )


def interrupt_engine(engine: Engine) -> None:
    """What is being asked of a server or driver ends with an error; the loop ends by itself, and soon."""
    if not isinstance(engine, InProcessEngine):
        engine.interrupt()  # type: ignore[attr-defined]  # the others have it, and are imported only where they are used


def close_engine(engine: Engine) -> None:
    """Ends a connection or threads, and whatever is being asked of them; the loop has neither."""
    if not isinstance(engine, InProcessEngine):
        engine.close()  # type: ignore[attr-defined]  # as above


def check_engine(
    config: RolloutConfig, shape: TransformerConfig, eos_ids: Collection[int], *, record_routes: bool
) -> None:
    """Sees that what samples can be had; compares a server at the run's address with what the run expects of it.

    Raises:
      ImportError: what it needs is not installed.
      ValueError: the server is made for something else, naming the difference.
      SamplingError: there is no server within ``config.patience``.
    """
    with served(config):
        if not config.address:
            return
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
    """Errors of serving as this room's, so that it can be told from others without gRPC.

    Raises:
      ImportError: it is not installed.
      SamplingError: one of these.
    """
    name = engine_of(config)
    if name == "loop":
        yield
        return
    where, extra = f"rollout.engine={name!r}", "jetstream"
    if name == "address":
        where, extra = f"rollout.address={config.address!r}", "serve"
    try:
        from trm_jax.serve import ServingError

        if name == "jetstream":
            from trm_jax.integrations import jetstream  # noqa: F401 - for its errors
    except ModuleNotFoundError as error:
        raise ImportError(f"{where} needs {error.name!r}: pip install 'trm-jax[{extra}]'") from error
    except ImportError as error:
        raise ImportError(f"{where}: {error}") from error
    try:
        yield
    except ServingError as error:
        raise SamplingError(f"{where}: {error}") from error


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
