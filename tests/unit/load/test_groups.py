"""Members of a group share its prefix, and nothing else is shared."""

from itertools import combinations, islice

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.load.groups import PrefixGroups
from kvrelay.load.lengths import Lengths


def made(seed: int = 1, count: int | None = 30, groups: int = 3) -> PrefixGroups:
    return PrefixGroups(seed, 50_000, count, Lengths(20, 40), Lengths(1, 9), groups, Lengths(48, 48))


@given(seed=st.integers(0, 2**32), groups=st.integers(1, 5))
def test_every_member_opens_with_a_warmed_prefix(seed: int, groups: int) -> None:
    workload = made(seed, groups=groups)
    warm = {one.opening_ids for one in workload.warm_up()}
    assert len(warm) == groups
    for one in workload.conversations():
        assert one.opening_ids in warm and len(one.opening_ids) == 48
        assert len(one.turns) == 1 and 20 <= len(one.turns[0].fresh_ids) <= 40


def test_members_share_no_more_than_their_prefix() -> None:
    for one, other in combinations(made().conversations(), 2):
        assert one.turns[0].fresh_ids[:8] != other.turns[0].fresh_ids[:8]


def test_without_groups_nothing_is_shared_and_nothing_warmed() -> None:
    alone = made(groups=0)
    assert alone.warm_up() == []
    assert {one.opening_ids for one in alone.conversations()} == {()}


def test_every_group_has_members() -> None:
    assert len({one.opening_ids for one in made(count=100).conversations()}) == 3


def test_an_endless_workload_begins_as_the_finite_one() -> None:
    assert list(islice(made(count=None).conversations(), 30)) == list(made().conversations())
