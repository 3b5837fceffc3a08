"""The check that every layer and network makes of its sizes."""

from collections.abc import Mapping


def check_sizes(sizes: Mapping[str, object], *, minimum: int = 1) -> None:
    """Raises a ValueError that names the first size that is no whole number of at least `minimum`.

    >>> check_sizes({"num_types": 32, "capsule_dim": 0})
    Traceback (most recent call last):
        ...
    ValueError: capsule_dim must be a whole number of at least 1, got 0
    """
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError(f"{name} must be a whole number of at least {minimum}, got {value!r}")
