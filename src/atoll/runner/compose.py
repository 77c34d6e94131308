"""One run from its recipe to its result; the only place that composes all rooms below."""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from atoll.checkpoint.load import Checkpoint, load_newest
from atoll.config.budget import plan_budget
from atoll.config.explain import dump_resolved
from atoll.config.load import load_config
from atoll.config.schema import RunConfig
from atoll.errors import StateMismatchError
from atoll.evaluation.loss import LossResult
from atoll.files import folder_lock, write_bytes, write_json
from atoll.log import JsonLines, log_to_file, stop_logging
from atoll.runner.build import Job, build, open_or_prepare
from atoll.runner.changes import check_changes
from atoll.runner.export import export_weights
from atoll.runner.fit import check_disk, check_memory, is_out_of_memory, out_of_memory
from atoll.runner.folder import RunFolder, refuse_finished, refuse_second_start
from atoll.runner.judge import Judge
from atoll.runner.plot import plot_loss
from atoll.runner.progress import Progress, Silence
from atoll.runner.result import RunResult, failed_facts, result_facts, running_facts
from atoll.runner.session import Session, Totals
from atoll.runner.stop import StopRequest
from atoll.runner.trackers import check_trackers, open_trackers
from atoll.seeds import derive_seed
from atoll.strategy.build import check_strategy
from atoll.train.binding import environment_facts
from atoll.train.device import may_compile, resolve_device
from atoll.train.exact import torch_switches

logger = logging.getLogger(__name__)


def run(
    config: RunConfig,
    *,
    resume: Path | None = None,
    progress: Progress | None = None,
    stop: StopRequest | None = None,
) -> RunResult:
    """Train what `config` describes into `runtime.output_dir`, from the start or from a run.

    SIGINT and SIGTERM end it after the current update with status `interrupted`, and with a
    checkpoint unless the policy is `none`; a second one ends the process at once.

    Args:
        config: The recipe.
        resume: Folder of the run to go on from. In `runtime.output_dir` itself the run is
            continued; elsewhere a new folder begins at that run's newest checkpoint.
        progress: Where people look. Default: nowhere.
        stop: Lets another part of the program ask for a stop.

    Raises:
        UserError: It cannot be done as asked; nothing has been trained.
        AtollError: It failed; result.json says so too, once the run had begun.
    """
    check_strategy(config.strategy)
    check_trackers(config.runtime.trackers)
    device = resolve_device(config.runtime.device)
    progress, stop = progress or Silence(), stop or StopRequest()
    folder = RunFolder(config.runtime.output_dir)
    source = None if resume is None else RunFolder(resume)
    if source is None or source.path.resolve() != folder.path.resolve():
        refuse_second_start(folder)
    runtime = config.runtime
    with (
        torch_switches(
            deterministic=runtime.deterministic,
            cpu_threads=runtime.cpu_threads,
            compiled=may_compile(runtime, device),
        ),
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        folder_lock(folder.path),
    ):
        found = None if source is None else _open_source(source, folder, config)
        cache = open_or_prepare(config, progress)
        with build(config, cache, device) as job:
            totals, best = _start(job, found)
            _check_fit(job, folder, totals)
            with _reporting(job, folder), stop:
                session = _open_session(job, folder, stop, progress, totals, best)
                return _carry_out(session, resumed_from=found)


def _open_source(source: RunFolder, folder: RunFolder, config: RunConfig) -> Checkpoint | None:
    """Return the newest sound checkpoint of the run to go on from, None where it has none.

    Raises:
        UsageError: It is no run, or a finished one.
        StateMismatchError: The recipe differs in more than it may.
    """
    was = load_config([source.recipe_file()]).config
    with ExitStack() as stack:
        if source.path.resolve() != folder.path.resolve():
            stack.enter_context(folder_lock(source.path))
        found = load_newest(source.checkpoints)
    if found is None:
        logger.warning("%s has no checkpoint yet; starting from update 1", source.path)
        check_changes(was, config, step=0)
        return None
    check_changes(
        RunConfig.model_validate(found.manifest.run["config"]), config, step=found.manifest.step
    )
    refuse_finished(source, total_steps=plan_budget(config).total_steps)
    return found


