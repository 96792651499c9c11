"""Every error a user can meet. One root class; each child carries its data as attributes and words its own message.

A message names the field or file, what was found, what was expected, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class IntrospectError(Exception):
    """Root of all errors this package raises on purpose. The command line prints it as one line and exits with 2."""


class OptionError(IntrospectError):
    """An option or argument outside its bounds: says which, what was given, what is allowed."""

    def __init__(self, option: str, value: object, expected: str) -> None:
        self.option = option
        self.value = value
        self.expected = expected
        super().__init__(f"{option}: got {value!r}, expected {expected}")


class TraceShapeError(IntrospectError):
    """A stored trace was asked about another run shape: it answers only for its own."""

    def __init__(self, stored: str, asked: str) -> None:
        self.stored = stored
        self.asked = asked
        super().__init__(
            f"this stored trace holds one run ({stored}) and cannot answer for another ({asked}); "
            "trace the model again with the shape you need"
        )


class GivenInputsError(TraceShapeError):
    """A model that comes with its inputs was asked about another run: its inputs are one step and no other."""

    def __init__(self, model: str, own: str, asked: str) -> None:
        self.model = model
        self.stored = own
        self.asked = asked
        IntrospectError.__init__(
            self,
            f"{model}: its inputs are one step ({own}) and cannot answer for another ({asked}); "
            "give inputs of that step, or ask what needs no other (trace, params, audit, roofline, shard, train, lora)",
        )


class NoModuleError(OptionError):
    """A stored trace was asked for what only the module itself could tell."""

    def __init__(self) -> None:
        super().__init__("MODEL", "a stored trace", "a model that can be built: this needs more than its record")


class TraceFormatError(IntrospectError):
    """A file that should hold a stored trace does not: damaged, or another schema version."""

    def __init__(self, source: str, problem: str) -> None:
        self.source = source
        self.problem = problem
        super().__init__(f"{source}: not a readable trace: {problem}; trace the model again")


class ModelRunError(IntrospectError):
    """The model was built but its forward (or backward) raised on the meta device."""

    def __init__(self, model: str, phase: str, problem: str, where: str) -> None:
        self.model = model
        self.phase = phase
        self.problem = problem
        self.where = where
        super().__init__(f"{model}: the {phase} run failed at {where}: {problem}")


FEW_NAMES = 12  # names that an error lists whole


class UnknownNameError(IntrospectError):
    """A command or option that does not exist: says which is meant when some are near. `kind` as "command"."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind = kind
        self.name = name
        bare = {each.lstrip("-"): each for each in known}  # dashes alone make no two options alike
        self.nearest = tuple(bare[near] for near in get_close_matches(name.lstrip("-"), sorted(bare), n=3))
        few = len(bare) <= FEW_NAMES
        all_names = f"expected one of {', '.join(sorted(bare.values()))}" if few else "see --help for those there are"
        hint = f"did you mean {' or '.join(self.nearest)}?" if self.nearest else all_names
        super().__init__(f"unknown {kind} {name}; {hint}")


class UsageError(IntrospectError):
    """A command line that cannot be read: says what is wrong with it and where the help is."""

    def __init__(self, command: str, problem: str) -> None:
        self.command = command
        self.problem = problem
        super().__init__(f"{problem}; see `{command} --help`")


class FileAccessError(IntrospectError):
    """A file could not be read or written: says which and what the system answered."""

    def __init__(self, path: str, action: str, problem: str) -> None:
        self.path = path
        self.action = action
        self.problem = problem
        super().__init__(f"{path}: cannot {action} it: {problem}")


class UnknownGpuError(IntrospectError):
    """No GPU of this name or alias in the data. Carries the nearest names; nothing is guessed."""

    def __init__(self, name: str, nearest: tuple[str, ...]) -> None:
        self.name = name
        self.nearest = nearest
        near = f"nearest: {', '.join(nearest)}; " if nearest else ""
        super().__init__(f"--gpu: no GPU named {name!r}; {near}see `introspect gpus` for all, or give --gpu-file")


class GpuFileError(IntrospectError):
    """A GPU data file that cannot be used: says which entry and field, what is there and what is expected."""

    def __init__(self, source: str, field: str, problem: str) -> None:
        self.source = source
        self.field = field
        self.problem = problem
        super().__init__(f"{source}: {field}: {problem}")


