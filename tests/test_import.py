"""What importing the library brings with it. These tests name modules; ``benchmarks/startup.py``
measures the time."""

import subprocess
import sys

HEAVY = {
    *("torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes"),
    *("torch.distributed.tensor", "torch.distributed.fsdp", "torch.testing", "torch.onnx"),
}
"""Parts of torch that take long to import, and that torch itself leaves out."""


def imported(code: str, before: str = "pass") -> set[str]:
    """The modules that the code imports in a new process, beyond those imported before it."""
    program = (
        f"{before}\nimport sys\nold = set(sys.modules)\n{code}\nprint(*set(sys.modules) - old)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def packages(modules: set[str]) -> set[str]:
    """The packages of these modules that are not Python's own."""
    return {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names)


def test_importing_the_library_imports_no_other_package():
    assert packages(imported("import normcontrol")) == {"normcontrol"}


def test_all_public_names_import_torch_alone_and_no_heavy_part_of_it():
    every = "from normcontrol import *\nfrom normcontrol import methods"
    found = imported(every, before="import torch")
    assert packages(found) <= {"normcontrol", "torch"}
    assert not found & HEAVY