def _start(job: Job, found: Checkpoint | None) -> tuple[Totals, dict[str, Any] | None]:
    """Bring the state to where the checkpoint left it.

    Raises:
        StateMismatchError: The checkpoint was made from other tokens, or does not fit.
    """
    if found is None:
        torch.manual_seed(derive_seed(job.config.runtime.seed, "torch"))
        return Totals(), None
    was = found.manifest.run
    for name, what, now in (
        ("cache_identity", "token cache", job.cache.manifest.cache_identity),
        ("loader_identity", "order of rows", job.loader.identity),
    ):
        if was[name] != now:
            raise StateMismatchError(
                f"the {what} is not that of the checkpoint: {name} was {was[name]}, is {now}.",
                hint="give data.cache_path the cache that the run began with",
            )
    job.state.restore(found.snapshot)
    changed = sorted(k for k in job.binding if job.binding[k] != found.binding.get(k))
    if changed:
        logger.warning(
            "%s differ from the run's start, so bits may differ from an unbroken run: %s",
            ", ".join(changed),
            "; ".join(f"{k}: {found.binding.get(k)} -> {job.binding[k]}" for k in changed),
        )
    logger.info("going on from %s, update %d", found.folder, job.state.step)
    return Totals(**was["totals"]), was["best"]


def _check_fit(job: Job, folder: RunFolder, totals: Totals) -> None:
    check_disk(job.config, job.budget, folder.path, done_epochs=totals.epochs_done)
    check_memory(job.config, job.device, amp=job.execution.amp)


@contextmanager
def _reporting(job: Job, folder: RunFolder) -> Iterator[None]:
    """Write down what the run is before it begins, and log into its folder while it lasts."""
    write_bytes(folder.resolved, dump_resolved(job.config).encode())
    write_json(folder.environment, environment_facts() | {"binding": job.binding})
    handler = log_to_file(folder.log)
    try:
        yield
    finally:
        stop_logging(handler)


def _open_session(
    job: Job,
    folder: RunFolder,
    stop: StopRequest,
    progress: Progress,
    totals: Totals,
    best: dict[str, Any] | None,
) -> Session:
    dumped = job.config.model_dump(mode="json")
    trackers = open_trackers(job.config.runtime.trackers, folder=folder.path, config=dumped)
    return Session(
        job=job,
        folder=folder,
        stop=stop,
        progress=progress,
        metrics=JsonLines(folder.metrics),
        trackers=trackers,
        judge=Judge(job, lambda: stop.requested, best),
        totals=totals,
    )


def _carry_out(session: Session, *, resumed_from: Checkpoint | None) -> RunResult:
    """Train, finish and write the result, whatever happens."""
    job, folder = session.job, session.folder
    started = time.perf_counter()
    first_step = job.state.step
    _tell_unfinished_round(job)
    session.record("start", {"total_steps": job.budget.total_steps}, tracked=False)
    write_json(folder.result, running_facts(job))
    with ExitStack() as stack:
        stack.enter_context(closing(session.metrics))
        for tracker in session.trackers:
            stack.enter_context(closing(tracker))
        try:
            session.train()
            judged = None if session.stop.requested else _finish(session)
            job.loader.close()
            job.state.strategy.close()
        except Exception as error:
            failure = error
            if is_out_of_memory(error):
                failure = out_of_memory(error, job.config, job.device)
            write_json(folder.result, failed_facts(session, failure))
            if failure is error:
                raise
            raise failure from error
        if job.state.step > first_step:
            plot_loss(folder.metrics, folder.plot)
        facts = result_facts(
            session,
            judged,
            wall_seconds=time.perf_counter() - started,
            resumed_from=None if resumed_from is None else resumed_from.manifest.step,
        )
        write_json(folder.result, facts)
    return RunResult(folder.path, facts)


def _tell_unfinished_round(job: Job) -> None:
    strategy, total = job.config.strategy, job.budget.total_steps
    if strategy.kind != "diloco" or not total % strategy.local_steps:
        return
    if strategy.local_steps > total:
        logger.warning(
            "strategy.local_steps is %d and the run has %d updates, so no outer step is taken: the "
            "local models never exchange, and their average is judged; set it to %d or less",
            strategy.local_steps,
            total,
            total,
        )
    else:
        logger.info(
            "the run ends %d updates after its last outer step (%d updates, strategy.local_steps "
            "%d): what is judged and exported at its end is the average of the local models",
            total % strategy.local_steps,
            total,
            strategy.local_steps,
        )


def _finish(session: Session) -> LossResult | None:
    """Export the weights and score everything that is held out."""
    job = session.job
    export_weights(job, session.judge.model(), session.folder.weights)
    session.progress.note("scoring the whole held-out split")
    judged = session.judge.full()
    if judged is not None:
        session.record("final", judged.facts())
    return judged
