"""Every number that a user can give has a range, and what is outside of it is refused. The fields
are found, not listed: a new field without a range makes these tests fail."""

from __future__ import annotations

import dataclasses
import importlib
import math
import typing

import pytest

from normcontrol.lab.cli.main import COMMANDS
from normcontrol.lab.errors import LabError
from normcontrol.lab.ranges import Range, check_fields, check_value
from normcontrol.lab.training.config import Config, Data, Model, Optim, Run


def commands():
    """The dataclass of the flags of each command."""
    for name in COMMANDS:
        module = importlib.import_module(f"normcontrol.lab.cli.{name}")
        yield getattr(module, name.capitalize())


def numbers(kind):
    """The numbers in a type, each with its range: of a field, in a tuple or beside None."""
    bare = typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind
    if bare in (int, float):
        found = [note for note in typing.get_args(kind)[1:] if isinstance(note, Range)]
        yield bare, found[0] if found else None
    elif typing.get_origin(bare) is not typing.Literal:
        for part in typing.get_args(bare):
            yield from numbers(part)


FIELDS = [
    (kind, name, number, inside)
    for kind in (Model, Data, Optim, Run, *commands())
    for name, hint in typing.get_type_hints(kind, include_extras=True).items()
    for number, inside in numbers(hint)
]
NAMES = [f"{kind.__name__}.{name}" for kind, name, *_ in FIELDS]


def refusal(kind, name, value):
    """What is said about this value of a field, or None."""
    hint = typing.get_type_hints(kind, include_extras=True)[name]
    try:
        check_value(name, (value, value) if typing.get_origin(hint) is tuple else value, hint)
    except LabError as error:
        return str(error)
    return None


def test_the_fields_are_found():
    assert {"Model.dropout", "Optim.betas", "Optim.ratio", "Sample.temperature"} <= set(NAMES)
    assert {"Prepare.shard_tokens", "Challenge.seeds", "Study.limit_minutes"} <= set(NAMES)
    assert len(NAMES) > 35


@pytest.mark.parametrize(("kind", "name", "number", "inside"), FIELDS, ids=NAMES)
def test_every_number_has_a_range_and_is_refused_outside_of_it(kind, name, number, inside):
    assert inside is not None, "declare it with a type of normcontrol.lab.ranges"
    for value in (math.nan, math.inf, -math.inf, "3", True, None if number is int else 10**400):
        assert f"{name}={value!r}: it must be" in str(refusal(kind, name, value)), value
    if number is int:
        assert refusal(kind, name, 1.5) is not None
    for bound, without, outward in (
        (inside.low, inside.without_low, -1),
        (inside.high, inside.without_high, 1),
    ):
        if math.isinf(bound):
            far = outward * (10**400 if number is int else 1e300)
            assert refusal(kind, name, far) is None
            continue
        at = number(bound)
        beyond = at + outward if number is int else math.nextafter(at, outward * math.inf)
        assert refusal(kind, name, beyond) is not None
        assert (refusal(kind, name, at) is not None) == without
        if without:
            assert refusal(kind, name, math.nextafter(at, -outward * math.inf)) is None


@pytest.mark.parametrize("kind", [Model, Data, Optim, Run])
def test_the_fields_of_a_config_are_checked_with_it(kind):
    check_fields(Config())
    for owner, name, _, inside in FIELDS:
        if owner is kind and inside.low == 0:
            with pytest.raises(LabError, match=f"^{name}=-1: it must be"):
                check_fields(Config().with_(**{name: -1}))


def test_a_number_without_a_range_is_an_error_of_the_program():
    @dataclasses.dataclass
    class Forgotten:
        amount: float = 1.0

    with pytest.raises(TypeError, match="The number amount has no range"):
        check_value("amount", 1.0, typing.get_type_hints(Forgotten)["amount"])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dropout": 1.5}, "dropout=1.5: it must be 0 or more and below 1, since it is a"),
        ({"min_lr": -3.0}, "min_lr=-3.0: it must be 0 or more and at most 1, since it is a"),
        ({"warmup": -5}, "warmup=-5: it must be 0 or more."),
        ({"clip": -1.0}, "clip=-1.0: it must be 0 or more and finite."),
        ({"weight_decay": math.nan}, "weight_decay=nan: it must be 0 or more and finite."),
        ({"betas": (0.9, 1.0)}, "betas=1.0: it must be 0 or more and below 1"),
        ({"betas": (0.9,)}, "betas=(0.9,): it must be a list of 2 values."),
        ({"also_validate": "owt"}, "also_validate='owt': it must be a list of values."),
        ({"layers": 2.0}, "layers=2.0: it must be a whole number (int), 1 or more."),
        ({"init_seed": 0.5}, "init_seed=0.5: it must be a whole number (int)."),
        ({"schedule": "wds"}, "schedule='wds' is not a choice. Did you mean wsd?"),
        ({"bias": 1}, "bias=1: it must be true or false."),
        ({"data": None}, "data=None: it must be a text."),
    ],
)
def test_the_sentence_says_what_was_given_and_what_can_be(changes, sentence):
    with pytest.raises(LabError) as refused:
        check_fields(Config().with_(**changes))
    assert sentence in str(refused.value)
