"""Checkpoints as policies: prompts in the chat of the template or plain, and what makes two checkpoints differ."""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from trm_jax.evaluation import EvaluationSettings, EvaluationTask, open_policy, read_answers, run_evaluation
from trm_jax.models import Transformer, TransformerConfig, export_pretrained

tokenizers = pytest.importorskip("tokenizers")

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def checkpoint(
    root: Path, *, seed: int = 0, vocab: int = 128, template: str | None = TEMPLATE, dtype: str = "float32"
) -> Path:
    """A tiny random llama over ASCII characters, as a Hugging Face directory."""
    shape = TransformerConfig(
        vocab_size=128, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=16, tie_embeddings=True
    )
    export_pretrained(Transformer(shape, rngs=nnx.Rngs(seed)), root, dtype=dtype)
    words = {chr(code): code for code in range(vocab)} | {"<s>": 1, "</s>": 2}
    words = {word: index for word, index in words.items() if word not in ("\x01", "\x02")}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(root / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": template}
    (root / "tokenizer_config.json").write_text(json.dumps(settings))
    return root


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("policy") / "m")


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


def test_prompts(directory: Path) -> None:
    chat = [*ids("<user>1+1"), 2, *ids("<assistant>")]
    assert open_policy(directory).encode("1+1") == chat
    assert open_policy(directory, system="?").encode("1+1") == [*ids("<system>?"), 2, *chat]
    assert open_policy(directory, chat="plain").encode("1+1") == [1, *ids("1+1\n")]
    with pytest.raises(ValueError, match="contains the control token '</s>'"):
        open_policy(directory).encode("1</s>")
    assert 2 not in open_policy(directory, chat="plain").encode("1</s>")


def test_what_does_not_go_together(tmp_path: Path, directory: Path) -> None:
    bare = checkpoint(tmp_path / "bare", template=None)
    assert open_policy(bare).encode("1") == [1, *ids("1\n")]
    with pytest.raises(ValueError, match="carries no chat template; choose chat=plain"):
        open_policy(bare, chat="chat")
    with pytest.raises(ValueError, match="a plain prompt has no system message"):
        open_policy(bare, system="?")
    with pytest.raises(FileNotFoundError, match="there is no checkpoint 'nowhere'"):
        open_policy("nowhere")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"notes\.txt is a file, and not a \.gguf"):
        open_policy(tmp_path / "notes.txt")
    (tmp_path / "runs" / "arms" / "cis" / "seed0").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"is an experiment of 1 runs; .*such as .*arms.cis.seed0"):
        open_policy(tmp_path / "runs")
    with pytest.raises(ValueError, match="the tokenizer has 140 ids, the model 128"):
        open_policy(checkpoint(tmp_path / "large", vocab=140))


def test_another_checkpoint_has_another_identity(tmp_path: Path, directory: Path) -> None:
    identity = open_policy(directory).identity
    assert open_policy(directory).identity == identity
    assert open_policy(checkpoint(tmp_path / "other", seed=1)).identity != identity
    assert open_policy(checkpoint(tmp_path / "same")).identity == identity
    reworded = checkpoint(tmp_path / "reworded", template=TEMPLATE.replace("<assistant>", "<model>"))
    assert open_policy(reworded).identity != identity
    assert open_policy(directory, chat="plain").identity != identity


def test_the_context_is_what_the_files_say(tmp_path: Path, directory: Path) -> None:
    assert open_policy(directory).context == 4096
    long = checkpoint(tmp_path / "long")
    raw = json.loads((long / "config.json").read_text())
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    (long / "config.json").write_text(json.dumps(raw | {"rope_scaling": yarn}))
    assert open_policy(long).context == 16384
    (long / "config.json").write_text(json.dumps(raw | {"max_position_embeddings": None}))
    assert open_policy(long).context is None


