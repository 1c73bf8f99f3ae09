"""``trm-jax eval``."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

__all__ = ["Eval"]


@dataclasses.dataclass(frozen=True)
class Eval:
    """Ask a checkpoint the problems of benchmarks, judge its answers, and print accuracies with 95% intervals.

    The checkpoint is a Hugging Face directory, a .gguf file, smollm2 (see fetch), or the directory of one run of
    `trm-jax train` (RUN/arms/ARM/seedN, at its newest checkpoint). Each benchmark is NAME=PATH, a file as its authors
    publish it: `trm-jax tasks benchmarks` lists names and sources. gsm8k_sample and one_step come with the package;
    heldout is what a run's own evaluation asks, with its worked examples (task.shots); benchmarks are asked without.
      trm-jax eval smollm2 gsm8k=test.jsonl math500=math500.json --max-new-tokens 256
      trm-jax eval Qwen3-8B aime25=aime25.jsonl --samples 32 --temperature 1 --top-p 0.95 --max-new-tokens 8192
    The directory gets a JSON line an answer and results.json. A run that was interrupted, even by kill -9, goes on with
    --resume where it stopped, and ends with the same answers.
    """

    checkpoint: Annotated[str, tyro.conf.Positional]
    """Hugging Face directory, .gguf file, smollm2, or RUN/arms/ARM/seedN."""
    benchmarks: Annotated[tuple[str, ...], tyro.conf.Positional]
    """NAME=PATH, or gsm8k_sample, one_step, heldout."""
    directory: Path = Path("runs/eval")
    """Where answers and results go."""
    samples: int = 1
    """Answers a problem: k of avg@k."""
    temperature: float = 0.0
    """Sampling temperature; 0 takes the most likely token."""
    top_p: float = 1.0
    """Nucleus mass; 1 keeps the whole vocabulary."""
    max_new_tokens: int = 1024
    """Longest answer in tokens."""
    limit: int = 0
    """Only the first so many problems of each benchmark; 0 takes all."""
    prompt_format: str = ""
    """Instead of each benchmark's own: question, boxed, boxed_short, hashes, answer_line, options, or a template with
    {question} in it."""
    chat: Literal["auto", "chat", "plain"] = "auto"
    """Prompts by the checkpoint's chat template (auto: where it has one), or plain. A run has its own way."""
    system: str = ""
    """System message of the chat; empty leaves it to the template."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A text at which an answer ends; may be given several times."""
    seed: int = 0
    """Seed of sampling."""
    slots: int = 16
    """Answers that are decoded together."""
    batch: int = 0
    """Answers between two writes to disk, what a kill may cost; 0 is four times slots."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations, of the key/value cache, and of the weights (a run's stay as they were trained)."""
    resume: bool = False
    """Go on with the evaluation that stands in the directory."""

    def run(self) -> int:
        from rich.console import Console

        from trm_jax.evaluation import EvaluationSettings, evaluation_table, open_policy, parse_task, run_evaluation
        from trm_jax.evaluation.progress import EvaluationProgress
        from trm_jax.train import is_run, open_run, run_config

        settings = EvaluationSettings(
            samples=self.samples,
            temperature=self.temperature,
            top_p=self.top_p,
            max_new_tokens=self.max_new_tokens,
            stop=self.stop,
            seed=self.seed,
            limit=self.limit,
            dtype=self.dtype,
            slots=self.slots,
            batch=self.batch,
        )
        tasks = [parse_task(b, prompt_format=self.prompt_format) for b in self.benchmarks if b != "heldout"]
        run = is_run(self.checkpoint)
        if run and (self.chat != "auto" or self.system):
            raise ValueError(
                f"--chat and --system: the run {self.checkpoint} is asked as its configuration says "
                "(task.system_prompt); leave them out"
            )
        if "heldout" in self.benchmarks and not run:
            raise ValueError(
                "heldout: only a run of `trm-jax train` (RUN/arms/ARM/seedN) has problems of its own; name a benchmark"
            )
        with contextlib.ExitStack() as stack:
            if run:
                policy, heldout = stack.enter_context(open_run(self.checkpoint))
                if "heldout" in self.benchmarks:
                    if heldout is None:
                        raise ValueError(f"heldout: the run {self.checkpoint} was made without any (eval.prompts=0)")
                    tasks.append(heldout)
                shots = run_config(self.checkpoint).task.shots
                if shots and self.benchmarks != ("heldout",):
                    print(
                        f"note: the {shots} worked examples of this run (task.shots) stand before its own heldout "
                        "problems alone; benchmarks are asked without any"
                    )
            else:
                policy = open_policy(self.checkpoint, chat=self.chat, system=self.system, dtype=self.dtype)
            progress = stack.enter_context(EvaluationProgress())
            results = run_evaluation(policy, tasks, settings, self.directory, resume=self.resume, progress=progress)
        Console().print(evaluation_table(results))
        print(f"results: {self.directory / 'results.json'}")
        return 0
