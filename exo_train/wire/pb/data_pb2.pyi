from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_FP32: _ClassVar[DType]
    DTYPE_FP16: _ClassVar[DType]
    DTYPE_BF16: _ClassVar[DType]
    DTYPE_INT32: _ClassVar[DType]

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_UNSPECIFIED: _ClassVar[Kind]
    KIND_ACTIVATION: _ClassVar[Kind]
    KIND_GRADIENT: _ClassVar[Kind]
DTYPE_UNSPECIFIED: DType
DTYPE_FP32: DType
DTYPE_FP16: DType
DTYPE_BF16: DType
DTYPE_INT32: DType
KIND_UNSPECIFIED: Kind
KIND_ACTIVATION: Kind
KIND_GRADIENT: Kind

class Hello(_message.Message):
    __slots__ = ("protocol", "cluster", "run", "generation", "rank", "name", "token", "max_tensor_bytes")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    MAX_TENSOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    cluster: str
    run: str
    generation: int
    rank: int
    name: str
    token: str
    max_tensor_bytes: int
    def __init__(self, protocol: _Optional[int] = ..., cluster: _Optional[str] = ..., run: _Optional[str] = ..., generation: _Optional[int] = ..., rank: _Optional[int] = ..., name: _Optional[str] = ..., token: _Optional[str] = ..., max_tensor_bytes: _Optional[int] = ...) -> None: ...

class ShadowHead(_message.Message):
    __slots__ = ("generation", "step", "start", "end")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    start: int
    end: int
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class FrameHeader(_message.Message):
    __slots__ = ("cluster", "run", "generation", "step", "microbatch", "kind", "dtype", "shape", "total_bytes", "crc32", "chunk_offset", "chunk_bytes")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    CHUNK_OFFSET_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    run: str
    generation: int
    step: int
    microbatch: int
    kind: Kind
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    total_bytes: int
    crc32: int
    chunk_offset: int
    chunk_bytes: int
    def __init__(self, cluster: _Optional[str] = ..., run: _Optional[str] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ..., microbatch: _Optional[int] = ..., kind: _Optional[_Union[Kind, str]] = ..., dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., total_bytes: _Optional[int] = ..., crc32: _Optional[int] = ..., chunk_offset: _Optional[int] = ..., chunk_bytes: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("token", "names")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    token: str
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, token: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class WeightHeader(_message.Message):
    __slots__ = ("name", "encoding", "total_bytes", "chunk_offset", "chunk_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_OFFSET_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    encoding: str
    total_bytes: int
    chunk_offset: int
    chunk_bytes: int
    def __init__(self, name: _Optional[str] = ..., encoding: _Optional[str] = ..., total_bytes: _Optional[int] = ..., chunk_offset: _Optional[int] = ..., chunk_bytes: _Optional[int] = ...) -> None: ...
