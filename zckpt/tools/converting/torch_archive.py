"""Opens files of ``torch.save``, and finds what is in them.

Such a file is a zip archive without compression. It has a pickle of all objects, and one record with the bytes of each
storage. Files are read, and never mapped to memory, because a process that touches a mapped page is killed if another
process has cut the file off meanwhile. The records of storages are not read here: see transfer/stored.py.
"""

from __future__ import annotations

import errno
import io
import struct
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zckpt.errors import FormatError, MissingFileError, UnsupportedError, ZckptError, from_os_error
from zckpt.plan.inventory import FileRange
from zckpt.storage.files import read_at
from zckpt.tools.converting.source import AS_WRITTEN, COPY_AGAIN, check_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PICKLE_BYTES_MAX = 256 << 20
"""The largest pickle that is read, in bytes. A pickle contains no values of tensors: that of a model with 100,000
parameters has about 20 MB."""
DIRECTORY_BYTES_MAX = 256 << 20
"""The largest directory of a zip archive that is read, in bytes. An entry for a tensor has about 100 bytes."""
_ENCRYPTED = 1
"""The flag bit that marks an encrypted record of a zip archive."""
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
"""The header in front of a record of a zip archive. Its last two fields are the lengths of the name and of the extra
field that follow it."""
_ZIP, _OLD = b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
"""The first bytes of a file that torch 1.6 or newer has written (``_ZIP``), and of a file that an older torch has
written (``_OLD``)."""


class _File(io.FileIO):
    """A file that is open for reading, or a range of it, in which positions are counted from its beginning. No more
    than ``DIRECTORY_BYTES_MAX`` bytes are read at once."""

    def __init__(self, path: str, place: FileRange | None) -> None:
        super().__init__(path)
        self.start, size = 0, super().seek(0, io.SEEK_END)
        self.nbytes = size
        """The number of bytes of the file or the range."""
        if place is not None:
            self.start, self.nbytes = place.offset, place.nbytes
            if not 0 <= self.start <= self.start + self.nbytes <= size:
                self.close()
                raise FormatError(
                    "the file was cut off", file=path, start=self.start, stop=self.start + self.nbytes, hint=COPY_AGAIN
                )
        self.seek(0)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self.nbytes}[whence]
        if position < 0:
            raise OSError(errno.EINVAL, "a position before the beginning")  # as a file of its own would
        return super().seek(self.start + position) - self.start

    def tell(self) -> int:
        return super().tell() - self.start

    def read(self, size: int | None = -1) -> bytes:
        left = max(self.nbytes - self.tell(), 0)
        size = left if size is None or size < 0 else min(size, left)
        if size > DIRECTORY_BYTES_MAX:
            raise ValueError(f"its directory has {size} bytes")
        return super().read(size)


@dataclass(frozen=True, slots=True)
class Archive:
    """A file of ``torch.save`` that is open, or a file that is nothing but a pickle."""

    path: str
    pickle: bytes
    _file: _File
    _infos: Mapping[str, zipfile.ZipInfo] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the file, or of the range of it that is read."""
        return self._file.nbytes

    @property
    def records(self) -> int:
        """The number of records."""
        return len(self._infos)

    def record(self, name: str, nbytes: int) -> FileRange:
        """Returns the place of the first ``nbytes`` bytes of a record. Raises FormatError if it is missing, compressed
        or shorter."""
        info = self._infos.get(name)
        if info is None:
            raise FormatError(f"its record {name} is missing", hint=COPY_AGAIN)
        raw = bytearray(_LOCAL_HEADER.size)
        file = self._file
        found = read_at(file.fileno(), [memoryview(raw)], file.start + max(info.header_offset, 0))
        header = _LOCAL_HEADER.unpack(raw)
        start = file.start + info.header_offset + len(raw) + header[-2] + header[-1]
        whole = found == len(raw) and _is_plain(info) and 0 <= nbytes <= info.file_size
        if header[0] != _ZIP or not whole or start + nbytes > file.start + file.nbytes:
            raise FormatError(
                f"its record {name} is damaged or cut off", start=start, stop=start + nbytes, hint=COPY_AGAIN
            )
        return FileRange(self.path, start, nbytes)


@contextmanager
def opened(path: str, place: FileRange | None = None, *, only_pickle: bool = False) -> Iterator[Archive]:
    """Opens a file of ``torch.save``, the range ``place`` of a file, or a file that is nothing but a pickle. Within
    this context, errors of other classes become MissingFileError, FormatError and StorageError. Raises UnsupportedError
    for an archive that this machine cannot read."""
    try:
        check_regular(path)
        with _File(path, place) as file:
            if only_pickle:
                if file.nbytes > PICKLE_BYTES_MAX:
                    raise FormatError(f"its pickle has more than {PICKLE_BYTES_MAX} bytes", file=path)
                yield Archive(path, file.read(), file)
            else:
                with _zip_file(file, path) as archive:
                    infos = {info.filename.partition("/")[2]: info for info in archive.infolist()}
                    yield Archive(path, _pickle(archive, infos, path), file, infos)
    except ZckptError:
        raise
    except FileNotFoundError as error:
        raise MissingFileError("a file of the checkpoint is missing", file=path, hint=COPY_AGAIN) from error
    except OSError as error:
        raise from_os_error(error, "read", path) from error
    except Exception as error:  # A damaged archive can make zipfile raise almost any error.
        raise FormatError(f"this is not a whole file of torch.save: {error}", file=path, hint=COPY_AGAIN) from error


def _zip_file(file: _File, path: str) -> zipfile.ZipFile:
    """Returns the archive in a file of ``torch.save``. Raises UnsupportedError for the format of torch before 1.6, and
    FormatError for a file in another format."""
    first = file.read(len(_OLD))
    if first == _OLD:
        raise UnsupportedError(
            f"{path} is in the format that torch had before 1.6, which cannot be read in parts",
            hint="load it with torch.load and save it with torch.save again",
        )
    if first[: len(_ZIP)] != _ZIP:
        raise FormatError("this is not a file of torch.save", file=path, hint=AS_WRITTEN)
    try:
        return zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:
        raise FormatError("the file was cut off: its end is missing", file=path, hint=COPY_AGAIN) from error


def _pickle(archive: zipfile.ZipFile, infos: Mapping[str, zipfile.ZipInfo], path: str) -> bytes:
    """Returns the pickle of an archive. Raises UnsupportedError for one with another order of bytes."""
    raw = _small(archive, infos.get("data.pkl"), PICKLE_BYTES_MAX)
    if raw is None:
        raise FormatError(
            "this is not a file of torch.save: it has no pickle that could be read", file=path, hint=AS_WRITTEN
        )
    order = _small(archive, infos["byteorder"], len(b"little")) if "byteorder" in infos else b"little"
    if order == b"big":
        raise UnsupportedError(f"{path} was written on a machine with another byte order")
    if order != b"little":
        raise FormatError("its record of the byte order cannot be read", file=path, hint=COPY_AGAIN)
    return raw


def _small(archive: zipfile.ZipFile, info: zipfile.ZipInfo | None, bytes_max: int) -> bytes | None:
    """Returns the content of a record with at most ``bytes_max`` bytes. Returns None if there is no such record, if it
    is longer, or if it is compressed or encrypted, as torch never writes it."""
    if info is None or not _is_plain(info) or not 0 <= info.file_size == info.compress_size <= bytes_max:
        return None
    return archive.read(info)


def _is_plain(info: zipfile.ZipInfo) -> bool:
    """Returns whether a record is neither compressed nor encrypted."""
    return info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & _ENCRYPTED
