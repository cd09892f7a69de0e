"""Makes views that each query plans again: `create_view`.

Spark keeps the first plan of a DataFrame, or of a view of a DataFrame. For sources in Python, the plan is a
list of fragments. But Spark resolves the text of a view for every query. So the text of our view reads a
table of Spark's catalog, which Spark loads for every query. A table of a Python source has columns but no
options, so the text has the options.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, Final

from pyspark.sql import types

from gazette.errors import Invalid
from gazette.history.spark.error_hints import with_hints
from gazette.history.spark.source.options import ReadOptions
from gazette.history.spark.source.planning import option_texts
from gazette.history.spark.source.schema import table_schema

_TABLE: Final = "gazette_columns_"
"""Begin of the names of our tables in the catalog. Each table has columns, and no data."""
_SCHEMA: Final = "spark_catalog.default"


@with_hints()
def create_view(spark: Any, name: str, *, schema: Any = None, **options: Any) -> None:
    """Create or replace a temporary view of journals. Each query reads them up to the time of the query.

    ``schema`` and ``options`` are as for `read`. This call fixes the columns. A DataFrame of the view
    (``spark.table(name)``) is one query: Spark keeps its plan. Raise `Invalid` for a malformed name or
    option. To infer columns, read messages: see `infer_fields` for errors.
    """
    if not re.fullmatch(r"\w+", name):
        raise Invalid(
            f"{name!r} is not the name of a temporary view: letters, digits and underscores",
            path="name",
        )
    texts = option_texts(options)
    parsed = ReadOptions.parse(texts)
    if schema is None:
        schema, inferred = table_schema(parsed)
        if inferred and not parsed.has_mode:
            texts["mode"] = "FAILFAST"
    elif isinstance(schema, str):
        schema = spark.createDataFrame([], schema).schema
    digest = hashlib.sha256(schema.json().encode()).hexdigest()
    table = f"{_SCHEMA}.{_TABLE}{digest[:24]}"
    columns = ", ".join(f"{_name(field.name)} {_ddl(field.dataType)}" for field in schema.fields)
    # Use SQL: the catalog API of Spark Connect would read the new table, without our options.
    spark.sql(f"CREATE TABLE IF NOT EXISTS {table} ({columns}) USING gazette")
    options_text = ", ".join(f"{_literal(key)} = {_literal(text)}" for key, text in texts.items())
    # No input can change this SQL: the table's name has only letters and digits, and all texts are escaped.
    query = f"SELECT * FROM {table} WITH ({options_text})"  # noqa: S608
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW {_name(name)} AS {query}")


def _ddl(kind: types.DataType) -> str:
    """Return a type as SQL. Spark's text of a struct does not quote names of fields."""
    if isinstance(kind, types.StructType):
        fields = (f"{_name(field.name)}: {_ddl(field.dataType)}" for field in kind.fields)
        return f"struct<{', '.join(fields)}>"
    if isinstance(kind, types.ArrayType):
        return f"array<{_ddl(kind.elementType)}>"
    if isinstance(kind, types.MapType):
        return f"map<{_ddl(kind.keyType)}, {_ddl(kind.valueType)}>"
    return str(kind.simpleString())


def _name(name: str) -> str:
    """Return a name as a quoted identifier of SQL."""
    return f"`{name.replace('`', '``')}`"


def _literal(text: str) -> str:
    """Return a text as a string literal of Spark's SQL."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
