"""How long decode calls are and how far they run ahead of the host."""

from __future__ import annotations

import threading

import pytest

from trm_jax.integrations.jetstream._pace import Pace


def test_a_call_ends_with_the_sample_that_ends_first():
    pace = Pace(16)
    for slot, tokens in enumerate((40, 25, 90)):
        pace.started(slot, tokens)
    assert [pace.steps([]) for _ in range(3)] == [16, 9, 15]  # 25 = 16 + 9, then 40 = 16 + 9 + 15
    pace.started(1, 5)
    assert pace.steps([]) == 5
    assert pace.steps([0]) == 4  # slots are free: a quarter, so that newcomers need not wait
    assert pace.steps([]) == 16  # 90 is left with 41; what ended does not count


def test_no_call_is_so_short_that_calls_are_what_the_time_goes_to():
    pace = Pace(16)
    pace.started(0, 1)
    assert pace.steps([]) == 4
    assert Pace(1).steps([0]) == 1


def test_a_slot_that_was_given_back_early_is_forgotten():
    pace = Pace(8)
    pace.started(0, 3)
    pace.started(1, 100)
    assert pace.steps([0]) == 2
    pace.started(0, 50)
    assert pace.steps([]) == 8


@pytest.mark.parametrize("allowed", [0, 1])
def test_it_waits_until_enough_has_been_read(allowed):
    pace = Pace(4)
    for _ in range(2):
        pace.steps([0])
    done = threading.Event()
    thread = threading.Thread(target=lambda: (pace.wait(allowed, lambda: True), done.set()))
    thread.start()
    for _ in range(2 - allowed):
        assert not done.wait(0.02)
        pace.read()
    assert done.wait(60)
    thread.join()


def test_it_does_not_wait_for_a_driver_that_has_ended():
    pace = Pace(4)
    pace.steps([0])
    pace.wait(0, lambda: False)
