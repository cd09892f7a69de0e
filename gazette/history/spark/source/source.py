"""``format("gazette")``: journals as a data source of Spark.

Spark imports this module in every process that looks for any data source. So it imports slow modules only
when needed. Readers and writers are made on the driver, pickled, and run in other processes. So they have
only options and parsed values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pyspark.sql.datasource import DataSource

from gazette.history.spark.error_hints import with_hints


class GazetteDataSource(DataSource):
    """Data source of Spark for journals. The page on Spark has its options.

    Spark finds this class by the name ``format("gazette")``, without a registration.
    """

    _inferred = False
    """True if the columns were inferred from some messages. Spark keeps this object with the columns."""

    @classmethod
    def name(cls) -> str:
        return "gazette"

    @with_hints()
    def schema(self) -> Any:
        from gazette.history.spark.source.options import STREAM, ReadOptions
        from gazette.history.spark.source.schema import table_schema

        # Accept options of streams: Spark has not said yet whether it reads a table or a stream.
        schema, self._inferred = table_schema(ReadOptions.parse(self.options, STREAM))
        return schema

    @with_hints()
    def reader(self, schema: Any) -> Any:
        from gazette.history.spark.source.options import ReadOptions
        from gazette.history.spark.source.table import GazetteReader

        options = ReadOptions.parse(self.options)
        if self._inferred:
            options = options.inferred()
        return GazetteReader(options, schema)

    @with_hints()
    def streamReader(self, schema: Any) -> Any:
        from gazette.history.spark.source.options import StreamOptions
        from gazette.history.spark.source.stream import GazetteStreamReader

        options = StreamOptions.parse(self.options)
        if self._inferred:
            options = replace(options, read=options.read.inferred())
        return GazetteStreamReader(options, schema)

    @with_hints()
    def writer(self, schema: Any, overwrite: bool) -> Any:
        from gazette.history.spark.sink.sink import GazetteWriter
        from gazette.history.spark.source.options import WriteOptions

        _no_overwriting(overwrite)
        return GazetteWriter(WriteOptions.parse(self.options, streaming=False), schema)

    @with_hints()
    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        from gazette.history.spark.sink.sink import GazetteStreamWriter
        from gazette.history.spark.source.options import WriteOptions

        _no_overwriting(overwrite)
        return GazetteStreamWriter(WriteOptions.parse(self.options, streaming=True), schema)


def _no_overwriting(overwrite: bool) -> None:
    if overwrite:
        from gazette.errors import Invalid

        raise Invalid(
            "journals are not overwritten",
            path="mode",
            hint='Write with mode("append"); prune a journal by `gazctl journals prune`.',
        )
