"""Checks of requests and responses of the Journal service, on receipt and before sending.

No check changes its message. ``Invalid`` names the wrong field, in its path or in its text. `shard_checks`
has the checks of the Shard service.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeAlias
from urllib.parse import urlsplit

from gazette.errors import Invalid
from gazette.labels import META_PREFIX
from gazette.protocol.fragment import Fragment, FragmentStoreUrl
from gazette.protocol.ids import NAME_BYTES_MAX, validate_journal_name, validate_path_component
from gazette.protocol.journal import JournalSpec
from gazette.protocol.label_set import EMPTY_LABELS, LabelSelector, LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import Header, Route, valid_header, valid_header_of
from gazette.protocol.status import Status
from gazette.protocol.text import duration
from gazette.protocol.text.validation import within

if TYPE_CHECKING:
    from gazette.protocol.pb.consumer_pb2 import StatRequest

    _Routed: TypeAlias = (
        broker_pb2.ReadRequest
        | broker_pb2.ReadResponse
        | broker_pb2.AppendRequest
        | broker_pb2.ReplicateResponse
        | broker_pb2.FragmentsRequest
        | StatRequest
    )

PAGE_LIMIT_MAX: Final = 10_000

_ANY_REVISION: Final = -1
_WRITE_HEAD: Final = -1
_REGISTERS: Final = 256
"""Greatest number of encoded registers that were checked and are remembered."""
_SUSPEND_VALUES: Final = {
    int(number): name for name, number in broker_pb2.AppendRequest.Suspend.items()
}


def validate_read_request(pb: broker_pb2.ReadRequest) -> None:
    check_optional_header(pb)
    _journal(pb.journal)
    if pb.offset < _WRITE_HEAD:
        raise Invalid(f"invalid Offset ({pb.offset}; expected -1 <= Offset <= MaxInt64)")
    if pb.end_offset < 0 or 0 < pb.end_offset < pb.offset:
        raise Invalid(f"invalid EndOffset ({pb.end_offset}; expected 0 or Offset <= EndOffset)")


def validate_read_response(pb: broker_pb2.ReadResponse) -> None:
    if pb.content:
        _read_content(pb)
        return
    status = _status(pb.status)
    check_optional_header(pb)
    if pb.write_head < 0:
        raise Invalid(f"invalid WriteHead ({pb.write_head}; expected >= 0)")
    for gap in pb.lost:
        if not 0 <= gap.begin < gap.end:
            raise Invalid(f"invalid Lost ({gap.begin} to {gap.end}; expected 0 <= begin < end)")
    if pb.HasField("fragment"):
        _read_fragment(pb)
    elif status is Status.OK and pb.offset != 0:
        raise Invalid(f"unexpected Offset without Fragment or Content ({pb.offset})")
    elif pb.fragment_url:
        raise Invalid(f"unexpected FragmentUrl without Fragment ({pb.fragment_url})")


def _read_content(pb: broker_pb2.ReadResponse) -> None:
    if pb.status:
        raise Invalid(f"unexpected Status with Content ({_status(pb.status).name})")
    if pb.HasField("header"):
        raise Invalid("unexpected Header with Content")
    if pb.write_head:
        raise Invalid(f"unexpected WriteHead with Content ({pb.write_head})")
    if pb.HasField("fragment"):
        raise Invalid("unexpected Fragment with Content")
    if pb.fragment_url:
        raise Invalid(f"unexpected FragmentUrl with Content ({pb.fragment_url})")


def _read_fragment(pb: broker_pb2.ReadResponse) -> None:
    fragment = _fragment("Fragment", pb.fragment)
    if not fragment.begin <= pb.offset < fragment.end:
        raise Invalid(
            f"invalid Offset ({pb.offset}; expected {fragment.begin} <= offset < {fragment.end})"
        )
    if pb.write_head < fragment.end:
        raise Invalid(f"invalid WriteHead ({pb.write_head}; expected >= {fragment.end})")
    _url("FragmentUrl", pb.fragment_url)


def validate_append_request_opening(pb: broker_pb2.AppendRequest) -> None:
    """Raise ``Invalid`` unless this can be the first message of an Append stream. Chunks follow it."""
    check_optional_header(pb)
    _journal(pb.journal)
    if pb.offset < 0:
        raise Invalid(f"invalid Offset ({pb.offset}; expected >= 0)")
    if pb.content:
        raise Invalid("unexpected Content")
    if pb.HasField("check_registers"):
        with within("CheckRegisters"):
            LabelSelector.from_pb(pb.check_registers).validate()
    if pb.HasField("union_registers"):
        with within("UnionRegisters"):
            LabelSet.from_pb(pb.union_registers).validate()
    if pb.HasField("subtract_registers"):
        with within("SubtractRegisters"):
            LabelSet.from_pb(pb.subtract_registers).validate()
    if pb.suspend not in _SUSPEND_VALUES:
        raise Invalid(f"invalid Suspend variant ({pb.suspend})", path="Suspend")


def validate_append_chunk(pb: broker_pb2.AppendRequest) -> None:
    """Raise ``Invalid`` unless this can be a later message of an Append stream. An empty message commits."""
    if pb.journal:
        raise Invalid("unexpected Journal")
    if pb.HasField("header"):
        raise Invalid("unexpected Header")
    if pb.do_not_proxy:
        raise Invalid("unexpected DoNotProxy")
    if pb.offset:
        raise Invalid("unexpected Offset")
    if pb.HasField("check_registers"):
        raise Invalid("unexpected CheckRegisters")
    if pb.HasField("union_registers"):
        raise Invalid("unexpected UnionRegisters")
    if pb.HasField("subtract_registers"):
        raise Invalid("unexpected SubtractRegisters")
    if pb.suspend:
        suspend = _SUSPEND_VALUES.get(pb.suspend, pb.suspend)
        raise Invalid(f"unexpected Suspend ({suspend}; expected SUSPEND_RESUMED)")


def validate_append_response(
    pb: broker_pb2.AppendResponse,
) -> tuple[Status, Header, Fragment | None, LabelSet]:
    """Return the parts of a response. A response with status OK has a fragment: the commit. Raise ``Invalid``
    for a part that is missing or wrong."""
    status = _status(pb.status)
    header = valid_header_of(pb.header.SerializeToString())
    commit, registers = None, EMPTY_LABELS
    if pb.HasField("commit"):
        commit = _fragment("Commit", pb.commit)
    elif status is Status.OK:
        raise Invalid("expected Commit")
    if pb.registers.labels:
        registers = _registers_of(pb.registers.SerializeToString())
    elif status in (Status.OK, Status.REGISTER_MISMATCH) and not pb.HasField("registers"):
        raise Invalid("expected Registers")
    return status, header, commit, registers


def validate_replicate_request(pb: broker_pb2.ReplicateRequest) -> tuple[Fragment, LabelSet] | None:
    """Return the fragment and the registers of a proposal; None for a chunk of content.

    Absent registers of a proposal mean empty registers. Raise ``Invalid`` for a wrong proposal or chunk.
    """
    if not pb.HasField("proposal"):
        _replicate_content(pb)
        return None
    if pb.HasField("header"):
        valid_header(pb.header)
        if not pb.acknowledge:
            raise Invalid("expected Acknowledge with Header")
    proposal = _fragment("Proposal", pb.proposal)
    registers = _registers_of(pb.registers.SerializeToString())
    if pb.content:
        raise Invalid(f"unexpected Content with Proposal (len {len(pb.content)})")
    if pb.content_delta:
        raise Invalid(f"unexpected ContentDelta with Proposal ({pb.content_delta})")
    if pb.deprecated_journal and pb.deprecated_journal != pb.proposal.journal:
        raise Invalid(
            "DeprecatedJournal and Proposal.Journal mismatch "
            f"({pb.deprecated_journal} vs {pb.proposal.journal})"
        )
    return proposal, registers


def _replicate_content(pb: broker_pb2.ReplicateRequest) -> None:
    if not pb.content:
        raise Invalid("expected Content or Proposal")
    if pb.content_delta < 0:
        raise Invalid(f"invalid ContentDelta ({pb.content_delta}; expected >= 0)")
    if pb.HasField("header"):
        raise Invalid("unexpected Header with Content")
    if pb.HasField("registers"):
        raise Invalid("unexpected Registers with Content")
    if pb.acknowledge:
        raise Invalid("unexpected Acknowledge with Content")
    if pb.deprecated_journal:
        raise Invalid("unexpected DeprecatedJournal with Content")


def validate_replicate_response(pb: broker_pb2.ReplicateResponse) -> None:
    """Raise ``Invalid`` if a field on which a primary relies is missing or wrong in an acknowledgement.

    Do not refuse a header, which peers send with the first acknowledgement of a stream for any status. Do not
    refuse a fragment without a codec, which peers send for a mismatch.
    """
    status = _status(pb.status)
    if status is Status.WRONG_ROUTE and not pb.HasField("header"):
        raise Invalid("expected Header")
    check_optional_header(pb)
    if status is Status.PROPOSAL_MISMATCH:
        if not pb.HasField("fragment"):
            raise Invalid("expected Fragment")
        if not pb.HasField("registers"):
            raise Invalid("expected Registers")
    if pb.HasField("registers"):
        with within("Registers"):
            LabelSet.from_pb(pb.registers).validate()


def validate_list_request(pb: broker_pb2.ListRequest) -> None:
    selector = check_selector(pb.selector)
    for context, labels in (("Include", selector.include), ("Exclude", selector.exclude)):
        for value in labels.values_of(META_PREFIX):
            if not value.endswith("/"):
                raise Invalid(
                    f"Selector.{context}.Labels[\"{META_PREFIX}\"]: expected trailing '/' ({value})"
                )


def validate_list_response(pb: broker_pb2.ListResponse) -> None:
    """Require a known status and a valid header. Callers check each journal
    (`validate_list_response_journal`)."""
    _status(pb.status)
    valid_header(pb.header)


def validate_list_response_journal(pb: broker_pb2.ListResponse.Journal) -> None:
    """Raise ``Invalid`` for a wrong revision or route of a listed journal.

    The specification is not checked: any process may have applied it.
    """
    check_listed(pb.mod_revision, pb.route)


def validate_apply_request(pb: broker_pb2.ApplyRequest) -> None:
    for index, change in enumerate(pb.changes):
        with within(f"Changes[{index}]"):
            if change.HasField("upsert"):
                if change.delete:
                    raise Invalid("both Upsert and Delete are set (expected exactly one)")
                with within("Upsert"):
                    JournalSpec.from_pb(change.upsert).validate()
                check_upsert_revision(change.expect_mod_revision)
            elif change.delete:
                with within("Delete"):
                    validate_journal_name(change.delete)
                check_delete_revision(change.expect_mod_revision)
            else:
                raise Invalid("neither Upsert nor Delete are set (expected exactly one)")


def validate_apply_response(pb: broker_pb2.ApplyResponse) -> None:
    _status(pb.status)
    valid_header(pb.header)


def validate_fragments_request(pb: broker_pb2.FragmentsRequest) -> None:
    check_optional_header(pb)
    _journal(pb.journal)
    if pb.end_mod_time != 0 and pb.end_mod_time < pb.begin_mod_time:
        raise Invalid(f"invalid EndModTime ({pb.end_mod_time} must be after {pb.begin_mod_time})")
    if pb.next_page_token < 0:
        raise Invalid(f"invalid NextPageToken ({pb.next_page_token}; must be >= 0)")
    if not 0 <= pb.page_limit <= PAGE_LIMIT_MAX:
        raise Invalid(f"invalid PageLimit ({pb.page_limit}; must be >= 0 and <= {PAGE_LIMIT_MAX})")
    if pb.HasField("signatureTTL"):
        ttl_ns = duration.from_pb(pb.signatureTTL)
        if ttl_ns <= 0:
            ttl = duration.format_go_duration(ttl_ns)
            raise Invalid(f"invalid SignatureTTL ({ttl}; must be > 0s)")


def validate_fragments_response(pb: broker_pb2.FragmentsResponse) -> None:
    _status(pb.status)
    valid_header(pb.header)
    for index, fragment in enumerate(pb.fragments):
        with within(f"Fragments[{index}]"):
            with within("Spec"):
                Fragment.from_pb(fragment.spec).validate()
            _url("SignedUrl", fragment.signed_url)


def validate_health_request(pb: broker_pb2.FragmentStoreHealthRequest) -> None:
    with within("FragmentStore"):
        FragmentStoreUrl.parse(pb.fragment_store)
    prefix = pb.check_delete_prefix
    if not prefix:
        return
    with within("CheckDeletePrefix"):
        if not pb.check_delete:
            raise Invalid("cannot be set when CheckDelete is false")
        if not prefix.endswith("/"):
            raise Invalid(f"must end in '/' ({prefix})")
        component = prefix[:-1]
        if component == ".." or component.startswith("../"):
            raise Invalid(f"cannot traverse outside the store ({prefix})")
        validate_path_component(component, 1, NAME_BYTES_MAX)


def validate_health_response(pb: broker_pb2.FragmentStoreHealthResponse) -> None:
    _status(pb.status)
    valid_header(pb.header)


def check_optional_header(pb: _Routed) -> None:
    if pb.HasField("header"):
        valid_header(pb.header)


def _fragment(path: str, pb: broker_pb2.Fragment) -> Fragment:
    """Return the checked fragment of the field ``path``."""
    try:
        fragment = Fragment.from_pb(pb)
        fragment.validate()
    except Invalid as error:
        raise error.within(path) from error.__cause__
    return fragment


@lru_cache(maxsize=_REGISTERS)
def _registers_of(data: bytes) -> LabelSet:
    """Return checked registers from their encoded form. Cached, since registers of a journal seldom
    change."""
    registers = LabelSet.from_pb(broker_pb2.LabelSet.FromString(data))
    with within("Registers"):
        registers.validate()
    return registers


def _status(value: int) -> Status:
    try:
        return Status(value)
    except ValueError:
        raise Invalid(f"invalid status ({value})", path="Status") from None


def _journal(name: str) -> None:
    with within("Journal"):
        validate_journal_name(name)


def check_selector(pb: broker_pb2.LabelSelector) -> LabelSelector:
    selector = LabelSelector.from_pb(pb)
    with within("Selector"):
        selector.validate()
    return selector


def check_listed(mod_revision: int, route: broker_pb2.Route) -> None:
    """Raise ``Invalid`` unless the revision and the route of a listed journal or shard are valid."""
    if mod_revision <= 0:
        raise Invalid(f"invalid ModRevision ({mod_revision}; expected > 0)")
    with within("Route"):
        Route.from_pb(route).validate()


def check_upsert_revision(revision: int) -> None:
    """Raise ``Invalid`` unless an upsert may expect ``revision``: 0 to create, -1 for any, or above 0."""
    if revision < 0 and revision != _ANY_REVISION:
        raise Invalid(f"invalid ExpectModRevision ({revision}; expected >= 0 or -1)")


def check_delete_revision(revision: int) -> None:
    """Raise ``Invalid`` unless a deletion may expect ``revision``: -1 for any revision, or above 0."""
    if revision <= 0 and revision != _ANY_REVISION:
        raise Invalid(f"invalid ExpectModRevision ({revision}; expected > 0 or -1)")


def _url(context: str, text: str) -> None:
    try:
        urlsplit(text)
    except ValueError as error:
        raise Invalid(f"{error} ({text})", path=context) from error
