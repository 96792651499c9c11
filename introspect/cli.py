"""The command line: `introspect COMMAND [MODEL...] [options]`.

stdout is data, stderr is talk. Exit codes: 0 fine; 1 findings (or, with --strict, a record that has an unclassified op
or assumed something); 2 usage or unreadable input; 70 a bug of introspect (INTROSPECT_DEBUG=1 shows its traceback);
130 Ctrl-C.
Only the module of the command asked for is imported.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from introspect.api import Answer, answer
from introspect.atomic import write_atomically
from introspect.commands import Command, command_help, command_names, load_command
from introspect.completion import SHELLS, completion_script
from introspect.errors import FileAccessError, IntrospectError, UnknownNameError, UsageError
from introspect.options import Option, options_of, parse
from introspect.params import AccessParams
from introspect.render import FORMATS, render
from introspect.table import VERSION

FINE, FINDINGS, USAGE, BUG, INTERRUPTED = 0, 1, 2, 70, 130

STRICT_HELP = (
    "exit 1 also when the record holds an op without a rule or assumed something (a value, dtype, mask, length); "
    "assumptions of the question (GPU, routing, utilization) pass"
)
MODEL_HELP = "Hub id, directory, config.json, file.py:factory, or a saved trace"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. Nothing that is not a bug of ours ends in a traceback."""
    with _watched_interrupts() as interrupts:
        try:
            if sys.stdout is None:
                raise FileAccessError("standard output", "write", "it is closed")
            code = run(sys.argv[1:] if argv is None else argv)
            _write("")
            return code
        except IntrospectError as error:
            return _fail(str(error), USAGE)
        except KeyboardInterrupt:
            return _fail("interrupted", INTERRUPTED)
        except BrokenPipeError:
            _leave_stdout()  # the reader has left
            return FINE
        except Exception as error:
            if interrupts:
                return _fail("interrupted", INTERRUPTED)
            if os.environ.get("INTROSPECT_DEBUG"):
                raise
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            return _fail(f"a bug of introspect, not of your input: {text}; INTROSPECT_DEBUG=1 shows the traceback", BUG)


@contextmanager
def _watched_interrupts() -> Iterator[list[int]]:
    """Note every Ctrl-C: a library that is interrupted while it is imported may turn it into an error of its own."""
    seen: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        seen.append(number)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else somebody ignores or handles it on purpose
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _write(text: str) -> None:
    """Write to stdout and flush. A full disk behind it is an error in our words; a reader that left is not."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _leave_stdout()
        raise FileAccessError("standard output", "write", error.strerror or str(error)) from None


def _leave_stdout() -> None:
    """Send what Python still holds for stdout nowhere: it would complain once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(text: str, code: int) -> int:
    print(f"introspect: {text}", file=sys.stderr)
    return code


def run(argv: Sequence[str]) -> int:
    """Run one command line; errors are raised."""
    first, rest = (argv[0], list(argv[1:])) if argv else ("--help", [])
    if first in ("-h", "--help"):
        print(overview(), end="", file=sys.stdout if argv else sys.stderr)
        return FINE if argv else USAGE
    if first == "--version":
        print(f"introspect {VERSION}")
        return FINE
    if first == "completion":
        return _complete(rest)
    if first.startswith("-"):
        raise UsageError("introspect", f"expected a command first, found {first}")
    if first not in command_names():
        raise UnknownNameError("command", first, [*command_names(), "completion"])
    return _answer(load_command(first), rest)


def _complete(rest: list[str]) -> int:
    if len(rest) != 1 or rest[0] not in SHELLS:
        raise UsageError("introspect", f"usage: introspect completion {'|'.join(SHELLS)}, found {' '.join(rest)!r}")
    commands = {name: parser_of(load_command(name)) for name in command_names()}
    print(completion_script(rest[0], commands), end="")
    return FINE


def _answer(command: Command, argv: list[str]) -> int:
    parser = parser_of(command)
    _refuse_unknown_options(parser, command, argv)
    given = vars(parser.parse_intermixed_args(argv))
    models = given.pop("models", [])
    form, output, strict, table = (given.pop(name) for name in ("format", "output", "strict", "table"))
    if any(option.name == "format" for option in options_of(command.params)):
        given["format"] = form
    if table is not None and form not in ("table", "markdown", "csv"):
        raise UsageError(parser.prog, f"--table chooses what table, markdown and csv show, {form} is always whole")
    options = {option.name: option for option in _options(command)}
    values = {name: _parsed(options[name], value) for name, value in given.items()}
    found = answer(command, models, values, flags=True)
    text = render(found.results, form, table=table, width=_width() if output is None else None)
    if output is None:
        _write(text)
    else:
        write_atomically(Path(output), text)
    return _exit_code(found, strict)


