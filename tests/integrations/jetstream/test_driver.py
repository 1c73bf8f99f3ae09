"""The driver by itself: what it samples, what frees a slot, what changes weights, and what a fault ends."""

from __future__ import annotations

import ctypes
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax.integrations.jetstream import Failure, QueueFull, RolloutEngine, Unavailable
from trm_jax.integrations.jetstream._library import jetstream
from trm_jax.serve import SamplingOptions


def same(completion, expected):
    assert not isinstance(completion, Failure), completion
    np.testing.assert_array_equal(completion.tokens, expected["tokens"])
    np.testing.assert_array_equal(completion.logps, expected["logps"])
    np.testing.assert_array_equal(completion.versions, expected["versions"])


def test_samples_are_those_of_the_in_process_engine_to_the_bit_and_share_a_prefill(tools):
    expected = tools.expected(0, 1)
    with tools.running() as (driver, engine):
        engine.open = True
        asked = tools.ask(driver, *range(11))
        found = {piece.sample: piece for piece in (asked.result() for _ in range(11))}
        for seed in range(11):
            same(found[seed], expected[seed])
            np.testing.assert_array_equal(found[seed].model_logps, found[seed].logps)  # temperature 1, nothing cut
            ended = found[seed].tokens[-1] in tools.eos
            assert found[seed].finish == ("stop" if ended else "length")
        assert {piece.finish for piece in found.values()} == {"stop", "length"}
        assert driver.counters.prefills == 1
        assert driver.counters.finished == 1
        tools.until(lambda: driver.health().slots_busy == 0)
        assert driver.counters.tokens == sum(len(expected[seed]["tokens"]) for seed in range(11))


def test_both_log_probs_and_the_support_are_recorded_apart(tools):
    """Under temperature and top-p they differ: model_logps is log softmax(logits), logps that of the set drawn from."""
    with tools.running() as (driver, engine):
        engine.open = True
        piece = tools.ask(driver, 5, sampling=SamplingOptions(temperature=1.7, top_p=0.6), hidden=True).result()
    head = np.asarray(tools.model().head(), np.float64)
    logits = np.asarray(piece.hidden, np.float64) @ head.T
    lse = np.log(np.exp(logits).sum(-1))
    at = np.arange(len(piece.tokens))
    np.testing.assert_allclose(piece.logsumexp, lse, atol=1e-5)  # a dot product of 16 float32 terms of order 1
    np.testing.assert_allclose(piece.model_logps, logits[at, piece.tokens] - lse, atol=1e-5)
    for i in at:
        p = np.exp(logits[i] / 1.7)
        p /= p.sum()
        kept = piece.support_tokens[piece.support_offsets[i] : piece.support_offsets[i + 1]]
        assert p[kept].sum() >= 0.6 - 1e-6
        assert p[kept].sum() - p[kept].min() < 0.6 + 1e-6  # the smallest such set
        np.testing.assert_allclose(piece.logps[i], np.log(p[piece.tokens[i]] / p[kept].sum()), atol=1e-5)


def test_a_client_that_leaves_gives_its_slots_back_at_the_next_chunk(tools):
    seeds = tools.long_seeds(4)
    with tools.running() as (driver, engine):
        asked = tools.ask(driver, *seeds)
        tools.until(lambda: driver.health().slots_busy == 4)
        engine.allow(1)
        tools.until(lambda: driver.counters.chunks == 1)
        driver.cancel(asked.work)
        assert asked.result().kind == "cancelled"
        engine.allow(1)
        tools.until(lambda: driver.health().slots_busy == 0)
        assert driver.counters.chunks == 2  # of the three that the samples would have taken
        engine.open = True
        same(tools.ask(driver, seeds[0]).result(), tools.expected(0, 1)[seeds[0]])
        assert asked.pieces.empty()
        assert (driver.counters.cancelled, driver.counters.finished) == (1, 1)


