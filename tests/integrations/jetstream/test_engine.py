"""JetStream's driver as an engine of this process: the loop's records to the bit, weights in flight, faults."""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import socket
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trm_jax.integrations.jetstream import JetStreamEngine, _delivery, _driver, _in_process
from trm_jax.integrations.jetstream._exchange import WeightExchange
from trm_jax.models import Transformer, TransformerConfig, make_mesh, param_shardings
from trm_jax.rollout import (
    Engine,
    EngineConfig,
    InProcessEngine,
    Recorder,
    RolloutNumerics,
    SamplingConfig,
    SlotEngine,
)
from trm_jax.serve import ServingError
from trm_jax.types import PromptBatch


def prompts(rows: int = 12, samples: int = 2, width: int = 5) -> PromptBatch:
    rng = np.random.default_rng(0)
    groups = np.arange(rows) // samples
    lengths, tokens = rng.integers(1, width + 1, rows)[groups], rng.integers(0, 13, (rows, width))[groups]
    return PromptBatch(
        tokens=jnp.asarray(tokens, jnp.int32),
        mask=jnp.asarray(np.arange(width) < lengths[:, None]),
        group_ids=jnp.asarray(groups, jnp.int32),
        seeds=jnp.asarray(100 + np.arange(rows), jnp.uint32),
    )


def options(tools, **changes):
    return {"numerics": tools.numerics, "sampling": SamplingConfig(), "eos_ids": tools.eos} | changes


@pytest.fixture(scope="module")
def compiled(tools):
    """Its programs are those of the other tests here; each test has drivers of its own."""
    with JetStreamEngine(
        tools.model(), tools.config, **options(tools, record_top_logps=3, tokenizer=tools.tokenizer)
    ) as engine:
        engine._slots = tools.slot_engine()
        yield engine


@pytest.fixture
def engine(compiled, tools):
    compiled.update_weights(1, tools.params())
    yield compiled
    compiled.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("prefill-", "generate-"))]


def same_rollout(found, expected) -> None:
    """Every array, the unused places too; hidden states and the like are garbage behind a stop string."""
    mask = np.asarray(expected.response_mask)
    names = ("prompt_tokens", "prompt_mask", "response_tokens", "response_mask", "rollout_logps", "versions")
    for name in (*names, "finished", "group_ids", "routed_experts"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            assert ours.dtype == theirs.dtype, name
            np.testing.assert_array_equal(ours, theirs, err_msg=name)
    for name in ("hidden", "support", "top_tokens", "top_logps"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), name
            np.testing.assert_array_equal(np.asarray(ours)[mask], np.asarray(theirs)[mask], err_msg=name)
    assert (found.temperature, found.top_p) == (expected.temperature, expected.top_p)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(),
        SamplingConfig(top_p=0.7),
        SamplingConfig(temperature=0.8, top_k=5, min_p=0.05, stop=("7", "12")),
        SamplingConfig(greedy=True),
    ],
)
def test_a_rollout_is_that_of_the_loop_to_the_bit(tools, engine, monkeypatch, sampling):
    reference: Engine = tools.in_process()
    ours: Engine = engine
    prefill, run = SlotEngine.prefill, []
    monkeypatch.setattr(SlotEngine, "prefill", lambda *args: run.extend(args[2]) or prefill(*args))
    for version, weights in ((1, 0), (2, 1)):
        for each in (reference, ours):
            each.update_weights(version, tools.params(weights))
        run.clear()
        found = ours.generate(prompts(), sampling)
        assert len(run) == 6  # samples of a prompt share its run, also those that wait for a slot
        same_rollout(found, reference.generate(prompts(), sampling))
        assert set(np.unique(found.versions).tolist()) == {-1, version}
        np.testing.assert_array_equal(ours.head_matrix(), reference.head_matrix())
        assert ours.version == engine._driver.version == version
        if sampling.stop:
            mask = np.asarray(found.response_mask)
            ids = [np.asarray(row)[real].tolist() for row, real in zip(found.response_tokens, mask, strict=True)]
            ends = [any(s in tools.tokenizer.decode(row) for s in sampling.stop) for row in ids]
            assert 0 < sum(ends) < len(ends)


