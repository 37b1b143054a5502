"""stages/README.md shows the stages' diffs as they are, and its commands run."""

import re

from measure.lessons import PAGE, code_diff, fresh, with_diffs


def test_the_lessons_hold_the_diffs_of_the_stages_as_they_are():
    page = PAGE.read_text()
    assert fresh(page) == page, "run python -m measure.lessons"
    assert re.findall(r"<!-- diff s(\d\d) -->", page) == [f"{i:02d}" for i in range(2, 13)]


def test_a_line_that_only_moved_to_the_right_is_no_change(tmp_path):
    old, new = tmp_path / "old.py", tmp_path / "new.py"
    old.write_text('"""Old."""\na = 1\nb = 2\n')
    new.write_text('"""New."""\nfor i in range(2):\n    a = 1\nb = 3\n')
    assert code_diff(old, new) == "+for i in range(2):\n     a = 1\n-b = 2\n+b = 3"


def test_a_stale_diff_is_replaced_and_the_text_around_it_is_not():
    page = "before\n<!-- diff s02 -->\nold\n<!-- end -->\nafter\n"
    now = with_diffs(page)
    assert now.startswith("before\n<!-- diff s02 -->\n```diff\n") and now.endswith("\n```\n<!-- end -->\nafter\n")
    assert '+torch.set_float32_matmul_precision("high")' in now and "old" not in now
