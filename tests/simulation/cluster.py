"""One run: a cluster drawn from a seed, its requests, its faults, and what must hold in it and at its end.

Workers join late, leave, crash, freeze, drain and come back as somebody else; routers crash and freeze. Every router
learns of it in its own time.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from engine.core import EngineCore, EngineLimits
from engine.preemption import PreemptionPolicy
from engine.scripted import ScriptedRunner
from kvferry.sampling import Finish, FinishKind
from router.lifecycle import RequestLifecycle
from tests.simulation.decode_shell import DecodeHost, DecodeWorker
from tests.simulation.network import PROGRESS_TIMEOUT_NS, Life, LinkFaults, Network
from tests.simulation.oracle import BLOCK_SIZE, SCRIPT, BlockOracle
from tests.simulation.prefill_shell import PrefillCall, PrefillWorker
from tests.simulation.router_shell import LifecycleRun, Membership, NewLifecycle, Outages, RequestRun, Router
from tests.simulation.shipment import FrameFaults
from tests.simulation.workload import LEAST_BLOCKS, RequestPlan, draw_requests
from tests.simulation.world import MS, InvariantViolation, World
from tests.support.drafts import scripted_drafts, speculate

MAX_EVENTS = 200_000
"""A run has a few thousand; one that has this many goes round in circles."""

TIME_LIMIT_NS = 5_000 * MS
"""Longest a request may take in virtual time, faults and all."""

NEVER_NS = 1 << 62

Worker = PrefillWorker | DecodeWorker


@dataclass(frozen=True, slots=True)
class Parts:
    """What the cluster is made of; tests plant their bugs here."""

    new_lifecycle: NewLifecycle = RequestLifecycle
    new_lifecycle_run: type[LifecycleRun] = LifecycleRun
    new_decode_host: type[DecodeHost] = DecodeHost
    new_prefill_call: type[PrefillCall] = PrefillCall


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What goes wrong in a run, drawn from the seed."""

    link: LinkFaults
    frames: FrameFaults
    num_crashes: int
    num_freezes: int
    num_drains: int
    num_router_crashes: int

    @staticmethod
    def draw(rng: random.Random) -> FaultPlan:
        """Half of the runs have one kind of fault, the others none or several."""
        return FaultPlan(
            LinkFaults(
                break_probability=rng.choice((0.0, 0.0, 0.03, 0.1)), slow_probability=rng.choice((0.0, 0.01, 0.05))
            ),
            FrameFaults(
                corrupt_probability=rng.choice((0.0, 0.0, 0.01, 0.05)),
                duplicate_probability=rng.choice((0.0, 0.0, 0.0, 0.002)),
            ),
            num_crashes=rng.choice((0, 0, 1, 1, 2, 3)),
            num_freezes=rng.choice((0, 0, 0, 1, 2)),
            num_drains=rng.choice((0, 0, 0, 1, 3)),
            num_router_crashes=rng.choice((0, 0, 0, 1, 2)),
        )


@dataclass(slots=True)
class RunResult:
    """What one run was like."""

    seed: int
    counts: Counter[str]
    violation: str | None = None
    trace: list[str] = field(default_factory=list)


