"""``gazctl journals store-health``."""

from __future__ import annotations

from gazette.errors import Invalid
from gazette.gazctl.context import Context
from gazette.gazctl.flags import StoreHealthFlags
from gazette.protocol.fragment import FragmentStoreUrl
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
    if problem:
        context.terminal.write(f"{stores[0]} is unhealthy: {problem}\n")
        return 1
    context.terminal.write(f"{stores[0]} is healthy\n")
    return 0
