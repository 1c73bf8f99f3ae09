"""What the operators refuse, as a user meets it: one class of error each, and words that say what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from trm_jax import ops

N, D, V = 5, 3, 20
HIDDEN, HEAD, TOKENS = np.ones((N, D), np.float32), np.ones((V, D), np.float32), np.zeros(N, int)
BITS = np.full((N, 3), 255, np.uint8)
INT8, SCALE = np.ones((V, D), np.int8), np.ones(V, np.float32)
KERNEL = {"implementation": "pallas_tpu", "interpret": True}


pytestmark = pytest.mark.usefixtures("without_run_time_types")


def check_refused(error: type[Exception], words: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """This very class, no subclass of it."""
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    assert caught.type is error, caught.value
    assert words in str(caught.value)


def logps(**changes: Any) -> Any:
    return ops.linear_logps(**({"hidden": HIDDEN, "head": HEAD, "tokens": TOKENS} | changes))


def divergence(**changes: Any) -> Any:
    given = {"policy_hidden": HIDDEN, "policy_head": HEAD, "rollout_hidden": HIDDEN, "rollout_head": HEAD}
    return ops.linear_vocab_divergence(**(given | {"tokens": TOKENS} | changes))


def test_what_these_tests_change_is_accepted() -> None:
    assert logps(head=nnx.Param(jnp.asarray(HEAD))).logps.shape == (N,)
    one = jax.eval_shape(lambda: logps(support=BITS, bias=SCALE))
    heads = {"policy_bias": SCALE, "rollout_head": INT8, "rollout_head_scale": SCALE}
    both = jax.eval_shape(lambda: divergence(support=BITS, **heads))
    assert one.logps.shape == both.token_kl.shape == (N,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"hidden": np.ones((1, N, D), np.float32)},
            "hidden must be [N, D] and head [V, D] (rows are tokens), given [1, 5, 3] and [20, 3]: flatten leading",
        ),
        ({"head": HEAD.T}, "given [5, 3] and [3, 20]: flatten leading axes, transpose a [D, V] head"),
        ({"head": np.ones((V, D + 1), np.float32)}, "hidden must be [N, D] and head [V, D]"),
        ({"head": HEAD[:0]}, "head must have a row for each token and a column for each feature, given [0, 3]: pass"),
        ({"hidden": HIDDEN[:, :0], "head": HEAD[:, :0]}, "a column for each feature, given [20, 0]: pass the whole"),
        ({"tokens": np.zeros(N + 1, int)}, "tokens must be [5], one for each row of hidden, given [6]"),
        ({"tokens": TOKENS[:, None]}, "tokens must be [5], one for each row of hidden, given [5, 1]"),
        ({"support": BITS[:, :2]}, "support must be [5, 3] uint8, one bit for each token of the head, given [5, 2]"),
        ({"bias": np.ones(3, np.float32)}, "bias must be [20], one for each row of head, given [3]"),
    ],
)
def test_shapes(change: dict[str, Any], words: str) -> None:
    check_refused(ValueError, words, logps, **change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": None}, "hidden must be an array, given None"),
        ({"head": None}, "head must be an array, given None"),
        ({"tokens": None}, "tokens must be an array, given None"),
        ({"head": {"kernel": HEAD}}, "head must be an array, given dict: pass the [V, D] matrix (kernel.T of a Dense"),
        ({"head": nnx.Linear(D, V, rngs=nnx.Rngs(0))}, "head must be an array, given Linear: pass the [V, D] matrix"),
        ({"hidden": HIDDEN.tolist()}, "hidden must be an array, given a list: pass jax.numpy.asarray(hidden)"),
        ({"support": BITS > 0}, "support must be uint8 bits, given bool: pack it with numpy.packbits, little-endian"),
        ({"tokens": HIDDEN[:, 0]}, "tokens must be integers, given dtype float32: pass token ids"),
        ({"hidden": HIDDEN.astype(np.float16)}, "given float16: pass hidden.astype(jnp.float32)"),
        ({"head": HEAD.astype(np.float16)}, "given float16 without a scale: pass head.astype(jnp.float32)"),
        ({"head": HEAD.astype("float8_e4m3fn")}, "head must be float32 or bfloat16, given float8_e4m3fn without"),
        ({"head": INT8}, "given int8 without a scale: pass head.astype(jnp.float32) * scale[:, None]"),
        ({"bias": np.ones(V, np.int32)}, "bias must be float32 or bfloat16, given int32: pass bias.astype"),
    ],
)
def test_types(change: dict[str, Any], words: str) -> None:
    check_refused(TypeError, words, logps, **change)


@pytest.mark.parametrize(
    ("error", "change", "words"),
    [
        (
            ValueError,
            {"rollout_head": np.ones((V + 2, D), np.float32)},
            "both heads must have one vocabulary, given 20 and 22 rows: strip the padding rows of the larger one",
        ),
        (ValueError, {"policy_head": HEAD.T}, "policy_hidden must be [N, D] and policy_head [V, D]"),
        (ValueError, {"rollout_hidden": HIDDEN[None]}, "rollout_hidden must be [N, D] and rollout_head [V, D]"),
        (ValueError, {"rollout_hidden": HIDDEN[1:]}, "rollout_hidden must have a row for each of the 5 rows of policy"),
        (ValueError, {"policy_bias": SCALE[1:]}, "policy_bias must be [20], one for each row of policy_head, given"),
        (
            ValueError,
            {"rollout_head": INT8, "rollout_head_scale": SCALE[1:]},
            "rollout_head_scale must be [20], one for each row of rollout_head, given [19]",
        ),
        (TypeError, {"rollout_hidden": None}, "rollout_hidden must be an array, given None"),
        (TypeError, {"policy_head": INT8}, "policy_head must be float32 or bfloat16, given int8 without a scale"),
        (TypeError, {"rollout_head": INT8}, "rollout_head must be float32 or bfloat16, given int8 without a scale"),
        (TypeError, {"rollout_head_scale": SCALE}, "rollout_head must be int8 to have a scale, given float32"),
        (
            TypeError,
            {"rollout_head": INT8, "rollout_head_scale": SCALE.astype(np.float16)},
            "given float16: pass rollout_head_scale.astype(jnp.float32)",
        ),
        (TypeError, {"policy_bias": np.zeros(V, int)}, "policy_bias must be float32 or bfloat16, given int"),
    ],
)
def test_operands_of_two_policies(error: type[Exception], change: dict[str, Any], words: str) -> None:
    check_refused(error, words, divergence, **change)


@pytest.mark.parametrize("call", [logps, divergence])
@pytest.mark.parametrize(
    ("error", "change", "words"),
    [
        (ValueError, {"temperature": 0.0}, "temperature must lie in [1e-06, inf), given 0.0"),
        (ValueError, {"temperature": np.inf}, "temperature must lie in [1e-06, inf), given inf"),
        (
            TypeError,
            {"temperature": np.ones(N)},
            "temperature must be one number for all rows, given an array of shape [5]: call once for each temperature, "
            "or divide each row of hidden (where there is no bias and no cap) by its own",
        ),
        (TypeError, {"temperature": "0.7"}, "temperature must be a number, given '0.7'"),
        (ValueError, {"logit_soft_cap": 0.0}, "logit_soft_cap must lie in [1e-30, 1e+24], given 0.0: pass None for"),
        (ValueError, {"logit_soft_cap": -1}, "logit_soft_cap must lie in [1e-30, 1e+24], given -1.0: pass None for"),
        (ValueError, {"logit_soft_cap": 1e25}, "logit_soft_cap must lie in [1e-30, 1e+24], given 1e+25: pass None for"),
        (TypeError, {"logit_soft_cap": True}, "logit_soft_cap must be a number, given True"),
        (TypeError, {"temperature": True}, "temperature must be a number, given True"),
        (ValueError, {"chunk_size": 0}, "chunk_size must lie in [1, inf], given 0"),
        (TypeError, {"chunk_size": 2.5}, "chunk_size must be an integer, given 2.5: pass the number of tokens"),
        (TypeError, {"chunk_size": True}, "chunk_size must be an integer, given True: pass the number of tokens"),
        (TypeError, {"interpret": "yes"}, "interpret must be True or False, given 'yes'"),
        (
            ValueError,
            {"implementation": "palas"},
            "unknown implementation 'palas' (did you mean 'pallas_tpu'?): choose",
        ),
        (
            NotImplementedError,
            {"implementation": "pallas_tpu"},
            "needs a TPU, given platform 'cpu': pass implementation='chunked' (the same values on every device) or",
        ),
    ],
)
def test_options(call: Callable[..., Any], error: type[Exception], change: dict[str, Any], words: str) -> None:
    check_refused(error, words, call, **change)


@pytest.mark.parametrize("call", [logps, divergence])
@pytest.mark.parametrize("name", ["temperature", "logit_soft_cap", "chunk_size"])
def test_traced_numbers(call: Callable[..., Any], name: str) -> None:
    words = f"{name} is compiled into the program and must be a number, given a traced value: close over it or name it"
    check_refused(TypeError, words, jax.jit(lambda value: call(**{name: value})), 2)


@pytest.mark.parametrize("call", [logps, divergence])
@pytest.mark.parametrize(
    ("error", "axes", "words"),
    [
        (ValueError, {"vocab_axis": "tensor"}, "are axes of a mesh, given mesh=None: pass the mesh too, call inside"),
        (
            TypeError,
            {"mesh": "tensor", "vocab_axis": "tensor"},
            "must be a jax.sharding.Mesh, given 'tensor': make one",
        ),
        (
            ValueError,
            {"mesh": True},
            "needs vocab_axis, the axis that the rows of the head are sharded over, given None",
        ),
        (ValueError, {"mesh": True, "vocab_axis": ()}, "are sharded over, given (): name it"),
        (
            TypeError,
            {"mesh": True, "vocab_axis": ["tensor"]},
            "vocab_axis must be the name of a mesh axis or a tuple of",
        ),
        (
            TypeError,
            {"mesh": True, "vocab_axis": "tensor", "token_axis": 0},
            "token_axis must be the name of a mesh ax",
        ),
        (
            ValueError,
            {"mesh": True, "vocab_axis": "tensr"},
            "unknown mesh axis 'tensr' (did you mean 'tensor'?): choose",
        ),
        (
            ValueError,
            {"mesh": True, "vocab_axis": "tensor", "token_axis": ("data", "tensor")},
            "vocab_axis='tensor' and token_axis=('data', 'tensor') must not share an axis",
        ),
        (
            ValueError,
            {"mesh": True, "vocab_axis": "tensor", "implementation": "reference"},
            "takes no mesh: leave mesh and its axes out (the compiler shards it), or pass implementation='chunked'",
        ),
    ],
)
def test_layouts(call: Callable[..., Any], error: type[Exception], axes: dict[str, Any], words: str) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    check_refused(error, words, call, **axes | ({"mesh": mesh} if axes.get("mesh") is True else {}))


@pytest.mark.parametrize("call", [logps, divergence])
def test_a_kernel_in_a_shard_map_that_types_its_operands(call: Callable[..., Any]) -> None:
    mesh = jax.make_mesh((N,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:N])
    names, rows = (["hidden"] if call is logps else ["policy_hidden", "rollout_hidden"]), PartitionSpec("data")

    def local(tokens: jax.Array, hidden: jax.Array) -> Any:
        return call(**dict.fromkeys(names, hidden), tokens=tokens, **KERNEL)

    check_refused(
        NotImplementedError,
        "pass check_vma=False to your shard_map, or implementation='chunked' or None here",
        jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows),
        TOKENS,
        HIDDEN,
    )


@pytest.mark.parametrize("argument", [0, 1])
def test_second_derivatives_of_the_kernel(argument: int) -> None:
    """Of operands, and of what a cotangent is made of."""

    def slope(scale: float, hidden: jax.Array) -> jax.Array:
        def total(h: jax.Array) -> jax.Array:
            return jnp.sum(scale * logps(hidden=h, **KERNEL).logps)

        return jnp.sum(jax.grad(total)(hidden) ** 2)

    words = "the kernel has no second derivatives: pass implementation='chunked' to differentiate a gradient"
    check_refused(NotImplementedError, words, jax.make_jaxpr(jax.grad(slope, argument)), 1.0, jnp.asarray(HIDDEN))
