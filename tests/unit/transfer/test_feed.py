"""A feed tells every follower how far the producer is."""

import pytest

from kvrelay.transfer.feed import BlockFeed


def test_followers_hear_of_progress_and_of_nothing_else() -> None:
    feed, heard = BlockFeed([7, 8, 9]), list[int]()
    stop = feed.subscribe(lambda: heard.append(feed.published))
    for n in (1, 1, 3, 2):
        feed.publish(n)
    stop()
    feed.fail(RuntimeError("too late to be heard"))
    assert heard == [1, 3]


def test_more_than_all_blocks_cannot_be_published() -> None:
    with pytest.raises(ValueError, match="published 4 of 3"):
        BlockFeed([1, 2, 3]).publish(4)


def test_only_the_first_failure_counts_and_nothing_is_published_after_it() -> None:
    feed = BlockFeed([1, 2, 3])
    first = RuntimeError("first")
    feed.fail(first)
    feed.fail(RuntimeError("second"))
    feed.publish(2)
    assert (feed.error, feed.published) == (first, 0)