class Cluster:
    """Routers, workers and clients, from a seed.

    Args:
        seed: decides everything.
        parts: what it is made of.
    """

    def __init__(self, seed: int, parts: Parts | None = None) -> None:
        self.world = World(seed)
        self._parts = parts or Parts()
        self._rng = self.world.rng
        self._plan = FaultPlan.draw(self._rng)
        self._network = Network(self.world, self._plan.link)
        self._oracle = BlockOracle()
        self._limits = self._draw_limits()
        self._num_prefill_blocks = LEAST_BLOCKS + self._rng.choice((0, 0, 0, 2, 8))
        self._num_decode_blocks = LEAST_BLOCKS + self._rng.choice((0, 0, 1, 2, 4, 8))
        self._reship_probability = self._rng.choice((0.0, 0.0, 0.5))
        is_local = self._rng.random() < 0.08
        self._draft_rng = random.Random(f"speculation {seed}")  # apart, as what follows
        self._speculates = self._draft_rng.random() < 0.3
        prefill = () if is_local else tuple(f"P{index}" for index in range(self._rng.choice((1, 1, 2, 3))))
        decode = tuple(f"D{index}" for index in range(self._rng.choice((1, 1, 2, 3))))
        routers = [f"router{index}" for index in range(self._rng.choice((1, 1, 2, 3)))]
        self._routers = {name: Router(Life(self.world, name, 1), Membership(prefill, decode)) for name in routers}
        self._told_at_ns: dict[tuple[str, str], int] = {}  # by router and worker: when it learns the last thing told
        self._outages = Outages()
        self._epochs = 0
        self._workers: dict[str, Worker] = {}
        for name in (*prefill, *decode):
            self._start(name)
        self._gone: set[str] = set()  # workers that left for good
        self._schedule_joins_and_leaves(random.Random(f"membership {seed}"), prefill, decode)
        self._runs = [self._draw_run(plan) for plan in draw_requests(self._rng, self._limits.max_running)]
        self._schedule_faults()

    # -- building ----------------------------------------------------------------------------------------------------

    def _draw_limits(self) -> EngineLimits:
        budget = self._rng.choice((4, 8, 16, 64))
        return EngineLimits(
            max_batched_tokens=budget,
            max_running=min(budget, self._rng.choice((2, 4, 8))),
            max_chunk_tokens=self._rng.choice((None, 3, 8)),
            num_watermark_blocks=self._rng.choice((0, 1, 2)),
            prefix_caching=self._rng.random() < 0.9,
            digests=True,
            num_swap_blocks=self._rng.choice((0, 0, 2, 8, 32)),
            preemption=PreemptionPolicy(self._rng.choice(("recompute", "swap"))),
        )

    def _start(self, name: str) -> None:
        """A new life of a worker, which knows nothing of the one before."""
        self._epochs += 1
        life = Life(self.world, name, self._epochs)
        num_blocks = self._num_prefill_blocks if name.startswith("P") else self._num_decode_blocks
        runner = ScriptedRunner(SCRIPT, num_blocks=num_blocks, block_size=BLOCK_SIZE)
        core = EngineCore(runner, self._limits, clock_ns=lambda: self.world.now_ns)
        if self._speculates:
            speculate(core, scripted_drafts(self._draft_rng, SCRIPT))
        worker: Worker
        if name.startswith("P"):
            worker = PrefillWorker(life, core, self._oracle, self._network, self._plan.frames)
            worker.new_call = self._parts.new_prefill_call
            worker.reship_probability = self._reship_probability
        else:
            worker = DecodeWorker(life, core, self._oracle, self._network, self._plan.frames)
            worker.new_host = self._parts.new_decode_host
            worker.mover.new_call = self._parts.new_prefill_call
            worker.mover.reship_probability = self._reship_probability
        self._workers[name] = worker
        self._network.listen(name, life, worker.accept)

    def _draw_run(self, plan: RequestPlan) -> RequestRun:
        some_core = next(iter(self._workers.values())).core
        for token_ids in plan.computed:
            self._oracle.expect(some_core.hash_root(cache_salt=plan.cache_salt), token_ids)
        run = RequestRun(plan, tuple(self._routers.values()), self._network, self._outages, self._parts)
        self.world.at(plan.arrival_ns, run.start)
        if plan.interruption is not None:
            self.world.at(plan.interrupted_at_ns, self._interrupt, run)
        return run

    def _interrupt(self, run: RequestRun) -> None:
        """A frozen router learns of it later; a client without a router acts by itself."""
        router = run.router
        if router is None:
            run.interrupt()
        else:
            router.life.run(run.interrupt)

    def _schedule_joins_and_leaves(self, rng: random.Random, *roles: tuple[str, ...]) -> None:
        """Of each role one worker is there from the beginning to the end; of the others some come late, some leave.

        Drawn apart, so that this shifts nothing else that a seed decides.
        """
        for names in roles:
            for name in names[1:]:
                if rng.random() < 0.25:
                    self._join_late(name, rng.randrange(60 * MS))
                if rng.random() < 0.25:
                    self.world.at(rng.randrange(20 * MS, 120 * MS), self._leave, name)

    def _join_late(self, name: str, at_ns: int) -> None:
        self.world.counts["late joins"] += 1
        self._workers[name].life.crash(is_noticed=True)
        for router in self._routers.values():
            router.membership.set_up(name, is_up=False)
        self._outages.add(name, at_ns)
        self.world.at(at_ns, self._restart, name)

    # -- faults ------------------------------------------------------------------------------------------------------

    def _schedule_faults(self) -> None:
        names = list(self._workers)
        until_ns = max(run.plan.arrival_ns for run in self._runs) + 40 * MS
        for _ in range(self._plan.num_crashes):
            self.world.at(self.world.below(until_ns), self._crash, self._rng.choice(names))
        for _ in range(self._plan.num_freezes):
            is_router = self._rng.random() < 0.1
            name = self._rng.choice(list(self._routers) if is_router else names)
            self.world.at(self.world.below(until_ns), self._freeze, name)
        for _ in range(self._plan.num_drains):
            self.world.at(self.world.below(until_ns), self._drain_some)
        for _ in range(self._plan.num_router_crashes):
            self.world.at(self.world.below(until_ns), self._crash_router, self._rng.choice(list(self._routers)))

    def _crash(self, name: str) -> None:
        life = self._workers[name].life
        if not life.is_alive:
            return
        self.world.counts["crashes"] += 1
        self._blame_all(life, f"{name} crashes")
        is_noticed = self.world.happens(0.8)
        life.crash(is_noticed=is_noticed)
        detect_ns = self.world.below(5 * MS) if is_noticed else PROGRESS_TIMEOUT_NS
        down_ns = self.world.between(1 * MS, 200 * MS)
        self._outages.add(name, self.world.now_ns + down_ns)
        self._tell_routers(detect_ns, detect_ns, name, is_up=False)
        self.world.after(down_ns, self._restart, name)

    def _crash_router(self, name: str) -> None:
        """Its requests go on elsewhere; it comes back with nothing but its configuration."""
        router = self._routers[name]
        if not router.life.is_alive:
            return
        self.world.counts["router crashes"] += 1
        self.world.note(name, "crashes")
        self._blame_all(router.life, f"{name} crashes")
        router.crash()
        self.world.after(self.world.between(1 * MS, 100 * MS), self._restart_router, name)

    def _restart_router(self, name: str) -> None:
        self.world.note(name, "restarts")
        router = self._routers[name]
        router.life = Life(self.world, name, router.life.epoch + 1)
        for worker in self._workers:
            router.membership.set_up(worker, is_up=False)
            self._reach(router, router.life, worker)

    def _reach(self, router: Router, life: Life, name: str) -> None:
        """A router that has just begun knows a worker when it answers; of what befalls it later it is told."""
        worker = self._workers[name]
        if not worker.life.is_alive or worker.is_draining or router.life is not life:
            return  # it is told when the worker serves again
        if worker.life.is_frozen:
            self._outages.add(name, self.world.now_ns + 10 * MS)
            self.world.after(10 * MS, self._reach, router, life, name)
        else:
            router.membership.set_up(name, is_up=True)

    def _drain_some(self, num_looks: int = 20) -> None:
        """A decode worker that has something in its batch drains, or any worker when none has had for a while."""
        well = [name for name, worker in self._workers.items() if worker.life.is_alive and not worker.is_draining]
        busy = [name for name in well if name.startswith("D") and self._workers[name].core.scheduler.running]
        if not busy and num_looks:
            self.world.after(2 * MS, self._drain_some, num_looks - 1)
        elif well:
            self._drain(self._rng.choice(busy or well))

    def _drain(self, name: str) -> None:
        """Nothing new; past the grace what still runs moves; then it serves again, or another life takes its place."""
        worker = self._workers[name]
        if not worker.life.is_alive or worker.is_draining:
            return
        self.world.counts["drains"] += 1
        self.world.note(name, "drains")
        worker.is_draining = True
        grace_ns = self.world.below(20 * MS) if self.world.happens(0.3) else self.world.below(2 * MS)
        rest_ns = self.world.below(50 * MS)
        self._outages.add(name, self.world.now_ns + grace_ns + rest_ns + PROGRESS_TIMEOUT_NS)
        self._tell_routers(0, 5 * MS, name, is_up=False)
        self.world.after(grace_ns, worker.life.run, self._move, worker)
        self.world.after(grace_ns + rest_ns, worker.life.run, self._end_drain, worker)

    def _leave(self, name: str) -> None:
        """It drains and ends, and nobody takes its place."""
        self._gone.add(name)
        self._outages.add(name, NEVER_NS)
        self.world.counts["leaves"] += 1
        self._drain(name)

    def _move(self, worker: Worker) -> None:
        self._blame_all(worker.life, f"{worker.life.name} has drained")
        worker.move_calls()

    def _end_drain(self, worker: Worker) -> None:
        name = worker.life.name
        if name in self._gone or self.world.happens(0.5):
            self._crash(name)  # nothing runs there any more but moves
            return
        self.world.note(name, "serves again")
        worker.is_draining = False
        self._tell_routers(0, 20 * MS, name, is_up=True)

    def _restart(self, name: str) -> None:
        if name in self._gone:
            return
        self.world.note(name, "restarts")
        self._start(name)
        self._outages.add(name, self.world.now_ns + 20 * MS)
        self._tell_routers(0, 20 * MS, name, is_up=True)

    def _freeze(self, name: str) -> None:
        is_router = name in self._routers
        life = self._routers[name].life if is_router else self._workers[name].life
        if not life.is_alive or life.is_frozen:
            return
        is_long = self.world.happens(0.6)
        low, high = (0.7, 2.5) if is_long else (0.01, 0.4)
        duration_ns = self.world.between(low * PROGRESS_TIMEOUT_NS, high * PROGRESS_TIMEOUT_NS)
        self.world.counts["freezes"] += 1
        self.world.note(name, "freezes for", duration_ns / MS, "ms")
        if is_long:
            self._blame_all(life, f"{name} freezes")
        self._outages.add(name, self.world.now_ns + duration_ns + (PROGRESS_TIMEOUT_NS if is_long else 0))
        life.freeze()
        self.world.after(duration_ns, life.thaw)
        if is_long and not is_router:
            self._tell_routers(PROGRESS_TIMEOUT_NS, PROGRESS_TIMEOUT_NS, name, is_up=False)
            seen_ns = duration_ns + PROGRESS_TIMEOUT_NS
            self._tell_routers(seen_ns, seen_ns, name, is_up=True)

    def _blame_all(self, life: Life, why: str) -> None:
        for tag in {end.tag: None for end in life.ends}:
            self._network.blame(tag, why)

    def _tell_routers(self, low_ns: int, high_ns: int, name: str, *, is_up: bool) -> None:
        """Every router learns of a worker's present life, some time from `low_ns` to `high_ns` from now, in order."""
        epoch = self._workers[name].life.epoch
        for router_name, router in self._routers.items():
            key = (router_name, name)
            at_ns = max(self.world.now_ns + self.world.between(low_ns, high_ns), self._told_at_ns.get(key, 0))
            self._told_at_ns[key] = at_ns
            if is_up:
                self._outages.add(name, at_ns)  # for that router it is not there before
            self.world.at(at_ns, self._see, router, name, epoch, is_up)

    def _see(self, router: Router, name: str, epoch: int, is_up: bool) -> None:
        """What it learns of an earlier life changes nothing."""
        worker = self._workers[name]
        is_wrong = is_up and (not worker.life.is_alive or worker.is_draining)
        if worker.life.epoch == epoch and not is_wrong:
            router.membership.set_up(name, is_up=is_up)

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs to the end; raises InvariantViolation, or what the code under test raised."""
        self.world.run(MAX_EVENTS)
        for run in self._runs:
            self._check_answer(run)
        for worker in self._workers.values():
            self._check_quiet(worker)
        self._count()

    def _check_answer(self, run: RequestRun) -> None:
        plan, name = run.plan, run.plan.request_id
        if not run.has_ended:
            raise InvariantViolation(f"{name} never ended")
        if run.ended_at_ns - plan.arrival_ns > TIME_LIMIT_NS:
            raise InvariantViolation(f"{name} took {(run.ended_at_ns - plan.arrival_ns) / MS:.0f} ms")
        if run.num_open_calls:
            raise InvariantViolation(f"{name} has {run.num_open_calls} calls left open")
        if run.error is None:
            for choice, finish in run.finishes.items():
                self._check_finish(run, choice, finish)

    def _check_finish(self, run: RequestRun, choice: int, finish: Finish) -> None:
        """Nothing missing, nothing too much, and the right reason."""
        plan, received = run.plan.choices[choice], run.received[choice]
        if run.is_interrupted and finish.kind in (FinishKind.CANCELLED, FinishKind.DEADLINE):
            return  # what was emitted was compared as it came
        due, kind = plan.expected, plan.finish
        if plan.stop_after is not None:
            due, kind = plan.expected[: plan.stop_after], Finish(FinishKind.STOP_STRING, stop_string="stop")
        logprob = run.logprobs.get(choice)
        if logprob != plan.cumulative_logprob:
            raise InvariantViolation(
                f"{run.plan.request_id}, choice {choice}, has log-probability {logprob}; "
                f"right is {plan.cumulative_logprob}"
            )
        if finish != kind or tuple(received) != due:
            raise InvariantViolation(
                f"{run.plan.request_id}, choice {choice}, finished with {finish} and {received}; "
                f"right are {kind} and {list(due)}"
            )

    def _check_quiet(self, worker: Worker) -> None:
        """Nothing runs, nothing waits, nothing is held."""
        core, life = worker.core, worker.life
        if not life.is_alive:
            if life.name in self._gone:
                return
            raise InvariantViolation(f"{life.name} did not come back")
        worker.engine.check()
        found = worker.leftovers()
        if core.sequences or core.has_work or core.pool.counts.used:
            found.append(f"sequences {list(core.sequences)}, blocks {core.pool.counts}")
        if not worker.engine.is_idle or life.ends:
            found.append(f"engine idle: {worker.engine.is_idle}, open streams: {[end.tag for end in life.ends]}")
        if found:
            raise InvariantViolation(f"{life.name} still holds something at the end: {'; '.join(found)}")

    def _count(self) -> None:
        counts = self.world.counts
        for run in self._runs:
            counts["requests"] += 1
            counts["attempts"] += run.num_attempts
            counts["choices"] += len(run.plan.choices)
            counts["beam searches"] += run.plan.beam is not None
            counts["beam searches completed"] += run.plan.beam is not None and bool(run.logprobs)
            if run.error is not None:
                counts[f"ended: {type(run.error).__name__}"] += 1
            for finish in run.finishes.values():
                counts[f"ended: {finish.kind.value}"] += 1
        for worker in self._workers.values():
            stats = worker.core.stats()
            counts["steps"] += stats.num_steps
            counts["preemptions"] += stats.num_preemptions
            counts["parked prompts"] += worker.core.memory.num_parked_prompts
            counts["swaps"] += worker.core.memory.num_swap_preemptions
            counts["blocks copied on write"] += worker.core.memory.num_blocks_copied
            counts["cached tokens"] += stats.num_cached_tokens
        counts["events"] += self.world.num_events
        counts["virtual ms"] += self.world.now_ns // MS


def run_seed(seed: int, parts: Parts | None = None) -> RunResult:
    """One run; a violated invariant or an exception of the code under test becomes part of the result."""
    cluster = Cluster(seed, parts)
    try:
        cluster.run()
    except Exception as error:  # noqa: BLE001 - whatever the code under test raises is a finding
        violation = f"{type(error).__name__}: {error}"
        return RunResult(seed, cluster.world.counts, violation, cluster.world.trace())
    return RunResult(seed, cluster.world.counts)
