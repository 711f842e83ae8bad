# Steps until the validation loss should be below 3.28: to be lowered while it is.
train_steps = 5000
cooldown, warmup = 0.7, 250

# Initial weights, from the same distributions as the baseline's.
with torch.no_grad():
    for name, p in model.named_parameters():
        starts_at_zero = "proj" in name or name.endswith("bias")
        std = 1.0 if "embed" in name else (0.33 / p.size(-1)) ** 0.5
        if name.endswith("gains"):
            p.copy_(torch.ones_like(p))
        else:
            p.copy_(torch.zeros_like(p) if starts_at_zero else std * torch.randn_like(p))

# AdamWN holds the norm of the hidden matrices. They start at an rms of .0159; a ratio of 1.8 is an
# rms of .0286, which is where the record with AdamH holds them. What is not a hidden matrix is
# trained by AdamW with the baseline's learning rates, and is not decayed.
hidden = [p for p in model.blocks.parameters() if p.ndim >= 2]
held_ids = set(map(id, hidden))
peaks = {id(model.embed.weight): 0.7, id(model.proj.weight): 0.004}
others = [
    {"params": [p], "lr": peaks.get(id(p), 0.015)}
    for p in model.parameters()
    if id(p) not in held_ids
]
free = AdamW(others, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0, fused=True)
held = AdamWN(hidden, lr=0.0015, betas=(0.9, 0.95), eps=1e-10, ratio=1.8, ramp=250, rate=0.02)
optimizers = [free, held]
peak_lrs = [[group["lr"] for group in opt.param_groups] for opt in optimizers]


def set_hparams(step):
    """Constant learning rates, and a linear fall at the end; the hidden matrices warm up first."""
    left = 1 - step / train_steps
    for opt, peaks in zip(optimizers, peak_lrs, strict=True):
        factor = min(left / cooldown, 1.0)
        if opt is held:
            factor *= min((step + 1) / warmup, 1.0)
        for group, lr in zip(opt.param_groups, peaks, strict=True):
            group["lr"] = lr * factor