def test_a_full_queue_refuses_and_what_was_accepted_is_answered_once(tools):
    expected = tools.expected(0, 1)
    with tools.running(queue_limit=3) as (driver, engine):
        accepted = {}

        def fill():
            for seed in range(40):
                accepted[seed] = tools.ask(driver, seed)

        with pytest.raises(QueueFull, match="3 requests wait"):
            fill()
        assert 3 <= len(accepted) < 40
        engine.open = True
        for seed, asked in accepted.items():
            same(asked.result(), expected[seed])
        tools.until(lambda: driver.health().slots_busy == 0)
        assert all(asked.pieces.empty() for asked in accepted.values())
        assert (driver.counters.refused, driver.counters.finished) == (1, len(accepted))
        assert not driver._outstanding


def test_requests_whose_clients_have_gone_take_no_place_in_a_full_queue(tools):
    """The slots are long busy, so nobody comes to look at the queue."""
    with tools.running(queue_limit=2) as (driver, engine):
        tools.ask(driver, *tools.long_seeds(4))
        tools.until(lambda: driver.health().slots_busy == 4)
        asked = []

        def fill():
            for seed in range(20):
                asked.append(tools.ask(driver, seed))
                time.sleep(0.02)  # those that are taken out of the queue and wait for a slot

        with pytest.raises(QueueFull):
            fill()
        for other in asked:
            driver.cancel(other.work)
        waiting = [tools.ask(driver, seed) for seed in (0, 1)]
        with pytest.raises(QueueFull):
            tools.ask(driver, 2)
        engine.open = True
        for seed, other in enumerate(waiting):
            same(other.result(), tools.expected(0, 1)[seed])


def test_sequences_go_on_under_new_weights_and_every_token_says_which(tools):
    long = tools.long_seeds(6)
    with tools.running() as (driver, engine):
        asked = tools.ask(driver, *long[:4])
        tools.until(lambda: driver.health().slots_busy == 4)
        waiting = tools.ask(driver, long[4])  # its prompt may have been run under the old weights by now
        engine.allow(1)
        tools.until(lambda: driver.counters.chunks == 1)
        compiled = tools.slot_engine().compilations()
        swap = threading.Thread(target=driver.update, args=(tools.slot_engine().load(2, tools.params(1)),))
        swap.start()
        tools.until(lambda: driver._exchange.waiting or driver.version == 2)
        engine.allow(1)  # a call may have begun to wait before the weights came
        swap.join()
        assert driver.version == 2
        engine.open = True
        for _ in range(4):
            done = asked.result()
            old = int((done.versions == 1).sum())
            assert old in (2, 4)  # whole chunks of two tokens
            assert done.versions.tolist() == [1] * old + [2] * (done.tokens.size - old)
            expected = tools.expected(0, 1)[long[done.sample]]
            np.testing.assert_array_equal(done.tokens[:old], expected["tokens"][:old])
            np.testing.assert_array_equal(done.logps[:old], expected["logps"][:old])
        # What had not started is as if it had come after: the prompt too is run by the new weights.
        same(waiting.result(), tools.expected(1, 2)[long[4]])
        same(tools.ask(driver, long[5]).result(), tools.expected(1, 2)[long[5]])
        assert tools.slot_engine().compilations() == compiled


def test_sequences_can_finish_first(tools):
    long = tools.long_seeds(5)
    with tools.running() as (driver, engine):
        asked = tools.ask(driver, *long[:4])
        tools.until(lambda: driver.health().slots_busy == 4)
        policy = tools.slot_engine().load(2, tools.params(1))
        swap = threading.Thread(target=driver.update, args=(policy,), kwargs={"finish_first": True})
        swap.start()
        tools.until(lambda: driver._exchange.waiting)
        waiting = tools.ask(driver, long[4])
        engine.allow(2)
        tools.until(lambda: driver.counters.chunks == 2)
        assert driver.version == 1
        engine.open = True
        swap.join()
        for _ in range(4):
            done = asked.result()
            same(done, tools.expected(0, 1)[long[done.sample]])
        same(waiting.result(), tools.expected(1, 2)[long[4]])


def test_weights_that_do_not_come_in_time_are_withdrawn(tools):
    with tools.running() as (driver, engine):
        asked = tools.ask(driver, tools.long_seeds(1)[0])
        tools.until(lambda: driver.health().slots_busy == 1)
        policy = tools.slot_engine().load(2, tools.params(1))
        with pytest.raises(Unavailable, match="the old ones stay"):
            driver.update(policy, finish_first=True, timeout=0.2)
        engine.open = True
        assert set(asked.result().versions.tolist()) == {1}
        assert driver.version == 1


