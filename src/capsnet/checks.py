"""What is said of a name, a library or a size that cannot be, and of values that do not fit."""

import difflib
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Made = TypeVar("Made")


def unknown_name(kind: str, name: str, known: Iterable[str], hint: str = "") -> ValueError:
    """Error for a name that does not exist, with the nearest that does.

    >>> print(unknown_name("preset", "minst", ["mnist", "svhn"]))
    unknown preset 'minst'; did you mean 'mnist'? (known: mnist, svhn)
    >>> print(unknown_name("weights", "mnist", [], hint="shipped: none"))
    unknown weights 'mnist' (shipped: none)
    """
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {kind} {name!r}{guess} ({hint or 'known: ' + ', '.join(names)})")


def missing_library(purpose: str, library: str, extra: str) -> ValueError:
    """Error for a library that only an extra installs.

    >>> print(missing_library("reading .mat files", "scipy", "svhn"))
    reading .mat files needs scipy: pip install '.[svhn]' in a checkout, else 'capsnet[svhn]'
    """
    command = f"pip install '.[{extra}]' in a checkout, else 'capsnet[{extra}]'"
    return ValueError(f"{purpose} needs {library}: {command}")


LARGEST_SIZE = 2**31
"""Beyond it torch has no room for a layer, and says so less clearly."""


def check_sizes(sizes: Mapping[str, object], *, minimum: int = 1) -> None:
    """Raises a ValueError that names the first size that is no whole number of at least `minimum`.

    Nor may a size be above 2³¹.

    >>> check_sizes({"num_types": 32, "capsule_dim": 0})
    Traceback (most recent call last):
        ...
    ValueError: capsule_dim must be a whole number of at least 1, got 0
    """
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError(f"{name} must be a whole number of at least {minimum}, got {value!r}")
        if value > LARGEST_SIZE:
            raise ValueError(f"{name} must be at most {LARGEST_SIZE}, got {value}")


def check_num_labels(num_labels: int, num_classes: int) -> None:
    """Raises a ValueError if an image cannot have so many labels.

    >>> check_num_labels(6, 5)
    Traceback (most recent call last):
        ...
    ValueError: num_labels must be 1 to 5, got 6
    """
    if not 1 <= num_labels <= num_classes:
        raise ValueError(f"num_labels must be 1 to {num_classes}, got {num_labels}")


def make_checked(build: Callable[..., Made], cls: type, values: Mapping[str, object]) -> Made:
    """What `build` makes of values for fields of a dataclass, once they are known to fit."""
    hints = get_type_hints(cls)
    for name, value in values.items():
        if name not in hints:
            raise unknown_name("setting", name, hints)
        if isinstance(value, str | Path) and _is_no_text(str(value)):
            raise ValueError(f"{name} must be UTF-8, as records are, got {str(value)!r}")
    return build(**{name: _decode(name, value, hints[name]) for name, value in values.items()})


def _is_no_text(text: str) -> bool:
    """Whether it holds bytes that are not UTF-8, as names of files may."""
    return text.encode(errors="ignore").decode() != text


def _decode(name: str, value: object, hint: object) -> object:
    """The value in the annotated type, or a ValueError that names the field."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for option in arguments:
            try:
                return _decode(name, value, option)
            except ValueError:
                continue
    elif origin is Literal:
        if value in arguments:
            return value
    elif origin is tuple and isinstance(value, list | tuple):
        return tuple(_decode(name, item, arguments[0]) for item in value)  # of one kind
    elif hint is type(None):
        if value is None:
            return None
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            with suppress(OverflowError):  # a whole number may have more digits than a float
                return float(value)
    elif hint is Path:
        if isinstance(value, str | Path):
            return Path(value)
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise ValueError(f"{name} must be {_describe(hint)}, got {value!r}")


#: Types of fields in plain words.
_WORDS: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    Path: "a path",
    type(None): "nothing",
    tuple[int, ...]: "a list of whole numbers",
    tuple[str, ...]: "a list of names",
}


def _describe(hint: object) -> str:
    """A field's type in plain words.

    >>> _describe(int | None), _describe(Literal["a", "b"])
    ('a whole number', "'a' or 'b'")
    """
    arguments = get_args(hint)
    if get_origin(hint) is Literal:
        return " or ".join(repr(choice) for choice in arguments)
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_describe(kind) for kind in arguments if kind is not type(None))
    return _WORDS[hint]
