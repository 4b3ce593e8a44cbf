"""Pages of all messages with which the package refuses something, by the subject that a reader has in mind.

`source_links.py` adds them to the site; `python docs/scripts/error_pages.py` writes them to `outputs/errors`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from error_messages import HOLE, ROOT, Message, Search, heading, of_rules

from hf_longctx.hf.config import KINDS

OUTPUTS = ROOT / "outputs" / "errors"


@dataclass(frozen=True)
class Subject:
    """One page: its title, its first sentence, and its headings.

    Each heading has the modules whose messages stand below it: a module, a folder of modules, or one function or dict of rules
    (MODULE:NAME). The longest name that fits a message counts.
    """

    title: str
    about: str
    headings: dict[str, str]


SUBJECTS = {
    "data": Subject(
        "Errors about data",
        "Datasets, conversations, streams and labels",
        {
            "Rows, labels and lengths": (
                "hf/data hf/trainer/loaders hf/run/sets hf/run/steps:check_planned hf/run/steps:label_sums "
                "hf/trainer/trainer:_check_planned_set hf/trainer/trainer:_take_loader "
                "hf/trainer/trainer:get_train_dataloader"
            ),
            "Recipes: text files and mixtures": "recipes hf/data/mixture hf/data/tokenise hf/data/scan:_read hf/data/scan:_write",
            "Conversations and chat templates": "hf/data/chat hf/data/fields hf/data/tokenise:_check_texts",
            "Images in rows": "hf/data/media hf/rules/media hf/models/media",
            "Streams": "hf/data/streams",
            "Classifiers": ("hf/data/labels hf/rules/models:_CLASSIFIERS hf/rules/models:_PROBLEM_TYPE hf/rules/models:PADDING"),
        },
    ),
    "models": Subject(
        "Errors about models",
        "Model classes, adapters, positions, experts, hooks and the self-test",
        {
            "What a model may contain": "hf/models hf/rules/models",
            "Model classes": "hf/rules/classes hf/models/towers",
            "Adapters, and weights of four bits or in fp8": "hf/models/adapters hf/models/quantised runtime/core/fp8",
            "Teachers": "hf/rules/teacher",
            "Positions": "hf/models/rope hf/models/document_rope hf/rules/arguments:_FIT",
            "Dropout": "hf/models/dropout runtime/core/dropout runtime/attention/context:weight_dropout",
            "Layers with a state": "hf/models/states runtime/states",
            "Experts": "hf/models/experts",
            "Compiled layers and Liger's kernels": (
                "hf/rules/arguments:_LIGER hf/models/kernel_places hf/models/kernels runtime/core/kernels"
            ),
            "Hooks, replaced forwards and shared modules": "hf/rules/user_code",
            "Self-test": "hf/self_test",
        },
    ),
    "settings": Subject(
        "Errors about settings",
        "Settings, launching, sharded parameters, optimizers and pipeline stages",
        {
            "Recipes": "recipes/settings",
            "Settings": "hf/config hf/rules/arguments hf/rules/training_arguments:VALUES plan/core/settings:check_degrees",
            "Launching, ranks and versions": (
                "hf/rules/arguments:_LAUNCH hf/ranks hf/rules/hooks hf/rules/trl:_TRL_VERSION "
                "hf/rules/trl:VERSIONS hf/rules/training_arguments hf/rules/deepspeed hf/rules/axolotl integrations "
                "hf/trainer/start"
            ),
            "Sharded parameters and host memory": (
                "hf/rules/arguments:_PLACEMENT "
                "hf/start/sharded_loading hf/checkpoints/deferred hf/run/run:_new_mesh runtime/parameters"
            ),
            "Optimizers": (
                "hf/run/optimizers hf/trainer/parameters runtime/parameters/whole_weights runtime/parameters/master_weights"
            ),
            "Pipeline stages": (
                "hf/rules/arguments:STAGES hf/rules/arguments:_SETUP hf/start/stages "
                "hf/models/cutting hf/models/refusing hf/run/placement:check_trained "
                "hf/run/run:_lone_stage_problems plan/pipeline/staged_step:check_stages plan/stage_count"
            ),
        },
    ),
    "steps": Subject(
        "Errors of plans and steps",
        "Memory, plans that do not fit, and steps that fail",
        {
            "Memory and plans that do not fit": (
                "plan/setup hf/start/setup plan/policies plan/groups plan/pipeline/search "
                "plan/room plan/core/validate:validate_plan plan/planner "
                "runtime/activations/host_tier runtime/core/host_copies runtime/execution/round"
            ),
            "While it runs": (
                "hf/planning hf/run/steps hf/run/nonfinite runtime/activations runtime/attention/context:check_calls "
                "runtime/core runtime/execution/checks runtime/execution/executor plan/solver"
            ),
        },
    ),
    "trainers": Subject(
        "Errors about trainers",
        "Losses, evaluation, the callback, and trainers of TRL",
        {
            "Losses": "hf/start/losses hf/rules/arguments:SET_LOSSES hf/rules/arguments:OVERRIDES hf/run/run:_warn_of_forward",
            "Evaluation and metrics": (
                "hf/evaluation hf/rules/arguments:METRICS hf/trainer/predictions hf/trainer/row_scores "
                "hf/trainer/trainer:_evaluated "
                "hf/trainer/trainer:predict"
            ),
            "The callback, and trainers with attached plans": "hf/callback hf/rules/callbacks hf/log_probs hf/rules/collators",
            "Trainers of TRL": (
                "hf/rules/trl hf/log_probs/rewards hf/log_probs/two_passes hf/log_probs/trl_methods hf/engine "
                "hf/run/steps:train_loss"
            ),
        },
    ),
    "checkpoints": Subject(
        "Errors about checkpoints",
        "Saving, loading and resuming",
        {
            "Resume where the data stopped": "hf/data/resume",
            "Checkpoints": (
                "hf/checkpoints hf/rules/arguments:ASYNC_SAVE hf/rules/arguments:ASYNC_CALLBACKS "
                "hf/run/saver hf/run/placement "
                "hf/trainer/parameters:_check_kind"
            ),
            "Why one cannot be resumed": (
                "hf/checkpoints/choice:_size_findings hf/checkpoints/choice:_state_findings "
                "hf/checkpoints/choice:_plain_findings hf/checkpoints/choice:_state_file_findings "
                "hf/checkpoints/choice:_unsafe_findings hf/checkpoints/manifest"
            ),
        },
    ),
    "command-line": Subject(
        "Errors of the command line",
        "`hf-longctx` and its files",
        {
            "Options": "cli sim",
            "Models and hardware": "plan/cost hf/calibration",
            "Lengths": "sim/workloads cli/plan:_chat_tokens cli/plan:_load",
            "Packing from a script": "plan/groups/best_fit",
            "Folders of runs": "hf/trainer/replay page journal sim/run_replay cli/replay cli/report",
        },
    ),
}
# not on a page
_LEFT_OUT = (
    # parts of other messages
    "hf/config:checked "
    "hf/data/chat:assistant_turns hf/data/chat:learnt_spans hf/data/chat:_turns hf/data/chat:_without_ends "
    "hf/data/chat:_generation_prompt hf/models/activations hf/models/kernels:problem "
    "hf/models/logits runtime/states/kernels runtime/parameters/master_weights:keep_master_weights "
    "runtime/parameters/master_weights:why_no_master_weights runtime/tiles "
    # torch's own words, files that were damaged on purpose, and what only code meets that makes plans or executors by hand
    "__init__ hf/checkpoints/trained_weights:check_sizes hf/data/resume:from_json "
    "hf/checkpoints/choice:archive_fault hf/checkpoints/old_shards "
    "plan/chunks plan/policies/fill:_check plan/core plan/model recipes/bench "
    "plan/pipeline plan/predict "
    "runtime/activations/adapted_projection runtime/activations/engine "
    "runtime/activations/head_pieces runtime/attention runtime/execution runtime/process_groups "
    "sim/ablation sim/baselines sim/rivals sim/output "
)
# what is said before the table of a heading
_NOTES = {
    "Why one cannot be resumed": "Parts of `no checkpoint in ... can be resumed` and `... cannot be resumed`.",
    "Self-test": "[The self-test](../self-test.md) says what it compares.",
}


def error_page(subject: str) -> str:
    """The page of one subject: below every heading its messages, what they say was found and what they say to do."""
    page = SUBJECTS[subject]
    lines = [
        f"# {page.title}",
        "",
        f"{page.about}: messages with which the package refuses something, or warns of it.",
        "`…` stands for names and numbers of yours.",
        "[When something is wrong](../guides/troubleshooting.md) explains the messages that need more words.",
    ]
    for title in page.headings:
        lines += ["", f"## {title}", ""]
        lines += [_NOTES[title], ""] if title in _NOTES else []
        lines += _entries(placed()[subject, title])
    return "\n".join(lines).rstrip() + "\n"


@cache
def placed() -> dict[tuple[str, str], list[Message]]:
    """The messages of every heading of every subject; raises ValueError for a module, or an entry above, that has none."""
    places = _places()
    found: dict[tuple[str, str], list[Message]] = {place: [] for place in places.values() if place}
    unused = set(places)
    for message in [*_of_settings(), *of_rules(), *Search(ROOT, "hf_longctx", "recipes").messages()]:
        name = place_of(message, places)
        unused.discard(name)
        # a warning that names no remedy says that nothing need be done
        if (place := places[name]) and not (message.is_warning and not message.parts[1]):
            found[place].append(message)
    if unused:
        raise ValueError(f"docs/scripts/error_pages.py names {', '.join(sorted(unused))}, which has no message; remove it there")
    return found


def _of_settings() -> Iterator[Message]:
    """What the table of settings says about a wrong value."""
    for name, kind in KINDS.items():
        try:
            kind.checked(name, -1)
        except ValueError as error:
            said = re.sub(r"is -1(\.0)?( \(int\))?;", f"is {HOLE};", str(error))
            yield Message(said, "hf_longctx/hf/config.py", "check", False)


def place_of(message: Message, places: dict[str, tuple[str, str] | None]) -> str:
    """The name, of a function, module or folder, by which a message has its place."""
    module = message.file.removeprefix("hf_longctx/").removesuffix(".py")
    for name in (f"{module}:{message.function}", module, *(str(folder) for folder in Path(module).parents)):
        if name in places:
            return name
    raise ValueError(f"messages of {message.file} have no heading in docs/scripts/error_pages.py; add the module to one")


def _places() -> dict[str, tuple[str, str] | None]:
    """Subject and heading by name of a function, module or folder; None for those that are left out."""
    places: dict[str, tuple[str, str] | None] = dict.fromkeys(_LEFT_OUT.split())
    for subject, page in SUBJECTS.items():
        places.update({name: (subject, heading) for heading, names in page.headings.items() for name in names.split()})
    return places


def _entries(messages: list[Message]) -> Iterator[str]:
    """An entry for every text; what was found is a heading, because the site's search looks at headings first."""
    files: dict[str, dict[str, None]] = {}
    warnings = {message.text for message in messages if message.is_warning}
    first = {message.text: message for message in reversed(messages)}
    for message in messages:
        files.setdefault(message.text, {})[message.file] = None
    for text in files:
        message = first[text]
        remedy = message.parts[1] if heading(message) == message.parts[0] else ""
        links = ", ".join(f"[{Path(file).name}](../../{file})" for file in files[text])
        kind = "A warning. " if text in warnings else ""
        yield f"#### {_code(heading(message))} {{#{message.anchor}}}"
        yield ""
        yield f"{kind}**What to do:** {_plain(remedy)} ({links})" if remedy else f"{kind}({links})"
        yield ""
        if message.example:
            yield f"For example, {_code(message.example)}"
            yield ""


@cache
def anchors() -> dict[str, str]:
    """The page of every anchor."""
    return {message.anchor: subject for (subject, _), messages in placed().items() for message in messages}


def _code(text: str) -> str:
    """A text as code."""
    quotes = "`` " if "`" in text else "`"
    return f"{quotes}{text}{quotes[::-1]}"


def _plain(text: str) -> str:
    """A text without meaning to Markdown but in backquotes."""
    pieces = text.split("`")
    pieces[::2] = [re.sub(r"([\\*_\[\]])", r"\\\1", piece).replace("<", "&lt;") for piece in pieces[::2]]
    return "`".join(pieces)


def main() -> None:
    """Writes the pages to `outputs/errors`, where they can be read without the site."""
    OUTPUTS.mkdir(parents=True, exist_ok=True)
    for subject in SUBJECTS:
        (OUTPUTS / f"{subject}.md").write_text(error_page(subject))
        print(OUTPUTS / f"{subject}.md")


if __name__ == "__main__":
    main()
