"""Which batch comes from which weights, and when, with an engine that does nothing but wait for the test."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time

import numpy as np
import pytest

from trm_jax.train.ahead import Ahead
from trm_jax.train.engines import SamplingError

PATIENCE = 60.0


@dataclasses.dataclass(frozen=True)
class Batch:
    step: int
    version: int
    weights: float
    place: dict[str, int]


class Engine:
    """In a sampler's place: says by which weights each step was sampled, as often as a test allows."""

    def __init__(self) -> None:
        self.place = {"next_index": 0}
        self.loaded: tuple[int, float] = (-1, np.nan)
        self.begun: list[int] = []
        self.loads: list[int] = []
        self.permits = threading.Semaphore(0)
        self.interrupts = threading.Event()
        self.fault: BaseException | None = None

    def load(self, version, params) -> None:
        if self.loaded[0] != version:
            self.loads.append(version)
            self.loaded = (version, float(params))

    def sample(self, step: int) -> Batch:
        self.place = {"next_index": self.place["next_index"] + 1}
        self.begun.append(step)
        while not self.permits.acquire(timeout=0.01):
            if self.interrupts.is_set():
                raise TimeoutError("interrupted")
        if self.fault is not None:
            raise self.fault
        return Batch(step, *self.loaded, self.place)

    def interrupt(self) -> None:
        self.interrupts.set()

    def close(self) -> None:
        pass


@pytest.fixture
def make_ahead(make_config):
    """A source over an ``Engine``; weights after update ``v`` are the number ``v``."""
    opened = []

    def make(engine: Engine, *, queue: int, schedule: str = "fixed", steps: int = 9) -> Ahead:
        changes = {"steps": steps, "loss.minibatches": 1, "rollout.lag": 0, "rollout.max_staleness": queue}
        config = make_config(changes | {"rollout.queue": queue, "rollout.schedule": schedule})
        source = Ahead(engine, config, np.float32(0), context=contextlib.nullcontext)
        opened.append(source)
        return source

    yield make
    for source in opened:
        source.stop()


def until(condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.002)


def train(source: Ahead, steps, version: int = 0, moves=lambda step: True) -> list[Batch]:
    """Takes the batches of those steps; a step's update is made where ``moves`` says so."""
    taken = []
    for step in steps:
        taken.append(source.take())
        version += moves(step)
        source.after_step(version, np.float32(version))
    return taken


@pytest.mark.parametrize("queue", [1, 2, 3])
def test_fixed_is_a_function_of_the_step_alone(make_ahead, queue):
    engine = Engine()
    engine.permits.release(1000)
    source = make_ahead(engine, queue=queue)
    source.start()
    taken = train(source, range(9))
    assert [batch.step for batch in taken] == list(range(9))
    assert [batch.version for batch in taken] == [max(0, step - queue) for step in range(9)]
    assert [batch.weights for batch in taken] == [batch.version for batch in taken]
    assert [batch.place["next_index"] for batch in taken] == list(range(1, 10))
    assert engine.begun == list(range(9))  # none past the last step


@pytest.mark.parametrize("queue", [1, 3])
def test_fixed_runs_ahead_as_far_as_the_queue_and_no_further(make_ahead, queue):
    engine = Engine()
    engine.permits.release(1000)
    source = make_ahead(engine, queue=queue)
    source.start()
    for step in range(4):
        # Before step `step` is learnt from, its batch and `queue` more are there.
        until(lambda step=step: len(engine.begun) == step + queue + 1 and source.waiting == queue + 1)
        time.sleep(0.03)
        assert len(engine.begun) == step + queue + 1
        source.take()
        time.sleep(0.03)
        assert len(engine.begun) == step + queue + 1  # that it was taken lets nothing begin: its weights are to come
        source.after_step(step + 1, np.float32(step + 1))


def test_sampling_and_training_overlap(make_ahead):
    """While step 0 is being learnt from, batch 1 is being sampled."""
    engine = Engine()
    source = make_ahead(engine, queue=1)
    source.start()
    engine.permits.release(1)
    source.take()
    until(lambda: engine.begun == [0, 1])


