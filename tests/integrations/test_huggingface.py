"""Hugging Face's Trainer on a small model: it reaches the norm, logs it, and resumes bit for bit."""

from __future__ import annotations

import json
import os
import runpy
import warnings
from pathlib import Path

import pytest
import torch
from processes import run
from small import total_norm
from tracked import charts, history, scalars, wandb_mode

pytest.importorskip("transformers")

from small_llama import arguments, assert_same, make_model, matrices, trainer
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, Trainer

from normcontrol import linear
from normcontrol.integrations import require
from normcontrol.integrations.huggingface import adamwn
from normcontrol.watch.trackers import controller

ROOT = Path(__file__).parents[2]
CPU = {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def test_trainer_reaches_the_target_logs_it_and_resumes_bit_for_bit(tmp_path):
    def start():
        return trainer(
            tmp_path,
            settings={"ratio": linear(1, 1.5, steps=4), "rate": 0.9},
            report_to=["tensorboard"],
        )

    before = total_norm(matrices(make_model()))
    whole = start()
    whole.train()
    norm = total_norm(matrices(whole.model))
    assert norm == pytest.approx(1.5 * before, rel=0.02)

    # The logged norm is the real one: in the history, and in TensorBoard, with a chart that shows
    # the target too.
    logged = [entry for entry in whole.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logged] == [2, 4, 6, 8]
    assert logged[-1]["norm/global"] == pytest.approx(norm)
    assert logged[-1]["norm/global/target"] == pytest.approx(1.5 * before)
    (folder,) = (tmp_path / "runs").iterdir()
    assert scalars(folder)["train/norm/global"] == [
        (e["step"], pytest.approx(e["norm/global"])) for e in logged
    ]
    assert charts(folder) == {
        "train/norm/global": ["^train/norm/global$", "^train/norm/global/target$"]
    }

    again = start()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same(again.model, whole.model)
    assert again.state.log_history[3]["norm/global"] == logged[-1]["norm/global"]


def test_the_norms_are_in_trainers_run_of_weights_and_biases(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    with wandb_mode("offline"):
        made = trainer(tmp_path, report_to=["wandb"])
        made.train()
    logged = [row for row in history(tmp_path) if "train/loss" in row]
    assert [row["train/norm/global"] for row in logged] == [
        e["norm/global"] for e in made.state.log_history if "loss" in e
    ]


def test_the_tensors_that_trainer_would_decay_are_controlled(tmp_path):
    with pytest.warns(
        UserWarning, match=r"weight_decay=0.1 only marks which weights are controlled"
    ):
        opt = trainer(tmp_path).create_optimizer()
    assert [group["control"]["controlled"] for group in opt.param_groups] == [True, False]
    assert opt.report().startswith("AdamWN: 9 of 12 tensors controlled")
    assert "model.layers.0.mlp.up_proj.weight" in opt.report()
    assert opt.param_groups[0]["lr"] == 1e-2
    assert opt.param_groups[0]["control"]["ratio"] == 1.0


def test_without_weight_decay_the_matrices_are_controlled_with_one_warning(tmp_path):
    with pytest.warns(
        UserWarning,
        match="weight_decay=0, which marks nothing: AdamWN controls the tensors with two or more "
        "dim",
    ):
        opt = trainer(tmp_path, weight_decay=0.0).create_optimizer()
    assert opt.report().startswith("AdamWN: 9 of 12 tensors controlled")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(tmp_path, weight_decay=0.0).create_optimizer()


def test_any_target_replaces_the_default(tmp_path):
    opt = trainer(tmp_path, settings={"rms": 0.05}).create_optimizer()
    assert opt.param_groups[0]["control"]["rms"] == 0.05
    assert opt.param_groups[0].get("ratio") is None
    for name in ("ratio", "gain"):  # a target of None, as of an option that was not given, is none
        opt = trainer(tmp_path, settings={name: None}).create_optimizer()
        assert opt.param_groups[0]["control"]["ratio"] == 1.0


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda args, model: (model, args), "got a LlamaForCausalLM as args: give the Trai"),
        (lambda args, model: (args, 1.5), "got a float as model: .* and settings by name"),
        (lambda args, model: (args, type(model)), "got LlamaForCausalLM as model: give"),
    ],
)
def test_other_arguments_are_refused(make, sentence, tmp_path):
    with pytest.raises(TypeError, match=sentence):
        adamwn(*make(arguments(tmp_path), make_model()))


