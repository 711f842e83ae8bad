"""The methods of weight decay against their definitions."""

from __future__ import annotations

from definitions import (
    ADAM,
    LR,
    AdamDirection,
    GradientDirection,
    assert_close,
    by_definition,
    trained,
    weights,
)

from normcontrol import methods


def test_hanson_and_pratt_decay():
    params = weights()
    opt = methods.hanson_pratt(params, lr=LR, weight_decay=0.03)
    assert_close(
        trained(opt, params),
        by_definition(lambda w, u, lr, i, t: (1 - 0.03) * w - lr * u, direction=GradientDirection),
    )


def test_adamw_in_both_conventions():
    params = weights()
    assert_close(
        trained(methods.adamw(params, weight_decay=0.3, **ADAM), params),
        by_definition(lambda w, u, lr, i, t: w - lr * u - lr * 0.3 * w),
    )
    params = weights()
    opt = methods.adamw_decoupled(params, weight_decay=0.01, **ADAM)
    assert_close(
        trained(opt, params),
        by_definition(lambda w, u, lr, i, t: w - lr * u - lr / LR * 0.01 * w),
    )


def test_adam_with_l2_regularisation():
    made = []

    class L2Direction(AdamDirection):
        """Adam's direction for the gradient plus 0.2 times the weights."""

        def __init__(self, like):
            super().__init__(like)
            self.ws = like
            made.append(self)

        def __call__(self, grads):
            return super().__call__([g + 0.2 * w for g, w in zip(grads, self.ws, strict=True)])

    def rule(w, u, lr, i, t):
        made[0].ws = [*made[0].ws[:i], w - lr * u, *made[0].ws[i + 1 :]]
        return w - lr * u

    params = weights()
    assert_close(
        trained(methods.adam_l2(params, weight_decay=0.2, **ADAM), params),
        by_definition(rule, direction=L2Direction),
    )


def test_adamc():
    params = weights()
    opt = methods.adamc(params, weight_decay=0.5, lr_max=0.02, **ADAM)
    assert_close(
        trained(opt, params),
        by_definition(lambda w, u, lr, i, t: w - lr * u - 0.5 * lr**2 / 0.02 * w),
    )


def test_decay_by_the_square_of_the_learning_rate():
    params = weights()
    opt = methods.adamw_lr_squared(params, weight_decay=25.0, **ADAM)
    assert_close(
        trained(opt, params),
        by_definition(lambda w, u, lr, i, t: w - lr * u - 25.0 * lr**2 * w),
    )


def test_cautious_decay():
    params = weights()
    expected = by_definition(lambda w, u, lr, i, t: w - lr * (u + 0.3 * (u * w >= 0) * w))
    assert_close(trained(methods.cautious(params, weight_decay=0.3, **ADAM), params), expected)
