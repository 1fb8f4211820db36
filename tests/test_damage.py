"""Damaged files: each reader refuses them in one line, warns, or loads what the good file says."""

from benchmarks.damage import Reader, damaged, read_mutant


def test_no_mutant_ends_in_a_traceback_or_changes_what_is_loaded_without_a_word(tmp_path):
    table, found = damaged(200, 7, tmp_path)
    assert not found, found
    assert sum(counted["refused"] for counted in table.values()) > 50
    assert sum(counted.total() for counted in table.values()) == 200


def test_what_should_not_be_is_found(tmp_path):
    def refuse(_):
        raise ValueError("two\nlines")

    for read, expected, is_sealed, said in (
        (lambda _: "other", "good", True, "FOUND a silent change"),
        (lambda _: "other", "good", False, "loaded"),
        (lambda _: 3, 90, False, "FOUND lost visits"),
        (lambda path: {}[path], "good", False, "FOUND KeyError"),
        (refuse, "good", False, "FOUND more than one line"),
    ):
        assert read_mutant(Reader(".json", b"", read, is_sealed), tmp_path, expected, "bit") == said
