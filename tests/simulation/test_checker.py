"""The judge of simulations: each kind of violation is planted, and found."""

from __future__ import annotations

from typing import Any

from tools.simulation.checker import assigned_ended, check
from tools.simulation.history import (
    Append,
    Assigned,
    Confirmed,
    Fault,
    History,
    Jump,
    Life,
    Piece,
    Stored,
)

J = "a/journal"


class Story:
    """A history of one journal, built step by step."""

    def __init__(self) -> None:
        self.history = History()
        self.history.lives.append(Life(J, 5, "bucket"))

    def append(self, payload: bytes, begin: int | None, time: float = 1.0, **fields: Any) -> Append:
        append = Append(len(self.history.appends) + 1, "client", J, payload, time, time)
        append.begin, append.revision = begin, 10
        append.holders, append.primary = (("a",), ("b",)), ("a",)
        for name, value in fields.items():
            setattr(append, name, value)
        self.history.appends.append(append)
        return append

    def read(self, content: bytes, offset: int, *, final: bool = True, time: float = 9.0) -> None:
        self.history.pieces.append(Piece("reader", time, J, 10, offset, content, final))

    def stored(self, content: bytes, begin: int, time: float = 2.0) -> None:
        end = begin + len(content)
        self.history.stored.append(Stored(time, "bucket", J, begin, end, content, "path"))

    def found(self) -> str:
        return "; ".join(check(self.history))


def test_what_is_right_is_no_violation() -> None:
    story = Story()
    story.append(b"aaaa", 0)
    story.append(b"bb", 4)
    story.append(b"", 6)
    story.read(b"aaa", 0)
    story.read(b"abb", 3)
    story.stored(b"aaaabb", 0)
    story.history.stopped = True
    assert story.found() == ""


def test_overlapping_acknowledgements() -> None:
    story = Story()
    story.append(b"aaaa", 0)
    story.append(b"bb", 3)
    assert "overlap" in story.found()


def lose_all(story: Story) -> None:
    """End the brokers of all replicas before they have stored anything."""
    story.history.lost_brokers = {"a": 2.0, "b": 2.0}


def test_offsets_of_a_lost_append_are_given_out_before_an_operator_is_asked() -> None:
    story = Story()
    story.append(b"aaaa", 0)
    story.append(b"bb", 0, time=5.0, holders=(("c",),), primary=("c",))
    lose_all(story)
    assert "no operator was asked" in story.found()
    story.history.resets.append(Confirmed(story.history.lives[0], 4.0, 0))
    assert story.found() == ""


def test_an_append_that_names_its_offset_confirms_the_head() -> None:
    story = Story()
    story.append(b"aaaa", 4)
    story.append(b"bb", 4, time=5.0, holders=(("c",),), primary=("c",), offset=4)
    lose_all(story)
    assert story.found() == ""


def test_an_answer_with_registers_that_the_journal_has_lost() -> None:
    story = Story()
    story.append(b"aaaa", 0, tag=1)
    story.append(b"bb", 4, time=5.0, answered_tags=("1",))
    assert story.found() == ""
    story.append(b"cc", 6, time=6.0, answered_tags=())
    assert "answered with the register" in story.found()
    # Case: the value of an append whose outcome is not known.
    story.append(b"dd", None, time=5.5, tag=9)
    story.history.appends[2].answered_tags = ("9",)
    assert story.found() == ""
    # Case: an operator confirmed the head. Registers are empty then.
    story.history.appends[2].answered_tags = ()
    story.history.resets.append(Confirmed(story.history.lives[0], 5.5, 6))
    assert story.found() == ""


def test_other_bytes_in_a_reader() -> None:
    story = Story()
    story.append(b"aaaa", 0)
    story.read(b"aaxa", 0, final=False)
    assert "other bytes" in story.found()


def test_other_bytes_in_a_fragment() -> None:
    story = Story()
    story.append(b"aaaa", 0)
    story.stored(b"aaxa", 0)
    assert "fragment path has other bytes" in story.found()


def test_a_reader_without_an_acknowledged_append() -> None:
    story = Story()
    story.append(b"aaaa", 0)
    story.append(b"bb", 4)
    story.read(b"aaaa", 0)
    assert "does not have append 2" in story.found()


def test_a_reader_that_was_sent_over_an_acknowledged_append() -> None:
    story = Story()
    story.append(b"aaaa", 0)
    story.history.jumps.append(Jump("reader", 3.0, J, 10, 0, 4, 3.0))
    assert "jumped" in story.found()


