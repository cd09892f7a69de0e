"""A job of `test_deployments.py`, as users submit it: it prints what it finds as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from gazette.spark import session


def loud(batches: Iterator[Any]) -> Iterator[Any]:
    # A module of the archive that was submitted.
    from shouting import shouted  # type: ignore[import-not-found]

    for batch in batches:
        yield batch.set_column(0, "n_gram", shouted(batch["n_gram"]))


def main(master: str, store: str) -> None:
    spark = session(master)
    options = {"store": store, "journal": "topic/grams", "message": "ngram_pb2:NGramCount"}
    table = spark.read.format("gazette").options(**options).load()
    table = table.selectExpr("n_gram", "cast(count AS bigint) AS count")
    found = table.mapInArrow(loud, "n_gram string, count bigint").collect()
    sys.stdout.write(
        json.dumps({"rows": sorted(map(list, found)), "ui": spark.sparkContext.uiWebUrl}) + "\n"
    )
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
