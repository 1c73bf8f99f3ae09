"""Text to ids and back as a pretrained model was trained, and conversations by its own template."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trm_jax.models.pretrained.chat_template import render_template
from trm_jax.models.pretrained.tokenizer_parts import TokenizerParts, directory_parts, gguf_parts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["PretrainedTokenizer", "load_tokenizer"]

_PROBE = "0a1b2c"  # an assistant's words that no template writes of itself


class PretrainedTokenizer:
    """Text to ids and back, exactly as the model was trained.

    Nothing is added to a text. **``pad_id`` may equal an end-of-sequence id** (SmolLM2: both are 2): take masks from
    the engine's bookkeeping, never from ``id != pad_id``.

    Attributes:
      vocab_size: number of ids.
      bos_id: beginning-of-sequence, or None.
      eos_ids: ids that end a response: all that the files name, and the token that ends an assistant's turn in the chat
        template (a base model's files often name another).
      pad_id: filler for masked slots.
      special_tokens: text → id of the control tokens.
      chat_template: Jinja source, or None.
      prefix_ids: what stands before a text that is no chat (beginning-of-sequence, where the tokenizer adds it).

    Args:
      source: the ``tokenizer.*`` keys of a GGUF file, as ``GGUFModel.tokenizer`` holds them, or parts; see
        ``load_tokenizer`` for files.

    Raises:
      ValueError: when a key is missing or names a tokenizer that is not supported.
      ImportError: without the ``pretrained`` extra.

    Example:
      >>> metadata = {
      ...     "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm",
      ...     "tokenizer.ggml.tokens": ["<|end|>", "1", "2", "12", "a", "b", "ab"],
      ...     "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 1],
      ...     "tokenizer.ggml.merges": ["1 2", "a b"], "tokenizer.ggml.eos_token_id": 0,
      ... }
      >>> tokenizer = PretrainedTokenizer(metadata)
      >>> tokenizer.encode("12ab")
      [1, 2, 6]
      >>> tokenizer.encode("ab<|end|>", allow_special=True), tokenizer.decode([6, 0])
      ([6, 0], 'ab')
    """

    def __init__(self, source: Mapping[str, Any] | TokenizerParts) -> None:
        backend = _backend()
        parts = source if isinstance(source, TokenizerParts) else gguf_parts(source)
        self._special: Tokenizer = backend.from_str(parts.backend)
        self._plain: Tokenizer = backend.from_str(parts.backend)
        self._plain.encode_special_tokens = True  # reads control tokens as the characters that they are written with
        for tokenizer in (self._special, self._plain):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self._parts = parts
        self.vocab_size: int = max(self._special.get_vocab(with_added_tokens=True).values()) + 1
        self.bos_id: int | None = self._special.token_to_id(parts.named.get("bos_token", ""))
        self.pad_id: int = parts.pad_id
        self.chat_template: str | None = parts.chat_template
        self.special_tokens: dict[str, int] = dict(parts.special_tokens)
        self.prefix_ids: list[int] = list(parts.prefix)
        self.eos_ids: frozenset[int] = parts.eos_ids | self._turn_end()

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with ids, control tokens, chat template, end tokens or padding."""
        layout = dataclasses.asdict(self._parts) | {"eos_ids": sorted(self.eos_ids)}
        return hashlib.sha256(json.dumps(layout, sort_keys=True).encode()).hexdigest()[:16]

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Turns text into ids; nothing is added.

        Args:
          text: any string; "" gives [].
          allow_special: read ``<|im_end|>`` and its like as control tokens. Off, they are ordinary characters, so that
            text from outside cannot end a turn.

        Returns:
          The ids.
        """
        tokenizer = self._special if allow_special else self._plain
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Turns ids into text, up to the first end-of-sequence id; the inverse of ``encode`` for any text.

        Args:
          ids: token ids (ints or an integer array).
          keep_special: write every id out, control tokens and what follows them too. Off, a verifier sees the answer
            alone.

        Returns:
          The text; bytes that are no UTF-8 become U+FFFD.

        Raises:
          ValueError: for an id outside the vocabulary.
        """
        values = [int(index) for index in ids]
        for value in values:
            if not 0 <= value < self.vocab_size:
                raise ValueError(f"token id {value} is outside the vocabulary 0..{self.vocab_size - 1}.")
        if not keep_special:
            values = values[: next((at for at, value in enumerate(values) if value in self.eos_ids), None)]
        return str(self._special.decode(values, skip_special_tokens=not keep_special))

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True, **options: Any
    ) -> str:
        """Writes a conversation the way the model was trained to read it.

        Args:
          messages: ``{"role": ..., "content": ...}`` in order; at least one.
          add_generation_prompt: end with the opening of the assistant's turn.
          **options: further variables that the template knows, such as Qwen3's ``enable_thinking=False``.

        Returns:
          Text with control tokens in it, from the file's own template (SmolLM2's adds a default system message unless
          the first message is one).

        Raises:
          ValueError: without a template, for a malformed message, for one that contains a control token (it would end
            the turn in the writer's stead), and whatever ``render_template`` refuses.
          ImportError: without the ``pretrained`` extra.
        """
        if self.chat_template is None:
            raise ValueError("The file carries no chat template; encode the text directly.")
        if not messages:
            raise ValueError("messages is empty; at least one is required.")
        for position, message in enumerate(messages):
            for key in ("role", "content"):
                value = message.get(key)
                if not isinstance(value, str):
                    raise ValueError(f"messages[{position}][{key!r}]={value!r}: a string is required.")
                if found := [token for token in self.special_tokens if token in value]:
                    raise ValueError(
                        f"messages[{position}][{key!r}] contains the control token {found[0]!r}; remove it, or build "
                        "the prompt with encode(text, allow_special=True)."
                    )
        return render_template(
            self.chat_template,
            {
                "bos_token": "",
                **self._parts.named,
                "tools": None,
                "documents": None,
                **options,
                "messages": [dict(message) for message in messages],
                "add_generation_prompt": add_generation_prompt,
            },
        )

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True, **options: Any
    ) -> list[int]:
        """The ids of ``render_chat``, control tokens recognised. Same arguments, same errors."""
        return self.encode(self.render_chat(messages, add_generation_prompt, **options), allow_special=True)

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes the tokenizer as the files of a Hugging Face directory, which Transformers and this package read.

        They are ``tokenizer.json``, ``tokenizer_config.json`` with control tokens and chat template,
        ``special_tokens_map.json``, and ``generation_config.json`` with every end token.

        Args:
          directory: exists.
        """
        root, parts = Path(directory), self._parts
        named = parts.named | {"pad_token": str(self._special.id_to_token(self.pad_id))}
        settings: dict[str, Any] = {
            **named,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": bool(parts.prefix),
            "clean_up_tokenization_spaces": False,
        }
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        ends: dict[str, Any] = {"eos_token_id": sorted(self.eos_ids), "pad_token_id": self.pad_id}
        if self.bos_id is not None:
            ends["bos_token_id"] = self.bos_id
        (root / "tokenizer.json").write_text(parts.backend, encoding="utf-8")
        for name, content in (
            ("tokenizer_config.json", settings),
            ("special_tokens_map.json", named),
            ("generation_config.json", ends),
        ):
            (root / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def _turn_end(self) -> frozenset[int]:
        """The control token right after an assistant's words, when the template writes one."""
        if self.chat_template is None:
            return frozenset()
        turns = [{"role": "user", "content": "7"}, {"role": "assistant", "content": _PROBE}]
        try:
            after = self.render_chat(turns, add_generation_prompt=False).rpartition(_PROBE)[2].lstrip()
        except ValueError:  # a template that refuses these turns will say why when it is asked for others
            return frozenset()
        tokens = [token for token in self.special_tokens if after.startswith(token)]
        return frozenset({self.special_tokens[max(tokens, key=len)]}) if tokens else frozenset()


def load_tokenizer(path: str | Path) -> PretrainedTokenizer:
    """The tokenizer that came with a checkpoint.

    Args:
      path: a Hugging Face directory with ``tokenizer.json``, or a GGUF file.

    Returns:
      The tokenizer, with its chat template if there is one.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: what is wrong with it.
      ImportError: without the ``pretrained`` extra.

    Example:
      >>> load_tokenizer("no/such/directory")
      Traceback (most recent call last):
      FileNotFoundError: no/such/directory/tokenizer.json: no such file; a tokenizer needs it.
    """
    _backend()
    path = Path(path)
    if path.suffix == ".gguf":
        from trm_jax.models.pretrained.gguf_reader import read_gguf

        return PretrainedTokenizer(read_gguf(path).tokenizer)
    return PretrainedTokenizer(directory_parts(path))


def _backend() -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ImportError(
            "Pretrained tokenizers need the 'tokenizers' package: pip install 'trm-jax[pretrained]'."
        ) from error
    return Tokenizer