def test_ids_of_a_padded_embedding_write_nothing(tmp_path: Path) -> None:
    policy = open_policy(checkpoint(tmp_path / "m", vocab=120))
    assert policy.tokenizer.vocab_size == 120 < policy.model.config.vocab_size
    tokens = np.array([[ord("4"), 127, ord("2"), 2, 0], [125, 126, 127, 127, 127]])
    rollout = types.SimpleNamespace(response_tokens=tokens, response_mask=tokens != 0, finished=np.array([True, False]))
    assert [(a.text, a.tokens, a.finished) for a in read_answers(rollout, policy.tokenizer)] == [
        ("42", 4, True),
        ("", 5, False),
    ]


@pytest.mark.slow
def test_the_engine_answers_for_real(tmp_path: Path, directory: Path) -> None:
    from trm_jax.data import Problem

    policy = open_policy(directory)
    problems = [
        Problem(prompt=text, reference="1", source="made", index=i) for i, text in enumerate(("1+1", "2", "33"))
    ]
    task = EvaluationTask(name="t", problems=problems, reward="number", prompt_format="boxed_short", digest="")
    for name, settings in {
        "greedy": EvaluationSettings(max_new_tokens=5, slots=2),
        "nucleus": EvaluationSettings(max_new_tokens=5, slots=2, samples=2, temperature=1.0, top_p=0.9),
        "bfloat16": EvaluationSettings(max_new_tokens=5, slots=2, dtype="bfloat16", stop=("a",)),
    }.items():
        found = run_evaluation(policy, [task], settings, tmp_path / name)["tasks"]["t"]
        assert (found["problems"], found["samples"]) == (3, settings.samples)
        rows = [json.loads(line) for line in (tmp_path / name / "t.jsonl").read_text().splitlines()]
        assert all(1 <= row["tokens"] <= 5 for row in rows)
        assert all(word not in row["response"] for row in rows for word in settings.stop)
    # Greedy by hand: the model on the whole text, token by token.
    row = [json.loads(line) for line in (tmp_path / "greedy" / "t.jsonl").read_text().splitlines()][1]
    text = policy.encode("2\nPlease put your final answer within \\boxed{}.")
    for _ in range(row["tokens"]):
        hidden = policy.model(np.asarray([text])).hidden[0, -1]
        text.append(int(np.argmax(np.asarray(policy.model.head()) @ np.asarray(hidden))))
    answer = [token for token in text[-row["tokens"] :] if token not in policy.tokenizer.eos_ids]
    assert row["response"] == policy.tokenizer.decode(answer)

    # A text of its second token ends the same answer there: nothing is decoded beyond.
    stop = policy.tokenizer.decode([answer[1]])
    settings = EvaluationSettings(max_new_tokens=5, slots=2, stop=(stop,))
    run_evaluation(policy, [dataclasses.replace(task, problems=problems[1:2])], settings, tmp_path / "stop")
    (stopped,) = [json.loads(line) for line in (tmp_path / "stop" / "t.jsonl").read_text().splitlines()]
    assert row["tokens"] > 2
    assert stopped["tokens"] <= 2
    assert stopped["response"] == row["response"][: row["response"].index(stop)]
    assert stopped["finished"]


@pytest.mark.slow
def test_a_bfloat16_checkpoint_gives_the_same_answers_from_weights_of_half_the_size(tmp_path: Path) -> None:
    from trm_jax.data import Problem

    saved = checkpoint(tmp_path / "m", dtype="bfloat16")
    problems = [Problem(prompt=f"{i}+1", reference="1", source="made", index=i) for i in range(4)]
    task = EvaluationTask(name="t", problems=problems, reward="number", prompt_format="question", digest="")
    settings = EvaluationSettings(max_new_tokens=6, slots=2, dtype="bfloat16")
    sizes, answers = [], []
    for dtype in ("float32", "bfloat16"):
        policy = open_policy(saved, dtype=dtype)
        sizes.append(sum(x.nbytes for x in jax.tree.leaves(nnx.state(policy.model, nnx.Param))))
        run_evaluation(policy, [task], settings, tmp_path / dtype)
        rows = [json.loads(line) for line in (tmp_path / dtype / "t.jsonl").read_text().splitlines()]
        answers.append([(row["index"], row["response"], row["tokens"]) for row in rows])
    assert sizes[0] == 2 * sizes[1]
    assert answers[0] == answers[1]
