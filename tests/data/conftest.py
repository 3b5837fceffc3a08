from pathlib import Path

import numpy as np
import pytest

from capsnet.data.storage import load_mnist


@pytest.fixture(scope="session")
def mnist_test(data_dir: Path) -> tuple[np.ndarray, np.ndarray]:
    return load_mnist("test")
