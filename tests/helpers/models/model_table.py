"""Writes `docs/models.md` by testing every model class of transformers: `python tests/helpers/models/model_table.py`.

With names of classes only these are tested, and the others keep their rows.
"""

from __future__ import annotations

import math
import os
import re
import sys
from pathlib import Path

# ends of names of causal language models that are older than the name ...ForCausalLM
OLDER = ("LMHeadModel", "ModelWithLMHead", "GenerationDecoder")

TESTS = Path(__file__).parents[2]
FILE = TESTS.parent / "docs" / "models.md"
_EXACT = """
Exact means: a tiny fp64 model gives the loss and every gradient of plain eager Hugging Face on one document at a time, to
1e-12, when documents are packed, cut into slices, and in a Ulysses group of two ranks. The model has every kind of
layer of its default config, windows of 6 tokens, chunks of 8 tokens, indexes that choose 6 tokens, and documents of up to
30. `error` is the largest relative error, rounded up to a power of ten. What transformers computes in fp32 (norms, rotary
embeddings, routers, softmax) is fp64 on both sides. The last columns say whether this also holds in rings, if layers are
recomputed and run in tiles, if parameters are sharded (FSDP2), and in pipeline stages. `no` means refused with an error;
under `recomputed` it means that plans keep everything, which the run says once. `whole logits`: the class changes its logits
after the head by more than a scale or a cap, so plans keep everything for it, too.
"""
_SIDES = """
Decoders of encoder-decoders (BART, Blenderbot, Marian, MBART, Pegasus, PLBART, Whisper) run alone, as their classes for causal
language models do: without a second sequence, and so without their cross attention, whose weights get no gradient. Labels are
those of the same token, as for every other class, and not shifted ones as the forward of these classes expects.
"""
_COMPRESSED = """
Attention to compressed keys (DeepSeek V4) runs in blocks of rows by plain matrices over the tokens of their windows and all
entries before them, and masks entries that an index did not choose. Backward makes each block and its mask again, so that what
layers save grows with the tokens, and not with their square. Forecasts count the time of full attention, which has more scores:
`hf-longctx plan` says so. The index of Qwen4-Exp is the code of its class, which goes through tokens one by one.
"""
_CLASSIFIERS = """
Models that classify documents or tokens (`...ForSequenceClassification`, `...ForTokenClassification`) run if their text model is
that of an exact class and their head is one linear module on it: those that transformers derives from its generic classes, and
BioGpt, GPTBigCode, GPTNeoX and OPT. `pytest -m sweep tests/hf/models/test_classifier_classes.py` compares each of them with plain
transformers, packed and in slices, to 1e-12.
"""
_WRAPPED = """
A multimodal class trains rows of text if it stands here and its text model is the one named, or that of an exact class above.
Errors are measured as above, against the whole multimodal model on rows of text. Towers for images, sound and video are
frozen while a run on rows of text lasts, stay bit-equal, and are saved with the checkpoint. Rows with such input, by a column or
by a token that stands for it, are refused except for [images of some classes](#images-in-rows), and so are the classes at the
end of this page.
"""
_ON_TEXT = """
Rows of text are causal in every class, also in PaliGemma, whose prompts may see later tokens: its rows count as answers alone.
Layers and adapters that read images or proteins alone (Mllama, Evolla) are left out, as plain transformers leaves them out, and
are frozen like towers. Where plain transformers asks for images in every row (BLIP-2, IDEFICS, InstructBLIP, Kosmos-2, Molmo 2),
it got none here, or some that no token stands for or reads. IDEFICS runs the MLPs of its layers that read images on rows of text,
too, and keeps everything.
"""
_MEDIA = """
Errors of loss and of every gradient of text, projector and tower are below 1e-12 in packs, in slices that cut images, in groups
of two ranks, in shards, in rings and in two stages. Towers may be trained, with adapters, or frozen. Images of Gemma 3 and 4 see
themselves both ways: slices end between them, and rings and stages refuse them.
"""
_VIDEOS = """
Videos are tested in packs, in slices that cut them and in groups of two ranks; those of Qwen2.5-VL, Qwen3-VL and Qwen3.5 also in
shards and stages.
"""
_OTHER_WRAPPERS = "## Other multimodal classes, which are refused"
_PLACES = {"ring": "rings", "recomputed": "recomputed", "sharded": "sharded", "stages": "stages"}