@pytest.mark.slow
def test_routed_experts_and_a_quantised_engine_are_those_of_the_loop(tools):
    shape = {"vocab_size": 13, "d_model": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "d_ff": 16}
    model = Transformer(TransformerConfig(**shape, n_experts=4, experts_per_token=2), rngs=nnx.Rngs(3))
    numerics = RolloutNumerics(weight_format="int8", kv_cache_dtype="int8", batch_invariant=True)
    kind = options(tools, numerics=numerics, record_routes=True)
    loop = InProcessEngine(model, tools.config, **kind)
    with JetStreamEngine(model, tools.config, **kind) as ours:
        for each in (loop, ours):
            each.update_weights(4, nnx.state(model, nnx.Param))
        found = ours.generate(prompts())
    same_rollout(found, loop.generate(prompts()))
    assert np.asarray(found.routed_experts).max() > 0


def test_nothing_listens_and_nothing_but_columns_comes_to_the_host(tools, engine, monkeypatch):
    monkeypatch.setattr(socket.socket, "bind", lambda *_: pytest.fail("a socket"))
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a socket"))
    read = []

    class Watched:
        def __getattr__(self, name):
            return getattr(np, name)

        def asarray(self, array):
            read.append(array.shape)
            return np.asarray(array)

    monkeypatch.setattr(_delivery, "np", Watched())
    rollout = engine.generate(prompts(), SamplingConfig(top_p=0.7))
    mask = np.asarray(rollout.response_mask)
    assert np.asarray(rollout.hidden)[mask].any(axis=-1).all()  # they were kept for every token, on the device
    allowed = np.unpackbits(np.asarray(rollout.support), axis=-1, bitorder="little")
    assert np.take_along_axis(allowed, np.asarray(rollout.response_tokens)[..., None], axis=-1)[mask].all()
    assert len(read) >= 6
    assert set(read) == {(4, 4 * 2 + 3)}  # slots, and the columns of a chunk of two tokens


def test_what_cannot_be_sampled_is_refused_and_says_why(tools, engine):
    with pytest.raises(ValueError, match="row 0 has 6 tokens"):
        engine.generate(dataclasses.replace(prompts(2, width=6), mask=jnp.ones((2, 6), bool)))
    fresh = JetStreamEngine(tools.model(), tools.config, **options(tools))
    with pytest.raises(RuntimeError, match="no weights yet"):
        fresh.generate(prompts())
    with pytest.raises(RuntimeError, match="no weights yet"):
        fresh.head_matrix()
    fresh.update_weights(0, tools.params())
    with pytest.raises(ValueError, match="needs the tokenizer"):
        fresh.generate(prompts(), SamplingConfig(stop=("7",)))
    fresh.close()
    assert fresh.version == 0
    assert engine.generate(prompts(0)).response_tokens.shape == (0, 6)


def slow_decoding(monkeypatch, seconds: float) -> threading.Event:
    """Every decode call takes so long; set as soon as one has begun."""
    generate, begun = SlotEngine.generate, threading.Event()

    def slowly(*args, **kwargs):
        begun.set()
        time.sleep(seconds)
        return generate(*args, **kwargs)

    monkeypatch.setattr(SlotEngine, "generate", slowly)
    return begun


@pytest.mark.parametrize("finish_first", [False, True])
def test_weights_change_in_flight_or_after_it(tools, engine, monkeypatch, finish_first):
    monkeypatch.setattr(engine, "_finish_first", finish_first)
    engine.generate(prompts(2))
    begun = slow_decoding(monkeypatch, 0.05)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(engine.generate, prompts(8))
        assert begun.wait(60)
        engine.update_weights(2, tools.params(1))
        found = asked.result(timeout=60)
    versions = [row[row >= 0].tolist() for row in np.asarray(found.versions)]
    assert all(row == sorted(row) for row in versions)
    assert {1, 2} == {version for row in versions for version in row}
    mixed = [row for row in versions if len(set(row)) > 1]
    assert (not mixed) == finish_first
    whole = [i for i, row in enumerate(versions) if set(row) == {2}]
    assert whole
    monkeypatch.undo()
    again = engine.generate(prompts(8))  # what began after the change is what the new weights sample alone
    np.testing.assert_array_equal(np.asarray(found.rollout_logps)[whole], np.asarray(again.rollout_logps)[whole])


def test_an_interrupted_call_ends_at_once_and_the_next_one_works(tools, engine, monkeypatch):
    expected = engine.generate(prompts())
    engine.interrupt()  # nobody asks: nothing happens
    begun = slow_decoding(monkeypatch, 0.05)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(engine.generate, prompts())
        assert begun.wait(60)
        engine.interrupt()
        with pytest.raises(concurrent.futures.CancelledError):
            asked.result(timeout=60)
    monkeypatch.undo()
    driver = engine._driver
    same_rollout(engine.generate(prompts()), expected)
    assert engine._driver is driver
    tools.until(lambda: driver.health().slots_busy == 0)


