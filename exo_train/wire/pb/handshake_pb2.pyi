from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Greeting(_message.Message):
    __slots__ = ("protocol", "build", "features", "node_id", "instance", "certificate")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    build: str
    features: _containers.RepeatedScalarFieldContainer[str]
    node_id: str
    instance: str
    certificate: bytes
    def __init__(self, protocol: _Optional[int] = ..., build: _Optional[str] = ..., features: _Optional[_Iterable[str]] = ..., node_id: _Optional[str] = ..., instance: _Optional[str] = ..., certificate: _Optional[bytes] = ...) -> None: ...
