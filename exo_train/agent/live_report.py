"""`exo-train plan` for the members that are here: what `train` would decide, and why.

Owns the report. Starts no run; what is measured is kept, so that `train` need not measure again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from exo_train.agent.live_plan import Asking, decide_live
from exo_train.agent.local_client import own_agent
from exo_train.agent.members import wait_candidates
from exo_train.agent.opening import own_tls
from exo_train.agent.plan_report import decision_fields
from exo_train.agent.what_if import read_spec, report_head
from exo_train.agent.what_if_epoch import read_epoch
from exo_train.cluster.home import Home
from exo_train.config import TrainConfig
from exo_train.errors import ConfigError
from exo_train.train.step_shapes import full_steps, steps_of


def live_report(
    home: Home, config: TrainConfig, *, on_note: Callable[[str], None], fresh: bool = False
) -> dict[str, Any]:
    """Give what `plan --json` prints; `fresh` measures what is known already too.

    Raises DoesNotFitError with what would fit, and PeerError when devices or links are missing.
    """
    if not config.profile_s:
        raise ConfigError("--profile-s must be above 0: without a measurement nothing is predicted")
    spec = read_spec(home, config)
    data = read_epoch(config, spec, cache_dir=home.cache) if config.data else None
    steps = steps_of(data.batches, config) if data and data.batches else full_steps(config)
    with own_agent(home) as client:
        candidates, _ = wait_candidates(client, config, on_note=on_note)
        problem, found = decide_live(
            spec,
            config,
            steps,
            candidates,
            Asking(status=client.status, tls_to=own_tls(home).to, on_note=on_note, fresh=fresh),
            at_least=config.min_devices,
        )
    size = found.microbatch_size
    dtypes = {
        device.name: dtype
        for device, dtype in zip(found.household.devices, problem.dtypes, strict=True)
    }
    epoch = data.count(microbatch_size=size) if data else None
    report = {
        **report_head(spec, config, dtype=", ".join(sorted(set(problem.dtypes)))),
        **decision_fields(
            found,
            step_positions=steps(size).positions,
            epoch=epoch,
            token_share=epoch.token_share if epoch else 1.0,
        ),
    }
    for stage in report["stages"]:
        stage["dtype"] = dtypes[stage["device"]]
    return report
