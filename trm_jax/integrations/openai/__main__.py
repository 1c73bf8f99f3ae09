"""``python -m trm_jax.integrations.openai ADDRESS CHECKPOINT``: does this server sample what this checkpoint says?"""

from __future__ import annotations

import argparse
import json
import sys

import numpy as np

from trm_jax.integrations.openai import Cuts, OpenAIEngine, ServerFailed, ServerOptions
from trm_jax.integrations.openai._agreement import measure_agreement
from trm_jax.models import load_pretrained
from trm_jax.models.pretrained import load_tokenizer
from trm_jax.rollout import EngineConfig, SamplingConfig
from trm_jax.types import PromptBatch

_QUESTIONS = ("What is {0} + {1}?", "Write a sentence about the number {0}.", "Name {1} animals.", "Count from {0} on.")


def main(argv: list[str] | None = None) -> int:
    """Prints one JSON line; 1 when the server is unfit or away."""
    parser = argparse.ArgumentParser(prog="python -m trm_jax.integrations.openai", description=__doc__)
    parser.add_argument("address", help="http://host:port")
    parser.add_argument("checkpoint", help="Hugging Face directory or GGUF file that the server serves")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32, help="longest response")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--support-tokens", type=int, default=0, help="top log-probs that record what top-p left")
    args = parser.parse_args(argv)
    model, tokenizer = load_pretrained(args.checkpoint), load_tokenizer(args.checkpoint)
    texts = [_QUESTIONS[i % len(_QUESTIONS)].format(7 * i % 19, 5 * i % 17 + 2) for i in range(args.prompts)]
    prompts = _batch([tokenizer.encode(text) for text in texts])
    try:
        engine = OpenAIEngine(
            model,
            EngineConfig(max_prompt_length=prompts.tokens.shape[1], max_response_length=args.tokens),
            server=ServerOptions(address=args.address, faulty_rows="drop"),
            sampling=SamplingConfig(temperature=args.temperature, top_p=args.top_p),
            eos_ids=tokenizer.eos_ids,
            cuts=Cuts(support_tokens=args.support_tokens),
        )
        found = measure_agreement(engine, prompts, model)
    except (ValueError, ServerFailed) as error:
        print(error, file=sys.stderr)
        return 1
    said = {"dialect": engine.dialect, "logps": engine.logp_mode, "temperature": args.temperature, "top_p": args.top_p}
    print(json.dumps(said | {name: round(value, 12) for name, value in vars(found).items()}))
    return 0


def _batch(prompts: list[list[int]]) -> PromptBatch:
    longest = max(map(len, prompts))
    tokens, mask = np.zeros((len(prompts), longest), np.int32), np.zeros((len(prompts), longest), bool)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)], mask[row, : len(ids)] = ids, True
    rows = np.arange(len(prompts), dtype=np.int32)
    return PromptBatch(tokens=tokens, mask=mask, group_ids=rows, seeds=rows.astype(np.uint32))  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
