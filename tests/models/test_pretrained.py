"""Checkpoints into parameters and back: where they land, what they cost in memory, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trm_jax.models import (
    RULES,
    TransformerConfig,
    check_pretrained,
    config_to_hf,
    export_pretrained,
    load_pretrained,
    make_mesh,
    param_shardings,
)
from trm_jax.models.pretrained import open_safetensors, write_safetensors

LAST = "model.layers.1.mlp.experts.3.down_proj.weight"


@pytest.fixture(scope="module")
def moe(tmp_path_factory, build):
    """A mixture and the directory that it was written to."""
    model = build("moe", vocab_size=12, n_heads=4, n_kv_heads=2, d_ff=8, qk_norm=True)
    return model, export_pretrained(model, tmp_path_factory.mktemp("moe") / "out", shard_bytes=8_000)


def pure(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def test_parameters_come_back_as_they_were(moe):
    model, place = moe
    again = load_pretrained(place)
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, pure(again), pure(model))
    names = set(open_safetensors(place).tensors)
    assert "model.layers.0.self_attn.q_norm.weight" in names
    assert LAST in names


def test_a_matrix_is_stored_output_first(moe):
    model, place = moe
    files = open_safetensors(place)
    np.testing.assert_array_equal(files.read(LAST), model.blocks.down.get_value()[1, 3].T)
    np.testing.assert_array_equal(files.read("lm_head.weight"), model.lm_head.get_value())


@pytest.mark.parametrize("rules", [RULES, {**RULES, "embed": "data", "vocab": None, "expert": "tensor", "mlp": None}])
def test_parameters_land_sharded(moe, rules):
    model, place = moe
    mesh = make_mesh(data=4, tensor=2)
    params = nnx.state(load_pretrained(place, mesh=mesh, rules=rules), nnx.Param)
    expected = param_shardings(params, mesh, rules)
    for (path, value), sharding in zip(
        jax.tree.leaves_with_path(params), jax.tree.leaves(expected, is_leaf=lambda x: hasattr(x, "spec")), strict=True
    ):
        assert value.sharding.is_equivalent_to(sharding, value.ndim), path
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(params), pure(model))


@pytest.mark.slow
def test_types_are_converted_once(moe, tmp_path):
    model, place = moe
    half = export_pretrained(model, tmp_path / "half", dtype="bfloat16")
    assert json.loads((half / "config.json").read_text())["torch_dtype"] == "bfloat16"
    files = open_safetensors(half)
    assert {str(files.dtype(name)) for name in files.tensors} == {"bfloat16"}
    wide = load_pretrained(half)  # float32 parameters of a bfloat16 file
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), pure(model))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.float32)), pure(wide), expected)
    narrow = load_pretrained(place, param_dtype=jnp.dtype("bfloat16"))
    jax.tree.map(np.testing.assert_array_equal, pure(narrow), expected)
    # Up and down again: the bytes of the file.
    again = open_safetensors(export_pretrained(wide, tmp_path / "again", dtype="bfloat16"))
    assert all(again.read(name).tobytes() == files.read(name).tobytes() for name in files.tensors)


def test_small_files_come_along(moe, tmp_path):
    model, _ = moe
    like = tmp_path / "like"
    like.mkdir()
    config = config_to_hf(model.config, dtype="bfloat16", longest=77)
    (like / "config.json").write_text(json.dumps({**config, "eos_token_id": 5}))
    for name in ("tokenizer.json", "merges.txt", "model.safetensors.index.json", "pytorch_model.bin"):
        (like / name).write_text(name)
    out = export_pretrained(model, tmp_path / "out", like=like)
    assert {file.name for file in out.iterdir()} == {
        *("config.json", "tokenizer.json", "merges.txt", "model.safetensors")
    }
    raw = json.loads((out / "config.json").read_text())
    assert (raw["eos_token_id"], raw["max_position_embeddings"], raw["torch_dtype"]) == (5, 77, "float32")


def test_export_refuses_to_overwrite_and_to_mislabel(moe, build, tmp_path):
    model, place = moe
    with pytest.raises(FileExistsError, match="is not empty"):
        export_pretrained(model, place)
    with pytest.raises(ValueError, match="describes"):
        export_pretrained(build("dense"), tmp_path / "new", like=place)
    assert not (tmp_path / "new").exists()


def changed(place: Path, to: Path, change) -> Path:
    files = open_safetensors(place)
    weights = {name: files.read(name) for name in files.tensors}
    change(weights)
    to.mkdir()
    (to / "config.json").write_text((place / "config.json").read_text())
    shapes = {name: value.shape for name, value in weights.items()}
    write_safetensors(to, shapes, weights.__getitem__, dtype="float32", shard_bytes=10**9)
    return to


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(LAST), rf"missing: {LAST}"),
        (lambda w: w.update(extra=np.zeros((2, 3), np.float32)), r"surplus: extra \[2, 3\]"),
        (lambda w: w.update({LAST: w[LAST].T.copy()}), rf"wrong shape: {LAST} is \[8, 16\].*requires \[16, 8\]"),
        (lambda w: w[LAST].__setitem__((0, 0), np.inf), rf"tensor {LAST} holds NaN or infinite"),
    ],
)
def test_tensors_that_do_not_fit_are_named(moe, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        load_pretrained(changed(moe[1], tmp_path / "broken", change))


def test_a_long_list_of_problems_is_cut(moe, tmp_path):
    with pytest.raises(ValueError, match="and 27 more"):
        load_pretrained(changed(moe[1], tmp_path / "broken", lambda w: [w.pop(name) for name in list(w)[:35]]))


def test_old_buffers_are_no_surplus(moe, tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load_pretrained(changed(moe[1], tmp_path / "old", lambda w: w.update({name: np.ones(4, np.float32)})))


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(moe, build, tmp_path):
    """As Qwen3-0.6B is published: tie_word_embeddings, and lm_head.weight beside the embedding."""
    model = build("tied")
    tied = export_pretrained(model, tmp_path / "tied")
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    twice = changed(tied, tmp_path / "twice", lambda w: w.update({head: w[embedding].copy()}))
    assert check_pretrained(twice) == model.config
    np.testing.assert_array_equal(load_pretrained(twice).head(), model.head())
    again = export_pretrained(load_pretrained(twice), tmp_path / "again", like=twice)
    assert open_safetensors(again).shapes() == open_safetensors(tied).shapes()

    def other(weights):
        weights[head] = weights[embedding].copy()
        weights[head][-1, -1] += 1

    for name, change in (("other", other), ("short", lambda w: w.update({head: w[embedding][:-1].copy()}))):
        with pytest.raises(ValueError, match=rf"{head} differs from {embedding}.*tie_word_embeddings=true"):
            check_pretrained(changed(tied, tmp_path / name, change))
    with pytest.raises(ValueError, match=rf"missing: {head}"):  # and an untied one must be there
        load_pretrained(changed(moe[1], tmp_path / "untied", lambda w: w.pop(head)))


def test_config_json_must_be_there_and_be_an_object(moe, tmp_path):
    place = changed(moe[1], tmp_path / "copy", lambda w: None)
    for content, message in (("{", "is not JSON"), ("[" * 10**5, "is not JSON"), ("[1]", "holds no JSON object")):
        (place / "config.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            load_pretrained(place)
    with pytest.raises(ValueError, match=r"config\.json is a file, and not a \.gguf; give the directory"):
        load_pretrained(place / "config.json")
    (place / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json: no such file"):
        load_pretrained(place)


def test_a_check_reads_headers_alone_and_finds_what_loading_would(moe, tmp_path):
    model, place = moe
    assert check_pretrained(place) == model.config
    short = changed(place, tmp_path / "short", lambda w: w.pop("model.norm.weight"))
    with pytest.raises(ValueError, match=r"missing: model\.norm\.weight"):
        check_pretrained(short)
    # Not a number in a tensor is found when it is read.
    damaged = changed(place, tmp_path / "nan", lambda w: w["model.norm.weight"].fill(np.nan))
    assert check_pretrained(damaged) == model.config
    with pytest.raises(ValueError, match=r"model\.norm\.weight holds NaN"):
        load_pretrained(damaged)


MEASURE = """
import ctypes, gc, sys, threading, time
import jax
from trm_jax.models import load_pretrained
def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024
jax.block_until_ready(jax.tree.leaves(load_pretrained(sys.argv[1])))  # compiles
gc.collect()
ctypes.CDLL("libc.so.6").malloc_trim(0)  # what it held goes back to the system
before, peak, done = anonymous(), [0], threading.Event()
def watch():
    while not done.is_set():
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.0005)
thread = threading.Thread(target=watch)
thread.start()
model = load_pretrained(sys.argv[1])
jax.block_until_ready(jax.tree.leaves(model))
done.set()
thread.join()
print(peak[0] - before)
"""


@pytest.mark.slow
def test_loading_holds_less_than_two_tensors_besides_the_parameters(tmp_path):
    """On CPU the parameters lie in the same memory: the peak is theirs plus what passes through the host."""
    config = TransformerConfig(
        vocab_size=65536, d_model=256, n_layers=24, n_heads=4, n_kv_heads=4, head_dim=64, d_ff=8192, tie_embeddings=True
    )
    place = tmp_path / "large"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config_to_hf(config, dtype="float32", longest=64)))
    from trm_jax.models._hf_tensors import checkpoint_slots

    shapes = {name: slot.shape for slot in checkpoint_slots(config) for name in slot.names}
    write_safetensors(
        place, shapes, lambda name: np.ones(shapes[name], np.float32), dtype="float32", shard_bytes=50 * 10**6
    )
    assert len(list(place.glob("*.safetensors"))) > 10
    sizes = [4 * int(np.prod(shape)) for shape in shapes.values()]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE), str(place)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    extra = int(done.stdout) - sum(sizes)
    assert extra > -max(sizes) / 4, "the parameters themselves do not show: the measurement is wrong"
    assert extra < 2 * max(sizes), f"{extra / 2**20:.0f} MiB beyond the parameters; largest {max(sizes) / 2**20:.0f}"
