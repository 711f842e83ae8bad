import torch


class AdamWN(torch.optim.Optimizer):
    """AdamW with weight norm control in place of weight decay (Loshchilov 2023, arXiv:2311.11446).

    After each step of Adam, all weights of a group are multiplied by one factor, which moves their
    joint norm the fraction ``rate`` of the way to its target. The target is ``ratio`` times the
    initial norm, and grows from that linearly over the first ``ramp`` steps. Gradients are the same
    on all ranks, so that nothing has to be communicated.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, ratio=2.0, ramp=0, rate=1e-2):
        super().__init__(
            params, dict(lr=lr, betas=betas, eps=eps, ratio=ratio, ramp=ramp, rate=rate)
        )

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params, (beta1, beta2) = group["params"], group["betas"]
            step = group["step"] = group.get("step", 0) + 1
            initial = group.setdefault("initial_norm", self._norm(params))
            for p in params:
                state = self.state[p]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
                state["mean"].lerp_(p.grad, 1 - beta1)
                state["square"].lerp_(p.grad.square(), 1 - beta2)
                root = (state["square"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
                p.addcdiv_(state["mean"], root, value=-group["lr"] / (1 - beta1**step))
            grown = min(step / group["ramp"], 1.0) if group["ramp"] else 1.0
            target = (1 + (group["ratio"] - 1) * grown) * initial
            scale = 1 - group["rate"] * (1 - target / self._norm(params))  # equation 3 of the paper
            for p in params:
                p.mul_(scale)

    @staticmethod
    def _norm(params):
        return torch.stack([p.double().square().sum() for p in params]).sum().sqrt()