def test_steps_without_an_update_count_as_steps(make_ahead):
    """Weights are those after a step, moved or not: the version of a batch may be younger than its step says."""
    engine = Engine()
    engine.permits.release(1000)
    source = make_ahead(engine, queue=2)
    source.start()
    taken = train(source, range(9), moves=lambda step: step % 2 == 0)
    after = [0, *itertools.accumulate(int(step % 2 == 0) for step in range(9))]  # version after so many steps
    assert [batch.version for batch in taken] == [after[max(0, step - 2)] for step in range(9)]


def test_newest_takes_the_newest_there_is_and_keeps_to_the_queue(make_ahead):
    engine = Engine()
    source = make_ahead(engine, queue=2, schedule="newest")
    source.start()
    engine.permits.release(2)
    until(lambda: source.waiting == 2)
    time.sleep(0.03)
    assert engine.begun == [0, 1]  # a third would be one too many
    assert source.take().version == 0
    until(lambda: engine.begun == [0, 1, 2])  # a place is free at once, whatever the weights
    source.after_step(1, np.float32(1))
    assert source.take().version == 0
    engine.permits.release(1)
    until(lambda: engine.begun == [0, 1, 2, 3])
    assert source.take().version == 0  # batch 2 began before the first update ended
    source.after_step(2, np.float32(2))
    source.after_step(3, np.float32(3))
    engine.permits.release(2)
    assert source.take().version == 1  # batch 3 began after it
    assert source.take().version == 3
    assert [version for version, _ in source.held] == [3]


@pytest.mark.parametrize("stop_after", [1, 2, 5])
def test_what_waited_is_sampled_again_as_it_was(make_ahead, stop_after):
    """A checkpoint holds weights and the place of what was taken; the rest follows from them."""
    whole, first, second = Engine(), Engine(), Engine()
    for engine in (whole, first, second):
        engine.permits.release(1000)
    source = make_ahead(whole, queue=3)
    source.start()
    expected = train(source, range(9))

    source = make_ahead(first, queue=3)
    source.start()
    taken = train(source, range(stop_after))
    until(lambda: source.waiting == 4)
    state, held = source.get_state(), [params for _, params in source.held]
    source.stop()
    assert state == {
        "held_versions": list(range(max(0, stop_after - 3), stop_after + 1)),
        "stream": {"next_index": stop_after},
    }
    again = make_ahead(second, queue=3)
    again.set_state(stop_after, state, held)
    again.start()
    assert taken + train(again, range(stop_after, 9), version=stop_after) == expected


def test_the_same_source_goes_on_after_a_stop_in_the_middle_of_a_batch(make_ahead):
    engine = Engine()
    engine.permits.release(2)
    source = make_ahead(engine, queue=1)
    source.start()
    train(source, range(2))
    until(lambda: engine.begun == [0, 1, 2])
    source.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "rollouts-ahead"]
    engine.interrupts.clear()
    engine.permits.release(1000)
    source.start()
    assert [(batch.step, batch.version, batch.place["next_index"]) for batch in train(source, range(2, 5), 2)] == [
        *((2, 1, 3), (3, 2, 4), (4, 3, 5))
    ]


def test_what_goes_wrong_in_the_thread_is_raised_where_its_batch_is_taken(make_ahead):
    engine = Engine()
    engine.fault = SamplingError("gone")
    engine.permits.release(1)
    source = make_ahead(engine, queue=1)
    source.start()
    with pytest.raises(SamplingError, match="gone"):
        source.take()
    assert source.get_state()["stream"] == {"next_index": 0}  # its prompts are asked again
    engine.fault = None
    engine.permits.release(1000)
    source.stop()
    source.start()
    assert source.take() == Batch(0, 0, 0.0, {"next_index": 1})


def test_the_policy_moves_on_without_touching_what_is_held(make_ahead):
    """The update donates its parameters: a source keeps copies, one for each step whose weights are still needed."""
    import jax.numpy as jnp

    engine = Engine()
    engine.permits.release(1000)
    source = make_ahead(engine, queue=2)
    source.start()
    policy = [jnp.float32(step) for step in range(6)]
    for step in range(5):
        source.take()
        source.after_step(step + 1, policy[step + 1])
        policy[step + 1].delete()
    assert [(version, float(params)) for version, params in source.held] == [(3, 3.0), (4, 4.0), (5, 5.0)]
    source.after_step(5, policy[5])  # no update in this step: the copy of version 5 serves again
    assert source.held[-1][1] is source.held[-2][1]
