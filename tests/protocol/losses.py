"""Model checker for lost ranks: explores every interleaving, every order of delivery and every moment of a loss.

The last rank dies in its first rounds, after any of its stores; the others go on without it. They run calls one after
another (`Call`): the halves of a dispatch and the combine of a slot, and checks of their hosts, which agree on a loss
through the store. A kernel is one program, whose warps poll changing words independently.

Only results and aborts travel as messages: a delayed header is the same as a reader that polls later.

Letters: a is a rank, b another, e the epoch of a round, s a slot.
"""

from collections.abc import Iterator

from protocol.ranks import EMPTY, HERE, LATE, OVER, TIMED_OUT, Case, Message, Rank, Slot, State


class Model:
    """The moves of a case."""

    def __init__(self, case: Case) -> None:
        self.case, self.survivors = case, range(case.num_ranks - 1)
        phases = [[(name, a, s) for s in range(case.num_slots) for a in self.survivors] for name in "DCY"]
        self.stores_of_victim = [*phases[0], *phases[1], *phases[2]]

    def first(self) -> State:
        """The state before any call."""
        slots, every = (Slot(),) * self.case.num_slots, tuple(range(self.case.num_ranks))
        ranks = tuple(Rank(slots=slots, active=every) for _ in self.survivors)
        return State(ranks, frozenset(), frozenset(), frozenset(), frozenset(), 0, False)

    def moves(self, state: State) -> Iterator[State | str]:
        """Every state that one step leads to, or the error of the step."""
        for message in state.flight:
            if not any(other[:4] == message[:4] and other[4] < message[4] for other in state.flight):
                yield self.deliver(state, message)
        for a in self.survivors:
            yield from self.steps(state, a)
        if not state.dead:
            yield state._replace(dead=True)
            if state.lived < len(self.stores_of_victim):
                yield from self.live(state)
        elif self.case.wakes and any(rank.agreed for rank in state.ranks) and state.woke < 2 * len(self.survivors):
            yield self.wake(state)

    def live(self, state: State) -> Iterator[State]:
        """The next store of the last rank; those of its combine once all other ranks have sent their dispatch."""
        name, a, s = self.stores_of_victim[state.lived]
        if name == "D" or all(rank.slots[s].told for rank in state.ranks):
            words = self.written(state.words, (name, a, self.case.victim, s), 1)
            yield state._replace(words=words, lived=state.lived + 1)

    def wake(self, state: State) -> State:
        """The next store of the last rank after the others have masked it out: a header or an abort word at a rank."""
        kind, a = divmod(state.woke, len(self.survivors))
        state, victim, rank = state._replace(woke=state.woke + 1), self.case.victim, state.ranks[a]
        if kind == 0:  # of a round with another bound, when that is the stride
            writer = 1 - a if self.case.broken == "a-bound-as-stride" else victim
            return state._replace(words=self.written(state.words, ("D", a, writer, 0), 1))
        heard = victim in rank.active or self.case.broken == "hears-who-is-masked-out"
        return self.put(state, a, rank._replace(abort=rank.abort or heard))

    def deliver(self, state: State, message: Message) -> State:
        """Deliver a store."""
        writer, name, owner, s, value = message
        state = state._replace(flight=state.flight - {message})
        if name == "A":
            return self.put(state, owner, state.ranks[owner]._replace(abort=True))
        return state._replace(words=self.written(state.words, (name, owner, writer, s), value))

    @staticmethod
    def written(words: frozenset, word: tuple[str, int, int, int], value: int) -> frozenset:
        """The words after a store."""
        return frozenset(other for other in words if other[:4] != word) | ({(*word, value)} if value else set())

    @staticmethod
    def value(state: State, name: str, a: int, b: int, s: int) -> int:
        """The value of a word of rank a that rank b writes."""
        return next((word[4] for word in state.words if word[:4] == (name, a, b, s)), 0)

    @staticmethod
    def put(state: State, a: int, rank: Rank) -> State:
        """The state with rank a replaced."""
        return state._replace(ranks=(*state.ranks[:a], rank, *state.ranks[a + 1 :]))

    def is_off(self, rank: Rank, s: int, e: int) -> bool:
        """Whether a round is skipped: a rank has timed out, or all have agreed to resume later."""
        resume = 0 if self.case.broken == "rounds-behind-are-exchanged" else rank.slots[s].resume
        return rank.abort or e < resume

    def send(self, state: State, a: int, names: str, s: int, e: int) -> State:
        """Store to the other survivors: results and aborts become messages, headers arrive at once."""
        for b in self.survivors:
            for name in names if b != a else "":
                if name in "YA":
                    state = state._replace(flight=state.flight | {(a, name, b, s, e)})
                else:
                    state = state._replace(words=self.written(state.words, (name, b, a, s), e))
        return state

    def steps(self, state: State, a: int) -> Iterator[State | str]:
        """The steps that rank a may take."""
        case, rank = self.case, state.ranks[a]
        if case.agrees and not rank.abort and self.called(state, rank):
            yield self.put(state, a, rank._replace(abort=True))  # by the watchdog thread
        if rank.at == len(case.calls):
            return
        op, s = case.calls[rank.at]
        if rank.warps:
            yield from self.look(state, a)
        elif op in ("look", "check"):
            yield from self.settle(state, a, must=op == "check")
        elif op == "send":
            e = rank.slots[s].done + 1
            after = rank.with_slot(s, sent=e, dest_rank_mask=tuple(b for b in rank.active if b != a))._replace(
                at=rank.at + 1
            )
            if self.is_off(rank, s, e):
                yield self.put(state, a, after)
            else:
                yield self.send(self.put(state, a, after.with_slot(s, told=True)), a, "D", s, e)
        elif op == "receive":
            e = rank.slots[s].done + 1
            if self.is_off(rank, s, e):
                yield self.end_wait(state, a, fine=False)
            else:
                yield self.put(state, a, self.waiting(rank, "D"))
        else:
            yield self.begin_combine(state, a, s)

    def waiting(self, rank: Rank, part: str) -> Rank:
        """A rank whose warps begin to poll."""
        return rank._replace(part=part, warps=(("looks", LATE),) * self.case.num_warps)

    def begin_combine(self, state: State, a: int, s: int) -> State:
        """Send the combine header, which says that the dispatch has been read, and the results."""
        rank = state.ranks[a]
        slot = rank.slots[s]
        if self.is_off(rank, s, slot.begun):
            return self.end_wait(state, a, fine=False)
        state = self.send(state, a, "CY" if slot.fine else "C", s, slot.begun)
        return self.put(state, a, self.waiting(rank, "C"))

    def awaited(self, state: State, a: int) -> list[tuple[str, int]]:
        """The words that rank a still waits for: name and writer."""
        rank = state.ranks[a]
        _, s = self.case.calls[rank.at]
        slot = rank.slots[s]
        if rank.part == "Y":
            return [("Y", b) for b in slot.dest_rank_mask if self.value(state, "Y", a, b, s) == EMPTY]
        e = slot.done + 1 if rank.part == "D" else slot.begun
        others = (b for b in rank.active if b != a)
        return [(rank.part, b) for b in others if self.value(state, rank.part, a, b, s) != e]

    def look(self, state: State, a: int) -> Iterator[State | str]:
        """A warp polls, or all warps agree on their results."""
        case, rank = self.case, state.ranks[a]
        alone = case.broken == "warps-decide-alone"
        late = bool(self.awaited(state, a))
        for w, (where, _) in enumerate(rank.warps):
            if where == "looks":
                seen = [HERE if not late else OVER if rank.abort else LATE]
                if len(rank.warps) == 1 and seen == [LATE]:
                    seen = []  # it polls again
                if late and not rank.abort and self.may_give_up(state, a):
                    seen.append(TIMED_OUT)
                for found in seen:
                    there = "left" if alone and found != LATE else "meets"
                    warps = (*rank.warps[:w], (there, found), *rank.warps[w + 1 :])
                    yield self.put(state, a, rank._replace(warps=warps))
        found = [found for where, found in rank.warps if where in ("meets", "left")]
        if len({where for where, _ in rank.warps}) == 1 and found:  # all are at the same barrier
            if max(found) == TIMED_OUT:
                yield self.end_wait(self.give_up(state, a), a, fine=False)
            elif max(found) == OVER:
                yield self.end_wait(state, a, fine=False)
            elif LATE in found:
                yield self.put(state, a, self.waiting(rank, rank.part))
            else:
                yield from self.go_on(state, a)

    def may_give_up(self, state: State, a: int) -> bool:
        """Whether a wait may time out: only if a rank is lost."""
        bounded = a in self.case.may_time_out and self.case.broken != "waits-without-a-bound"
        return bounded and state.dead and self.case.victim in state.ranks[a].active

    def give_up(self, state: State, a: int) -> State:
        """Time out: set the abort word here and on every rank."""
        state = self.put(state, a, state.ranks[a]._replace(abort=True))
        if self.case.broken == "tells-nobody":
            return state
        return self.send(state, a, "A", 0, 0)

    def go_on(self, state: State, a: int) -> Iterator[State | str]:
        """Continue after a wait for which all words have arrived."""
        rank = state.ranks[a]
        _, s = self.case.calls[rank.at]
        slot = rank.slots[s]
        if rank.part == "C" and slot.fine:
            yield self.put(state, a, self.waiting(rank, "Y"))
        elif rank.part == "Y":
            for b in slot.dest_rank_mask:
                e = self.value(state, "Y", a, b, s)
                if e != slot.begun:
                    yield "stale Y" if e < slot.begun else "Y of the next round"
                    return
                state = state._replace(words=self.written(state.words, ("Y", a, b, s), EMPTY))
            yield self.end_wait(state, a, fine=True)
        else:
            yield self.end_wait(state, a, fine=rank.part == "D")

    def end_wait(self, state: State, a: int, *, fine: bool) -> State:
        """End the kernel."""
        rank = state.ranks[a]
        op, s = self.case.calls[rank.at]
        slot = rank.slots[s]
        if op == "receive":
            rank = rank.with_slot(s, begun=slot.done + 1, fine=fine)
        else:
            resume = 0 if slot.resume == slot.begun else slot.resume
            rank = rank.with_slot(s, done=slot.begun, resume=resume, fine=False, right=fine)
        return self.put(state, a, rank._replace(at=rank.at + 1, part="begin", warps=()))

    def called(self, state: State, rank: Rank) -> bool:
        """Whether another rank waits for this one's vote."""
        return any(number == rank.agreed for number, _, _ in state.votes)

    def settle(self, state: State, a: int, *, must: bool) -> Iterator[State | str]:
        """The host checks the abort word and, if it is set, agrees with the others on how to go on."""
        case, rank = self.case, state.ranks[a]
        k, survivors = rank.agreed, self.survivors
        if rank.part == "begin":
            if not (rank.abort and must):  # a "look" may still miss the abort
                yield self.put(state, a, rank._replace(at=rank.at + 1))
            rested = case.broken == "votes-before-its-stores-have-landed" or all(m[0] != a for m in state.flight)
            if rank.abort and not case.agrees:
                yield self.put(state, a, rank._replace(at=len(case.calls)))  # raises
            elif rank.abort and k == 2:  # only one rank is lost, so one agreement is enough
                yield "agreements without end"
            elif rank.abort and rested:
                received = case.broken == "votes-for-what-it-has-received"
                epochs = tuple(slot.begun if received else slot.sent for slot in rank.slots)
                voted = state._replace(votes=state.votes | {(k, a, epochs)})
                yield self.put(voted, a, rank._replace(part="voted"))
        elif rank.part == "voted":
            votes = {b: epochs for number, b, epochs in state.votes if number == k}
            if set(survivors) <= set(votes):
                yield self.reset(state, a, votes)
        elif set(survivors) <= {b for number, b in state.clean if number == k - 1} or case.broken == "goes-on-alone":
            yield self.put(state, a, rank._replace(part="begin"))

    def reset(self, state: State, a: int, votes: dict[int, tuple[int, ...]]) -> State:
        """Adopt the decision and clean this rank's memory."""
        rank, broken = state.ranks[a], self.case.broken
        for s in range(self.case.num_slots):
            last = votes[a][s] if broken == "resumes-where-it-stands" else max(epochs[s] for epochs in votes.values())
            rank = rank.with_slot(s, resume=last + 1)
        active = rank.active if broken == "masks-nobody" else tuple(b for b in rank.active if b in votes)
        if broken != "results-stay":
            state = state._replace(words=frozenset(w for w in state.words if w[:2] != ("Y", a)))
        aborted = broken == "the-abort-stays"
        after = rank._replace(active=active, abort=aborted, agreed=rank.agreed + 1, part="clean")
        return self.put(state._replace(clean=state.clean | {(rank.agreed, a)}), a, after)

    def stuck(self, state: State) -> set[str]:
        """The errors of a state without moves: waits that never end, or wrong results if all ranks have ended."""
        case, found = self.case, set[str]()
        for a, rank in enumerate(state.ranks):
            if rank.at < len(case.calls):
                apart = len({where for where, _ in rank.warps}) > 1
                never = sorted({name for name, _ in self.awaited(state, a)}) if rank.warps else ["a vote"]
                found |= {"warps never meet"} if apart else {f"{name} never comes" for name in never}
            elif case.agrees and not all(slot.right for slot in rank.slots):
                found.add("a round after the loss fails")
        return found
