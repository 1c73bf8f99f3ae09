"""Makes ``tests/pretrained/chat_goldens.json`` with Transformers: chats as text and ids.

Run it in an environment of its own (the tests need only the file that it writes)::

    python -m venv /tmp/oracle && /tmp/oracle/bin/pip install transformers jinja2
    /tmp/oracle/bin/python tools/goldens/make_chat_goldens.py tests/pretrained/chat_goldens.json

Each family has a small tokenizer, trained on the spot, and a template of its own in the manner of well-known models:
where their tokenizers differ (splits, normalisers, spaces, beginning of sequence) and what their templates use. The
file holds the files of its directory, conversations, and for each what ``AutoTokenizer.apply_chat_template`` gave.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "What is 12 + 345? Let us add the numbers step by step: the answer is 357.",
    "user assistant system model helpful assistant. Please reason step by step, and put your final answer in a box.",
    "The capital of the country is a city. Find all integers n such that n^2 = 49; the answers are 7 and -7.",
]
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = pre_tokenizers.ByteLevel.alphabet()

CHATML = (  # a system message of its own unless the first message is one
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = """{%- if tools %}
    {{- raise_exception('no tools here') }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.last < 0 and message.role == "user" and not message.content.startswith('<tool>') %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
        {%- if loop.index0 > ns.last and '</think>' in message.content %}
            {%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {{- '<|im_start|>assistant\n<think>\n' + thought + '\n</think>\n\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""
HEADERS = (
    "{{- bos_token }}\n{%- if not date is defined %}\n    {%- set date = '26 Jul 2024' %}\n{%- endif %}\n"
    "{%- if messages[0]['role'] == 'system' %}\n    {%- set said = messages[0]['content'] | trim %}\n"
    "    {%- set messages = messages[1:] %}\n{%- else %}\n    {%- set said = '' %}\n{%- endif %}\n"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date + '\\n\\n' + said + '<|eot_id|>' }}\n"
    "{%- for message in messages %}\n    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}\n"
    "    {{- message['content'] | trim + '<|eot_id|>' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n{%- endif %}\n"
)
INSTRUCTIONS = (
    "{%- if messages[0].role == 'system' -%}{%- set said = messages[0].content -%}{%- set turns = messages[1:] -%}"
    "{%- else -%}{%- set turns = messages -%}{%- endif -%}{{ bos_token }}{% for turn in turns %}"
    "{% if (turn.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if turn.role == 'user' %}{% if loop.first and said is defined %}{{ '[INST] ' + said + '\n\n' + turn.content }}"
    "{% else %}{{ '[INST] ' + turn.content }}{% endif %}{{ ' [/INST]' }}"
    "{% else %}{{ ' ' + turn.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
TURNS = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}{% set role = 'model' %}"
    "{% else %}{% set role = message.role %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
MARKS = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{%- set ns = namespace(said='') -%}{%- for m in messages -%}{%- if m.role == 'system' -%}"
    "{%- set ns.said = m.content -%}{%- endif -%}{%- endfor -%}{{ bos_token }}{{ ns.said }}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{{ '<｜User｜>' + m.content }}{%- endif -%}"
    "{%- if m.role == 'assistant' and m.content is not none -%}"
    "{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{%- endif -%}{%- endfor -%}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"
)


def trained(
    special: list[str], steps: list[Any], *, byte_level: bool = True, ignore_merges: bool = False, size: int = 330
) -> Tokenizer:
    """A BPE over bytes, or over characters with bytes for what is unknown, with these pre-tokenizers."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=not byte_level, unk_token=None if byte_level else "<unk>"))
    if steps:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    fallback = [] if byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=size + len(fallback),
        special_tokens=[*special, *fallback],
        initial_alphabet=BYTES if byte_level else [],
        show_progress=False,
    )
    texts = CORPUS if byte_level else [text.replace(" ", "▁") for text in CORPUS]
    tokenizer.train_from_iterator(texts, trainer)
    raw = json.loads(tokenizer.to_str())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] in special]
    raw["model"]["ignore_merges"] = ignore_merges
    out = Tokenizer.from_str(json.dumps(raw))
    out.decoder = (
        decoders.ByteLevel()
        if byte_level
        else decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    )
    return out


def before(tokenizer: Tokenizer, token: str) -> Tokenizer:
    """Adds the beginning of sequence to every text."""
    index = tokenizer.token_to_id(token)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, index)])
    return tokenizer


def byte_level(*, regex: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)


def families() -> dict[str, tuple[Tokenizer, dict[str, Any], dict[str, Any]]]:
    """Name → tokenizer, ``tokenizer_config.json``, ``generation_config.json``."""
    im = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    found: dict[str, tuple[Tokenizer, dict[str, Any], dict[str, Any]]] = {}
    digits = pre_tokenizers.Digits(individual_digits=True)
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    found["smollm"] = trained(im, [digits, byte_level(regex=True)]), {**named, "chat_template": CHATML}, {}

    split = pre_tokenizers.Split(Regex(LETTERS + r"\p{N}" + REST), behavior="isolated")
    qwen = trained(im, [split, byte_level(regex=False)])
    qwen.normalizer = normalizers.NFC()
    qwen.add_tokens([AddedToken(word, normalized=False) for word in ("<think>", "</think>")])
    settings = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": THINKING}
    found["qwen"] = qwen, settings, {"eos_token_id": [2, 0]}

    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
    split = pre_tokenizers.Split(Regex(LETTERS + r"\p{N}{1,3}" + REST), behavior="isolated")
    llama = before(trained(special, [split, byte_level(regex=False)], ignore_merges=True), special[0])
    settings = {"bos_token": special[0], "eos_token": "<|end_of_text|>", "chat_template": HEADERS}
    found["llama3"] = llama, settings, {"eos_token_id": [1, 2]}

    mistral = trained(["<unk>", "<s>", "</s>"], [], byte_level=False)
    mistral.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": INSTRUCTIONS}
    found["mistral"] = before(mistral, "<s>"), settings, {}

    words = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    gemma = trained(words, [], byte_level=False)
    gemma.normalizer = normalizers.Replace(" ", "▁")
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "chat_template": TURNS}
    found["gemma"] = before(gemma, "<bos>"), settings, {"eos_token_id": [1, 5]}

    marks = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
    steps = [pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), behavior="isolated"), byte_level(regex=True)]
    own = {name: {"__type": "AddedToken", "content": marks[at]} for at, name in enumerate(("bos_token", "eos_token"))}
    found["deepseek"] = before(trained(marks, steps), marks[0]), {**own, "chat_template": MARKS}, {}
    return found


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


CHATS = [
    [turn("user", "What is 12 + 345?")],
    [turn("system", "Be brief. "), turn("user", "  Find all n:\n\n $n^2 = 49$ <b>& more</b>\n")],
    [turn("user", "7é 北京 🙂"), turn("assistant", " 7 "), turn("user", "and 1,000.5?\t")],
    [turn("user", "Cafe\u0301 12345678"), turn("assistant", "<think>\n3 + 4\n</think>\n\nThe answer is 7.")],
]
PLAIN = ["", "the answer 1234 is", "  Two  spaces\nand a line", "naïve 北京 🙂"]


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    out: dict[str, Any] = {
        "versions": f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}",
        "families": {},
    }
    for name, (tokenizer, settings, generation) in families().items():
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **settings}
        with tempfile.TemporaryDirectory() as root:
            tokenizer.save(str(Path(root) / "tokenizer.json"), pretty=False)
            (Path(root) / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
            words = transformers.AutoTokenizer.from_pretrained(root)
            files = {
                "tokenizer.json": json.loads((Path(root) / "tokenizer.json").read_text(encoding="utf-8")),
                "tokenizer_config.json": settings,
                "generation_config.json": generation,
            }
        cases = []
        for messages in CHATS:
            ways: list[tuple[bool, dict[str, Any]]] = [(True, {}), (False, {})]
            ways += [(True, {"enable_thinking": False})] if name == "qwen" else []
            for prompt, options in ways:
                text = words.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **options)
                ids = words.apply_chat_template(messages, add_generation_prompt=prompt, **options)
                cases.append({"messages": messages, "prompt": prompt, "options": options, "text": text, "ids": ids})
        plain = [{"text": text, "ids": words(text)["input_ids"]} for text in PLAIN]
        out["families"][name] = {"files": files, "chats": cases, "plain": plain}
    args.out.write_text(json.dumps(out, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    print(args.out, args.out.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
