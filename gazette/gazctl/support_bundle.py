"""``gazctl support-bundle``: one file with the diagnostics that support needs.

If a part cannot be collected, the manifest names the part and the type of the error. The bundle has all other
parts.
"""

from __future__ import annotations

import io
import json
import os
import platform
import ssl
import tarfile
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain, count, pairwise
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from gazette.client.flags import ClientFlags
from gazette.client.journals import FragmentsParams, ListedJournal
from gazette.errors import GazetteError, Invalid, Unavailable
from gazette.gazctl.context import Context, each
from gazette.gazctl.flags import BrokerFlags, ConsumerFlags, SupportBundleFlags
from gazette.gazctl.journals.fragments import fragments_of
from gazette.gazctl.journals.list import list_journals, list_response
from gazette.gazctl.shards.list import list_response as shards_response
from gazette.gazctl.shards.list import list_shards
from gazette.gazctl.shown import Shown
from gazette.protocol.journal import SuspendLevel
from gazette.protocol.label_set import EVERYTHING
from gazette.protocol.route import Route
from gazette.runtime.redaction import shown_url
from gazette.runtime.tasks import BlockingPool
from gazette.runtime.tls import tls_context
from gazette.version import __version__

_PAGES: Final = ("debug/ready", "debug/metrics", "debug/stacks")
PAGE_BYTES_MAX: Final = 64 << 20
_FETCH_THREADS: Final = 8


@dataclass(slots=True)
class Bundle:
    """The parts collected so far."""

    root: str
    moment_s: float
    archive: tarfile.TarFile
    parts: dict[str, str] = field(default_factory=dict)
    """By name of a part: ``ok``, or why it is missing: the type of an error, or that no address was given."""
    missing: dict[str, str] = field(default_factory=dict)
    """Missing parts, each with the reason."""
    shown: Shown = field(default_factory=Shown)

    def add(self, name: str, text: str) -> None:
        """Add a part. ``text`` comes from `Shown`, or is made from its results."""
        data = text.encode()
        info = tarfile.TarInfo(f"{self.root}/{name}")
        info.size, info.mtime, info.mode = len(data), int(self.moment_s), 0o600
        self.archive.addfile(info, io.BytesIO(data))
        self.parts[name] = "ok"

    def free_name(self, name: str) -> str:
        """Return a name that no part and no directory of parts has: with a number after it, if needed."""
        taken = {*self.parts, *(part.rpartition("/")[0] for part in self.parts)}
        names = chain((name,), (f"{name}.{number}" for number in count(2)))
        return next(each for each in names if each not in taken)

    def lacks(self, name: str, error: Exception) -> None:
        """Note that a part is missing. The reason is for the user only, not for the bundle."""
        self.parts[name] = type(error).__name__
        self.missing[name] = str(error) or repr(error)


async def run(context: Context) -> int:
    flags = context.flags(SupportBundleFlags)
    now = context.clock.now()
    target = flags.output or Path(f"gazette-support-{int(now)}.tar.gz")
    logs = [Path(word) for word in context.loaded.arguments]
    if str(target) == "-":
        raise Invalid(
            "a bundle is not written to standard output", path="--output", hint="Name a file."
        )
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise Invalid(
            f"cannot make {target}: {error.strerror}",
            path="--output",
            hint="A file that exists is not replaced.",
        ) from error
    with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        name = target.name.removesuffix(".gz").removesuffix(".tar")
        bundle = Bundle(name, now, archive)
        endpoints = await _brokers(context, bundle)
        endpoints += await _consumers(context, bundle)
        await _members(context, bundle, endpoints)
        for log in logs:
            _add_log(bundle, log, flags.log_bytes)
        _add_manifest(context, bundle)
    for part, reason in bundle.missing.items():
        context.terminal.note(f"without {part}: {reason}")
    context.terminal.write(f"{target}\n")
    return 0


