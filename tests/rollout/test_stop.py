"""Stop strings: where they end a response, and that nothing else changes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from trm_jax.rollout import SamplingConfig, StopStrings

PIECES = ("a", "b", "ab", "c", "\n", "\n\n", "ca", "", "d", "e", "bc", "x", "y")  # 13 tokens; one without text


class Codec:
    def decode(self, ids) -> str:
        return "".join(PIECES[i] for i in ids)


CODEC = Codec()


@pytest.mark.parametrize(
    ("stop", "chunks", "expected"),
    [
        (("b",), [[0, 0], [1, 0]], [None, 1]),
        (("a\n",), [[0], [4]], [None, 1]),  # over the border of two tokens and two chunks
        (("abc",), [[0, 7, 7, 1], [7, 3, 0]], [None, 2]),  # tokens without text between
        (("c\n",), [[3, 5]], [2]),  # the token that completes it has more behind
        (("zz", "cab"), [[6, 0], [3, 2, 1]], [None, 2]),  # any of them; "ca" + "b" does not stand in "caa"
        (("ab",), [[2, 2]], [1]),  # the first time
        (("q",), [[0, 1, 2, 3], [4, 5, 6]], [None, None]),
    ],
)
def test_a_response_ends_with_the_token_that_completes_a_string(stop, chunks, expected):
    watch = StopStrings(CODEC, stop)
    assert [watch.take(chunk) for chunk in chunks] == expected


@pytest.mark.parametrize("seed", range(4))
def test_long_responses_are_not_decoded_again_with_each_chunk(seed):
    """Against a decoding of everything, tokens without text among them."""
    rng = np.random.default_rng(seed)
    decoded = []

    class Counting(Codec):
        def decode(self, ids) -> str:
            decoded.append(len(ids))
            return super().decode(ids)

    ids = rng.integers(0, len(PIECES), 4_000).tolist()
    ids[500:540] = [7] * 40  # without text
    whole = CODEC.decode(ids)
    stop = whole[-30:-10]
    ids_to = next(n for n in range(3_000, 4_001) if stop in CODEC.decode(ids[:n]))
    watch, cut = StopStrings(Counting(), [stop]), None
    for start in range(0, 4_000, 5):
        if (cut := watch.take(ids[start : start + 5])) is not None:
            break
    assert start + cut == ids_to
    assert sum(decoded) < 100 * 4_000  # 400 times as many would be decoded again with each chunk
    watch = StopStrings(Counting(), ["ab"])
    assert [watch.take([0]), watch.take([7] * 40), watch.take([7, 1])] == [None, None, 2]


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_an_engine_cuts_there_and_samples_the_rest_as_without(tools, top_p):
    prompts = tools.prompts(11, samples=2)
    engine = tools.engine(tokenizer=CODEC)
    whole = engine.generate(prompts, SamplingConfig(top_p=top_p))
    found = engine.generate(prompts, SamplingConfig(top_p=top_p, stop=("ab", "\n")))
    mask, tokens = np.asarray(whole.response_mask), np.asarray(whole.response_tokens)
    cut = 0
    for row in range(11):
        ids = tokens[row][mask[row]].tolist()
        texts = [CODEC.decode(ids[:n]) for n in range(1, len(ids) + 1)]
        length = next((n for n, text in enumerate(texts, 1) if "ab" in text or "\n" in text), len(ids))
        stops = any(string in texts[length - 1] for string in ("ab", "\n"))
        cut += length < len(ids)
        assert int(found.response_mask[row].sum()) == length
        assert bool(found.finished[row]) == (stops or bool(whole.finished[row]))
        for name in ("response_tokens", "rollout_logps", "versions"):
            kept, rest = np.split(np.asarray(getattr(found, name))[row], [length])
            np.testing.assert_array_equal(kept, np.asarray(getattr(whole, name))[row, :length])
            assert (rest == (-1 if name == "versions" else 0)).all()
        if top_p < 1:
            np.testing.assert_array_equal(found.support[row, :length], whole.support[row, :length])
    assert cut > 2


def test_without_a_tokenizer_they_are_refused(tools):
    with pytest.raises(ValueError, match=r"stop=\['x'\] needs the tokenizer"):
        tools.engine().generate(tools.prompts(1), SamplingConfig(stop=("x",)))
    with pytest.raises(ValueError, match="an empty string would end"):
        SamplingConfig(stop=("x", ""))


def test_a_run_that_has_stopped_leaves_nothing_to_the_next(tools):
    """Slots whose sample was stopped on the host still decode on the device; who comes next must not notice."""
    engine = tools.engine(tokenizer=CODEC, slots=2)
    prompts = tools.prompts(11, samples=2)
    stopped = engine.generate(prompts, SamplingConfig(stop=tuple("abc\n")))
    assert (np.asarray(stopped.response_mask).sum(1) < 6).sum() > 6
    other = tools.engine(tokenizer=CODEC, slots=11).generate(prompts, SamplingConfig(stop=tuple("abc\n")))
    for field in dataclasses.fields(stopped):
        one, two = getattr(stopped, field.name), getattr(other, field.name)
        if field.name in ("response_tokens", "response_mask", "finished", "versions"):
            np.testing.assert_array_equal(one, two, err_msg=field.name)
