"""Embeddings that are resized in the middle of a run, with the same optimizer and with a new one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from small import total_norm

pytest.importorskip("transformers")

from small_llama import batches, make_model, matrices

from normcontrol import AdamWN

PAGE = Path(__file__).parents[2] / "docs/huggingface.md"


def train(model, opt, steps=5):
    rows = torch.stack([b["input_ids"] for b in batches(8)])
    for _ in range(steps):
        opt.zero_grad()
        model(input_ids=rows, labels=rows).loss.backward()
        opt.step()


def resize(model, opt):
    """As on the page, from 32 to 40 tokens."""
    (code,) = re.findall(r"^def resize_token_embeddings.*?\n\n", PAGE.read_text(), re.M | re.S)
    space = {"model": model, "opt": opt}
    exec(code, space)
    space["resize_token_embeddings"](40)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("settings", "grows"),
    [({"ratio": 1.0}, True), ({"gain": 0.5}, True), ({"norm": 3.0, "scope": "global"}, False)],
)
def test_the_same_optimizer_goes_on(tied, settings, grows):
    model = make_model(tie_word_embeddings=tied)
    opt = AdamWN(model.named_parameters(), lr=1e-2, rate=1.0, **settings)
    train(model, opt)
    before, others = opt.norms()["global"], len(opt.state)
    resize(model, opt)
    resized = total_norm(matrices(model))
    train(model, opt)
    after = opt.norms()["global"]
    assert total_norm(matrices(model)) == pytest.approx(after.target.item(), rel=1e-5)
    assert len(opt.state) == others  # none is left for a tensor that is gone
    if grows:
        rows = 4 * 16 + 2 * 32 + 16 + (40 if tied else 80)  # of all matrices
        more = (rows / (rows - (8 if tied else 16))) ** 0.5
        expected = before.target * more if "gain" in settings else resized
        assert after.target.item() == pytest.approx(float(expected), rel=1e-3)
    else:
        assert after.target == before.target


def test_a_new_optimizer_holds_the_norm_of_the_resized_model():
    model = make_model()
    train(model, AdamWN(model.named_parameters(), lr=1e-2))
    model.resize_token_embeddings(40)
    resized = total_norm(matrices(model))
    opt = AdamWN(model.named_parameters(), lr=1e-2, ratio=1.0, rate=1.0)
    train(model, opt)
    assert total_norm(matrices(model)) == pytest.approx(resized, rel=1e-5)


def test_an_optimizer_that_was_not_told_is_an_error_with_advice():
    model = make_model(tie_word_embeddings=True)
    opt = AdamWN(model.named_parameters(), lr=1e-2, ratio=1.0)
    train(model, opt)
    model.resize_token_embeddings(40)
    with pytest.raises(ValueError, match=r"shape \(40, 16\), but its moments .*opt.state.pop\(p\)"):
        train(model, opt)
