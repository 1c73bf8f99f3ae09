"""A small server of true log-probs in three dialects, over real HTTP, that can be told to do wrong."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trm_jax.integrations.openai import Cuts, OpenAIEngine, ServerOptions
from trm_jax.models import ComputeConfig, Transformer, TransformerConfig, load_pretrained
from trm_jax.rollout import EngineConfig, SamplingConfig
from trm_jax.types import PromptBatch

VOCAB, PROMPT, RESPONSE = 13, 5, 6
EOS = (3, 7)
CONFIG = EngineConfig(max_prompt_length=PROMPT, max_response_length=RESPONSE)
DIALECTS = ("vllm", "sglang", "llama.cpp")
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
OWNER = {"vllm": "vllm", "sglang": "sglang", "llama.cpp": "llamacpp"}


@functools.cache
def make_model() -> Transformer:
    """Architecture and float32 weights from NumPy, large enough for distributions far from uniform."""
    config = TransformerConfig(vocab_size=VOCAB, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=16)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))), nnx.Param)
    rng = np.random.default_rng(0)

    def fill(variable: nnx.Variable[Any]) -> nnx.Variable[Any]:
        shape = variable.get_value().shape
        is_norm = "norm" in variable.get_metadata("logical_axes")
        filled = np.ones(shape) if is_norm else 1.5 * rng.standard_normal(shape) / np.sqrt(shape[-2])
        return variable.replace(jnp.asarray(filled, jnp.float32))

    model: Transformer = nnx.merge(graphdef, jax.tree.map(fill, params, is_leaf=lambda x: isinstance(x, nnx.Variable)))
    return model


@functools.partial(jax.jit, static_argnames="graphdef", compiler_options=QUICK_COMPILE)
def _logits(graphdef: Any, params: Any, ids: Any, last: Any) -> Any:
    model = nnx.merge(graphdef, params)
    return model(ids, compute=ComputeConfig()).hidden[0, last] @ model.head().T


class Policy:
    """A model's log-probs for one next token, in float64."""

    def __init__(self, model: Transformer) -> None:
        self._graphdef, self._params = nnx.split(model, nnx.Param)
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def __call__(self, ids: list[int], temperature: float) -> np.ndarray:
        if (context := tuple(ids)) not in self._known:
            padded = np.zeros((1, PROMPT + RESPONSE), np.int32)
            padded[0, : len(ids)] = ids
            at_one = _logits(self._graphdef, self._params, jnp.asarray(padded), jnp.int32(len(ids) - 1))
            self._known[context] = np.asarray(at_one, np.float64)
        logits = self._known[context] / temperature
        return logits - logits.max() - math.log(np.exp(logits - logits.max()).sum())


@functools.cache
def true_policy() -> Policy:
    """Of the model above; what it computed for one test it knows in the next."""
    return Policy(make_model())


def cut(logps: np.ndarray, top_p: float, top_k: int, min_p: float) -> np.ndarray:
    """Log-probs of what truncation leaves, minus infinity for the rest."""
    order = np.argsort(-logps, kind="stable")
    kept = np.zeros(VOCAB, bool)
    mass = 0.0
    for rank, i in enumerate(order):
        if rank and (mass >= top_p or rank >= (top_k if top_k > 0 else VOCAB)):
            break
        if math.exp(logps[i] - logps[order[0]]) >= min_p:
            kept[i], mass = True, mass + math.exp(logps[i])
    with np.errstate(divide="ignore"):
        return np.where(kept, logps - math.log(np.exp(logps[kept]).sum()), -np.inf)


@dataclasses.dataclass
class Response:
    """One sample before it is written in a dialect."""

    tokens: list[int]
    logps: list[Any]
    tops: list[list[tuple[int, float]]]
    finish: str


