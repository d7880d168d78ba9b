import pytest
from ranges import count, merge


@pytest.mark.parametrize(
    "ranges, merged",
    [
        ([], []),
        ([(1, 3), (3, 5)], [(1, 5)]),
        ([(1, 2), (5, 6)], [(1, 2), (5, 6)]),
        ([(1, 9), (2, 3)], [(1, 9)]),
        ([(5, 6), (1, 2)], [(1, 2), (5, 6)]),
        ([(1, 2), (3, 4)], [(1, 4)]),
    ],
)
def test_merge(ranges, merged):
    assert merge(ranges) == merged


def test_count():
    assert count([(1, 9), (2, 3), (20, 20)]) == 10
