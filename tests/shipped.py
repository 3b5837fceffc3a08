"""What a test does that needs trained weights where none are shipped."""

import os

import pytest

from capsnet.models.weights import list_weights


def require_weights(*names: str) -> None:
    """Skips the test, or fails it in CI, unless these weights are in the package."""
    missing = [name for name in names if name not in list_weights()]
    if missing:
        sentence = f"needs the shipped weights {', '.join(missing)}"
        if os.environ.get("CI") == "true":
            pytest.fail(sentence)
        pytest.skip(sentence)