@pytest.mark.filterwarnings("ignore:TrainingArguments has weight_decay=0")
def test_a_gain_needs_the_model_because_conv1d_stores_the_transpose(tmp_path):
    args = arguments(tmp_path)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 12, "n_positions": 6}
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes))
    groups = [{"params": list(model.parameters())}]
    kind, settings = adamwn(args, model, gain=1.0)
    target = kind(groups, **settings).norms()["global"].target.item()
    assert target**2 == pytest.approx(12 + 6 + 3 * 8 + 8 + 4 * 8 + 8)  # the tied head counts once
    for counted in ({"gain": 1.0}, {"hold": 1.0}):
        with pytest.raises(ValueError, match=r"the layer Conv1D.* Give the model"):
            adamwn(args, **counted)
    kind, settings = adamwn(args, gain=1.0, outputs=0)  # told, and wrong for this model
    target = kind(groups, **settings).norms()["global"].target.item()
    assert target**2 == pytest.approx(12 + 6 + 8 + 8 + 8 + 4 * 8)


def test_gradient_accumulation_controls_once_for_each_optimizer_step(tmp_path):
    made = trainer(tmp_path, max_steps=3, gradient_accumulation_steps=4)
    made.train()
    assert int(controller(made.optimizer).param_groups[0]["control"]["step"]) == 3


def test_fine_tuning_keeps_the_norm_of_the_loaded_weights(tmp_path):
    start = make_model()
    with torch.no_grad():
        torch._foreach_mul_(matrices(start), 3.0)
    start.save_pretrained(tmp_path / "trained")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "trained")
    made = trainer(tmp_path / "tuned", loaded, {"rate": 1.0})
    made.train()
    assert total_norm(matrices(made.model)) == pytest.approx(total_norm(matrices(start)))


def test_a_package_that_is_too_old_or_missing_is_an_import_error(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda package: "4.30.2")
    with pytest.raises(
        ImportError,
        match=r"transformers 4.30.2 is too old: 4.47 or newer is needed, since Trainer takes",
    ):
        require("transformers", "4.47", "Trainer takes optimizer_cls_and_kwargs since then")
    monkeypatch.undo()
    with pytest.raises(ModuleNotFoundError, match="no-such-package is not installed: pip install"):
        require("no-such-package", "1.0", "")


def test_a_model_that_is_not_trained_is_refused(tmp_path):
    args = arguments(tmp_path)
    made = Trainer(make_model(), args, optimizer_cls_and_kwargs=adamwn(args, make_model()))
    with pytest.raises(ValueError, match="12 parameters that are not in the model given to adamwn"):
        made.create_optimizer()


@pytest.mark.slow
def test_a_compiled_model_trains_to_the_same_norms(tmp_path):
    """With inductor, the default of torch_compile=True."""
    eager, compiled = (
        trainer(tmp_path / str(c), torch_compile=c, settings={"ratio": 1.5, "rate": 0.5})
        for c in (False, True)
    )
    for made in (eager, compiled):
        made.train()
    for one, two in zip(eager.state.log_history[:4], compiled.state.log_history[:4], strict=True):
        assert one["norm/global"] == pytest.approx(two["norm/global"], rel=1e-5)


def test_the_example_keeps_the_norm_and_resumes(tmp_path, monkeypatch, capsys):
    def last_lines(*more: str) -> list[str]:
        monkeypatch.setattr("sys.argv", ["example", "--out", str(tmp_path), "--steps", "8", *more])
        runpy.run_path(str(ROOT / "examples/huggingface_finetune.py"), run_name="__main__")
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("AdamW")]

    ours, adamw = last_lines()
    assert adamw.startswith("AdamW: the norm went from")
    assert last_lines("--resume") == [ours]


@pytest.mark.slow
def test_the_example_that_is_stopped_ends_in_the_weights_of_the_one_that_is_not(
    tmp_path, monkeypatch, capsys
):
    given = ["example", "--steps", "6", "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr("sys.argv", given)
    runpy.run_path(str(ROOT / "examples/finetune_trainer.py"), run_name="__main__")
    found = json.loads((tmp_path / "found.json").read_text())
    before, ours, adamw = (found[name] for name in ("before", "AdamWN", "AdamW"))
    assert abs(ours["norm"] - before["norm"]) < abs(adamw["norm"] - before["norm"])
    for tuned in (ours, adamw):
        assert tuned["largest difference"] == 0
        assert tuned["resumed loss"] == tuned["loss"] < before["loss"]
    assert "AdamWN" in capsys.readouterr().out


def trained_on_two(out: str, resume: bool) -> list[float]:
    """Train six steps, or resume after three. Returns the logged norms of all steps."""
    made = trainer(
        out,
        settings={"ratio": linear(1, 1.5, steps=4), "rate": 0.5},
        logging_steps=1,
        max_steps=6,
        save_steps=3,
    )
    made.train(resume_from_checkpoint=os.path.join(out, "checkpoint-3") if resume else None)
    return [entry["norm/global"] for entry in made.state.log_history if "loss" in entry]


@pytest.mark.slow
def test_trainer_on_two_processes_resumes(tmp_path):
    whole, other = run(trained_on_two, 2, str(tmp_path), False, **CPU)
    assert whole == other
    assert len(whole) == 6
    assert run(trained_on_two, 2, str(tmp_path), True, **CPU)[0] == whole
