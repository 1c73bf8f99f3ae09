"""Live parity with Hugging Face Transformers (extra ``parity``): their checkpoints into our models and back.

The default suite holds the same architectures against goldens (``test_architectures``).
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from trm_jax.models import export_pretrained, load_pretrained  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
ATOL = 1.5e-5  # as in test_architectures


def _goldens_tool():
    spec = importlib.util.spec_from_file_location("goldens", ROOT / "tools/goldens/make_architecture_goldens.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["goldens"] = module
    spec.loader.exec_module(module)
    return module


TOOL = _goldens_tool()
CONFIGS = dict(TOOL.configs())
SEED = 1000  # other weights than the goldens'


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONFIGS)
def test_both_directions(name, tmp_path):
    theirs = TOOL.random_model(CONFIGS[name], SEED)
    tokens = torch.randint(0, CONFIGS[name].vocab_size, (3, 23), generator=torch.Generator().manual_seed(SEED))
    with torch.no_grad():
        expected = theirs(tokens, output_hidden_states=True)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    ours = load_pretrained(tmp_path / "theirs")
    out = jax.jit(lambda t: ours(t, layer_states=True))(tokens.numpy())
    states = np.concatenate([out.layer_states, out.hidden[None]])
    np.testing.assert_allclose(states, np.stack([x.numpy() for x in expected.hidden_states]), atol=ATOL)
    np.testing.assert_allclose(out.hidden @ ours.head().T, expected.logits.numpy(), atol=ATOL)

    export_pretrained(ours, tmp_path / "ours", shard_bytes=20_000)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    for key, value in theirs.state_dict().items():
        assert torch.equal(value, back[key]), key
