"""Streams of prompts and of supervised batches."""

from __future__ import annotations

import collections
import json
import subprocess
import sys

import numpy as np
import pytest

from trm_jax.data import CharTokenizer, Problem, drop_long_prompts, prompt_stream, supervised_stream

pytest.importorskip("grain")

TOKENIZER = CharTokenizer("0123456789+-,=")


def sums(count: int) -> list[Problem]:
    return [
        Problem(
            prompt=f"{i}+1=",
            reference=str(i + 1),
            demonstration=str(i + 1),
            source="made",
            index=i,
            metadata={"chain": f"{i}+1"},
        )
        for i in range(count)
    ]


def places(batch: list[Problem]) -> list[int]:
    return [problem.index for problem in batch]


def test_every_epoch_is_another_permutation_and_batches_cross_its_end() -> None:
    stream = prompt_stream(sums(10), prompts_per_step=4, seed=1)
    order = [i for _ in range(5) for i in places(next(stream))]
    first, second = order[:10], order[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_the_seed_fixes_the_order() -> None:
    def order(seed: int) -> list[list[int]]:
        stream = prompt_stream(sums(50), prompts_per_step=5, seed=seed)
        return [places(next(stream)) for _ in range(4)]

    assert order(3) == order(3)
    assert order(3) != order(4)


def test_a_saved_place_goes_on_exactly_once_through_json_and_in_a_new_stream() -> None:
    whole = prompt_stream(sums(7), prompts_per_step=3, seed=5)
    expected = [places(next(whole)) for _ in range(9)]
    stream = prompt_stream(sums(7), prompts_per_step=3, seed=5)
    seen = [places(next(stream)) for _ in range(4)]
    state = json.loads(json.dumps(stream.get_state()))
    next(stream)  # seen by nobody: lost with the run that is resumed
    resumed = prompt_stream(sums(7), prompts_per_step=3, seed=5)
    resumed.set_state(state)
    seen += [places(next(resumed)) for _ in range(5)]
    assert seen == expected


@pytest.mark.parametrize("batch", [1, 2])
def test_processes_share_each_step_and_may_change_in_number(batch: int) -> None:
    single = prompt_stream(sums(11), prompts_per_step=2 * batch, seed=2)
    steps = [places(next(single)) for _ in range(6)]
    pair = [
        prompt_stream(sums(11), prompts_per_step=2 * batch, seed=2, process_index=i, process_count=2) for i in (0, 1)
    ]
    shared = [[places(next(stream)) for stream in pair] for _ in range(3)]
    for step, (one, other) in zip(steps, shared, strict=False):
        assert len(one) == len(other) == batch
        assert collections.Counter(one + other) == collections.Counter(step)
    late = prompt_stream(sums(11), prompts_per_step=2 * batch, seed=2)
    late.set_state(pair[0].get_state())
    assert places(next(late)) == steps[3]


def test_one_prompt_a_step() -> None:
    stream = prompt_stream(sums(2), prompts_per_step=1, seed=0)
    assert sorted(places(next(stream)) + places(next(stream))) == [0, 1]


def test_a_state_of_another_stream_is_refused() -> None:
    state = prompt_stream(sums(7), prompts_per_step=3, seed=5).get_state()
    with pytest.raises(ValueError, match="seed=5, this one has seed=6"):
        prompt_stream(sums(7), prompts_per_step=3, seed=6).set_state(state)
    with pytest.raises(ValueError, match="problems=7, this one has problems=8"):
        prompt_stream(sums(8), prompts_per_step=3, seed=5).set_state(state)
    with pytest.raises(ValueError, match="state has keys"):
        prompt_stream(sums(7), prompts_per_step=3, seed=5).set_state({"next_index": 1})


def test_bad_stream_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="no problems"):
        prompt_stream([], prompts_per_step=1, seed=0)
    with pytest.raises(ValueError, match="prompts_per_step=3 must be a positive multiple of process_count=2"):
        prompt_stream(sums(4), prompts_per_step=3, seed=0, process_count=2)
    with pytest.raises(ValueError, match="process_index=2 must be in"):
        prompt_stream(sums(4), prompts_per_step=2, seed=0, process_index=2, process_count=2)
    with pytest.raises(ValueError, match="seed=-1"):
        prompt_stream(sums(4), prompts_per_step=2, seed=-1)


