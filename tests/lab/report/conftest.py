"""A browser for the tests of pages, where there is one."""

import pytest
from browser import MISSING, start


@pytest.fixture(scope="package")
def browser():
    if MISSING:
        pytest.skip(f"needs {MISSING}, which is not installed")
    with start() as started:
        yield started