def test_a_store_without_an_acknowledged_append_after_all_have_left() -> None:
    story = Story()
    story.append(b"aaaa", 0)
    assert story.found() == ""
    story.history.stopped = True
    assert "the store does not have append 1" in story.found()


def test_a_refused_append_that_is_there() -> None:
    story = Story()
    story.append(b"aaaa", 0)
    story.append(b"bb", None, refused=True)
    story.read(b"aaaabb", 0)
    assert "was refused" in story.found()


def test_a_failed_append_is_there_as_a_whole_or_not_at_all() -> None:
    story = Story()
    story.append(b"aaaa", 0)
    story.append(b"bbb", None)
    story.read(b"aaaabbb", 0)
    assert story.found() == ""
    story = Story()
    story.append(b"aaaa", 0)
    story.append(b"bbb", None)
    story.read(b"aaaabb", 0)
    assert "no whole append" in story.found()


def test_an_acknowledgement_of_a_broker_that_has_lost_its_lease() -> None:
    story = Story()
    story.append(b"aaaa", 0, time=30.0)
    story.history.evicted["a"] = 25.0
    assert "had lost its lease" in story.found()


def test_registers_that_were_not_as_required() -> None:
    story = Story()
    story.append(b"aa", 0, tag=1)
    story.append(b"bb", 2, tag=2, expected_tag=1)
    assert story.found() == ""
    story.append(b"cc", 4, tag=3, expected_tag=1)
    assert "required 1, and the register was 2" in story.found()


def test_an_append_that_was_refused_for_a_register_which_was_set() -> None:
    story = Story()
    story.append(b"aa", 0, tag=1)
    refusal = "the journal's registers are not as required (status=REGISTER_MISMATCH)"
    story.append(
        b"bb", None, time=3.0, tag=2, expected_tag=1, refused=True, error=refusal, ended=4.0
    )
    assert "was refused for its register, and 1 was set all the time" in story.found()
    # Case: another append has set it meanwhile, or may have.
    other = story.append(b"cc", 2, time=3.5, tag=3)
    assert story.found() == ""
    other.begin = None
    assert story.found() == ""
    # Case: it was refused, or is not begun yet.
    other.refused = True
    assert "was refused for its register" in story.found()
    other.refused, other.begun = False, 4.5
    assert "was refused for its register" in story.found()


def test_the_loss_of_all_replicas_at_once_is_permitted() -> None:
    story = Story()
    story.append(b"aaaa", 0)
    story.read(b"zz", 0)
    story.append(b"zz", 0, time=60.0)
    story.history.lost_brokers |= {"a": 10.0, "b": 40.0}
    story.history.resets.append(Confirmed(story.history.lives[0], 50.0, 0))
    assert story.found() == ""


def test_the_loss_of_all_replicas_is_not_if_it_had_been_stored() -> None:
    story = Story()
    story.append(b"aaaa", 0)
    story.stored(b"aaaa", 0, time=5.0)
    story.read(b"zz", 0)
    story.append(b"zz", 0, time=60.0)
    story.history.lost_brokers |= {"a": 10.0, "b": 40.0}
    assert "overlap" in story.found()


def test_nor_if_there_was_time_to_store_it_between_the_deaths() -> None:
    story = Story()
    story.append(b"aaaa", 0)
    story.history.lost_brokers |= {"a": 10.0, "b": 140.0}
    story.history.faults += [Fault(10.0, 35.0, "crash"), Fault(140.0, 165.0, "crash")]
    story.read(b"zz", 0)
    story.append(b"zz", 0, time=160.0)
    assert "overlap" in story.found()


def test_an_upload_that_hides_later_appends() -> None:
    story = Story()
    story.append(b"aaaa", 0)
    story.stored(b"zzzz", 0)
    assert "other bytes" in story.found()


def test_bytes_of_another_life_are_not_compared() -> None:
    story = Story()
    life = story.history.lives[0]
    life.deleted = 12
    story.append(b"aaaa", 0)
    story.history.lives.append(Life(J, 15, "other"))
    story.append(b"bbbb", 0, revision=16)
    assert story.found() == ""


def test_a_jump_over_what_could_not_be_listed_is_none_that_counts() -> None:
    story = Story()
    story.append(b"aaaa", 0)
    story.history.jumps.append(Jump("reader", 5.0, J, 10, 0, 4, 5.0))
    assert "jumped" in story.found()
    story.history.unlisted.append(Fault(4.0, 6.0, "bucket"))
    assert story.found() == ""


