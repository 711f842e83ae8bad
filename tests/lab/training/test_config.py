"""Tests of the config of a run: saving and loading, presets, flags and their help, and the error
messages for configs that cannot be run. No run is started."""

import pytest

from normcontrol.lab.cli.main import main
from normcontrol.lab.errors import LabError
from normcontrol.lab.training import metrics
from normcontrol.lab.training.config import PRESETS, Config, check, differences, preset
from normcontrol.lab.training.loop import train
from normcontrol.lab.training.model import GPT


def test_a_config_comes_back_from_its_file(tmp_path):
    config = preset("small").with_(ratio=1.6, schedule="wsd", betas=(0.8, 0.9))
    config.save(tmp_path / "config.json")
    assert Config.load(tmp_path / "config.json") == config


@pytest.mark.parametrize("name", PRESETS)
def test_presets_can_be_run(name):
    check(PRESETS[name])


def test_field_names_are_unique_so_that_flags_need_no_prefix():
    assert len(Config().flat()) == sum(
        len(vars(getattr(Config(), part))) for part in ("model", "data", "optim", "run")
    )


def test_differences_name_the_field_and_both_values():
    assert differences(Config(), Config().with_(lr=5e-4)) == {"lr": (1e-3, 5e-4)}


def test_an_unknown_setting_is_refused_with_the_nearest_name():
    with pytest.raises(LabError, match=r"'layer' is not a setting of a run. Did you mean layers"):
        Config().with_(layer=3)


def test_an_unknown_preset_is_refused_with_the_nearest_name(capsys):
    assert main(["train", "--preset", "gpt-2"]) == 1
    assert "There is no preset 'gpt-2'. Did you mean gpt2?" in capsys.readouterr().err


def test_a_typo_in_a_flag_is_an_error_that_names_the_flag(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--weight-deca", "0.1"])
    assert stop.value.code == 2
    assert "--weight-decay" in "".join(capsys.readouterr())


def test_an_unknown_command_is_refused_with_the_nearest_name(capsys):
    assert main(["trian"]) == 1
    assert "There is no command 'trian'. Did you mean train?" in capsys.readouterr().err


def test_the_help_of_a_command_explains_its_flags(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = " ".join("".join(capsys.readouterr()).replace("│", " ").split())
    assert "Target norm of the matrices, as a multiple of their initial norm (r_t)" in shown
    assert "--layers INT Number of transformer blocks. (default: 4)" in shown


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"width": 100, "heads": 3},
            "width=100 is not divisible by heads=3: all heads have the same width. Change one of "
            "them.",
        ),
        (
            {"tokens_per_step": 1000},
            "tokens_per_step=1000 is not divisible by context=128: a batch consists of whole "
            "sequences. Use 896 or 1024.",
        ),
        (
            {"warmup": 5000},
            "warmup=5000 is not less than steps=500: the learning rate would never reach its peak. "
            "Use a shorter warm-up, 25 for example.",
        ),
        ({"steps": 0}, "steps=0: it must be 1 or more."),
        ({"lr": -1.0}, "lr=-1.0: it must be above 0 and finite."),
        (
            {"schedule": "wsd", "decay": 0.0},
            "decay=0.0: it must be above 0 and at most 1, since it is a fraction.",
        ),
        (
            {"schedule": "wsd", "decay": 1.0},
            "warmup=25 and decay=1.0 overlap in steps=500: the learning rate would jump down at "
            "the end of the warm-up, before it has reached its peak. Use a shorter warm-up, or a "
            "decay of 0.95.",
        ),
        ({"gain": 0.0}, "gain=0.0: it must be above 0 and finite."),
        ({"init_gain": float("inf")}, "init_gain=inf: it must be above 0 and finite."),
        (
            {"gain": 0.8, "ratio": 2.0},
            "gain=0.8 and ratio=2.0 are two targets for the same norm. Give one of them.",
        ),
        ({"gain": 0.8, "norm_layers": True}, "LayerNorms too, which are vectors and have no gain"),
        ({"norm_layers": True}, "vectors and have no gain. Give a ratio as the target"),
        (
            {"hidden_only": True, "norm_layers": True, "ratio": 2.0},
            "hidden_only controls the matrices inside the blocks alone, and norm_layers the scales",
        ),
    ],
)
def test_a_config_that_cannot_be_run_is_refused_with_the_reason(changes, sentence):
    with pytest.raises(LabError) as error:
        check(preset("tiny").with_(**changes))
    assert sentence in str(error.value)


