from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hpc_train import config
from hpc_train.config import RunSection
from hpc_train.config import file as config_file
from hpc_train.config.file import load
from hpc_train.errors import ConfigError


def write(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return path


def test_options_win_over_the_file_and_the_file_over_the_defaults(tmp_path):
    path = write(tmp_path, "run: {steps: 5, seed: 3}\nmodel: {layers: 2}")
    made = load(path, ["--run.steps", "7", "--optimizer.lr=0.5"])
    assert (made.run.steps, made.run.seed, made.model.layers) == (7, 3, 2)
    assert made.optimizer.lr == 0.5
    assert made.data == config.DataSection()


def test_the_profile_has_keys_of_its_own(tmp_path):
    path = write(tmp_path, "run: {profile: {steps: 10-20, ranks: 0}}")
    made = load(path, ["--run.profile.ranks", "0,3-5"]).run.profile
    assert (made.span, made.ranks) == ((10, 20), "0,3-5")
    assert load(path).run.profile.span == (10, 20)
    one = load(None, ["--run.profile.steps=7"])
    assert one.run.profile.span == (7, 7)
    assert load(write(tmp_path, one.to_yaml())) == one
    assert load(None).run.profile.span is None
    long = load(None, ["--run.profile.steps=1-5000", "--run.profile.ranks=none"])
    assert long.run.profile.span == (1, 5000)
    for ranks, steps, message in (
        (6, 19, "run.profile.steps is 10-20, but the run ends with step 19: give steps up to 19"),
        (5, 20, "run.profile.ranks is 0,3-5, but the job has ranks 0 to 4"),
    ):
        with pytest.raises(ConfigError, match=message):
            made.check(ranks, steps)
    made.check(6, 20)


def test_a_written_configuration_reads_back_equal(tmp_path):
    made = load(None, ["--run.time_limit", "01:30:00", "--data.path", "1e3", "--run.epochs", "2"])
    assert load(write(tmp_path, made.to_yaml())) == made


def test_a_kind_of_model_has_its_own_keys_and_defaults(tmp_path):
    """In any order of the options, and again from the file that says what was taken."""
    made = load(None, ["--model.members", "8", "--model.kind", "tabular_mlp"]).model
    assert (made.members, made.hidden, made.numeric) == (8, 128, "piecewise_linear")
    assert (made.heads, made.vocab, made.sequence, made.tie_embeddings) == (None,) * 4
    written = load(None, ["--model.kind=tabular_mlp", "--model.quantiles=[0.1, 0.9]"])
    assert "members: 16" in written.to_yaml()
    assert load(write(tmp_path, written.to_yaml())) == written


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["--model.kind=tabular", "--model.vocab=9"], "vocab"),
        (["--model.kind=tabular", "--model.members=9"], "members"),
        (["--model.kind=tabular_mlp", "--model.heads=2"], "heads"),
        (["--model.kind=tabular_resnet", "--model.tie_embeddings=false"], "tie_embeddings"),
        (["--model.numeric=linear"], "numeric"),
        (["--model.quantiles=[0.5]"], "quantiles"),
    ],
)
def test_a_key_of_another_kind_of_model_is_refused(options, key):
    with pytest.raises(ConfigError, match=f"model.{key} is given, but model.kind .* does not have"):
        load(None, options)


def test_a_word_or_a_path_that_yaml_takes_for_something_else_needs_no_quotes(tmp_path):
    text = """
    gradients: {two_level: off}
    run: {dir: &dir 1e3, deterministic: yes, trackers: [csv]}
    data: {cache: *dir, path: [{path: 2024, weight: 2}, {path: no}]}
    checkpoint: {replicas: off, weights: 2.50, include: [1, on]}
    """
    made = load(write(tmp_path, text))
    assert (made.gradients.two_level, made.checkpoint.replicas) == ("off", "off")
    assert (made.run.dir, made.data.cache, made.checkpoint.weights) == ("1e3", "1e3", "2.50")
    assert made.data.folders == {"2024": 2, "no": 1}
    assert made.checkpoint.include == ["1", "on"]
    assert made.run.deterministic is True
    assert load(write(tmp_path, made.to_yaml())) == made


