"""The command line. Commands are imported when called, so that help and mistakes answer at once."""

import inspect
import io
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn, get_args

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    Parameter,
    Token,
    convert,
)

from capsnet import __version__
from capsnet.machine import keep_memory, prefer_onednn


def _convert(wanted: object, tokens: Sequence[Token]) -> object:
    """What cyclopts makes of an option, save that a whole number must be one: it would round."""
    if _is_whole(wanted):
        for token in tokens:
            try:
                int(token.value)
            except ValueError:
                sentence = f"must be a whole number, got {token.value!r}"
                raise CoercionError(msg=sentence, token=token) from None
    return convert(wanted, tokens)


def _is_whole(wanted: object) -> bool:
    """Whether a type is int, or one such as int | None or tuple[int, ...]."""
    return wanted is int or any(_is_whole(part) for part in get_args(wanted))


app = App(
    name="capsnet",
    help="Dynamic Routing Between Capsules: train, evaluate and look inside capsule networks.",
    version=__version__,
    help_format="plaintext",
    default_parameter=Parameter(negative_iterable=(), converter=_convert),
)

Flag = Annotated[bool, Parameter(negative="", show_default=False)]
"""An option without a value."""

#: What PyTorch says, as a RuntimeError, when the CPU or a GPU has no memory left.
_NO_MEMORY = re.compile("allocate memory|not enough memory|out of memory")
#: Where PyTorch defines the errors, RuntimeErrors too, of a network that could not be compiled.
_COMPILER = ("torch._dynamo", "torch._inductor")

# Command, where it is written, what it does.
_COMMANDS = (
    ("train", "capsnet.cli.train:train", "Train a preset of the paper, or on your own images."),
    ("evaluate", "capsnet.cli.trained:evaluate", "Test error of a run, weights or an ensemble."),
    ("list", "capsnet.cli.train:list_all", "Show presets, datasets and shipped weights."),
    ("data", "capsnet.cli.data:app", "Fetch, check and show datasets."),
    ("predict", "capsnet.cli.predict:predict", "Classify images in files or folders."),
    ("serve", "capsnet.cli.serve:serve", "Open the playground in a browser."),
    ("export", "capsnet.cli.trained:export", "Write a trained model as ONNX or torch.export."),
    ("reproduce", "capsnet.cli.reproduce:reproduce", "Reproduce a table or figure of the paper."),
    ("report", "capsnet.cli.reproduce:report", "Put all results beside the paper's."),
    ("bench", "capsnet.cli.bench:bench", "Measure speed and memory against plain PyTorch."),
)
for _place, (_name, _path, _help) in enumerate(_COMMANDS):
    app.command(_path, name=_name, help=_help, sort_key=_place)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and exits: 0 done, 2 a mistake, 1 a run that failed, 128 + n a signal.

    A user's mistake is answered by one sentence on stderr, never by a traceback.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as some that start services leave them
            setattr(sys, name, io.StringIO())
    keep_memory()
    logging.basicConfig(format="capsnet: %(message)s")
    tokens = sys.argv[1:] if arguments is None else list(arguments)
    if any(not token or re.fullmatch("--[^=]*=", token) for token in tokens):
        _fail("no word of a command may be empty, as an unset variable is", 2)
    _tell_all(tokens)
    try:
        status = _run(tokens)
        sys.stdout.flush()
    except CycloptsError as error:
        _fail(_describe_mistake(error), 2)
    except FloatingPointError as error:
        _fail(str(error), 1)
    except BrokenPipeError:  # the reader of our output has gone: `capsnet list | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        _fail(describe_os_error(error), 2)
    except ValueError as error:
        _fail(str(error), 2)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
            advice = "; smaller batches need less (--batch-size)"
            has_batches = tokens[:1] in (["train"], ["evaluate"])
            _fail(f"there is not enough memory{advice if has_batches else ''}", 2)
        if not type(error).__module__.startswith(_COMPILER):
            raise
        _fail(f"torch.compile failed, go on without --compile: {str(error).splitlines()[0]}", 2)
    except KeyboardInterrupt:
        _fail("interrupted", 128 + signal.SIGINT)
    sys.exit(status)


def _run(tokens: Sequence[str]) -> int:
    """Runs the command that the words ask for and returns its status."""
    command, bound, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
    if "torch" in sys.modules:  # imported with the command
        prefer_onednn()
    result = command(*bound.args, **bound.kwargs)
    return result if isinstance(result, int) else 0


def _tell_all(tokens: Sequence[str]) -> None:
    """Lets a command that is asked for help show all of its docstring, not its line in the list."""
    if len(tokens) > 1 and tokens[0] in app and {"--help", "-h"} & set(tokens):
        command = app[tokens[0]]
        if command.default_command is not None:
            text = inspect.cleandoc(command.default_command.__doc__ or "").partition("\n\nArgs:")[0]
            command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", text)  # the terminal's width decides


def _describe_mistake(error: CycloptsError) -> str:
    """What cyclopts says, save that a word left out is not the option that it could be, too."""
    if isinstance(error, MissingArgumentError) and error.keyword is None and error.argument:
        command = " ".join(error.command_chain or ())
        wanted = error.argument.name.lstrip("-")
        return f"{command} needs a {wanted}; capsnet {command} --help tells which"
    return str(error)


def describe_os_error(error: OSError) -> str:
    """One sentence for what the system refused.

    >>> describe_os_error(FileNotFoundError(2, "No such file or directory", "runs/a"))
    'runs/a: No such file or directory'
    """
    if error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}"
    return error.strerror or str(error)


def _fail(sentence: str, status: int) -> NoReturn:
    print(f"capsnet: {' '.join(sentence.split())}", file=sys.stderr)
    sys.exit(status)
