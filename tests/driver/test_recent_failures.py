"""Counters that exclude a node decay: what failed thrice in weeks is not excluded for ever."""

from autohet.driver.ray.recent_failures import RecentFailures


def test_three_failures_within_the_window_exclude_until_they_are_old() -> None:
    failures = RecentFailures(3, window_s=100.0)
    for now in (0.0, 10.0, 20.0):
        assert not failures.is_excluded("a", now)
        failures.add("a", now)
    assert failures.is_excluded("a", 99.0)
    assert not failures.is_excluded("b", 99.0)
    assert not failures.is_excluded("a", 101.0)
    failures.add("a", 102.0)
    assert failures.is_excluded("a", 103.0), "it has not become better"


def test_three_failures_in_weeks_exclude_nobody() -> None:
    failures = RecentFailures(3, window_s=100.0)
    for week in range(10):
        failures.add("a", week * 1000.0)
        assert not failures.is_excluded("a", week * 1000.0)


def test_who_is_gone_is_forgotten() -> None:
    failures = RecentFailures(1)
    failures.add("a", 0.0)
    failures.forget(failures.known - {"b"})
    assert not failures.is_excluded("a", 0.0)