def _width() -> int | None:
    """The terminal's width, or what COLUMNS says; None where the reader is a file or a program."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() or "COLUMNS" in os.environ else None


def _exit_code(found: Answer, strict: bool) -> int:
    if strict:
        for doubt in found.doubts:
            print(f"introspect: --strict: {doubt}", file=sys.stderr)
    if any(result.unreadable for result in found.results):
        return USAGE
    return FINDINGS if any(result.findings for result in found.results) or (strict and found.doubts) else FINE


def _parsed(option: Option, value: Any) -> Any:
    """Command-line text as the option's type; flags and defaults are there already."""
    if isinstance(value, list):
        return tuple(parse(option, text) for text in value)
    return parse(option, value) if isinstance(value, str) else value


def _options(command: Command) -> list[Option]:
    access = options_of(AccessParams) if command.models != "none" else ()
    return [*options_of(command.params), *access]


class Parser(ArgumentParser):
    """argparse with our errors: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(self.prog, message)


def parser_of(command: Command) -> Parser:
    """The parser of one command. Options not given are absent from its result, so that defaults stay in Params."""
    summary, _, details = command.doc.partition("\n")
    parser = Parser(
        prog=f"introspect {command.name}",
        usage=f"introspect {command.name} {_arguments_usage(command)}[options]",
        description=f"{summary}\n{details}".rstrip(),
        epilog="examples:\n" + "\n".join(f"  {line}" for line in command.examples),
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=SUPPRESS,
    )
    if command.models != "none":
        nargs: int | str = {"one": 1, "two": 2}.get(command.models, "+")
        parser.add_argument("models", nargs=nargs, metavar="MODEL", help=MODEL_HELP)
    own = parser.add_argument_group("what to compute")
    for option in options_of(command.params):
        if option.name != "format":
            _add(own, option)
    if command.models != "none":
        access = parser.add_argument_group("where to find the model")
        for option in options_of(AccessParams):
            _add(access, option)
    _add_output(parser, command)
    return parser


def _arguments_usage(command: Command) -> str:
    models = {"none": "", "one": "MODEL ", "two": "MODEL MODEL ", "many": "MODEL... "}[command.models]
    extra = [f"[{option.name.upper()}] " for option in options_of(command.params) if option.positional]
    return models + "".join(extra)


def _add(group: Any, option: Option) -> None:
    """One field as an argument. Values stay text here: options.parse and options.build read and check them."""
    text = option.help.replace("%", "%%") + _default_text(option)
    metavar = option.metavar or ("|".join(option.choices) if option.choices else option.kind.__name__.upper())
    if option.positional:
        group.add_argument(option.name, nargs="*" if option.repeatable else "?", metavar=option.name.upper(), help=text)
        return
    names = [f"-{option.short}"] if option.short else []
    names.append(option.flag)
    if option.kind is bool:
        group.add_argument(*names, dest=option.name, action="store_true", help=text)
    else:
        action = "append" if option.repeatable else "store"
        group.add_argument(*names, dest=option.name, action=action, metavar=metavar, help=text)


def _default_text(option: Option) -> str:
    if option.default is None or option.kind is bool or option.default in ("", ()):
        return ""
    value = ", ".join(map(str, option.default)) if option.repeatable else option.default
    return f" (default: {value})"


def _add_output(parser: Parser, command: Command) -> None:
    group = parser.add_argument_group("output")
    forms = (*FORMATS, *command.formats)
    group.add_argument("--format", choices=forms, default="table", metavar="|".join(forms), help="(default: table)")
    group.add_argument("-o", "--output", default=None, metavar="FILE", help="write there, whole or not at all")
    group.add_argument("--table", default=None, metavar="NAME", help="only this table, or totals")
    group.add_argument("--strict", action="store_true", default=False, help=STRICT_HELP)


def option_names(parser: ArgumentParser) -> dict[str, bool]:
    """Every option string of a parser, and whether it takes a value."""
    return {name: action.nargs != 0 for action in parser._actions for name in action.option_strings}


def _refuse_unknown_options(parser: Parser, command: Command, argv: Sequence[str]) -> None:
    """Before argparse, which would take a strange option's value for a model and complain about that."""
    known = option_names(parser)
    for token in argv:
        if token == "--":
            return
        name = token.partition("=")[0]
        short = token[:2] in known and not token.startswith("--")
        if token.startswith("-") and len(token) > 1 and not short and name not in known and not _is_number(token):
            raise UnknownNameError(f"option of `introspect {command.name}`", name, known)


def _is_number(token: str) -> bool:
    try:
        float(token)
    except ValueError:
        return False
    return True


def overview() -> str:
    """The top-level help."""
    names = command_names()
    width = max(map(len, [*names, "completion"])) + 2
    lines = [f"  {name:<{width}}{command_help(name)}" for name in names]
    return "\n".join(
        [
            "usage: introspect COMMAND [MODEL...] [options]",
            "",
            "What a PyTorch model really computes, read from a recorded run on the meta device.",
            "",
            "commands:",
            *lines,
            f"  {'completion':<{width}}Print a shell completion script ({', '.join(SHELLS)})",
            "",
            f"MODEL: {MODEL_HELP}",
            "",
            "`introspect COMMAND --help` lists a command's options and examples.",
            "Exit codes: 0 fine, 1 findings, 2 usage or unreadable input, 70 a bug of introspect, 130 Ctrl-C.",
            "",
        ]
    )