class ModelNotFoundError(IntrospectError):
    """Nothing answers to this model name. `looked` says where was looked, `nearest` which names come close."""

    def __init__(self, model: str, looked: str, nearest: tuple[str, ...] = (), remedy: str = "") -> None:
        self.model = model
        self.looked = looked
        self.nearest = nearest
        self.remedy = remedy
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else "see `introspect models` for the built-in ones"
        super().__init__(f"no model {model!r}: {looked}; {f'{remedy}; ' if remedy else ''}{hint}")


class GatedModelError(IntrospectError):
    """The Hub refuses the files of a gated repository to this user."""

    def __init__(self, model: str, has_token: bool) -> None:
        self.model = model
        self.has_token = has_token
        step = "your token has no access to it" if has_token else "no token was found"
        super().__init__(
            f"{model} is a gated repository and {step}: accept its licence on https://huggingface.co/{model} and set "
            "HF_TOKEN (or run `hf auth login`), give a local config.json, or take a built-in one of `introspect models`"
        )


class RevisionNotFoundError(IntrospectError):
    """The Hub repository exists, the branch, tag or commit asked for does not."""

    def __init__(self, model: str, revision: str) -> None:
        self.model = model
        self.revision = revision
        super().__init__(f"{model} has no revision {revision!r}: give a branch, tag or full commit hash of it")


class HubError(IntrospectError):
    """The Hub could not be asked: offline, no network, rate limit, server error. `remedy` says what to do."""

    def __init__(self, model: str, problem: str, remedy: str) -> None:
        self.model = model
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{model}: {problem}; {remedy}")


class ConfigFileError(IntrospectError):
    """A file or folder that should hold a model config does not. `expected` says what should be there."""

    def __init__(self, path: str, found: str, expected: str) -> None:
        self.path = path
        self.found = found
        self.expected = expected
        super().__init__(f"{path}: {found}; expected {expected}")


class ConfigError(IntrospectError):
    """A config field whose value no model can have: names field, value and bound."""

    def __init__(self, source: str, field: str, value: object, expected: str) -> None:
        self.source = source
        self.field = field
        self.value = value
        self.expected = expected
        super().__init__(f"{source}: config field {field!r} is {value!r}, expected {expected}")


class UnknownArchitectureError(IntrospectError):
    """The installed transformers has no class for this config. `remedy` says what may know it."""

    def __init__(self, source: str, model_type: str | None, architecture: str | None, remedy: str) -> None:
        self.source = source
        self.model_type = model_type
        self.architecture = architecture
        self.remedy = remedy
        super().__init__(f"{source}: model_type {model_type!r} (architecture {architecture!r}) is unknown: {remedy}")


class BuildError(IntrospectError):
    """A model's own code (of transformers, of a repository, of a user's file) failed while the model was built."""

    def __init__(self, source: str, problem: str, remedy: str) -> None:
        self.source = source
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{source}: cannot build the model: {problem}; {remedy}")


class HeaderError(IntrospectError):
    """A file of a checkpoint has no header that can be read. `kind` is a name of introspect.check_kinds."""

    def __init__(self, file: str, kind: str, found: str, expected: str) -> None:
        self.file = file
        self.kind = kind
        self.found = found
        self.expected = expected
        super().__init__(f"{file}: {kind.replace('_', ' ')}: found {found}, expected {expected}")


class CheckpointError(IntrospectError):
    """What was given as a checkpoint holds none that may be read: says what it is, what is expected and what to do."""

    def __init__(self, checkpoint: str, found: str, remedy: str) -> None:
        self.checkpoint = checkpoint
        self.found = found
        self.remedy = remedy
        super().__init__(f"{checkpoint}: {found}; {remedy}")


class MissingPackageError(IntrospectError):
    """An optional package that this option needs is not installed; `extra` is the extra that brings it."""

    def __init__(self, package: str, option: str, extra: str) -> None:
        self.package = package
        self.option = option
        self.extra = extra
        super().__init__(f"{option} needs {package}, which is not installed: pip install 'torch-introspect[{extra}]'")


class ShrinkError(IntrospectError):
    """No small twin of a model could be made to run it for real: says what stood in the way."""

    def __init__(self, model: str, problem: str) -> None:
        self.model = model
        self.problem = problem
        super().__init__(f"{model}: no small twin found: {problem}")


class ShardingError(IntrospectError):
    """A model cannot be sharded so: says what was asked, what stood against it, and what would do."""

    def __init__(self, asked: str, found: str, expected: str) -> None:
        self.asked = asked
        self.found = found
        self.expected = expected
        super().__init__(f"cannot shard ({asked}): {found}; expected {expected}")
