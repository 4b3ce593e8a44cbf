"""`hf-longctx replay`: plans steps of a run again for another machine, or runs the step of a NaN again."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hf_longctx.cli.plan import add_how_arguments, add_machine_arguments, request_of
from hf_longctx.cli.terminal import explain, say_refusal


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the parser of all commands."""
    parser = commands.add_parser(
        "replay",
        help="plan the steps of a run again, for another machine or other settings; or run the step of a NaN again",
    )
    explain(
        parser,
        "RUN is the output_dir of a training: shows its plans, measured and predicted, and with --gpus and --hardware plans the "
        "same sequences again. RUN/nonfinite-step-N is what a run leaves that stopped at a NaN: its step runs alone, as plain "
        "transformers, and the first module whose output is not finite is named.",
        "hf-longctx replay outputs/demo",
        "hf-longctx replay outputs/demo --gpus 8 --hardware h100 --parameters sharded",
        "hf-longctx replay outputs/chat/nonfinite-step-120",
        one="it cannot be done, or the step is not finite again",
    )
    parser.add_argument("folder", metavar="RUN", type=Path, help="the output_dir of a training, or nonfinite-step-N in it")
    parser.add_argument("--model", help="a model's name or folder (default: the config.json that the run has saved)")
    parser.add_argument("--plans", type=int, metavar="N", default=20, help="so many plans, spread over the run (default: 20)")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.add_argument("--gpus", type=int, metavar="N", help="number of ranks of the new plans; needs --hardware")
    add_machine_arguments(parser, is_required=False)
    add_how_arguments(parser)
    parser.set_defaults(run=run, slow_network=0.0, teacher="", parser=parser)


def run(options: argparse.Namespace) -> int:
    """Print the replay; the exit status is 1 for errors that the user can fix, and for a step that is not finite again."""
    from hf_longctx.journal import JOURNAL

    try:
        if (options.folder / JOURNAL).is_file():
            _replay_run(options)
            return 0
        if (options.folder / "step.json").is_file() or options.folder.name.startswith("nonfinite"):
            return _run_step(options)
        raise ValueError(
            f"{options.folder} has neither {JOURNAL}, which every training keeps, nor the step of a NaN; give the output_dir of "
            f"a training, or nonfinite-step-N in it"
        )
    except (OSError, ValueError) as error:
        return say_refusal("replay", error)


def _run_step(options: argparse.Namespace) -> int:
    from hf_longctx.hf.trainer.replay import replay

    if unused := _changed(options, leave=("model",)):
        raise ValueError(f"{', '.join(unused)}: for the folder of a run, not for the step of a NaN; leave this out")
    return 0 if replay(options.folder, Path(options.model) if options.model else None) else 1


def _replay_run(options: argparse.Namespace) -> None:
    from hf_longctx.cli.terminal import print_sections
    from hf_longctx.sim.output.replayed import replay_record, replay_sections
    from hf_longctx.sim.run_replay import read_run, replayed
    from hf_longctx.sim.scenario import build_scenario

    if options.plans < 1:
        raise ValueError(f"--plans is {options.plans}; at least 1 is needed")
    if bool(options.gpus) != bool(options.hardware):
        raise ValueError("give both --gpus and --hardware to plan for another machine, or none to see what was measured")
    found = read_run(options.folder, options.plans)
    if not options.gpus and (unused := _changed(options, leave=("plans", "json"))):
        raise ValueError(f"{', '.join(unused)}: no effect on a run as it was; give --gpus and --hardware, too, or leave this out")
    if options.gpus:
        _fill_in(options)
        longest = max(max(plan.lengths) for plan in found.past)
        found = replayed(found, build_scenario(request_of(options, longest, found.past[0].lengths)))
    if options.json:
        print(json.dumps(replay_record(found), indent=2))
    else:
        print_sections(replay_sections(found))


def _changed(options: argparse.Namespace, leave: tuple[str, ...]) -> list[str]:
    """Return the options that were given, except those in `leave`."""
    parser = options.parser
    names = [action.dest for action in parser._actions if action.option_strings and action.dest not in ("help", *leave)]
    given = {name: getattr(options, name) for name in names if getattr(options, name) != parser.get_default(name)}
    return [f"--{'no-' if value is False else ''}{name.replace('_', '-')}" for name, value in given.items()]


def _fill_in(options: argparse.Namespace) -> None:
    """Take model and precision from the run, unless they are given."""
    from hf_longctx.sim.run_replay import dtype_of, model_of

    options.dtype = options.dtype or dtype_of(options.folder)
    if options.model is None:
        if (path := model_of(options.folder)) is None:
            raise ValueError(f"{options.folder} has no config.json, since nothing was saved; say --model NAME")
        options.model = str(path)