class ToyServer(ThreadingHTTPServer):
    """Samples truly; ``faults`` names what it then does wrong, ``busy`` what the next requests get instead."""

    daemon_threads = True

    def __init__(self, dialect: str, *, faults: set[str], mode: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.dialect, self.faults, self.mode, self.scheme = dialect, faults, mode, "http"
        self.busy: list[int] = []
        self.release = threading.Event()
        self.meeting: threading.Barrier | None = None  # where requests wait for one another
        self.policy, self.weights = true_policy(), "default"
        self.loads: list[str] = []
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.running = self.most = 0
        self.lock = threading.Lock()

    @property
    def address(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: Any) -> None:
        """Quiet when a client has gone."""

    def has(self, fault: str) -> bool:
        return fault in self.faults

    def load(self, directory: Path, name: str) -> None:
        self.policy, self.weights = Policy(load_pretrained(directory)), name
        self.loads.append(directory.name)

    def sample(self, prompt: list[int], seed: int | None, asked: dict[str, Any], top: int) -> Response:
        temperature, top_k = asked["temperature"], asked["top_k"]
        greedy = temperature == 0
        temperature = (temperature or 1.0) * (1.4 if self.has("own temperature") and temperature != 1 else 1.0)
        rng = np.random.default_rng(seed)
        out = Response([], [], [], "length")
        most = asked.get("max_tokens") or asked.get("max_new_tokens") or asked.get("n_predict")
        if most > 1:  # not the measurement's own requests
            most += self.has("runs on") - 2 * self.has("short context")
        for _ in range(most):
            context = prompt + out.tokens
            tempered = self.policy(context, temperature)
            drawn = cut(tempered, asked["top_p"], top_k, asked["min_p"])
            told = {"raw": self.policy(context, 1.0), "tempered": tempered, "processed": drawn}[self.mode]
            token = int(np.argmax(drawn)) if greedy else int(rng.choice(VOCAB, p=np.exp(drawn)))
            out.tokens.append(token)
            of_token = self.policy(context, 1.0) if self.has("two kinds") else told
            out.logps.append(max(float(of_token[token]), -9999.0))
            best = np.argsort(-told, kind="stable")[:top]
            out.tops.append([(int(i), max(float(told[i]), -9999.0)) for i in best])
            if token in EOS and not self.has("goes on"):
                out.finish = "stop"
                break
        self._spoil(out, most)
        return out

    def _spoil(self, out: Response, most: int) -> None:
        if most == 1:
            return  # the measurement's own requests
        bad = {"null": None, "nan": math.nan, "positive": 0.5, "sentinel": -9999.0}
        for name, value in bad.items():
            if self.has(f"{name} log-prob"):
                out.logps[-1] = value
        if self.has("few log-probs"):
            out.logps.pop()
        if self.has("foreign id"):
            out.tokens[0] = VOCAB
        if self.has("drops the end") and out.finish == "stop":
            out.tokens.pop(), out.logps.pop(), out.tops.pop()
        if self.has("odd end"):
            out.finish = "repetition"


class _Handler(BaseHTTPRequestHandler):
    server: ToyServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Quiet."""

    _counts = False  # among the requests that are under way

    def do_GET(self) -> None:
        server = self.server
        card: dict[str, Any] = {"id": "policy", "owned_by": "nobody" if server.has("nobody") else OWNER[server.dialect]}
        if server.dialect == "llama.cpp":
            card["meta"] = {"n_vocab": VOCAB + server.has("other vocabulary"), "n_ctx": 64}
        else:
            card["max_model_len"] = 8 if server.has("small context") else 64
        self._send({"data": [card]})

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if server.has("needs a token") and self.headers["Authorization"] != "Bearer secret":
            self._send({"error": {"message": "who are you?"}}, 401)
            return
        with server.lock:
            server.bodies.append((self.path, body))
            status = server.busy.pop(0) if server.busy else 200
            server.running += 1
            self._counts = True
            server.most = max(server.most, server.running)
        try:
            if status == 0:  # dies half-way
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b'{"choices": [')
                self.wfile.flush()
                self.close_connection = True
            elif status == 1:  # takes its time
                server.release.wait(60.0)
                self.close_connection = True
            elif status != 200:
                self._send({"error": {"message": "not now"}}, status)
            elif self.path == "/update_weights_from_disk":
                server.load(Path(body["model_path"]), body["weight_version"])
                self._send({"success": not server.has("refuses weights"), "message": "no"})
            else:
                if server.meeting is not None:
                    server.meeting.wait(60.0)
                answer = {"/v1/completions": self._vllm, "/generate": self._sglang, "/completion": self._llama}
                self._send(answer[self.path](body))
        finally:
            self._leave()

    def _leave(self) -> None:
        with self.server.lock:
            self.server.running -= self._counts
            self._counts = False

    def _send(self, answer: Any, status: int = 200) -> None:
        self._leave()  # before the client, which has its answer, asks again
        data = b"<html>" if self.server.has("no JSON") and "data" not in answer else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _prompt(self, ids: list[int]) -> list[int]:
        return ids[1:] if self.server.has("truncates") and len(ids) > 1 else ids

    def _count(self, wanted: int) -> int:
        return max(1, wanted - 1) if self.server.has("loses a sample") else wanted

    def _aborts(self) -> bool:
        with self.server.lock:
            aborts = self.server.has("aborts once")
            self.server.faults.discard("aborts once")
        return aborts

    def _vllm(self, body: dict[str, Any]) -> Any:
        server, prompt, choices = self.server, self._prompt(body["prompt"]), []
        abort = self._aborts()
        for i in reversed(range(self._count(body["n"]))):  # in any order: the index counts
            seed = None if "seed" not in body else body["seed"] + i
            out = server.sample(prompt, seed, body, body["logprobs"])
            if server.has("null in the first") and i == 0:
                out.logps[-1] = None
            tops = [dict(top) | {t: lp} for top, t, lp in zip(out.tops, out.tokens, out.logps, strict=False)]
            record = {
                "tokens": [f"token_id:{t}" if not server.has("text") else "x" for t in out.tokens],
                "token_logprobs": out.logps,
                "top_logprobs": []
                if server.has("no top")
                else [{f"token_id:{t}": lp for t, lp in top.items()} for top in tops],
            }
            choice = {
                "index": i,
                "text": "x",
                "finish_reason": "abort" if abort else out.finish,
                "logprobs": None if server.has("no log-probs") else record,
            }
            if not server.has("old"):
                choice |= {"token_ids": out.tokens, "prompt_token_ids": prompt}
            if server.has("other ids"):
                choice["token_ids"] = [(t + 1) % VOCAB for t in out.tokens]
            choices.append(choice)
        name = "other" if server.has("other model") else body["model"]
        echo = len(prompt) if not server.has("counts well") else len(body["prompt"])
        return {"model": name, "choices": choices, "usage": {"prompt_tokens": echo}}

    def _sglang(self, body: dict[str, Any]) -> Any:
        server, abort, items = self.server, self._aborts(), []
        for ids, params in list(zip(body["input_ids"], body["sampling_params"], strict=True))[
            : self._count(len(body["input_ids"]))
        ]:
            prompt = self._prompt(ids)
            out = server.sample(prompt, params.get("sampling_seed"), params, body["top_logprobs_num"])
            count = len(out.tokens)
            meta: dict[str, Any] = {
                "prompt_tokens": len(prompt),
                "completion_tokens": count,
                "finish_reason": {"type": "abort", "message": "paused"} if abort else {"type": out.finish},
                "weight_version": "somebody's" if server.has("other weights") else server.weights,
            }
            if not server.has("no log-probs"):
                pairs = list(zip(out.logps, out.tokens, strict=False))
                meta["output_token_logprobs"] = [[lp, t, None] for lp, t in pairs]
                if body["top_logprobs_num"] and not server.has("no top"):
                    meta["output_top_logprobs"] = [[[lp, t, None] for t, lp in top] for top in out.tops]
            items.append({"text": "x", "meta_info": meta})
        return items

    def _llama(self, body: dict[str, Any]) -> Any:
        server, prompt = self.server, self._prompt(body["prompt"])
        items = []
        for i in range(self._count(body["n_cmpl"])):
            seed = None if "seed" not in body else body["seed"] + i
            out = server.sample(prompt, seed, body, body["n_probs"])
            tops = [] if server.has("no top") else out.tops
            key = "logprob" if server.has("old") else "prob"
            said = lambda lp: lp if lp is None or lp <= -9999 else math.exp(lp)  # noqa: E731
            probs = [
                {"id": t, key: said(lp), "top_probs": [{"id": j, key: math.exp(p)} for j, p in top if p > -9999]}
                for t, lp, top in zip(out.tokens, out.logps, tops or [[]] * len(out.tokens), strict=False)
            ]
            items.append(
                {
                    "index": i,
                    "model": "other" if server.has("other model") else "policy",
                    "tokens": [] if server.has("text") else out.tokens,
                    "tokens_evaluated": len(prompt),
                    "stop_type": {"stop": "eos", "length": "limit"}.get(out.finish, out.finish),
                    "completion_probabilities": None if server.has("no log-probs") else probs,
                    "generation_settings": {
                        "temperature": 0.8 if server.has("own settings") else body["temperature"],
                        "top_k": body["top_k"],
                        "seed": seed,
                    },
                }
            )
        return items if body["n_cmpl"] > 1 else items[0]


@contextmanager
def serving(
    dialect: str, *faults: str, mode: str = "processed", tls: tuple[Path, Path] | None = None
) -> Iterator[ToyServer]:
    """A server of that dialect on loopback; ``tls`` are certificate and key."""
    with ToyServer(dialect, faults=set(faults), mode=mode) as server:
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            server.socket = context.wrap_socket(server.socket, server_side=True)
            server.scheme = "https"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.release.set()
            server.shutdown()
            thread.join()


def make_engine(
    server: ToyServer,
    sampling: SamplingConfig = SamplingConfig(),  # noqa: B008 - frozen
    cuts: Cuts = Cuts(),  # noqa: B008 - frozen
    **options: Any,
) -> OpenAIEngine:
    """An engine for it; options of ``ServerOptions`` and of the engine may be mixed."""
    own = {key: options.pop(key) for key in ("version", "weights", "publish", "export", "like") if key in options}
    settings = ServerOptions(**{"address": server.address, "patience": 20.0, "timeout": 60.0} | options)
    return OpenAIEngine(make_model(), CONFIG, server=settings, sampling=sampling, eos_ids=EOS, cuts=cuts, **own)


def make_prompts(rows: int = 12, samples: int = 4) -> PromptBatch:
    """``samples`` rows in turn share a prompt of 1 to 5 tokens; -7 stands on masked slots."""
    rng = np.random.default_rng(1)
    groups = np.arange(rows) // samples
    lengths = rng.integers(2, PROMPT + 1, rows)[groups]
    tokens = rng.integers(0, VOCAB, (rows, PROMPT))[groups]
    mask = np.arange(PROMPT)[None, :] < lengths[:, None]
    return PromptBatch(
        tokens=jnp.asarray(np.where(mask, tokens, -7), jnp.int32),
        mask=jnp.asarray(mask),
        group_ids=jnp.asarray(groups, jnp.int32),
        seeds=jnp.asarray(rng.integers(0, 2**32, rows), jnp.uint32),
    )


@dataclasses.dataclass(frozen=True)
class Tools:
    """The functions above, for tests."""

    model: Callable[..., Transformer] = make_model
    serving: Callable[..., Any] = serving
    engine: Callable[..., OpenAIEngine] = make_engine
    prompts: Callable[..., PromptBatch] = make_prompts
    policy: Callable[..., Policy] = true_policy
    cut: Callable[..., np.ndarray] = cut


@pytest.fixture(scope="session")
def tools() -> Tools:
    return Tools()


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.param)
