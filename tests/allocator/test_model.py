from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gazette.cluster.allocator.model import (
    Assignment,
    Item,
    Member,
    allocator_decoder,
    assignment_key,
    item_assignments_prefix,
    item_key,
    member_key,
)
from gazette.cluster.etcd.values import KeyValue
from gazette.errors import Invalid


class Value:
    def __init__(self, *args: object) -> None:
        self.args = args

    def desired_replication(self) -> int:
        return 1

    def least_replication(self) -> int:
        return 1

    def item_limit(self) -> int:
        return 1

    def exiting(self) -> bool:
        return False


decode = allocator_decoder("/root", Value, Value, Value)


def kv(key: str, value: bytes = b"v") -> KeyValue:
    return KeyValue(key.encode(), value, 1, 1, 1, 0)


def test_keys_are_those_of_the_reference() -> None:
    """The layout is shared with other implementations: these strings are the specification."""
    assert item_key("/g/cluster", "a/b=c") == "/g/cluster/items/a/b=c"
    assert member_key("/g/cluster", "us-1", "pod") == "/g/cluster/members/us-1#pod"
    assert (
        assignment_key("/g/cluster", "a/b=c", "us-1", "pod", 0)
        == "/g/cluster/assign/a/b=c#us-1#pod#0"
    )
    assert item_assignments_prefix("/g/cluster", "a") == "/g/cluster/assign/a#"


def test_order_of_keys_is_the_order_of_parts() -> None:
    """``#`` sorts below every character of a name, also where one name begins another."""
    parts = [
        ("a", "z", "m", 1),
        ("a", "z", "m1", 0),
        ("a", "z1", "m", 0),
        ("a+", "a", "a", 0),
        ("a/b", "a", "a", 0),
        ("a0", "a", "a", 0),
        ("é", "a", "a", 0),
    ]
    keys = [assignment_key("/root", *p) for p in parts]
    assert keys == sorted(keys)
    assert [k.encode() for k in keys] == sorted(k.encode() for k in keys)
    found: list[Any] = [decode(kv(key)) for key in keys]
    assert [one.member_id for one in found] == [p[1:3] for p in parts]


@pytest.mark.parametrize("bad", ["", "a#b", "a b", "a!", "a\0", 'a"'])
def test_parts_that_would_break_the_order_are_refused(bad: str) -> None:
    makers: tuple[Callable[[], str], ...] = (
        lambda: item_key("/root", bad),
        lambda: member_key("/root", bad, "s"),
        lambda: member_key("/root", "z", bad),
        lambda: assignment_key("/root", bad, "z", "s", 0),
        lambda: assignment_key("/root", "i", "z", bad, 0),
        lambda: item_assignments_prefix("/root", bad),
    )
    for make in makers:
        with pytest.raises(Invalid):
            make()
    with pytest.raises(Invalid):
        assignment_key("/root", "i", "z", "s", -1)


def test_keys_decode_into_what_they_name() -> None:
    item = decode(kv("/root/items/a/b", b"x"))
    assert isinstance(item, Item)
    assert isinstance(item.value, Value)
    assert (item.id, item.value.args) == ("a/b", ("a/b", b"x"))

    member = decode(kv("/root/members/z#s", b"x"))
    assert isinstance(member, Member)
    assert isinstance(member.value, Value)
    assert (member.id, member.value.args) == (("z", "s"), ("z", "s", b"x"))

    # Case: the value of a fresh assignment is empty, and it is for the application to say so.
    assignment = decode(kv("/root/assign/a/b#z#s#12", b""))
    assert isinstance(assignment, Assignment)
    assert (assignment.item_id, assignment.member_id, assignment.slot) == ("a/b", ("z", "s"), 12)
    assert assignment.value.args == ("a/b", "z", "s", 12, b"")


@pytest.mark.parametrize(
    "key",
    [
        "/root/other/a",
        "/root2/items/a",
        "/root/items/",
        "/root/items/a#b",
        "/root/members/z",
        "/root/members/z#s#t",
        "/root/members/#s",
        "/root/members/z#a pod",
        "/root/items/a!",
        "/root/assign/a#z#s",
        "/root/assign/a#z#s#0#1",
        "/root/assign/a#z#s#x",
        "/root/assign/a#z#s#-1",
        "/root/assign/a#z#s#",
        "/root/assign/a#z#s#¹",
    ],
)
def test_other_keys_are_refused(key: str) -> None:
    with pytest.raises(Invalid):
        decode(kv(key))


def test_keys_that_are_not_text_are_refused() -> None:
    with pytest.raises(Invalid, match="UTF-8"):
        decode(KeyValue(b"/root/items/\xff\xfe", b"", 1, 1, 1, 0))


def test_errors_of_values_are_passed_on() -> None:
    def refuse(*args: object) -> Value:
        raise Invalid("no such journal")

    with pytest.raises(Invalid, match="no such journal"):
        allocator_decoder("/root", refuse, Value, Value)(kv("/root/items/a"))