def failing(monkeypatch, name: str, times: int) -> None:
    """So many of that engine's operations fail."""
    operation, left = getattr(SlotEngine, name), iter(range(times))

    def fail(*args, **kwargs):
        if next(left, None) is not None:
            raise MemoryError("no room")
        return operation(*args, **kwargs)

    monkeypatch.setattr(SlotEngine, name, fail)


@pytest.mark.parametrize(
    ("operation", "what"), [("generate", "decoding"), ("prefill", "prefill"), ("insert", "decoding")]
)
def test_an_exception_is_the_error_of_its_call_alone(engine, monkeypatch, operation, what):
    expected = engine.generate(prompts())
    driver = engine._driver
    failing(monkeypatch, operation, 1)
    with pytest.raises(ServingError, match=f"sampling failed: {what} failed: MemoryError: no room"):
        engine.generate(prompts())
    assert not driver._outstanding  # nobody waits for what did not fail
    same_rollout(engine.generate(prompts()), expected)
    assert engine._driver is driver


def test_a_record_that_cannot_be_kept_is_an_error_too(engine, monkeypatch):
    expected = engine.generate(prompts())
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "add", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(ServingError, match="MemoryError: no room"):
            engine.generate(prompts())
    same_rollout(engine.generate(prompts()), expected)


def test_after_faults_in_a_row_a_fresh_driver_has_the_newest_weights(tools, engine, monkeypatch):
    engine.generate(prompts(2))
    driver = engine._driver
    failing(monkeypatch, "generate", 3)
    for _ in range(3):
        with pytest.raises(ServingError, match="MemoryError"):
            engine.generate(prompts(2))
    tools.until(lambda: not driver.health().live)
    engine.update_weights(2, tools.params(1))  # to a driver that takes none
    tools.in_process().update_weights(2, tools.params(1))
    same_rollout(engine.generate(prompts()), tools.in_process().generate(prompts()))
    assert engine._driver is not driver


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the thread's death is the case
@pytest.mark.parametrize("kind", [SystemExit, RuntimeError])  # the stock driver answers the second with a SIGKILL
def test_a_dead_thread_is_noticed_and_the_next_call_has_a_fresh_driver(engine, kind):
    expected = engine.generate(prompts())
    driver = engine._driver
    (thread,) = driver._transfer_threads
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(kind))
    with pytest.raises(ServingError, match=r"sampling failed: thread transfer-0 died"):
        engine.generate(prompts())
    same_rollout(engine.generate(prompts()), expected)
    assert engine._driver is not driver


def test_a_call_that_does_not_return_is_an_error_until_it_does(engine, monkeypatch):
    expected = engine.generate(prompts())
    generate, returned = SlotEngine.generate, threading.Event()

    def hang(*args, **kwargs):
        returned.wait(60)
        return generate(*args, **kwargs)

    monkeypatch.setattr(_in_process, "_STOP", 0.2)
    monkeypatch.setattr(SlotEngine, "generate", hang)
    monkeypatch.setattr(engine._driver, "_stall_seconds", 0.2)
    with pytest.raises(ServingError, match=r"sampling failed: no decode call returned for 0.2 s"):
        engine.generate(prompts())
    with pytest.raises(ServingError, match=r"no decode call returned.*start the process again"):
        engine.generate(prompts())
    returned.set()
    monkeypatch.setattr(_in_process, "_STOP", 60.0)
    same_rollout(engine.generate(prompts()), expected)


def test_log_probs_that_are_not_numbers_are_an_error_and_good_weights_mend_it(tools, engine):
    expected = engine.generate(prompts())
    engine.update_weights(2, jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), tools.params()))
    with pytest.raises(ServingError, match="not finite under policy version 2"):
        engine.generate(prompts())
    engine.update_weights(1, tools.params())
    same_rollout(engine.generate(prompts()), expected)


def test_an_idle_driver_takes_weights_without_waiting_to_look(tools, engine, monkeypatch):
    engine.generate(prompts(2))
    backlog = engine._driver._generate_backlogs[0]
    get, asked = backlog.get, threading.Event()

    def patient(block=True, timeout=None):
        asked.set()
        return get(block=block)  # for ever, if nobody says that there is something to do

    monkeypatch.setattr(backlog, "get", patient)
    assert asked.wait(60)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(engine.update_weights, 2, tools.params(1)).result(timeout=60)
    assert engine._driver.version == 2


