"""Weights between processes: whole, verified, of this model, or refused."""

from __future__ import annotations

import hashlib
import json

import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax.checkpoint import Checkpointer
from trm_jax.serve import WeightDirectory, WeightsRefused


def params(version: int) -> dict:
    return {"w": jnp.arange(6.0).reshape(2, 3) + version, "b": jnp.full(3, float(version))}


def test_what_is_read_is_what_was_published_and_old_versions_go(tmp_path):
    directory = WeightDirectory(tmp_path, keep=2)
    for version in (0, 7, 3):  # not in order: a run that starts anew in the same place
        directory.publish(version, params(version))
        read = WeightDirectory(tmp_path).read(version, params(0))
        np.testing.assert_array_equal(read["w"], params(version)["w"])
    assert directory.versions() == [3, 7]
    directory.publish(3, params(9))  # again
    np.testing.assert_array_equal(directory.read(3, params(0))["b"], params(9)["b"])


def test_absent_half_written_and_damaged_versions_are_refused(tmp_path):
    directory = WeightDirectory(tmp_path)
    with pytest.raises(WeightsRefused, match="no policy version 4"):
        directory.read(4, params(0))
    checkpoint = next(directory.publish(4, params(4)).glob("step_*"))
    with pytest.raises(WeightsRefused, match="does not fit"):
        directory.read(4, {"w": jnp.zeros((2, 4)), "b": jnp.zeros(3)})

    largest = max(
        (path for path in (checkpoint / "arrays").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    whole = largest.read_bytes()
    largest.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(WeightsRefused, match="SHA-256"):
        directory.read(4, params(0))
    largest.write_bytes(whole)
    directory.read(4, params(0))

    partial = checkpoint.rename(checkpoint.with_name(f"{checkpoint.name}.partial"))
    with pytest.raises(WeightsRefused, match="not complete"):
        directory.read(4, params(0))
    partial.rename(checkpoint)
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(WeightsRefused, match="not complete"):
        directory.read(4, params(0))
    (checkpoint / "manifest.json").write_text(json.dumps({}))
    with pytest.raises(WeightsRefused, match="not in the manifest"):
        directory.read(4, params(0))


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("manifest.json", "null", "cannot be read: TypeError"),
        ("manifest.json", "[1]", "cannot be read: TypeError"),
        ("manifest.json", "\0", "damaged"),
        ("layout.json", "[]", "cannot be read: AttributeError"),
        ("layout.json", '{"w": 3}', "does not fit"),
        ("state.json", "{", "cannot be read: JSONDecodeError"),
        ("arrays/_METADATA", "", "does not fit"),
    ],
)
def test_nonsense_with_a_valid_manifest_is_refused_and_no_path_is_told(tmp_path, file, text, words):
    directory = WeightDirectory(tmp_path)
    checkpoint = next(directory.publish(4, params(4)).glob("step_*"))
    (checkpoint / file).write_text(text)
    if file != "manifest.json":
        entry = {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        (checkpoint / "manifest.json").write_text(json.dumps(manifest | {file: entry}))
    with pytest.raises(WeightsRefused, match=f"policy version 4.*{words}") as refused:
        directory.read(4, params(0))
    assert str(tmp_path) not in str(refused.value)


def test_versions_of_one_number_are_told_apart(tmp_path):
    ours, theirs = WeightDirectory(tmp_path / "ours"), WeightDirectory(tmp_path / "theirs")
    for directory, weights in ((ours, 1), (theirs, 2)):
        directory.publish(4, params(weights))
    meant = ours.identity(4)
    assert len(meant) == 64
    assert meant != theirs.identity(4)
    np.testing.assert_array_equal(ours.read(4, params(0), identity=meant)["b"], params(1)["b"])
    with pytest.raises(WeightsRefused, match=r"policy version 4 .* another run wrote it.*rollout\.weights"):
        theirs.read(4, params(0), identity=meant)
    ours.publish(4, params(3))
    assert ours.identity(4) != meant
    with pytest.raises(WeightsRefused, match="no policy version 5"):
        ours.identity(5)


def test_a_version_that_is_written_anew_while_it_is_read_is_refused(tmp_path):
    directory = WeightDirectory(tmp_path)
    directory.publish(4, params(1))

    def restore(self, template, original=Checkpointer.restore_latest):
        found = original(self, template)
        directory.publish(4, params(2))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpointer, "restore_latest", restore)
        with pytest.raises(WeightsRefused, match="another run wrote it"):
            directory.read(4, params(0))


def test_a_version_is_a_number_and_no_path(tmp_path):
    for version in (-1, 10**8):
        with pytest.raises(ValueError, match="must lie in"):
            WeightDirectory(tmp_path).read(version, params(0))


def test_a_directory_has_one_writer_who_finds_it_empty(tmp_path):
    directory = WeightDirectory(tmp_path / "weights")
    with directory.owned():
        directory.publish(3, params(3))
        with pytest.raises(ValueError, match="another trainer writes its weights to"), directory.owned():
            pass
        with pytest.raises(ValueError, match="another trainer writes its weights to"):
            WeightDirectory(tmp_path / "weights").check_free()
        assert directory.versions() == [3]
    directory.check_free()
    assert directory.versions() == [3]
    WeightDirectory(tmp_path / "absent").check_free()
    assert not (tmp_path / "absent").exists()
    with WeightDirectory(tmp_path / "weights").owned():  # an earlier run's version could pass for this one's
        assert directory.versions() == []
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ValueError, match="cannot write to the weight directory"),
        WeightDirectory(tmp_path / "file").owned(),
    ):
        pass
