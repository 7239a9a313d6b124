"""Turns of phrase that docstrings, comments, messages and pages do without; `make style` looks for them."""

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

INSTEAD = {
    r"^ {8,}\w+: (?:of|that|by|what|where|which|whether|in|as) ": "a noun phrase that stands without the name",
    r'^ *"""(?:What|The same|How|Whether|Which|Who)\b': "a verb (functions) or a noun phrase (classes, values)",
    r'^ *"""`?\[': "what the values are; the shape after it",
    r'^ *"""See [^.]*\.(?:"""|$)': "no docstring: documentation tools inherit it",
    r"\b(?:tells? (?:of|what|how|why|whether)|(?:is|are) told)\b": "reports, returns, shows, receives",
    r"\b(?:each|every|first|last|another) rounds?\b": "rollout batch k, inner step k",
    r"\b(?:at|in) (?:this|that|these|those|its|any) places?\b": "index, slot, position, path, URL",
    r"\b(?:is|are|than|with) (?:that|those) of\b|\bthose that\b(?! (?:the|ask))": "the noun again",
    r"\bof (?:one's|their|your) own\b|\bof the user's\b": "custom, user-defined, your",
    r"\b(?:go|goes|going|went) on (?:with|to|where|after)\b": "continues, resumes",
    r"\bbehind (?:hidden|each|every|them|these)\b": "after",
    r"\b(?:left|leaves?|leaving) out\b": "omitted, not set",
    r"\bso many\b|\bas many as\b": "N, number of",
    r"\b(?:these|those|its|all) numbers\b": "metrics, values",
    r"\b(?:shall|anew|for want of|comes? of|at hand|mend(?:s|ed|ing)?)\b": "a plain verb: target, again, repair",
    r"\b(?:is|are) to be\b": "must be, can be",
    r"; (?:found|required)\b|^ *[fr]*[\"'](?:found|required) ": "X must be Y, got Z; expected Y, got Z",
}
ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "pipeline", "stages", "storage", "flows", "metaloom")


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line numbers and lines of a page, or of a source's strings and comments as they are indented."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return (yield from enumerate(text.splitlines(), 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            said = re.sub(r"\{[^{}]*\}", "", " " * token.start[1] + token.string)
            yield from enumerate(said.splitlines(), token.start[0])


def found_in(path: Path) -> Iterator[str]:
    """Yield the turns of phrase in a file, each with what to write instead."""
    for line, text in prose(path):
        for pattern, instead in INSTEAD.items():
            if match := re.search(pattern, text):
                yield f"{path}:{line}: found {match[0].strip()!r}; write {instead}"


if __name__ == "__main__":
    roots = [*(ROOT.glob("*.md")), *(path for name in FOLDERS for path in sorted((ROOT / name).rglob("*.*")))]
    files = [path for path in roots if path.suffix in (".md", ".py")]
    faults = [fault for path in files for fault in found_in(path)]
    sys.exit("\n".join(faults) or None)