def table(outcomes: dict[str, dict[str, str]], refused: dict[str, str], wrapped: dict[str, dict[str, str]], version: str) -> str:
    """Text of the page: cells for tested classes, reasons for refused ones, and cells for multimodal classes."""
    total = len(outcomes) + len(refused)
    counts = {summary: list(refused.values()).count(summary) for summary in dict.fromkeys(refused.values())}
    lines = [
        "# Model classes",
        "",
        f"Of the {total} causal language models of transformers {version}, {len(outcomes)} run exactly "
        f"({len(outcomes) / total:.0%}). The others are refused at start with an error that names class, layer and reason:",
        "",
        "| reason | classes |",
        "|---|---|",
        *(f"| {summary} | {count} |" for summary, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))),
        "",
        " ".join(_EXACT.split()),
        "",
        " ".join(_SIDES.split()),
        "",
        " ".join(_COMPRESSED.split()),
        "",
        " ".join(_CLASSIFIERS.split()),
        "",
        "Sizes that `hf-longctx plan` knows by name: `hf-longctx plan --list models` "
        "([more](guides/how-long.md#models-and-hardware-by-name)).",
        "",
        "`python tests/helpers/models/model_table.py` writes this page; `pytest -m sweep "
        "tests/hf/models/test_model_sweep.py` proves it.",
        "",
        "## Exact",
        "",
        "| class | error | rings | recomputed | sharded | stages |",
        "|---|---|---|---|---|---|",
        *(f"| {name} | {' | '.join(cells.values())} |" for name, cells in sorted(outcomes.items())),
        "",
        "## Refused",
        "",
        "| class | reason |",
        "|---|---|",
        *(f"| {name} | {summary} |" for name, summary in sorted(refused.items())),
        "",
        *images_section(),
        "## Wrapped text models",
        "",
        " ".join(_WRAPPED.split()),
        "",
        " ".join(_ON_TEXT.split()),
        "",
        "| class | text model | error | rings | recomputed | sharded | stages |",
        "|---|---|---|---|---|---|---|",
        *(f"| {name} | {' | '.join(cells.values())} |" for name, cells in sorted(wrapped.items())),
        *_refused_wrappers(),
    ]
    return "\n".join(lines) + "\n"


def images_section() -> list[str]:
    """Lines of the page about rows with images."""
    from hf_longctx.families.registry import FAMILIES

    names, videos = (sorted(family.wrapper for family in FAMILIES if kind in family.media) for kind in ("image", "video"))
    said = f"Rows of these {len(names)} classes may have [images](guides/images.md): {', '.join(names)}. "
    said += f"{' '.join(_MEDIA.split())} Rows of these {len(videos)} may have videos, too: {', '.join(videos)}."
    return ["## Images in rows", "", said, "", " ".join(_VIDEOS.split()), ""]


def _refused_wrappers() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    from hf_longctx.families.refused import REASONS
    from hf_longctx.families.registry import FAMILIES

    refused = ((name, REASONS[reason]) for family in FAMILIES for name, reason in family.refused.items())
    reasons = {name: reason.text for name, reason in refused if not reason.summary}
    rows = [f"| {name} | {reasons[name]} |" for name in sorted(reasons)]
    known = set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values())
    left_out = sorted(known & reasons.keys())
    counted = (
        f"Of the {len(known)} classes that `AutoModelForImageTextToText` builds, {len(known) - len(left_out)} run rows of text. "
        f"The other {len(left_out)} are {', '.join(left_out[:-1])} and {left_out[-1]}."
    )
    return ["", _OTHER_WRAPPERS, "", counted, "", "| class | why, and what it would need: the class |", "|---|---|", *rows]


def cells_of(outcome: object, head: str) -> dict[str, str]:
    """Cells of a class's row; `head` is the reason why its loss cannot be computed in tiles, or empty."""
    errors, refusals = outcome.errors, outcome.refusals  # type: ignore[attr-defined]
    decade = max(-14, math.ceil(math.log10(max(*errors.values(), 1e-16))))
    cells = {road: "no" if road in refusals else "yes" for road in _PLACES}
    if head and cells["recomputed"] == "yes":
        cells["recomputed"] = "whole logits"
    return {"error": f"1e{decade}"} | cells


def read_page() -> tuple[dict[str, list[str]], dict[str, str], dict[str, list[str]]]:
    """Reads the page: cells of exact classes, reasons for refused classes, and cells of multimodal classes."""
    exact, others = FILE.read_text().split("## Exact")[1].split("## Refused")
    refused, wrapped = others.split("## Wrapped text models")
    wrapped, _ = wrapped.split(_OTHER_WRAPPERS)
    rows = [
        {
            cells[0]: cells[1:]
            for cells in ([cell.strip() for cell in line.strip("| \n").split("|")] for line in part.splitlines())
            if re.fullmatch(r"\w*[A-Z]\w+", cells[0])
        }
        for part in (exact, refused, wrapped)
    ]
    return rows[0], {name: cells[0] for name, cells in rows[1].items()}, rows[2]


def main(names: list[str]) -> None:
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ.update(PYTHONPATH=os.pathsep.join(paths), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    sys.path.insert(0, str(TESTS))
    import transformers
    from helpers.measures.class_sweep import sweep
    from helpers.models.any_model import build_any, class_names
    from helpers.ranks.rank_pool import RankPool

    from hf_longctx.families.registry import TESTED_MODELS, WRAPPED_MODELS
    from hf_longctx.hf.models.logits import head_problem
    from hf_longctx.hf.rules.classes import reason_of

    pool = RankPool(2)
    exact, _, wrappers = read_page()
    outcomes = {}
    for name in sorted((*TESTED_MODELS, *WRAPPED_MODELS)):
        if names and name not in names:
            outcomes[name] = dict(zip(("error", *_PLACES), exact[name] if name in exact else wrappers[name][1:], strict=True))
            continue
        outcomes[name] = cells_of(sweep(name, pool), head_problem(build_any(name)))
        print(name, outcomes[name], flush=True)
    pool.close()
    refused = {name: reason_of(name).summary for name in class_names() if name not in TESTED_MODELS}
    wrapped = {name: {"text model": text} | outcomes.pop(name) for name, text in WRAPPED_MODELS.items()}
    FILE.write_text(table(outcomes, refused, wrapped, transformers.__version__))


if __name__ == "__main__":
    main(sys.argv[1:])
