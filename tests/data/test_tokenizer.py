"""The character tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trm_jax.data import PRINTABLE_ASCII, CharTokenizer, Tokenizer

TOKENIZER = CharTokenizer("0123456789+-,=")


def test_ids_follow_the_alphabet_then_end_then_padding() -> None:
    assert TOKENIZER.encode("0+9=") == [0, 10, 9, 13]
    assert (TOKENIZER.eos_id, TOKENIZER.pad_id, TOKENIZER.vocab_size) == (14, 15, 16)
    assert TOKENIZER.eos_ids == {14}
    assert isinstance(TOKENIZER, Tokenizer)


@given(st.text(alphabet=PRINTABLE_ASCII))
def test_decode_inverts_encode(text: str) -> None:
    tokenizer = CharTokenizer(PRINTABLE_ASCII)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_decode_ends_at_the_first_end_and_shows_padding_sampled_before_it() -> None:
    assert TOKENIZER.decode([1, 14, 2, 99]) == "1"
    assert TOKENIZER.decode([1, 15, 2]) == "1\N{REPLACEMENT CHARACTER}2"


@pytest.mark.parametrize("token", [-1, 16])
def test_decode_refuses_an_id_outside_the_vocabulary(token: int) -> None:
    with pytest.raises(ValueError, match=rf"id {token} at position 1 is outside \[0, 16\)"):
        TOKENIZER.decode([0, token])


def test_an_unknown_character_is_named_with_its_place_and_text() -> None:
    with pytest.raises(ValueError, match=r"character 'x' at position 2 of '1\+x='"):
        TOKENIZER.encode("1+x=")
    with pytest.raises(ValueError, match=r"character '\*' at position 500 of .*shortened"):
        TOKENIZER.encode("1" * 500 + "*" + "2" * 500)


def test_the_alphabet_must_be_a_set() -> None:
    with pytest.raises(ValueError, match="alphabet is empty"):
        CharTokenizer("")
    with pytest.raises(ValueError, match=r"\['0', 'b'\] more than once"):
        CharTokenizer("0b1b0")


def test_the_fingerprint_tells_alphabets_and_their_order_apart() -> None:
    prints = {CharTokenizer(alphabet).fingerprint for alphabet in ("ab", "ba", "abc")}
    assert len(prints) == 3
    assert CharTokenizer("ab").fingerprint == CharTokenizer("ab").fingerprint