@pytest.mark.parametrize("wsd", [{"decay": 0.95}, {"decay": 1.0, "warmup": 0}, {"min_lr": 1.0}])
def test_a_decay_that_begins_after_the_warm_up_is_accepted(wsd):
    check(preset("tiny").with_(schedule="wsd", **{"decay": 1.0, **wsd}))


def finals(config, folder):
    assert train(config, folder)
    last: dict[str, float] = {}
    for line in metrics.read(folder):
        last |= line
    return metrics.read(folder)[0], last


def joint_norm(line):
    """The joint norm of all matrices, from the norms of their classes."""
    return sum(value**2 for key, value in line.items() if key.startswith("norm/")) ** 0.5


def unit_norm(config):
    """The joint norm of the model's matrices at a gain of 1."""
    model = GPT(config.model, 320)  # bytes, padded to a multiple of 64
    return sum(p.shape[0] for p in model.matrices()) ** 0.5


def test_gains_set_the_norm_at_the_start_and_all_along(config, tmp_path):
    started = config.with_(init_gain=0.7, optimizer="AdamW", steps=3)
    first, _ = finals(started, tmp_path / "started")
    assert joint_norm(first) == pytest.approx(0.7 * unit_norm(config))
    assert first["ratio"] == 1.0
    controlled = started.with_(optimizer="AdamWN", gain=0.9, rate=1.0)
    first, last = finals(controlled, tmp_path / "controlled")
    assert joint_norm(first) == pytest.approx(0.7 * unit_norm(config))
    assert joint_norm(last) == pytest.approx(0.9 * unit_norm(config))
    assert last["gain"] == pytest.approx(0.9)
    assert last["ratio/target"] == pytest.approx(0.9 / 0.7)
    assert last["ratio"] == pytest.approx(last["ratio/target"])
    wrapped = controlled.with_(optimizer="SGD")
    _, last = finals(wrapped, tmp_path / "wrapped")
    assert last["gain"] == pytest.approx(0.9)


def test_without_a_target_the_gain_of_the_start_is_held(config, tmp_path):
    held = config.with_(init_gain=0.7, optimizer="AdamWN", rate=1.0, steps=3)
    _, last = finals(held, tmp_path / "held")
    assert last["gain"] == pytest.approx(0.7)


def test_a_ratio_is_of_the_norm_after_init_gain_and_before_init_scale(config, tmp_path):
    run = config.with_(init_gain=0.7, init_scale=1.5, optimizer="AdamWN", ratio=2.0, ramp=0)
    first, last = finals(run.with_(rate=1.0, steps=3), tmp_path / "run")
    assert first["ratio"] == pytest.approx(1.5)
    assert last["ratio"] == pytest.approx(2.0)
    assert joint_norm(last) == pytest.approx(2 * 0.7 * unit_norm(config))


def test_a_gain_in_another_scope(config, tmp_path):
    run = config.with_(optimizer="AdamWN", gain=0.6, scope="row", rate=1.0, steps=3)
    _, last = finals(run, tmp_path / "run")
    assert last["gain"] == pytest.approx(0.6)


@pytest.mark.parametrize("settings", [{"hidden_only": True}, {"optimizer": "Muon"}])
def test_where_hidden_matrices_alone_are_controlled_embeddings_are_free(config, settings, tmp_path):
    run = config.with_(**{"optimizer": "AdamWN", **settings}, gain=0.6, rate=1.0, steps=3)
    _, last = finals(run, tmp_path / "run")
    norms = {key: value for key, value in last.items() if key.startswith("norm/")}
    free = {key for key in norms if "wte" in key or "wpe" in key or "embed" in key}
    hidden = sum(value**2 for key, value in norms.items() if key not in free) ** 0.5
    assert hidden == pytest.approx(0.6 * (32 * (3 + 1 + 4 + 1)) ** 0.5)
    assert "ratio/target" not in last


def test_a_published_method_takes_no_gain(config, tmp_path):
    with pytest.raises(LabError, match="AdamC takes no gain"):
        train(config.with_(optimizer="AdamC", gain=0.8), tmp_path / "run")


def test_the_new_settings_do_not_rename_earlier_runs():
    then = Config().with_(lr=2e-3)
    assert not {"gain", "init_gain", "hidden_only"} & set(differences(Config(), then))


def test_a_damaged_config_file_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LabError, match=r"config.json is not readable as JSON"):
        Config.load(tmp_path / "config.json")
    with pytest.raises(LabError, match="contains no run"):
        Config.load(tmp_path / "nothing" / "config.json")
