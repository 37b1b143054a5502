"""Puts into stages/README.md, between markers, each stage's diff as it is and what the committed records say.

Run it as python -m measure.lessons.
"""

import ast
import difflib
import re
from pathlib import Path

from data import write_whole
from measure import misread
from measure.figures import Results

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "stages" / "README.md"


def code(path):
    """The lines of a stage below its docstring."""
    text = path.read_text()
    return text.splitlines()[ast.parse(text).body[0].end_lineno :]


def code_diff(old, new):
    """The changed lines between two stages, with one line around them. A line that only moved right is unchanged."""
    before, after = code(old), code(new)
    matcher = difflib.SequenceMatcher(None, [s.strip() for s in before], [s.strip() for s in after], autojunk=False)
    blocks = []
    for group in matcher.get_grouped_opcodes(1):
        lines = []
        for kind, i1, i2, j1, j2 in group:
            if kind == "equal":
                lines += [" " + line for line in after[j1:j2]]
            else:
                lines += ["-" + line for line in before[i1:i2]] + ["+" + line for line in after[j1:j2]]
        blocks.append("\n".join(line.rstrip() for line in lines))
    return "\n@@\n".join(blocks)


def with_diffs(page):
    """The page with every block `<!-- diff sNN -->` ... `<!-- end -->` holding that stage's diff as it is now."""
    stages = sorted((ROOT / "stages").glob("s[0-9][0-9]_*.py"))

    def block(match):
        i = int(match[1]) - 1
        return f"<!-- diff s{match[1]} -->\n```diff\n{code_diff(stages[i - 1], stages[i])}\n```\n<!-- end -->"

    return re.sub(r"<!-- diff s(\d\d) -->.*?<!-- end -->", block, page, flags=re.DOTALL)


def with_misreadings(page):
    """The page with the block `<!-- misread -->` ... `<!-- end -->` holding the table of what committed records say."""
    results = Results.read(ROOT / "results" / f"{misread.NAME}.jsonl")
    table = misread.as_table(misread.misreadings(results))
    block = f"<!-- misread -->\n{table}\n<!-- end -->"
    return re.sub(r"<!-- misread -->.*?<!-- end -->", lambda _: block, page, flags=re.DOTALL)


def fresh(page):
    """The page with everything between markers as it is now."""
    return with_misreadings(with_diffs(page))


if __name__ == "__main__":
    write_whole(PAGE, fresh(PAGE.read_text()).encode())
