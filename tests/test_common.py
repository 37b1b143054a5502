"""What all rooms share: whole files."""

from harness.common import whole_file

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
