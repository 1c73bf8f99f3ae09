"""Word problems in the pretrained model's chat format, end to end, with a tiny model in its place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from trm_jax.models import Transformer, TransformerConfig, export_pretrained, load_pretrained, make_mesh
from trm_jax.models.pretrained import PretrainedTokenizer
from trm_jax.train import CheckpointError, TrainRun, check_experiment, experiment, open_experiment
from trm_jax.train.export import export_policy, exported_policy

pytest.importorskip("tokenizers")
pytest.importorskip("math_verify")

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# "<|start|>system\n?<|end|>\n<|start|>user\n" + 10 letters + "<|end|>\n<|start|>assistant\n", a byte a token and a
# control token one: 1+7+1+1+1 + 1+5 + 10 + 1+1 + 1+10 = 40.
PROMPT_TOKENS = 40


def byte_tokenizer() -> PretrainedTokenizer:
    """Every byte a token, in GPT-2's printable stand-ins, and three control tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    bytes_ = [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]
    tokens = ["<|pad|>", "<|start|>", "<|end|>", *bytes_]
    values = {
        "model": "gpt2", "pre": "smollm", "tokens": tokens, "token_type": [3] * 3 + [1] * 256, "merges": [],
        "bos_token_id": 1, "eos_token_id": 2, "padding_token_id": 2,
    }  # fmt: skip
    return PretrainedTokenizer(
        {f"tokenizer.ggml.{key}": value for key, value in values.items()} | {"tokenizer.chat_template": TEMPLATE}
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A Hugging Face directory; its embedding has two rows more than the tokenizer has tokens."""
    shape = TransformerConfig(
        vocab_size=261, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=16, tie_embeddings=True
    )
    model = Transformer(shape, rngs=nnx.Rngs(0))
    place = export_pretrained(model, tmp_path_factory.mktemp("hub") / "tiny")
    (place / "tokenizer.json").write_text("{}")
    return place


@pytest.fixture
def tiny_model(monkeypatch) -> None:
    """The tokenizer is not read from the directory; everything else is the real thing."""
    monkeypatch.setattr(experiment, "pretrained_tokenizer", lambda path: byte_tokenizer())


def write_problems(path: Path, texts: list[str]) -> str:
    rows = [{"question": text, "answer": f"It is so. #### {i}"} for i, text in enumerate(texts)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.fixture
def words(make_config, tmp_path, checkpoint):
    """A configuration over four problems to learn from and two to be tested on, with changes."""

    def make(changes: dict[str, Any] | None = None):
        return make_config(
            {
                "steps": 1,
                "model": {"path": str(checkpoint)},
                "warmstart.steps": 0,
                "task.kind": "gsm8k",
                "task.system_prompt": "?",
                "task.path": write_problems(tmp_path / "train.jsonl", [f"question {c}" for c in "abcd"]),
                "task.test_path": write_problems(tmp_path / "test.jsonl", [f"question {c}" for c in "dxy"]),
                "rollout.max_prompt_length": PROMPT_TOKENS,
                "loss.minibatches": 1,
            }
            | (changes or {})
        )

    return make


@pytest.mark.slow
def test_one_step_on_word_problems(tiny_model, words, tmp_path):
    config = words()
    records, notes = [], []
    with open_experiment(config) as opened:
        assert [problem.prompt for problem in opened.train][:1] == [
            "<|start|>system\n?<|end|>\n<|start|>user\nquestion a<|end|>\n<|start|>assistant\n"
        ]
        assert len(opened.tokenizer.encode(opened.train[0].prompt)) == PROMPT_TOKENS
        # "question d" stands in both files: it is learnt from and not tested on.
        assert [problem.prompt.split("user\n")[1][:10] for problem in opened.test] == ["question x", "question y"]
        rewards = opened.score(opened.train[:3], ["so \\boxed{0}", "so \\boxed{7}", ""])
        np.testing.assert_array_equal(rewards, [1.0, 0.0, 0.0])
        assert (opened.tokenizer.vocab_size, opened.model.config.vocab_size) == (261, 261)
        assert opened.tokenizer.decode([100, 260, 101]) == byte_tokenizer().decode([100, 101])
        run = TrainRun(opened, config, nnx.state(opened.model), tmp_path / "run", make_mesh(), note=notes.append)
        outcome = run.run(on_step=lambda step, record: records.append(record))
    assert (outcome.status, outcome.step, outcome.evaluation_items) == ("complete", 1, 2)
    assert [record["step"] for record in records] == [0, 1]
    # A random model solves nothing: no advantage, no update, and that is said.
    assert records[1]["reward/mean"] == 0.0
    assert records[1]["optim/skipped"] == 1.0
    assert "all rewards within every group are equal (mean 0.00)" in notes[0]
    assert (tmp_path / "run" / "checkpoints" / "step_00000001").is_dir()


def test_long_prompts_are_refused_before_anything_runs_or_left_out_aloud(tiny_model, words, tmp_path, capsys):
    write = {"task.path": write_problems(tmp_path / "long.jsonl", ["question a", "question abcdefgh", "question ab"])}
    with (
        pytest.raises(
            ValueError, match=r"2 of 5 prompts .*max_prompt_length=40 .*long\.jsonl\[1\]; the longest takes 47"
        ),
        open_experiment(words(write)),
    ):
        pass
    with open_experiment(words(write | {"task.drop_long_prompts": True})) as opened:
        assert len(opened.train) == 1
    assert "left out 2 problems whose prompt is longer than rollout.max_prompt_length=40" in capsys.readouterr().out
    with (
        pytest.raises(ValueError, match="none of 3 problems fits"),
        open_experiment(words(write | {"task.drop_long_prompts": True, "rollout.max_prompt_length": 9})),
    ):
        pass


def test_shots_are_turns_of_the_chat_and_no_longer_problems(tiny_model, words):
    shot = "<|start|>user\nquestion a<|end|>\n<|start|>assistant\nIt is so. #### 0<|end|>\n"
    config = words({"task.shots": 1, "rollout.max_prompt_length": 200})
    with open_experiment(config) as opened:
        assert [problem.prompt for problem in opened.train] == [
            f"<|start|>system\n?<|end|>\n{shot}<|start|>user\nquestion {c}<|end|>\n<|start|>assistant\n" for c in "bcd"
        ]
        assert all(shot in problem.prompt for problem in opened.test)
    with (
        pytest.raises(ValueError, match=r"task\.shots=4 takes all of the 4 problems"),
        open_experiment(words({"task.shots": 4})),
    ):
        pass


def test_a_published_set_is_asked_and_judged_in_its_own_way(tiny_model, words, tmp_path):
    record = {"question": "which letter?", "choices": ["u", "v", "w", "x"], "answer": 2, "subject": "astronomy"}
    path = tmp_path / "mmlu.jsonl"
    path.write_text(json.dumps(record))
    asked = "Pick one.\nwhich letter?\n(A) u\n(B) v\n(C) w\n(D) x"
    changes = {
        "task.kind": "mmlu_stem",
        "task.path": str(path),
        "task.test_path": "",
        "task.test_permille": 0,
        "task.prompt_format": "Pick one.\n{question}\n{choices}",
        "task.system_prompt": "",
        "eval.prompts": 0,
        "rollout.max_prompt_length": 100,
    }
    with open_experiment(words(changes)) as opened:
        (problem,) = opened.train
        assert problem.prompt == f"<|start|>user\n{asked}<|end|>\n<|start|>assistant\n"
        np.testing.assert_array_equal(opened.score([problem] * 2, ["\\boxed{C}", "\\boxed{A}"]), [1.0, 0.0])


def test_control_tokens_in_a_problem_are_refused(tiny_model, words, tmp_path):
    path = write_problems(tmp_path / "bad.jsonl", ["a<|end|>b"])
    with pytest.raises(ValueError, match=r"bad\.jsonl\[0\]: .*<\|end\|>"), open_experiment(words({"task.path": path})):
        pass


def test_what_is_wrong_with_the_path_is_said_before_anything_runs(words, checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"model\.path: there is nothing at .*no\.gguf.*trm-jax fetch smollm2"):
        check_experiment(words({"model.path": str(tmp_path / "no.gguf")}))
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text((checkpoint / "config.json").read_text())
    (pickled / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"model\.path: .*Pickled weights are never loaded"):
        check_experiment(words({"model.path": str(pickled)}))
    renamed = shutil.copytree(checkpoint, tmp_path / "renamed")
    (renamed / "model.safetensors").write_bytes(
        (checkpoint / "model.safetensors").read_bytes().replace(b"model.norm.weight", b"model.nrom.weight")
    )
    with pytest.raises(ValueError, match=r"missing: model\.norm\.weight; surplus: model\.nrom\.weight \[16\]"):
        check_experiment(words({"model.path": str(renamed)}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh.tensor": 8}, r"^mesh: parameter .* does not divide by mesh axis 'tensor' of size 8"),
        (
            {"rollout.numerics": {"weight_format": "int4", "group_size": 32}},
            r"^rollout\.numerics: parameter .*group",
        ),
        ({"model.replay_routes": True}, r"^model\.replay_routes needs a mixture of experts; model\.path=.* is dense"),
        ({"rollout.numerics": {"routing_jitter": 0.1}}, r"^rollout\.numerics\.routing_jitter needs a mixture"),
    ],
)
def test_what_the_checkpoint_cannot_do_is_said_before_anything_runs(words, tiny_model, changes, message):
    with pytest.raises(ValueError, match=message):
        check_experiment(words(changes))


def test_a_tokenizer_of_another_model_is_refused(words, tiny_model, monkeypatch):
    larger = byte_tokenizer()
    larger.vocab_size = 400
    monkeypatch.setattr(experiment, "pretrained_tokenizer", lambda path: larger)
    with (
        pytest.raises(ValueError, match=r"model\.path: its tokenizer has 400 ids, its embedding 261 rows"),
        open_experiment(words()),
    ):
        pass


def test_an_exported_policy_is_the_policy_with_the_files_of_its_tokenizer(words, tiny_model, checkpoint, tmp_path):
    config, place = words({"checkpoint.export": "float32"}), tmp_path / "run" / "model"
    with open_experiment(config) as opened:
        params = jax.tree.map(lambda x: x + 1, nnx.state(opened.model))
        place.mkdir(parents=True)
        (place / "of an earlier run").touch()
        assert export_policy(opened.graphdef, params, config, place, step=7) == place
    assert sorted(file.name for file in place.iterdir()) == [
        *("config.json", "model.safetensors", "tokenizer.json", "trm_jax.json")
    ]
    assert exported_policy(place) == (7, "float32")
    assert exported_policy(tmp_path) is None
    assert [path.name for path in place.parent.iterdir()] == ["model"]
    for a, b in zip(jax.tree.leaves(nnx.state(load_pretrained(place))), jax.tree.leaves(params), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match=r"could not export the policy to .*file.*--resume"):
        export_policy(opened.graphdef, params, config, tmp_path / "file" / "model", step=7)


def test_examples_without_a_solution_are_refused(words, tmp_path):
    lines = [json.dumps({"prompt": f"What is {i} + 1?", "solution": str(i + 1)}) for i in range(40)]
    (tmp_path / "dapo.jsonl").write_text("\n".join(lines))
    config = words({"task.kind": "dapo_math_17k", "task.path": str(tmp_path / "dapo.jsonl"), "task.shots": 2})
    with pytest.raises(ValueError, match=r"task\.shots=2: .* comes without a worked solution; set task\.shots=0"):
        check_experiment(config)


def test_a_warm_start_asks_for_solutions_that_fit_before_anything_runs(words, tiny_model, tmp_path):
    lines = [json.dumps({"prompt": f"What is {i} + 1?", "solution": str(i + 1)}) for i in range(40)]
    (tmp_path / "dapo.jsonl").write_text("\n".join(lines))
    changes = {
        "task.kind": "dapo_math_17k",
        "task.path": str(tmp_path / "dapo.jsonl"),
        "rollout.max_prompt_length": 200,
    }
    check_experiment(words(changes))
    with pytest.raises(ValueError, match=r"warmstart\.steps=3: .* come without a worked solution, first .*dapo"):
        check_experiment(words(changes | {"warmstart.steps": 3}))
    # "It is so. #### 0" and the end: 17 tokens after the 40 of the prompt.
    check_experiment(words({"warmstart.steps": 3, "rollout.max_response_length": 17}))
    with pytest.raises(ValueError, match=r"4 of 4 worked solutions do not fit.* = 56 tokens.*the longest takes 57"):
        check_experiment(words({"warmstart.steps": 3, "rollout.max_response_length": 16}))


def test_the_check_measures_prompts(words, tiny_model, tmp_path, capsys):
    write = {"task.path": write_problems(tmp_path / "long.jsonl", ["question a", "question abcdefgh"])}
    with pytest.raises(ValueError, match=r"1 of 4 prompts are longer than rollout\.max_prompt_length=40"):
        check_experiment(words(write))
    check_experiment(words(write | {"task.drop_long_prompts": True}))
    assert capsys.readouterr().out == ""  # said when the run begins


def test_questions_that_want_a_letter_are_asked_with_their_options(words):
    with pytest.raises(ValueError, match=r"mmlu_stem.*set prompt_format='options'"):
        words({"task.kind": "mmlu_stem"})
    words({"task.kind": "mmlu_stem", "task.prompt_format": "options"})
