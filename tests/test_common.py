"""What all rooms share: refusals, lines of progress, whole files."""

from harness.common import say, whole_file

import os

import pytest


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    with whole_file(path) as unfinished:
        unfinished.write_text("one")
    with path.open() as reader:
        with whole_file(path) as unfinished:
            unfinished.write_text("two")
        assert reader.read() == "one"  # whoever reads the old file meanwhile reads it to its end
    with pytest.raises(KeyboardInterrupt), whole_file(path) as unfinished:
        unfinished.write_text("thr")
        raise KeyboardInterrupt
    assert path.read_text() == "two"
    assert list(path.parent.iterdir()) == [path]


def test_lines_for_a_reader_who_has_left_go_nowhere():
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as stream:
        for _ in range(2):
            say("nobody reads this", stream)