def test_a_fragment_with_an_append_of_another_life() -> None:
    story = Story()
    story.history.lives[0].deleted = 12
    story.append(b"an append of the first life", 4)
    story.history.lives.append(Life(J, 15, "other"))
    story.stored(b"aaaaan append of the first life", 0)
    assert story.found() == ""
    story.history.stored[-1].bucket = "other"
    assert "has append 1 of client to a/journal at [4, 31) of another life" in story.found()


def test_an_upload_of_what_was_given_out_again() -> None:
    story = Story()
    story.append(b"aaaa", 0)
    story.append(b"zz", 0, time=60.0)
    story.history.lost_brokers |= {"a": 10.0, "b": 40.0}
    story.history.resets.append(Confirmed(story.history.lives[0], 50.0, 0))
    story.history.appends[1].holders = (("c",),)
    story.stored(b"aaaa", 0, time=70.0)
    assert "fragment path has other bytes" in story.found()
    stored = story.history.stored[0]
    stored.by = "a"
    story.history.killed["a"] = 70.1
    assert story.found() == "", "it could not be removed again"
    story.history.killed.clear()
    stored.removed = 70.1
    assert story.found() == ""


def test_an_upload_that_was_removed_before_its_offsets_were_given_out_again() -> None:
    story = Story()
    story.append(b"zz", 0, time=60.0)
    story.stored(b"aaaa", 0, time=50.0)
    assert "fragment path has other bytes" in story.found()
    story.history.stored[0].removed = 60.1
    assert "fragment path has other bytes" in story.found()
    story.history.stored[0].removed = 50.1
    assert story.found() == ""


def test_an_upload_of_what_was_not_acknowledged_and_was_taken_back() -> None:
    """Its offsets were given out again shortly before (seed 1171639)."""
    story = Story()
    story.append(b"undone one", None)
    story.append(b"undone two", None)
    story.append(b"AAAAAAAAAAAAAAA", 10)
    story.stored(b"undone oneundone two", 3, time=7.0)
    assert "other bytes" in story.found()
    story.history.stored[0].removed = 8.0
    assert story.found() == ""
    # Case: these bytes are of no append.
    story.history.stored[0].content = b"undone oneundone Two"
    assert "other bytes" in story.found()


def test_what_was_removed_again_is_not_stored() -> None:
    story = Story()
    story.append(b"aaaa", 0)
    story.history.stopped = True
    story.stored(b"aaaa", 0)
    assert story.found() == ""
    story.history.stored[0].removed = 3.0
    assert "the store does not have append 1" in story.found()


def test_a_replica_that_lost_its_lease_hides_nothing_that_was_acknowledged() -> None:
    story = Story()
    story.append(b"an append of unknown outcome", None)
    story.append(b"what was acknowledged later!", 0, time=60.0)
    story.stored(b"an append of unknown outcome", 0, time=50.0)
    story.history.stored[0].by = "a"
    story.history.lost_brokers["a"] = 40.0
    assert "other bytes" in story.found()


def test_bytes_that_a_reader_was_given_stay_unless_all_that_had_them_are_lost() -> None:
    """The append was repeated at another primary, behind another append."""
    story = Story()
    repeated = story.append(b"aaaa", 2, time=1.0, repeated=True)
    story.append(b"bb", 0, time=5.0)
    repeated.ended = 6.0
    story.read(b"aaaa", 0, final=False, time=2.0)
    assert "which began later" in story.found()
    # Case: one broker is lost. A primary gives readers what another has, too.
    lost = story.history.lost_brokers
    lost["c"] = 3.0
    assert "which began later" in story.found()
    # Case: two are lost, the second too late for a reason; then in time.
    lost["d"] = 5.5
    assert "which began later" in story.found()
    lost["d"] = 4.5
    assert story.found() == ""
    # Case: the primary left in good order, without what a lost follower had given; or no follower was lost.
    left = story.history.evicted
    left["d"] = lost.pop("d")
    assert story.found() == ""
    lost.clear()
    assert "which began later" in story.found()
    lost["c"], left["d"] = 3.0, 5.5
    assert "which began later" in story.found()
    # Case: an operator gave these offsets up.
    story.history.confirmed.append(Confirmed(story.history.lives[0], 4.0, 0))
    assert story.found() == ""
    story.read(b"aaaa", 0, final=False, time=7.0)
    assert "other bytes" in story.found()


