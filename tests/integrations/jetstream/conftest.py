"""One tiny model, one engine of each kind, compiled once; drivers and servers are cheap and made for each test."""

from __future__ import annotations

import dataclasses
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trm_jax.data import CharTokenizer
from trm_jax.integrations.jetstream import Failure, RolloutDriver, RolloutEngine, RolloutServer, ServerOptions, Work
from trm_jax.models import Transformer, TransformerConfig
from trm_jax.rollout import EngineConfig, InProcessEngine, RolloutNumerics, SamplingConfig
from trm_jax.serve import Access, Completion, SampleRequest, SamplingOptions, SlotEngine
from trm_jax.types import PromptBatch

VOCAB, PROMPT, RESPONSE, SLOTS, CHUNK = 13, 5, 6, 4, 2
EOS = (3, 12)
CONFIG = EngineConfig(
    slots=SLOTS, prefill_rows=2, decode_chunk=CHUNK, max_prompt_length=PROMPT, max_response_length=RESPONSE
)
TOKENIZER = CharTokenizer("0123456789+")  # end-of-sequence 11 and padding 12 come after it
NUMERICS = RolloutNumerics(batch_invariant=True)  # so that two engines agree to the bit, however they batch
PATIENCE = 300.0  # seconds; a busy machine starts and compiles slowly


@functools.cache
def make_model(seed: int = 0) -> Transformer:
    config = TransformerConfig(vocab_size=VOCAB, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=16)
    return Transformer(config, rngs=nnx.Rngs(seed))


def make_params(seed: int = 0) -> Any:
    """Parameters with values large enough for the token distribution to be far from uniform."""
    return jax.tree.map(lambda x: x * 3.0 if x.ndim > 2 else x, nnx.state(make_model(seed), nnx.Param))


@functools.cache
def slot_engine() -> SlotEngine:
    return SlotEngine(make_model(), CONFIG, numerics=NUMERICS, eos_ids=EOS, record_top_logps=3)


@functools.cache
def in_process() -> InProcessEngine:
    return InProcessEngine(
        make_model(),
        CONFIG,
        numerics=NUMERICS,
        sampling=SamplingConfig(),
        eos_ids=EOS,
        record_top_logps=3,
        tokenizer=TOKENIZER,
    )


@functools.cache
def expected(weights: int, version: int) -> dict[int, dict[str, np.ndarray]]:
    """What seeds 0 to 39 sample from prompt [1, 2, 4] under the weights of that seed, by the in-process engine."""
    engine = in_process()
    engine.update_weights(version, make_params(weights))
    count = 40
    tokens = jnp.broadcast_to(jnp.array([1, 2, 4], jnp.int32), (count, 3))
    out = engine.generate(
        PromptBatch(
            tokens=tokens,
            mask=jnp.ones_like(tokens, bool),
            group_ids=jnp.zeros(count, jnp.int32),
            seeds=jnp.arange(count, dtype=jnp.uint32),
        )
    )
    rows = {}
    for seed in range(count):
        real = np.asarray(out.response_mask[seed])
        rows[seed] = {
            name: np.asarray(getattr(out, field)[seed])[real]
            for name, field in (("tokens", "response_tokens"), ("logps", "rollout_logps"), ("versions", "versions"))
        }
    return rows


class GatedEngine(RolloutEngine):
    """Decodes only as often as a test allows, and fails when a test says so."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._permits = threading.Semaphore(0)
        self.faults: list[BaseException] = []
        self.open = False

    def allow(self, chunks: int) -> None:
        self._permits.release(chunks)

    def generate(self, params: Any, decode_state: Any, steps: int | None = None) -> Any:
        while not self.open and not self._permits.acquire(timeout=0.01):
            pass
        if self.faults:
            raise self.faults.pop(0)
        return super().generate(params, decode_state, steps)


@dataclasses.dataclass
class Asked:
    """A request under way and what came of it."""

    work: Work
    pieces: queue.Queue

    def result(self) -> Completion | Failure:
        """The next piece or the failure."""
        return self.pieces.get(timeout=PATIENCE)


def ask(driver: RolloutDriver, *seeds: int, **options: Any) -> Asked:
    """Samples of prompt [1, 2, 4], whole unless told otherwise."""
    pieces: queue.Queue = queue.Queue()
    request = SampleRequest(**{"prompt": [1, 2, 4], "seeds": seeds, "max_tokens": RESPONSE} | options)
    work = Work(request, pieces.put)
    driver.place(work)
    return Asked(work, pieces)


def until(condition: Callable[[], bool]) -> None:
    """Waits for a condition."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


@contextmanager
def running(**options: Any) -> Iterator[tuple[RolloutDriver, GatedEngine]]:
    engine = GatedEngine(slot_engine())
    policy = slot_engine().load(1, make_params())
    with RolloutDriver(engine, policy, **{"queue_limit": 64} | options) as driver:
        try:
            yield driver, engine
        finally:
            engine.open = True


@contextmanager
def serving(access: Access = Access(), **options: Any) -> Iterator[RolloutServer]:  # noqa: B008 - frozen
    """A server in this process; ``weights`` and ``tokenizer`` may be given."""
    limits = ServerOptions(**{key: value for key, value in options.items() if key not in ("weights", "tokenizer")})
    rest = {key: value for key, value in options.items() if key in ("weights", "tokenizer")}
    with RolloutServer(
        slot_engine(), make_model(), sampling=SamplingOptions(), access=access, options=limits, **rest
    ) as server:
        yield server


@dataclasses.dataclass(frozen=True)
class Tools:
    """The functions above, for tests."""

    model: Callable[..., Transformer] = make_model
    params: Callable[..., Any] = make_params
    slot_engine: Callable[[], SlotEngine] = slot_engine
    in_process: Callable[[], InProcessEngine] = in_process
    expected: Callable[..., dict[int, dict[str, np.ndarray]]] = expected
    running: Callable[..., Any] = running
    serving: Callable[..., Any] = serving
    ask: Callable[..., Asked] = ask
    until: Callable[..., None] = until
    config: EngineConfig = CONFIG
    numerics: RolloutNumerics = NUMERICS
    eos: tuple[int, ...] = EOS
    tokenizer: CharTokenizer = TOKENIZER
    vocab: int = VOCAB

    def long_seeds(self, count: int) -> list[int]:
        """Seeds whose samples reach the length limit under the first weights."""
        return [seed for seed, row in expected(0, 1).items() if len(row["tokens"]) == RESPONSE][:count]


@pytest.fixture(scope="session")
def tools() -> Tools:
    return Tools()