def test_given_weights_may_be_donated_afterwards(tools, engine):
    expected = engine.generate(prompts())
    mine = jax.tree.map(jnp.copy, tools.params())
    engine.update_weights(1, mine)
    for leaf in jax.tree.leaves(mine):
        leaf.delete()
    same_rollout(engine.generate(prompts()), expected)


def test_a_call_ends_when_nothing_can_be_started_any_more(engine, monkeypatch):
    """Over several devices, what the caller starts next must not meet a decode call that comes late."""
    engine.generate(prompts(2))
    generate, rollout, calls, at_end = SlotEngine.generate, Recorder.rollout, [], []
    deliver, take = _driver.deliver, WeightExchange.take

    def delivered(*args):  # the batch is complete a while before its slots are known to be free,
        freed = deliver(*args)
        time.sleep(0.05)
        return freed

    def taken(*args, **kwargs):  # and in that time the generate thread gets to its next call
        time.sleep(0.02)
        return take(*args, **kwargs)

    def noted(*args, **kwargs):
        at_end.append(len(calls))
        return rollout(*args, **kwargs)

    monkeypatch.setattr(_driver, "deliver", delivered)
    monkeypatch.setattr(WeightExchange, "take", taken)
    monkeypatch.setattr(SlotEngine, "generate", lambda *args: calls.append(None) or generate(*args))
    monkeypatch.setattr(Recorder, "rollout", noted)
    for _ in range(3):
        engine.generate(prompts(4))
        time.sleep(0.1)
        assert len(calls) == at_end[-1]


def test_programs_are_started_by_one_thread_at_a_time(engine, monkeypatch):
    """Two that several devices get in different orders would wait for each other for ever."""
    inside, together, threads = threading.Lock(), [], set()

    def watched(operation):
        def call(*args, **kwargs):
            threads.add(threading.current_thread().name)
            if not inside.acquire(blocking=False):
                together.append(operation.__qualname__)
                return operation(*args, **kwargs)
            try:
                time.sleep(0.003)
                return operation(*args, **kwargs)
            finally:
                inside.release()

        return call

    for owner, name in ((SlotEngine, "prefill"), (SlotEngine, "insert"), (SlotEngine, "generate"), (Recorder, "add")):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    engine.generate(prompts(24))
    assert {name.partition("-")[0] for name in threads} == {"prefill", "generate", "detokenize"}
    assert not together


@pytest.mark.slow
def test_sharded_weights_sample_the_tokens_of_one_device(monkeypatch):
    shape = {"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "d_ff": 32, "n_experts": 4}
    model = Transformer(TransformerConfig(vocab_size=16, **shape), rngs=nnx.Rngs(0))
    sizes = EngineConfig(slots=4, prefill_rows=2, decode_chunk=3, max_prompt_length=5, max_response_length=6)
    kind = {"numerics": RolloutNumerics(), "sampling": SamplingConfig(), "eos_ids": (3,), "record_routes": True}
    params, mesh = nnx.state(model, nnx.Param), make_mesh(data=2, tensor=2)
    loop = InProcessEngine(model, sizes, **kind)
    loop.update_weights(1, params)
    expected = loop.generate(prompts())
    seen = []

    def noting(operation):
        def call(*args, **kwargs):
            seen.append(jax.sharding.get_mesh())
            return operation(*args, **kwargs)

        return call

    for name in ("prefill", "generate"):
        monkeypatch.setattr(SlotEngine, name, noting(getattr(SlotEngine, name)))
    with jax.set_mesh(mesh), JetStreamEngine(model, sizes, **kind) as ours:
        ours.update_weights(1, jax.device_put(params, param_shardings(params, mesh)))
        for _ in range(5):
            found = ours.generate(prompts())
            np.testing.assert_array_equal(found.response_tokens, expected.response_tokens)
            np.testing.assert_array_equal(found.routed_experts, expected.routed_experts)
            # Sums over another number of devices, of some hundred float32 terms of order 1.
            np.testing.assert_allclose(found.rollout_logps, expected.rollout_logps, atol=3e-5)
    assert set(seen) == {mesh}  # what the threads compile sees it, as a mixture's sorting must
