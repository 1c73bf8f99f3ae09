"""Configuration files, overrides, and what is refused before anything runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import get_args

import pytest

from trm_jax.correction import CorrectionConfig, preset
from trm_jax.correction._config import MaskName, WeightName
from trm_jax.train import RunConfig, TrainConfig, build, describe_options, load_config
from trm_jax.train.load import _READ_BY, parse_override

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))

BASE = """
title = "two arms"
steps = 7
[task]
params = { min_terms = 2, max_terms = 3 }
[correction]
preset = "trm_max"
max_token_kl = 0.5
[arms.plain]
[arms.lagged]
name = "with lag"
role = "corrected"
description = "older weights"
rollout.lag = 3
"""


def load(tmp_path: Path, text: str, *overrides: str) -> RunConfig:
    path = tmp_path / "file.toml"
    path.write_text(text)
    return load_config(path, overrides)


def refused(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ValueError, match=r"\w") as caught:
        load(tmp_path, text, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_an_empty_file_is_the_defaults(tmp_path):
    config = load(tmp_path, "")
    assert config.title == "file"
    assert config.directory == "runs/file"
    assert config.seeds == (0,)
    assert [arm.slug for arm in config.arms] == ["run"]
    assert config.arms[0].train == TrainConfig()


def test_arms_change_single_keys_of_what_they_share(tmp_path):
    config = load(tmp_path, BASE)
    plain, lagged = config.arms
    assert (plain.slug, plain.name, plain.role) == ("plain", "plain", "")
    assert (lagged.slug, lagged.name, lagged.role, lagged.description) == (
        "lagged", "with lag", "corrected", "older weights",
    )  # fmt: skip
    assert plain.train.steps == 7
    assert lagged.train == dataclasses.replace(plain.train, rollout=dataclasses.replace(plain.train.rollout, lag=3))


def test_a_preset_starts_anew_and_single_thresholds_do_not(tmp_path):
    config = load(
        tmp_path, BASE + '[arms.tis]\ncorrection.preset = "tis"\n[arms.looser]\ncorrection.max_token_kl = 0.9\n'
    )
    by_slug = {arm.slug: arm.train.correction for arm in config.arms}
    assert by_slug["plain"] == dataclasses.replace(preset("trm_max"), max_token_kl=0.5)
    assert by_slug["tis"] == preset("tis")  # neither the base's mask nor its threshold
    assert by_slug["looser"] == dataclasses.replace(preset("trm_max"), max_token_kl=0.9)


def test_task_parameters_are_replaced_whole(tmp_path):
    config = load(tmp_path, BASE + "[arms.other]\ntask.params = { max_digits = 1 }\n")
    assert config.arms[0].train.task.params == {"min_terms": 2, "max_terms": 3}
    assert config.arms[2].train.task.params == {"max_digits": 1}


def test_overrides_of_the_base_and_of_one_arm(tmp_path):
    config = load(
        tmp_path,
        BASE,
        "optimizer.learning_rate=3e-4",
        "arms.lagged.rollout.lag=5",
        "arms.lagged.rollout.numerics.weight_format=int8",
        "seeds=[3,1]",
        "directory=some/where else",
        "--steps=9",
    )
    plain, lagged = (arm.train for arm in config.arms)
    assert (plain.optimizer.learning_rate, lagged.optimizer.learning_rate) == (3e-4, 3e-4)
    assert (plain.rollout.lag, lagged.rollout.lag) == (0, 5)
    assert (plain.rollout.numerics.weight_format, lagged.rollout.numerics.weight_format) == ("float32", "int8")
    assert (plain.steps, lagged.steps) == (9, 9)
    assert config.seeds == (3, 1)
    assert config.directory == "some/where else"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("correction.masks=trm_max", ["correction.masks", "'trm_max'", "list"]),
        ('correction.masks=["trm_maxx"]', ["correction.masks", "trm_maxx", "trm_avg"]),
        ("correction.weight=tiss", ["correction.weight", "tiss", "tis"]),
    ],
)
def test_masks_and_weight_of_ones_own_are_checked_by_name(tmp_path, override, words):
    message = refused(tmp_path, "", override)
    for word in words:
        assert word in message, message


def test_the_table_of_what_reads_which_threshold_is_complete():
    """Every mask and weight that has thresholds is in it, and every threshold has a reader."""
    switches = {"masks", "weight", "numerator", "non_finite", "sentinel"}
    thresholds = {field.name for field in dataclasses.fields(CorrectionConfig)} - switches
    assert {name for read in _READ_BY.values() for name in read} == thresholds
    assert set(_READ_BY) == {*get_args(MaskName), *get_args(WeightName)} - {"none"}


@pytest.mark.parametrize(
    ("text", "keys", "value"),
    [
        ("a.b=1", ["a", "b"], 1),
        ("a=1e-3", ["a"], 1e-3),
        ("a=true", ["a"], True),
        ("a=[1, 2]", ["a"], [1, 2]),
        ('a="1"', ["a"], "1"),
        ("a=word", ["a"], "word"),
        ("a=trm_combined + cis", ["a"], "trm_combined + cis"),
        ("a={x=1}", ["a"], {"x": 1}),
        ("a=b=c", ["a"], "b=c"),
        ("a=", ["a"], ""),
    ],
)
def test_override_values_are_toml_or_words(text, keys, value):
    assert parse_override(text) == (keys, value)


@pytest.mark.parametrize("text", ["steps", "=3", ".a=3", "a..b=3", "a b=3", ""])
def test_a_malformed_override_shows_how_it_is_written(text):
    with pytest.raises(ValueError, match=r"write section\.key=value"):
        parse_override(text)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stepss=3", ["stepss", "did you mean steps"]),
        ("optimizer.learning_rat=3", ["optimizer", "learning_rat", "did you mean learning_rate"]),
        ("rollout.numerics.weight_fromat=int8", ["rollout.numerics", "did you mean weight_format"]),
        ("correction.presett=cis", ["correction", "did you mean preset"]),
        ("correction.zzz=1", ["correction", "zzz", "max_token_kl"]),
        ("arms.lagged.loss.knd=1", ["arms.lagged.loss", "did you mean kind"]),
        ("arms.lagged.nam=x", ["arms.lagged", "nam"]),
        ("arms.laged.rollout.lag=1", ["no such arm", "did you mean lagged"]),
        ("steps=true", ["steps", "True", "int"]),
        ("steps=3.0", ["steps", "3.0", "int"]),
        ('steps="3"', ["steps", "'3'", "int"]),
        ("optimizer.b1=true", ["optimizer.b1", "True", "float"]),
        ('optimizer.learning_rate="1e-3"', ["optimizer.learning_rate", "'1e-3'", "float"]),
        ("model.batch_invariant=1", ["model.batch_invariant", "1", "bool"]),
        ("model.batch_invariant=yes", ["model.batch_invariant", "'yes'", "bool"]),
        ("model.remat=true", ["model.remat", "True", "none, dots, full"]),
        ("model.architecture=mistral", ["model.architecture", "'mistral'", "qwen3_moe"]),
        ("model.param_dtype=float16", ["model.param_dtype", "'float16'", "bfloat16"]),
        ("model.experts=sparse", ["model.experts", "'sparse'", "megablox"]),
        ("rollout.numerics.experts=sparse", ["rollout.numerics.experts", "'sparse'", "blocked"]),
        ("checkpoint.export=true", ["checkpoint.export", "True", "bfloat16"]),
        ("model.shape={n_kv_headss=2}", ["model", "shape", "n_kv_headss", "did you mean n_kv_heads"]),
        ("model.shape={n_kv_heads=3}", ["model", "n_kv_heads=3 must divide n_heads=4"]),
        ("model.shape={n_kv_heads=2.0}", ["model", "shape.n_kv_heads", "2.0", "int"]),
        ("model.shape={latent={kv_rank=8}}", ["model", "shape.latent", "rope_dim", "missing"]),
        ("model.shape={d_model=8}", ["model", "shape.d_model", "key of its own"]),
        ("model.shape={vocab_size=8}", ["model", "shape.vocab_size", "from the task"]),
        ("model.shape=3", ["model.shape", "3", "table"]),
        ("task.kind=dapo", ["task", "kind='dapo'", "dapo_math_17k"]),
        ("task.prompt_format=boxes", ["task", "'boxes'", "answer_line", "{question}"]),
        ("title=3", ["title", "3", "str"]),
        ("seeds=3", ["seeds", "3", "list"]),
        ("seeds=[0.5]", ["seeds", "0.5", "int"]),
        ("model=3", ["model", "3", "table"]),
        ("task.params=3", ["task.params", "3", "table"]),
        ("arms.lagged=3", ["arms.lagged", "table"]),
        ("arms=3", ["arms"]),
        ("correction.preset=nope", ["correction.preset", "nope", "trm_combined"]),
        ("correction.max_token_kl=[1]", ["correction.max_token_kl", "[1]"]),
        ("correction.max_k2=1.0", ["correction.max_k2", "read by trm_sample only"]),
        ("correction.weight=tis", ["correction.weight", "preset='trm_max'", "joined"]),
        ("rollout=5", ["rollout", "5", "table"]),
        ("arms.lagged.name=warm start 2", ["arms.lagged.name", "warm start 2"]),
        ("steps=3\nfoo=3", ["steps=3", "one line"]),
        ("task.train_size=1000000000000000000000", ["task", "train_size", "at most 2147483647"]),
        ("eval.prompts=1000000", ["eval", "prompts=1000000", "at most 100000"]),
        ("warmstart.target_accuracy=1.0", ["warmstart", "target_accuracy=1.0"]),
        ("loss.kind=ppo", ["loss.kind", "ppo", "clipped", "masked"]),
        ("rollout.numerics.weight_format=int5", ["rollout.numerics.weight_format", "int5", "int4"]),
        ("steps.x=3", ["steps"]),
        ("steps=0", ["steps=0"]),
        ("steps=10000001", ["steps=10000001", "at most 10000000"]),
        ("warmstart.steps=10000001", ["warmstart", "steps=10000001", "at most 10000000"]),
        ("directory=", ["directory=''", "name a directory"]),
        ("directory='  '", ["directory='  '", "name a directory"]),
        ("rollout.numerics.routing_jitter=inf", ["rollout", "numerics.routing_jitter=inf", "finite"]),
        ("rollout.max_staleness=-1", ["rollout", "max_staleness=-1"]),
        ("rollout.queue=-1", ["rollout", "queue=-1"]),
        ("rollout.schedule=free", ["rollout.schedule", "'free'", "fixed, newest"]),
        ("rollout.patience=inf", ["rollout", "patience=inf", "finite"]),
        ("rollout.address=host", ["rollout", "address='host'", "host:port"]),
        ("rollout.address=host:0", ["rollout", "address='host:0'", "host:port"]),
        ("rollout.address=host:70000", ["rollout", "address='host:70000'"]),
        ("rollout.address=host:80", ["rollout", "weights=''", "--weights"]),
        ("rollout.engine=jetstrem", ["rollout.engine", "'jetstrem'", "jetstream"]),
        ("rollout.weights=w", ["rollout", "weights", "no address is given"]),
        ("optimizer.learning_rate=0.0", ["optimizer", "learning_rate=0.0"]),
        ("optimizer.learning_rate=inf", ["optimizer", "learning_rate=inf", "finite"]),
        ("optimizer.learning_rate=nan", ["optimizer", "learning_rate=nan"]),
        ("rollout.temperature=nan", ["rollout", "temperature=nan"]),
        ("rollout.top_p=0.0", ["rollout", "top_p=0.0"]),
        ("task.test_permille=1000", ["task", "test_permille=1000"]),
        ("correction.max_token_kl=-1.0", ["correction", "max_token_kl", "-1"]),
        ("seeds=[]", ["seeds", "at least one"]),
        ("seeds=[1,1]", ["seeds", "[1, 1]", "once"]),
        ("seeds=[-1]", ["seeds", "-1"]),
        ("seeds=[4294967296]", ["seeds", "2^32"]),
        ("arms.lagged.role=hero", ["arms.lagged.role", "hero", "corrected"]),
        ("arms.lagged.name=plain", ["same name", "plain"]),
    ],
)
def test_a_mistake_is_named_by_its_key(tmp_path, override, words):
    message = refused(tmp_path, BASE, override)
    for word in words:
        assert word in message, message


def test_a_mistake_in_the_shared_tables_is_not_blamed_on_an_arm(tmp_path):
    assert "arms." not in refused(tmp_path, BASE, "optimizer.learning_rat=3")
    assert "arms." not in refused(tmp_path, BASE, "rollout.lag=-1")
    assert "arms.lagged" in refused(tmp_path, BASE, "arms.lagged.rollout.lag=-1")


def test_seed_and_seeds_contradict(tmp_path):
    assert load(tmp_path, BASE, "seed=4").seeds == (4,)
    assert "seeds" in refused(tmp_path, BASE, "seed=4", "seeds=[5]")
    assert "arms.lagged.seed" in refused(tmp_path, BASE, "arms.lagged.seed=4")


@pytest.mark.parametrize("slug", ["Bad", "_x", "a b", "ä", "../x", ""])
def test_a_slug_names_a_directory(slug):
    with pytest.raises(ValueError, match="a slug is"):
        build({"arms": {slug: {}}})


def test_no_arms_at_all():
    with pytest.raises(ValueError, match="one table an arm"):
        build({"arms": {}})


CONTRADICTIONS = [
    ("rollout.samples_per_prompt=1", ["samples_per_prompt=1", "at least 2"]),
    ("loss.minibatches=3", ["loss.minibatches=3", "256"]),
    ("loss.microbatch_rows=100", ["loss.microbatch_rows=100", "256"]),
    ("mesh.data=3", ["mesh.data=3", "256"]),
    ("mesh.tensor=5", ["mesh.tensor=5", "d_model=96"]),
    ("model.n_heads=5", ["n_heads=5", "d_model=96"]),
    ("model.d_model=36 model.n_heads=12", ["d_model/n_heads=3", "even"]),
    ("model.n_experts=2 model.experts_per_token=3", ["experts_per_token=3", "2"]),
    ("rollout.numerics.routing_jitter=0.1", ["routing_jitter", "mixture of experts"]),
    ("model.d_model=48 rollout.numerics.weight_format=int4", ["group_size=32", "48"]),
    ("rollout.numerics.quantize_head=true", ["quantize_head", "weight_format"]),
    ("rollout.record_hidden=false correction.preset=trm_max", ["record_hidden", "trm_max", "trm_sample"]),
    ("loss.kind=masked loss.aggregation=sequence_mean", ["aggregation='sequence_mean'", "kind='masked'"]),
    ("loss.kind=masked loss.dual_clip=3.0 loss.clip_low=0.9", ["clip_low=0.9, dual_clip=3.0", "kind='clipped'"]),
    ("eval.greedy=true eval.temperature=0.7", ["temperature=0.7", "greedy"]),
    ("model.batch_invariant=true mesh.data=2", ["batch_invariant", "one device"]),
    ("task.kind=gsm8k", ["model.path=''", "task.kind='gsm8k'"]),
    ("model.path=smollm2", ["model.path='smollm2'", "gsm8k"]),
    ("model.path=here task.kind=gsm8k model.d_model=8", ["d_model=8", "path='here' brings its own shape"]),
    ("model.path=here task.kind=gsm8k model.architecture=qwen3", ["architecture='qwen3'", "brings its own shape"]),
    ("model.architecture=qwen3 model.n_experts=4", ["'qwen3' has no experts", "qwen3_moe"]),
    ("model.replay_routes=true", ["model.replay_routes", "mixture of experts"]),
    ("model.experts=blocked", ["model.experts", "mixture of experts"]),
    ("rollout.numerics.experts=blocked", ["rollout.numerics.experts", "mixture of experts"]),
    ("model.n_experts=4 model.experts=blocked model.batch_invariant=true", ["'blocked'", "batch_invariant"]),
    ("loss.kind=masked correction.preset=cis", ["loss.kind='masked'", "cis", "ignored"]),
    ("loss.kind=masked correction.preset=token_mask", ["loss.kind='masked'", "token_outlier"]),
    ("correction.numerator=policy", ["numerator", "proximal"]),
    ("correction.non_finite=raise", ["non_finite", "drop"]),
    ("loss.dual_clip=0.5", ["dual_clip=0.5", "above 1"]),
    ("rollout.lag=2 rollout.max_staleness=2", ["lag=2", "max_staleness=2", "one of the two"]),
    ("rollout.queue=2", ["queue=2", "max_staleness=0"]),
    ("rollout.schedule=newest", ["schedule='newest'", "max_staleness=0"]),
    ("rollout.max_staleness=1 loss.minibatches=2", ["max_staleness=1", "2 updates old", "loss.minibatches=2"]),
    ("rollout.max_staleness=2 rollout.queue=3", ["max_staleness=2", "3 ahead", "3 updates old"]),
    ("rollout.max_staleness=1 mesh.data=2", ["max_staleness", "one device"]),
    ("rollout.max_staleness=1 rollout.finish_first=true", ["finish_first", "newest"]),
    (
        "rollout.max_staleness=1 rollout.schedule=newest rollout.address=h:1 rollout.weights=w",
        ["record_hidden=false", "several versions"],
    ),
    (
        "rollout.max_staleness=1 rollout.schedule=newest rollout.engine=jetstream",
        ["record_hidden=false", "several versions"],
    ),
    ("rollout.engine=jetstream rollout.finish_first=true", ["finish_first", "newest"]),
    ("rollout.engine=jetstream rollout.address=h:1 rollout.weights=w", ["engine='jetstream'", "address='h:1'"]),
    ("rollout.engine=loop rollout.address=h:1 rollout.weights=w", ["engine='loop'", "address='h:1'"]),
]


def test_batches_ahead_are_what_staleness_allows_unless_fewer_are_asked_for():
    """Steps ahead times updates a step is what a batch can be stale by."""

    def ahead(minibatches: int = 1, **rollout) -> int:
        return build({"loss": {"minibatches": minibatches}, "rollout": rollout}).arms[0].train.ahead

    assert ahead() == 0
    assert ahead(lag=3) == 0
    assert ahead(max_staleness=3) == 3
    assert ahead(max_staleness=3, queue=2) == 2
    assert ahead(minibatches=2, max_staleness=5) == 2
    assert ahead(minibatches=4, max_staleness=1, schedule="newest") == 1
    assert ahead(max_staleness=1, queue=5, schedule="newest") == 5


@pytest.mark.parametrize(("overrides", "words"), CONTRADICTIONS)
def test_contradictions_are_refused(tmp_path, overrides, words):
    message = refused(tmp_path, "", *overrides.split(" "))
    for word in words:
        assert word in message, message


def test_files_that_are_not_configurations(tmp_path):
    with pytest.raises(ValueError, match=r"no configuration file .*nowhere\.toml"):
        load_config(tmp_path / "nowhere.toml")
    assert "not valid TOML" in refused(tmp_path, "steps = = 3")
    assert "not valid TOML" in refused(tmp_path, '{"steps": 3}')
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not valid TOML"):
        load_config(tmp_path / "binary.toml")
    with pytest.raises(ValueError, match="cannot read"):
        load_config(tmp_path)


def test_every_shipped_configuration_loads():
    assert {path.stem for path in CONFIGS} >= {"quickstart"}
    for path in CONFIGS:
        config = load_config(path)
        assert config.directory.startswith("runs/"), path
        assert path.read_text().startswith("# What:"), path
        assert f"trm-jax train configs/{path.name}" in path.read_text(), path


def test_options_describe_every_field_and_a_default_config_can_be_made_of_them():
    rows = describe_options()
    keys = [row[0] for row in rows]
    assert len(set(keys)) == len(keys)

    def leaves(value, where=""):
        for field in dataclasses.fields(value):
            inner, key = getattr(value, field.name), f"{where}{field.name}"
            if dataclasses.is_dataclass(inner):
                yield from leaves(inner, f"{key}.")
            else:
                yield key

    own = {"title", "directory", "seeds", "arms.SLUG.name", "arms.SLUG.description", "arms.SLUG.role", "arms.SLUG.KEY"}
    assert set(keys) == {*leaves(TrainConfig()), *own, "correction.preset"}
    for key, kind, default, meaning in rows:
        assert len(meaning) > 5, key
        assert "<" not in kind + default, (key, kind, default)
    by_key = {row[0]: row[1:3] for row in rows}
    assert by_key["optimizer.learning_rate"] == ("float", "0.0002")
    assert by_key["loss.kind"] == ("clipped | masked", "'clipped'")
    assert by_key["model.experts"] == ("dense | blocked | ragged_dot | megablox | None", "None")
    assert by_key["correction.max_k2"] == ("float | None", "0.5")


def test_the_default_correction_is_a_trust_region_and_thresholds_alone_adjust_it(tmp_path: Path) -> None:
    trust_region = preset("trm_combined")
    assert TrainConfig().correction == trust_region
    path = tmp_path / "run.toml"
    path.write_text("steps = 1\n[correction]\nmax_token_kl = 0.9\n")
    assert load_config(path).arms[0].train.correction == dataclasses.replace(trust_region, max_token_kl=0.9)
    path.write_text('steps = 1\n[correction]\nweight = "cis"\n')
    assert load_config(path).arms[0].train.correction == CorrectionConfig(weight="cis")


def test_an_architecture_is_chosen_by_name_and_changed_by_its_fields(tmp_path: Path) -> None:
    text = '[model]\narchitecture = "deepseek_v2"\nn_layers = 3\n'
    shape = (
        load(tmp_path, text + "shape = { expert_scale = 2.0, latent = { kv_rank = 20 } }")
        .arms[0]
        .train.model.scratch(14)
    )
    assert (shape.latent.kv_rank, shape.latent.rope_dim, shape.expert_scale) == (20, 12, 2.0)
    assert (shape.vocab_size, shape.n_layers, shape.n_dense_layers, shape.n_experts) == (14, 3, 1, 8)
    assert load(tmp_path, text, "model.n_experts=4").arms[0].train.model.scratch(14).n_experts == 4
