"""Puts each stage's diff into stages/README.md, between markers, so that a lesson shows the text as it is.

Run it as python -m measure.lessons.
"""

import ast
import difflib
import re
from pathlib import Path

from data import write_whole

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


if __name__ == "__main__":
    write_whole(PAGE, with_diffs(PAGE.read_text()).encode())
