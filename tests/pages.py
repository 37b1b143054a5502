"""Draws those parts of the pages that are taken from the stages and from the records.

    python tests/pages.py            draw every page that is stale, and name it
    python tests/pages.py --check    write nothing; name every page that is stale, with exit status 1

The pages are results/NAME.md for each results/NAME.jsonl, README.md and stages/README.md. In the last two,
what is drawn stands between two comments, each on a line of its own: <!-- NAME --> and <!-- end -->. readme() and
lessons() have the names, and blocks.py draws what stands between; README.md's table of the bench has two markers of
its own, page.BEGIN and page.END. Imports no torch, so that it takes a second.
"""

import argparse
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "stages"))

from harness import ladder, page
from harness.results import ResultsError

import blocks
from blocks import EPYC, RESULTS, ZEN3, record

README = ROOT / "README.md"
LESSONS = ROOT / "stages" / "README.md"
MARKER = re.compile(r"^<!-- .* -->$", re.MULTILINE)
END = "<!-- end -->"


def marker(name):
    """The comment above a block of this name."""
    return f"<!-- {name} -->"


def check_markers(text, page_name, names):
    """Raise ResultsError unless a page's text has one marker for each name and no other, each with its end."""
    comments = [comment for comment in MARKER.findall(text) if comment not in (page.BEGIN, page.END)]
    wanted = [marker(name) for name in names]
    for comment in wanted:
        if comment not in comments:
            raise ResultsError(f"{page_name} must hold {comment} and, below it, {END}: put them there")
    begun = None
    for comment in comments:
        if comment == END:
            if begun is None:
                raise ResultsError(f"{page_name} holds {END} where no block has begun: take it out")
            begun = None
            continue
        if begun is not None:
            raise ResultsError(f"{page_name} must hold {END} between {begun} and {comment}: put it there")
        if comment not in wanted:
            raise ResultsError(f"{page_name} holds {comment}, which nothing draws: mend its name, or take it out")
        if comments.count(comment) > 1:
            raise ResultsError(f"{page_name} holds {comment} more than once: leave one")
        begun = comment
    if begun is not None:
        raise ResultsError(f"{page_name} must hold {END} below {begun}: put it there")


def between(text, name, content):
    """A page's text with the content between <!-- name --> and <!-- end -->, which check_markers() has seen."""
    before, begin, after_begin = text.partition(f"{marker(name)}\n")
    _, end, after = after_begin.partition(END)
    return f"{before}{begin}{content}\n{end}{after}"


def with_blocks(text, page_name, drawn):
    """A page's text with its blocks drawn again. drawn: a list of (name, content). Raises ResultsError."""
    check_markers(text, page_name, [name for name, _ in drawn])
    for name, content in drawn:
        text = between(text, name, content)
    return text


def shown_in_readme(text):
    """The name of the record that README.md's text links to below its table.

    Raises ResultsError where there is no such link.
    """
    _, _, after_begin = text.partition(page.BEGIN)
    part, _, _ = after_begin.partition(page.END)
    link = re.search(r"\(results/([\w.+-]+)\.md\)", part)
    if link is None:
        remedy = "python bench.py --render NAME --readme"
        raise ResultsError(f"README.md's table has no link to its record: {remedy}")
    return link[1]


def readme(text):
    """README.md's text with its table and its blocks drawn again."""
    name = shown_in_readme(text)
    text = page.between_markers(text, page.readme_part(record(name), name))
    drawn = [
        ("first", blocks.first_table()),
        ("diff s05", blocks.diff("s04_compile", "s05_flash")),
    ]
    return with_blocks(text, "README.md", drawn)


def lessons(text):
    """stages/README.md's text with its blocks drawn again."""
    drawn = [
        ("machines", blocks.machines_table()),
        ("passes", blocks.passes_tables()),
        ("bytes", blocks.bytes_table()),
        ("clearing", blocks.clearing_table()),
        ("memory", blocks.memory_table()),
        ("s01", blocks.s01_table()),
    ]
    names = ladder.names()
    for above, name in zip(names, names[1:], strict=False):
        drawn.append((f"diff {page.short(name)}", blocks.diff(above, name)))
        drawn.append((f"worth {page.short(name)}", blocks.worth(name, above)))
    drawn += [
        ("loss s07", blocks.loss_table("s07_clip", "s06_vocab")),
        ("loss s08", blocks.loss_table("s08_cosine", "s07_clip")),
        ("loss s09", blocks.loss_table("s09_decay", "s08_cosine")),
        ("loss rates", page.rates_table(record("zen3-loss-rates"), "")),
        ("loss batch", page.rates_table(record("zen3-loss-batch"), "")),
        ("loss halves", blocks.halves_table()),
        ("loss differences", blocks.differences_table()),
        ("scale", blocks.scale_table(record("zen3-scale"))),
        ("profile", blocks.profile_table(EPYC)),
        ("profile zen3", blocks.profile_table(ZEN3)),
        ("exercise float16", blocks.float16_table()),
        ("exercise division", blocks.division_table()),
        ("bad batch", blocks.bad_batch_table()),
        ("misread", blocks.misread_table()),
    ]
    return with_blocks(text, "stages/README.md", drawn)


def records():
    """The paths of the records that git keeps: a bench that was given no name has its date for one."""
    return [path for path in sorted(RESULTS.glob("*.jsonl")) if not path.name.startswith("20")]


def read_page(path):
    """A page's text with its line ends as they are; "" where there is no such page yet."""
    if not path.exists():
        return ""
    return path.read_bytes().decode()


def all_pages():
    """Yield the path of each page, and the text that it should have."""
    for path in records():
        yield path.with_suffix(".md"), page.page(record(path.stem))
    text = read_page(README)
    yield README, readme(text)
    yield LESSONS, lessons(read_page(LESSONS))


def replace(path, text):
    """Write a page at once: whatever stops this process, the old page is there or the new one."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_bytes(text.encode())
    os.replace(temporary, path)


def main():
    """The command line; its exit status. A record or a page that can't be used is one line and status 2."""
    parser = argparse.ArgumentParser(description="Draw every page that is stale.", allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing, and exit with 1 if one is stale")
    args = parser.parse_args()
    status = 0
    try:
        for path, text in all_pages():
            if read_page(path) == text:
                continue
            name = path.relative_to(ROOT)
            if args.check:
                print(f"{name} is stale: python tests/pages.py draws it again")
                status = 1
            else:
                replace(path, text)
                print(f"{name} is drawn again")
    except (ResultsError, OSError) as error:
        print(f"pages.py: error: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
