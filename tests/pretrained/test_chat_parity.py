"""Chats have the text and the ids that Transformers gives them, for tokenizers and templates of six families."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from trm_jax.models.pretrained import PretrainedTokenizer, load_tokenizer

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

GOLDENS: dict[str, Any] = json.loads(Path(__file__).with_name("chat_goldens.json").read_text(encoding="utf-8"))
FAMILIES = ("smollm", "qwen", "llama3", "mistral", "gemma", "deepseek")


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory) -> Any:
    @functools.cache
    def load(family: str) -> PretrainedTokenizer:
        root = tmp_path_factory.mktemp(family)
        for name, content in GOLDENS["families"][family]["files"].items():
            (root / name).write_text(json.dumps(content), encoding="utf-8")
        return load_tokenizer(root)

    return load


def test_every_family_is_there() -> None:
    assert set(GOLDENS["families"]) == set(FAMILIES)
    for family in GOLDENS["families"].values():
        assert len(family["chats"]) >= 8
        assert len({case["text"] for case in family["chats"]}) >= 4


@pytest.mark.parametrize("family", FAMILIES)
def test_chats_have_the_text_and_the_ids_of_transformers(tokenizer_of, family) -> None:
    tokenizer = tokenizer_of(family)
    for case in GOLDENS["families"][family]["chats"]:
        asked = (case["messages"], case["prompt"])
        assert tokenizer.render_chat(*asked, **case["options"]) == case["text"]
        assert tokenizer.apply_chat_template(*asked, **case["options"]) == case["ids"]


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_that_are_no_chats_have_the_ids_of_transformers(tokenizer_of, family) -> None:
    tokenizer = tokenizer_of(family)
    for case in GOLDENS["families"][family]["plain"]:
        assert [*tokenizer.prefix_ids, *tokenizer.encode(case["text"])] == case["ids"]


@pytest.mark.parametrize(
    ("family", "ends"),
    [
        ("smollm", {"<|im_end|>"}),
        ("qwen", {"<|im_end|>", "<|endoftext|>"}),
        ("llama3", {"<|end_of_text|>", "<|eot_id|>"}),  # the files name the first, the template ends turns by the other
        ("mistral", {"</s>"}),
        ("gemma", {"<eos>", "<end_of_turn>"}),
        ("deepseek", {"<｜end▁of▁sentence｜>"}),
    ],
)
def test_the_tokens_that_end_a_response(tokenizer_of, family, ends) -> None:
    tokenizer = tokenizer_of(family)
    assert {text for text, index in tokenizer.special_tokens.items() if index in tokenizer.eos_ids} == ends