def test_an_operator_may_give_up_what_a_former_broker_still_has() -> None:
    story = Story()
    story.append(b"aaaa", 0, time=3.0)
    story.append(b"bbbb", 0, time=9.0)
    assert "overlap" in story.found()
    life = story.history.lives[0]
    story.history.confirmed.append(Confirmed(life, 2.0, 0))
    assert "overlap" in story.found(), "it was acknowledged after that"
    story.history.confirmed.append(Confirmed(life, 5.0, 4))
    assert "overlap" in story.found(), "its offsets were not given up"
    story.history.confirmed.append(Confirmed(life, 5.0, 0))
    assert story.found() == ""


def test_a_process_leads_at_a_revision_at_which_it_is_a_member() -> None:
    history = History(members={"a/1": (3, 9), "a/2": (13, float("inf"))})
    assert [history.was_member("a/1", revision) for revision in (2, 3, 8, 9)] == [
        False,
        True,
        True,
        False,
    ]
    assert history.was_member("a/2", 99)
    assert not history.was_member("a/3", 5)


def test_a_journal_whose_brokers_all_ended_has_to_be_confirmed() -> None:
    history = History()
    life = Life(J, 5, "bucket")
    history.assigned += [
        Assigned(J, 6, 1.0, frozenset({"a", "b"})),
        Assigned(J, 7, 2.0, frozenset({"b"})),
        Assigned(J, 8, 9.0, frozenset({"a"})),
        Assigned("another", 9, 9.0, frozenset({"c"})),
    ]
    history.lost_brokers["c"] = 9.0
    assert not assigned_ended(history, life)
    history.lost_brokers["b"] = 9.5
    assert not assigned_ended(history, life), "the journal was given to another before"
    history.lost_brokers["b"] = 8.0
    assert assigned_ended(history, life)
    assert not assigned_ended(history, Life(J, 10, "bucket")), "this was another life"
    del history.lost_brokers["b"]
    assert assigned_ended(history, life, {"b": 8.0})


def test_a_journal_that_is_created_again_may_keep_its_brokers() -> None:
    """etcd had the former assignment, because the journal was away for a moment only (seed 1723937)."""
    history = History()
    life = Life(J, 10, "bucket")
    history.lost_brokers["a"] = 8.0
    history.assigned += [Assigned(J, 6, 1.0, frozenset({"a"})), Assigned(J, 12, 9.0, frozenset())]
    assert assigned_ended(history, life)
    history.assigned.insert(1, Assigned(J, 9, 7.0, frozenset()))
    assert not assigned_ended(history, life), "it was taken from them meanwhile"


def test_a_broker_that_never_agreed_with_its_primary_held_nothing() -> None:
    """It was assigned, and its primary ended before they met (seed 1110672)."""
    history = History()
    life = Life(J, 5, "bucket")
    history.lost_brokers["a"] = 8.0
    history.assigned.append(Assigned(J, 7, 2.0, frozenset({"a", "b"}), frozenset({"a", "b"})))
    assert not assigned_ended(history, life)
    history.assigned[0] = Assigned(J, 7, 2.0, frozenset({"a", "b"}), frozenset({"a"}))
    assert assigned_ended(history, life)


def test_an_upload_that_brokers_know_to_be_doubtful() -> None:
    story = Story()
    story.append(b"zz", 0, time=10.0)
    story.stored(b"aaaa", 0, time=50.0)
    assert "fragment path has other bytes" in story.found()
    story.history.stored[0].marked = True
    assert story.found() == ""


def test_late_copies_of_a_session() -> None:
    """A copy behind a later append of its session is taken for new by readers. They drop one before it."""
    first, second = b"<1:a/journal:30>" * 2, b"<2:a/journal:30>" * 2
    for late in (True, False):
        story = Story()
        at = 0 if late else 32
        story.append(first, at, session=1, batch=(at, at + 32), repeated=True)
        story.append(second, at + 32, session=1, batch=(at + 32, at + 64), repeated=True)
        story.read(first + (second + first if late else first + second), 0)
        assert ("a late copy" in story.found()) is late, story.found()


def test_copies_of_other_sessions_have_no_order() -> None:
    first, second = b"<1:a/journal:30>" * 2, b"<2:a/journal:30>" * 2
    story = Story()
    story.append(first, 0, session=1, batch=(0, 32), repeated=True)
    story.append(second, 32, session=2, batch=(32, 64), repeated=True)
    story.read(first + second + first, 0)
    assert story.found() == ""
