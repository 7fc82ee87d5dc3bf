"""Fixtures of the tests of meshes."""

from collections.abc import Iterator

import jaxtyping
import pytest


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Without the shape checks that tests switch on: a user doesn't have them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