def test_a_fault_ends_what_it_concerns_and_the_driver_goes_on(tools):
    expected = tools.expected(0, 1)
    with tools.running() as (driver, engine):
        engine.faults.append(RuntimeError("device lost"))
        asked = tools.ask(driver, 0, 1, 2)
        tools.until(lambda: driver.health().slots_busy == 3)
        engine.open = True
        failure = asked.result()
        assert failure.kind == "internal"
        assert "RuntimeError: device lost" in failure.message
        same(tools.ask(driver, 7).result(), expected[7])
        assert driver.health().live
        assert driver.counters.restarts >= 1

        wanted = tools.slot_engine().prefill
        prompts = []

        def prefill(policy, prompt):
            prompts.append(prompt)
            if len(prompts) == 1:
                raise MemoryError("no room")
            return wanted(policy, prompt)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tools.slot_engine(), "prefill", prefill)
            failure = tools.ask(driver, 8).result()
            assert (failure.kind, "MemoryError" in failure.message) == ("internal", True)
            same(tools.ask(driver, 9).result(), expected[9])


def test_a_driver_that_fails_again_and_again_says_that_it_is_dead(tools):
    with tools.running() as (driver, engine):
        engine.open = True
        engine.faults += [RuntimeError("device lost")] * 3
        for seed in range(3):
            failure = tools.ask(driver, seed).result()
            assert isinstance(failure, Failure)
        tools.until(lambda: not driver.health().live)
        assert "3 times in a row" in driver.health().reason
        with pytest.raises(Unavailable, match="device lost"):
            tools.ask(driver, 5)


def test_a_call_that_does_not_return_is_reported_and_ends_the_requests(tools):
    with tools.running(stall_seconds=0.3) as (driver, _):
        asked = tools.ask(driver, 1)
        tools.until(lambda: not driver.watch().live)
        assert "no decode call returned" in driver.health().reason
        assert asked.result().kind == "unavailable"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the thread's death is the case
def test_a_thread_that_dies_is_noticed_and_nobody_waits_for_it(tools):
    with tools.running() as (driver, engine):
        engine.open = True
        (thread,) = driver._transfer_threads  # JetStream's own, which our code does not guard
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        asked = tools.ask(driver, 1)
        tools.until(lambda: not driver.watch().live)
        assert "died" in driver.health().reason
        assert asked.result().kind == "unavailable"


def test_log_probs_that_are_not_numbers_end_the_request_and_good_weights_mend_it(tools):
    with tools.running() as (driver, engine):
        engine.open = True
        broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), tools.params())
        driver.update(tools.slot_engine().load(2, broken))
        failure = tools.ask(driver, 3).result()
        assert "not finite under policy version 2" in failure.message
        driver.update(tools.slot_engine().load(3, tools.params()))
        np.testing.assert_array_equal(tools.ask(driver, 3).result().tokens, tools.expected(0, 1)[3]["tokens"])


def test_the_engine_keeps_to_jetstreams_interface(tools):
    """What its own driver and ``process_result_tokens`` do with an engine, by hand."""
    assert issubclass(RolloutEngine, jetstream().engine_api.Engine)
    assert not RolloutEngine.__abstractmethods__
    engine = RolloutEngine(tools.slot_engine())
    box = engine.load_params(1, tools.params())
    prefix = engine.prefill(params=box, padded_tokens=jnp.array([1, 2, 4, 0, 0]), true_length=3)
    state = engine.insert(prefix, engine.init_decode_state(), slot=2)
    _, result = engine.generate(box, state)
    result.copy_to_host_async()
    data = result.convert_to_numpy().get_result_at_slot(2)
    expected = tools.expected(0, 1)[0]["tokens"]  # its first seed is 0
    assert data.tokens.shape == data.valid.shape == (1, 2)
    np.testing.assert_array_equal(data.tokens[data.valid == 1], expected[: data.valid.sum()])
    assert data.lengths.tolist() == [1]
    assert result.convert_to_numpy().get_result_at_slot(0).valid.sum() == 0  # a slot that nothing runs in
    with pytest.raises(NotImplementedError, match="existing_prefix"):
        engine.prefill(params=box, existing_prefix=prefix, padded_tokens=jnp.array([1]), true_length=1)