ADASUM = "gradients: {engine: horovod, reduction: adasum}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: {setps: 3}", "unknown key run.setps: did you mean run.steps?"),
        ("steps: 3", "unknown key steps: did you mean run.steps?"),
        ("runn: {steps: 3}", "unknown key runn.steps: did you mean run.steps?"),
        ("optimizer: {epochs: 3}", "unknown key optimizer.epochs: did you mean run.epochs?"),
        ("foo: {bar: 3}", "the file's top has run, model"),
        ("run: {profile: {setps: 3}}", "unknown key run.profile.setps: did you mean run.profile.s"),
        ("run: {profile: 10-20}", "run.profile is '10-20': write its keys below it"),
        ("run: {profile: {steps: 20-10}}", "run.profile.steps is '20-10': give a step, or steps"),
        ("run: {profile: {steps: 0-3}}", "run.profile.steps is '0-3': give a step, or steps"),
        (
            "run: {profile: {steps: 1-101}}",
            "run.profile.steps has 101 steps, but torch.profiler records 100 at most: give fewer",
        ),
        (
            "run: {profile: {ranks: some}}",
            "run.profile.ranks is 'some': give all, none, or numbers",
        ),
        ("model: {layers: many}", "model.layers is 'many': it takes a whole number"),
        ("data: {workers: 100000}", "data.workers is 100000: give 256 or less: each rank starts"),
        (f"run: {{steps: {10**27}}}", "give a number below 2**63"),
        (f"model: {{layers: {1 << 63}}}", "give a number below 2**63"),
        (f"run: {{seed: {1 << 63}}}", "give a number below 2**63"),
        (f"run: {{time_limit: '{'9' * 5000}'}}", "give seconds, HH:MM:SS"),
        ("gradients: {two_level: yes}", "two_level is 'yes': it takes one of auto, on, off"),
        ("model: {layers: on}", "model.layers is 'on': it takes a whole number"),
        ("run: {steps: 0}", "run.steps is 0: give 1 or more"),
        ("run: {steps: 010}", "run.steps is 010, which YAML reads as an octal number"),
        ("run: {steps: 1:30}", "run.steps is 1:30: it takes a whole number"),
        ("run: {steps: '010'}", "run.steps is 010, which YAML reads as an octal number"),
        ("checkpoint: {minutes: 1:30}", "checkpoint.minutes is 1:30: it takes a number"),
        ("optimizer: {lr: 1:30.5}", "optimizer.lr is 1:30.5: it takes a number"),
        ("run: {profile: {steps: 1:30}}", "run.profile.steps is '1:30': give a step"),
        ("run: {time_limit: 12:00}", "run.time_limit is '12:00': give seconds, HH:MM:SS"),
        ("run: {hang_timeout: .inf}", "run.hang_timeout is inf: give a finite number"),
        ("run.steps: 3\nrun: {steps: 4}", "has the key run.steps twice, again in line 2"),
        ("optimizer:", "optimizer is empty: write its keys below it, such as name:"),
        ("optimizer: {lr: }", "optimizer.lr is empty: give a number"),
        ("checkpoint: {every: }", "checkpoint.every is empty: give a whole number"),
        ("model: {kind: }", "model.kind is empty: give one of gpt"),
        ("run: {trackers: }", "run.trackers is empty: give a list"),
        ("run: {profile: {ranks: }}", "run.profile.ranks is empty: give a whole number or text"),
        ("run: {steps: 1, epochs: 1}", "run.steps and run.epochs are both given"),
        ("model: {hidden: 64, heads: 3}", "does not divide model.hidden 64: nearest that do: 2, 4"),
        ("model: {dropout: 1.0}", "model.dropout is 1.0"),
        ("model: {kind: tabular, quantiles: [0.5, 1]}", "give numbers above 0 and below 1"),
        ("model: {kind: tabular_mlp, members: 0}", "model.members is 0: give 1 or more"),
        ("gradients: {engine: gloo}", "it takes one of auto, horovod, mpi, nccl"),
        ("gradients: {engine: nccl, compression: bf16}", "leave gradients.compression out"),
        ("gradients: {reduction: adasum}", "engine is auto: use --gradients.engine horovod"),
        (
            ADASUM + "optimizer: {clip_norm: 1}",
            "have no common norm: leave optimizer.clip_norm out",
        ),
        ("gradients: {engine: horovod, two_level: 'on'}", "use --gradients.engine mpi"),
        ("gradients: {engine: horovod, compression: bf16}", "or compression fp16"),
        ("gradients: {compression: 'topk:0.1'}\nparallel: {tp: 2}", "use powersgd, fp16 or bf16"),
        (
            "precision: {matmul: onednn, dtype: bfloat16}",
            "precision.matmul is onednn, but precision.dtype is bfloat16",
        ),
        ("precision: {matmul: mkl}", "it takes one of auto, onednn, torch"),
        ("run: {time_limit: soon}", "give seconds, HH:MM:SS, D-HH:MM:SS or 1h30m, or auto"),
        ("run: {time_limit: '1:60:00'}", "run.time_limit is '1:60:00'"),
        ("foo: {}", "unknown key foo: the file's top has run, model"),
        ("model: {colour: red}", "unknown key model.colour: model has kind, layers"),
        ("run: 5", "run is 5: write its keys below it, such as dir:"),
        ("[1, 2]", "is not a configuration"),
        ("a: [", "is not YAML"),
        ("run: {dir: !!int x}", "is not YAML"),
        (f"run: {'[' * 3000}", "is not YAML: maximum recursion depth exceeded"),
        (
            "run: {dir: a}\nmodel: {}\nrun: {steps: 3}",
            "has the key run twice, again in line 3: keep",
        ),
        ("run: {steps: 3, dir: a, steps: 4}", "has the key run.steps twice, again in line 1"),
        (
            "data:\n path:\n - path: a\n   path: b",
            "the key data.path[0].path twice, again in line 4",
        ),
    ],
)
def test_a_mistake_is_named_with_what_is_right(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text))
    assert message in str(caught.value)
    if "unknown key" in message:
        assert str(tmp_path) in str(caught.value), "the file is named"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lr", "1e-3"], "unknown option --lr: did you mean --optimizer.lr?"),
        (["--steps=3"], "unknown option --steps: did you mean --run.steps?"),
        (["--run.setps=3"], "unknown option --run.setps: did you mean --run.steps?"),
        (["--bogus"], "unknown option --bogus: `hpc-train train --help` lists the options"),
        (["--run", "{setps: 9}"], "--run is a section: give its keys, such as --run.dir"),
        (["--run.profile=x"], "--run.profile is a section: give its keys, such as --run.profile.s"),
        (
            ["--config", "a.yaml"],
            "there is no option --config: give CONFIG.yaml before all options",
        ),
        (["--run.steps", "1:30"], "run.steps is 1:30: it takes a whole number"),
        (["--optimizer.lr="], "optimizer.lr is empty: it takes a number"),
    ],
)
def test_a_mistake_in_an_option_is_named_with_what_is_right(options, message):
    with pytest.raises(ConfigError) as caught:
        load(None, options)
    assert message in str(caught.value)


