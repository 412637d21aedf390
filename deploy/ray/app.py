"""The Ray Serve application: run `serve run deploy/ray/serve.yaml`, or call `build` with other arguments."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve

from deploy.ray.replica import Replica, configured

TARGET_LOAD = 0.75  # fraction of a full batch, averaged over the replicas


class Arguments(BaseModel):
    """The fields that `serve.yaml` may set under `args`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    options: dict[str, Any] = Field({}, description="Options of `pilotfish serve`, by their names.")
    num_cpus: float = Field(2, ge=0, description="CPU cores per replica; also the number of threads, unless set.")
    num_gpus: float = Field(0, ge=0, description="GPUs per replica.")
    min_replicas: int = Field(1, ge=1, description="Minimum number of replicas.")
    max_replicas: int = Field(4, ge=1, description="Maximum number of replicas.")
    upscale_seconds: float = Field(10, ge=0, description="Seconds of overload before a replica is added.")
    max_waiting: int = Field(64, ge=0, description="Maximum number of requests waiting at a proxy.")


def build(args: dict[str, Any]) -> serve.Application:
    """Build replicas for a full batch each; Ray adds replicas when batches are 75 % full or requests wait.

    `args` holds the fields of `Arguments`.
    """
    arguments = Arguments.model_validate(args)
    config = configured(arguments.options)
    deployment = serve.deployment(
        Replica,
        name="Replica",
        ray_actor_options={"num_cpus": arguments.num_cpus, "num_gpus": arguments.num_gpus},
        max_ongoing_requests=config.max_batch_size,
        max_queued_requests=arguments.max_waiting,
        # Ongoing requests include those that wait at the proxies, so the depth of the queue counts.
        autoscaling_config={
            "min_replicas": arguments.min_replicas,
            "max_replicas": arguments.max_replicas,
            "target_ongoing_requests": TARGET_LOAD * config.max_batch_size,
            "upscale_delay_s": arguments.upscale_seconds,
        },
        graceful_shutdown_timeout_s=config.drain_seconds,
        health_check_period_s=5,
    )
    threads = {} if "threads" in arguments.options else {"threads": max(1, round(arguments.num_cpus))}
    return deployment.bind({**arguments.options, **threads})
