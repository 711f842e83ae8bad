"""The times, speeds and tables of benchmarks in the docs are those of the files under results/."""

from __future__ import annotations

import importlib
import json
import re

import pytest
from results_pages import ROOT, read


@pytest.mark.parametrize("name", ["digits", "defaults"])
def test_the_tables_about_targets_are_those_of_the_benchmarks(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark = importlib.import_module(name)
    runs = json.loads((ROOT / f"results/{name}.json").read_text())["results"]["runs"]
    page = (ROOT / "docs/choosing.md").read_text(encoding="utf-8")
    for row in benchmark.rows(runs):
        assert f"| {' | '.join(row)} |" in page
    if name == "defaults":
        chosen = benchmark.chosen(benchmark.differences(runs))
        assert f"By the rule the default is *{chosen}*" in page


def test_the_cpu_step_times_of_the_docs_are_those_of_the_file():
    text = read("docs/performance.md")
    for found in json.loads(read("results/step_cpu.json"))["results"]:
        line = f"| {found['case']} | {found['implementation']} | {found['ratio']:.2f} |"
        assert line in text


def test_the_misses_of_the_docs_are_those_of_the_file():
    text, rows = read("docs/performance.md"), json.loads(read("results/guesses.json"))["results"]
    for ours, line in zip(rows[::2], rows[1::2], strict=True):
        assert [ours["guess"], line["guess"]] == ["1 - rate of the change", "straight line"]
        missed = [f"{row['first third']}, {row['rest']}" for row in (ours, line)]
        assert f"| {ours['lr']} | {ours['rate']} | {missed[0]} | {missed[1]} |" in text


def test_the_gpu_step_times_of_the_docs_are_those_of_the_files():
    def printed(file):
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        lines = [line for line in lines if re.fullmatch(r" *\d\.\d+", line[46:53])]
        return {line[:46].strip(): {"ratio": float(line[46:53])} for line in lines}

    paper = printed("results/step_gpu.txt")
    older = json.loads(read("results/step_gpu_rate_0.1.json"))["cases"]
    default = older | printed("results/step_gpu_rate_0.1.txt")
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    table = page.split("| case | rate 0.01")[1].split("\n\n")[0].splitlines()[2:]
    assert len(table) > 15
    for line in table:
        case, at_paper, at_default, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        assert at_default == f"{default[case]['ratio']:.3f}"
        assert at_paper == "-" or at_paper == f"{paper[case]['ratio']:.3f}"
    cost = read("README.md").split("## What it costs")[1].split("##")[0]
    for case, where in (("124M: rate 0.1, ratio 1", default), ("124M: global, after", paper)):
        assert f"{where[case]['ratio']:.2f}" in cost
    assert f"clips too, in {default['124M: clipping, after']['ratio']:.2f} of the time" in cost
    assert f"{default['XL: global, after']['ratio']:.2f} for GPT-2 XL" in cost


def test_the_fine_tuning_on_a_gpu_is_that_of_the_file():
    text = read("docs/huggingface.md")
    found = json.loads(read("results/finetune_gpu.json"))
    ours, theirs = found["AdamWN"], found["AdamW"]
    assert ours["largest difference"] == theirs["largest difference"] == 0
    before = found["before"]["norm"]
    assert f"{ours['loss']:.4f} and a norm of {ours['norm']:.2f}, which was {before:.2f}" in text
    assert f"AdamW at {theirs['loss']:.4f} and {theirs['norm']:.2f}" in text


def test_the_speed_of_training_on_a_gpu_is_that_of_the_file():
    found = json.loads(read("results/lab_gpu.json"))["results"]
    text = read("docs/lab.md")
    assert f"{found['tokens/s, gpt2, AdamW'] / 1000:.0f},000 tokens a second" in text
    assert f"{found['speed, laboratory / nanoGPT']:.2f} times nanoGPT's loop" in text
    stream = found["speed, laboratory with the stream in bf16 / nanoGPT"]
    assert f"{stream:.3f} times with `--bf16-stream`" in text
    ours = found["speed, AdamWN with the stream in bf16 / nanoGPT"]
    assert f"with `--bf16-stream` {ours:.3f} times nanoGPT's loop" in text
    assert f"({found['speed, AdamWN / AdamW']:.3f} times as fast in this run" in text
    for what, row in (
        ("the kernel of the head", "a kernel for the head"),
        ("the kernel of GELU", "a kernel for GELU"),
        ("cuDNN's attention", "cuDNN's attention, preferred over the others"),
    ):
        assert f"| {row} | {found[f'speed, with / without {what}']:.3f} |" in text
    gain = found["tokens/s, gpt2, AdamW, stream in bf16"] / found["tokens/s, gpt2, AdamW"]
    assert f"| `--bf16-stream` | {gain:.3f} |" in text
    adamwn = found["tokens/s, gpt2, AdamWN"]
    hours = 100_000 * 491_520 / adamwn / 3600
    said = f"{hours:.0f} hours a run at {adamwn / 1000:.0f},000 tokens a second"
    for page in ("README.md", "results/notes.md"):
        assert said in read(page)