def test_a_dotted_key_of_a_file_goes_with_its_section(tmp_path):
    text = "optimizer.lr: 0.5\nrun.profile.steps: 3\noptimizer: {warmup_steps: 2}\n"
    made = load(write(tmp_path, text + "run: {seed: 4, profile: {ranks: 1}}"))
    assert (made.optimizer.lr, made.optimizer.warmup_steps, made.run.seed) == (0.5, 2, 4)
    assert (made.run.profile.steps, made.run.profile.ranks) == (3, 1)


def test_a_key_that_an_alias_brings_again_is_not_there_twice(tmp_path):
    text = "data: {path: [&one {path: a}, *one]}\n"
    with pytest.raises(ConfigError, match="data.path has a twice in its list"):
        load(write(tmp_path, text))
    with pytest.raises(ConfigError, match="unknown key"):
        load(write(tmp_path, "a: &a {b: *a}"))


def test_an_unknown_value_is_refused_with_the_allowed_ones():
    with pytest.raises(ConfigError, match=r"memory\.zero.*'?4'?.*: .*auto"):
        load(None, ["--memory.zero=4"])


def test_a_size_of_no_cache_is_refused():
    with pytest.raises(ConfigError, match=r"data\.cache_gb is 3, but data\.cache is not given"):
        load(None, ["--data.cache_gb", "3"])
    assert load(None, ["--data.cache", "/dev/shm", "--data.cache_gb", "3"]).data.cache_gb == 3


def test_a_file_behind_options_is_named():
    with pytest.raises(
        ConfigError, match=r"my.yaml comes after other words: give one file, before"
    ):
        load(None, ["--run.steps", "2", "my.yaml"])


def test_a_file_that_cannot_be_read_twice_is_named(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe is a pipe, which cannot be read twice: write it"):
        load(tmp_path / "pipe")


@pytest.mark.parametrize("key", ["run.dir", "data.cache", "checkpoint.weights"])
def test_a_path_with_a_character_that_no_path_has_is_named(key):
    with pytest.raises(ConfigError, match=f"{key} has the character NUL: give a path"):
        load(None, [f"--{key}", "a\0b"])


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"there is no configuration /no/such.yaml: give"):
        load("/no/such.yaml")


