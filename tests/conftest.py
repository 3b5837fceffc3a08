from collections.abc import Iterator

import jaxtyping
import pytest
import torch

# Two test processes share two cores; more threads than that only wait for each other.
torch.set_num_threads(1)


@pytest.fixture
def without_annotation_checks() -> Iterator[None]:
    """Switches off the execution of shape annotations, which users never have: our errors speak."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
