"""The classes that a pickle may name, and what is made in the place of an object of each of them."""

from __future__ import annotations

import io
import re
from collections import Counter, OrderedDict, defaultdict
from datetime import date, datetime, time
from pathlib import PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from zckpt.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

INERT = frozenset({
    "torch.Tensor",
    "torch._tensor.Tensor",
    "torch.nn.parameter.Parameter",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    *(
        f"torch.distributed.checkpoint.metadata.{name}"
        for name in (
            "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
            "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
})  # fmt: skip
"""The classes that a pickle may name, and of which it gets no objects. In their place it gets objects that only keep
their values."""
PLAIN: dict[str, type] = {
    **{f"builtins.{kind.__name__}": kind for kind in (int, float, complex, list, dict, set, frozenset)},
    **{f"__builtin__.{kind.__name__}": kind for kind in (int, float, complex, list, dict, set, frozenset)},
    **{f"collections.{kind.__name__}": kind for kind in (OrderedDict, Counter, defaultdict)},
    **{f"datetime.{kind.__name__}": kind for kind in (date, datetime, time)},
    **{
        f"{module}.{name}": PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath")
    },
    **{f"{module}.WindowsPath": PureWindowsPath for module in ("pathlib", "pathlib._local")},
    "torch.Size": torch.Size,
    "_io.BytesIO": io.BytesIO,
}
"""The classes of plain values and containers that a pickle may make."""
PLAIN_TYPES = frozenset(PLAIN.values())
SIZED = (list, tuple, str, bytes, dict, set, frozenset)
MANY = frozenset({list, torch.Size, PurePosixPath, PureWindowsPath})
"""The classes of which a call makes an object of each character or item that it is given, or copies each item."""
_STORAGES = {
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128, "UntypedStorage": torch.uint8,
}  # fmt: skip
"""The dtype of each class of storages."""
VALUES: dict[str, Any] = {
    **PLAIN,
    **{f"{module}.{name}": dtype for name, dtype in _STORAGES.items() for module in ("torch", "torch.storage")},
    **{f"torch.{name}": dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)},
    "numpy.ndarray": object(),  # It is only an argument of a call.
}
"""What a pickle gets for these names."""
_NUMPY_DTYPE = re.compile(r"[biufcSU]\d{1,6}", re.ASCII)
"""The names of the dtypes that an array in a pickle may have: numbers, bool, bytes and text of up to a million bytes or
characters."""
UNSUPPORTED = {
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch.nested._internal.nested_tensor._rebuild_njt": "a nested tensor",
    "torch._utils._rebuild_qtensor": "a quantized tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor without values, on the device meta",
    "torch._utils._rebuild_device_tensor_from_numpy": "a tensor of a device whose memory torch cannot save",
    "torch._utils._rebuild_xla_tensor": "a tensor of a device whose memory torch cannot save",
    **{
        f"{module}.{name}Storage": "a quantized tensor"
        for module in ("torch", "torch.storage")
        for name in ("QInt8", "QInt32", "QUInt8", "QUInt4x2", "QUInt2x4")
    },
}
"""The functions and classes of torch that make a tensor that zckpt cannot keep, and what such a tensor is."""


class Inert:
    """Stands for an object of a class of which only the name is used."""

    args: tuple[Any, ...] = ()
    """The arguments with which the pickle has made the object, or its state, if that is a tuple."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        made = super().__new__(cls)
        made.args = args
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class Dtype:
    """A NumPy dtype of plain numbers or text."""

    def __init__(self, name: str, *_: object) -> None:
        if not _NUMPY_DTYPE.fullmatch(name):
            raise UnsupportedError(f"its pickle has NumPy values of dtype {name}, which zckpt cannot keep")
        self.dtype, self.swapped = np.dtype(name), False

    @property
    def value(self) -> np.dtype[Any]:
        """The dtype, with the byte order that the pickle has set."""
        return self.dtype.newbyteorder(">") if self.swapped else self.dtype


def _scalar(dtype: Dtype, raw: bytes) -> Any:
    """Returns the number, text or bytes of Python that is equal to a scalar of NumPy."""
    item = np.ndarray((), dtype.value, raw).item()
    if isinstance(item, np.generic):  # A long double has no equal in Python.
        raise UnsupportedError(f"its pickle has a NumPy number of dtype {dtype.dtype}, which zckpt cannot keep")
    return item


def set_array(array: np.ndarray[Any, Any], state: Any) -> int:
    """Sets the state of an array, in the byte order of this machine. Returns the number of its bytes."""
    version, shape, dtype, in_columns, raw = state
    if not isinstance(raw, bytes):
        raise UnsupportedError("its pickle has a NumPy array of objects, which zckpt cannot keep")
    if dtype.swapped:
        raw = np.frombuffer(raw, dtype.value).astype(dtype.dtype).tobytes()
    array.__setstate__((version, shape, dtype.dtype, in_columns, raw))
    return len(raw)


def _member(kind: object, name: object) -> Inert:
    """Returns a member of an enum, which Python 3.11.0 to 3.11.3 pickle as a call of ``getattr``."""
    if not isinstance(kind, type) or not issubclass(kind, Inert) or type(name) is not str:
        raise TypeError("it asks for getattr of something that is not an enum")
    return kind(name)


def _encoded(text: object, encoding: object) -> bytes:
    """Returns bytes that Python has pickled as text, because pickles of protocol 2 and lower cannot contain bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise TypeError("text in an unknown encoding")
    return text.encode("latin1")


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state",
         "torch._utils._rebuild_device_tensor_from_cpu_tensor", "torch.serialization._get_layout"),
        lambda data, *_: data,
    ),
    "_codecs.encode": _encoded, "numpy.dtype": Dtype, "builtins.getattr": _member, "__builtin__.getattr": _member,
    # In a pickle of protocol 2 or lower, Python writes empty bytes as a call.
    **dict.fromkeys(("builtins.bytes", "__builtin__.bytes"), lambda: b""),
    # The pickle sets the state of the array afterwards.
    **dict.fromkeys(
        ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"), lambda *_: np.empty(0, np.int8)
    ),
    **{f"{module}.multiarray.scalar": _scalar for module in ("numpy.core", "numpy._core")},
    # Its first argument is a class that is not known here, so the error names that class.
    "torch._utils._rebuild_wrapper_subclass": lambda *_: None,
}  # fmt: skip
"""What a pickle calls in the place of these functions and classes."""
