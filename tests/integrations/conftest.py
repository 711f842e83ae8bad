"""A fixture for all tests of integrations."""

import pytest


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch):
    """Warnings that are given once in a process are given again in every test."""
    monkeypatch.setattr("normcontrol.warn.GIVEN", set())
