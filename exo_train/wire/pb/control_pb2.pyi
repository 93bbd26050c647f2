from exo_train.wire.pb import pairing_pb2 as _pairing_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DialOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIAL_OUTCOME_UNSPECIFIED: _ClassVar[DialOutcome]
    CONNECTED: _ClassVar[DialOutcome]
    REFUSED: _ClassVar[DialOutcome]
    TIMED_OUT: _ClassVar[DialOutcome]
    UNREACHABLE: _ClassVar[DialOutcome]

class StateKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATE_KIND_UNSPECIFIED: _ClassVar[StateKind]
    ADAPTER: _ClassVar[StateKind]
    OPTIMIZER: _ClassVar[StateKind]
    GRADIENTS: _ClassVar[StateKind]
    BOUNDARIES: _ClassVar[StateKind]
    HELD: _ClassVar[StateKind]
DIAL_OUTCOME_UNSPECIFIED: DialOutcome
CONNECTED: DialOutcome
REFUSED: DialOutcome
TIMED_OUT: DialOutcome
UNREACHABLE: DialOutcome
STATE_KIND_UNSPECIFIED: StateKind
ADAPTER: StateKind
OPTIMIZER: StateKind
GRADIENTS: StateKind
BOUNDARIES: StateKind
HELD: StateKind

class NodeFacts(_message.Message):
    __slots__ = ("node_id", "name", "backend", "device", "chip", "memory_bytes", "usable_memory_bytes", "dtypes", "version", "incarnation", "endpoints", "free_memory_bytes", "instance", "run", "unreachable", "links", "more_devices", "ended_runs", "wifi_hosts")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CHIP_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USABLE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DTYPES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    FREE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    MORE_DEVICES_FIELD_NUMBER: _ClassVar[int]
    ENDED_RUNS_FIELD_NUMBER: _ClassVar[int]
    WIFI_HOSTS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    name: str
    backend: str
    device: str
    chip: str
    memory_bytes: int
    usable_memory_bytes: int
    dtypes: _containers.RepeatedScalarFieldContainer[str]
    version: str
    incarnation: int
    endpoints: _containers.RepeatedCompositeFieldContainer[_pairing_pb2.Endpoint]
    free_memory_bytes: int
    instance: str
    run: RunFacts
    unreachable: bool
    links: _containers.RepeatedCompositeFieldContainer[LinkFacts]
    more_devices: _containers.RepeatedCompositeFieldContainer[ComputeDevice]
    ended_runs: _containers.RepeatedCompositeFieldContainer[EndedRun]
    wifi_hosts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node_id: _Optional[str] = ..., name: _Optional[str] = ..., backend: _Optional[str] = ..., device: _Optional[str] = ..., chip: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., usable_memory_bytes: _Optional[int] = ..., dtypes: _Optional[_Iterable[str]] = ..., version: _Optional[str] = ..., incarnation: _Optional[int] = ..., endpoints: _Optional[_Iterable[_Union[_pairing_pb2.Endpoint, _Mapping]]] = ..., free_memory_bytes: _Optional[int] = ..., instance: _Optional[str] = ..., run: _Optional[_Union[RunFacts, _Mapping]] = ..., unreachable: bool = ..., links: _Optional[_Iterable[_Union[LinkFacts, _Mapping]]] = ..., more_devices: _Optional[_Iterable[_Union[ComputeDevice, _Mapping]]] = ..., ended_runs: _Optional[_Iterable[_Union[EndedRun, _Mapping]]] = ..., wifi_hosts: _Optional[_Iterable[str]] = ...) -> None: ...

class EndedRun(_message.Message):
    __slots__ = ("run_id", "generation")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    generation: int
    def __init__(self, run_id: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class ComputeDevice(_message.Message):
    __slots__ = ("device", "chip", "memory_bytes", "free_memory_bytes", "usable_memory_bytes", "dtypes")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CHIP_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USABLE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DTYPES_FIELD_NUMBER: _ClassVar[int]
    device: str
    chip: str
    memory_bytes: int
    free_memory_bytes: int
    usable_memory_bytes: int
    dtypes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, device: _Optional[str] = ..., chip: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., free_memory_bytes: _Optional[int] = ..., usable_memory_bytes: _Optional[int] = ..., dtypes: _Optional[_Iterable[str]] = ...) -> None: ...

