"""Typed addresses: compiled code reads and writes the fields of numpy records by name.

A pointer is an int64 address with the dtype of the values that lie there, one after another. `p.field` and `p[i]` are one load or
store at a constant offset. What is itself a record or an array of values gives a pointer to it, in place; a field that `to` made
holds an address and gives the pointer that it stands for.
"""

import operator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.imputils import lower_builtin, lower_getattr_generic, lower_setattr_generic
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer_getattr, infer_global, signature
from numba.extending import intrinsic, models, register_model
from numba.np.numpy_support import from_dtype

from cpuspec.kernels.ops import I64, Value

_DType = np.dtype[Any]


def to(target: _DType) -> _DType:
    """The type of a field that holds the address of `target` values."""
    return np.dtype(np.int64, metadata={"to": target})


_numbers: dict[int, tuple[int, _DType]] = {}  # by the id of a dtype: dtypes that differ in metadata alone compare equal


class Pointer(types.Type):
    """The address of values of one dtype."""

    def __init__(self, dtype: _DType) -> None:
        self.dtype = dtype
        number, _ = _numbers.setdefault(id(dtype), (len(_numbers), dtype))
        super().__init__(f"pointer{number}")


@register_model(Pointer)
class _PointerModel(models.PrimitiveModel):
    def __init__(self, manager: Any, pointer: Pointer) -> None:
        super().__init__(manager, pointer, I64)


def _lies_in_place(dtype: _DType) -> bool:
    return dtype.subdtype is not None or dtype.fields is not None


def _type_of(dtype: _DType) -> Any:
    """The Numba type that reading a value of this dtype gives."""
    if _lies_in_place(dtype):
        return Pointer(dtype.base)
    return Pointer(dtype.metadata["to"]) if dtype.metadata else from_dtype(dtype)


def _read(context: Any, builder: Any, address: Any, dtype: _DType) -> Any:
    if _lies_in_place(dtype):
        return address
    return Value(builder, address).load(context.get_data_type(_type_of(dtype))).v


def _element(builder: Any, address: Any, dtype: _DType, index: Any) -> Any:
    return builder.add(address, builder.mul(index, ir.Constant(I64, dtype.itemsize)))


def _field(builder: Any, pointer: Pointer, address: Any, name: str) -> tuple[Any, _DType]:
    fields: Any = pointer.dtype.fields
    dtype, offset, *_ = fields[name]
    return builder.add(address, ir.Constant(I64, offset)), dtype


@infer_getattr
class _Fields(AttributeTemplate):
    key = Pointer

    def generic_resolve(self, pointer: Pointer, name: str) -> Any:  # type: ignore[override]
        fields: Any = pointer.dtype.fields or {}
        return _type_of(fields[name][0]) if name in fields else None


@lower_getattr_generic(Pointer)
def _get_field(context: Any, builder: Any, pointer: Pointer, address: Any, name: str) -> Any:
    return _read(context, builder, *_field(builder, pointer, address, name))


@lower_setattr_generic(Pointer)
def _set_field(context: Any, builder: Any, sig: Any, args: Any, name: str) -> Any:
    address, _ = _field(builder, sig.args[0], args[0], name)
    Value(builder, address).store(Value(builder, args[1]))


@infer_global(operator.getitem)
class _GetItem(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        pointer, index = args
        if isinstance(pointer, Pointer) and isinstance(index, types.Integer):
            return signature(_type_of(pointer.dtype), pointer, types.int64)
        return None


@infer_global(operator.setitem)
class _SetItem(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        pointer, index, _ = args
        if isinstance(pointer, Pointer) and isinstance(index, types.Integer):
            return signature(types.none, pointer, types.int64, _type_of(pointer.dtype))
        return None


@lower_builtin(operator.getitem, Pointer, types.Integer)
def _get_item(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    dtype = sig.args[0].dtype
    return _read(context, builder, _element(builder, args[0], dtype, args[1]), dtype)


@lower_builtin(operator.setitem, Pointer, types.Integer, types.Any)
def _set_item(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    Value(builder, _element(builder, args[0], sig.args[0].dtype, args[1])).store(Value(builder, args[2]))
    return context.get_dummy_value()


def pointer_to(dtype: _DType) -> Any:
    """A compiled function from an int64 address to the pointer to values of `dtype` there."""

    @intrinsic
    def typed(typingctx, at):
        return Pointer(dtype)(types.int64), lambda context, builder, sig, args: args[0]

    return typed


@intrinsic
def address(typingctx, pointer):
    """The int64 address that a pointer holds."""
    return types.int64(pointer), lambda context, builder, sig, args: args[0]
