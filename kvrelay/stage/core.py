"""What every stage has before it serves: model, KV pool, engine, door, metrics. Knows no service and no address."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from importlib import metadata

import torch

from kvrelay import fallbacks
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.driver import EngineDriver
from kvrelay.engine.engine import Engine
from kvrelay.engine.pace import Pace
from kvrelay.errors import InvalidRequest
from kvrelay.kvcache.pool import KvPool
from kvrelay.model.weights import load_model
from kvrelay.settings import StageSettings
from kvrelay.stage.checks import check
from kvrelay.stage.intake import Intake, Lease
from kvrelay.telemetry.logging import bind_request_id
from kvrelay.telemetry.metrics import StageMetrics
from kvrelay.text.tokenizer import load_tokenizer
from kvrelay.types import Role, StageDescription


@dataclass(frozen=True, slots=True)
class StageCore:
    """What the services of a stage share."""

    settings: StageSettings
    description: StageDescription
    """Its address is empty: nobody listens yet."""
    pool: KvPool
    driver: EngineDriver
    intake: Intake
    metrics: StageMetrics

    def lease(self, request_id: str) -> AbstractContextManager[Lease]:
        """For the handler of one call, as long as it lasts. Overloaded: the stage is draining."""
        bind_request_id(request_id)
        return self.intake.enter(request_id)


@asynccontextmanager
async def stage_core(settings: StageSettings, role: Role) -> AsyncIterator[StageCore]:
    """Loads the model and runs an engine for it until the body ends.

    InvalidRequest: a setting is out of its range. ModelFileError: the model cannot be loaded.
    """
    engine, description = await asyncio.to_thread(_load, settings, role)
    async with EngineDriver(engine) as driver:
        intake, metrics = Intake(description.instance_id), StageMetrics()
        for reason, count in dict(fallbacks.taken).items():
            metrics.fallbacks.labels(reason).inc(count)
        yield StageCore(settings, description, engine.pool, driver, intake, metrics)


def _load(settings: StageSettings, role: Role) -> tuple[Engine, StageDescription]:
    check(settings)
    _check_device(settings.device)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    tokenizer = load_tokenizer(settings.model)
    loaded = load_model(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        block_tokens=settings.block_tokens,
        cache_dir=settings.cache_dir,
    )
    engine = Engine(loaded, _engine_config(settings))
    epoch = 1 + secrets.randbelow(2**52)
    description = StageDescription(
        instance_id=settings.instance_id or f"{role}-{settings.site}-{epoch:013x}",
        epoch=epoch,
        role=role,
        site=settings.site,
        address="",
        model=settings.model,
        tokenizer=tokenizer.identity,
        layout=loaded.layout,
        vocab_size=loaded.config.vocab_size,
        max_model_tokens=engine.max_model_tokens,
        pool_blocks=engine.pool.blocks,
        max_running=settings.max_running,
        eos_token_ids=loaded.config.eos_token_ids,
        device=settings.device,
        pace=settings.pace,
        version=metadata.version("kvrelay"),
        prefix_cache=settings.prefix_cache,
    )
    return engine, description


def _check_device(device: str) -> None:
    if device != "cpu" and not torch.cuda.is_available():
        raise InvalidRequest("device", f"{device!r}, but there is none here")


def _engine_config(settings: StageSettings) -> EngineConfig:
    return EngineConfig(
        pool_blocks=settings.pool_tokens // settings.block_tokens,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        token_budget=settings.token_budget,
        max_model_tokens=settings.max_model_tokens,
        prefix_cache=settings.prefix_cache,
        pace=Pace.parse(settings.pace),
    )
