"""An engine that answers by a rule, at once, in place of one that compiles."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flax import nnx

from trm_jax.data import CharTokenizer, Problem
from trm_jax.evaluation import EvaluationTask, Policy, _run
from trm_jax.models import Transformer, TransformerConfig

TOKENIZER = CharTokenizer("0123456789?=+ {}")


class RuleEngine:
    """Answers ``a+b=?`` by ``a+b`` when the row's seed is even (or under greedy sampling), else by one more."""

    calls: list[Any] = []  # noqa: RUF012 - a test empties it
    made: list[Any] = []  # noqa: RUF012 - the configurations of all engines
    stop: tuple[str, ...] = ()
    before_answer: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        model: Any,
        config: Any,
        *,
        numerics: Any,
        sampling: Any,
        eos_ids: Any,
        record_hidden: bool,
        record_support: bool,
        tokenizer: Any,
    ) -> None:
        self.config, self.sampling = config, sampling
        assert not record_hidden
        assert not record_support  # what only training needs
        assert tokenizer.decode([TOKENIZER.vocab_size, *TOKENIZER.encode("1")]) == "1"
        RuleEngine.made.append(config)
        RuleEngine.stop = sampling.stop

    def update_weights(self, version: int, params: Any) -> None:
        pass

    def generate(self, prompts: Any, sampling: Any = None, *, on_progress: Any = None) -> Any:
        RuleEngine.before_answer()
        for ended, tokens in ((0, 0), (1, 5)):  # as the real one: the first chunk is not read at once
            on_progress(ended, tokens)
        RuleEngine.calls.append(prompts)
        limit = self.config.max_response_length
        tokens = np.full((len(prompts.seeds), limit), TOKENIZER.pad_id)
        mask = np.zeros(tokens.shape, bool)
        finished = np.zeros(len(tokens), bool)
        for row, (ids, keep, seed) in enumerate(zip(prompts.tokens, prompts.mask, prompts.seeds, strict=True)):
            left, right = TOKENIZER.decode(ids[keep]).removesuffix("=?").split("+")
            value = int(left) + int(right) + (0 if self.sampling.greedy else int(seed) % 2)
            answer = [*TOKENIZER.encode(f"{value}"), TOKENIZER.eos_id][:limit]
            tokens[row, : len(answer)], mask[row, : len(answer)] = answer, True
            finished[row] = answer[-1] == TOKENIZER.eos_id
        return types.SimpleNamespace(response_tokens=tokens, response_mask=mask, finished=finished)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[RuleEngine]:
    monkeypatch.setattr(RuleEngine, "calls", [])
    monkeypatch.setattr(RuleEngine, "made", [])
    monkeypatch.setattr(_run, "InProcessEngine", RuleEngine)
    return RuleEngine


def tiny_model(vocab_size: int) -> Transformer:
    shape = TransformerConfig(
        vocab_size=vocab_size, d_model=8, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=4, d_ff=8, tie_embeddings=True
    )
    return Transformer(shape, rngs=nnx.Rngs(0))


@pytest.fixture(scope="session")
def policy() -> Policy:
    return Policy(
        name="rule",
        model=tiny_model(TOKENIZER.vocab_size),
        tokenizer=TOKENIZER,
        encode=TOKENIZER.encode,
        identity={"weights": "w"},
    )


def sums(count: int, name: str = "sums", **changes: Any) -> EvaluationTask:
    """Problem ``i`` is ``i+10``; every third reference is wrong, so that its right answer scores 0."""
    problems = [
        Problem(prompt=f"{i}+10=?", reference=str(i + 10 + (i % 3 == 2)), source="made", index=2 * i)
        for i in range(count)
    ]
    values: dict[str, Any] = {"reward": "number", "prompt_format": "question", "digest": "d", **changes}
    return EvaluationTask(name=name, problems=problems, **values)


@pytest.fixture
def task() -> Callable[..., EvaluationTask]:
    return sums
