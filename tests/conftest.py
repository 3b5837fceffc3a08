from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch

# Two test processes share two cores; more threads than that only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A data folder of the tests' own, with MNIST unpacked into it once."""
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAPSNET_DATA", str(folder))
        yield folder


@pytest.fixture
def without_annotation_checks() -> Iterator[None]:
    """Switches off the execution of shape annotations, which users never have: our errors speak."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
