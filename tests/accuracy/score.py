"""Scores the planner against the ground truth and writes docs/accuracy.md: `python -m tests.accuracy.score`."""

from __future__ import annotations

import sys
from pathlib import Path

from shard_plans.memory.engine import load_engine
from tests.accuracy.planned import Score, activations, cases, rows, score

DOCUMENT = Path(__file__).parents[2] / "docs" / "accuracy.md"
HEAD = """# How close the planner comes

`python -m tests.accuracy.score` writes this page. It compares the planner, given nothing but a config.json and the
engine's rules, with figures that engines printed when they started (tests/accuracy/ground_truth.csv holds each with
its public source; tests/accuracy/cases.yaml says how a row is read). The rules of an engine are those of
shard_plans/memory/engines, by version, each with its source; none is fitted to a row. A test holds the rows that have a
target to it.

Error = (planned - logged) / logged. Weights and caches are GiB a card, tokens are what the engine printed for the
memory that it printed; the printed memory has two digits, and the engine takes the least of all its workers.

| row | model | figure | logged | planned | error | target | remark |
|---|---|---|---|---|---|---|---|
"""
RANGES = """
## What can't be computed

| figure | in the logs | what the planner assumes for vLLM, low / typical / high |
|---|---|---|
"""
STEP = 8192
"""Tokens of the profiling step that the activations are compared at; the logs don't say."""


def table(scores: list[Score]) -> str:
    """One line a figure."""
    lines = []
    for each in scores:
        digits = ".2f" if each.what in ("weights", "full") else ",.0f"
        target = "" if each.target is None else f"{each.target:g} %"
        lines.append(
            f"| {each.row} | {each.model} | {each.what} | {each.logged:{digits}} | {each.planned:{digits}} | "
            f"{each.error:+.2f} % | {target} | {each.remark} |\n"
        )
    return "".join(lines)


def ranges() -> str:
    """Logged overheads beside the ranges."""
    engine, found, how = load_engine("vllm"), rows(), cases()
    graphs = sorted(float(row["graph_gib"]) for row in found.values() if row["graph_gib"])
    logged = {
        "graphs": ", ".join(f"{number:g}" for number in graphs) + " GiB of captured graphs in this file",
        "outside_one_rank": "one rank: see the rule", "outside_group": "a group of ranks: see the rule",
        "fragmentation": "two boots of one deployment, 1.28 GiB apart",
    }  # fmt: skip
    lines = []
    for rule, words in logged.items():
        ends = engine.range(rule)
        assumed = " / ".join(f"{end / 2**30:.2f}" for end in (ends.low, ends.typical, ends.high))
        lines.append(f"| {rule} | {words} | {assumed} GiB: {engine.source(rule)} |\n")
    for row, case in how.items():
        if "config" in case and found[row]["activation_peak_gib"]:
            said, ends = activations(found[row], case, STEP)
            assumed = " / ".join(f"{end / 2**30:.2f}" for end in (ends.low, ends.typical, ends.high))
            where = "within" if ends.low <= said * 2**30 <= ends.high else "outside"
            words = f"{row}: {said:g} GiB in a step whose tokens aren't printed"
            lines.append(f"| activations | {words} | {assumed} GiB at {STEP:,} tokens: {where} |\n")
    return "".join(lines)


def document() -> str:
    """The whole page."""
    truth, how = rows(), cases()
    scores = [each for row, case in how.items() for each in score(truth[row], case)]
    skipped = "".join(
        f"| {row} | {truth[row]['model']} | {case['why']} |\n" for row, case in how.items() if "why" in case
    )
    text = HEAD + table(scores) + RANGES + ranges()
    return text + "\n## Rows that can't be scored\n\n| row | model | why |\n|---|---|---|\n" + skipped


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
    sys.stdout.write(document())