def test_items_are_made_only_when_their_batch_is() -> None:
    class Lazy(list[Problem]):
        made = 0

        def __getitem__(self, index):  # type: ignore[no-untyped-def, override]
            Lazy.made += 1
            return super().__getitem__(index)

    stream = prompt_stream(Lazy(sums(1000)), prompts_per_step=4, seed=0)
    next(stream)
    assert Lazy.made == 4


def test_supervised_rows_hold_prompt_demonstration_and_end() -> None:
    stream = supervised_stream(sums(3), TOKENIZER, batch_size=3, sequence_length=8, seed=0)
    batch = next(stream)
    assert batch.tokens.dtype == np.int32
    rows = {tuple(row): tuple(mask) for row, mask in zip(batch.tokens.tolist(), batch.loss_mask.tolist(), strict=True)}
    # "2+1=" then "3", end 14, padding 15; the loss counts "3" and the end
    assert rows[(2, 10, 1, 13, 3, 14, 15, 15)] == (False, False, False, False, True, True, False, False)
    assert {row[0] for row in rows} == {0, 1, 2}


def demonstrations(batch: object) -> list[str]:
    return [
        TOKENIZER.decode(row[mask])
        for row, mask in zip(batch.tokens, batch.loss_mask, strict=True)  # type: ignore[attr-defined]
    ]


def test_errors_are_fresh_each_epoch_and_the_same_after_a_resume() -> None:
    def stream():  # type: ignore[no-untyped-def]
        return supervised_stream(
            sums(8), TOKENIZER, batch_size=8, sequence_length=8, seed=3, corruption_probability=0.5
        )

    whole = stream()
    batches = [next(whole) for _ in range(4)]
    wrong = [
        frozenset(
            row[0] for row, text in zip(b.tokens.tolist(), demonstrations(b), strict=True) if int(text) != row[0] + 1
        )
        for b in batches
    ]
    assert len(set(wrong)) > 1  # not the same problems are wrong in every epoch
    resumed = stream()
    resumed.set_state({"problems": 8, "batch_size": 8, "seed": 3, "next_index": 2})
    np.testing.assert_array_equal(next(resumed).tokens, batches[2].tokens)


def test_supervised_streams_refuse_what_they_cannot_hold() -> None:
    with pytest.raises(ValueError, match=r"corruption_probability must be in \[0, 1\], got 2"):
        supervised_stream(sums(1), TOKENIZER, batch_size=1, sequence_length=8, seed=0, corruption_probability=2)
    short = supervised_stream(sums(1), TOKENIZER, batch_size=1, sequence_length=5, seed=0)
    with pytest.raises(ValueError, match=r"made\[0\] takes 6 tokens .* sequence_length=5"):
        next(short)
    bare = [Problem(prompt="1=", reference="1", source="made", index=9)]
    with pytest.raises(ValueError, match=r"made\[9\] has no demonstration"):
        next(supervised_stream(bare, TOKENIZER, batch_size=1, sequence_length=8, seed=0))


def test_long_prompts_and_demonstrations_are_dropped_and_counted() -> None:
    problems = sums(200)  # prompts of 4, 5 and 6 characters; responses of 1 to 3 and an end
    kept, dropped = drop_long_prompts(problems, TOKENIZER, max_prompt_length=5)
    assert (len(kept), dropped) == (100, 100)
    kept, dropped = drop_long_prompts(problems, TOKENIZER, max_prompt_length=6, max_response_length=3)
    assert (len(kept), dropped) == (99, 101)  # 0 to 98: the answer to 99+1 has three digits
    with pytest.raises(ValueError, match="none of 200 problems fits"):
        drop_long_prompts(problems, TOKENIZER, max_prompt_length=3)


def test_importing_the_room_imports_no_optional_package() -> None:
    code = (
        "import sys, trm_jax.data; "
        "print([m for m in ('grain', 'reasoning_gym', 'math_verify', 'sympy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
