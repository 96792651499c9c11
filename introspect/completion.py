"""Shell completion scripts, made from the parsers themselves and the catalog.

The scripts are static: completing a word starts no Python. Print one anew after an update.

    introspect completion bash > ~/.local/share/bash-completion/completions/introspect
    introspect completion zsh  > "${fpath[1]}/_introspect"
    introspect completion fish > ~/.config/fish/completions/introspect.fish
"""

from __future__ import annotations

from argparse import Action, ArgumentParser
from collections.abc import Mapping
from shlex import quote

from introspect import catalog

SHELLS = ("bash", "zsh", "fish")


def completion_script(shell: str, parsers: Mapping[str, ArgumentParser]) -> str:
    """The script for one of SHELLS. `parsers`: every command that takes a model or options, by name."""
    models = [entry.id for entry in catalog.entries()]
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](parsers, models)


def _options(parser: ArgumentParser) -> list[Action]:
    return [action for action in parser._actions if action.option_strings]


def _takes_models(parser: ArgumentParser) -> bool:
    return any(action.dest == "models" for action in parser._actions)


def _choices(action: Action) -> list[str]:
    """The values an option is limited to: argparse's choices, or the words of a metavar like `all|last`."""
    if action.choices:
        return list(map(str, action.choices))
    return action.metavar.split("|") if isinstance(action.metavar, str) and "|" in action.metavar else []


def _branches(parsers: Mapping[str, ArgumentParser], start: str, end: str) -> str:
    """One shell `case` branch a command: its option names, whether it takes models, and the values of each option."""
    lines = []
    for name, parser in parsers.items():
        names = " ".join(flag for action in _options(parser) for flag in action.option_strings)
        lines.append(f"    {name})")
        lines.append(f"      options={quote(names)}; takes_models={int(_takes_models(parser))}")
        lines.append(f"      case {start} in")
        for action in _options(parser):
            if choices := _choices(action):
                lines.append(f"        {'|'.join(action.option_strings)}) values={quote(' '.join(choices))} ;;")
        lines += [f"      {end}", "      ;;"]
    return "\n".join(lines)


def _bash(parsers: Mapping[str, ArgumentParser], models: list[str]) -> str:
    return f"""# bash completion of introspect
_introspect() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}}
  local options= values= takes_models=0 models={quote(" ".join(models))}
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W {quote(" ".join([*parsers, "completion"]))} -- "$current"))
    return
  fi
  case ${{COMP_WORDS[1]}} in
    completion) values={quote(" ".join(SHELLS))} ;;
{_branches(parsers, '"$previous"', "esac")}
  esac
  if [ -n "$values" ]; then
    COMPREPLY=($(compgen -W "$values" -- "$current"))
  elif [[ $current == -* ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$current"))
  elif [ "$takes_models" = 1 ]; then
    COMPREPLY=($(compgen -W "$models" -- "$current") $(compgen -f -- "$current"))
  else
    COMPREPLY=($(compgen -f -- "$current"))
  fi
}}
complete -o filenames -o nosort -F _introspect introspect
"""


def _zsh(parsers: Mapping[str, ArgumentParser], models: list[str]) -> str:
    return f"""#compdef introspect
_introspect() {{
  local options= values= takes_models=0 models={quote(" ".join(models))}
  if (( CURRENT == 2 )); then
    compadd -- {" ".join([*parsers, "completion"])}
    return
  fi
  case $words[2] in
    completion) values={quote(" ".join(SHELLS))} ;;
{_branches(parsers, '"$words[CURRENT-1]"', "esac")}
  esac
  if [[ -n $values ]]; then
    compadd -- ${{=values}}
  elif [[ $words[CURRENT] == -* ]]; then
    compadd -- ${{=options}}
  else
    (( takes_models )) && compadd -- ${{=models}}
    _files
  fi
}}
_introspect "$@"
"""


def _fish(parsers: Mapping[str, ArgumentParser], models: list[str]) -> str:
    first = "__fish_is_first_arg"
    lines = ["# fish completion of introspect"]
    lines += [f"complete -c introspect -f -n {first} -a {name}" for name in [*parsers, "completion"]]
    lines.append(f"complete -c introspect -f -n '__fish_seen_subcommand_from completion' -a {quote(' '.join(SHELLS))}")
    with_models = " ".join(name for name, parser in parsers.items() if _takes_models(parser))
    lines.append(f"set -g __introspect_models {' '.join(map(quote, models))}")
    lines.append(f"complete -c introspect -n '__fish_seen_subcommand_from {with_models}' -a '$__introspect_models'")
    for name, parser in parsers.items():
        lines += [_fish_option(name, action) for action in _options(parser)]
    return "\n".join(lines) + "\n"


def _fish_option(command: str, action: Action) -> str:
    parts = [f"complete -c introspect -n '__fish_seen_subcommand_from {command}'"]
    parts += [f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in action.option_strings]
    if action.nargs != 0:
        choices = _choices(action)
        parts.append(f"-x -a {quote(' '.join(choices))}" if choices else "-r")
    return " ".join([*parts, f"-d {quote((action.help or '').replace('%%', '%'))}"])
