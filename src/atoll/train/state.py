"""Everything that decides the next step, given the binding; copied out and put back whole."""

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.errors import StateMismatchError
from atoll.files import identity
from atoll.model.arena import Arena
from atoll.model.llama import Llama
from atoll.optim.adamw import AdamW
from atoll.strategy.base import Strategy
from atoll.tensors import Snapshot, copy_to_cpu, parameter_digest

PARTS = ("model", "optimizer", "strategy", "generator")
SHOWN = 5
"""Differences of one kind that an error lists."""


@dataclass(slots=True)
class TrainState:
    """The state of one rank at rest, between two updates.

    Rates and per-step seeds are pure functions of `step`, the data of `cursor`, so neither is
    stored. `model` is the bare module; what a strategy or a compiler wraps belongs to the loop.

    Attributes:
        step: Finished updates.
        cursor: Rows consumed so far, over all local models and ranks.
        model: The N local models.
        optimizer: The inner optimizer.
        strategy: What passes between local models.
    """

    step: int
    cursor: int
    model: Llama
    optimizer: AdamW
    strategy: Strategy

    def snapshot(self) -> Snapshot:
        """Return a copy of the whole state on the CPU; waits for the device.

        Tensors: `model.<canonical name>` [N, *shape], `optimizer.*`, `strategy.*`, and
        `generator.<device>`, torch's own random state.
        """
        strategy = self.strategy.snapshot()  # first: it may complete what is in flight
        saved = Snapshot(facts={"step": self.step, "cursor": self.cursor})
        saved.facts["layout"] = layout_identity(self.model.arena)
        for name, weight in self.model.arena.named().items():
            saved.tensors[f"model.{name}"] = copy_to_cpu(weight)
        saved.merge("optimizer", self.optimizer.snapshot())
        saved.merge("strategy", strategy)
        saved.tensors.update(_generator_states(self._device))
        return saved

    def digests(self) -> dict[str, str]:
        """Return one digest for each part of the state: model, optimizer, strategy, generator.

        That of `model` is the `parameter_digest` of the weights under their canonical names.
        """
        saved = self.snapshot()
        return {part: parameter_digest(saved.under(part).tensors) for part in PARTS}

    def restore(self, saved: Snapshot) -> None:
        """Load what `snapshot` gave, into live tensors; all or nothing.

        The random state of a device that is not in use here is left out, so that a run may go on
        elsewhere.

        Raises:
            StateMismatchError: Names, shapes, types or layout differ; lists the first five of
                each kind. Nothing has been changed.
        """
        weights = {f"model.{name}": view for name, view in self.model.arena.named().items()}
        own = weights | {f"optimizer.{k}": v for k, v in self.optimizer.moments().items()}
        found = {
            name: tensor
            for name, tensor in saved.tensors.items()
            if name.partition(".")[0] not in ("strategy", "generator")
        }
        problems = _differences(own, found) + self._fact_problems(saved)
        if problems:
            raise StateMismatchError(
                "the saved state does not fit this run:\n" + "\n".join(problems),
                hint="resume with the recipe that made the checkpoint; it is in its manifest.json "
                "and in resolved.yaml",
            )
        self.strategy.restore(saved.under("strategy"))
        # Everything below was checked above and cannot fail half-way.
        self.optimizer.restore(Snapshot(saved.under("optimizer").tensors))
        for name, view in weights.items():
            with torch.no_grad():
                view.copy_(saved.tensors[name])
        _set_generator_states(self._device, saved.under("generator").tensors)
        self.step, self.cursor = saved.facts["step"], saved.facts["cursor"]

    @property
    def _device(self) -> torch.device:
        return self.model.arena.data_NP.device

    def _fact_problems(self, saved: Snapshot) -> list[str]:
        problems = [
            f"fact {name} is {saved.facts.get(name)!r}; a whole number of at least 0 is required"
            for name in ("step", "cursor")
            if not isinstance(saved.facts.get(name), int) or saved.facts[name] < 0
        ]
        if saved.facts.get("layout") != layout_identity(self.model.arena):
            problems.append("the parameters lie in another order in the saved moments")
        return problems


def layout_identity(arena: Arena) -> str:
    """Name the order of parameters in an arena, in which flat state is stored."""
    places = [[name, place.offset, list(place.shape)] for name, place in arena.slices.items()]
    return identity([places, arena.decay_size])


def _differences(own: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """Return a line for each kind of difference, with its first examples."""
    both = [name for name in own if name in found]
    kinds = {
        "missing": [name for name in own if name not in found],
        "unknown": [name for name in found if name not in own],
        "of another shape": [
            f"{name} {list(found[name].shape)} for {list(own[name].shape)}"
            for name in both
            if found[name].shape != own[name].shape
        ],
        "of another type": [
            f"{name} {found[name].dtype} for {own[name].dtype}"
            for name in both
            if found[name].dtype != own[name].dtype
        ],
    }
    return [
        f"{len(names)} tensors {kind}: {', '.join(names[:SHOWN])}{_more(len(names))}"
        for kind, names in kinds.items()
        if names
    ]


def _more(count: int) -> str:
    return f" and {count - SHOWN} more" if count > SHOWN else ""


def _generator_states(device: torch.device) -> dict[str, Tensor]:
    states = {"generator.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["generator.cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_generator_states(device: torch.device, states: dict[str, Tensor]) -> None:
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
