"""The bucket that every ration by the clock is taken from."""

from resolver.base.limiter import Bucket


def test_empty_limiter_waits_and_takes_nothing() -> None:
    bucket = Bucket(2.0, 10.0, now=0.0)
    assert bucket.take(8.0, 0.0) == 0.0
    assert bucket.take(6.0, 0.0) == 2.0
    assert bucket.left(0.0) == 2.0
    assert bucket.take(6.0, 2.0) == 0.0
    assert bucket.left(100.0) == 10.0  # never more than it holds
    assert bucket.full(100.0)
    assert (bucket.take(1000.0, 100.0), bucket.left(100.0)) == (0.0, 0.0)  # more than it holds empties it


def test_a_debt_is_paid_back_first() -> None:
    bucket = Bucket(0.5, 1.0, now=0.0)
    assert [bucket.charge(1.0, 0.0) for _ in range(2)] == [0.0, 2.0]
    assert not bucket.full(2.0)
    assert bucket.take(0.5, 2.0) == 1.0
    assert bucket.take(0.5, 3.0) == 0.0