@pytest.mark.parametrize("written", [5400, "5400", "1:30:00", "0-01:30:00", "1h30m"])
def test_a_time_limit_has_several_forms(written):
    assert RunSection(time_limit=written).time_limit_seconds() == 5400


PATHS = "run: {dir: '~/runs/x'}\ndata: {path: '$TEXTS/data'}\ncheckpoint: {weights: '${TEXTS}/w'}"


def test_home_and_variables_are_expanded_in_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("TEXTS", "/scratch/me")
    made = load(write(tmp_path, PATHS))
    assert made.run.dir == "/home/me/runs/x"
    assert (made.data.path, made.checkpoint.weights) == ("/scratch/me/data", "/scratch/me/w")
    assert load(None, ["--checkpoint.resume=~/other"]).checkpoint.resume == "/home/me/other"
    assert load(None, ["--memory.offload=$TEXTS/disk"]).memory.offload == "/scratch/me/disk"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("$NO_SUCH/x", "the variable NO_SUCH is not set"),
        ("/x/${NO_SUCH}", "the variable NO_SUCH is not set"),
        ("~nobody_at_all/x", "there is no user nobody_at_all"),
        ("a$", "write it without"),
    ],
)
def test_a_path_that_cannot_be_expanded_is_refused(value, message):
    with pytest.raises(ConfigError) as caught:
        load(None, [f"--run.dir={value}"])
    assert "run.dir is" in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("key", ["run.dir", "data.cache", "checkpoint.resume"])
@pytest.mark.parametrize("value", ["", "$UNFILLED"])
def test_an_empty_path_is_not_the_current_folder(monkeypatch, key, value):
    monkeypatch.setenv("UNFILLED", "")
    with pytest.raises(ConfigError, match=f"{key} is empty: give a path"):
        load(None, [f"--{key}", value])
    assert load(None, ["--checkpoint.weights", ""]).checkpoint.weights == ""


def test_a_variable_of_the_job_may_be_unknown_where_it_is_submitted():
    options = ["--data.path", "$NO_SUCH/data"]
    assert load(None, options, later=("data.path",)).data.path == "$NO_SUCH/data"
    disk = ["--memory.offload", "$NO_SUCH"]
    assert load(None, disk, later=("memory.offload",)).memory.offload == "$NO_SUCH"
    with pytest.raises(ConfigError, match="data.path"):
        load(None, options)


def test_every_key_is_documented():
    text = config_file.config_parser(documented=True).format_help()
    for key in config_file.KEYS:
        for items in ("[ITEM,...]", "PATH"):  # a list can be added to
            text = text.replace(f", --{key}+ {items}", "")
        documented = text.split(f"--{key} ")[-1].split("--")[0]
        assert len(documented.split("(type")[0].split()) > 2, key


@pytest.mark.parametrize("key", ["class_weights", "sampling"])
def test_a_gpt_has_no_classes_to_balance(key):
    with pytest.raises(ConfigError, match=f"data.{key} is balanced, but model.kind is gpt"):
        load(None, [f"--data.{key}", "balanced"])


def test_classes_are_balanced_in_one_way_only():
    with pytest.raises(ConfigError, match="class_weights and data.sampling are both balanced"):
        load(None, ["--data.class_weights", "balanced", "--data.sampling", "balanced"])


def test_a_number_with_a_zero_in_front_is_no_other_number(tmp_path):
    for options in (["--run.steps", "010"], ["--optimizer.lr=-07"]):
        with pytest.raises(ConfigError, match="which YAML reads as an octal number"):
            load(None, options)
    assert load(None, ["--run.dir", "007", "--run.seed", "0"]).run.dir == "007"


def test_a_file_is_read_as_utf8_in_any_locale(tmp_path):
    (tmp_path / "a.yaml").write_text("run: {dir: größe, time_limit: 1:30:00}", encoding="utf-8")
    code = "from hpc_train.config.file import load; import sys; "
    code += "run = load('a.yaml').run; print(ascii(run.dir), run.time_limit, sys.flags.utf8_mode)"
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    told = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env=os.environ | locale, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert told.stdout == "'gr\\xf6\\xdfe' 1:30:00 0\n", told.stderr


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing yet\n", "---\n"])
def test_an_empty_file_has_the_defaults(tmp_path, text):
    (tmp_path / "a.yaml").write_text(text)
    assert load(tmp_path / "a.yaml", ["--run.steps=3"]) == load(None, ["--run.steps=3"])
