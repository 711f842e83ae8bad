# the steps of Adam's mark (5,625) less what AdamH saved; to be minimised while val loss is below 3.28
train_steps = 5000

# initialize model parameters: the baseline's distributions
for name, p in model.named_parameters():
    if name.endswith("gains"):
        p.data.fill_(1.0)
    elif "proj" in name or name.endswith("bias"):
        p.data.zero_()
    elif "embed" in name:
        p.data.normal_()
    else:
        p.data.normal_(std=0.33**0.5 / p.size(-1) ** 0.5)

# create the optimizer(s). The hidden matrices start at an rms of .0159. A ratio of 1.8 is an rms of
# .0286, which is where the record with AdamH holds them.
hidden = [p for p in model.blocks.parameters() if p.ndim >= 2]
optimizer1 = AdamW([dict(params=[model.embed.weight], lr=0.7),
                    dict(params=[model.proj.weight], lr=0.004),
                    dict(params=[p for p in model.parameters() if p.ndim < 2], lr=0.015)],
                   betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0, fused=True)  # fmt: skip
optimizer2 = AdamWN(hidden, lr=0.0015, betas=(0.9, 0.95), eps=1e-10, ratio=1.8, ramp=250, rate=0.02)
optimizers = [optimizer1, optimizer2]
trained = [p for opt in optimizers for group in opt.param_groups for p in group["params"]]
assert len(trained) == len(set(trained)) and set(trained) == set(model.parameters())
for opt in optimizers:
    for group in opt.param_groups:
        group["initial_lr"] = group["lr"]


# learning rate schedule: stable then decay; a warm-up for the hidden matrices
def set_hparams(step, cooldown_frac=0.7, warmup=250):
    eta = min(1.0, (1 - step / train_steps) / cooldown_frac)
    for opt in optimizers:
        rise = min(1.0, (step + 1) / warmup) if opt is optimizer2 else 1.0
        for group in opt.param_groups:
            group["lr"] = group["initial_lr"] * eta * rise
