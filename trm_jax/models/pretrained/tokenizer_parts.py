"""What a tokenizer is made of, read from a GGUF file's metadata or a Hugging Face directory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["TokenizerParts", "directory_parts", "gguf_parts"]

_CONTROL, _USER_DEFINED = 3, 4  # ggml's token types of special tokens, and of added ones that are text
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {"qwen2": _LETTERS + r"\p{N}" + _REST, "llama-bpe": _LETTERS + r"\p{N}{1,3}" + _REST}
_PRE = ("smollm", "gpt-2", *_SPLITS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerParts:
    """Attributes:

    backend: serialised ``tokenizers.Tokenizer``.
    special_tokens: text → id of the control tokens.
    named: ``bos_token``, ``eos_token`` and their like → text, for the chat template.
    eos_ids: ids that end a response, as the files say; the template may add one.
    pad_id: filler for masked slots.
    chat_template: Jinja source, or None.
    prefix: ids that stand before a text that is no chat.
    """

    backend: str
    special_tokens: dict[str, int]
    named: dict[str, str]
    eos_ids: frozenset[int]
    pad_id: int
    chat_template: str | None
    prefix: list[int]


def gguf_parts(metadata: Mapping[str, Any]) -> TokenizerParts:
    """From the ``tokenizer.*`` keys of a GGUF file: byte-level BPE, split as SmolLM, GPT-2, Qwen2 or Llama 3 do.

    Raises:
      ValueError: a key is missing, or names a tokenizer that is not supported.
    """

    def need(key: str) -> Any:
        value = metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            raise ValueError(f"The tokenizer metadata lack 'tokenizer.ggml.{key}'.")
        return value

    if (model := need("model")) != "gpt2":
        raise ValueError(f"tokenizer.ggml.model={model!r} is not supported; 'gpt2' is required.")
    if (pre := need("pre")) not in _PRE:
        raise ValueError(f"tokenizer.ggml.pre={pre!r} is not supported; one of {', '.join(_PRE)} is required.")
    if metadata.get("tokenizer.ggml.add_space_prefix", False):
        raise ValueError("tokenizer.ggml.add_space_prefix=True is not supported; False is required.")
    tokens, kinds = list(need("tokens")), list(need("token_type"))
    if len(tokens) != len(kinds):
        raise ValueError(
            f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens; one each is required."
        )
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise ValueError(f"tokenizer.ggml.tokens names {len(tokens) - len(ids)} tokens twice.")
    ends = {int(need("eos_token_id"))}
    if (turn := metadata.get("tokenizer.ggml.eot_token_id")) is not None:
        ends.add(int(turn))
    named = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        if (index := metadata.get(f"tokenizer.ggml.{theirs}_token_id")) is not None:
            if not 0 <= int(index) < len(tokens):
                raise ValueError(f"tokenizer.ggml.{theirs}_token_id={index} is outside the vocabulary.")
            named[f"{ours}_token"] = tokens[int(index)]
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", False)
    if adds_bos and bos is None:
        raise ValueError("tokenizer.ggml.add_bos_token=True needs 'tokenizer.ggml.bos_token_id'.")
    special = {token: index for token, index in ids.items() if kinds[index] == _CONTROL}
    added = [token for token, index in ids.items() if kinds[index] == _USER_DEFINED]
    prefix = [int(bos)] if adds_bos and bos is not None else []
    return TokenizerParts(
        backend=_bpe(ids, need("merges"), pre, special, added, [tokens[index] for index in prefix]).to_str(),
        special_tokens=special,
        named=named,
        eos_ids=frozenset(ends),
        pad_id=int(metadata.get("tokenizer.ggml.padding_token_id", need("eos_token_id"))),
        chat_template=metadata.get("tokenizer.chat_template"),
        prefix=prefix,
    )


def _bpe(
    ids: dict[str, int], merges: Iterable[str], pre: str, special: Iterable[str], added: list[str], prefix: list[str]
) -> Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    pairs = [(left, right) for left, _, right in (pair.partition(" ") for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=pairs, ignore_merges=pre == "llama-bpe"))
    if pre in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
        steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
        steps = [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    if prefix:  # for other readers of the tokenizer: ours adds nothing by itself
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*prefix, "$A"], special_tokens=[(token, ids[token]) for token in prefix]
        )
    return tokenizer


def directory_parts(directory: str | Path) -> TokenizerParts:
    """From ``tokenizer.json``, ``tokenizer_config.json``, ``chat_template.jinja`` and ``generation_config.json``.

    The end tokens are those of all of these and of ``config.json``: instruction-tuned models often name the end of a
    turn in one of them alone.

    Raises:
      FileNotFoundError: there is no ``tokenizer.json``.
      ValueError: a file that cannot be read, or that names no end token, or one that is not in the vocabulary.
    """
    from tokenizers import Tokenizer

    root = Path(directory)
    file = root / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; a tokenizer needs it.")
    backend = file.read_text(encoding="utf-8")
    try:
        tokenizer = Tokenizer.from_str(backend)
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"{file} is not a tokenizer that the tokenizers library reads: {error}") from error
    settings, generation, model = (
        _json(root / name) for name in ("tokenizer_config.json", "generation_config.json", "config.json")
    )
    named = {name: text for name in ("bos", "eos", "pad", "unk") if (text := _token(settings, f"{name}_token"))}
    known = {name: tokenizer.token_to_id(text) for name, text in named.items()}
    ids = {name: index for name, index in known.items() if index is not None}
    if missing := [named[name] for name in ("bos", "eos", "pad") if name in known and name not in ids]:
        raise ValueError(f"{root / 'tokenizer_config.json'} names {missing[0]!r}, which {file} does not have.")
    ends: set[int] = {ids["eos"]} if "eos" in ids else set()
    for source in (generation, model):
        value = source.get("eos_token_id")
        ends |= set(value if isinstance(value, list) else [] if value is None else [value])
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if not ends or not all(isinstance(end, int) and end >= 0 for end in ends):
        raise ValueError(f"{root}: the end tokens are {sorted(ends, key=str)}; at least one id is required.")
    special = {token.content: index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    ends = {end for end in ends if tokenizer.id_to_token(end) is not None}
    if not ends:
        raise ValueError(f"{root}: none of the end tokens is among the {size} of the vocabulary.")
    probe = tokenizer.encode("", add_special_tokens=True).ids
    adds = bool(settings.get("add_bos_token", bool(probe)))
    prefix = [ids["bos"]] if adds and "bos" in ids else []
    return TokenizerParts(
        backend=backend,
        special_tokens=special,
        named={f"{name}_token": text for name, text in named.items()},
        eos_ids=frozenset(ends),
        pad_id=ids.get("pad", min(ends)),
        chat_template=_template(root, settings),
        prefix=prefix,
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}).") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object.")
    return value


def _token(settings: Mapping[str, Any], name: str) -> str:
    """A token's text, which may stand in an object of its own."""
    value = settings.get(name)
    return str(value["content"]) if isinstance(value, dict) and "content" in value else str(value or "")


def _template(root: Path, settings: Mapping[str, Any]) -> str | None:
    """A template in a file of its own, or in the settings; of several there, the one called ``default``."""
    file = root / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    value = settings.get("chat_template")
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        if not isinstance(named.get("default"), str):
            raise ValueError(f"{root}: of its chat templates ({', '.join(map(str, named))}) none is called 'default'.")
        value = named["default"]
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{root}: chat_template holds a {type(value).__name__}; a text is required.")
    return value
