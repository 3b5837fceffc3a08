from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from capsnet.data.storage import load_mnist


@pytest.fixture(scope="session", autouse=True)
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A data folder of the tests' own, with MNIST unpacked into it once."""
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAPSNET_DATA", str(folder))
        yield folder


@pytest.fixture(scope="session")
def mnist_test(data_dir: Path) -> tuple[np.ndarray, np.ndarray]:
    return load_mnist("test")
