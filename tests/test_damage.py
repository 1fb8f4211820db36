"""Damaged files: each reader refuses them in one line, warns, or loads what the good file says."""

from benchmarks.damage import damaged


def test_no_mutant_ends_in_a_traceback_or_changes_what_is_loaded_without_a_word(tmp_path):
    table, found = damaged(200, 7, tmp_path)
    assert not found, found
    assert sum(counted["refused"] for counted in table.values()) > 50
    assert sum(counted.total() for counted in table.values()) == 200
