"""Tokens a second of one model sampled by a plain jitted loop, by both engines in process, and by the server.

    python tools/bench/serving.py --out serving.json

All in one run, taking turns, on the same prompts: ``--requests`` prompts of ``--prompt`` tokens, each answered with
exactly ``--response`` tokens (there is no end token), ``--slots`` at a time. "plain" is prefill and one ``while_loop``
that samples and keeps tokens and log-probs, nothing else. "in_process" is ``InProcessEngine.generate``, "driver" is
``JetStreamEngine.generate``, JetStream's driver in this process. "served" is the server in a process of its own and a
client in this one with ``--concurrency`` calls in flight, whole completions.
Compilation is not counted. CPU seconds of both processes stand beside wall seconds: where client and server share the
cores with the model, the client's work is in the wall's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trm_jax.integrations.jetstream import JetStreamEngine, RolloutServer, ServerOptions
from trm_jax.models import ComputeConfig, Transformer, TransformerConfig, head_log_probs, init_cache
from trm_jax.rollout import Engine, EngineConfig, InProcessEngine, RolloutNumerics, SamplingConfig, SlotEngine
from trm_jax.serve import Access, Connection, RolloutClient, SampleRequest
from trm_jax.types import PromptBatch


def build(args: argparse.Namespace) -> tuple[Transformer, EngineConfig]:
    """The same model in both processes."""
    shape = TransformerConfig(
        vocab_size=args.vocab,
        d_model=args.d_model,
        n_layers=args.layers,
        n_heads=8,
        n_kv_heads=4,
        head_dim=args.d_model // 8,
        d_ff=3 * args.d_model,
    )
    config = EngineConfig(
        slots=args.slots,
        prefill_rows=args.slots,
        decode_chunk=args.chunk,
        max_prompt_length=args.prompt,
        max_response_length=args.response,
    )
    return Transformer(shape, rngs=nnx.Rngs(0)), config


def make_plain(model: Transformer, config: EngineConfig) -> Callable[[np.ndarray, np.ndarray], Any]:
    """``[slots, P]`` prompts and seeds to tokens and log-probs, one jitted function."""
    graphdef, params = nnx.split(model, nnx.Param)
    compute, length = ComputeConfig(), config.max_response_length

    @jax.jit
    def run(params: Any, prompts: jax.Array, seeds: jax.Array) -> tuple[jax.Array, jax.Array]:
        merged: Transformer = nnx.merge(graphdef, params)
        rows, width = prompts.shape
        positions = jnp.broadcast_to(jnp.arange(width), prompts.shape)
        empty = init_cache(merged.config, rows, config.sequence_length, compute)
        cache = merged(prompts, positions=positions, cache=empty, compute=compute).cache
        keys = jax.vmap(jax.random.key)(seeds)

        def body(carry: Any) -> Any:
            step, token, cache, tokens, logps = carry
            position = jnp.full((rows, 1), width - 1) + step
            out = merged(token[:, None], positions=position, cache=cache, compute=compute)
            row = head_log_probs(out.hidden[:, 0], merged.head(), temperature=1.0, compute=compute)
            token = jax.vmap(lambda key, p: jax.random.categorical(jax.random.fold_in(key, step), p))(keys, row)
            logp = jnp.take_along_axis(row, token[:, None], axis=1)[:, 0]
            token = token.astype(jnp.int32)
            return step + 1, token, out.cache, tokens.at[:, step].set(token), logps.at[:, step].set(logp)

        shape = (rows, length)
        start = (0, prompts[:, -1], cache, jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
        _, _, _, tokens, logps = jax.lax.while_loop(lambda carry: carry[0] < length, body, start)
        return tokens, logps

    return lambda prompts, seeds: jax.tree.map(np.asarray, run(params, prompts, seeds))


def plain(run: Callable[..., Any], prompts: np.ndarray, slots: int) -> np.ndarray:
    """All requests, a batch of ``slots`` at a time."""
    seeds = np.arange(len(prompts), dtype=np.uint32)
    return np.concatenate([run(prompts[i : i + slots], seeds[i : i + slots])[0] for i in range(0, len(prompts), slots)])


def in_process(engine: Engine, prompts: np.ndarray) -> np.ndarray:
    """All requests through the engine; the tokens."""
    count = len(prompts)
    batch = PromptBatch(
        tokens=jnp.asarray(prompts),
        mask=jnp.ones(prompts.shape, bool),
        group_ids=jnp.arange(count, dtype=jnp.int32),
        seeds=jnp.arange(count, dtype=jnp.uint32),
    )
    rollout = engine.generate(batch)
    jax.block_until_ready(rollout.rollout_logps)
    return np.asarray(rollout.response_tokens)


def serve(args: argparse.Namespace) -> None:
    """The server process: prints its address, then its CPU seconds for every line on standard input."""
    model, config = build(args)
    engine = SlotEngine(model, config, numerics=RolloutNumerics(), eos_ids=(), record_hidden=False)
    with RolloutServer(engine, model, sampling=SamplingConfig(), access=Access(), options=ServerOptions()) as server:
        print(server.target, flush=True)
        for _ in sys.stdin:
            print(time.process_time(), flush=True)


def measure(fn: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    fn()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("slots", 64), ("requests", 192), ("prompt", 16), ("response", 64), ("chunk", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("d-model", 512), ("layers", 8), ("vocab", 8192), ("concurrency", 64), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return 0

    model, config = build(args)
    prompts = np.random.default_rng(0).integers(0, args.vocab, (args.requests, args.prompt)).astype(np.int32)
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    run = make_plain(model, config)
    kind: dict[str, Any] = {"numerics": RolloutNumerics(), "sampling": SamplingConfig(), "eos_ids": ()}
    engine = InProcessEngine(model, config, record_hidden=False, **kind)
    driver = JetStreamEngine(model, config, record_hidden=False, **kind)
    for each in (engine, driver):
        each.update_weights(0, nnx.state(model, nnx.Param))
    requests = [
        SampleRequest(prompt=row.tolist(), seeds=[seed], max_tokens=args.response) for seed, row in enumerate(prompts)
    ]
    child = subprocess.Popen(
        [sys.executable, __file__, "--serve", *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None

    def server_cpu() -> float:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("\n")
        child.stdin.flush()
        return float(child.stdout.readline())

    try:
        target = child.stdout.readline().strip()
        with RolloutClient(Connection(target=target, concurrency=args.concurrency)) as client:
            client.generate(requests[:1])  # compiles what serves few, then all, as do the next two
            answers = client.generate(requests)
            tokens = plain(run, prompts, args.slots)
            found = {
                "in_process": in_process(engine, prompts),
                "driver": in_process(driver, prompts),
                "served": np.stack([done.tokens for (done,) in answers]),
            }
            total = tokens.size
            same = {name: float(np.mean(theirs == tokens)) for name, theirs in found.items()}
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in ("plain", *found)}
            for _ in range(args.repeats):
                times["plain"].append(measure(lambda: plain(run, prompts, args.slots)))
                times["in_process"].append(measure(lambda: in_process(engine, prompts)))
                times["driver"].append(measure(lambda: in_process(driver, prompts)))
                before = server_cpu()
                wall, cpu = measure(lambda: client.generate(requests))
                times["served"].append((wall, cpu + server_cpu() - before))
                report(args, times, {"parameters": parameters, "tokens_a_run": total, "tokens_as_plain": same})
    finally:
        driver.close()
        child.kill()
        child.wait()
    return 0


def report(args: argparse.Namespace, times: dict[str, list[tuple[float, float]]], facts: dict[str, Any]) -> None:
    """What has been measured so far, printed and written."""
    total = facts["tokens_a_run"]
    rate = {name: total / statistics.median(wall for wall, _ in values) for name, values in times.items()}
    per_cpu = {name: total / statistics.median(cpu for _, cpu in values) for name, values in times.items()}
    print(f"after {len(times['plain'])} of each, load {os.getloadavg()[0]:.1f}:")
    for name in times:
        share, cpu_share = rate[name] / rate["plain"], per_cpu[name] / per_cpu["plain"]
        cpu = f"{per_cpu[name]:9.0f} a CPU second ({cpu_share:.2f})"
        print(f"{name:>10}: {rate[name]:9.0f} tokens/s ({share:.2f}), {cpu}", flush=True)
    if args.out is None:
        return
    found = {
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "options": {key: value for key, value in vars(args).items() if key not in ("out", "serve")},
        **facts,
        "seconds": times,
        "tokens_a_second": rate,
        "tokens_a_cpu_second": per_cpu,
    }
    args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
