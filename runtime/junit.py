"""The result of verify-and-run as JUnit XML, which CI systems read: a test case for each check."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from xml.etree import ElementTree

from runtime.checking.checks import Check
from runtime.result import RunResult
from runtime.summary import verdict

NAME = "reshard.verify-and-run"
FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 can't hold, even escaped."""
Element = ElementTree.Element


def junit(result: RunResult) -> str:
    """The document of a run that came to a verdict."""
    cases = [_case(check) for check in result.checks]
    seconds = float(result.figures.get("seconds", 0.0))
    text = "\n".join([verdict(result), "Not checked:", *(f"- {sentence}" for sentence in result.not_checked)])
    facts = {key: value for key, value in result.figures.items() if isinstance(value, (str, int, float))}
    return _document(cases, seconds, facts, text)


def junit_error(kind: str, message: str) -> str:
    """The document of a run that couldn't be made: one case, which is an error and no failure."""
    case = Element("testcase", classname=NAME, name="run", time="0")
    error = ElementTree.SubElement(case, "error", type=_clean(kind), message=_clean(message))
    error.text = _clean(message)
    return _document([case], 0.0, {}, "")


def _case(check: Check) -> Element:
    case = Element("testcase", classname=NAME, name=_clean(check.name), time="0")
    side = "at most" if check.bound == "most" else "at least"
    worst = "not a finite number" if check.worst is None else f"{check.worst:.6g}"
    numbers = f"{worst}, {side} {check.limit:g} passes"
    if check.passed:
        ElementTree.SubElement(case, "system-out").text = _clean(f"{check.where}: {numbers}\n{check.note}")
        return case
    message = f"{check.name}: {check.where}: {numbers}"
    failure = ElementTree.SubElement(case, "failure", type=_clean(check.name), message=_clean(message))
    failure.text = _clean(f"{message}\n{check.note}")
    return case


def _document(cases: list[Element], seconds: float, facts: dict[str, str | int | float], text: str) -> str:
    count = {
        "tests": str(len(cases)),
        "failures": str(sum(case.find("failure") is not None for case in cases)),
        "errors": str(sum(case.find("error") is not None for case in cases)),
        "time": f"{seconds:.3f}",
    }
    root = Element("testsuites", {"name": "reshard", **count})
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
    suite = ElementTree.SubElement(root, "testsuite", {"name": NAME, "timestamp": now, "skipped": "0", **count})
    if facts:
        properties = ElementTree.SubElement(suite, "properties")
        for key, value in facts.items():
            ElementTree.SubElement(properties, "property", name=_clean(key), value=_clean(str(value)))
    suite.extend(cases)
    if text:
        ElementTree.SubElement(suite, "system-out").text = _clean(text)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _clean(text: str) -> str:
    return FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)