async def _brokers(context: Context, bundle: Bundle) -> list[str]:
    """Add the parts from brokers. Return the brokers' endpoints."""
    journals: list[ListedJournal] = []

    async def specs() -> str:
        client = await context.broker()
        listed = await list_journals(context, client, EVERYTHING)
        journals.extend(listed.journals)
        return bundle.shown.specifications(list_response(listed))

    async def fragments() -> str:
        client = await context.broker()

        async def one(journal: ListedJournal) -> dict[str, Any]:
            name = journal.spec.name
            listed = await fragments_of(context, client, FragmentsParams(name))
            spans = [stored.fragment for stored in listed]
            mod_times = [span.mod_time for span in spans if span.mod_time]
            return {
                "journal": name,
                "fragments": len(spans),
                "begin": spans[0].begin if spans else 0,
                "end": spans[-1].end if spans else 0,
                "bytes": sum(span.end - span.begin for span in spans),
                "holes": sum(span.end < following.begin for span, following in pairwise(spans)),
                "unpersisted": len(spans) - len(mod_times),
                "oldest_mod_time": min(mod_times, default=0),
                "newest_mod_time": max(mod_times, default=0),
            }

        readable = [
            journal for journal in journals if journal.spec.suspend_level is not SuspendLevel.FULL
        ]
        results = await each("fragments", readable, one)
        lines = [
            {"journal": journal.spec.name, "error": type(result).__name__}
            if isinstance(result, GazetteError)
            else result
            for journal, result in zip(readable, results, strict=True)
        ]
        return "".join(f"{json.dumps(line)}\n" for line in lines)

    await _part(bundle, "journals.json", specs)
    if journals:
        await _part(bundle, "fragments.jsonl", fragments)
    flags = context.loaded.group(BrokerFlags)
    return _endpoints(flags.address, (journal.route for journal in journals))


async def _consumers(context: Context, bundle: Bundle) -> list[str]:
    """Add the parts from consumers, if an address was given. Return the consumers' endpoints."""
    if context.loaded.sources["consumer.address"] == "default":
        reason = bundle.parts["shards.json"] = "no --consumer.address was given"
        bundle.missing["shards.json"] = reason
        return []
    routes: list[Route] = []

    async def shards() -> str:
        client = await context.consumer()
        listed = await list_shards(context, client, EVERYTHING)
        routes.extend(shard.route for shard in listed.shards)
        return bundle.shown.specifications(shards_response(listed))

    await _part(bundle, "shards.json", shards)
    return _endpoints(context.loaded.group(ConsumerFlags).address, routes)


async def _part(bundle: Bundle, name: str, make: Callable[[], Awaitable[str]]) -> None:
    """Add a part that ``make`` returns, or note that it is missing."""
    try:
        bundle.add(name, await make())
    except GazetteError as error:
        bundle.lacks(name, error)


def _endpoints(addresses: str, routes: Iterable[Route]) -> list[str]:
    """Return every known endpoint, once: the endpoints of flags, and of routes."""
    endpoints = dict.fromkeys(word.strip() for word in addresses.split(",") if word.strip())
    for route in routes:
        endpoints |= dict.fromkeys(endpoint for endpoint in route.endpoints if endpoint)
    return list(endpoints)


async def _members(context: Context, bundle: Bundle, endpoints: list[str]) -> None:
    """Add the diagnostics of every member.

    The HTTP URL of a member is given or guessed. The first guess is our default, the port after the gRPC
    port. The second guess is the gRPC port itself, which members of the original use.
    """
    flags = context.flags(SupportBundleFlags)
    tls = tls_of(context.loaded.group(BrokerFlags))
    places: dict[str, list[str]] = {url.rstrip("/"): [url.rstrip("/")] for url in flags.http}
    for endpoint in dict.fromkeys(endpoints):
        if guesses := http_guesses(endpoint):
            places.setdefault(endpoint, guesses)
    pool = BlockingPool("diagnostics", _FETCH_THREADS)
    try:

        async def one(place: tuple[str, list[str]]) -> dict[str, str]:
            return await pool.run(_diagnostics, place[1], tls, flags.timeout)

        results = await each("diagnostics", places.items(), one)
    finally:
        pool.close()
    for endpoint, result in zip(places, results, strict=True):
        # Names of files may show hosts, but no user and password of a URL.
        address = urlsplit(endpoint).netloc.rpartition("@")[2]
        directory = bundle.free_name(f"members/{address.replace(':', '_') or 'unix'}")
        if isinstance(result, GazetteError):
            bundle.lacks(directory, result)
            continue
        for page, text in result.items():
            name = page.rpartition("/")[2]
            # `Shown` has a method for each page: ``ready``, ``metrics`` and ``stacks``.
            bundle.add(f"{directory}/{name}.txt", getattr(bundle.shown, name)(text))


