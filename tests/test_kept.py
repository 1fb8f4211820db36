"""Answers that are kept by their memory."""

from concurrent.futures import ThreadPoolExecutor

from rlxjax._kept import Kept


def test_the_latest_used_answers_stay_that_fit_and_the_last_one_always():
    made = []

    def squared(number):
        made.append(number)
        return number * number

    kept = Kept(squared, 10, lambda _, number: number)
    for asked, making, n_bytes in [
        (4, True, 4),
        (5, True, 9),
        (4, False, 9),
        (6, True, 10),  # 5 goes, which was not used for longest
        (4, False, 10),
        (5, True, 9),  # and 6 now
        (30, True, 30),  # more than all may take
        (30, False, 30),
        (1, True, 1),
    ]:
        before = len(made)
        assert kept(asked) == asked * asked
        assert (len(made) > before, kept.n_bytes) == (making, n_bytes), asked
    for number in range(1, 5):
        kept(number)
    kept.keep(7)
    assert kept.n_bytes == 7
    kept.keep(0)
    assert kept.n_bytes == 4


def test_threads_get_their_own_answers_and_memory_stays_bounded():
    kept = Kept(lambda number: [number], 16, lambda *_: 1)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda number: kept(number % 40)[0], range(4000))) == [i % 40 for i in range(4000)]
    assert kept.n_bytes == 16
