"""Every test sees eight simulated devices, and the pure rooms are type-checked at run time."""

from __future__ import annotations

import os

_FLAGS = os.environ.get("XLA_FLAGS", "")
if "host_platform_device_count" not in _FLAGS:
    os.environ["XLA_FLAGS"] = f"{_FLAGS} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxtyping import install_import_hook  # noqa: E402

# A parameter annotated float takes whatever a user has for a number: 2, 2.0, np.float32(2).
_NUMBER = "float | int | __import__('numpy').number"
_CONF = f"beartype.BeartypeConf(hint_overrides=beartype.FrozenDict({{float: {_NUMBER}}}))"

install_import_hook(
    [
        "trm_jax.bounds",
        "trm_jax.correction",
        "trm_jax.divergences",
        "trm_jax.losses",
        "trm_jax.numerics",
        "trm_jax.ops",
    ],
    f"beartype.beartype(conf={_CONF})",
)
