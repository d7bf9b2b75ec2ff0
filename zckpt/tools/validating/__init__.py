"""Validation compares a checkpoint with every rule of the specification (``zckpt/format/rules.py`` lists them).

Many rules are checked by the code that parses a file for every reader. Validation calls that code, and checks the rest
itself. In this table, ``listing`` is the folder ``zckpt/checkpoint/listing``, and what has no folder is here.

| rules | checked for every reader by | checked by validation alone in |
| --- | --- | --- |
| M001 to M015, N001 to N004, S003 of the manifest | ``format/manifest.py`` | |
| L001 | ``format/names.py``, ``listing/runs.py`` | |
| I001 to I007 | ``format/index.py``, ``listing/contents.py`` | ``check.py``: I007 for all pieces at once |
| F001 to F003 | the store's reader, ``listing/contents.py`` | |
| S001 to S008 | ``format/data_file.py`` | ``file_checks.py``: S007, the zeros of S008 |
| D001, D002 | ``listing/contents.py``, ``format/digest.py`` | ``file_checks.py``: the places of digests in a table |
| D003 | ``format/digest.py``, which ``transfer/read.py`` calls | ``file_checks.py`` calls it for headers and data |
| T001 to T004 | ``format/tree.py``, ``listing/contents.py`` | ``check.py`` calls it |

``check.py`` runs all checks. ``values.py`` looks at the values of tensors, which no rule is about. ``report.py`` has
the classes of the result.
"""