def http_guesses(endpoint: str) -> list[str]:
    """Return the URLs at which a member with this gRPC endpoint may serve HTTP."""
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or url.hostname is None:
        return []
    port = url.port or (443 if url.scheme == "https" else 80)
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return [f"{url.scheme}://{host}:{number}" for number in (port + 1, port) if number < 65_536]


def _diagnostics(places: list[str], tls: ssl.SSLContext | None, timeout_s: float) -> dict[str, str]:
    """Return the pages of the first URL that has them. Blocks. Raise ``Unavailable`` if no URL has them."""
    reasons: list[str] = []
    for url in places:
        try:
            return {page: fetch(f"{url}/{page}", tls, timeout_s) for page in _PAGES}
        except (OSError, ValueError) as error:
            reasons.append(f"{url}: {error}")
        except Exception as error:  # noqa: BLE001 - http.client has a tree of its own, of no use here
            reasons.append(f"{url}: {type(error).__name__}")
    raise Unavailable("; ".join(reasons))


def fetch(url: str, tls: ssl.SSLContext | None, timeout_s: float) -> str:
    """Return a page, or its first `PAGE_BYTES_MAX` bytes, even of a member that is not ready. Blocks. Raise
    ``OSError``, or an error of ``http.client``."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s, context=tls) as response:  # noqa: S310
            data: bytes = response.read(PAGE_BYTES_MAX)
    except urllib.error.HTTPError as error:
        if error.code != 503:  # A member that is not ready answers 503, and its page says why.
            raise
        data = error.read(PAGE_BYTES_MAX)
    return data.decode(errors="replace")


def tls_of(flags: ClientFlags) -> ssl.SSLContext | None:
    """Return the TLS settings of a client for its requests by HTTP; None for the system's settings. Raise
    ``Invalid`` for a file that cannot be used."""
    if not any((flags.trusted_ca_file, flags.cert_file)):
        return None
    try:
        context = tls_context(ca_file=flags.trusted_ca_file or None)
        if flags.cert_file:
            context.load_cert_chain(flags.cert_file, flags.cert_key_file or None)
    except OSError as error:
        raise Invalid(f"cannot use the PEM files: {error}", path="--broker.cert-file") from error
    return context


def _add_log(bundle: Bundle, path: Path, max_bytes: int) -> None:
    """Add the end of a log, beginning at the start of a line."""
    name = bundle.free_name(f"logs/{path.name}")
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            tail = file.read(max_bytes)
    except OSError as error:
        bundle.lacks(name, error)
        return
    if size > max_bytes:
        tail = tail.partition(b"\n")[2]
    bundle.add(name, bundle.shown.log(tail.decode(errors="replace")))


def _add_manifest(context: Context, bundle: Bundle) -> None:
    loaded = context.loaded
    addresses = {
        "brokers": _shown_urls(loaded.group(BrokerFlags).address),
        "consumers": _shown_urls(loaded.group(ConsumerFlags).address),
    }
    manifest = {
        "made_at": int(bundle.moment_s),
        "gazctl": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "addresses": addresses,
        "parts": dict(bundle.parts),
    }
    bundle.add("manifest.json", json.dumps(manifest, indent=2))


def _shown_urls(text: str) -> list[str]:
    return [shown_url(url.strip()) for url in text.split(",") if url.strip()]
