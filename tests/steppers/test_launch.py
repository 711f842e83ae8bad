"""A compiled kernel is launched directly where Triton is known, and by Triton elsewhere."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from normcontrol.steppers import tables


class Kernel:
    """Stands in for a kernel of Triton, and counts who launches it."""

    def __init__(self) -> None:
        self.checked: list[tuple] = []
        self.direct: list[tuple] = []

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, **constants):
            self.checked.append(arguments)
            run = lambda *given: self.direct.append(given)  # noqa: E731
            return SimpleNamespace(function="f", packed_metadata="m", run=run)

        return launch


@pytest.mark.parametrize(("version", "direct"), [("3.2.0", 0), ("3.6.0+git1", 2), ("3.10.0", 0)])
def test_only_a_known_triton_is_bypassed(version, direct, monkeypatch):
    driver = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 7)
    modules = {
        "triton": SimpleNamespace(__version__=version),
        "triton.runtime": SimpleNamespace(driver=SimpleNamespace(active=driver)),
    }
    monkeypatch.setattr(tables, "import_module", modules.__getitem__)
    kernel = Kernel()
    launch = tables.Launch(kernel, 5, (11, 12), block=64)
    for argument in (1.0, 2.0, 3.0):
        launch(argument)
    assert len(kernel.checked) == 3 - direct
    expected = [(5, 1, 1, 7, "f", "m", None, None, None, 11, 12, x, 64) for x in (2.0, 3.0)]
    assert kernel.direct == expected[:direct]
