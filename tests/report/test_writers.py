from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import jax.numpy as jnp
import pytest

from trm_jax.report import JsonlWriter, MultiWriter, TensorBoardWriter, read_metrics
from trm_jax.report.writers import write_atomically


def _write(path: Path, steps: range) -> None:
    with JsonlWriter(path) as writer:
        for step in steps:
            writer.write(step, {"stage": "rl", "reward/mean": step / 10})


def test_what_is_written_is_read_back_non_finite_numbers_included(tmp_path: Path):
    path = tmp_path / "deep" / "metrics.jsonl"
    with JsonlWriter(path) as writer:
        writer.write(1, {"stage": "rl", "version": jnp.int32(1), "optim/loss": math.nan, "optim/grad_norm": math.inf})
        writer.write(2, {"step": 2, "optim/loss": -math.inf, "reward/mean": jnp.float32(0.5)})
    first, second = read_metrics(path)
    assert math.isnan(first.pop("optim/loss"))
    assert first == {"step": 1, "stage": "rl", "version": 1, "optim/grad_norm": math.inf}
    assert second == {"step": 2, "optim/loss": -math.inf, "reward/mean": 0.5}


def test_lines_are_strict_json(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with JsonlWriter(path) as writer:
        writer.write(1, {"optim/loss": math.nan, "optim/grad_norm": -math.inf})

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    row = json.loads(path.read_text(), parse_constant=refuse)
    assert row == {"step": 1, "optim/loss": "nan", "optim/grad_norm": "-inf"}


def test_each_line_is_on_disk_before_the_next_is_written(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    for step in (1, 2):
        writer.write(step, {"reward/mean": 0.0})
        assert len(read_metrics(path)) == step
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write(3, {"reward/mean": 0.0})


def test_a_reopened_file_goes_on_where_it_was(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 3))
    _write(path, range(3, 5))
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4]


def test_truncation_removes_later_steps_and_keeps_the_rest_byte_for_byte(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 6))
    head = b"".join(path.read_bytes().splitlines(keepends=True)[:3])
    with JsonlWriter(path) as writer:
        assert writer.truncate_after(3) == 2
        assert path.read_bytes() == head
        writer.write(4, {"reward/mean": 0.9})
    assert [row["reward/mean"] for row in read_metrics(path)] == [0.1, 0.2, 0.3, 0.9]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_truncation_to_before_the_first_step_and_beyond_the_last(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 4))
    with JsonlWriter(path) as writer:
        assert writer.truncate_after(99) == 0
        assert writer.truncate_after(0) == 3
        writer.write(1, {"reward/mean": 0.5})
    assert len(read_metrics(path)) == 1


@pytest.mark.parametrize("torn", ['{"step": 4, "rew', "{", '{"step": 4, "stage": "r\xc3'])
def test_a_torn_last_line_is_dropped_with_a_warning_and_removed_on_resume(tmp_path: Path, torn: str):
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 4))
    with path.open("ab") as stream:
        stream.write(torn.encode("latin-1"))
    with pytest.warns(UserWarning, match="line 4 was cut off"):
        assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    _write(path, range(4, 6))
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4, 5]


def test_a_last_line_that_lacks_only_its_newline_is_kept(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 3))
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert len(read_metrics(path)) == 2
    _write(path, range(3, 4))
    assert len(read_metrics(path)) == 3


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{broken", "Expecting property name"),
        ("[1]", "not a JSON object with a step"),
        ('{"reward/mean": 1}', "not a JSON object with a step"),
        ('{"step": 2, "reward/maen": 1}', "did you mean 'reward/mean'"),
        ('{"step": 2, "reward/mean": NaN}', "NaN is not JSON"),
        ('{"step": 2, "reward/mean": "high"}', "must be a number"),
        ('{"step": "nan"}', "step is nan"),
        ('{"step": 2, "reward/mean": [1]}', "must be a number"),
        ('{"step": [2]}', "must be a number"),
    ],
)
def test_a_malformed_line_is_named_by_its_number(tmp_path: Path, line: str, complaint: str):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(ValueError, match="line 2 is malformed") as error:
        read_metrics(path)
    assert complaint in str(error.value)
    with pytest.raises(ValueError, match="line 2 is malformed"):
        JsonlWriter(path)


def test_steps_never_go_back_and_the_message_says_what_to_do(tmp_path: Path):
    with JsonlWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write(5, {"reward/mean": 0.0})
        writer.write(5, {"accuracy/heldout": 0.5})
        with pytest.raises(ValueError, match=r"step 4 comes after step 5 .* truncate_after\(3\)"):
            writer.write(4, {"reward/mean": 0.0})
        with pytest.raises(ValueError, match="given step 6 and a record of step 7"):
            writer.write(6, {"step": 7})


def test_a_refused_record_leaves_no_trace(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with JsonlWriter(path) as writer:
        with pytest.raises(ValueError, match="did you mean 'optim/loss'"):
            writer.write(1, {"optim/losss": 1.0})
        writer.write(1, {"optim/loss": 1.0})
    assert read_metrics(path) == [{"step": 1, "optim/loss": 1.0}]


def test_an_empty_file_has_no_records(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.touch()
    assert read_metrics(path) == []


def test_an_atomic_write_that_fails_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "file"
    write_atomically(path, b"old")
    with pytest.raises(TypeError):
        write_atomically(path, "not bytes")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def _tensorboard_events(folder: Path) -> list[tuple[int, str, float | None]]:
    """(step, tag, scalar) of every event, read from the record framing: length, crc, payload, crc."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.glob("events*")):
        data = path.read_bytes()
        at = 0
        while at < len(data):
            (length,) = struct.unpack("<Q", data[at : at + 8])
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            for value in event.summary.value:
                scalar = value.simple_value if value.WhichOneof("value") == "simple_value" else None
                found.append((event.step, value.tag, scalar))
    return found


def test_tensorboard_gets_scalars_and_changes_of_the_stage(tmp_path: Path):
    with TensorBoardWriter(tmp_path) as writer:
        writer.write(1, {"step": 1, "stage": "warmstart", "optim/loss": 2.0})
        writer.write(2, {"stage": "warmstart", "optim/loss": math.nan})
        writer.write(3, {"stage": "rl", "optim/loss": 0.5})
        with pytest.raises(ValueError, match="unknown metric"):
            writer.write(4, {"loss": 0.5})
    events = _tensorboard_events(tmp_path)
    losses = [(step, value) for step, tag, value in events if tag == "optim/loss"]
    assert [step for step, _ in losses] == [1, 2, 3]
    assert losses[0][1] == 2.0
    assert math.isnan(losses[1][1])
    assert [step for step, tag, _ in events if tag.startswith("stage")] == [1, 3]


class _Recorder:
    def __init__(self, *, fails: bool = False) -> None:
        self.seen: list[int] = []
        self.closed = 0
        self._fails = fails

    def write(self, step: int, metrics: object) -> None:
        self.seen.append(step)

    def close(self) -> None:
        self.closed += 1
        if self._fails:
            raise OSError("disk full")


def test_several_writers_all_get_everything_and_are_all_closed():
    broken, sound = _Recorder(fails=True), _Recorder()
    writer = MultiWriter(broken, sound)
    writer.write(7, {"optim/loss": 1.0})
    with pytest.raises(OSError, match="disk full"):
        writer.close()
    assert broken.seen == sound.seen == [7]
    assert (broken.closed, sound.closed) == (1, 1)
