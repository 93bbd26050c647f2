from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinerMessage(_message.Message):
    __slots__ = ("spake", "sealed", "number")
    SPAKE_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    spake: bytes
    sealed: bytes
    number: int
    def __init__(self, spake: _Optional[bytes] = ..., sealed: _Optional[bytes] = ..., number: _Optional[int] = ...) -> None: ...

class InviterMessage(_message.Message):
    __slots__ = ("spake", "sealed", "refusal")
    SPAKE_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    spake: bytes
    sealed: bytes
    refusal: str
    def __init__(self, spake: _Optional[bytes] = ..., sealed: _Optional[bytes] = ..., refusal: _Optional[str] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("public_key",)
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    public_key: bytes
    def __init__(self, public_key: _Optional[bytes] = ...) -> None: ...

class Admission(_message.Message):
    __slots__ = ("cluster", "authority_certificate", "authority_key", "certificate", "roster", "endpoints")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_KEY_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    authority_certificate: bytes
    authority_key: bytes
    certificate: bytes
    roster: RosterState
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    def __init__(self, cluster: _Optional[str] = ..., authority_certificate: _Optional[bytes] = ..., authority_key: _Optional[bytes] = ..., certificate: _Optional[bytes] = ..., roster: _Optional[_Union[RosterState, _Mapping]] = ..., endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ...) -> None: ...

class RosterState(_message.Message):
    __slots__ = ("certificates", "removals")
    CERTIFICATES_FIELD_NUMBER: _ClassVar[int]
    REMOVALS_FIELD_NUMBER: _ClassVar[int]
    certificates: _containers.RepeatedScalarFieldContainer[bytes]
    removals: _containers.RepeatedCompositeFieldContainer[Removal]
    def __init__(self, certificates: _Optional[_Iterable[bytes]] = ..., removals: _Optional[_Iterable[_Union[Removal, _Mapping]]] = ...) -> None: ...

class Removal(_message.Message):
    __slots__ = ("node_id", "removed_by")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    REMOVED_BY_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    removed_by: str
    def __init__(self, node_id: _Optional[str] = ..., removed_by: _Optional[str] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("host", "port")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ...) -> None: ...
