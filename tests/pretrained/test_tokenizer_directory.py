"""Tokenizers of Hugging Face directories: which files say what, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trm_jax.models.pretrained import load_tokenizer

tokenizers = pytest.importorskip("tokenizers")

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|turn|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
WORDS = ["<s>", "</s>", "<|turn|>", "a", "b", "ab", "[", "]", "u", "s", "e", "r", "i", "t", "n", "<", ">", "|", "/"]
IDS = {word: index for index, word in enumerate(WORDS)}


def write(root: Path, *, settings: dict[str, Any] | None = None, **files: Any) -> Path:
    """A directory of a BPE tokenizer over a few letters, which adds ``<s>`` before a text by itself."""
    from tokenizers import AddedToken, Tokenizer, models, processors

    tokenizer = Tokenizer(models.BPE(vocab=IDS, merges=[("a", "b")]))
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in WORDS[:3]])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(2)
    root.mkdir(exist_ok=True)
    tokenizer.save(str(root / "tokenizer.json"))
    own = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (root / "tokenizer_config.json").write_text(json.dumps(own if settings is None else settings))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (root / name.replace("__", ".")).write_text(text)
    return root


def test_a_directory(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "m"))
    assert tokenizer.vocab_size == len(WORDS) + 1
    assert (tokenizer.bos_id, tokenizer.prefix_ids) == (0, [0])
    assert tokenizer.special_tokens == {"<s>": 0, "</s>": 1, "<|turn|>": 2}
    assert tokenizer.eos_ids == frozenset({1, 2})  # the settings', and the end of a turn
    assert tokenizer.pad_id == 1
    assert tokenizer.encode("abab") == [IDS["ab"]] * 2  # nothing added, nothing cut off
    assert tokenizer.encode("a</s>") == [IDS[c] for c in "a</s>"]
    assert tokenizer.encode("a</s>", allow_special=True) == [IDS["a"], 1]
    assert tokenizer.encode("<tool>") == [len(WORDS)]
    text = "<s>[user]ab<|turn|>[assistant]"
    assert tokenizer.render_chat([{"role": "user", "content": "ab"}]) == text
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}])[0] == 0


def test_every_file_may_name_end_tokens(tmp_path: Path) -> None:
    plain = {"eos_token": "</s>", "pad_token": "<s>"}
    root = write(
        tmp_path / "m",
        settings=plain,
        generation_config__json={"eos_token_id": [1, 2]},
        config__json={"eos_token_id": 3},
    )
    tokenizer = load_tokenizer(root)
    assert tokenizer.eos_ids == frozenset({1, 2, 3})
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.prefix_ids) == (0, None, [])
    assert tokenizer.chat_template is None
    root = write(tmp_path / "n", settings={}, config__json={"eos_token_id": 2})
    assert load_tokenizer(root).eos_ids == frozenset({2})


def test_a_template_in_a_file_of_its_own_or_among_several(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    settings = {"eos_token": "</s>", "chat_template": named}
    assert load_tokenizer(write(tmp_path / "m", settings=settings)).chat_template == "one"
    assert (
        load_tokenizer(write(tmp_path / "m", settings=settings, chat_template__jinja="three")).chat_template == "three"
    )
    del named[0]
    with pytest.raises(ValueError, match=r"of its chat templates \(tool_use\) none is called 'default'"):
        load_tokenizer(write(tmp_path / "n", settings=settings))


def test_add_bos_token_is_obeyed(tmp_path: Path) -> None:
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}
    assert load_tokenizer(write(tmp_path / "m", settings=settings)).prefix_ids == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer__json": "{}"}, "is not a tokenizer that the tokenizers library reads"),
        ({"tokenizer_config__json": "{"}, "tokenizer_config.json is not JSON"),
        ({"generation_config__json": [1]}, "generation_config.json holds no JSON object"),
        ({"settings": {}}, r"the end tokens are \[\]; at least one"),
        ({"settings": {}, "config__json": {"eos_token_id": 999}}, "none of the end tokens is among the 20"),
        ({"settings": {"eos_token": "<end>"}}, "names '<end>', which .* does not have"),
        ({"settings": {"eos_token": "</s>", "chat_template": 5}}, "chat_template holds a int; a text"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_tokenizer(write(tmp_path / "m", **changes))


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json: no such file"):
        load_tokenizer(tmp_path)