class RunFacts(_message.Message):
    __slots__ = ("run_id", "generation", "rank", "phase", "phase_age_s", "phase_limit_s", "coordinator_id", "orphaned")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PHASE_AGE_S_FIELD_NUMBER: _ClassVar[int]
    PHASE_LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_ID_FIELD_NUMBER: _ClassVar[int]
    ORPHANED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    generation: int
    rank: int
    phase: str
    phase_age_s: float
    phase_limit_s: float
    coordinator_id: str
    orphaned: bool
    def __init__(self, run_id: _Optional[str] = ..., generation: _Optional[int] = ..., rank: _Optional[int] = ..., phase: _Optional[str] = ..., phase_age_s: _Optional[float] = ..., phase_limit_s: _Optional[float] = ..., coordinator_id: _Optional[str] = ..., orphaned: bool = ...) -> None: ...

class LinkFacts(_message.Message):
    __slots__ = ("peer_id", "local_host", "remote_host", "interface", "kind", "rtt_s", "jitter_s", "to_peer_bytes_per_s", "from_peer_bytes_per_s", "trouble")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    LOCAL_HOST_FIELD_NUMBER: _ClassVar[int]
    REMOTE_HOST_FIELD_NUMBER: _ClassVar[int]
    INTERFACE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    RTT_S_FIELD_NUMBER: _ClassVar[int]
    JITTER_S_FIELD_NUMBER: _ClassVar[int]
    TO_PEER_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    FROM_PEER_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    local_host: str
    remote_host: str
    interface: str
    kind: str
    rtt_s: float
    jitter_s: float
    to_peer_bytes_per_s: float
    from_peer_bytes_per_s: float
    trouble: str
    def __init__(self, peer_id: _Optional[str] = ..., local_host: _Optional[str] = ..., remote_host: _Optional[str] = ..., interface: _Optional[str] = ..., kind: _Optional[str] = ..., rtt_s: _Optional[float] = ..., jitter_s: _Optional[float] = ..., to_peer_bytes_per_s: _Optional[float] = ..., from_peer_bytes_per_s: _Optional[float] = ..., trouble: _Optional[str] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("protocol", "cluster", "sender", "expected_node_id", "roster_digest", "clock_s")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ROSTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    cluster: str
    sender: NodeFacts
    expected_node_id: str
    roster_digest: bytes
    clock_s: float
    def __init__(self, protocol: _Optional[int] = ..., cluster: _Optional[str] = ..., sender: _Optional[_Union[NodeFacts, _Mapping]] = ..., expected_node_id: _Optional[str] = ..., roster_digest: _Optional[bytes] = ..., clock_s: _Optional[float] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("protocol", "cluster", "self", "known", "refusal", "roster_digest", "clock_s")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    SELF_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    ROSTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    cluster: str
    self: NodeFacts
    known: _containers.RepeatedCompositeFieldContainer[NodeFacts]
    refusal: str
    roster_digest: bytes
    clock_s: float
    def __init__(self_, protocol: _Optional[int] = ..., cluster: _Optional[str] = ..., self: _Optional[_Union[NodeFacts, _Mapping]] = ..., known: _Optional[_Iterable[_Union[NodeFacts, _Mapping]]] = ..., refusal: _Optional[str] = ..., roster_digest: _Optional[bytes] = ..., clock_s: _Optional[float] = ...) -> None: ...

class GoodbyeRequest(_message.Message):
    __slots__ = ("cluster", "node_id", "incarnation")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    node_id: str
    incarnation: int
    def __init__(self, cluster: _Optional[str] = ..., node_id: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class GoodbyeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DialBackRequest(_message.Message):
    __slots__ = ("endpoints",)
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    endpoints: _containers.RepeatedCompositeFieldContainer[_pairing_pb2.Endpoint]
    def __init__(self, endpoints: _Optional[_Iterable[_Union[_pairing_pb2.Endpoint, _Mapping]]] = ...) -> None: ...

class DialBackReply(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedScalarFieldContainer[DialOutcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[DialOutcome, str]]] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("json", "fresh")
    JSON_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    json: str
    fresh: bool
    def __init__(self, json: _Optional[str] = ..., fresh: bool = ...) -> None: ...

class ProfileReply(_message.Message):
    __slots__ = ("json", "from_cache", "failure")
    JSON_FIELD_NUMBER: _ClassVar[int]
    FROM_CACHE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    json: str
    from_cache: bool
    failure: Failure
    def __init__(self, json: _Optional[str] = ..., from_cache: bool = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class ServeModelRequest(_message.Message):
    __slots__ = ("run_id", "token", "path")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    token: str
    path: str
    def __init__(self, run_id: _Optional[str] = ..., token: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class ServeModelReply(_message.Message):
    __slots__ = ("endpoints",)
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    endpoints: _containers.RepeatedCompositeFieldContainer[_pairing_pb2.Endpoint]
    def __init__(self, endpoints: _Optional[_Iterable[_Union[_pairing_pb2.Endpoint, _Mapping]]] = ...) -> None: ...

class StopServingRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class StopServingReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InviteRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InviteReply(_message.Message):
    __slots__ = ("code", "expires_s", "endpoints")
    CODE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    code: str
    expires_s: float
    endpoints: _containers.RepeatedCompositeFieldContainer[_pairing_pb2.Endpoint]
    def __init__(self, code: _Optional[str] = ..., expires_s: _Optional[float] = ..., endpoints: _Optional[_Iterable[_Union[_pairing_pb2.Endpoint, _Mapping]]] = ...) -> None: ...

class RemoveRequest(_message.Message):
    __slots__ = ("device",)
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    device: str
    def __init__(self, device: _Optional[str] = ...) -> None: ...

class RemoveReply(_message.Message):
    __slots__ = ("node_id", "name", "invited")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INVITED_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    name: str
    invited: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node_id: _Optional[str] = ..., name: _Optional[str] = ..., invited: _Optional[_Iterable[str]] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ("told",)
    TOLD_FIELD_NUMBER: _ClassVar[int]
    told: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, told: _Optional[_Iterable[str]] = ...) -> None: ...

class ExamineRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExamineReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class RunMessage(_message.Message):
    __slots__ = ("run_id", "generation", "rank", "prepare", "prepared", "load", "loaded", "step_input", "step_report", "commit", "committed", "state_request", "state_array", "state_stored", "finish", "failure", "progress", "rewind", "rewound", "mark", "shadowed")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    STEP_INPUT_FIELD_NUMBER: _ClassVar[int]
    STEP_REPORT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    STATE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    STATE_ARRAY_FIELD_NUMBER: _ClassVar[int]
    STATE_STORED_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    REWIND_FIELD_NUMBER: _ClassVar[int]
    REWOUND_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    SHADOWED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    generation: int
    rank: int
    prepare: Prepare
    prepared: Prepared
    load: Load
    loaded: Loaded
    step_input: StepInput
    step_report: StepReport
    commit: Commit
    committed: Committed
    state_request: StateRequest
    state_array: StateArray
    state_stored: StateStored
    finish: Finish
    failure: Failure
    progress: Progress
    rewind: Rewind
    rewound: Rewound
    mark: Mark
    shadowed: Shadowed
    def __init__(self, run_id: _Optional[str] = ..., generation: _Optional[int] = ..., rank: _Optional[int] = ..., prepare: _Optional[_Union[Prepare, _Mapping]] = ..., prepared: _Optional[_Union[Prepared, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., loaded: _Optional[_Union[Loaded, _Mapping]] = ..., step_input: _Optional[_Union[StepInput, _Mapping]] = ..., step_report: _Optional[_Union[StepReport, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., state_request: _Optional[_Union[StateRequest, _Mapping]] = ..., state_array: _Optional[_Union[StateArray, _Mapping]] = ..., state_stored: _Optional[_Union[StateStored, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., rewind: _Optional[_Union[Rewind, _Mapping]] = ..., rewound: _Optional[_Union[Rewound, _Mapping]] = ..., mark: _Optional[_Union[Mark, _Mapping]] = ..., shadowed: _Optional[_Union[Shadowed, _Mapping]] = ...) -> None: ...

class StepId(_message.Message):
    __slots__ = ("generation", "step")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Rewind(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Rewound(_message.Message):
    __slots__ = ("holdings", "metrics_lines")
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    METRICS_LINES_FIELD_NUMBER: _ClassVar[int]
    holdings: _containers.RepeatedCompositeFieldContainer[Holding]
    metrics_lines: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, holdings: _Optional[_Iterable[_Union[Holding, _Mapping]]] = ..., metrics_lines: _Optional[_Iterable[str]] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("at", "start", "end")
    AT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    at: StepId
    start: int
    end: int
    def __init__(self, at: _Optional[_Union[StepId, _Mapping]] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Mark(_message.Message):
    __slots__ = ("at", "safe", "copy", "metrics_lines")
    AT_FIELD_NUMBER: _ClassVar[int]
    SAFE_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    METRICS_LINES_FIELD_NUMBER: _ClassVar[int]
    at: StepId
    safe: StepId
    copy: bool
    metrics_lines: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, at: _Optional[_Union[StepId, _Mapping]] = ..., safe: _Optional[_Union[StepId, _Mapping]] = ..., copy: bool = ..., metrics_lines: _Optional[_Iterable[str]] = ...) -> None: ...

class Shadowed(_message.Message):
    __slots__ = ("at", "failure")
    AT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    at: StepId
    failure: Failure
    def __init__(self, at: _Optional[_Union[StepId, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class Prepare(_message.Message):
    __slots__ = ("backend", "device", "node_id", "cluster", "adopt")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    backend: str
    device: str
    node_id: str
    cluster: str
    adopt: bool
    def __init__(self, backend: _Optional[str] = ..., device: _Optional[str] = ..., node_id: _Optional[str] = ..., cluster: _Optional[str] = ..., adopt: bool = ...) -> None: ...

class Prepared(_message.Message):
    __slots__ = ("data_endpoints",)
    DATA_ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    data_endpoints: _containers.RepeatedCompositeFieldContainer[_pairing_pb2.Endpoint]
    def __init__(self, data_endpoints: _Optional[_Iterable[_Union[_pairing_pb2.Endpoint, _Mapping]]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("plan_json", "manifest_json", "weights_endpoints", "token", "step_timeout_s", "coordinator_name", "committed_step", "coordinator_id", "committed_generation", "capture_boundaries")
    PLAN_JSON_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_JSON_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_NAME_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEP_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_ID_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_GENERATION_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    plan_json: str
    manifest_json: str
    weights_endpoints: _containers.RepeatedCompositeFieldContainer[_pairing_pb2.Endpoint]
    token: str
    step_timeout_s: float
    coordinator_name: str
    committed_step: int
    coordinator_id: str
    committed_generation: int
    capture_boundaries: bool
    def __init__(self, plan_json: _Optional[str] = ..., manifest_json: _Optional[str] = ..., weights_endpoints: _Optional[_Iterable[_Union[_pairing_pb2.Endpoint, _Mapping]]] = ..., token: _Optional[str] = ..., step_timeout_s: _Optional[float] = ..., coordinator_name: _Optional[str] = ..., committed_step: _Optional[int] = ..., coordinator_id: _Optional[str] = ..., committed_generation: _Optional[int] = ..., capture_boundaries: bool = ...) -> None: ...

class Loaded(_message.Message):
    __slots__ = ("plan_hash", "num_trainable", "fetched_bytes", "cached_bytes")
    PLAN_HASH_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAINABLE_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    plan_hash: str
    num_trainable: int
    fetched_bytes: int
    cached_bytes: int
    def __init__(self, plan_hash: _Optional[str] = ..., num_trainable: _Optional[int] = ..., fetched_bytes: _Optional[int] = ..., cached_bytes: _Optional[int] = ...) -> None: ...

class StepInput(_message.Message):
    __slots__ = ("step", "evaluation", "loss_scale", "microbatches", "more")
    STEP_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    LOSS_SCALE_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    step: int
    evaluation: bool
    loss_scale: float
    microbatches: _containers.RepeatedCompositeFieldContainer[MicrobatchData]
    more: bool
    def __init__(self, step: _Optional[int] = ..., evaluation: bool = ..., loss_scale: _Optional[float] = ..., microbatches: _Optional[_Iterable[_Union[MicrobatchData, _Mapping]]] = ..., more: bool = ...) -> None: ...

class MicrobatchData(_message.Message):
    __slots__ = ("num_sequences", "num_positions", "tokens", "targets", "mask", "row_keys", "row_starts", "row_lengths")
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    ROW_KEYS_FIELD_NUMBER: _ClassVar[int]
    ROW_STARTS_FIELD_NUMBER: _ClassVar[int]
    ROW_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    num_sequences: int
    num_positions: int
    tokens: bytes
    targets: bytes
    mask: bytes
    row_keys: _containers.RepeatedScalarFieldContainer[int]
    row_starts: _containers.RepeatedScalarFieldContainer[int]
    row_lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_sequences: _Optional[int] = ..., num_positions: _Optional[int] = ..., tokens: _Optional[bytes] = ..., targets: _Optional[bytes] = ..., mask: _Optional[bytes] = ..., row_keys: _Optional[_Iterable[int]] = ..., row_starts: _Optional[_Iterable[int]] = ..., row_lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("step", "evaluation", "loss_sum", "grad_square_sum", "busy_s", "step_s", "sent_bytes", "peak_memory_bytes", "period_s", "trouble", "pairs")
    STEP_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    GRAD_SQUARE_SUM_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PERIOD_S_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    step: int
    evaluation: bool
    loss_sum: float
    grad_square_sum: float
    busy_s: float
    step_s: float
    sent_bytes: int
    peak_memory_bytes: int
    period_s: float
    trouble: str
    pairs: PairSums
    def __init__(self, step: _Optional[int] = ..., evaluation: bool = ..., loss_sum: _Optional[float] = ..., grad_square_sum: _Optional[float] = ..., busy_s: _Optional[float] = ..., step_s: _Optional[float] = ..., sent_bytes: _Optional[int] = ..., peak_memory_bytes: _Optional[int] = ..., period_s: _Optional[float] = ..., trouble: _Optional[str] = ..., pairs: _Optional[_Union[PairSums, _Mapping]] = ...) -> None: ...

class PairSums(_message.Message):
    __slots__ = ("num_pairs", "chosen", "rejected", "num_right", "nll", "log_odds")
    NUM_PAIRS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    NUM_RIGHT_FIELD_NUMBER: _ClassVar[int]
    NLL_FIELD_NUMBER: _ClassVar[int]
    LOG_ODDS_FIELD_NUMBER: _ClassVar[int]
    num_pairs: int
    chosen: float
    rejected: float
    num_right: int
    nll: float
    log_odds: float
    def __init__(self, num_pairs: _Optional[int] = ..., chosen: _Optional[float] = ..., rejected: _Optional[float] = ..., num_right: _Optional[int] = ..., nll: _Optional[float] = ..., log_odds: _Optional[float] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("step", "apply", "learning_rate", "grad_scale")
    STEP_FIELD_NUMBER: _ClassVar[int]
    APPLY_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    GRAD_SCALE_FIELD_NUMBER: _ClassVar[int]
    step: int
    apply: bool
    learning_rate: float
    grad_scale: float
    def __init__(self, step: _Optional[int] = ..., apply: bool = ..., learning_rate: _Optional[float] = ..., grad_scale: _Optional[float] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class StateRequest(_message.Message):
    __slots__ = ("kind", "at")
    KIND_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    kind: StateKind
    at: StepId
    def __init__(self, kind: _Optional[_Union[StateKind, str]] = ..., at: _Optional[_Union[StepId, _Mapping]] = ...) -> None: ...

class StateArray(_message.Message):
    __slots__ = ("kind", "name", "dtype", "shape", "data", "last")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    kind: StateKind
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    last: bool
    def __init__(self, kind: _Optional[_Union[StateKind, str]] = ..., name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., last: bool = ...) -> None: ...

class StateStored(_message.Message):
    __slots__ = ("kind",)
    KIND_FIELD_NUMBER: _ClassVar[int]
    kind: StateKind
    def __init__(self, kind: _Optional[_Union[StateKind, str]] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("is_over",)
    IS_OVER_FIELD_NUMBER: _ClassVar[int]
    is_over: bool
    def __init__(self, is_over: bool = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("kind", "message")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("phase", "phase_age_s", "phase_limit_s", "silent_s")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PHASE_AGE_S_FIELD_NUMBER: _ClassVar[int]
    PHASE_LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    phase: str
    phase_age_s: float
    phase_limit_s: float
    silent_s: float
    def __init__(self, phase: _Optional[str] = ..., phase_age_s: _Optional[float] = ..., phase_limit_s: _Optional[float] = ..., silent_s: _Optional[float] = ...) -> None: ...

class ReplicaPiece(_message.Message):
    __slots__ = ("head", "data")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    head: ReplicaHead
    data: bytes
    def __init__(self, head: _Optional[_Union[ReplicaHead, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class ReplicaHead(_message.Message):
    __slots__ = ("run_id", "step", "files", "keep_steps", "takes_over")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    KEEP_STEPS_FIELD_NUMBER: _ClassVar[int]
    TAKES_OVER_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    files: _containers.RepeatedCompositeFieldContainer[ReplicaFile]
    keep_steps: _containers.RepeatedScalarFieldContainer[int]
    takes_over: bool
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ..., files: _Optional[_Iterable[_Union[ReplicaFile, _Mapping]]] = ..., keep_steps: _Optional[_Iterable[int]] = ..., takes_over: bool = ...) -> None: ...

class ReplicaFile(_message.Message):
    __slots__ = ("name", "size_bytes", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    size_bytes: int
    sha256: str
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class ReplicaKept(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...
