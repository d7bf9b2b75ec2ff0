"""Validation: a checkpoint against every rule of the specification (``zckpt/format/rules.py`` lists them).

Many rules are checked by what parses a file, for every reader; validation calls it, and adds what only it checks.

| rules | what parses | only when validating |
| --- | --- | --- |
| M001 to M014, N001 to N004, S003 of the manifest | ``format/manifest.py`` | |
| L001 | ``format/names.py``, ``listing/runs.py`` | |
| I001 to I007 | ``format/index.py`` | ``index_checks.py``: I001, and I007 for all pieces at once |
| F001 to F003 | the store's reader, ``listing/contents.py`` | |
| S001 to S008 | ``format/shard.py`` | ``file_checks.py``: S007, the zeros of S008 |
| D001, D002 | ``listing/contents.py``, ``transfer/read.py`` | ``file_checks.py``: what files share of a table (D001) |
| D003 | ``transfer/read.py`` | called by ``file_checks.py``, for headers and data |
| T001 to T004 | ``format/tree.py``, ``listing/contents.py`` | called by ``check.py`` |

``check.py`` calls them all; ``values.py`` looks at values, which no rule is about; ``report.py`` is what they find.
"""
