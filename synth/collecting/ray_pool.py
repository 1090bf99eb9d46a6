"""Workers as Ray actors, one for each GPU of a cluster; the driver alone writes the journal."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Sequence
from typing import Any

from synth.collecting.pools import Died, Event
from synth.collecting.runner import RunnerSpec
from synth.collecting.worker import Item, Worker
from synth.errors import MissingDependencyError, SynthError


class RayPool:
    """One actor for each GPU of a Ray cluster; see :class:`synth.collecting.pools.Pool`.

    Where the runner needs no GPU there is one for each CPU.

    `synth` must be installed on every node. An actor that is lost with its node is started again as soon as the
    cluster has room for it.

    Parameters
    ----------
    spec : RunnerSpec
        How to make the runners.
    address : str
        Of the cluster, as ``ray.init`` takes it; ``"local"`` starts one on this machine.

    Raises
    ------
    SynthError
        When Ray isn't installed, the cluster can't be reached, or has no GPU.
    """

    def __init__(self, spec: RunnerSpec, address: str) -> None:
        try:
            import ray
        except ImportError:
            raise MissingDependencyError("--ray needs Ray; install it with: pip install 'synth[ray]'") from None
        self._ray: Any = ray
        self._spec = spec
        self._ours = not ray.is_initialized()
        if self._ours:
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except Exception as e:
                raise SynthError(f"can't reach the Ray cluster {address}: {' '.join(str(e).split())}") from e
        resource = "GPU" if spec.gpus else "CPU"
        count = int(self._ray.cluster_resources().get(resource, 0))
        if count < 1:
            self.close()
            raise SynthError(f"the Ray cluster {address} has no {resource}; start its nodes with some")
        self._names = tuple(f"ray{i}" for i in range(count))
        # A restarted actor would begin without its weights and its item: the run starts new ones itself.
        self._actor_class: Any = ray.remote(num_gpus=spec.gpus, num_cpus=1, max_restarts=0, max_task_retries=0)(Worker)
        self._actors: dict[str, Any] = {}
        self._said: queue.SimpleQueue[tuple[str, Any, Event]] = queue.SimpleQueue()
        self._kept: list[tuple[str, Any, Event]] = []

    @property
    def slots(self) -> Sequence[str]:
        """See :class:`synth.collecting.pools.Pool`."""
        return self._names

    def start(self, slot: str) -> None:
        """See :class:`synth.collecting.pools.Pool`."""
        actor = self._actor_class.remote(self._spec)
        self._actors[slot] = actor
        self._follow(slot, actor, actor.start.options(num_returns="streaming").remote())

    def send(self, slot: str, item: Item | None) -> None:
        """See :class:`synth.collecting.pools.Pool`."""
        actor = self._actors[slot]
        stream = (actor.finish if item is None else actor.run).options(num_returns="streaming")
        self._follow(slot, actor, stream.remote() if item is None else stream.remote(item))

    def events(self, timeout: float) -> list[tuple[str, Event]]:
        """See :class:`synth.collecting.pools.Pool`."""
        self._fetch(timeout if not self._kept else 0.0)
        kept, self._kept = self._kept, []
        return [(slot, event) for slot, actor, event in kept if self._is_of(slot, actor, event)]

    def kill(self, slot: str) -> list[Event]:
        """See :class:`synth.collecting.pools.Pool`."""
        actor = self._actors.pop(slot, None)
        if actor is None:
            return []
        with contextlib.suppress(Exception):
            self._ray.kill(actor)
        self._fetch(0.0)
        mine: list[Event] = [event for _, of, event in self._kept if of is actor and not isinstance(event, Died)]
        self._kept = [entry for entry in self._kept if entry[1] is not actor]
        return mine

    def close(self) -> None:
        """See :class:`synth.collecting.pools.Pool`; leaves the cluster if this pool had joined it."""
        for slot in list(getattr(self, "_actors", {})):
            self.kill(slot)
        if self._ours:
            self._ray.shutdown()

    def _fetch(self, timeout: float) -> None:
        with contextlib.suppress(queue.Empty):
            if timeout:
                self._kept.append(self._said.get(timeout=timeout))
            while True:
                self._kept.append(self._said.get_nowait())

    def _is_of(self, slot: str, actor: Any, event: Event) -> bool:
        """Say whether an event comes from the slot's present actor; its death takes it out."""
        if self._actors.get(slot) is not actor:
            return False
        if isinstance(event, Died):
            del self._actors[slot]
            # It may only be out of reach; two workers must not share a GPU.
            with contextlib.suppress(Exception):
                self._ray.kill(actor)
        return True

    def _follow(self, slot: str, actor: Any, stream: Any) -> None:
        """Pass a stream of messages on, in a thread of its own."""

        def follow() -> None:
            try:
                for reference in stream:
                    self._said.put((slot, actor, self._ray.get(reference)))
            except Exception as e:
                # Whatever ends the stream early: the actor or its node is gone.
                text = " ".join(str(e).split())
                self._said.put((slot, actor, Died(f"the Ray worker is lost: {text[:200]}", fault=False)))

        threading.Thread(target=follow, name=f"follow {slot}", daemon=True).start()
