"""Safetensors directories: read, written, and refused by name when they are not whole."""

from __future__ import annotations

import json
import shutil
import struct

import numpy as np
import pytest

from trm_jax.models.pretrained import open_safetensors, write_safetensors

WEIGHTS = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b.weight": np.array([1.5, -2.0], np.float32),
    "c.weight": np.full((4, 4), 0.25, np.float32),
}


def write(place, weights=WEIGHTS, dtype="float32", shard_bytes=10**9):
    place.mkdir(exist_ok=True)
    shapes = {name: value.shape for name, value in weights.items()}
    return write_safetensors(place, shapes, weights.__getitem__, dtype=dtype, shard_bytes=shard_bytes)


def by_hand(header: dict, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_a_file_written_by_hand_is_read(tmp_path):
    header = {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {"format": "pt"}}
    header["y"] = {"dtype": "BF16", "shape": [1, 2], "data_offsets": [8, 12]}
    # bfloat16 is the upper half of float32: 1.0 is 0x3F80, -2.0 is 0xC000.
    data = struct.pack("<2f", 3.0, -0.5) + struct.pack("<2H", 0x3F80, 0xC000)
    (tmp_path / "model.safetensors").write_bytes(by_hand(header, data))
    files = open_safetensors(tmp_path)
    assert files.shapes() == {"x": (2,), "y": (1, 2)}
    assert files.read("x").tolist() == [3.0, -0.5]
    assert files.read("y").astype(np.float32).tolist() == [[1.0, -2.0]]
    assert str(files.dtype("y")) == "bfloat16"
    with pytest.raises(KeyError):
        files.read("z")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_one_file_and_shards_come_back_bit_by_bit(tmp_path, dtype):
    weights = {name: value.astype(dtype) for name, value in WEIGHTS.items()}
    one, many = tmp_path / "one", tmp_path / "many"
    assert [file.name for file in write(one, weights, dtype)] == ["model.safetensors"]
    size = np.dtype(dtype).itemsize
    names = [file.name for file in write(many, weights, dtype, shard_bytes=8 * size)]
    assert names == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]  # 6 + 2 numbers, then 16 by themselves
    index = json.loads((many / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 24 * size
    assert index["weight_map"] == {"a.weight": names[0], "b.weight": names[0], "c.weight": names[1]}
    for place in (one, many):
        files = open_safetensors(place)
        assert list(files.tensors) == list(weights)
        for name, value in weights.items():
            assert files.read(name).tobytes() == value.tobytes()
    assert not list(tmp_path.rglob("*.partial"))


def test_reading_into_a_slice(tmp_path):
    write(tmp_path)
    files, out = open_safetensors(tmp_path), np.zeros((3, 2, 3), np.float32)
    files.read("a.weight", out[1])
    assert out[1].tolist() == WEIGHTS["a.weight"].tolist()
    assert not out[[0, 2]].any()
    with pytest.raises(ValueError, match=r"b\.weight is F32 \[2\], where float32 \[3\] is required"):
        files.read("b.weight", out[0, 0])


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such directory"):
        open_safetensors(tmp_path / "nothing")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin.*Pickled weights are never loaded"):
        open_safetensors(tmp_path)


def header_of(name="x", **changes):
    return {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


EIGHT = struct.pack("<2f", 1.0, 2.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes"),
        (b"\x01\x02", "2 bytes"),
        (struct.pack("<Q", 2**40) + b"{}", "its header would take 1099511627776 bytes"),
        (struct.pack("<Q", 9) + b"{not json" + EIGHT, "its header cannot be read"),
        (struct.pack("<Q", 10**5) + b"[" * 10**5, "its header cannot be read"),
        (by_hand(["x"], EIGHT), "its header cannot be read"),
        (by_hand({"x": {"dtype": "F32"}}, EIGHT), "its header cannot be read"),
        (by_hand(header_of(dtype="F8_E4M3", shape=[8]), EIGHT), "x is F8_E4M3; supported are F32, F16, BF16"),
        (by_hand(header_of(shape=[3]), EIGHT), r"x F32 \[3\] takes 12 bytes from 0, its header says 0 to 8"),
        (by_hand(header_of(shape=[-2]), EIGHT), r"x F32 \[-2\]"),
        (by_hand(header_of(data_offsets=[4, 12]), EIGHT), "takes 8 bytes from 0, its header says 4 to 12"),
        (by_hand(header_of() | header_of("y"), EIGHT), "y .* takes 8 bytes from 8, its header says 0 to 8"),
        (by_hand(header_of(), EIGHT[:-1]), r"\(\d+ bytes\) is truncated.*its header describes \d+ bytes"),
        (by_hand(header_of(), EIGHT + b"\0"), "its header describes"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, content, message):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=rf"model\.safetensors.*{message}"):
        open_safetensors(tmp_path)


def test_values_that_are_no_numbers_are_refused(tmp_path):
    write(tmp_path, {"a.weight": np.array([1.0, np.nan], np.float32), "b.weight": np.ones(2, np.float32)})
    files = open_safetensors(tmp_path)
    assert files.read("b.weight").tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"tensor a\.weight holds NaN or infinite values"):
        files.read("a.weight")


def test_a_file_that_shrinks_after_it_was_opened_is_noticed(tmp_path):
    (file,) = write(tmp_path)
    files = open_safetensors(tmp_path)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"c\.weight is cut short"):
        files.read("c.weight")


def test_an_index_must_agree_with_its_shards(tmp_path):
    whole = tmp_path / "whole"
    first, second = write(whole, shard_bytes=32)

    def broken(name, change):
        place = tmp_path / name
        shutil.copytree(whole, place)
        change(place)
        return place

    def rewrite(place, change):
        index = place / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        change(content["weight_map"])
        index.write_text(json.dumps(content))

    with pytest.raises(FileNotFoundError, match=rf"{second.name}: the index names this shard, but it is missing"):
        open_safetensors(broken("lost", lambda p: (p / second.name).unlink()))
    with pytest.raises(ValueError, match=r"first b\.weight: the index says None, the shards say model-00001"):
        open_safetensors(broken("unlisted", lambda p: rewrite(p, lambda m: m.pop("b.weight"))))
    with pytest.raises(ValueError, match=r"first d\.weight: the index says model-00001.*, the shards say None"):
        open_safetensors(broken("absent", lambda p: rewrite(p, lambda m: m.update({"d.weight": first.name}))))
    with pytest.raises(ValueError, match="lies outside the directory"):
        open_safetensors(broken("outside", lambda p: rewrite(p, lambda m: m.update({"d": "../x.safetensors"}))))
    with pytest.raises(ValueError, match=r"a\.weight is stored twice"):
        open_safetensors(broken("twice", lambda p: shutil.copy(p / first.name, p / second.name)))
    with pytest.raises(ValueError, match="is not an index of safetensors shards"):
        open_safetensors(broken("text", lambda p: (p / "model.safetensors.index.json").write_text("[1]")))


def test_what_is_written_must_be_what_was_announced(tmp_path):
    with pytest.raises(ValueError, match=r"tensor a: float64 \(2,\), not float32 \(2,\)"):
        write_safetensors(tmp_path, {"a": (2,)}, lambda _: np.zeros(2), dtype="float32", shard_bytes=100)
    assert not (tmp_path / "model.safetensors").exists()
    with pytest.raises(ValueError, match="dtype='int8': choose one of float32, float16, bfloat16"):
        write_safetensors(tmp_path, {}, lambda _: np.zeros(2), dtype="int8", shard_bytes=100)
