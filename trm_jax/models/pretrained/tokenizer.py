"""The byte-level BPE tokenizer and the chat template that a GGUF file carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["PretrainedTokenizer"]

_CONTROL = 3  # ggml's token_type of special tokens


class PretrainedTokenizer:
    """Text to ids and back, exactly as the model was trained (digits are split one by one).

    Neither beginning-of-sequence nor padding is ever added. **``pad_id`` may equal an end-of-sequence id** (SmolLM2:
    both are 2): take masks from the engine's bookkeeping, never from ``id != pad_id``.

    Attributes:
      vocab_size: number of ids.
      bos_id: first token of a chat turn, or None.
      eos_ids: ids that end a response.
      pad_id: filler for masked slots.
      special_tokens: text → id of the control tokens.
      chat_template: Jinja source, or None.

    Args:
      metadata: the ``tokenizer.*`` keys of a GGUF file, as ``GGUFModel.tokenizer`` holds them.

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

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        try:
            import tokenizers
            from tokenizers import decoders, models, pre_tokenizers
        except ImportError as error:
            raise ImportError(
                "Pretrained tokenizers need the 'tokenizers' package: pip install 'trm-jax[pretrained]'."
            ) from error

        for key, required in (("model", "gpt2"), ("pre", "smollm")):
            if (value := _need(metadata, key)) != required:
                raise ValueError(f"tokenizer.ggml.{key}={value!r} is not supported; {required!r} is required.")
        for key in ("add_bos_token", "add_space_prefix"):
            if metadata.get(f"tokenizer.ggml.{key}", False):
                raise ValueError(f"tokenizer.ggml.{key}=True is not supported; False is required.")
        tokens, kinds = _need(metadata, "tokens"), _need(metadata, "token_type")
        if len(tokens) != len(kinds):
            raise ValueError(
                f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens; one each is required."
            )
        ids = {token: index for index, token in enumerate(tokens)}
        if len(ids) != len(tokens):
            raise ValueError(f"tokenizer.ggml.tokens names {len(tokens) - len(ids)} tokens twice.")

        self.vocab_size: int = len(tokens)
        self.bos_id: int | None = metadata.get("tokenizer.ggml.bos_token_id")
        eos_id = int(_need(metadata, "eos_token_id"))
        self.eos_ids: frozenset[int] = frozenset({eos_id})
        self.pad_id: int = int(metadata.get("tokenizer.ggml.padding_token_id", eos_id))
        self.chat_template: str | None = metadata.get("tokenizer.chat_template")
        self.special_tokens: dict[str, int] = {
            token: index for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == _CONTROL
        }
        self._tokens: list[str] = list(tokens)

        merges = [tuple(pair.split(" ", 1)) for pair in _need(metadata, "merges")]

        def build() -> Tokenizer:
            tokenizer = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges))
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
                ]
            )
            tokenizer.decoder = decoders.ByteLevel()
            return tokenizer

        self._plain = build()
        self._special = build()
        self._special.add_special_tokens(list(self.special_tokens))

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

    def render_chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """Writes a conversation the way the model was trained to read it.

        Args:
          messages: ``{"role": ..., "content": ...}`` in order; at least one.
          add_generation_prompt: end with the opening of the assistant's turn.

        Returns:
          Text with control tokens in it, from the file's own template in a sandbox (SmolLM2's adds a default system
          message unless the first message is one).

        Raises:
          ValueError: without a template, for a malformed message, and for one that contains a control token (it would
            end the turn in the writer's stead).
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
        try:
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise ImportError("Chat templates need 'jinja2': pip install 'trm-jax[pretrained]'.") from error
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        return environment.from_string(self.chat_template).render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            bos_token="" if self.bos_id is None else self._tokens[self.bos_id],
            eos_token=self._tokens[min(self.eos_ids)],
        )

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        """The ids of ``render_chat``, control tokens recognised. Same arguments, same errors."""
        return self.encode(self.render_chat(messages, add_generation_prompt), allow_special=True)


def _need(metadata: Mapping[str, Any], key: str) -> Any:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        raise ValueError(f"The tokenizer metadata lack 'tokenizer.ggml.{key}'.")
    return value


def _refuse(message: str) -> NoReturn:
    raise ValueError(f"The chat template refused these messages: {message}")
