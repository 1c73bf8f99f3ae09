"""Every test sees eight simulated devices and one compilation cache; the pure rooms are type-checked at run time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

_FLAGS = os.environ.get("XLA_FLAGS", "")
if "host_platform_device_count" not in _FLAGS:
    os.environ["XLA_FLAGS"] = f"{_FLAGS} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import pytest  # noqa: E402
from jax._src.lru_cache import LRUCache  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402
from jaxtyping import config as jaxtyping_config  # noqa: E402
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


@pytest.fixture
def without_run_time_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user has none of the checks installed above, which would refuse first."""
    monkeypatch.setattr(jaxtyping_config, "jaxtyping_disable", True)


@pytest.fixture(scope="session")
def cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of all workers; one of several runs if TEST_COMPILATION_CACHE names it."""
    base = tmp_path_factory.getbasetemp()
    own = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    directory = Path(os.environ.get("TEST_COMPILATION_CACHE", own))
    directory.mkdir(exist_ok=True)
    return directory


def put_whole(cache: LRUCache, key: str, value: bytes) -> None:
    """An entry of JAX's cache appears whole, whatever other workers write."""
    place = cache.path / f"{key}-cache"
    if not place.exists():
        with tempfile.NamedTemporaryFile(dir=cache.path, delete=False) as file:
            file.write(value)
        os.replace(file.name, place)


@pytest.fixture(scope="session", autouse=True)
def compile_once(cache_directory: Path) -> Iterator[None]:
    """A program that several tests need, here or in a process that they start, is compiled once."""
    options = {
        "jax_compilation_cache_dir": str(cache_directory),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    LRUCache.put = put_whole
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
