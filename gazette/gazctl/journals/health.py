"""``gazctl journals store-health``."""

from __future__ import annotations

from gazette.client.client import Client
from gazette.client.journals import fragment_store_health
from gazette.errors import GazetteError, Invalid, printable
from gazette.gazctl.context import Context, each
from gazette.gazctl.flags import StoreHealthFlags
from gazette.gazctl.journals.list import endpoints_of, list_journals
from gazette.protocol.fragment import FragmentStoreUrl
from gazette.protocol.label_set import EVERYTHING
from gazette.protocol.text.validation import within


async def run(context: Context) -> int:
    stores = context.loaded.arguments
    if len(stores) != 1:
        raise Invalid(
            f"expected one store, got {len(stores)}",
            path="STORE_URL",
            hint="For example: gazctl journals store-health s3://my-bucket/fragments/",
        )
    with within("STORE_URL"):
        FragmentStoreUrl.parse(stores[0])
    client = await context.broker()
    async with context.answering(client.address):
        problem = await client.fragment_store_health(
            stores[0],
            # An empty prefix is valid: it is the root of the store.
            check_delete=context.loaded.sources["check-delete-prefix"] == "flag",
            check_delete_prefix=context.flags(StoreHealthFlags).check_delete_prefix,
        )
    problem = problem or await _problem_elsewhere(context, client, stores[0])
    if problem:
        context.terminal.write(f"{stores[0]} is unhealthy: {printable(problem)}\n")
        return 1
    context.terminal.write(f"{stores[0]} is healthy\n")
    return 0


async def _problem_elsewhere(context: Context, client: Client, store: str) -> str:
    """Return the problem that brokers of its journals have with a store; empty for no problem.

    These brokers do not check removals. Brokers that cannot be asked count as healthy: report them.
    """
    listed = await list_journals(context, client, EVERYTHING)
    journals = [journal for journal in listed.journals if store in journal.spec.fragment.stores]

    async def ask(endpoint: str) -> str:
        async with context.answering(endpoint):
            return await fragment_store_health(client, store, endpoint=endpoint)

    endpoints = endpoints_of(journals)
    results = await each("ask", endpoints, ask)
    for endpoint, result in zip(endpoints, results, strict=True):
        if isinstance(result, GazetteError):
            context.terminal.note(f"cannot ask {endpoint}: {result}")
    return next((result for result in results if isinstance(result, str) and result), "")
