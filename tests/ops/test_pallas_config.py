"""Blocks stay below the vector memory of every chip, and the largest are taken where they fit."""

from __future__ import annotations

import itertools

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from trm_jax.ops._vmem import CHIPS, Chip, chip_of, padded_bytes
from trm_jax.ops.linear_logps._config import gradient_bytes, logps_blocks, statistics_bytes
from trm_jax.ops.linear_vocab_divergence._config import divergence_blocks, divergence_bytes

WIDTHS = (1, 64, 576, 2048, 4096, 5120)
TOKENS = (1, 300, 65_536)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
@pytest.mark.parametrize("supported", [False, True])
def test_budgets_stay_below_the_limit(chip: Chip, supported: bool) -> None:
    for width, n, (hidden, head) in itertools.product(WIDTHS, TOKENS, ((2, 2), (4, 4), (2, 1), (4, 2))):
        if chip.name == "v4" and (hidden == 4 or width > 4096):
            continue  # 16 MiB: what does not fit is refused, below
        for heads in ((head,), (hidden, head)):
            kwargs = dict(widths=(width, width), hidden_itemsizes=(hidden, hidden), head_itemsizes=heads)
            blocks = divergence_blocks(chip, n, **kwargs, supported=supported)
            used = divergence_bytes(*blocks, **kwargs, supported=supported)
            assert used <= 0.9 * chip.vmem_bytes, (width, n, heads, blocks, used)
        for gradient, count in ((False, statistics_bytes), (True, gradient_bytes)):
            blocks = logps_blocks(chip, n, width, hidden, head, supported=supported, gradient=gradient)
            used = count(*blocks, width, hidden, head, supported)
            assert used <= 0.9 * chip.vmem_bytes, (width, n, blocks, used)
            assert blocks[0] % 128 == 0
            assert 1024 % blocks[1] == 0


def test_bytes_by_hand() -> None:
    # bfloat16, D = 4096, blocks of 512: hidden and head 4 MiB each, twice for the next block; a tile of logits 1 MiB.
    rows = 2 * (6 * 8 * 512 * 4 + 2 * 8 * 512 * 4 + 8 * 512 * 4)
    assert statistics_bytes(512, 512, 4096, 2, 2, False) == (4 * 4 + 2 * 1) * 2**20 + rows + 5 * 8 * 512 * 4
    assert padded_bytes(1, 129, 2) == 16 * 256 * 2
    # A gradient, blocks of 1,024 tokens by 512: hidden 8 MiB and head 4, twice; a float32 sum of the larger block, 16,
    # its product, 16, the block it leaves in, 16, twice; the hidden block without idle rows, 8; four tiles of 2 MiB.
    rows = 2 * (6 * 8 * 1024 * 4 + 2 * 8 * 512 * 4 + 8 * 1024 * 4) + 1024 * 128 * 4
    assert gradient_bytes(1024, 512, 4096, 2, 2, False) == (2 * 12 + 16 + 16 + 2 * 16 + 8 + 4 * 2) * 2**20 + rows


def test_what_is_known_of_each_chip() -> None:
    """A TensorCore's vector memory as the compiler refuses it; the vendors' peak over the clock."""
    mib = {name: chip.vmem_bytes / 2**20 for name, chip in CHIPS.items()}
    assert mib == {"v4": 16, "v5e": 128, "v5p": 63, "v6e": 128, "tpu7x": 64}
    flops = {name: chip.flops_per_cycle / 2**17 for name, chip in CHIPS.items()}
    assert flops == {"v4": 1, "v5e": 1, "v5p": 1, "v6e": 4, "tpu7x": 4}  # in 4 units of 128 x 128


@pytest.mark.parametrize(
    ("width", "chip", "statistics", "gradient", "divergence", "two_heads"),
    [
        (4096, "v4", (512, 256), (128, 128), (256, 256), (256, 128)),
        (4096, "v5e", (1024, 512), (1024, 512), (1024, 512), (1024, 512)),
        (4096, "v5p", (1024, 512), (512, 512), (1024, 512), (1024, 512)),
        (4096, "v6e", (1024, 512), (1024, 512), (1024, 512), (1024, 512)),
        (4096, "tpu7x", (1024, 512), (512, 512), (1024, 512), (1024, 512)),
        (2048, "v5p", (1024, 512), (512, 512), (1024, 512), (1024, 512)),
        (2048, "tpu7x", (1024, 512), (1024, 512), (1024, 512), (1024, 512)),
        (576, "v4", (1024, 512), (512, 512), (512, 512), (512, 512)),
        (576, "v5p", (1024, 512), (1024, 512), (1024, 512), (1024, 512)),
    ],
)
def test_blocks_of_real_shapes(
    width: int,
    chip: str,
    statistics: tuple[int, int],
    gradient: tuple[int, int],
    divergence: tuple[int, int],
    two_heads: tuple[int, int],
) -> None:
    """bfloat16, 4,096 tokens: what the compiler accepts, as ``experiments/tpu_aot`` shows, and nothing smaller."""
    for backward, want in ((False, statistics), (True, gradient)):
        assert logps_blocks(CHIPS[chip], 4096, width, 2, 2, supported=False, gradient=backward) == want
    for heads, want in (((2,), divergence), ((2, 2), two_heads)):
        assert divergence_blocks(CHIPS[chip], 4096, (width, width), (2, 2), heads, supported=False) == want


def test_no_more_tokens_than_there_are() -> None:
    shape = dict(widths=(4096, 4096), hidden_itemsizes=(2, 2), head_itemsizes=(2,), supported=False)
    assert divergence_blocks(CHIPS["v6e"], 65_536, **shape) == (1024, 512)
    assert divergence_blocks(CHIPS["v6e"], 1, **shape) == (128, 512)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7", "tpu7x"),
        ("TPU7x", "tpu7x"),
        ("cpu", "v5p"),
    ],
)
def test_the_chip_of_a_device(kind: str, name: str) -> None:
    """As a program sees it that is compiled for devices of which none is here."""
    device = AbstractDevice(kind, num_cores=1, platform="cpu" if kind == "cpu" else "tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        assert chip_of(None) is CHIPS[name]


def test_a_chip_without_blocks_is_refused() -> None:
    device = AbstractDevice("TPU v3", num_cores=1, platform="tpu")
    with (
        jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)),
        pytest.raises(NotImplementedError, match="implementation='chunked'"),
    ):
        chip_of(None)


def test_refusals() -> None:
    with pytest.raises(NotImplementedError, match="implementation='chunked'"):
        logps_blocks(CHIPS["v4"], 4096, 65_536, 4, 4, supported=False, gradient=True)
    with pytest.raises(ValueError, match="choose one of v4"):
        chip_of("v99")
    assert chip_of(None).name == "v5p"  # the interpreter
