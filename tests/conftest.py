"""Settings for all tests: one thread for each process, since the tests are small and the thread pools
of parallel workers would slow each other down, little optimization by JAX's compiler, which takes
longer than it saves, and no search for garbage among what was imported, a third of its time."""

import atexit
import gc
import os


@atexit.register  # before everything else that is registered, so that it is called after it
def leave() -> None:
    """End a worker without freeing what it has imported, which takes as long as the imports."""
    if is_worker:
        os._exit(0)


is_worker = False
gc.disable()  # until everything is imported

import pytest
import torch

from normcontrol.steppers import folded

torch.set_num_threads(1)
if not torch.cuda.is_available():
    for absent in (torch.cuda, torch.xpu, torch.mtia):  # which would store the stack of each call
        absent.manual_seed_all = lambda seed: None
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# Imported where they are used: to look for doctests in them would take their frameworks.
collect_ignore = ["fsdp_on_cpus.py", "optax_process.py"]


def pytest_configure(config: pytest.Config) -> None:
    global is_worker
    is_worker = hasattr(config, "workerinput")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    if not is_worker:
        gc.unfreeze()  # else libraries complain at the exit


@pytest.fixture(scope="session")
def browser():
    """The browser for all tests of pages, where there is one: it can be started once in a process."""
    from browser import MISSING, start

    if MISSING:
        pytest.skip(f"needs {MISSING}, which is not installed")
    with start() as started:
        yield started


@pytest.fixture(scope="module", autouse=True)
def small_sets_are_folded_too(request):
    """Tests of small sets are tests of large ones. Those of the laboratory compare runs in this
    process with runs in processes of their own, and fold as users do."""
    before = folded.FEWEST
    if "lab" not in request.path.parts:
        folded.FEWEST = 0
    yield
    folded.FEWEST = before
