"""Makes ``tests/pretrained/smollm2_goldens.npz`` with PyTorch and Transformers: an oracle that shares no code with us.

Run it in an environment of its own (about 1.2 GB; the tests need only the file that it writes)::

    python -m venv /tmp/oracle && /tmp/oracle/bin/pip install torch transformers accelerate gguf
    python -m trm_jax.models.pretrained            # prints the path of the verified GGUF file
    /tmp/oracle/bin/python tools/goldens/make_smollm2_goldens.py PATH_OF_THE_GGUF tests/pretrained/smollm2_goldens.npz

Arrays (``S`` = 37 prompt tokens, float32 logits of the dequantised Q4_1 weights on CPU):

* ``prompt_ids`` ``[S]``: the chat prompt for ``question``, by Transformers' tokenizer and template;
* ``argmax`` ``[S]`` and ``logsumexp`` ``[S]`` (nats) of the next-token logits at every position;
* ``top_ids`` and ``top_logits`` ``[4, 16]``: the largest logits at the last four positions;
* ``hidden`` ``[2, 576]``: output of the final norm at the last two positions;
* ``greedy_ids`` ``[8]``: greedy continuation, up to and including the end-of-turn token;
* ``question``, ``versions``: text.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import transformers

QUESTION = "What is the capital of France?"
MAX_NEW_TOKENS = 16
TOP = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()

    source = {"pretrained_model_name_or_path": str(args.gguf.parent), "gguf_file": args.gguf.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)  # drops the digit split: the question has no digit
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, tokenize=False
    )
    prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]

    ids = list(prompt_ids)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0]
        while len(ids) < len(prompt_ids) + MAX_NEW_TOKENS and ids[-1] != tokenizer.eos_token_id:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))

    top = torch.topk(logits[-4:], TOP, dim=-1)
    np.savez_compressed(
        args.out,
        question=np.array(QUESTION),
        versions=np.array(f"torch {torch.__version__}, transformers {transformers.__version__}, {args.gguf.name}"),
        prompt_ids=np.array(prompt_ids, np.int32),
        argmax=logits.argmax(-1).numpy().astype(np.int32),
        logsumexp=torch.logsumexp(logits, -1).numpy(),
        top_ids=top.indices.numpy().astype(np.int32),
        top_logits=top.values.numpy(),
        hidden=hidden[-2:].numpy(),
        greedy_ids=np.array(ids[len(prompt_ids) :], np.int32),
    )
    print(args.out, args.out.stat().st_size, "bytes; greedy:", repr(tokenizer.decode(ids[len(prompt_ids) :])))


if __name__ == "__main__":
    main()
