"""Trainer, Accelerate, TRL and PEFT: the real ones, on small models made from configs, to the end
and resumed bit for bit."""

from __future__ import annotations

import os
import re
import runpy
import warnings
from pathlib import Path

import pytest
import torch
from processes import run
from small import total_norm
from tracked import charts, history, scalars, wandb_mode

pytest.importorskip("transformers")
os.environ["HF_HUB_OFFLINE"] = "1"

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from normcontrol import AdamWN, linear
from normcontrol.integrations import require
from normcontrol.integrations.huggingface import adamwn, log_norms
from normcontrol.watch.trackers import controller, values

ROOT = Path(__file__).parents[2]


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=16))


def batches(rows: int = 64) -> list[dict[str, torch.Tensor]]:
    words = torch.randint(32, (rows, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in words]


def arguments(out, **more) -> TrainingArguments:
    chosen = {
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_steps": 8,
        "save_steps": 4,
        "logging_steps": 2,
        "report_to": "none",
        **more,
    }
    return TrainingArguments(
        str(out), per_device_train_batch_size=4, use_cpu=True, disable_tqdm=True, seed=3, **chosen
    )


def trainer(out, model=None, settings=None, **more) -> Trainer:
    model, args = model or make_model(), arguments(out, **more)
    made = Trainer(
        model,
        args,
        train_dataset=batches(),
        optimizer_cls_and_kwargs=adamwn(args, model, **(settings or {})),
    )
    log_norms(made)
    return made


def matrices(model) -> list[torch.Tensor]:
    return [p for p in model.parameters() if p.dim() >= 2]


def assert_same(one, two) -> None:
    for (name, p), (_, q) in zip(one.state_dict().items(), two.state_dict().items(), strict=True):
        assert torch.equal(p, q), name


@pytest.fixture(autouse=True)
def said_anew(monkeypatch):
    monkeypatch.setattr("normcontrol.warn.GIVEN", set())


def test_trainer_reaches_the_norm_that_was_asked_for_and_resumes_bit_for_bit(tmp_path):
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

    # What was logged is that norm: in the history, and in TensorBoard with a chart against the
    # target.
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


def test_the_norms_are_in_the_weights_and_biases_run_that_trainer_makes(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    with wandb_mode("offline"):
        made = trainer(tmp_path, report_to=["wandb"])
        made.train()
    logged = [row for row in history(tmp_path) if "train/loss" in row]
    assert [row["train/norm/global"] for row in logged] == [
        e["norm/global"] for e in made.state.log_history if "loss" in e
    ]


def test_what_trainer_would_decay_is_controlled(tmp_path):
    with pytest.warns(
        UserWarning, match=r"weight_decay=0.1 only marks which weights are controlled"
    ):
        opt = trainer(tmp_path).create_optimizer()
    assert [group["controlled"] for group in opt.param_groups] == [True, False]
    assert opt.report().startswith("AdamWN: 9 of 12 tensors controlled")
    assert "model.layers.0.mlp.up_proj.weight" in opt.report()
    assert opt.param_groups[0]["lr"] == 1e-2
    assert opt.param_groups[0]["ratio"] == 1.0


def test_without_weight_decay_the_matrices_are_controlled_and_that_is_said_once(tmp_path):
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


def test_any_target_takes_the_place_of_the_default(tmp_path):
    opt = trainer(tmp_path, settings={"rms": 0.05}).create_optimizer()
    assert opt.param_groups[0]["rms"] == 0.05
    assert opt.param_groups[0]["ratio"] is None


def test_gradient_accumulation_makes_one_step_of_the_control_for_each_of_the_optimizer(tmp_path):
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


def test_a_version_that_is_too_old_or_missing_is_a_sentence(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda package: "4.30.2")
    with pytest.raises(
        ImportError,
        match=r"transformers 4.30.2 is too old: 4.47 or newer is needed, since Trainer takes",
    ):
        require("transformers", "4.47", "Trainer takes optimizer_cls_and_kwargs since then")
    monkeypatch.undo()
    with pytest.raises(ModuleNotFoundError, match="no-such-package is not installed: pip install"):
        require("no-such-package", "1.0", "")


def test_another_model_than_the_trained_one_is_refused(tmp_path):
    args = arguments(tmp_path)
    made = Trainer(make_model(), args, optimizer_cls_and_kwargs=adamwn(args, make_model()))
    with pytest.raises(ValueError, match="12 parameters that are not in the model given to adamwn"):
        made.create_optimizer()


def lora(model=None):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(
        model or make_model(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    )


def test_adapters_that_start_at_zero_are_left_alone_by_name(tmp_path):
    model = lora()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = total_norm(p for name, p in named.items() if "lora_A" in name)
    made = trainer(tmp_path, model, {"rate": 1.0})
    with pytest.warns(
        UserWarning,
        match=r"self_attn.q_proj.lora_B.default.weight and 1 more are left alone: adapters start them at zero",
    ):
        made.train()
    assert total_norm(p for name, p in named.items() if "lora_A" in name) == pytest.approx(before)
    assert all(p.any() for name, p in named.items() if "lora_B" in name)

    again = trainer(tmp_path, lora(), {"rate": 1.0})  # with B that is not zero any more
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same(again.model, made.model)


def test_adapters_whose_names_are_not_known_are_refused_with_advice(tmp_path):
    model, args = lora(), arguments(tmp_path)
    made = Trainer(model, args, train_dataset=batches(), optimizer_cls_and_kwargs=adamwn(args))
    with pytest.raises(
        ValueError,
        match=r"2 of the 4 tensors to be controlled are zero at the start.*adamwn\(args, model\)",
    ):
        made.train()


@pytest.mark.slow
def test_a_compiled_model_trains_to_the_same_norms(tmp_path):
    """Compiled by inductor, as torch_compile=True does."""
    plain, compiled = (
        trainer(tmp_path / str(c), torch_compile=c, settings={"ratio": 1.5, "rate": 0.5})
        for c in (False, True)
    )
    for made in (plain, compiled):
        made.train()
    for one, two in zip(plain.state.log_history[:4], compiled.state.log_history[:4], strict=True):
        assert one["norm/global"] == pytest.approx(two["norm/global"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("make", ["make_model", "lora"])
def test_supervised_fine_tuning_with_trl(make, tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"input_ids": [b["input_ids"].tolist() for b in batches()]})

    def start():
        model = globals()[make]()
        args = trl.SFTConfig(
            **{
                **arguments(tmp_path).to_dict(),
                "output_dir": str(tmp_path),
                "max_length": 8,
                "bf16": False,
            }
        )
        with_control = {"optimizer_cls_and_kwargs": adamwn(args, model, rate=1.0)}
        made = trl.SFTTrainer(
            model, args, train_dataset=data, processing_class=words(), **with_control
        )
        log_norms(made)
        return made

    whole = start()
    held = [
        p
        for group in whole.create_optimizer().param_groups
        if group["controlled"]
        for p in group["params"]
    ]
    before = total_norm(held)
    whole.train()
    assert total_norm(held) == pytest.approx(before)
    assert [e["norm/global"] for e in whole.state.log_history if "loss" in e] == pytest.approx(
        [before] * 4
    )
    again = start()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same(again.model, whole.model)


def test_the_example_keeps_the_norm_and_resumes(tmp_path, monkeypatch, capsys):
    def last_lines(*more: str) -> list[str]:
        monkeypatch.setattr("sys.argv", ["example", "--out", str(tmp_path), "--steps", "8", *more])
        runpy.run_path(str(ROOT / "examples/huggingface_finetune.py"), run_name="__main__")
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("AdamW")]

    ours, adamw = last_lines()
    assert adamw.startswith("AdamW: the norm went from")
    assert last_lines("--resume") == [ours]


def test_the_page_s_real_model_trains_in_another_s_place(tmp_path, monkeypatch):
    """With a small model under the real one's name, and a few rows for its data set: nothing is
    downloaded."""
    pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    make_model().save_pretrained(tmp_path / "model")
    words().save_pretrained(tmp_path / "model")
    rows = datasets.Dataset.from_dict({"input_ids": [b["input_ids"].tolist() for b in batches(16)]})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: rows)
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(
        r"^```py\n(.*?)^```$", (ROOT / "docs/huggingface.md").read_text(), re.M | re.S
    )
    namespace: dict = {}
    here = {
        "Qwen/Qwen3-0.6B": str(tmp_path / "model"),
        "logging_steps=10": "logging_steps=2, use_cpu=True, bf16=False, report_to='none'",
    }
    for real, ours in here.items():
        code = code.replace(real, ours)
    exec(code, namespace)
    assert namespace["trainer"].state.global_step == 6
    assert values(namespace["trainer"].optimizer)["norm/global/ratio"] == pytest.approx(1, abs=0.01)


def words():
    """A tokenizer of 32 words, made on the spot."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({str(i): i for i in range(32)}, unk_token="0"))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="0", eos_token="1", unk_token="0"
    )


# Accelerate, on two processes


def on_cpus_too(plugin) -> None:
    """Accelerate shards on accelerators only. All that it does for them runs on CPUs as well, once
    its state says so."""
    from accelerate import DistributedType
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    for state in (AcceleratorState, PartialState):
        state._shared_state["distributed_type"] = DistributedType.FSDP


CPU = {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def accelerated(kind: str, folder: str, resume: bool) -> list[float]:
    """A loop of Accelerate's own: the norms after each of six steps, saved after three of them or
    resumed from there."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from torch.utils.data import DataLoader

    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, step_scheduler_with_optimizer=False
    )
    if kind == "fsdp":
        on_cpus_too(FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False))
    model = make_model()
    opt = AdamWN(model.named_parameters(), lr=1e-2, ratio=linear(1, 1.5, steps=4), rate=0.5)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, total_iters=6)
    loader = DataLoader(batches(48), batch_size=2 if accelerator.num_processes == 2 else 4)
    model, opt, loader, schedule = accelerator.prepare(model, opt, loader, schedule)
    if resume:
        accelerator.load_state(folder)
    norms = []
    for batch in accelerator.skip_first_batches(loader, 6) if resume else loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            opt.step()
            opt.zero_grad()
        if accelerator.sync_gradients:
            schedule.step()
            norms.append(values(opt)["norm/global"])
            if len(norms) == 3 and not resume:
                accelerator.save_state(folder)
    assert type(controller(opt).param_groups[0]["params"][0].data).__name__ == (
        "DTensor" if kind == "fsdp" else "Tensor"
    )
    return norms


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_accelerate_on_two_processes_gives_the_norms_of_one_and_resumes(kind, tmp_path):
    def norms(ranks: int, to: str, resume: bool = False) -> list[float]:
        one, *others = run(
            accelerated, ranks, kind if ranks > 1 else "ddp", str(tmp_path / to), resume, **CPU
        )
        assert all(other == one for other in others)
        return one

    alone, two = norms(1, "one"), norms(2, "two")
    assert len(alone) == 6
    assert two == pytest.approx(alone, rel=1e-5)
    assert norms(2, "two", resume=True) == two[3:]


def trained_on_two(out: str, resume: bool) -> list[float]:
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
