"""Checks of the messages of both services, case by case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from gazette.errors import Invalid
from gazette.protocol import rpc, shard_checks
from gazette.protocol.fragment import Codec, Fragment
from gazette.protocol.hints import FnodeSegments, FSMHints, Segment
from gazette.protocol.ids import ProcessId
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.label_set import LabelSelector, LabelSet
from gazette.protocol.pb import broker_pb2 as b
from gazette.protocol.pb import consumer_pb2 as c
from gazette.protocol.route import EMPTY_ROUTE, EtcdHeader, Header, Route
from gazette.protocol.shard import ReplicaStatus, ShardSpec
from gazette.protocol.status import ShardStatus, Status

MEMBER = ProcessId("zone", "member-1")
HEADER = Header(MEMBER, Route((MEMBER,), 0), EtcdHeader(1, 2, 3, 4)).to_pb()
BAD_HEADER = Header(MEMBER, EMPTY_ROUTE, EtcdHeader(1, 2, 0, 4)).to_pb()
BAD_REVISION = "Header.Etcd: invalid Revision (0; expected 0 < revision)"
FRAGMENT = Fragment("a/journal", 100, 200, codec=Codec.SNAPPY).to_pb()
BAD_FRAGMENT = Fragment("a/journal", 200, 100).to_pb()
BACKWARDS = "expected Begin <= End (have 200, 100)"
LABELS = LabelSet.of(("aa", "b")).to_pb()
BAD_LABELS = b.LabelSet(labels=[b.Label(name="x")])
SELECTOR = LabelSelector.parse("aa=b").to_pb()
BAD_NAME = "invalid length (1; expected 4 <= length <= 512)"
SPEC = JournalSpec(
    "a/journal", 1, fragment=FragmentSpec(1024, Codec.NONE, refresh_interval_ns=10**9)
)
SHARD = ShardSpec("shard-0001", max_txn_duration_ns=1)
HINTS = FSMHints("a/log", (FnodeSegments(1, (Segment(1, 1, 0, 0, 1),)),)).to_pb()
BAD_HINTS = FSMHints("a/log", (FnodeSegments(1, (Segment(0, 1, 0, 0, 1),)),)).to_pb()

Check = Callable[[Any], object]


def problem_of(check: Check, pb: Any) -> str:
    before = pb.SerializeToString(deterministic=True)
    try:
        check(pb)
        problem = ""
    except Invalid as error:
        problem = str(error)
    assert pb.SerializeToString(deterministic=True) == before, "validators never mutate"
    return problem


STRANGE: Any = 77
"""A number that is no status."""


def check_all(check: Check, cases: list[tuple[Any, str]]) -> None:
    for pb, problem in cases:
        assert problem_of(check, pb) == problem


def test_read_requests() -> None:
    def request(**fields: Any) -> b.ReadRequest:
        return b.ReadRequest(**({"journal": "a/journal"} | fields))

    check_all(
        rpc.validate_read_request,
        [
            (request(), ""),
            (request(header=HEADER, offset=-1, end_offset=5), ""),
            (request(journal="a/journal;meta", offset=5, end_offset=5), ""),
            (request(header=BAD_HEADER), BAD_REVISION),
            (request(journal="x"), f"Journal: {BAD_NAME}"),
            (
                request(offset=-2),
                "invalid Offset (-2; expected -1 <= Offset <= MaxInt64)",
            ),
            (
                request(offset=5, end_offset=4),
                "invalid EndOffset (4; expected 0 or Offset <= EndOffset)",
            ),
            (request(end_offset=-1), "invalid EndOffset (-1; expected 0 or Offset <= EndOffset)"),
        ],
    )


def test_read_responses_of_metadata() -> None:
    def response(**fields: Any) -> b.ReadResponse:
        values: dict[str, Any] = {
            "offset": 150,
            "write_head": 200,
            "fragment": FRAGMENT,
            "header": HEADER,
        }
        return b.ReadResponse(**{k: v for k, v in (values | fields).items() if v is not None})

    check_all(
        rpc.validate_read_response,
        [
            (response(), ""),
            (response(fragment_url="http://host/path", header=None), ""),
            (response(status=STRANGE), "Status: invalid status (77)"),
            (response(header=BAD_HEADER), BAD_REVISION),
            (response(write_head=-1), "invalid WriteHead (-1; expected >= 0)"),
            (response(fragment=BAD_FRAGMENT), f"Fragment: {BACKWARDS}"),
            (response(offset=99), "invalid Offset (99; expected 100 <= offset < 200)"),
            (response(offset=200), "invalid Offset (200; expected 100 <= offset < 200)"),
            (response(write_head=199), "invalid WriteHead (199; expected >= 200)"),
            (response(fragment_url="http://[x"), "FragmentUrl: Invalid IPv6 URL (http://[x)"),
            (
                response(fragment=None),
                "unexpected Offset without Fragment or Content (150)",
            ),
            (response(fragment=None, offset=None), ""),
            (response(fragment=None, status=Status.OFFSET_NOT_YET_AVAILABLE.value), ""),
            (
                response(fragment=None, offset=None, fragment_url="http://x"),
                "unexpected FragmentUrl without Fragment (http://x)",
            ),
        ],
    )


def test_read_responses_of_content() -> None:
    def response(**fields: Any) -> b.ReadResponse:
        return b.ReadResponse(content=b"content", offset=5, **fields)

    check_all(
        rpc.validate_read_response,
        [
            (response(), ""),
            (
                response(status=Status.WRONG_ROUTE.value),
                "unexpected Status with Content (WRONG_ROUTE)",
            ),
            (response(status=STRANGE), "Status: invalid status (77)"),
            (response(header=HEADER), "unexpected Header with Content"),
            (response(write_head=1), "unexpected WriteHead with Content (1)"),
            (response(fragment=FRAGMENT), "unexpected Fragment with Content"),
            (response(fragment_url="http://x"), "unexpected FragmentUrl with Content (http://x)"),
        ],
    )


def test_the_opening_of_an_append() -> None:
    def request(**fields: Any) -> b.AppendRequest:
        return b.AppendRequest(**({"journal": "a/journal"} | fields))

    good = request(
        header=HEADER,
        journal="a/journal;meta",
        offset=5,
        check_registers=SELECTOR,
        union_registers=LABELS,
        subtract_registers=LABELS,
        suspend=4,
        min_etcd_revision=7,
    )
    bad_label = "Labels[0].Name: invalid length (1; expected 2 <= length <= 64)"
    check_all(
        rpc.validate_append_request_opening,
        [
            (request(), ""),
            (good, ""),
            (request(header=BAD_HEADER), BAD_REVISION),
            (request(journal="x"), f"Journal: {BAD_NAME}"),
            (request(offset=-1), "invalid Offset (-1; expected >= 0)"),
            (request(content=b"x"), "unexpected Content"),
            (
                request(check_registers=b.LabelSelector(exclude=BAD_LABELS)),
                f"CheckRegisters.Exclude.{bad_label}",
            ),
            (request(union_registers=BAD_LABELS), f"UnionRegisters.{bad_label}"),
            (request(subtract_registers=BAD_LABELS), f"SubtractRegisters.{bad_label}"),
            (request(suspend=5), "Suspend: invalid Suspend variant (5)"),
        ],
    )


def test_the_chunks_of_an_append() -> None:
    check_all(
        rpc.validate_append_chunk,
        [
            (b.AppendRequest(), ""),
            (b.AppendRequest(content=b"x"), ""),
            # Case: this one field is not looked at.
            (b.AppendRequest(content=b"x", min_etcd_revision=5), ""),
            (b.AppendRequest(journal="a/journal"), "unexpected Journal"),
            (b.AppendRequest(header=HEADER), "unexpected Header"),
            (b.AppendRequest(do_not_proxy=True), "unexpected DoNotProxy"),
            (b.AppendRequest(offset=1), "unexpected Offset"),
            (b.AppendRequest(check_registers=b.LabelSelector()), "unexpected CheckRegisters"),
            (b.AppendRequest(union_registers=b.LabelSet()), "unexpected UnionRegisters"),
            (b.AppendRequest(subtract_registers=b.LabelSet()), "unexpected SubtractRegisters"),
            (
                b.AppendRequest(suspend=b.AppendRequest.SUSPEND_NOW),
                "unexpected Suspend (SUSPEND_NOW; expected SUSPEND_RESUMED)",
            ),
        ],
    )


def test_append_responses() -> None:
    def response(**fields: Any) -> b.AppendResponse:
        values = {"header": HEADER, "commit": FRAGMENT, "registers": LABELS}
        return b.AppendResponse(**{k: v for k, v in (values | fields).items() if v is not None})

    mismatch = Status.REGISTER_MISMATCH.value
    check_all(
        rpc.validate_append_response,
        [
            (response(), ""),
            (response(status=mismatch, commit=None), ""),
            (response(status=Status.SUSPENDED.value, commit=None, registers=None), ""),
            (response(status=STRANGE), "Status: invalid status (77)"),
            (response(header=BAD_HEADER), BAD_REVISION),
            (response(commit=None), "expected Commit"),
            (response(registers=None), "expected Registers"),
            (response(status=mismatch, registers=None), "expected Registers"),
            (response(commit=BAD_FRAGMENT), f"Commit: {BACKWARDS}"),
            (
                response(registers=BAD_LABELS),
                "Registers.Labels[0].Name: invalid length (1; expected 2 <= length <= 64)",
            ),
        ],
    )


def test_registers_are_checked_in_every_response() -> None:
    """Responses share what was checked only if they have the same registers."""
    others = LabelSet.of(("aa", "c"), ("bb", ""))
    unsorted = LabelSet(others.labels[::-1])
    for labels in (LABELS, others.to_pb(), BAD_LABELS, LABELS, unsorted.to_pb(), BAD_LABELS):
        response = b.AppendResponse(header=HEADER, commit=FRAGMENT, registers=labels)
        proposal = b.ReplicateRequest(proposal=FRAGMENT, registers=labels)
        if labels in (LABELS, others.to_pb()):
            assert rpc.validate_append_response(response)[3] == LabelSet.from_pb(labels)
            checked = rpc.validate_replicate_request(proposal)
            assert checked is not None
            assert checked[1] == LabelSet.from_pb(labels)
        else:
            for check, pb in (
                (rpc.validate_append_response, response),
                (rpc.validate_replicate_request, proposal),
            ):
                assert problem_of(check, pb).startswith("Registers")


def test_replicated_proposals() -> None:
    def request(**fields: Any) -> b.ReplicateRequest:
        return b.ReplicateRequest(**({"proposal": FRAGMENT, "registers": LABELS} | fields))

    check_all(
        rpc.validate_replicate_request,
        [
            (request(), ""),
            (request(header=HEADER, acknowledge=True, deprecated_journal="a/journal"), ""),
            # Case: absent registers are empty ones.
            (b.ReplicateRequest(proposal=FRAGMENT), ""),
            (request(header=BAD_HEADER, acknowledge=True), BAD_REVISION),
            (request(header=HEADER), "expected Acknowledge with Header"),
            (request(proposal=BAD_FRAGMENT), f"Proposal: {BACKWARDS}"),
            (
                request(registers=BAD_LABELS),
                "Registers.Labels[0].Name: invalid length (1; expected 2 <= length <= 64)",
            ),
            (request(content=b"xyz"), "unexpected Content with Proposal (len 3)"),
            (request(content_delta=1), "unexpected ContentDelta with Proposal (1)"),
            (
                request(deprecated_journal="b/journal"),
                "DeprecatedJournal and Proposal.Journal mismatch (b/journal vs a/journal)",
            ),
        ],
    )


def test_replicated_content() -> None:
    def request(**fields: Any) -> b.ReplicateRequest:
        return b.ReplicateRequest(**({"content": b"xyz"} | fields))

    check_all(
        rpc.validate_replicate_request,
        [
            (request(), ""),
            (request(content_delta=5), ""),
            (request(content=b""), "expected Content or Proposal"),
            (request(content_delta=-1), "invalid ContentDelta (-1; expected >= 0)"),
            (request(header=HEADER), "unexpected Header with Content"),
            (request(registers=LABELS), "unexpected Registers with Content"),
            (request(acknowledge=True), "unexpected Acknowledge with Content"),
            (
                request(deprecated_journal="a/journal"),
                "unexpected DeprecatedJournal with Content",
            ),
        ],
    )


def test_replicate_responses() -> None:
    mismatch, wrong = Status.PROPOSAL_MISMATCH.name, Status.WRONG_ROUTE.name
    uncoded = b.Fragment(journal="a/journal", begin=1, end=2)
    check_all(
        rpc.validate_replicate_response,
        [
            (b.ReplicateResponse(), ""),
            # Case: what peers do in fact send.
            (b.ReplicateResponse(header=HEADER), ""),
            (b.ReplicateResponse(status=mismatch, fragment=uncoded, registers=LABELS), ""),
            (b.ReplicateResponse(status=STRANGE), "Status: invalid status (77)"),
            (b.ReplicateResponse(header=BAD_HEADER), BAD_REVISION),
            (b.ReplicateResponse(status=wrong), "expected Header"),
            (b.ReplicateResponse(status=mismatch, registers=LABELS), "expected Fragment"),
            (b.ReplicateResponse(status=mismatch, fragment=uncoded), "expected Registers"),
            (
                b.ReplicateResponse(status=mismatch, fragment=uncoded, registers=BAD_LABELS),
                "Registers.Labels[0].Name: invalid length (1; expected 2 <= length <= 64)",
            ),
        ],
    )


def test_list_requests() -> None:
    def request(selector: str) -> b.ListRequest:
        return b.ListRequest(selector=LabelSelector.parse(selector).to_pb())

    bad = b.ListRequest(selector=b.LabelSelector(include=BAD_LABELS))
    check_all(
        rpc.validate_list_request,
        [
            (b.ListRequest(), ""),
            (request("prefix=a/, !prefix"), "Selector.Exclude.Labels[\"prefix\"]: expected trailing '/' ()"),
            (request("prefix in (a/,b/), prefix!=c/"), ""),
            (
                request("prefix in (a/,b)"),
                "Selector.Include.Labels[\"prefix\"]: expected trailing '/' (b)",
            ),
            (bad, "Selector.Include.Labels[0].Name: invalid length (1; expected 2 <= length <= 64)"),
        ],
    )  # fmt: skip


def test_list_responses() -> None:
    def response(**fields: Any) -> b.ListResponse:
        values: dict[str, Any] = {
            "spec": SPEC.to_pb(),
            "mod_revision": 5,
            "route": EMPTY_ROUTE.to_pb(),
        }
        journal = b.ListResponse.Journal(**(values | fields))
        return b.ListResponse(header=HEADER, journals=[journal])

    check_all(
        rpc.validate_list_response,
        [
            (response(), ""),
            (b.ListResponse(header=HEADER), ""),
            (b.ListResponse(), "Header.Route: invalid Primary (0; expected -1 <= Primary < 0)"),
            (b.ListResponse(status=STRANGE, header=HEADER), "Status: invalid status (77)"),
        ],
    )
    check_all(
        rpc.validate_list_response_journal,
        [
            (response().journals[0], ""),
            # It is the fault of its author: no reason to refuse what else is listed.
            (response(spec=replace(SPEC, replication=0).to_pb()).journals[0], ""),
            (response(mod_revision=0).journals[0], "invalid ModRevision (0; expected > 0)"),
            (
                response(route=b.Route(primary=3)).journals[0],
                "Route: invalid Primary (3; expected -1 <= Primary < 0)",
            ),
        ],
    )


def test_apply_requests() -> None:
    def request(**fields: Any) -> b.ApplyRequest:
        return b.ApplyRequest(changes=[b.ApplyRequest.Change(**fields)])

    spec = SPEC.to_pb()
    bad = replace(SPEC, name="x").to_pb()
    check_all(
        rpc.validate_apply_request,
        [
            (b.ApplyRequest(), ""),
            (request(upsert=spec), ""),
            (request(upsert=spec, expect_mod_revision=-1), ""),
            (request(delete="a/journal", expect_mod_revision=5), ""),
            (request(delete="a/journal", expect_mod_revision=-1), ""),
            (
                request(upsert=spec, delete="a/journal"),
                "Changes[0]: both Upsert and Delete are set (expected exactly one)",
            ),
            (request(), "Changes[0]: neither Upsert nor Delete are set (expected exactly one)"),
            (request(upsert=bad), f"Changes[0].Upsert.Name: {BAD_NAME}"),
            (
                request(upsert=spec, expect_mod_revision=-2),
                "Changes[0]: invalid ExpectModRevision (-2; expected >= 0 or -1)",
            ),
            (request(delete="x"), f"Changes[0].Delete: {BAD_NAME}"),
            (
                request(delete="a/journal"),
                "Changes[0]: invalid ExpectModRevision (0; expected > 0 or -1)",
            ),
        ],
    )


def test_apply_responses() -> None:
    check_all(
        rpc.validate_apply_response,
        [
            (b.ApplyResponse(header=HEADER), ""),
            (b.ApplyResponse(status=STRANGE, header=HEADER), "Status: invalid status (77)"),
            (b.ApplyResponse(header=BAD_HEADER), BAD_REVISION),
        ],
    )


def test_fragments_requests() -> None:
    def request(**fields: Any) -> b.FragmentsRequest:
        return b.FragmentsRequest(**({"journal": "a/journal"} | fields))

    check_all(
        rpc.validate_fragments_request,
        [
            (request(), ""),
            (request(header=HEADER, begin_mod_time=5, end_mod_time=5, page_limit=10_000), ""),
            (request(signatureTTL=Duration(nanos=1), begin_mod_time=5), ""),
            (request(header=BAD_HEADER), BAD_REVISION),
            (request(journal="x"), f"Journal: {BAD_NAME}"),
            (
                request(begin_mod_time=5, end_mod_time=4),
                "invalid EndModTime (4 must be after 5)",
            ),
            (request(next_page_token=-1), "invalid NextPageToken (-1; must be >= 0)"),
            (request(page_limit=-1), "invalid PageLimit (-1; must be >= 0 and <= 10000)"),
            (request(page_limit=10_001), "invalid PageLimit (10001; must be >= 0 and <= 10000)"),
            (request(signatureTTL=Duration()), "invalid SignatureTTL (0s; must be > 0s)"),
            (
                request(signatureTTL=Duration(seconds=-5)),
                "invalid SignatureTTL (-5s; must be > 0s)",
            ),
        ],
    )


def test_fragments_responses() -> None:
    def response(**fields: Any) -> b.FragmentsResponse:
        pb = b.FragmentsResponse(header=HEADER)
        entry = pb.fragments.add(**({"spec": FRAGMENT} | fields))
        assert entry is not None
        return pb

    check_all(
        rpc.validate_fragments_response,
        [
            (response(signed_url="http://host/path"), ""),
            (response(spec=BAD_FRAGMENT), f"Fragments[0].Spec: {BACKWARDS}"),
            (
                response(signed_url="http://[x"),
                "Fragments[0].SignedUrl: Invalid IPv6 URL (http://[x)",
            ),
            (
                b.FragmentsResponse(),
                "Header.Route: invalid Primary (0; expected -1 <= Primary < 0)",
            ),
        ],
    )


def test_health_requests() -> None:
    def request(**fields: Any) -> b.FragmentStoreHealthRequest:
        return b.FragmentStoreHealthRequest(**({"fragment_store": "s3://bucket/"} | fields))

    def probe(prefix: str) -> b.FragmentStoreHealthRequest:
        return request(check_delete=True, check_delete_prefix=prefix)

    outside = "CheckDeletePrefix: cannot traverse outside the store"
    check_all(
        rpc.validate_health_request,
        [
            (request(), ""),
            (request(check_delete=True), ""),
            (probe("a/b=c/"), ""),
            (request(fragment_store="s3://bucket"), "FragmentStore: path component doesn't end in '/' ()"),
            (
                request(check_delete_prefix="a/"),
                "CheckDeletePrefix: cannot be set when CheckDelete is false",
            ),
            (probe("a"), "CheckDeletePrefix: must end in '/' (a)"),
            (probe("../"), f"{outside} (../)"),
            (probe("../a/"), f"{outside} (../a/)"),
            (probe("a/../../b/"), "CheckDeletePrefix: must be a clean path (a/../../b)"),
            (probe("/a/"), "CheckDeletePrefix: cannot begin with '/' (/a)"),
            (probe("/"), "CheckDeletePrefix: invalid length (0; expected 1 <= length <= 512)"),
        ],
    )  # fmt: skip
    check_all(
        rpc.validate_health_response,
        [
            (b.FragmentStoreHealthResponse(header=HEADER, store_health_error="x"), ""),
            (b.FragmentStoreHealthResponse(header=BAD_HEADER), BAD_REVISION),
        ],
    )


def test_stat_requests_and_responses() -> None:
    offsets = {"a/journal;meta": 0}
    negative = "Offsets[a/journal]: invalid offset (-1; expected >= 0)"
    check_all(
        shard_checks.validate_stat_request,
        [
            (c.StatRequest(shard="shard-0001", header=HEADER, read_through=offsets), ""),
            (c.StatRequest(shard="shard-0001", header=BAD_HEADER), BAD_REVISION),
            (c.StatRequest(shard="x"), f"Shard: {BAD_NAME}"),
            (
                c.StatRequest(shard="shard-0001", read_through={"a/journal": -1}),
                f"ReadThrough.{negative}",
            ),
        ],
    )
    check_all(
        shard_checks.validate_stat_response,
        [
            (c.StatResponse(header=HEADER, read_through=offsets, publish_at=offsets), ""),
            (c.StatResponse(status=STRANGE, header=HEADER), "Status: invalid status (77)"),
            (c.StatResponse(header=BAD_HEADER), BAD_REVISION),
            (
                c.StatResponse(header=HEADER, publish_at={"a/journal": -1}),
                f"PublishAt.{negative}",
            ),
            (
                c.StatResponse(header=HEADER, read_through={"x": 1}),
                f"ReadThrough.Offsets[x]: {BAD_NAME}",
            ),
        ],
    )


def test_shard_lists() -> None:
    def response(**fields: Any) -> c.ListResponse:
        values: dict[str, Any] = {
            "spec": SHARD.to_pb(),
            "mod_revision": 5,
            "route": Route((MEMBER,), 0).to_pb(),
            "status": [ReplicaStatus().to_pb()],
        }
        return c.ListResponse(header=HEADER, shards=[c.ListResponse.Shard(**(values | fields))])

    check_all(
        shard_checks.validate_shard_list_request,
        [
            (c.ListRequest(), ""),
            (
                c.ListRequest(selector=b.LabelSelector(include=BAD_LABELS)),
                "Selector.Include.Labels[0].Name: invalid length (1; expected 2 <= length <= 64)",
            ),
        ],
    )
    check_all(
        shard_checks.validate_shard_list_response,
        [
            (response(), ""),
            (c.ListResponse(header=BAD_HEADER), BAD_REVISION),
            (c.ListResponse(status=STRANGE, header=HEADER), "Status: invalid status (77)"),
            # What others have applied, and what their replicas say, is theirs.
            (response(spec=ShardSpec("shard-0001").to_pb()), ""),
            (response(status=[c.ReplicaStatus(code=c.ReplicaStatus.FAILED)]), ""),
            (response(mod_revision=0), "Shards[0]: invalid ModRevision (0; expected > 0)"),
            (
                response(route=b.Route()),
                "Shards[0].Route: invalid Primary (0; expected -1 <= Primary < 0)",
            ),
            (
                response(status=[]),
                "Shards[0]: length of Route.Members and Status are not equal (1 vs 0)",
            ),
        ],
    )


def test_shard_applies() -> None:
    def request(**fields: Any) -> c.ApplyRequest:
        return c.ApplyRequest(changes=[c.ApplyRequest.Change(**fields)])

    spec = SHARD.to_pb()
    check_all(
        shard_checks.validate_shard_apply_request,
        [
            (c.ApplyRequest(), ""),
            (request(upsert=spec, primary_hints=HINTS, expect_mod_revision=-1), ""),
            (request(delete="shard-0001", expect_mod_revision=-1), ""),
            (
                request(upsert=spec, delete="shard-0001"),
                "Changes[0]: both Upsert and Delete are set (expected exactly one)",
            ),
            (request(), "Changes[0]: neither Upsert nor Delete are set (expected exactly one)"),
            (
                request(upsert=ShardSpec("x").to_pb()),
                f"Changes[0].Upsert.Id: {BAD_NAME}",
            ),
            (
                request(upsert=spec, expect_mod_revision=-2),
                "Changes[0]: invalid ExpectModRevision (-2; expected >= 0 or -1)",
            ),
            (
                request(upsert=spec, primary_hints=BAD_HINTS),
                "Changes[0].PrimaryHints.Segment: Author is zero",
            ),
            (request(delete="x", expect_mod_revision=1), f"Changes[0].Delete: {BAD_NAME}"),
            (
                request(delete="shard-0001"),
                "Changes[0]: invalid ExpectModRevision (0; expected > 0 or -1)",
            ),
            (
                request(delete="shard-0001", expect_mod_revision=1, primary_hints=HINTS),
                "Changes[0]: hints may be set only with an upsert, not a delete",
            ),
        ],
    )
    check_all(
        shard_checks.validate_shard_apply_response,
        [
            (c.ApplyResponse(header=HEADER), ""),
            (c.ApplyResponse(status=STRANGE, header=HEADER), "Status: invalid status (77)"),
            (c.ApplyResponse(header=BAD_HEADER), BAD_REVISION),
        ],
    )


def test_hint_requests_and_responses() -> None:
    hints = c.GetHintsResponse.ResponseHints
    check_all(
        shard_checks.validate_get_hints_request,
        [
            (c.GetHintsRequest(shard="shard-0001"), ""),
            (c.GetHintsRequest(shard="x"), f"Shard: {BAD_NAME}"),
        ],
    )
    check_all(
        shard_checks.validate_get_hints_response,
        [
            (c.GetHintsResponse(), ""),
            (
                c.GetHintsResponse(
                    primary_hints=hints(hints=HINTS), backup_hints=[hints(), hints(hints=HINTS)]
                ),
                "",
            ),
            (c.GetHintsResponse(status=STRANGE), "Status: invalid status (77)"),
            (
                c.GetHintsResponse(primary_hints=hints(hints=BAD_HINTS)),
                "primary hints.Segment: Author is zero",
            ),
            (
                c.GetHintsResponse(backup_hints=[hints(), hints(hints=BAD_HINTS)]),
                "backup hints.Segment: Author is zero",
            ),
        ],
    )


def test_unassign_requests() -> None:
    check_all(
        shard_checks.validate_unassign_request,
        [
            (c.UnassignRequest(shards=["shard-0001"]), ""),
            (c.UnassignRequest(shards=["shard-0001", "x"]), f"Shards[1]: {BAD_NAME}"),
        ],
    )


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(Status, b.Status), (ShardStatus, c.Status), (Codec, b.CompressionCodec)],
)
def test_enums_are_those_of_the_wire(ours: Any, theirs: Any) -> None:
    assert {item.name: item.value for item in ours} == dict(theirs.items())
